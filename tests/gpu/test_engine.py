"""The same engine on CUDA tensors. Needs a GPU: skipped elsewhere, with the reason printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_machine import MIB, STAGINGS, ones

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.config import Staging
from aio_ckpt.errors import ConfigError
from aio_ckpt.memory import cuda as device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_mixed_state_comes_back_bit_for_bit(tmp_path: Path, staging: Staging) -> None:
    torch.manual_seed(1)
    state = {
        "large": torch.randn(3 * MIB, device="cuda"),
        "small": [torch.randn(7, 3, device="cuda") for _ in range(50)],
        "half": torch.randn(1000, device="cuda", dtype=torch.bfloat16),
        "strided": torch.randn(64, 64, device="cuda").t(),
        "sliced": torch.randn(64, 64, device="cuda")[::2, 1::3],
        "conj": torch.randn(33, device="cuda", dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3.5, device="cuda"),
        "empty": torch.empty(0, 4, device="cuda"),
        "host": torch.randn(100),
        "step": 7,
    }
    with SyncCheckpointEngine(tmp_path, EngineConfig(staging=staging, debug=True)) as engine:
        engine.save(state).result(60)
        back = engine.read()
        template = {
            key: [torch.zeros_like(v) for v in value] if isinstance(value, list) else value
            for key, value in state.items()
        }
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                template[key] = torch.zeros_like(value.resolve_conj())
        template["step"] = 0
        engine.load(template)
    assert isinstance(back, dict)
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(back[key], value.cpu()), key
            assert torch.equal(template[key], value), key
            assert template[key].device == value.device
    assert all(torch.equal(a, b.cpu()) for a, b in zip(back["small"], state["small"], strict=True))
    assert template["step"] == 7


@pytest.mark.parametrize("staging", STAGINGS)
def test_an_update_right_after_save_never_tears_the_snapshot(tmp_path: Path, staging: Staging) -> None:
    state = ones(16, 32 * MIB, 0.0)
    with SyncCheckpointEngine(tmp_path, EngineConfig(staging=staging, debug=True, max_in_flight=2)) as engine:
        tickets = []
        for step in range(1, 5):
            torch._foreach_add_(list(state.values()), 1.0)
            tickets.append(engine.save(state, step=step))
            torch._foreach_mul_(list(state.values()), -5.0)
            torch._foreach_div_(list(state.values()), -5.0)
        for save, ticket in enumerate(tickets, start=1):
            ticket.result(60)
            back = engine.read(save)
            assert isinstance(back, dict)
            for name, value in back.items():
                assert bool((value == float(save)).all()), (save, name, value.unique())


def test_an_update_on_a_second_stream_behind_the_current_one_never_tears_the_snapshot(tmp_path: Path) -> None:
    state = ones(8, 64 * MIB, 1.0)
    other = torch.cuda.Stream()
    with SyncCheckpointEngine(tmp_path, EngineConfig(debug=True)) as engine:
        ticket = engine.save(state)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            torch._foreach_add_(list(state.values()), 1.0)
        ticket.result(60)
        back = engine.read()
    assert isinstance(back, dict)
    assert all(bool((value == 1.0).all()) for value in back.values())


def test_memory_freed_and_reallocated_at_once_is_not_captured(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, EngineConfig(debug=True)) as engine:
        for step in range(1, 4):
            state = ones(8, 64 * MIB, float(step))
            ticket = engine.save(state, step=step)
            del state
            for _ in range(4):
                junk = ones(8, 64 * MIB, -7.0)
                del junk
            ticket.result(60)
            back = engine.read(step)
            assert isinstance(back, dict)
            assert all(bool((value == float(step)).all()) for value in back.values())


def test_a_state_larger_than_the_budget_goes_in_waves(tmp_path: Path) -> None:
    state = ones(12, 32 * MIB, 3.0)
    with SyncCheckpointEngine(tmp_path, EngineConfig(debug=True, budget_bytes=100 * MIB)) as engine:
        ticket = engine.save(state)
        torch._foreach_zero_(list(state.values()))
        ticket.result(120)
        assert engine.lifetime.arena_bytes <= 100 * MIB
        back = engine.read()
    assert isinstance(back, dict)
    assert all(bool((value == 3.0).all()) for value in back.values())


def test_staged_comes_before_committed_and_sources_are_let_go(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, EngineConfig()) as engine:
        engine.save(ones(4, 64 * MIB, 1.0)).result(60)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        ticket = engine.save(ones(4, 64 * MIB, 2.0))
        ticket.staged.result(60)
        assert torch.cuda.memory_allocated() == before
        ticket.result(60)


def test_shm_staging_copies_as_fast_as_pinned(tmp_path: Path) -> None:
    """ACCEPTANCE S3.8, its cause: both arenas are page-locked for the driver (test_cuda_recipes.py has the ratio)."""
    for staging in ("pinned", "shm"):
        with SyncCheckpointEngine(tmp_path / staging, EngineConfig(staging=staging)) as engine:
            ticket = engine.save(ones(2, 16 * MIB, 1.0))
            arena = engine._resources.lifetime._leases[0].arena
            assert arena.tensor.is_pinned(), staging
            ticket.result(60)


def test_the_pointer_fingerprint_sees_fresh_cuda_memory(tmp_path: Path) -> None:
    keep = [ones(3, 4 * MIB, float(i)) for i in range(3)]
    with SyncCheckpointEngine(tmp_path, EngineConfig()) as engine:
        reports = [engine.save(state).result(60) for state in keep]
        assert [report.fingerprint_hit for report in reports if report] == [False, False, False]
        assert [report.plan_hit for report in reports if report] == [False, True, True]
        back = engine.read()
    assert isinstance(back, dict)
    assert all(bool((value == 2.0).all()) for value in back.values())


# -- guards ---------------------------------------------------------------------------------------


def guarded_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(2048, 4096), torch.nn.BatchNorm1d(4096), torch.nn.Linear(4096, 2048))
    model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.randn(64, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("staging", STAGINGS)
def test_a_guarded_save_holds_what_was_there_before_the_step_the_forward_and_the_average(
    tmp_path: Path, staging: Staging
) -> None:
    model, optimizer = guarded_model()
    average = {name: value.clone() for name, value in model.state_dict().items()}
    ballast = ones(8, 64 * MIB, 1.0)  # so that the copies take long
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "average": average, "ballast": ballast}
    with SyncCheckpointEngine(tmp_path, EngineConfig(staging=staging, debug=True)) as engine:
        engine.guard(optimizer)
        for step in range(1, 6):
            torch.cuda.synchronize()
            wanted = {name: value.cpu() for name, value in model.state_dict().items()}
            moments = {key: value["exp_avg"].cpu() for key, value in optimizer.state_dict()["state"].items()}
            averages = {name: value.cpu() for name, value in average.items()}
            state["optim"] = optimizer.state_dict()
            ticket = engine.save(state, step=step)
            model(torch.randn(64, 2048, device="cuda")).square().mean().backward()  # BatchNorm's statistics move
            for name, value in model.state_dict().items():
                average[name].copy_(value) if value.dtype == torch.int64 else average[name].lerp_(value, 0.5)
            optimizer.step()
            ticket.result(60)
            back = engine.read(step)
            assert isinstance(back, dict)
            assert all(torch.equal(back["model"][name], value) for name, value in wanted.items()), step
            assert all(torch.equal(back["average"][name], value) for name, value in averages.items()), step
            assert all(torch.equal(back["optim"]["state"][key]["exp_avg"], v) for key, v in moments.items()), step


def test_a_guarded_save_leaves_the_stream_alone_and_fence_makes_it_wait(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(1 << 30, device="cuda"))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with SyncCheckpointEngine(tmp_path, EngineConfig()) as engine:
        engine.save({"p": parameter}, step=1).result(120)
        engine.guard(optimizer)
        torch.cuda.synchronize()
        ticket = engine.save({"p": parameter}, step=2)
        is_free = torch.cuda.Event()
        is_free.record()
        is_free.synchronize()
        assert ticket.staged.state == "pending"
        ticket.fence()
        is_copied = torch.cuda.Event()
        is_copied.record()
        is_copied.synchronize()
        with torch.no_grad():
            parameter.zero_()
        ticket.result(120)
        back = engine.read(2)
    assert isinstance(back, dict)
    assert bool((back["p"] == 1).all())


def test_a_guarded_state_in_waves_holds_the_old_values(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.ones(8 * MIB, device="cuda")) for _ in range(12)]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with SyncCheckpointEngine(tmp_path, EngineConfig(debug=True, budget_bytes=100 * MIB)) as engine:
        engine.guard(optimizer)
        ticket = engine.save(dict(enumerate(parameters)))
        optimizer.step()
        ticket.result(120)
        back = engine.read()
    assert isinstance(back, dict)
    assert all(bool((value == 1).all()) for value in back.values())


def test_a_guarded_step_inside_a_captured_graph_is_an_error(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, device="cuda"), requires_grad=False)
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam([parameter], capturable=True)
    optimizer.step()
    with SyncCheckpointEngine(tmp_path, EngineConfig()) as engine:
        engine.guard(optimizer)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ConfigError, match="captured CUDA graph"), torch.cuda.graph(graph):
            parameter.mul_(1)  # else the graph is empty, of which torch warns
            optimizer.step()


# -- many small tensors ---------------------------------------------------------------------------


def many_small(count: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float16)
    shapes = ((3, 5), (1000,), (), (0, 2), (64, 33), (40_000,))
    made = {}
    for i in range(count):
        value = torch.randint(0, 100, shapes[i % 6], device="cuda").to(dtypes[i % 5])
        made[f"t{i:05d}"] = value.t() if value.dim() == 2 and i % 2 else value
    return made


@pytest.mark.parametrize("gathers", [True, False])
def test_thousands_of_small_tensors_come_back(tmp_path: Path, gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not gathers:
        monkeypatch.setattr(device.CudaCopies, "allocate", lambda *_: None)  # no device memory to be had
    state = many_small(6000)
    with SyncCheckpointEngine(tmp_path, EngineConfig(debug=True)) as engine:
        for step in range(1, 4):
            for value in state.values():
                value.add_(1)
            wanted = {name: value.cpu() for name, value in state.items()}
            ticket = engine.save(state, step=step)
            for value in state.values():
                value.zero_()
            ticket.result(60)
            back = engine.read(step)
            assert isinstance(back, dict)
            assert all(torch.equal(back[name], value) for name, value in wanted.items())
            for name, value in state.items():
                value.copy_(wanted[name])


@pytest.mark.parametrize("answer", ["batch", "no batch", "refused"])
def test_large_tensors_are_copied_by_a_batch_or_one_by_one(
    tmp_path: Path, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, rows = device.batch_copy(), []
    if answer == "batch" and real is None:
        pytest.skip("this driver has no batches of copies")

    def copy(given: list[tuple[int, int, int]], base: int, stream: int) -> int:
        rows.append(len(given))
        return real(given, base, stream) if answer == "batch" and real is not None else 801

    monkeypatch.setattr(device, "batch_copy", lambda: None if answer == "no batch" else copy)
    state = {f"w{i}": torch.randn(MIB + i, device="cuda") for i in range(40)}
    with SyncCheckpointEngine(tmp_path, EngineConfig(debug=True)) as engine:
        for step in (1, 2):
            engine.save(state, step=step).result(60)
            wanted = {name: tensor.cpu() for name, tensor in state.items()}
            for tensor in state.values():
                tensor.add_(1.0)
            back = engine.read(step)
            assert isinstance(back, dict)
            assert all(torch.equal(back[name], tensor) for name, tensor in wanted.items()), step
    assert bool(rows) == (answer != "no batch")
