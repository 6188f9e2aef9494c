"""Many small tensors: read together by few reads, each proven by itself, whatever one of them looks like."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gated_storage import TIMEOUT

from aio_ckpt import CheckpointEngine, EngineConfig
from aio_ckpt.checkpoint import deliver_pieces, read_context
from aio_ckpt.errors import MismatchError, ReadError, SaveCancelledError, TemplateMismatchError
from aio_ckpt.reports import LoadReport
from aio_ckpt.storage import data_file as datafile

COUNT = 600
ELEMENTS = 250
State = dict[str, torch.Tensor]


def made(seed: int = 1) -> State:
    torch.manual_seed(seed)
    return {f"layer.{i}.bias": torch.randn(ELEMENTS) for i in range(COUNT)}


@contextmanager
def engine_with_step(root: Path) -> Iterator[CheckpointEngine]:
    """With one step committed: the state of :func:`made`."""
    engine = CheckpointEngine(root)
    engine.save(made()).result(TIMEOUT)
    yield engine
    engine.close_blocking()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CheckpointEngine]:
    with engine_with_step(tmp_path) as engine:
        yield engine


def data_file(engine: CheckpointEngine) -> Path:
    (path,) = engine.root.glob("step_*/*.distcp")
    return path


def load(engine: CheckpointEngine, state: State, **changed: bool) -> LoadReport:
    options = {"strict": False, "allow_missing": False, "fallback": True} | changed
    return engine.load(state, None, **options).result(TIMEOUT)


def zeros() -> State:
    return {name: torch.zeros(ELEMENTS) for name in made()}


def check_equal(state: State) -> None:
    assert all(torch.equal(state[name], value) for name, value in made().items())


def change(path: Path, edit: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    edit(data)
    path.write_bytes(data)


def place_of(path: Path, name: str) -> int:
    """Where the raw bytes of a tensor begin in the data file."""
    return path.read_bytes().index(made()[name].numpy().tobytes())


class Reads:
    """What was read of data files, as it is read; may fail or hold the first read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans: list[tuple[int, int]] = []
        self.begun = threading.Event()
        self.error: OSError | None = None
        inner = datafile.ReadFile._read

        def counted(file: datafile.ReadFile, offset: int, views: list[memoryview]) -> int:
            self.begun.set()
            self.spans.append((offset, sum(view.nbytes for view in views)))
            error, self.error = self.error, None
            if error is not None:
                raise error
            return inner(file, offset, views)

        monkeypatch.setattr(datafile.ReadFile, "_read", counted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def test_a_flipped_byte_of_any_tensor_is_found_and_named(engine: CheckpointEngine) -> None:
    path, whole = data_file(engine), data_file(engine).read_bytes()
    for number in (0, COUNT // 2, COUNT - 1):
        name = f"layer.{number}.bias"
        place = place_of(path, name)
        change(path, lambda data, place=place: data.__setitem__(place + 7, data[place + 7] ^ 1))
        with pytest.raises(MismatchError, match=name) as caught:
            load(engine, zeros(), fallback=False)
        assert path.name in str(caught.value)
        path.write_bytes(whole)
    check_equal_after_load(engine)


def check_equal_after_load(engine: CheckpointEngine) -> None:
    state = zeros()
    load(engine, state)
    check_equal(state)


def test_swapped_tensors_are_found(engine: CheckpointEngine) -> None:
    path = data_file(engine)
    one, other = place_of(path, "layer.3.bias"), place_of(path, "layer.500.bias")

    def swap(data: bytearray) -> None:
        nbytes = 4 * ELEMENTS
        data[one : one + nbytes], data[other : other + nbytes] = data[other : other + nbytes], data[one : one + nbytes]

    change(path, swap)
    with pytest.raises(MismatchError, match=r"layer\.(3|500)\.bias"):
        load(engine, zeros(), fallback=False)


def test_a_byte_that_belongs_to_no_tensor_spoils_no_load(engine: CheckpointEngine) -> None:
    """``verify`` finds it."""
    path = data_file(engine)
    change(path, lambda data: data.__setitem__(-1, data[-1] ^ 1))
    state = zeros()
    assert load(engine, state, fallback=False).verified
    check_equal(state)


def test_a_file_is_read_once_and_no_byte_of_it_twice(engine: CheckpointEngine, reads: Reads) -> None:
    state, nbytes = zeros(), data_file(engine).stat().st_size
    report = load(engine, state)
    check_equal(state)
    assert sum(length for _, length in reads.spans) == report.bytes_read <= nbytes + 4096
    assert report.verified


def test_what_can_never_be_read_fails_the_load_with_its_own_error(
    engine: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> int:
        raise OSError(5, "always")

    monkeypatch.setattr(datafile.ReadFile, "_read", fails)
    with pytest.raises(ReadError, match="always") as caught:
        load(engine, zeros())
    assert caught.value.errno == 5


@pytest.mark.parametrize("nbytes", [0, 1, 4096])
def test_a_file_that_was_cut_short_is_a_mismatch_and_passed_by(engine: CheckpointEngine, nbytes: int) -> None:
    path = data_file(engine)
    engine.save({name: value + 1 for name, value in made().items()}).result(TIMEOUT)
    (newer,) = set(engine.root.glob("step_*/*.distcp")) - {path}
    newer.write_bytes(newer.read_bytes()[:nbytes])
    with pytest.raises(MismatchError, match=newer.name):
        load(engine, zeros(), fallback=False)
    state = zeros()
    report = load(engine, state)
    assert [skipped.step for skipped in report.skipped] == [2]
    check_equal(state)


def test_a_template_that_does_not_match_is_told_and_left_alone(engine: CheckpointEngine, reads: Reads) -> None:
    state = zeros()
    state["layer.7.bias"] = torch.zeros(ELEMENTS + 1)
    with pytest.raises(TemplateMismatchError, match=r"layer\.7\.bias") as caught:
        load(engine, state)
    assert not caught.value.target_modified
    assert not any(value.any() for value in state.values())
    path = data_file(engine)
    path.unlink()
    with pytest.raises(TemplateMismatchError):  # goes before a file that is missing
        load(engine, state)
    with pytest.raises(MismatchError, match=path.name):
        load(engine, zeros(), fallback=False)


def test_a_tensor_that_fits_vouches_for_no_other_that_looks_different(engine: CheckpointEngine) -> None:
    state, wide = zeros(), torch.zeros(2 * ELEMENTS)
    state |= {
        "layer.1.bias": torch.nn.Parameter(torch.zeros(ELEMENTS)),
        "layer.2.bias": wide[::2],
        "layer.3.bias": torch._neg_view(torch.zeros(ELEMENTS)),
        "layer.4.bias": torch.zeros(ELEMENTS, requires_grad=True),
        "layer.5.bias": wide[1::2],
    }
    load(engine, state, fallback=False)
    check_equal(state)
    state["layer.6.bias"] = torch.zeros(ELEMENTS, dtype=torch.float64)
    with pytest.raises(TemplateMismatchError, match=r"layer\.6\.bias.*float64"):
        load(engine, state)


def test_without_verification_nothing_is_summed_and_nothing_said_to_be_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CheckpointEngine(tmp_path, EngineConfig(verify="never"))
    engine.save(made()).result(TIMEOUT)
    state = zeros()
    with monkeypatch.context() as patched:
        patched.setattr(deliver_pieces, "crc32_of", None)
        assert not load(engine, state).verified
    check_equal(state)
    engine.close_blocking()


def test_ties_views_and_arrays_come_back_beside_small_tensors(tmp_path: Path) -> None:
    engine = CheckpointEngine(tmp_path)
    state: dict[str, object] = dict(made())
    state |= {
        "tied": state["layer.0.bias"],
        "permuted": torch.randn(30, 20).t(),
        "complex": torch.randn(9, dtype=torch.complex64),
        "blocks": torch.randn(700_000),
        "object": {"text": "x" * 100},
    }
    engine.save(state).result(TIMEOUT)
    target = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for name, value in state.items()
    }
    target["object"] = {"text": ""}
    target["permuted"] = torch.zeros(20, 30)
    target["complex"] = torch.zeros(9, dtype=torch.complex64).conj()
    engine.load(target, None, strict=True, allow_missing=False, fallback=False).result(TIMEOUT)
    for name, value in state.items():
        assert torch.equal(target[name], value) if isinstance(value, torch.Tensor) else target[name] == value, name
    engine.close_blocking()


def test_memory_that_a_thread_of_a_given_up_load_still_reads_to_is_no_other_loads(
    engine: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, inner = threading.Event(), threading.Event(), datafile.ReadFile._read
    held: list[memoryview] = []

    def held_once(file: datafile.ReadFile, offset: int, views: list[memoryview]) -> int:
        if not begun.is_set():
            held.extend(views)
            begun.set()
            assert goes_on.wait(TIMEOUT)
        return inner(file, offset, views)

    monkeypatch.setattr(datafile.ReadFile, "_read", held_once)
    first = engine.load(zeros())
    assert begun.wait(TIMEOUT)
    first._give_up()
    try:
        state = zeros()
        load(engine, state)
        check_equal(state)
        assert not any(held[0].tobytes()[:4096]), "the memory of the thread that still reads"
    finally:
        goes_on.set()
    with pytest.raises(SaveCancelledError):
        first.result(TIMEOUT)


def test_what_was_read_of_the_small_files_is_freed_behind_the_load(
    engine: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[weakref.ref[read_context.Checkpoint]] = []
    inner = read_context.open_checkpoint

    async def noted(*arguments: Any, **options: Any) -> read_context.Checkpoint:
        checkpoint = await inner(*arguments, **options)
        opened.append(weakref.ref(checkpoint))
        return checkpoint

    monkeypatch.setattr(read_context, "open_checkpoint", noted)
    state = {"layer.0.bias": torch.zeros_like(made()["layer.0.bias"])}
    load(engine, state)
    engine.close_blocking()
    assert [checkpoint() for checkpoint in opened] == [None]
