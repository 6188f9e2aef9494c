"""The exception tree: what a trainer catches is where it looks for it, and is also the builtin that it refines."""

from __future__ import annotations

import aio_ckpt
from aio_ckpt import errors
from aio_ckpt.errors import AioCkptError

PUBLIC = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, AioCkptError)]


def test_every_error_is_importable_from_the_package() -> None:
    assert len(PUBLIC) > 20
    for error in PUBLIC:
        assert error.__name__ in errors.__all__
        assert error.__name__ in aio_ckpt.__all__
        assert getattr(aio_ckpt, error.__name__) is error


def test_the_package_lists_what_it_exports_once() -> None:
    assert len(aio_ckpt.__all__) == len(set(aio_ckpt.__all__))
    assert all(hasattr(aio_ckpt, name) for name in aio_ckpt.__all__)


def test_every_error_is_also_a_builtin_one_and_none_is_beyond_except_exception() -> None:
    for error in PUBLIC:
        builtin = [kind for kind in error.__mro__ if kind.__module__ == "builtins"]
        assert Exception in builtin
        assert error is AioCkptError or len(builtin) > builtin.index(Exception) + 1 > 1, error
