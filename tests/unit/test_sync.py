"""The sync engine tells in an editor what the async engine tells: docstrings, arguments and results."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from aio_ckpt import CheckpointEngine, SyncCheckpointEngine
from aio_ckpt.engine.engine import BaseEngine

STEPS = ("steps", "latest_step", "rollback", "protect", "unprotect", "protected_steps")
METHODS = ("ready", "load", "read", "delete", "close", *STEPS)

WORDS = {
    "": {
        "one root. Usable from any thread and any event loop. Every call that reads or changes the root is awaited, or "
        "its ``result()`` is called in a thread without a loop. ``save``, ``save_file``, ``remove`` and ``prepare`` "
        "take their place in the order of the calls at once, and so wait for the root's lock, ``stall_timeout_secs`` "
        "at most. ": (
            "one root, for a trainer without asyncio. Usable from any thread. What is awaited there blocks here until "
            "it has ended. ``save`` returns a ticket, and its ``result()`` blocks. Otherwise this is "
            ":class:`~aio_ckpt.engine.engine.CheckpointEngine`. "
        )
    },
    "ready": {"Wait until": "Block until"},
    "load": {"A cancelled load returns once": "After Ctrl-C, this ends once"},
    **{name: {} for name in ("read", *STEPS)},
    "delete": {" If the await is cancelled, the deletion goes on.": ""},
    "close": {
        "``async with``": "``with``",
        " of its block, even if the task is cancelled.": " of its block.",
        "If the wait is cancelled here,": "If Ctrl-C ends the wait,",
    },
}
"""By method, "" for the class: what the async engine says, and what the sync engine says in its place."""


def said(thing: object) -> str:
    """The docstring of ``thing`` itself, not of a base, in one line."""
    return " ".join((thing.__doc__ or "").split())


def own(face: type, name: str) -> Any:
    return vars(face)[name] if name else face


@pytest.mark.parametrize("name", WORDS)
def test_both_engines_say_the_same(name: str) -> None:
    expected = said(own(CheckpointEngine, name))
    for asynchronous, blocking in WORDS[name].items():
        assert asynchronous in expected
        expected = expected.replace(asynchronous, blocking)
    assert said(own(SyncCheckpointEngine, name)) == expected


@pytest.mark.parametrize("name", METHODS)
def test_both_engines_take_and_return_the_same(name: str) -> None:
    asynchronous = inspect.signature(own(CheckpointEngine, name))
    blocking = inspect.signature(own(SyncCheckpointEngine, name))
    assert blocking.parameters == asynchronous.parameters
    if inspect.iscoroutinefunction(own(CheckpointEngine, name)):
        assert asynchronous.return_annotation == blocking.return_annotation
    else:
        assert asynchronous.return_annotation == f"PendingCall[{blocking.return_annotation}]"


def test_no_call_of_the_async_engine_that_is_not_awaited_waits_for_the_disk_beyond_the_order_of_saves() -> None:
    plain = {name for name, value in vars(BaseEngine).items() if inspect.isfunction(value) and not name.startswith("_")}
    in_order, without_a_disk = {"save", "save_file", "remove", "prepare"}, {"guard", "clear_cache", "stats", "agree"}
    assert plain == in_order | without_a_disk | {"on_preemption", "terminate"}


def test_no_method_of_an_engine_is_left_out_here() -> None:
    of_sync = {name for name, value in vars(SyncCheckpointEngine).items() if inspect.isfunction(value)}
    assert {name for name in of_sync if not name.startswith("_")} == {*METHODS}


def test_every_call_of_an_engine_has_a_docstring_with_its_arguments_and_their_types() -> None:
    for face in (BaseEngine, SyncCheckpointEngine, CheckpointEngine):
        for name, value in vars(face).items():
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
                assert [each for each in arguments if f"\n            {each}: " not in text] == [], name
