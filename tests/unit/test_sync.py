"""The sync engine has the calls of the async engine: docstrings, arguments and results."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from aio_ckpt import CheckpointEngine, SyncCheckpointEngine
from aio_ckpt.engine.engine import BaseEngine

STEPS = ("steps", "latest_step", "rollback", "protect", "unprotect", "protected_steps")
METHODS = ("ready", "load", "read", "delete", "close", *STEPS)


def own(engine_class: type, name: str) -> Any:
    return vars(engine_class)[name]


@pytest.mark.parametrize("name", METHODS)
def test_both_engines_take_and_return_the_same(name: str) -> None:
    asynchronous = inspect.signature(own(CheckpointEngine, name))
    assert inspect.signature(own(SyncCheckpointEngine, name)).parameters == asynchronous.parameters
    if name not in ("ready", "close"):
        assert asynchronous.return_annotation.startswith("PendingCall[")
        assert own(SyncCheckpointEngine, name).__doc__ == own(CheckpointEngine, name).__doc__


def test_no_call_of_the_async_engine_that_is_not_awaited_waits_for_the_disk_beyond_the_order_of_saves() -> None:
    plain = {name for name, value in vars(BaseEngine).items() if inspect.isfunction(value) and not name.startswith("_")}
    in_order, without_a_disk = {"save", "save_file", "remove", "prepare"}, {"guard", "clear_cache", "stats", "agree"}
    assert plain == in_order | without_a_disk | {"on_preemption", "terminate"}


def test_no_method_of_an_engine_is_left_out_here() -> None:
    of_sync = {name for name, value in vars(SyncCheckpointEngine).items() if inspect.isfunction(value)}
    assert {name for name in of_sync if not name.startswith("_")} == {*METHODS}


def test_every_call_of_an_engine_has_a_docstring_with_its_arguments_and_their_types() -> None:
    for engine_class in (BaseEngine, SyncCheckpointEngine, CheckpointEngine):
        for name, value in vars(engine_class).items():
            if name.startswith("_") or not (isinstance(value, property) or inspect.isfunction(value)):
                continue
            text = value.__doc__ or ""
            assert text, name
            assert not text.startswith("See "), name
            if inspect.isfunction(value) and name == value.__name__:  # not an alias of a private method
                signature = inspect.signature(value)
                annotations = [parameter.annotation for parameter in signature.parameters.values()]
                assert not any(re.search(r"\bobject\b", str(each)) for each in annotations), name
                arguments = [each for each in signature.parameters if each != "self"]
                assert [each for each in arguments if f"\n    {each}: " not in inspect.getdoc(value)] == [], name
