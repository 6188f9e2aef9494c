"""``device_copy_bytes``: large tensors are copied on the device first. Needs a GPU: skipped elsewhere."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from cuda_machine import MIB, STAGINGS, TIMEOUT, ones

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.config import Staging

pytestmark = pytest.mark.gpu

ROOM = 8 << 30


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


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("room", [ROOM, 16 * MIB, 0])
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_an_update_right_after_save_never_tears_the_snapshot(tmp_path: Path, staging: Staging, room: int) -> None:
    state = mixed(0.0)
    settings = EngineConfig(staging=staging, device_copy_bytes=room, debug=True, max_in_flight=2)
    with SyncCheckpointEngine(tmp_path, settings) as engine:
        tickets = []
        for step in range(1, 5):
            fill(state, step)
            tickets.append(engine.save(state, step=step))
            fill(state, 100.0)
        for ticket in tickets:
            ticket.result(TIMEOUT)
        for step in range(1, 5):
            check(engine.read(step), state, step)


@pytest.mark.parametrize("is_guarded", [True, False])
def test_the_stream_is_free_before_the_state_has_left_the_device(tmp_path: Path, is_guarded: bool) -> None:
    parameters = [torch.nn.Parameter(torch.ones(64 * MIB, device="cuda")) for _ in range(16)]  # 4 GiB: 80 ms of copying
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    state = {str(i): parameter for i, parameter in enumerate(parameters)}
    with SyncCheckpointEngine(tmp_path, EngineConfig(device_copy_bytes=ROOM)) as engine:
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


def test_the_memory_is_kept_from_save_to_save_and_given_back(tmp_path: Path) -> None:
    state = ones(8, 32 * MIB, 1.0)
    gc.collect()
    with SyncCheckpointEngine(tmp_path, EngineConfig(device_copy_bytes=ROOM)) as engine:
        before = torch.cuda.memory_allocated()
        engine.save(state).result(TIMEOUT)
        kept = torch.cuda.memory_allocated() - before
        engine.save(state).result(TIMEOUT)
        assert torch.cuda.memory_allocated() - before == kept
        assert 0 <= kept - 8 * 32 * MIB < MIB
        engine.clear_cache()
        assert torch.cuda.memory_allocated() == before
