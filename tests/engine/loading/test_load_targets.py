"""A template is refused by name if a tensor of it has no memory, or shares it in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gated_storage import TIMEOUT
from hypothesis import given
from hypothesis import strategies as st
from property_examples import gate_stride
from torch.testing._internal.two_tensor import TwoTensor

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import MissingNameError, TemplateMismatchError
from aio_ckpt.leaves.tensor_memory import are_apart, overlapping

MANY = {f"other.{number}": torch.full((3,), float(number)) for number in range(0, 600, gate_stride(10))}
LARGE = 400_000


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SyncCheckpointEngine]:
    with SyncCheckpointEngine(tmp_path) as engine:
        yield engine


def check_refused(engine: SyncCheckpointEngine, template: dict[str, Any], match: str) -> None:
    others = {name: torch.zeros(3) for name in MANY}
    with pytest.raises(TemplateMismatchError, match=match) as caught:
        engine.load(template | others)
    assert not caught.value.target_modified
    assert not any(value.any() for value in others.values())


def shrunk(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


UNFIT: dict[str, tuple[Callable[[int], torch.Tensor], str]] = {
    "freed": (lambda n: shrunk(torch.zeros(n), 0), "freed or resized"),
    "short": (lambda n: shrunk(torch.zeros(n), 4), "freed or resized"),
    "short, behind another": (lambda n: shrunk(torch.zeros(2 * n)[n:], 4 * n), "freed or resized"),
    "freed, not contiguous": (lambda n: shrunk(torch.zeros(2 * n)[::2], 0), "freed or resized"),
    "wrapper": (lambda n: TwoTensor(torch.zeros(n), torch.zeros(n)), "TwoTensor.*plain tensor"),
    "expanded": (lambda n: torch.zeros(1).expand(n), "shares memory with itself"),
    "lazy": (lambda n: torch.nn.UninitializedParameter(), "no shape yet"),
}


@pytest.mark.parametrize("numel", [10, LARGE])
@pytest.mark.parametrize("kind", UNFIT)
def test_a_tensor_without_memory_of_its_own_is_refused(engine: SyncCheckpointEngine, kind: str, numel: int) -> None:
    make, match = UNFIT[kind]
    engine.save({"t": torch.arange(float(numel))} | MANY).result(TIMEOUT)
    check_refused(engine, {"t": make(numel)}, f"'t'.*{match}")


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4).as_strided((2, 3), (1, 1)), torch.zeros(4).unfold(0, 3, 1), torch.zeros(3).expand(2, 3)]
)
def test_a_tensor_that_overlaps_itself_is_refused(engine: SyncCheckpointEngine, tensor: torch.Tensor) -> None:
    engine.save({"t": tensor} | MANY).result(TIMEOUT)
    check_refused(engine, {"t": tensor}, r"'t' shares memory with itself .* give its \.clone\(\)")
    engine.load({"t": (clone := tensor.clone() + 1)})
    assert torch.equal(clone, tensor)


def views() -> dict[str, tuple[Any, Any]]:
    line, square, array = torch.zeros(12), torch.zeros(6, 6), np.zeros(6, np.float32)
    shared = torch.zeros(6)
    return {
        "the same tensor": (line, line),
        "slices": (line[:4], line[2:6]),
        "the same strided view": (line[::2], line[::2]),
        "strided views, shifted": (line[:10:2][:5], line[2:12:2]),
        "columns": (square[:, 0:3], square[:, 2:5]),
        "a matrix and its transpose": (square, square.t()),
        "a tensor and its array": (shared, shared.numpy()),
        "one array": (array, array),
        "within the other": (line, line[4:6]),
    }


@pytest.mark.parametrize("kind", views())
def test_tensors_that_share_memory_are_refused_whatever_their_strides(engine: SyncCheckpointEngine, kind: str) -> None:
    one, other = views()[kind]
    values = [torch.arange(float(np.prod(view.shape))).reshape(view.shape) for view in (one, other)]
    stored = [
        (value + 100 * number).numpy() if isinstance(view, np.ndarray) else value + 100 * number
        for number, (value, view) in enumerate(zip(values, (one, other), strict=True))
    ]
    engine.save({"a": stored[0], "b": stored[1]} | MANY).result(TIMEOUT)
    check_refused(engine, {"a": one, "b": other}, "'(a|b)' shares memory with '(a|b)' .* give it memory of its own")


def test_views_of_one_memory_are_refused_though_their_values_agree(engine: SyncCheckpointEngine) -> None:
    flat = torch.arange(12.0)
    state = {"flat": flat, "w": flat[:8].view(2, 4), "b": flat[8:]}
    engine.save(state | MANY).result(TIMEOUT)
    check_refused(engine, state, "'b' shares memory with 'flat' in the template, and is another view of it")


def test_views_side_by_side_and_tied_views_are_filled(engine: SyncCheckpointEngine) -> None:
    line, square = torch.zeros(12), torch.zeros(4, 4)
    state = {"even": line[::2], "odd": line[1::2], "left": square[:, :2], "right": square[:, 2:], "tied": line[1::2]}
    saved = {name: torch.rand(value.shape) for name, value in state.items()}
    saved["tied"] = saved["odd"]
    engine.save(saved).result(TIMEOUT)
    engine.load(state)
    assert all(torch.equal(state[name], value) for name, value in saved.items())


@pytest.mark.parametrize("names", ["abc", "cab", "acb"])
def test_a_tied_name_that_is_not_stored_is_missing_and_the_others_are_filled(
    engine: SyncCheckpointEngine, names: str
) -> None:
    engine.save({"a": torch.ones(4), "b": torch.ones(4)} | MANY).result(TIMEOUT)
    tied = torch.zeros(4)
    with pytest.raises(MissingNameError, match="'c'"):
        engine.load(dict.fromkeys(names, tied))
    assert not tied.any()
    engine.load(dict.fromkeys(names, tied), allow_missing=True)
    assert tied.all()


def test_every_pair_that_shares_a_byte_is_told_once() -> None:
    line = torch.zeros(100)
    tensors = [line[90:], line[:50], line[10:20], line[15:25], line[0:0], line[40:95:5], torch.zeros(3)]
    found = {tuple(sorted(pair)) for pair in overlapping(tensors)}
    assert found == {(1, 2), (1, 3), (2, 3), (1, 5), (0, 5)}
    assert len(list(overlapping(tensors))) == len(found)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=9))
def test_ranges_that_share_no_byte_with_any_other_are_told(ranges: list[tuple[int, int]]) -> None:
    memory = [set(range(start, start + nbytes)) for start, nbytes in ranges]
    alone = [
        all(one.isdisjoint(other) for other_number, other in enumerate(memory) if other_number != number)
        for number, one in enumerate(memory)
    ]
    assert are_apart(ranges).tolist() == alone


def on_meta(kind: str) -> Any:
    with torch.device("meta"):
        net = torch.nn.Linear(2, 2)
    return net if kind == "module" else torch.optim.AdamW(net.parameters())


@pytest.mark.parametrize("kind", ["module", "optimizer"])
def test_what_is_on_the_meta_device_is_refused_by_name(engine: SyncCheckpointEngine, kind: str) -> None:
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    engine.save({"t": net if kind == "module" else optimizer} | MANY).result(TIMEOUT)
    match = r"'t\.(weight|state\.0\.exp_avg)'.* of 't', a torch\..*, on the meta device.*\.to_empty\(device=\.\.\.\)"
    check_refused(engine, {"t": on_meta(kind)}, match)


def test_a_module_that_takes_values_on_the_meta_device_by_itself_gets_them(engine: SyncCheckpointEngine) -> None:
    class Assigning(torch.nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(state_dict, strict=strict, assign=True)

    engine.save({"t": torch.nn.Linear(2, 2), "w": torch.ones(2)}).result(TIMEOUT)
    net = Assigning(2, 2, device="meta")
    engine.load({"t": net, "w": torch.zeros(2)})
    assert not net.weight.is_meta


def test_what_a_load_state_dict_raises_says_for_which_value_of_which_checkpoint(engine: SyncCheckpointEngine) -> None:
    engine.save({"ema": torch.ones(1), "net": torch.nn.Linear(2, 2)}, step=7).result(TIMEOUT)

    class Own(torch.nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(state_dict, strict=strict)

    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        engine.load({"ema": torch.zeros(1), "net": Own(2, 3)})
    (note,) = [note for note in caught.value.__notes__ if note.startswith("aio_ckpt")]
    assert ".Own, refused what step 7 at" in note
    assert "skip_mismatched=True leaves tensors of another shape as they are" in note
    assert "step_000000007" in note
    assert "the target was modified" in note
    assert caught.value.target_modified  # type: ignore[attr-defined]


def test_a_sparse_tensor_that_requires_grad_is_filled(engine: SyncCheckpointEngine) -> None:
    engine.save({"w": torch.eye(3).mul(2).to_sparse().requires_grad_()}).result()
    state = {"w": torch.eye(3).to_sparse().requires_grad_()}
    engine.load(state)
    assert torch.equal(state["w"].to_dense(), torch.eye(3).mul(2))
    assert state["w"].requires_grad
