"""Every public argument, given every odd value: it is refused by a typed error that names it, or it is allowed here."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import signal
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gated_storage import TIMEOUT, gated_engine

from aio_ckpt import (
    CheckpointEngine,
    EngineConfig,
    KeepBest,
    PerRank,
    SaveTicket,
    SyncCheckpointEngine,
    UntrustedObject,
)
from aio_ckpt.errors import AioCkptError, BusyError, CheckpointNotFoundError, ConfigError, RootError, StepOrderError
from aio_ckpt.ticket import Milestone
from tests.engine.calls.test_bad_input import everything


class Plain:
    """An object without anything."""


class Mute:
    """An object that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


ODD: dict[str, object] = {
    "None": None,
    "True": True,
    "False": False,
    "0": 0,
    "-1": -1,
    "1": 1,
    "1.5": 1.5,
    "-1.5": -1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "a huge int": 10**5000,
    "a huge negative int": -(10**5000),
    "2**63": 2**63,
    "complex": 1j,
    "text": "no",
    "no text": "",
    "a lone surrogate": "\ud800",
    "NUL": "a\0b",
    "bytes": b"x",
    "a list": ["w"],
    "an empty list": [],
    "a dict": {"w": 1},
    "an empty dict": {},
    "a set": {"w"},
    "an empty tuple": (),
    "a tensor": torch.ones(1),
    "two elements": torch.ones(2),
    "an array": np.ones(2),
    "a numpy int": np.int64(1),
    "a numpy bool": np.bool_(True),
    "a function": len,
    "a class": Plain,
    "an object": Plain(),
    "an object without a repr": Mute(),
}
FLAG, SECS, COUNT, NONE = {"True", "False"}, {"1", "1.5"}, {"1", "a huge int", "2**63"}, frozenset[str]()
CALLABLE = {"None", "a function"}
WAIT = {"None", "0", "-1", "1", "1.5", "-1.5", "inf", "a huge int", "a huge negative int", "2**63"}
STATE = {"w": torch.ones(3)}
Call = Callable[[SyncCheckpointEngine, Any], object]

ARGUMENTS: dict[str, tuple[Call, set[str], str]] = {
    "save(state)": (lambda engine, odd: engine.save(odd), {"a dict"}, "state"),
    "prepare(state)": (lambda engine, odd: engine.prepare(odd), {"a dict"}, "state"),
    "prepare(step)": (lambda engine, odd: engine.prepare(STATE, odd), {"None"}, "step="),
    "save(step)": (lambda engine, odd: engine.save(STATE, odd), {"None"}, "step="),
    "save(path)": (lambda engine, odd: engine.save(STATE, path=odd), {"None", "text"}, "path="),
    "remove(path)": (lambda engine, odd: engine.remove(odd).result(TIMEOUT), set(), "path=|no checkpoint"),
    "save(overwrite)": (lambda engine, odd: engine.save(STATE, overwrite=odd), FLAG, "overwrite="),
    "save(deadline_secs)": (
        lambda engine, odd: engine.save(STATE, deadline_secs=odd), {"None", *SECS}, "deadline_secs="
    ),
    "save(metrics)": (
        lambda engine, odd: engine.save(STATE, metrics=odd), {"None", "a dict", "an empty dict"}, "metrics"
    ),
    "save(files)": (lambda engine, odd: engine.save(STATE, files=odd), {"None", "an empty dict"}, "files"),
    "save(extra)": (lambda engine, odd: engine.save(STATE, extra=odd), {"None", "a dict", "an empty dict"}, "extra="),
    "load(state)": (lambda engine, odd: engine.load(copy.copy(odd)), {"a dict", "an empty dict"}, "state"),
    "load(step)": (lambda engine, odd: engine.load(STATE, odd), {"None", "1", "a numpy int"}, "step"),
    "load(strict)": (lambda engine, odd: engine.load(STATE, strict=odd), FLAG, "strict="),
    "load(allow_missing)": (lambda engine, odd: engine.load(STATE, allow_missing=odd), FLAG, "allow_missing="),
    "load(fallback)": (lambda engine, odd: engine.load(STATE, fallback=odd), FLAG, "fallback="),
    "load(skip_mismatched)": (lambda engine, odd: engine.load(STATE, skip_mismatched=odd), FLAG, "skip_mismatched="),
    "load(skip_untrusted)": (lambda engine, odd: engine.load(STATE, skip_untrusted=odd), FLAG, "skip_untrusted="),
    "load(cast)": (lambda engine, odd: engine.load(STATE, cast=odd), FLAG, "cast="),
    "load(rename)": (
        lambda engine, odd: engine.load(STATE, rename=odd), {"None", "an empty dict"}, "rename=|must be str|len\\(\\)"
    ),
    "load(path)": (lambda engine, odd: engine.load(STATE, path=odd), {"None"}, "path=|no checkpoint"),
    "load(progress)": (lambda engine, odd: engine.load(STATE, progress=odd), CALLABLE, "progress="),
    "read(progress)": (lambda engine, odd: engine.read(progress=odd), CALLABLE, "progress="),
    "read(path)": (lambda engine, odd: engine.read(path=odd), {"None"}, "path=|no checkpoint"),
    "read(skip_untrusted)": (lambda engine, odd: engine.read(skip_untrusted=odd), FLAG, "skip_untrusted="),
    "read(with_report)": (lambda engine, odd: engine.read(with_report=odd), FLAG, "with_report="),
    "read(step)": (lambda engine, odd: engine.read(odd), {"None", "1", "a numpy int"}, "step"),
    "read(only)": (
        lambda engine, odd: engine.read(only=odd), {"None", "a list", "a dict", "a set"}, "only=|named|no leaf|holds"
    ),
    "rollback(step)": (lambda engine, odd: engine.rollback(odd), {"1", "a numpy int"}, "step=|rollback"),
    "delete(step)": (lambda engine, odd: engine.delete(odd, allow_newest=True), {"1", "a numpy int"}, "step=|delete"),
    "delete(allow_newest)": (lambda engine, odd: engine.delete(1, allow_newest=odd), {"True"}, "allow_newest="),
    "protect(step)": (lambda engine, odd: engine.protect(odd), {"1", "a numpy int"}, "step=|protect"),
    "unprotect(step)": (lambda engine, odd: engine.unprotect(odd), {"0", "1", "a numpy int"}, "step="),
    "save_file(obj)": (lambda engine, odd: save_file(engine, odd), {"an empty dict"}, "safetensors file"),
    "save_file(path)": (lambda engine, odd: engine.save_file({}, odd), {"text"}, "path="),
    "save_file(metadata)": (
        lambda engine, odd: save_file(engine, metadata=odd), {"None", "an empty dict"}, "metadata="
    ),
    "save_file(max_shard_bytes)": (
        lambda engine, odd: save_file(engine, max_shard_bytes=odd), {"None", *COUNT}, "max_shard_bytes="
    ),
    "save_file(dtype)": (lambda engine, odd: save_file(engine, dtype=odd), {"None"}, "dtype="),
    "save_file(rename)": (lambda engine, odd: save_file(engine, rename=odd), {"None", "an empty dict"}, "rename="),
    "guard(guarded)": (lambda engine, odd: engine.guard(odd), set(), r"guard\("),
    "on_preemption(signals)": (lambda engine, odd: engine.on_preemption(odd), set(), "signals"),
}  # fmt: skip


def save_file(engine: Any, obj: Any = STATE, **options: Any) -> Any:
    return engine.save_file(obj, engine.root / "w.safetensors", **options)


def refuse(call: Callable[[], object], odd: str, named: str) -> None:
    """``call`` raises an error of ours that says what is wrong; in how many characters is bounded."""
    with pytest.raises(AioCkptError, match=rf"(?s)^[^\n]*({named})") as caught:
        call()
    assert len(str(caught.value)) < 1200, odd
    assert not caught.value.target_modified


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_odd_value_of_an_argument_is_refused_by_name_before_anything_is_touched(root: Path, argument: str) -> None:
    call, allowed, named = ARGUMENTS[argument]
    with SyncCheckpointEngine(root) as engine:
        engine.save(STATE, 1).result(TIMEOUT)
        for odd, value in ODD.items():
            if odd not in allowed:
                before = everything(root)
                refuse(lambda value=value: call(engine, value), odd, named)
                assert everything(root) == before, f"{odd}: something was touched before it was refused"
                assert engine.lifetime.leases == 0
        assert engine.steps() == [1]
        assert engine.save(STATE).result(TIMEOUT).step == 2, "the engine is none the worse for it"


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_what_an_argument_may_be_is_taken(root: Path, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root.parent)
    call, allowed, _ = ARGUMENTS[argument]
    for odd in sorted(allowed):
        with SyncCheckpointEngine(root / odd) as engine:
            engine.save(STATE, 1).result(TIMEOUT)
            before = signal.getsignal(signal.SIGTERM)
            outcome = call(engine, ODD[odd])
            if isinstance(outcome, SaveTicket | Milestone):
                outcome.result(TIMEOUT)
            assert signal.getsignal(signal.SIGTERM) == before


# -- opening ----------------------------------------------------------------------------------------

OPENING: dict[str, tuple[set[str], str, type[AioCkptError]]] = {
    "root": ({"text"}, "root|no file system", RootError),
    "config": ({"None"}, "config=.*EngineConfig", ConfigError),
    "coordinator": ({"None"}, "coordinator=.*Coordinator", ConfigError),
    "storage": ({"None"}, "storage=.*Storage", ConfigError),
}


@pytest.mark.parametrize("engine_class", [CheckpointEngine, SyncCheckpointEngine])
@pytest.mark.parametrize("argument", OPENING)
def test_an_engine_is_not_opened_with_an_odd_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argument: str, engine_class: type
) -> None:
    allowed, named, kind = OPENING[argument]
    monkeypatch.chdir(tmp_path)
    for odd, value in ODD.items():
        if odd not in allowed:
            with pytest.raises(kind, match=named):
                engine_class(**{"root": tmp_path / "root", argument: value})
    assert not list(tmp_path.iterdir())


def test_a_dict_of_settings_is_no_config_and_the_message_says_what_is(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"config=\{'workers': 2\}: give one of type EngineConfig"):
        SyncCheckpointEngine(root, {"workers": 2})  # type: ignore[arg-type]
    assert not root.exists()


# -- settings ---------------------------------------------------------------------------------------

SETTINGS: dict[str, Collection[str]] = {
    **dict.fromkeys(("trusted_objects", "debug"), FLAG),
    **dict.fromkeys(("stall_timeout_secs", "stale_after_secs", "drain_timeout_secs"), SECS),
    **{name: {"None", *COUNT} for name in ("keep_last", "keep_every")},
    "budget_bytes": {"None", *COUNT} - {"1"},
    **dict.fromkeys(
        ("staging", "direct_io", "when_busy", "verify", "on_failure", "differing_replicas", "step_dir", "frozen"), NONE
    ),
    "gather_bytes": {"0", *COUNT},
    "device_copy_bytes": {"0", *COUNT},
    "max_in_flight": COUNT,
    "relink_limit": COUNT,
    "workers": {"1"},
    "max_write_bytes_per_sec": {"None"},
    "thread_nice": {"0", "1"},
    "thread_ioprio": {"None", "0", "1"},
    "keep_best": {"None"},
    "mirror": {"None"},
    "shm_path": {"None", "text"},
    **{name: {"None", "a function"} for name in ("on_commit", "on_error")},
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(EngineConfig)])
def test_an_odd_setting_is_refused_by_name(name: str) -> None:
    needed = {"keep_every": {"keep_last": 1}}.get(name, {})
    for odd, value in ODD.items():
        if odd in SETTINGS[name]:
            EngineConfig(**needed, **{name: value})
        else:
            with pytest.raises(ConfigError, match=rf"^{name}=.*(give|allowed are)"):
                EngineConfig(**needed, **{name: value})


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(KeepBest)])
def test_an_odd_rule_is_refused_by_name(name: str) -> None:
    allowed = {"metric": {"text", "NUL"}, "mode": set[str](), "count": COUNT}[name]
    for odd, value in ODD.items():
        if odd in allowed:
            KeepBest(**{"metric": "loss", name: value})
        else:
            with pytest.raises(ConfigError, match=rf"^KeepBest\({name}=.*(give|allowed are)"):
                KeepBest(**{"metric": "loss", name: value})


# -- values inside ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda value: value, PerRank], ids=["as it is", "per rank"])
def test_any_odd_leaf_comes_back_or_is_refused_by_name(root: Path, wrap: Callable[[object], object]) -> None:
    unsafe = {"a function", "a class", "an object", "an object without a repr"}
    with SyncCheckpointEngine(root) as engine:
        for odd, value in ODD.items():
            engine.save({"leaf": wrap(value), **STATE}).result(TIMEOUT)
            if odd in unsafe:
                refuse(engine.read, odd, "leaf")
                assert isinstance(engine.read(skip_untrusted=True)["leaf"], UntrustedObject)
            else:
                back = engine.read()["leaf"]
                assert type(back) is type(value) or isinstance(back, np.ndarray), odd
                if odd not in ("nan", "two elements", "an array"):
                    assert back == value, odd


def test_any_odd_key_comes_back_or_is_refused(root: Path) -> None:
    refused = {
        "a lone surrogate",
        "a huge int",
        "a huge negative int",
        "a tensor",
        "two elements",
        "an object without a repr",
    }
    with SyncCheckpointEngine(root) as engine:
        for odd, value in ODD.items():
            try:
                state = {value: torch.ones(1)}
            except TypeError:
                continue  # Python refuses it: no hash
            if odd in refused:
                refuse(lambda state=state: engine.save(state), odd, "key|rename")
                continue
            engine.save(state).result(TIMEOUT)
            (back,) = engine.read()
            if odd in ("a function", "a class", "an object"):  # which need trust
                assert back == str(value), odd
            elif odd != "nan":
                assert (type(back), back) == (type(value), value), odd


class Gives:
    """Stateful, with a ``state_dict`` of the caller's choice."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> object:
        return self.value

    def load_state_dict(self, state: object) -> None:
        self.value = state


def test_an_object_whose_state_dict_is_none_is_refused_by_name(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        for odd, value in ODD.items():
            if not isinstance(value, dict):
                refuse(lambda value=value: engine.save(Gives(value)), odd, "state")
        engine.save({"m": Gives({"w": torch.ones(1)})}).result(TIMEOUT)


def test_an_infinite_selection_ends_at_its_first_wrong_name(root: Path) -> None:
    def endless() -> Iterator[object]:
        yield "w"
        while True:
            yield 5

    with SyncCheckpointEngine(root) as engine:
        engine.save(STATE).result(TIMEOUT)
        with pytest.raises(ConfigError, match="only="):
            engine.read(only=endless())  # type: ignore[arg-type]
        for odd in (np.array("w"), torch.tensor(3)):  # iterable, they say
            with pytest.raises(ConfigError, match="only="):
                engine.read(only=odd)  # type: ignore[arg-type]


# -- tickets ----------------------------------------------------------------------------------------


def test_an_odd_wait_for_a_ticket_is_refused_and_the_save_goes_on(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        gate = storage.hold("rename")
        ticket = engine.save(STATE)
        gate.wait_reached()
        waits = (ticket.result, ticket.exception, ticket.committed.result, ticket.committed.exception)
        for odd, value in ODD.items():
            for wait in waits:
                if odd not in WAIT:
                    with pytest.raises(ConfigError, match=r"^timeout="):
                        wait(value)
        with pytest.raises(TimeoutError, match=r"not reached within -1\.5 s"):
            ticket.result(-1.5)  # what is left until a deadline that has passed
        with pytest.raises(TimeoutError, match="not reached within"):
            ticket.result(-(10**5000))
        gate.open()
        report = ticket.result(TIMEOUT)
        for odd in sorted(WAIT):
            assert ticket.result(ODD[odd]) is report


def test_a_ticket_fences_streams_only(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        ticket = engine.save(STATE)
        for odd, value in ODD.items():
            if odd != "None":
                with pytest.raises(ConfigError, match=r"^fence\(stream="):
                    ticket.fence(value)
        ticket.fence()


# -- saves that are skipped -------------------------------------------------------------------------


def test_a_skipped_save_is_checked_like_any_other(root: Path) -> None:
    with gated_engine(root, when_busy="skip") as (engine, storage):
        engine.save(STATE, 5).result(TIMEOUT)
        gate = storage.hold("rename")
        pending = engine.save(STATE, 7)
        gate.wait_reached()
        for step in (7, 5, 3, -1, "8", 10**30):
            with pytest.raises(StepOrderError, match="step="):
                engine.save(STATE, step)  # type: ignore[arg-type]
        for options in ({"overwrite": "no"}, {"deadline_secs": "5"}, {"metrics": 3}):
            with pytest.raises(ConfigError, match=next(iter(options))):
                engine.save(STATE, 8, **options)  # type: ignore[arg-type]
        assert engine.save(STATE, 8).skipped
        assert engine.save(STATE).skipped
        gate.open()
        assert pending.result(TIMEOUT).step == 7
        assert engine.steps().result() == [5, 7]


def test_a_step_of_the_wrong_kind_is_refused_at_once_and_not_after_the_wait_for_room(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        gate = storage.hold("rename")
        engine.save(STATE)
        gate.wait_reached()
        for call in (lambda: engine.save(STATE, "5"), lambda: engine.save(STATE, overwrite="no")):  # type: ignore[arg-type]
            with pytest.raises((StepOrderError, ConfigError)):
                call()


# -- nothing is left out ----------------------------------------------------------------------------


@pytest.mark.parametrize("engine_class", [CheckpointEngine, SyncCheckpointEngine])
def test_every_public_argument_is_tried_here(engine_class: type) -> None:
    """An argument that is added needs a row above: what it may be, and that everything else is refused by name."""
    arguments = {
        f"{method}({name})"
        for method, function in inspect.getmembers(engine_class, inspect.isfunction)
        if not method.startswith("_")
        for name in inspect.signature(function).parameters
        if name != "self"
    }
    of_deepspeed = {"agree(works)", "agree(on_leader)", "agree(what)"}
    assert arguments - ARGUMENTS.keys() == of_deepspeed
    assert set(inspect.signature(engine_class).parameters) == OPENING.keys()
    assert {field.name for field in dataclasses.fields(EngineConfig)} == SETTINGS.keys()


# -- closed engines ---------------------------------------------------------------------------------


def test_every_call_of_a_closed_engine_is_refused_by_a_typed_error(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(STATE).result(TIMEOUT)
    before = everything(root)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for name, call in {
        "save": lambda: engine.save(STATE),
        "save_file": lambda: engine.save_file(STATE, root / "w.pt"),
        "prepare": lambda: engine.prepare(STATE),
        "load": lambda: engine.load(STATE),
        "read": engine.read,
        "steps": engine.steps,
        "latest_step": engine.latest_step,
        "rollback": lambda: engine.rollback(1),
        "protect": lambda: engine.protect(1),
        "unprotect": lambda: engine.unprotect(1),
        "protected_steps": engine.protected_steps,
        "guard": lambda: engine.guard(optimizer),
        "on_preemption": engine.on_preemption,
    }.items():
        with pytest.raises(AioCkptError, match="closed: open a new one") as caught:
            call()
        assert isinstance(caught.value, RuntimeError), name
        assert not isinstance(caught.value, (BusyError, CheckpointNotFoundError)), name
    engine.ready(), engine.clear_cache(), engine.close(), engine.terminate()
    assert everything(root) == before
