"""What a save must leave alone of the trainer's own CUDA: other devices, graphs, errors, inference mode."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from pathlib import Path

import pytest
import torch
from child_python import child_environment, python
from cuda_machine import MIB, TIMEOUT, ones

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.memory import cuda as device

pytestmark = pytest.mark.gpu


@pytest.mark.gpu(2)
def test_a_rank_that_uses_the_second_device_makes_no_context_on_the_first(tmp_path: Path) -> None:
    """Half a gigabyte for each rank of a host."""
    done = run(
        """
        import ctypes, sys
        import torch
        from aio_ckpt import EngineConfig, SyncCheckpointEngine

        torch.cuda.set_device(1)
        state = {f"w{i}": torch.ones(1 << 22, device="cuda") for i in range(8)}
        state |= {f"s{i}": torch.ones(100, device="cuda") for i in range(300)}
        optimizer = torch.optim.SGD([torch.nn.Parameter(value) for value in state.values()], lr=1.0)
        with SyncCheckpointEngine(sys.argv[1], EngineConfig(max_in_flight=2)) as engine:
            engine.guard(optimizer)
            engine.prepare(state).result()
            for _ in range(3):
                engine.save(state)
                optimizer.step()
            engine.ready()
            engine.load(state)
        flags, active = ctypes.c_uint(), ctypes.c_int(-1)
        code = ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
        print(code, active.value)
        """,
        tmp_path,
    )
    assert done == "0 0\n"


def run(source: str, root: Path) -> str:
    command = python(source, str(root), options=())
    return subprocess.run(
        command, env=child_environment(), capture_output=True, text=True, timeout=120, check=True
    ).stdout


def test_a_graph_is_captured_while_a_save_is_pending(tmp_path: Path) -> None:
    state = ones(64, 16 * MIB, 1.0)
    numbers, graphs = torch.zeros(16, device="cuda"), 0
    with SyncCheckpointEngine(tmp_path) as engine:
        for _ in range(3):
            ticket = engine.save(state)
            while not ticket.done():
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    numbers.add_(1)
                graph.replay()
                graphs += 1
            ticket.result(TIMEOUT)
    assert int(numbers[0]) == graphs > 0


def test_memory_that_cannot_be_locked_leaves_no_error_to_the_next_kernel() -> None:
    memory = mmap.mmap(-1, MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    torch.zeros(1, device="cuda")
    device.register_host_memory(address, MIB)
    try:
        with pytest.raises(RuntimeError):
            device.register_host_memory(address, MIB)
        assert float(torch.ones(1, device="cuda") + 1) == 2
    finally:
        device.unregister_host_memory(address)


@pytest.mark.parametrize("copied_bytes", [0, 1 << 30])
def test_what_is_made_in_inference_mode_serves_outside_of_it(tmp_path: Path, copied_bytes: int) -> None:
    state = ones(4, 4 * MIB, 0.0) | {f"s{i}": torch.zeros(100 + i, device="cuda") for i in range(300)}
    state["odd"] = torch.zeros(64, 64, device="cuda")[:, ::2]
    with SyncCheckpointEngine(tmp_path, EngineConfig(device_copy_bytes=copied_bytes)) as engine:
        for step in range(1, 4):
            for value in state.values():
                value.fill_(step)
            with torch.inference_mode(mode=step == 1):
                ticket = engine.save(state)
            for value in state.values():
                value.fill_(-1)
            ticket.result(TIMEOUT)
            found = engine.read(step)
            assert all(bool((found[name] == step).all()) for name in state)  # type: ignore[index]


def test_objects_that_grow_cost_no_memory_of_the_plan(tmp_path: Path) -> None:
    state = ones(4, 4 * MIB, 1.0)
    with SyncCheckpointEngine(tmp_path, EngineConfig(keep_last=1)) as engine:
        kept = []
        for pages in range(12):
            engine.save(state | {"history": bytes(4096 * pages + 1)}).result(TIMEOUT)
            plan = engine._resources.cache._plan
            assert plan is not None
            kept.append([len(table._cuts) for table in plan.copies.issued.values()])
        assert kept == [kept[0]] * 12
