"""The contenders: this library, and what a user would pick instead, each as its documentation says."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.engine import CheckpointEngine
from bench.common.measure import DONE, Contender, Waitable
from bench.common.pagecache import fsync_tree, make_cold

__all__ = ["check_equal", "loaders", "process_group", "savers"]

State = Mapping[str, torch.Tensor]
ENGINE = "aio_ckpt"
ENGINE_SAVE_DURABILITY = "fsync of every file and directory, atomic rename, CRC32s"
DCP_DURABILITY = "fsync of data files; directory not"


@contextmanager
def process_group() -> Iterator[None]:
    """A gloo group of one, which ``dcp.async_save`` insists on."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.startswith("."):  # the engine's own directory stays, with its lock
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


# -- saving ---------------------------------------------------------------------------------------


class _Saver(Contender):
    def __init__(self, state: State, folder: Path) -> None:
        self.state = dict(state)
        self.folder = folder
        folder.mkdir(parents=True)

    def after(self) -> None:
        """Remove the checkpoint."""
        _empty(self.folder)


class EngineSave(_Saver):
    """``engine.save(state)``; done when committed."""

    name = ENGINE
    durability = ENGINE_SAVE_DURABILITY
    is_async = True

    def __init__(self, state: State, folder: Path, config: EngineConfig) -> None:
        super().__init__(state, folder)
        self.engine = CheckpointEngine(folder, config)

    def start(self) -> Waitable:
        """Returns the ticket's milestone."""
        return self.engine.save(self.state).committed

    def close(self) -> None:
        """Close the engine."""
        self.engine.close_blocking()


class TorchSave(_Saver):
    """``torch.save`` to one file."""

    name = "torch.save"
    durability = "none: page cache"

    def start(self) -> Waitable:
        """Begin one save of the state."""
        torch.save(self.state, self.folder / "state.pt")
        return DONE


class TorchSaveFsync(_Saver):
    """``torch.save`` and what makes it durable."""

    name = "torch.save + fsync"
    durability = "fsync of file and directory"

    def start(self) -> Waitable:
        """Save, fsync."""
        torch.save(self.state, self.folder / "state.pt")
        fsync_tree(self.folder)
        return DONE


class SafetensorsSave(_Saver):
    """``safetensors.torch.save_file``."""

    name = "safetensors"
    durability = "none: page cache"

    def start(self) -> Waitable:
        """Begin one save of the state."""
        safetensors.torch.save_file(self.state, self.folder / "state.safetensors")
        return DONE


class SafetensorsSaveFsync(_Saver):
    """``safetensors.torch.save_file`` and what makes it durable."""

    name = "safetensors + fsync"
    durability = "fsync of file and directory"

    def start(self) -> Waitable:
        """Save, fsync."""
        safetensors.torch.save_file(self.state, self.folder / "state.safetensors")
        fsync_tree(self.folder)
        return DONE


class DcpSave(_Saver):
    """``dcp.save`` with its defaults (one writing thread)."""

    name = "dcp.save"
    durability = DCP_DURABILITY
    threads = 1

    def start(self) -> Waitable:
        """Begin one save of the state."""
        writer = FileSystemWriter(self.folder / "ckpt", thread_count=self.threads)
        dcp_save(self.state, storage_writer=writer, no_dist=True)
        return DONE


class DcpSaveThreads(DcpSave):
    """``dcp.save`` with four writing threads."""

    name = "dcp.save, 4 threads"
    threads = 4


class DcpAsyncSave(_Saver):
    """``dcp.async_save`` with its defaults: staged to pageable memory, written by a thread."""

    name = "dcp.async_save"
    durability = DCP_DURABILITY
    is_async = True

    def start(self) -> Waitable:
        """Returns the future of the upload."""
        future = dcp_async_save(self.state, checkpoint_id=self.folder / "ckpt")
        if not isinstance(future, Future):
            raise TypeError("dcp.async_save without a stager returns a future")
        return future


def savers(state: State, folder: Path, config: EngineConfig) -> list[Contender]:
    """This library and its rivals, on folders of their own below ``folder``."""
    plain: list[type[_Saver]] = [
        TorchSave,
        TorchSaveFsync,
        SafetensorsSave,
        SafetensorsSaveFsync,
        DcpSave,
        DcpSaveThreads,
        DcpAsyncSave,
    ]
    return [
        EngineSave(state, folder / "aio_ckpt", config),
        *(kind(state, folder / kind.__name__) for kind in plain),
    ]


# -- loading --------------------------------------------------------------------------------------


class _Loader(Contender):
    """Has saved the state to its folder; reads it cold."""

    durability = "-"

    def __init__(self, state: State, folder: Path) -> None:
        self.state = dict(state)
        self.folder = folder
        self.loaded: State = {}
        folder.mkdir(parents=True)
        self.write()
        fsync_tree(self.folder)

    def write(self) -> None:
        """Make the checkpoint."""

    def before(self) -> None:
        """Let go of the result before, and drop the files from the page cache (they are clean: fsynced)."""
        self.loaded = {}
        make_cold(self.folder)


class _FillingLoader(_Loader):
    """Fills live tensors in place."""

    def __init__(self, state: State, folder: Path) -> None:
        self.template = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        super().__init__(state, folder)

    def before(self) -> None:
        """The page cache only; the template stays."""
        super().before()
        self.loaded = self.template


class EngineLoad(_FillingLoader):
    """``engine.load(template)``: verified, in place."""

    name = ENGINE
    is_async = True

    def __init__(self, state: State, folder: Path, config: EngineConfig) -> None:
        self.engine = CheckpointEngine(folder, config)
        super().__init__(state, folder / "aio_ckpt")

    def write(self) -> None:
        """Through the engine, whose root is the folder above."""
        path = self.engine.save(self.state).result().path  # type: ignore[union-attr]
        self.folder.rmdir()
        self.folder = path

    def start(self) -> Waitable:
        """Returns the future of the load."""
        return self.engine.load(self.template, None, strict=False, allow_missing=False, fallback=True)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close_blocking()


class DcpLoad(_FillingLoader):
    """``dcp.load(template)``: in place."""

    name = "dcp.load"

    def write(self) -> None:
        """``dcp.save``."""
        dcp_save(self.state, checkpoint_id=self.folder / "ckpt", no_dist=True)

    def start(self) -> Waitable:
        """Begin one load into the state."""
        dcp_load(self.template, checkpoint_id=self.folder / "ckpt", no_dist=True)
        return DONE


class TorchLoad(_Loader):
    """``torch.load``: fresh tensors, nothing copied to live ones."""

    name = "torch.load"

    def write(self) -> None:
        """``torch.save``."""
        torch.save(self.state, self.folder / "state.pt")

    def start(self) -> Waitable:
        """Begin one load into the state."""
        self.loaded = torch.load(self.folder / "state.pt", weights_only=True)
        return DONE


class SafetensorsLoad(_Loader):
    """``safetensors.torch.load_file`` and a touch of every page: its tensors may be lazy."""

    name = "safetensors + touch"

    def write(self) -> None:
        """``save_file``."""
        safetensors.torch.save_file(self.state, self.folder / "state.safetensors")

    def start(self) -> Waitable:
        """Load, touch."""
        self.loaded = safetensors.torch.load_file(self.folder / "state.safetensors")
        for tensor in self.loaded.values():
            tensor.view(-1)[::1024].sum()
        return DONE


def loaders(state: State, folder: Path, config: EngineConfig, only: Collection[str]) -> list[Contender]:
    """This library and its rivals, each with a checkpoint of its own below ``folder``; with ``only``, those named."""
    found: list[Contender] = []
    if not only or EngineLoad.name in only:
        found.append(EngineLoad(state, folder / "engine", config))
    plain: list[type[_Loader]] = [TorchLoad, SafetensorsLoad, DcpLoad]
    return found + [kind(state, folder / kind.name) for kind in plain if not only or kind.name in only]


def filled_by(contenders: Sequence[Contender]) -> State:
    """The live tensors that the engine fills; empty where it is not among them."""
    return next((contender.template for contender in contenders if isinstance(contender, EngineLoad)), {})


def check_equal(contender: Contender) -> None:
    """A fast load of wrong bytes is no load. It loads once more, into zeros: others may have filled the same memory.

    Raises:
        AssertionError: names the first tensor that differs.
    """
    if not isinstance(contender, _Loader):
        return
    contender.before()
    for tensor in contender.loaded.values():
        tensor.zero_()
    contender.start().result()
    for name, tensor in contender.state.items():
        if not torch.equal(contender.loaded[name].cpu(), tensor.cpu()):
            raise AssertionError(f"{contender.name}: {name} differs from what was saved")


warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
