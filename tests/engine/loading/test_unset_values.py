"""What a restarted script does not know yet (None, 0.0, {}, []) takes what training made of it."""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from gated_storage import TIMEOUT
from tree_states import same

from aio_ckpt import EngineConfig, PerRank, SyncCheckpointEngine
from aio_ckpt.errors import MissingNameError, TemplateMismatchError, UnexpectedNameError, UnsafeObjectError


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SyncCheckpointEngine]:
    with SyncCheckpointEngine(tmp_path) as engine:
        yield engine


def loaded(engine: SyncCheckpointEngine, stored: Any, given: Any, **options: Any) -> Any:
    """What a template's value becomes."""
    engine.save({"w": torch.ones(2), "v": stored}).result(TIMEOUT)
    state = {"w": torch.zeros(2), "v": given}
    assert engine.load(state, **options).unexpected == ()
    assert state["w"].all()
    return state["v"]


LATER: dict[str, Any] = {
    "a numpy scalar": np.float64(0.5),
    "a tensor of no dimension": torch.tensor(0.5),
    "a tensor": torch.arange(3),
    "an array": np.arange(3),
    "a number": 2,
}


@pytest.mark.parametrize("first", [None, 0.0, float("inf"), "none", np.float64(0), [], ()], ids=repr)
@pytest.mark.parametrize("later", LATER)
def test_a_python_value_takes_whatever_it_became(engine: SyncCheckpointEngine, first: Any, later: str) -> None:
    found = loaded(engine, LATER[later], first, strict=True)
    assert same(found, LATER[later])


def test_a_tensor_and_an_array_take_nothing_but_their_like(engine: SyncCheckpointEngine) -> None:
    for stored, given in (
        (0.5, torch.zeros(())),
        (torch.zeros(2), torch.zeros(())),
        (torch.ones(1), np.ones(1, ">f4")),
    ):
        with pytest.raises(TemplateMismatchError, match="'v'") as caught:
            loaded(engine, stored, given)
        assert not caught.value.target_modified


def moments() -> Any:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({}, {"acc": 0.9, 3: torch.ones(1)}),
        ({}, {"deep": [{"x": torch.ones(1)}]}),
        ({}, {}),
        ({}, []),
        ({}, 5),
        ([], [torch.ones(1), {"loss": 1.0}]),
        ([], [0.1, 0.2]),
        (None, {"last_epoch": 3}),
        (None, {}),
        (None, [torch.ones(1)]),
    ],
)
def test_what_was_empty_takes_all_that_is_stored_below_its_name(
    engine: SyncCheckpointEngine, first: Any, later: Any
) -> None:
    found = loaded(engine, later, first, strict=True)
    assert same(found, later)
    assert found is first or type(first) is not type(later) or first is None, "the object that was given is filled"


@pytest.mark.parametrize(
    "make",
    [
        lambda value: {"a.b": value, "a": {"b": {}}},
        lambda value: {"a": {}, "a.b": value},
        lambda value: {"": {}, "w": value},
    ],
    ids=["dotted key", "a key below", "an empty key"],
)
def test_an_empty_container_does_not_take_what_belongs_to_a_leaf_of_the_same_name(
    engine: SyncCheckpointEngine, make: Any
) -> None:
    engine.save(make(torch.ones(2))).result(TIMEOUT)
    state = make(torch.zeros(2))
    engine.load(state, strict=True)
    assert same(state, make(torch.ones(2)))


def test_an_optimizer_that_was_not_stepped_gets_its_moments_by_its_state_dict(
    engine: SyncCheckpointEngine,
) -> None:
    stored, fresh = moments(), torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    found = loaded(engine, stored, fresh.state_dict())
    fresh.load_state_dict(found)
    assert same(fresh.state_dict()["state"], stored["state"])


def test_an_optimizer_that_was_not_stepped_gets_the_moments_that_stock_stored(tmp_path: Path) -> None:
    stored, fresh = moments(), torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"optimizer": stored, "best": {"acc": torch.ones(1)}}, checkpoint_id=tmp_path / "step_1", no_dist=True)
    with SyncCheckpointEngine(tmp_path) as engine:
        state: dict[str, Any] = {"optimizer": fresh.state_dict(), "best": None}
        assert engine.load(state).unexpected == ()
    fresh.load_state_dict(state["optimizer"])
    assert same(fresh.state_dict()["state"], stored["state"])
    assert same(state["best"], {"acc": torch.ones(1)})


def test_none_takes_a_tensor_that_is_stored_by_its_parts(engine: SyncCheckpointEngine) -> None:
    assert torch.equal(loaded(engine, torch.eye(2).to_sparse(), None).to_dense(), torch.eye(2))


def test_an_empty_template_takes_what_read_gives(engine: SyncCheckpointEngine) -> None:
    net = torch.nn.BatchNorm1d(2)
    engine.save({"net": net, "o": moments(), "rng": PerRank(5), "n": np.float32(2)}).result(TIMEOUT)
    state: dict[str, Any] = {}
    assert not engine.load(state, strict=True).unexpected
    assert same(state, read := engine.read())
    assert state["net"]._metadata == read["net"]._metadata == net.state_dict()._metadata


def test_a_container_of_the_template_keeps_its_type_and_its_versions(engine: SyncCheckpointEngine) -> None:
    kept = defaultdict(list)
    assert loaded(engine, {"a": [1]}, kept) is kept == {"a": [1]}
    net = torch.nn.BatchNorm1d(2).state_dict()
    assert loaded(engine, net, OrderedDict())._metadata == net._metadata


def test_what_is_stored_nowhere_is_missing_or_stays_empty(engine: SyncCheckpointEngine) -> None:
    engine.save({"w": torch.ones(2)}).result(TIMEOUT)
    with pytest.raises(MissingNameError, match="'v'"):
        engine.load({"w": torch.zeros(2), "v": None})
    state: dict[str, Any] = {"w": torch.zeros(2), "v": {}, "n": None}
    assert engine.load(state, allow_missing=True).missing == ("n",)
    assert (state["v"], state["n"]) == ({}, None)


class Odd:
    """Whose objects need trust."""


@dataclasses.dataclass
class Progress:
    step: int


@pytest.mark.parametrize("given", [None, {}])
def test_a_type_that_is_not_trusted_becomes_a_plain_one_and_a_warning_names_it(
    engine: SyncCheckpointEngine, caplog: pytest.LogCaptureFixture, given: Any
) -> None:
    found = loaded(engine, {"run": Progress(3), "by": {Progress: torch.ones(1)}}, copy.copy(given))
    assert found["run"] == {"step": 3}
    (warning,) = [record.getMessage() for record in caplog.records if "plain ones" in record.getMessage()]
    assert "plain ones: v.run (" in warning
    assert f"the key {Progress} (its text): torch.serialization.add_safe_globals() of a type" in warning
    caplog.clear()
    loaded(engine, {"a": {"b": 1}}, copy.copy(given))
    assert "plain ones" not in caplog.text


def test_a_trusted_type_that_is_gone_becomes_a_plain_one_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SyncCheckpointEngine(tmp_path, EngineConfig(trusted_objects=True)) as engine:
        engine.save({"v": {"run": Progress(3)}}, step=1).result(TIMEOUT)
        monkeypatch.delattr(sys.modules[__name__], "Progress")
        state: dict[str, Any] = {"v": None}
        engine.load(state)
    assert state["v"] == {"run": {"step": 3}}
    assert "plain ones: v.run (" in caplog.text
    assert "their classes have moved or changed" in caplog.text


def test_an_object_below_that_needs_trust_is_refused_or_told(engine: SyncCheckpointEngine) -> None:
    engine.save({"w": torch.ones(2), "v": {"o": Odd(), "x": 1}}).result(TIMEOUT)
    with pytest.raises(UnsafeObjectError, match=r"v\.o"):
        engine.load({"w": torch.zeros(2), "v": {}})
    state: dict[str, Any] = {"w": torch.zeros(2), "v": {}}
    assert engine.load(state, skip_untrusted=True).untrusted == ("v.o",)
    assert state["v"]["x"] == 1
    assert state["v"]["o"].name == "v.o"


def test_names_that_the_template_lacks_are_told_in_one_line(
    engine: SyncCheckpointEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.save({f"w{number}": torch.ones(1) for number in range(8)}).result(TIMEOUT)
    with pytest.raises(UnexpectedNameError):
        engine.load({"w0": torch.zeros(1)}, strict=True)
    with caplog.at_level(logging.WARNING, "aio_ckpt"):
        engine.load({f"w{number}": torch.zeros(1) for number in range(8)})
        assert not caplog.records
        engine.load({"w0": torch.zeros(1)})
    (line,) = caplog.messages
    assert "lacks 7 names: 'w1', 'w2', 'w3', 'w4', 'w5' and 2 more" in line
    assert "strict=True" in line


def test_renamed_values_and_branches_go_to_open_places(engine: SyncCheckpointEngine) -> None:
    engine.save({"ema": {"best": np.float64(2), "log": [{"loss": 1.0}], "w": torch.ones(2)}}).result(TIMEOUT)
    state: dict[str, Any] = {"best": 0.0, "log": [], "w": torch.zeros(2)}
    engine.load(state, rename={"ema": ""}, strict=True)
    assert same(state["best"], np.float64(2))
    assert same(state["log"], [{"loss": 1.0}])
    state = {"model": {}}
    engine.load(state, rename={"ema": "model"}, strict=True)
    assert same(state["model"], engine.read()["ema"])
    with pytest.raises(TemplateMismatchError, match=r"'model' is empty, and rename= .* rename the whole branch"):
        engine.load({"model": {}}, rename={"ema.w": "model.w", "ema.log": "model.log"})


def test_a_list_that_is_longer_than_the_stored_one_is_told_with_the_remedy(engine: SyncCheckpointEngine) -> None:
    """A run that goes back to an earlier step has more entries by then."""
    engine.save({"v": {"losses": [{"loss": 1.0}, {"loss": 2.0}]}}).result(TIMEOUT)
    state = {"v": {"losses": [{"loss": 0.0}, {"loss": 0.0}, {"loss": 0.0}]}}
    with pytest.raises(MissingNameError, match=r"'v\.losses' is longer than the list .*: \[\] in its place takes all"):
        engine.load(state)
    state["v"]["losses"] = []
    engine.load(state)
    assert state == {"v": {"losses": [{"loss": 1.0}, {"loss": 2.0}]}}
    with pytest.raises(MissingNameError) as caught:  # an entry that is stored and lacks a key
        engine.load({"v": {"losses": [{"loss": 0.0, "accuracy": 0.0}, {"loss": 0.0}]}})
    assert "is longer than" not in str(caught.value)


def test_what_a_data_loader_holds_goes_on_with_the_stored_content(engine: SyncCheckpointEngine) -> None:
    """The caller holds these, too, and gives them to the next save."""

    def made() -> tuple[dict[str, Any], torch.utils.data.DataLoader[int]]:
        generator = torch.Generator().manual_seed(0)
        state = {"w": torch.ones(2), "generator": generator, "window": deque([0.0], 3), "losses": [0.0]}
        return state, torch.utils.data.DataLoader(range(64), batch_size=8, shuffle=True, generator=generator)  # type: ignore[arg-type]

    state, loader = made()
    list(loader)
    state["window"].extend([1.0, 2.0, 3.0])
    state["losses"].append(1.0)
    engine.save(state).result(TIMEOUT)
    wanted = [batch.tolist() for batch in loader]
    later, loader = made()
    window, losses = later["window"], later["losses"]
    engine.load(later)
    assert [batch.tolist() for batch in loader] == wanted
    assert (later["window"], later["losses"]) == (deque([1.0, 2.0, 3.0], 3), [0.0, 1.0])
    assert later["window"] is window
    assert later["losses"] is losses
