"""Loading to the device: this library, dcp.load and torch.load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor, Shard, zeros

from aio_ckpt.sync import SyncCheckpointEngine
from bench.common.pagecache import fsync_tree
from bench.gpu.contenders import WAIT_SECS, UnavailableError
from bench.gpu.train import Ground, Trainer, local_of

__all__ = ["LOADERS", "Loader"]


class Loader(ABC):
    """Has saved the trainer's state; loads it cold into tensors on the device."""

    title: ClassVar[str]
    """Name of the contender in tables."""
    setting: ClassVar[str] = "default"
    """Its settings, as tables show them."""

    def __init__(self, trainer: Trainer, ground: Ground, folder: Path) -> None:
        self.wanted = dict(trainer.state)
        self.ground = ground
        self.folder = folder
        self.filled: Mapping[str, torch.Tensor] = {name: self.empty(value) for name, value in self.wanted.items()}
        self.write()
        ground.barrier()
        fsync_tree(folder)

    @classmethod  # noqa: B027 - most run everywhere
    def check(cls, shape: str, world: int) -> None:
        """Before anything is built, for a state of ``shape`` on so many ranks.

        Raises:
            UnavailableError: it cannot run here.
        """

    def empty(self, wanted: torch.Tensor) -> torch.Tensor:
        """What a tensor is loaded into."""
        return torch.zeros_like(wanted)

    @abstractmethod
    def write(self) -> None:
        """Make the checkpoint."""

    @abstractmethod
    def load(self) -> None:
        """The timed operation; the device may still be copying."""

    def verify(self) -> None:
        """A fast load of wrong bytes is no load.

        Raises:
            AssertionError: names the first tensor that differs.
        """
        laid = {name: _laid_as(value, self.wanted[name]) for name, value in self.filled.items()}
        filled = local_of(laid)
        for name, value in local_of(self.wanted).items():
            if not torch.equal(filled[name], value):
                raise AssertionError(f"{self.title}: {name} differs from what was saved")


class EngineLoader(Loader):
    """``engine.load(state)``: every sum checked, in place."""

    title = "aio_ckpt"

    def __init__(self, trainer: Trainer, ground: Ground, folder: Path) -> None:
        self.given = dict(trainer.state)
        self.engine = SyncCheckpointEngine(folder / "root")
        super().__init__(trainer, ground, folder)
        self.template = dict(self.filled)

    def write(self) -> None:
        self.engine.save(self.given).result(WAIT_SECS)

    def load(self) -> None:
        self.engine.load(self.template)


class DcpLoader(Loader):
    """``dcp.load(state)``: in place."""

    title = "dcp.load"

    def write(self) -> None:
        dcp_save(self.wanted, checkpoint_id=self.folder / "ckpt")

    def load(self) -> None:
        dcp_load(dict(self.filled), checkpoint_id=self.folder / "ckpt")


class _ByColumns(Loader):
    """Into another layout than it was saved in: shards of columns where the state has shards of rows."""

    setting = "by columns"

    @classmethod
    def check(cls, shape: str, world: int) -> None:
        if world == 1 or shape != "fsdp2":
            raise UnavailableError("another layout needs --shape fsdp2 and two ranks")

    def empty(self, wanted: torch.Tensor) -> torch.Tensor:
        if not isinstance(wanted, DTensor) or wanted.ndim < 2:
            return super().empty(wanted)
        return zeros(wanted.shape, dtype=wanted.dtype, device_mesh=wanted.device_mesh, placements=[Shard(1)])


class EngineColumns(_ByColumns, EngineLoader):
    """``engine.load`` by columns."""


class DcpColumns(_ByColumns, DcpLoader):
    """``dcp.load`` by columns."""


def _laid_as(value: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    if isinstance(value, DTensor) and isinstance(wanted, DTensor):
        return value.redistribute(placements=wanted.placements)
    return value


class TorchLoader(Loader):
    """``torch.load(map_location=device)``: fresh tensors, nothing copied to live ones."""

    title = "torch.load"

    def write(self) -> None:
        torch.save(local_of(self.wanted), self.folder / f"state-{self.ground.rank}.pt")

    def load(self) -> None:
        self.filled = {}
        path = self.folder / f"state-{self.ground.rank}.pt"
        self.filled = torch.load(path, map_location=self.ground.device, weights_only=True)


class TorchMmapLoader(TorchLoader):
    """The file mapped."""

    setting = "mmap"

    def load(self) -> None:
        self.filled = {}
        path = self.folder / f"state-{self.ground.rank}.pt"
        mapped = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        self.filled = {name: value.to(self.ground.device) for name, value in mapped.items()}


LOADERS: Mapping[str, type[Loader]] = {
    "aio": EngineLoader,
    "aio-columns": EngineColumns,
    "dcp-load": DcpLoader,
    "dcp-load-columns": DcpColumns,
    "torch-load": TorchLoader,
    "torch-load-mmap": TorchMmapLoader,
}
"""By key."""
