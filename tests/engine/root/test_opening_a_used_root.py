"""Steps of an earlier run: a run learns of them when it opens the engine, and is warned before it mixes in its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import weights
from disk_tree import tree_of
from gated_storage import TIMEOUT
from log_lines import kept_lines

import aio_ckpt
from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import StepOrderError

MIXED = "this run has loaded none of them"


@pytest.fixture
def used(root: Path) -> Path:
    """A root with the steps 1 and 400."""
    with SyncCheckpointEngine(root) as engine:
        for step in (1, 400):
            engine.save(weights(1), step=step).result(TIMEOUT)
    return root


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[str], list[str]]]:
    """The lines of the log that hold a text."""
    with caplog.at_level(logging.INFO, "aio_ckpt"):
        caplog.clear()
        yield lambda text: [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_an_engine_that_opens_a_used_root_says_so_in_one_line(used: Path, told: Callable[[str], list[str]]) -> None:
    with kept_lines() as lines, SyncCheckpointEngine(used) as engine:
        lines.wait_for(".*holds steps.*")
        engine.load(weights(1))
        engine.save(weights(1)).result(TIMEOUT)
    assert told("holds steps") == [f"{used} holds steps up to 400: load() resumes, and a save must exceed step 400"]


def test_an_engine_that_opens_a_new_root_says_so_in_one_line(root: Path, told: Callable[[str], list[str]]) -> None:
    """A root that was mistyped shows there."""
    with kept_lines() as lines, SyncCheckpointEngine(root) as engine:
        lines.wait_for(".*holds no.*")
        engine.save(weights(1)).result(TIMEOUT)
        engine.save(weights(1)).result(TIMEOUT)
    assert told("holds") == [f"{root} holds no committed step (saves by path do not count)"]


def test_a_root_whose_steps_were_copied_without_hidden_files_is_told(
    used: Path, told: Callable[[str], list[str]]
) -> None:
    """The classic loop asks for ``latest_step()`` alone, and would begin anew without a word."""
    count = len([metadata.unlink() for metadata in used.glob("*/.metadata")])
    with kept_lines() as lines, SyncCheckpointEngine(used) as engine:
        lines.wait_for(".*holds no.*")
        assert engine.latest_step() is None
    (line,) = told("holds")
    assert line.startswith(f"{used} holds no committed step, but {count} that have lost .metadata: were they copied")
    assert f"`aio-ckpt ls {used}` lists them" in line


@pytest.mark.parametrize("call", ["prepare", "save"])
@pytest.mark.parametrize("step", [1, 7, 400])
def test_a_step_that_is_not_above_the_newest_is_refused_with_the_three_ways_on(
    used: Path, call: str, step: int
) -> None:
    before = tree_of(used)
    with SyncCheckpointEngine(used) as engine:
        with pytest.raises(StepOrderError) as caught:
            getattr(engine, call)(weights(1), step=step)
        assert engine.plan_misses == 0
    text = str(caught.value)
    assert text.startswith(f"step={step} does not exceed the newest committed or pending step 400: ")
    for remedy in ("load() resumes after step 400", "rollback(step)", "another root"):
        assert remedy in text
    assert ("overwrite=True" in text) == (step != 7)
    assert call == "save" or tree_of(used) == before, "prepare() took the lock before it refused the step"


def test_prepare_takes_a_step_that_a_save_may_have(used: Path, told: Callable[[str], list[str]]) -> None:
    with SyncCheckpointEngine(used) as engine:
        engine.prepare(weights(1), step=401).result(TIMEOUT)
        assert engine.save(weights(1)).result(TIMEOUT).step == 401
    assert told(MIXED) == []


def load_it(engine: SyncCheckpointEngine) -> object:
    return engine.load(weights(1))


def read_it(engine: SyncCheckpointEngine) -> object:
    return engine.read(1)


def roll_back(engine: SyncCheckpointEngine) -> object:
    return engine.rollback(1)


def name_the_step(engine: SyncCheckpointEngine) -> object:
    return engine.save(weights(1), step=500).result(TIMEOUT)


@pytest.mark.parametrize("goes_on", [load_it, read_it, roll_back, name_the_step])
def test_a_run_that_goes_on_from_the_steps_of_its_root_is_not_warned(
    used: Path, told: Callable[[str], list[str]], goes_on: Callable[[SyncCheckpointEngine], object]
) -> None:
    with SyncCheckpointEngine(used) as engine:
        goes_on(engine)
        engine.prepare(weights(1)).result(TIMEOUT)
        engine.save(weights(1)).result(TIMEOUT)
    assert told(MIXED) == []


def test_a_run_that_prepares_before_it_loads_is_not_warned(used: Path, told: Callable[[str], list[str]]) -> None:
    with SyncCheckpointEngine(used) as engine:
        engine.prepare(weights(1)).result(TIMEOUT)
        engine.load(weights(1))
        engine.save(weights(1)).result(TIMEOUT)
    assert told(MIXED) == []


@pytest.mark.parametrize("prepares", [False, True])
def test_a_run_that_goes_on_from_nothing_is_warned_once_before_it_mixes_its_steps_with_others(
    used: Path, told: Callable[[str], list[str]], prepares: bool
) -> None:
    with SyncCheckpointEngine(used) as engine:
        engine.load(weights(1), path=used / "step_000000001")  # some other checkpoint, as far as the steps go
        if prepares:
            engine.prepare(weights(1)).result(TIMEOUT)
        engine.save(weights(1)).result(TIMEOUT)
        assert len(told(MIXED)) == 1
        engine.save(weights(1)).result(TIMEOUT)
        engine.save(weights(1)).result(TIMEOUT)
    (text,) = told(MIXED)
    assert text.startswith(f"{used} holds steps up to 400, ")
    assert "its next save is step 401" in text
    assert all(remedy in text for remedy in ("load()", "rollback(step)", "another root"))
    assert aio_ckpt.read(used / "step_000000401").keys() == {"w"}
