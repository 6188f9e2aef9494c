"""A small model that DeepSpeed trains on gloo ranks. Import it only where DeepSpeed can be imported."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gated_storage import GatedStorage

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.runtime.portal import Executor

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0")
WAIT_SECS = 60.0


def quiet_deepspeed() -> Any:
    """The package, without its warnings, and without its operation in C++, which it would compile for minutes."""
    warnings.simplefilter("ignore")
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def small(*, is_frozen: bool = False) -> torch.nn.Module:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    if is_frozen:
        model[0].requires_grad_(False)
    return model


def with_experts() -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    """A model of four experts on two ranks, and its groups of parameters."""
    moe: Any = importlib.import_module("deepspeed.moe.layer")
    groups: Any = importlib.import_module("deepspeed.moe.utils")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = moe.MoE(16, torch.nn.Linear(16, 16), num_experts=4, ep_size=2)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.experts(batch)[0]
            return found

    torch.manual_seed(3)
    model = Model()
    given = {"params": [*model.parameters()], "name": "all"}
    return model, groups.split_params_into_different_moe_groups_for_optimizer(given)


def settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": stage > 0},
    }


class Run:
    """One trainer, with our engine or with that of DeepSpeed."""

    def __init__(
        self,
        rank: int,
        count: int,
        folder: Path,
        *,
        stage: int = 1,
        is_ours: bool = True,
        is_frozen: bool = False,
        has_experts: bool = False,
        config: EngineConfig | None = None,
    ) -> None:
        os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(count))
        deepspeed = quiet_deepspeed()
        from aio_ckpt.integrations import deepspeed as adapter

        self.rank, self.folder, self.dtype = rank, str(folder), torch.bfloat16 if stage else torch.float32
        if has_experts:
            model, trained = with_experts()
        else:
            model = small(is_frozen=is_frozen)
            trained = [{"params": [each for each in model.parameters() if each.requires_grad]}]
        optimizer = torch.optim.AdamW(trained, lr=0.05)
        self.engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage))[0]
        if is_ours:
            adapter.install(self.engine, config)

    def losses(self, count: int) -> list[float]:
        """Train ``count`` steps."""
        found = []
        for _ in range(count):
            torch.manual_seed(100 * self.engine.global_steps + self.rank)
            loss = self.engine(torch.randn(4, 16).to(self.dtype)).float().square().mean()
            self.engine.backward(loss)
            self.engine.step()
            found.append(loss.item())
        return found

    def save(self, tag: str | None = None, **options: Any) -> None:
        self.engine.save_checkpoint(self.folder, tag=tag, **options)

    def load(self, folder: Path | None = None, **options: Any) -> str:
        """Load; the tag of what was loaded."""
        found, _ = self.engine.load_checkpoint(str(folder or self.folder), **options)
        return Path(found).parent.name

    def wait(self) -> None:
        self.engine.checkpoint_engine.wait()

    @property
    def latest(self) -> str:
        """What ``latest`` holds on every rank now; '' if there is none."""
        dist.barrier()
        path = Path(self.folder, "latest")
        found = path.read_text() if path.exists() else ""
        dist.barrier()
        return found


@contextlib.contextmanager
def gated_disk() -> Iterator[GatedStorage]:
    """The storage of all engines of the block."""
    quiet_deepspeed()
    from aio_ckpt.integrations import deepspeed as adapter

    executor = Executor("gated", 4)
    storage = GatedStorage(executor)

    def opened(*args: Any, **options: Any) -> SyncCheckpointEngine:
        return SyncCheckpointEngine(*args, storage=storage, **options)

    adapter.SyncCheckpointEngine = opened  # type: ignore[misc, assignment]
    try:
        yield storage
    finally:
        adapter.SyncCheckpointEngine = SyncCheckpointEngine  # type: ignore[misc]
        storage.open_gates()
        assert executor.close(WAIT_SECS)
