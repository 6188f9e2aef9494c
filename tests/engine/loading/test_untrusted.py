"""Objects that only running code reads: stored, told, refused by a reader without trust, and no harm to the rest."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gated_storage import TIMEOUT

from aio_ckpt import EngineConfig, PerRank, SyncCheckpointEngine, UnsafeObjectError, UntrustedObject


class Schedule:
    """An object of the user's own."""

    def __init__(self, warmup: int) -> None:
        self.warmup = warmup

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Loader:
    """Stateful, and a part of its state is an object of the user's own."""

    def __init__(self, position: int) -> None:
        self.position, self.schedule, self.seen = position, Schedule(position), torch.full((2,), float(position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "schedule": self.schedule, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.schedule, self.seen = state["position"], state["schedule"], state["seen"]


def state_at(step: int) -> dict[str, Any]:
    return {
        "w": torch.full((3,), float(step)),
        "cfg": {"schedule": Schedule(step), "lr": 0.1 * step, "args": argparse.Namespace(out=Path("/x"), step=step)},
        "loader": Loader(step),
        "mine": PerRank([Schedule(step)]),
        "when": datetime.datetime(2026, 1, step, tzinfo=datetime.UTC),
        "rng": np.random.default_rng(step),
    }


UNTRUSTED = {"cfg.schedule", "loader.schedule", "mine.rank0"}


@pytest.fixture
def saved(root: Path, caplog: pytest.LogCaptureFixture) -> Path:
    with caplog.at_level("WARNING", "aio_ckpt"), SyncCheckpointEngine(root) as engine:
        for step in (1, 2):
            engine.save(state_at(step)).result(TIMEOUT)
    return root


def test_what_only_code_reads_is_told_once_a_run(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    (told,) = [record.getMessage() for record in caplog.get_records("setup")]
    assert all(repr(name) in told for name in UNTRUSTED)
    assert "trusted_objects=True" in told


def test_a_load_without_trust_names_the_leaf_and_the_remedy(saved: Path) -> None:
    with SyncCheckpointEngine(saved) as engine:
        for call in (lambda: engine.load(state_at(3)), engine.read):
            with pytest.raises(UnsafeObjectError, match=r"schedule: .*Schedule.*trusted_objects=True.*skip_untrusted"):
                call()
        state = state_at(3)
        with pytest.raises(UnsafeObjectError) as caught:
            engine.load(state)
        assert not caught.value.target_modified
        assert state["w"].tolist() == [3, 3, 3], "objects are read before a tensor is touched"
        assert state["loader"].seen.tolist() == [3, 3]
        assert engine.read(only=["cfg.lr", "when"])["cfg"] == {"lr": 0.2}


def test_a_load_that_skips_leaves_such_objects_as_they_are_and_lists_them(saved: Path) -> None:
    state = state_at(3)
    with SyncCheckpointEngine(saved) as engine:
        report = engine.load(state, skip_untrusted=True)
    assert set(report.untrusted) == UNTRUSTED
    assert state["w"].tolist() == [2, 2, 2]
    assert state["cfg"] == {"schedule": Schedule(3), "lr": 0.2, "args": state_at(2)["cfg"]["args"]}
    assert (state["loader"].position, state["loader"].schedule) == (2, Schedule(3))
    assert state["loader"].seen.tolist() == [2, 2]
    assert state["mine"] == PerRank([Schedule(3)])
    assert state["when"] == state_at(2)["when"]
    assert state["rng"].random() == np.random.default_rng(2).random()


def test_a_read_that_skips_marks_such_objects_and_lists_them(saved: Path) -> None:
    with SyncCheckpointEngine(saved) as engine:
        state, report = engine.read(skip_untrusted=True, with_report=True)
    assert set(report.untrusted) == UNTRUSTED
    assert report.step == 2
    assert report.verified
    marked = state["cfg"]["schedule"]
    assert isinstance(marked, UntrustedObject)
    assert marked.name == "cfg.schedule"
    assert "trusted_objects" in marked.reason
    assert state["loader"]["seen"].tolist() == [2, 2]


def test_trust_of_all_or_of_the_type_brings_everything_back(saved: Path) -> None:
    def check() -> None:
        state = state_at(3)
        report = engine.load(state)
        assert report.untrusted == ()
        assert state["cfg"]["schedule"] == state["loader"].schedule == Schedule(2)
        assert state["mine"] == PerRank([Schedule(2)])

    with SyncCheckpointEngine(saved, EngineConfig(trusted_objects=True)) as engine:
        check()
    with torch.serialization.safe_globals([Schedule]), SyncCheckpointEngine(saved) as engine:
        check()


class Epoch:
    """An object that only running code brings back."""


def test_a_type_is_told_of_once_and_a_load_names_all_its_leaves(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SyncCheckpointEngine(root) as engine:
        history: dict[str, object] = {}
        for number in range(8):
            history[f"epoch{number}"] = Epoch()
            engine.save({"w": torch.ones(1), "history": history}).result(TIMEOUT)
        assert caplog.text.count("only running code can read it back") == 1
        with pytest.raises(
            UnsafeObjectError, match=r"history\.epoch0.*so it is with 7 others: 'history\.epoch1'.*and 2 more"
        ):
            engine.read()


def test_versions_of_a_module_that_need_trust_are_told_of_and_can_be_left_out(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(2, 2)
    model._register_state_dict_hook(lambda _, state, *rest: state._metadata.update(config=Epoch()))
    with SyncCheckpointEngine(root) as engine:
        engine.save({"model": model}).result(TIMEOUT)
        assert "'model._metadata'" in caplog.text
        with pytest.raises(UnsafeObjectError, match=r"model\._metadata"):
            engine.load({"model": model})
        other = torch.nn.Linear(2, 2)
        engine.load({"model": other}, skip_untrusted=True)
        assert torch.equal(other.weight, model.weight)
        read, found = engine.read(skip_untrusted=True, with_report=True)
        assert found.untrusted == ("model._metadata",)
        assert torch.equal(read["model"]["weight"], model.weight)
