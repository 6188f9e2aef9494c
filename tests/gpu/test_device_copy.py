"""``device_copy_bytes``: large tensors are copied on the device first. Needs a GPU: skipped elsewhere."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from cuda_machine import MIB, STAGINGS, TIMEOUT, ones

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.config import Staging
from aio_ckpt.memory.cuda import CudaCopies

pytestmark = pytest.mark.gpu

GIB = 1 << 30
Room = int | Literal["auto"]


def mixed(value: float) -> dict[str, torch.Tensor]:
    """Large tensors of several dtypes and layouts, small ones beside them, and host memory."""
    state = {f"large{i}": torch.full((3 * MIB + i,), value, device="cuda") for i in range(6)}
    state |= {f"small{i}": torch.full((100 + i,), value, device="cuda") for i in range(100)}
    dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.complex64, torch.uint16)
    state |= {str(dtype): torch.full((2 * MIB,), value, device="cuda").to(dtype) for dtype in dtypes}
    state["transposed"] = torch.full((1500, 1000), value, device="cuda").t()
    state["every other"] = torch.full((1500, 2000), value, device="cuda")[:, ::2]
    state["conj"] = torch.full((2 * MIB,), value, device="cuda", dtype=torch.complex64).conj()
    state["host"] = torch.full((1000,), value)
    return state


def fill(state: dict[str, torch.Tensor], value: float) -> None:
    for tensor in state.values():
        tensor.copy_(torch.full(tensor.shape, value, device=tensor.device))


def check(found: object, state: dict[str, torch.Tensor], value: float) -> None:
    assert isinstance(found, dict)
    for name, tensor in state.items():
        wanted = torch.full(tensor.shape, value).to(tensor.dtype)
        assert torch.equal(found[name].resolve_conj().float(), wanted.float()), name


@pytest.fixture
def left_bytes() -> Iterator[int]:
    """A device on which all is taken but so much; nothing is cached there."""
    gc.collect()
    torch.cuda.empty_cache()
    left = 20 * GIB
    taken = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda")
    yield left
    del taken
    torch.cuda.empty_cache()


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("is_guarded", [False, True])
@pytest.mark.parametrize("room", ["auto", 40 * MIB, 0])
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_an_update_right_after_save_never_tears_the_snapshot(
    tmp_path: Path, staging: Staging, room: Room, is_guarded: bool
) -> None:
    state = mixed(0.0)
    settings = EngineConfig(staging=staging, device_copy_bytes=room, debug=True, max_in_flight=2)
    parameters = [torch.nn.Parameter(state[f"large{i}"]) for i in range(6)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    with SyncCheckpointEngine(tmp_path, settings) as engine:
        if is_guarded:
            engine.guard(optimizer)
        tickets = []
        for step in range(1, 5):
            fill(state, step)
            tickets.append(engine.save(state, step=step))
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 50.0)
            optimizer.step()
            fill({name: tensor for name, tensor in state.items() if not name.startswith("large")}, 100.0)
        for ticket in tickets:
            ticket.result(TIMEOUT)
        for step in range(1, 5):
            check(engine.read(step), state, step)


def test_another_stream_that_is_fenced_waits_for_the_copy(tmp_path: Path) -> None:
    state = ones(16, 256 * MIB, 0.0)
    other = torch.cuda.Stream()
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(1, 4):
            for tensor in state.values():
                tensor.fill_(step)
            ticket = engine.save(state, step=step)
            ticket.fence(other)
            with torch.cuda.stream(other):
                for tensor in reversed(state.values()):
                    tensor.fill_(100)
            torch.cuda.current_stream().wait_stream(other)
            ticket.result(TIMEOUT)
            check(engine.read(step), state, step)


@pytest.mark.parametrize("is_guarded", [True, False])
def test_the_stream_is_free_before_the_state_has_left_the_device(tmp_path: Path, is_guarded: bool) -> None:
    sizes = [64 * MIB] * 16 + [1000] * 8  # 4 GiB: 80 ms of copying. The small ones get no device copy
    parameters = [torch.nn.Parameter(torch.ones(size, device="cuda")) for size in sizes]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    state = {str(i): parameter for i, parameter in enumerate(parameters)}
    with SyncCheckpointEngine(tmp_path) as engine:
        if is_guarded:
            engine.guard(optimizer)
        engine.save(state, step=1).result(TIMEOUT)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # the first of a process imports for longer than the copies take
        with torch.no_grad():
            torch._foreach_add_(parameters, 1.0)
        torch.cuda.synchronize()
        ticket = engine.save(state, step=2)
        optimizer.step()
        stepped = torch.cuda.Event()
        stepped.record()
        stepped.synchronize()
        assert ticket.staged.state == "pending"
        ticket.result(TIMEOUT)
        back = engine.read(2)
    assert isinstance(back, dict)
    assert all(bool((tensor == 1).all()) for tensor in back.values())
    assert all(bool((parameter == 0).all()) for parameter in parameters)


def device_allocs() -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    return stats["num_device_alloc"], stats["num_device_free"]


def test_a_copy_is_free_when_save_returns_and_the_next_takes_the_same_memory(tmp_path: Path) -> None:
    state = ones(8, 32 * MIB, 1.0)
    gc.collect()
    torch.cuda.empty_cache()
    with SyncCheckpointEngine(tmp_path) as engine:
        before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        ticket = engine.save(state)
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.memory_reserved() - reserved >= 8 * 32 * MIB
        ticket.result(TIMEOUT)
        calls = device_allocs()
        for _ in range(3):
            engine.save(state).result(TIMEOUT)
        assert device_allocs() == calls


def test_training_that_needs_more_than_is_free_gets_the_memory_and_the_snapshot_is_whole(
    tmp_path: Path, left_bytes: int
) -> None:
    state = ones(16, 256 * MIB, 1.0)  # 4 GiB, and 4 for the copy
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(1, 4):
            for tensor in state.values():
                tensor.fill_(step)
            reserved = torch.cuda.memory_reserved()
            ticket = engine.save(state, step=step)
            assert torch.cuda.memory_reserved() - reserved >= 4 * GIB
            for tensor in state.values():
                tensor.fill_(-1)
            activations = torch.full((left_bytes - 6 * GIB,), 7, dtype=torch.uint8, device="cuda")
            ticket.result(TIMEOUT)
            check(engine.read(step), state, step)
            assert activations.min() == activations.max() == 7
            del activations
            torch.cuda.empty_cache()


def test_a_device_without_room_is_asked_for_none(tmp_path: Path, left_bytes: int) -> None:
    state = ones(4, 256 * MIB, 1.0)
    taken = torch.empty(left_bytes - 3 * GIB, dtype=torch.uint8, device="cuda")
    cached = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    del cached
    with SyncCheckpointEngine(tmp_path, EngineConfig(gather_bytes=0)) as engine:
        calls = device_allocs()
        for step in range(1, 4):
            engine.save(state, step=step).result(TIMEOUT)
        assert device_allocs() == calls  # neither was memory asked for nor training's cache emptied
        check(engine.read(3), state, 1.0)
    del taken


def test_where_there_is_room_for_a_part_that_part_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = torch.cuda.mem_get_info()[1]
    margin = max(total // 20, GIB)
    monkeypatch.setattr(CudaCopies, "memory_info", lambda _: (margin + 1100 * MIB, total))
    state = ones(8, 256 * MIB, 1.0)
    with SyncCheckpointEngine(tmp_path) as engine:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for step in range(1, 4):
            for tensor in state.values():
                tensor.fill_(step)
            ticket = engine.save(state, step=step)
            for tensor in state.values():
                tensor.fill_(-1)
            ticket.result(TIMEOUT)
            check(engine.read(step), state, step)
        assert 1024 * MIB <= torch.cuda.max_memory_allocated() - before < 1400 * MIB
