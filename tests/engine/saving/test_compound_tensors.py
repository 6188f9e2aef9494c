"""Tensors that are stored by their parts: saved, loaded into the template's own, read, and seen by stock."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from builders import flip
from gated_storage import TIMEOUT
from saved_files import data_file
from wrapper_tensors import Blockwise, Nested, Tagged, Token, blockwise, nested

from aio_ckpt import (
    CorruptCheckpointError,
    EngineConfig,
    MissingNameError,
    SyncCheckpointEngine,
    TemplateMismatchError,
    UnsafeObjectError,
    UnsupportedLeafError,
)


def sparse(number: float) -> torch.Tensor:
    """A band of 40 x 40; other numbers, other values in other places, as many."""
    return (number * torch.eye(40).roll(2 * int(number), 0)).to_sparse()


def stock_load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


# -- sparse -------------------------------------------------------------------------------------------


def test_a_sparse_tensor_is_saved_loaded_in_place_and_read(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save({"coo": sparse(1)}).result(TIMEOUT)
        wanted = sparse(2)
        report = engine.save({"coo": wanted}).result(TIMEOUT)
        assert report.plan_hit
        target = sparse(0.5)
        state = {"coo": target}
        assert engine.load(state, strict=True).verified
        read = engine.read()
    assert state["coo"] is target
    for found in (target, read["coo"]):
        assert (found.layout, found.shape) == (wanted.layout, wanted.shape)
        assert torch.equal(found.to_dense(), wanted.to_dense())
    assert target.is_coalesced()
    parts = {"coo.indices": torch.zeros(2, 40, dtype=torch.int64), "coo.values": torch.zeros(40)}
    stock_load(report.path, parts)
    made = torch.sparse_coo_tensor(parts["coo.indices"], parts["coo.values"], (40, 40), check_invariants=True)
    assert torch.equal(made.to_dense(), wanted.to_dense())


OTHERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "csr": (lambda dense: dense.to_sparse_csr(), r"give \.to_sparse_coo\(\) or \.to_dense\(\)"),
    "csc": (lambda dense: dense.to_sparse_csc(), r"give \.to_sparse_coo\(\) or \.to_dense\(\)"),
    "bsr": (lambda dense: dense.to_sparse_bsr((2, 2)), r"give \.to_sparse_coo\(\) or \.to_dense\(\)"),
    "bsc": (lambda dense: dense.to_sparse_bsc((2, 2)), r"give \.to_sparse_coo\(\) or \.to_dense\(\)"),
    "quint8": (lambda dense: torch.quantize_per_tensor(dense, 0.1, 1, torch.quint8), r"give \.dequantize\(\)"),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_compressed_sparse_and_quantized_tensors_are_refused_by_name(root: Path, kind: str) -> None:
    make, message = OTHERS[kind]
    with SyncCheckpointEngine(root) as engine:
        with pytest.raises(UnsupportedLeafError, match=f"'w'.*torch.*{kind}.*{message}"):
            engine.save({"w": make(torch.eye(4))})
        engine.save({"w": torch.eye(4)}).result(TIMEOUT)
        for casts in (False, True):
            with pytest.raises(TemplateMismatchError, match=f"'w'.*torch.*{kind}.*{message}"):
                engine.load({"w": make(torch.eye(4))}, cast=casts)


def test_a_template_gets_the_mark_of_coalesced_that_was_saved(root: Path) -> None:
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1], [0, 0]]), torch.ones(2), (3, 3), check_invariants=True)
    target = torch.sparse_coo_tensor(
        torch.tensor([[0, 1], [0, 0]]), torch.ones(2), (3, 3), is_coalesced=True, check_invariants=True
    )
    with SyncCheckpointEngine(root) as engine:
        engine.save({"w": twice}).result(TIMEOUT)
        engine.load({"w": target})
    assert not target.is_coalesced()
    assert target.to_dense()[1, 0] == 2


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"w": torch.eye(4).to_sparse()}, r"'w' has shape \(4, 4\) in the template and \(3, 3\) in the checkpoint"),
        ({"w": torch.ones(3, 3).to_sparse()}, r"'w.indices' has shape \(2, 9\) in the template and \(2, 3\)"),
        ({"w": torch.eye(3).double().to_sparse()}, "'w.values' is torch.float64 in the template"),
        ({"w": torch.eye(3)}, "'w' is a plain tensor in the template and a sparse_coo tensor in the checkpoint"),
        ({"d": torch.eye(3).to_sparse()}, "'d' is a sparse_coo tensor in the template and a plain tensor in the ch"),
    ],
)
def test_a_template_of_another_shape_or_layout_is_refused_before_anything_is_touched(
    root: Path, template: dict[str, Any], message: str
) -> None:
    before = {name: value.clone() for name, value in template.items()}
    with SyncCheckpointEngine(root) as engine:
        engine.save({"w": torch.eye(3).to_sparse(), "d": torch.eye(3)}).result(TIMEOUT)
        with pytest.raises(TemplateMismatchError, match=message) as caught:
            engine.load(template)
        with pytest.raises(MissingNameError, match=r"more\.indices"):
            engine.load({"more": torch.eye(3).to_sparse()})
        engine.load({"more": torch.eye(3).to_sparse()}, allow_missing=True)
    assert not caught.value.target_modified
    for name, value in template.items():
        assert torch.equal(value.to_dense(), before[name].to_dense())


def test_indices_that_leave_the_tensor_are_damage(root: Path) -> None:
    """Whoever writes the file chooses the indices: with sums that match, even."""
    with SyncCheckpointEngine(root) as engine:
        tensor = torch.eye(3).to_sparse()
        path = engine.save({"w": tensor}).result(TIMEOUT).path
        data = data_file(path).read_bytes()
        place = data.index(torch.tensor([0, 1, 2] * 2).numpy().tobytes())
        flip(data_file(path), place, 0x40)
        with pytest.raises(CorruptCheckpointError):
            engine.load({"w": torch.eye(3).to_sparse()}, fallback=False)
        tensor._indices()[0, 0] = 64
        engine.save({"w": tensor}).result(TIMEOUT)
        for load in (lambda: engine.load({"w": torch.eye(3).to_sparse()}, fallback=False), lambda: engine.read()):
            with pytest.raises(CorruptCheckpointError, match=r"'w': its parts are of no tensor.*64"):
                load()


class Graph(torch.nn.Module):
    """As graph networks and pruned models have it."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.register_buffer("edges", sparse(number))
        self.linear = torch.nn.Linear(2, 2)


def test_a_module_with_a_sparse_buffer_goes_through_its_state_dict(root: Path) -> None:
    saved, model = Graph(1), Graph(2)
    with SyncCheckpointEngine(root) as engine:
        engine.save({"m": saved}).result(TIMEOUT)
        engine.load({"m": model})
    assert torch.equal(model.edges.to_dense(), saved.edges.to_dense())  # type: ignore[operator,union-attr]
    assert torch.equal(model.linear.weight, saved.linear.weight)


# -- subclasses ---------------------------------------------------------------------------------------


def tagged(number: float) -> Any:
    tensor: Any = torch.full((3,), float(number)).as_subclass(Tagged)
    tensor.space = "RGB"
    return tensor


def wrapped(number: float) -> dict[str, Any]:
    return {
        "moment": blockwise(number),
        "token": blockwise(number, Token),
        "deep": [nested(number)],
        "t": tagged(number),
    }


def numbers(state: dict[str, Any]) -> list[float]:
    deep = state["deep"][0]
    parts = [state["moment"].codes, state["token"].scale, deep.inner.codes, deep.mask.to_dense()[1, 1], state["t"]]
    return [float(part.flatten()[0]) for part in parts]


def test_wrapper_tensors_are_filled_in_place_without_trust(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(wrapped(1)).result(TIMEOUT)
        assert engine.save(wrapped(2)).result(TIMEOUT).plan_hit
        state = wrapped(1)
        before, codes = dict(state), state["moment"].codes
        report = engine.load(state, strict=True)
        assert report.verified
    assert all(state[name] is before[name] for name in state)
    assert state["moment"].codes is codes
    assert numbers(state) == [2] * 5


def test_wrapper_tensors_are_read_where_their_type_is_allowed_or_trusted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(wrapped(3)).result(TIMEOUT)
        state, report = engine.read(with_report=True)
        assert state["moment"].keys() == {"codes", "scale"}
        assert (type(state["t"]), state["t"].tolist()) == (torch.Tensor, [3, 3, 3])
        assert report.plain == (
            "moment (wrapper_tensors.Blockwise)",
            "token (wrapper_tensors.Token)",
            "deep.0.inner (wrapper_tensors.Blockwise)",
            "deep.0 (wrapper_tensors.Nested)",
            "t (wrapper_tensors.Tagged)",
        )
        monkeypatch.setattr(torch.serialization, "get_safe_globals", lambda: [Blockwise, Nested, Token])
        state, report = engine.read(with_report=True)
        assert [type(state["moment"]), type(state["deep"][0])] == [Blockwise, Nested]
        assert report.plain == ("token (wrapper_tensors.Token)", "t (wrapper_tensors.Tagged)")
    with SyncCheckpointEngine(root, EngineConfig(trusted_objects=True)) as engine:
        state, report = engine.read(with_report=True)
    assert report.plain == ()
    assert numbers(state) == [3] * 5
    assert (state["t"].space, state["token"].signed) == ("RGB", True)


class Optimizer:
    """As low-bit optimizers: its state is there after the first step only."""

    def __init__(self, number: float | None = None) -> None:
        self.state = {} if number is None else {0: {"moment": blockwise(number, Token), "step": int(number)}}

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state["state"]


def test_a_stateful_value_that_has_the_type_takes_it_without_trust(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save({"opt": Optimizer(4)}).result(TIMEOUT)
        optimizer = Optimizer(1)
        engine.load({"opt": optimizer})
        assert (type(optimizer.state[0]["moment"]), optimizer.state[0]["step"]) == (Token, 4)
        assert optimizer.state[0]["moment"].codes.unique().tolist() == [4]
        with pytest.raises(
            UnsafeObjectError, match=r"opt\.state\.0\.moment: a wrapper_tensors\.Token.*trusted_objects"
        ) as caught:
            engine.load({"opt": Optimizer()})
        assert not caught.value.target_modified
    with SyncCheckpointEngine(root, EngineConfig(trusted_objects=True)) as engine:
        optimizer = Optimizer()
        engine.load({"opt": optimizer})
        assert optimizer.state[0]["moment"].codes.unique().tolist() == [4]
        other = Optimizer(1)
        other.state[0]["moment"] = blockwise(1)
        with pytest.raises(TemplateMismatchError, match="is a Blockwise in the template and a Token in the checkpoint"):
            engine.load({"opt": other})
