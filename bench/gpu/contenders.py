"""This library, torch.save and DCP behind one face; the others are in :mod:`bench.gpu.guests`."""

from __future__ import annotations

import contextlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
)
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from aio_ckpt.config import EngineConfig, Staging
from aio_ckpt.sync import SyncCheckpointEngine
from aio_ckpt.ticket import SaveTicket
from bench.common.rivals import DCP_DURABILITY, ENGINE_SAVE_DURABILITY
from bench.gpu.train import Ground, Trainer, local_of

__all__ = ["SAVERS", "Saver", "UnavailableError"]

NO_DURABILITY = "none: page cache"
WAIT_SECS = 600.0
"""The supervisor kills a contender long before."""


class UnavailableError(Exception):
    """This contender cannot run here: not installed, or it needs what the machine lacks."""


class Saver(ABC):
    """One way of saving. One save is pending at most; the caller's thread does what the trainer's would.

    There is nothing to close: its process and workers are killed; to end by themselves would take some rivals long.
    """

    title: ClassVar[str]
    """Name of the contender in tables."""
    setting: ClassVar[str]
    """``default`` or what was tuned."""
    durability: ClassVar[str]
    """What is on the disk when it says that it is done."""
    needs_fsync: ClassVar[bool] = True
    """Whether anything is left to fsync then."""
    is_async: ClassVar[bool] = True
    """Whether ``save`` returns before it is done."""

    def __init__(self, trainer: Trainer, ground: Ground, folder: Path) -> None:
        """``folder`` is empty and the same on all ranks."""
        self.trainer = trainer
        self.ground = ground
        self.folder = folder

    @classmethod  # noqa: B027 - most run everywhere
    def check(cls, device: torch.device) -> None:
        """Before anything is built.

        Raises:
            UnavailableError: it cannot run here.
        """

    @abstractmethod
    def save(self, number: int) -> None:
        """What blocks the trainer."""

    def wait_staged(self) -> None:  # noqa: B027 - most have staged when save() returns
        """Until the trainer may change the state without this library's help."""

    def updating(self) -> AbstractContextManager[object]:
        """Around each optimizer step."""
        return contextlib.nullcontext()

    def is_done(self) -> bool:
        """Called after every step, also for libraries that have to be polled."""
        return True

    def wait(self) -> None:  # noqa: B027
        """Until it says that it is done. Raises what the save failed with."""

    def told(self) -> dict[str, float]:
        """Seconds from the call of ``save`` that only it can tell, of the save that is done."""
        return {}

    def remove(self) -> None:
        """Delete what was saved; on one rank."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif not path.name.startswith("."):
                path.unlink()


# -- aio_ckpt -------------------------------------------------------------------------------------


class EngineDefault(Saver):
    """``engine.save(state)``: the device's stream waits for copies on the device, as far as memory is free there."""

    title = "aio_ckpt"
    setting = "default"
    durability = ENGINE_SAVE_DURABILITY
    needs_fsync = False
    staging: ClassVar[Staging] = "auto"
    settings: Mapping[str, Any] = {}
    is_guarded: ClassVar[bool] = False

    def __init__(self, trainer: Trainer, ground: Ground, folder: Path) -> None:
        super().__init__(trainer, ground, folder)
        config = EngineConfig(staging=self.staging, **self.settings)
        self.state = dict(trainer.state)
        self.engine = SyncCheckpointEngine(folder / "root", config)
        if self.is_guarded:
            self.engine.guard(trainer.optimizer)
        self.ticket: SaveTicket | None = None

    def save(self, number: int) -> None:
        self.ticket = self.engine.save(self.state)

    def wait_staged(self) -> None:
        assert self.ticket is not None
        self.ticket.staged.result(WAIT_SECS)

    def is_done(self) -> bool:
        return self.ticket is None or self.ticket.done()

    def wait(self) -> None:
        if self.ticket is not None:
            self.ticket.result(WAIT_SECS)

    def told(self) -> dict[str, float]:
        assert self.ticket is not None
        report = self.ticket.result(WAIT_SECS)
        return {} if report is None else {"synced_secs": report.timings.synced_secs}

    def remove(self) -> None:
        for root in self.folder.iterdir():
            for path in root.iterdir():
                if path.is_dir() and not path.name.startswith("."):
                    shutil.rmtree(path)


class EngineHalf(EngineDefault):
    """With memory of the device for half of the state."""

    setting = "device_copy_bytes of half the state"

    def __init__(self, trainer: Trainer, ground: Ground, folder: Path) -> None:
        self.settings = {"device_copy_bytes": sum(tensor.nbytes for tensor in trainer.state.values()) // 2}
        super().__init__(trainer, ground, folder)


class EngineFenced(EngineDefault):
    """Without memory for a copy: the device's stream waits for the copies to the host."""

    setting = "device_copy_bytes=0 (fenced)"
    settings: Mapping[str, Any] = {"device_copy_bytes": 0}


class EngineGuarded(EngineFenced):
    """The same after ``engine.guard(optimizer)``: only the optimizer's step waits."""

    setting = "device_copy_bytes=0, guarded"
    is_guarded = True


class EnginePrepared(EngineDefault):
    """The default after ``engine.prepare(state)``: the first save finds its plan and memory made."""

    setting = "prepared"

    def __init__(self, trainer: Trainer, ground: Ground, folder: Path) -> None:
        super().__init__(trainer, ground, folder)
        self.engine.prepare(self.state).result(WAIT_SECS)


class EngineShm(EngineDefault):
    """In a shared segment."""

    setting = "shm"
    staging = "shm"


class EnginePageable(EngineDefault):
    """In memory that the driver does not know."""

    setting = "pageable"
    staging = "pageable"


# -- torch.save -----------------------------------------------------------------------------------


class TorchSave(Saver):
    """``torch.save``, one file a rank."""

    title = "torch.save"
    setting = "default"
    durability = NO_DURABILITY
    is_async = False

    def save(self, number: int) -> None:
        torch.save(local_of(self.trainer.state), self.folder / f"state-{self.ground.rank}.pt")


# -- DCP ------------------------------------------------------------------------------------------


class DcpSave(Saver):
    """``dcp.save``."""

    title = "dcp.save"
    setting = "default"
    durability = DCP_DURABILITY
    is_async = False
    threads: ClassVar[int] = 1

    def writer(self, number: int) -> FileSystemWriter:
        """To a directory of its own."""
        return FileSystemWriter(self.folder / f"save-{number}", thread_count=self.threads)

    def save(self, number: int) -> None:
        dcp_save(dict(self.trainer.state), storage_writer=self.writer(number))


class DcpSaveThreads(DcpSave):
    """Four threads write."""

    setting = "4 threads"
    threads = 4


class DcpAsync(DcpSave):
    """``dcp.async_save``: staged to fresh pageable memory inside the call, written by a thread."""

    title = "dcp.async_save"
    setting = "default"
    is_async = True
    kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD
    stages_async: ClassVar[bool] = False

    def __init__(self, trainer: Trainer, ground: Ground, folder: Path) -> None:
        super().__init__(trainer, ground, folder)
        self.stager = self.make_stager()
        self.staged: Future[None] | None = None
        self.upload: Future[object] | None = None

    def make_stager(self) -> DefaultStager | None:
        """None: DCP's own default, a fresh one a save."""
        return None

    def save(self, number: int) -> None:
        response = dcp_async_save(
            dict(self.trainer.state),
            storage_writer=self.writer(number),
            process_group=self.ground.saves,
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )
        if isinstance(response, AsyncSaveResponse):
            self.staged, self.upload = response.staging_completion, response.upload_completion  # type: ignore[assignment]
        else:
            self.staged, self.upload = None, response

    def wait_staged(self) -> None:
        if self.staged is not None:
            self.staged.result(WAIT_SECS)

    def updating(self) -> AbstractContextManager[object]:
        # Its documentation: the state must not change before staging_completion.
        self.wait_staged()
        return contextlib.nullcontext()

    def is_done(self) -> bool:
        return self.upload is None or self.upload.done()

    def wait(self) -> None:
        if self.upload is not None:
            self.upload.result(WAIT_SECS)


class DcpPinned(DcpAsync):
    """A kept stager: pinned, shared, on a thread and a stream of its own; four threads write."""

    setting = "pinned non-blocking stager, 4 threads"
    threads = 4

    def make_stager(self) -> DefaultStager | None:
        has_cuda = self.ground.device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=has_cuda,
            use_shared_memory=has_cuda,
            use_async_staging=True,
            use_non_blocking_copy=has_cuda,
        )
        return DefaultStager(options)


class DcpProcess(DcpAsync):
    """A process writes."""

    setting = "process"
    kind = AsyncCheckpointerType.PROCESS


class DcpProcessPinned(DcpPinned):
    """A process writes what a kept pinned stager shares with it."""

    setting = "process, pinned non-blocking stager, 4 threads"
    kind = AsyncCheckpointerType.PROCESS


SAVERS: dict[str, type[Saver]] = {
    "aio-default": EngineDefault,
    "aio-half": EngineHalf,
    "aio-fenced": EngineFenced,
    "aio-guarded": EngineGuarded,
    "aio-prepared": EnginePrepared,
    "aio-shm": EngineShm,
    "aio-pageable": EnginePageable,
    "torch-save": TorchSave,
    "dcp-save-threads": DcpSaveThreads,
    "dcp-async-pinned": DcpPinned,
    "dcp-async": DcpAsync,
    "dcp-save": DcpSave,
    "dcp-process-pinned": DcpProcessPinned,
    "dcp-process": DcpProcess,
}
"""By key."""
