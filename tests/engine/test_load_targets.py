"""A template without memory is refused by name; one that shares memory is filled where what is stored agrees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import flip
from gated_storage import TIMEOUT
from hypothesis import given
from hypothesis import strategies as st
from property_examples import gate_stride
from torch.testing._internal.two_tensor import TwoTensor

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import CorruptCheckpointError, MissingNameError, TemplateMismatchError
from aio_ckpt.leaves.tensor_memory import are_apart, overlapping
from aio_ckpt.match.overlaps import SharedTarget, check_agreement, write_shared

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


def test_a_tensor_that_overlaps_itself_is_refused(engine: SyncCheckpointEngine) -> None:
    engine.save({"t": torch.arange(6.0).reshape(2, 3)} | MANY).result(TIMEOUT)
    check_refused(engine, {"t": torch.zeros(4).as_strided((2, 3), (1, 1))}, "'t' shares memory with itself")


def views() -> dict[str, tuple[Any, Any]]:
    line, square, array = torch.zeros(12), torch.zeros(6, 6), np.zeros(6, np.float32)
    shared = torch.zeros(6)
    return {
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
    check_refused(engine, {"a": one, "b": other}, "'(a|b)' shares memory with '(a|b)'")


def test_views_side_by_side_and_tied_views_are_filled(engine: SyncCheckpointEngine) -> None:
    line, square = torch.zeros(12), torch.zeros(4, 4)
    state = {"even": line[::2], "odd": line[1::2], "left": square[:, :2], "right": square[:, 2:], "tied": line[1::2]}
    saved = {name: torch.rand(value.shape) for name, value in state.items()}
    saved["tied"] = saved["odd"]
    engine.save(saved).result(TIMEOUT)
    engine.load(state)
    assert all(torch.equal(state[name], value) for name, value in saved.items())


def overlaps() -> dict[str, dict[str, Any]]:
    """Templates that share memory; what is saved of them agrees."""
    line, square, double = torch.zeros(12), torch.zeros(6, 6), torch.zeros(8, dtype=torch.float64)
    array = np.zeros(6, np.float32)
    nan = torch.full((3,), float("nan"))
    return {
        "expanded": {"t": torch.zeros(3, 1).expand(3, 4)},
        "expanded and its base": {"a": nan, "t": nan.expand(2, 3)},
        "windows": {"t": line.unfold(0, 4, 2), "u": torch.zeros(9).unfold(0, 3, 1).expand(2, 7, 3)},
        "columns": {"a": square[:, 0:3], "b": square[:, 2:5]},
        "a matrix and its transpose": {"a": square, "b": square.t(), "c": square},
        "flat and parts": {"flat": line, "w": line[:8].view(2, 4), "b": line[8:], "apart": torch.zeros(2)},
        "another dtype": {"a": double, "b": double.view(torch.float32)[::2], "c": double.view(torch.int64)},
        "a tensor and its array": {"a": torch.from_numpy(array), "b": array[1:4]},
        "half precision": {"t": torch.zeros(1, dtype=torch.bfloat16).expand(5), "u": torch.zeros(1).bool().expand(3)},
        "tied expands": dict.fromkeys("ab", torch.zeros(1).expand(4)),
        "0-dim": {"a": line[3], "b": line[2:4]},
    }


@pytest.mark.parametrize("kind", overlaps())
def test_a_template_that_shares_memory_is_filled_where_what_is_stored_agrees(
    engine: SyncCheckpointEngine, kind: str
) -> None:
    saved, target = overlaps()[kind], overlaps()[kind]
    for seed, value in enumerate(saved.values()):
        tensor = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if tensor.dtype.is_floating_point and not tensor.isnan().any():
            line = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
            line.copy_(torch.randn(line.shape, generator=torch.Generator().manual_seed(seed)))
    engine.save(saved | MANY).result(TIMEOUT)
    others = {name: torch.zeros(3) for name in MANY}
    before = dict(target)
    report = engine.load(target | others)
    assert report.verified
    for name, value in saved.items():
        assert target[name] is before[name]
        assert bytes(np.asarray(torch.as_tensor(target[name]).contiguous().view(-1).view(torch.uint8))) == bytes(
            np.asarray(torch.as_tensor(value).contiguous().view(-1).view(torch.uint8))
        )
    assert all(torch.equal(others[name], value) for name, value in MANY.items())


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=2),
    st.booleans(),
)
def test_values_agree_if_and_only_if_no_place_takes_two(
    one: list[tuple[int, int]], other: list[tuple[int, int]], is_same: bool
) -> None:
    """Against one step at a time."""
    memory = torch.arange(100.0)
    views = [
        memory.as_strided([size for _, size in dims], [step for step, _ in dims], start)
        for dims, start in ((one, 0), (other, 2))
    ]
    targets = [SharedTarget(name, view) for name, view in zip("ab", views, strict=True)]
    values = {name: view.clone() for name, view in targets}
    if not is_same:
        values["b"] += 50
    places: dict[int, float] = {}
    agree = True
    for name, view in targets:
        where = torch.arange(100).as_strided(view.shape, view.stride(), view.storage_offset())
        for place, number in zip(where.flatten().tolist(), values[name].flatten().tolist(), strict=True):
            agree = places.setdefault(place, number) == number and agree
    before = memory.clone()
    if agree:
        check_agreement(targets, values)
        write_shared(targets, values)
        assert all(torch.equal(view, values[name]) for name, view in targets)
        untouched = torch.tensor([place for place in range(100) if place not in places])
        assert torch.equal(memory[untouched], before[untouched])
    else:
        with pytest.raises(TemplateMismatchError, match="shares memory"):
            check_agreement(targets, values)
        assert torch.equal(memory, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_values_agree_bit_by_bit(dtype: torch.dtype) -> None:
    """NaN agrees with itself, and -0.0 does not agree with 0.0."""
    memory = torch.zeros(2, dtype=dtype)
    targets = [SharedTarget("t", memory[:1].expand(3)), SharedTarget("u", memory)]
    nan = torch.full((3,), float("nan"), dtype=dtype)
    values = {"t": nan, "u": torch.cat([nan[:1], torch.ones(1, dtype=dtype)])}
    check_agreement(targets, values)
    write_shared(targets, values)
    assert memory[0].isnan()
    assert memory[1] == 1
    zeros = {"t": torch.zeros(3, dtype=dtype), "u": -torch.zeros(2, dtype=dtype)}
    with pytest.raises(TemplateMismatchError, match="'t' shares memory with 'u'"):
        check_agreement(targets, zeros)


def test_a_damaged_value_of_shared_memory_is_damage(engine: SyncCheckpointEngine) -> None:
    path = engine.save({"t": torch.full((4,), 7.5), "other": torch.ones(2)}).result(TIMEOUT).path
    data = (path / "__0_0.distcp").read_bytes()
    flip(path / "__0_0.distcp", data.index(torch.full((4,), 7.5).numpy().tobytes()))
    target = {"t": torch.zeros(1).expand(4), "other": torch.zeros(2)}
    with pytest.raises(CorruptCheckpointError, match="'t'"):
        engine.load(target, fallback=False)
    assert not target["t"].any()
    assert not target["other"].any()


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
    starts, lengths = (np.array(column, np.int64) for column in (zip(*ranges, strict=True) if ranges else ((), ())))
    assert are_apart(starts, lengths).tolist() == alone


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
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        engine.load({"ema": torch.zeros(1), "net": torch.nn.Linear(2, 3)})
    (note,) = [note for note in caught.value.__notes__ if note.startswith("aio_ckpt")]
    assert "of 'net', a torch.nn.modules.linear.Linear, refused what step 7 at" in note
    assert "step_000000007" in note
    assert "the target was modified" in note
    assert caught.value.target_modified  # type: ignore[attr-defined]
