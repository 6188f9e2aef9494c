"""Checks of arguments and settings: each raises a ConfigError that names the argument, its value and what to give."""

from __future__ import annotations

import inspect
import os
import reprlib
from pathlib import Path

from aio_ckpt.errors import ConfigError

__all__ = [
    "MAX_SECS",
    "check_callback",
    "check_flag",
    "check_kind",
    "check_path",
    "check_seconds",
    "check_wait",
    "is_among",
    "is_path",
]
__all__ += ["shown"]

MAX_SECS = 1e9
"""Longest time, in seconds, that every wait of the operating system accepts."""
_REPR = reprlib.Repr()
_REPR.maxother = 200


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message, of at most 200 characters. Never raises.

    The repr of a caller's value may raise, such as that of an int of 5,000 digits.
    """
    return _REPR.repr_instance(value, 1)


def check_seconds(name: str, value: object) -> None:
    """Raise ConfigError unless ``value``, called ``name``, is a number of seconds above 0 and at most ``MAX_SECS``."""
    # The value is only compared: a nan fails comparisons, and an int of a thousand digits cannot become a float.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_SECS:
        told = "so large a number" if isinstance(value, int) and value > MAX_SECS else shown(value)
        raise ConfigError(f"{name}={told}: give a finite number of seconds above 0")


def check_wait(name: str, value: object) -> None:
    """Raise ConfigError unless ``value``, called ``name``, is None (no limit) or a number of seconds.

    A negative number is allowed: it is the time left until a deadline that has passed.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ConfigError(f"{name}={shown(value)}: give a number of seconds, or None for as long as it takes")


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise ConfigError unless ``value``, called ``name``, is None or a ``kind``."""
    # A class itself is refused, because it has the methods of a protocol, too. ``isinstance`` alone does not do: from
    # Python 3.12 on it overlooks methods that a wrapper passes on.
    is_one = isinstance(value, kind) or (getattr(kind, "_is_protocol", False) and _has_members_of(value, kind))
    if value is not None and (isinstance(value, type) or not is_one):
        raise ConfigError(f"{name}={shown(value)}: give one of type {kind.__name__}, or leave it away")


def _has_members_of(value: object, protocol: type) -> bool:
    return all(hasattr(value, name) for name in vars(protocol) if not name.startswith("_"))


def check_path(name: str, value: object) -> Path:
    """Return ``value``, called ``name``, as an absolute path, or raise ConfigError. Nothing is looked up."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(text, str) or not is_path(text):
        raise ConfigError(f"{name}={shown(value)}: give the path of a checkpoint's directory")
    return Path(text).absolute()


def is_path(text: str) -> bool:
    """Return whether a file system can hold this name."""
    try:
        return bool(text.encode(errors="surrogateescape")) and "\0" not in text
    except UnicodeEncodeError:  # a lone surrogate
        return False


def check_callback(name: str, value: object) -> None:
    """Raise ConfigError unless ``value``, called ``name``, is None or a function that is done when it returns."""
    is_async = inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(getattr(value, "__call__", None))  # noqa: B004
    if value is not None and (not callable(value) or isinstance(value, type) or is_async):
        raise ConfigError(f"{name}={shown(value)}: give a plain function (no coroutine function) of one argument")


def check_flag(name: str, value: object) -> None:
    """Raise ConfigError unless ``value``, called ``name``, is True or False: ``"no"`` would count as True."""
    if type(value) is not bool:
        raise ConfigError(f"{name}={shown(value)}: give True or False")


def is_among(value: object, allowed: tuple[str, ...]) -> bool:
    """Return whether ``value`` is one of the strings ``allowed``."""
    # The type is checked first, because an array would be compared element by element.
    return isinstance(value, str) and value in allowed
