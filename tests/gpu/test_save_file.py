"""``save_file()`` of a state on a GPU: captured as it was at the call, in both formats, beside a guarded optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aio_ckpt import EngineConfig, SyncCheckpointEngine

pytestmark = pytest.mark.gpu

TIMEOUT = 60.0
MIB = 1 << 20


def on_gpu() -> dict[str, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(7)
    state = {f"small.{n}": torch.rand(n + 1, device="cuda", generator=generator) for n in range(200)}
    state |= {f"half.{n}": torch.rand(33, n + 1, device="cuda", generator=generator).bfloat16() for n in range(50)}
    state["large"] = torch.rand(16 * MIB, device="cuda", generator=generator)
    state["transposed"] = torch.rand(64, 128, device="cuda", generator=generator).t()
    state["host"] = torch.arange(1000)
    state["flags"] = torch.arange(77, device="cuda") % 2 == 0
    return state


@pytest.mark.parametrize("budget_bytes", [None, 32 * MIB], ids=["whole", "waves"])
@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_a_state_on_a_gpu_is_captured_as_it_was(tmp_path: Path, name: str, budget_bytes: int | None) -> None:
    state = on_gpu()
    wanted = {key: tensor.cpu() for key, tensor in state.items()}
    with SyncCheckpointEngine(tmp_path / "root", EngineConfig(budget_bytes=budget_bytes)) as engine:
        for round_ in range(3):
            ticket = engine.save_file(state, tmp_path / f"{round_}.{name}")
            kept = {key: tensor.clone() for key, tensor in state.items()}
            for tensor in state.values():
                tensor.zero_()  # queued behind the copies
            ticket.result(TIMEOUT)
            for key, tensor in state.items():
                tensor.copy_(kept[key])
    for round_ in range(3):
        path = tmp_path / f"{round_}.{name}"
        if name.endswith(".pt"):
            got = torch.load(path, map_location="cpu", weights_only=True)
            assert torch.load(path, weights_only=True)["large"].device.type == "cuda"
        else:
            got = pytest.importorskip("safetensors.torch").load_file(path)
        assert got.keys() == wanted.keys()
        for key, tensor in got.items():
            assert torch.equal(tensor, wanted[key]), (round_, key)


def test_a_guarded_optimizer_waits_for_the_copies(tmp_path: Path) -> None:
    model = torch.nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.guard(optimizer)
        for step in range(4):
            model(torch.ones(8, 4096, device="cuda")).sum().backward()
            wanted = {key: tensor.detach().cpu() for key, tensor in model.state_dict().items()}
            engine.save_file(model.state_dict(), tmp_path / f"{step}.pt")
            engine.save(model.state_dict())
            optimizer.step()
            ticket = engine.save_file({}, tmp_path / "end.pt")
            ticket.result(TIMEOUT)
            got = torch.load(tmp_path / f"{step}.pt", map_location="cpu")
            assert all(torch.equal(got[key], wanted[key]) for key in wanted), step


def test_files_that_together_exceed_the_budget_are_saved_within_it(tmp_path: Path) -> None:
    state = {f"w{number}": torch.full((4 * MIB,), float(number), device="cuda") for number in range(8)}
    config = EngineConfig(budget_bytes=20 * MIB, stall_timeout_secs=TIMEOUT)
    with SyncCheckpointEngine(tmp_path / "root", config) as engine:
        ticket = engine.save_file(state, tmp_path / "m.safetensors", max_shard_bytes=16 * MIB)
        for tensor in state.values():
            tensor.zero_()  # queued behind the copies
        ticket.result(TIMEOUT)
        assert engine.lifetime.leases == 0
    for number in range(8):
        file = pytest.importorskip("safetensors.torch").load_file(tmp_path / f"m-{number + 1:05d}-of-00008.safetensors")
        assert file[f"w{number}"].unique().tolist() == [number]
