"""One process whose state lies on two devices. Needs two GPUs: skipped elsewhere, with the reason printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_machine import MIB, STAGINGS, TIMEOUT

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.config import Staging

pytestmark = pytest.mark.gpu(2)

DEVICES = ("cuda:0", "cuda:1")


def spread(value: float) -> dict[str, torch.Tensor]:
    """Large tensors, and enough small ones that they are gathered, on both devices in turn; some on the host."""
    state = {f"large{i}": torch.full((4 * MIB,), value, device=DEVICES[i % 2]) for i in range(8)}
    state |= {f"small{i}": torch.full((1000 + i,), value, device=DEVICES[i % 2]) for i in range(200)}
    return state | {f"host{i}": torch.full((100,), value) for i in range(5)}


def assert_all(state: object, value: float) -> None:
    assert isinstance(state, dict)
    for name, tensor in state.items():
        assert bool((tensor == value).all()), f"{name}: {tensor.flatten()[:4]} instead of {value}"


@pytest.mark.parametrize("staging", STAGINGS)
def test_an_update_on_either_device_right_after_save_never_tears_the_snapshot(tmp_path: Path, staging: Staging) -> None:
    state = spread(0.0)
    with SyncCheckpointEngine(tmp_path, EngineConfig(staging=staging, debug=True)) as engine:
        for step in range(1, 6):
            for tensor in state.values():
                tensor.fill_(step)
            ticket = engine.save(state, step=step)
            for tensor in state.values():
                tensor.fill_(-1.0)
            ticket.result(TIMEOUT)
            assert_all(engine.read(step), step)


@pytest.mark.parametrize("current", DEVICES)
def test_a_guarded_step_waits_on_both_devices_whichever_is_current(tmp_path: Path, current: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(64 * MIB, device=device)) for device in DEVICES for _ in range(4)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    with SyncCheckpointEngine(tmp_path) as engine, torch.cuda.device(current):
        engine.guard(optimizer)
        for step in range(1, 4):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, -1.0)
            ticket = engine.save({str(i): parameter for i, parameter in enumerate(parameters)}, step=step)
            optimizer.step()
            ticket.result(TIMEOUT)
            assert_all(engine.read(step), step - 1)


def test_a_load_fills_tensors_on_both_devices(tmp_path: Path) -> None:
    target = spread(0.0)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(spread(3.0)).result(TIMEOUT)
        engine.load(target)
    assert_all(target, 3.0)
    assert [tensor.device.index for name, tensor in target.items() if name.startswith("large")] == [0, 1] * 4
