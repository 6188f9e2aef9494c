"""A small LightningModule, its data and its Trainer. Import it only where Lightning can be imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.distributed.fsdp import fully_shard


class Small(pl.LightningModule):
    """Two layers and dropout; keeps each loss. Its data order and its dropout depend on the step alone."""

    def __init__(self, width: int = 16, fails_at: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters("width")
        torch.manual_seed(3)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))
        self.fails_at = fails_at
        self.losses: dict[int, float] = {}

    def training_step(self, batch: Any) -> torch.Tensor:
        torch.manual_seed(self.global_step)
        loss = torch.nn.functional.dropout(self.net(batch[0]), 0.1).square().mean()
        if self.global_step == self.fails_at:
            raise RuntimeError("the step fails")
        self.losses[self.global_step] = loss.item()
        self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class Sharded(Small):
    """:class:`Small`, sharded by FSDP2."""

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Ranks(LightningEnvironment):
    """An environment whose process group stands already."""

    creates_processes_externally = True

    def __init__(self, rank: int, count: int) -> None:
        super().__init__()
        self.rank, self.count = rank, count

    def global_rank(self) -> int:
        return self.rank

    def local_rank(self) -> int:
        return self.rank

    def world_size(self) -> int:
        return self.count

    def set_global_rank(self, rank: int) -> None: ...
    def set_world_size(self, size: int) -> None: ...


def batches() -> Any:
    """Four batches."""
    data = torch.utils.data.TensorDataset(torch.arange(128.0).reshape(16, 8) / 128)
    return torch.utils.data.DataLoader(data, batch_size=4)


def trainer(folder: Path, epochs: int, *plugins: Any, callbacks: Any = (), **options: Any) -> pl.Trainer:
    """A Trainer on the CPU that says nothing."""
    return pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, **options},
        max_epochs=epochs,
        plugins=[*plugins],
        callbacks=[*callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        default_root_dir=folder,
    )
