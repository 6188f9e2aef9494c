"""Contenders that may be missing here: nvidia-resiliency-ext and torch_checkpointing. Imported when first used."""

from __future__ import annotations

import contextlib
import importlib
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from bench.common.rivals import DCP_DURABILITY
from bench.gpu.contenders import NO_DURABILITY, WAIT_SECS, Saver, UnavailableError
from bench.gpu.train import Ground, Trainer, local_of

__all__ = ["GUESTS"]


# -- nvidia-resiliency-ext ------------------------------------------------------------------------


class Nvrx(Saver):
    """``AsyncCallsQueue`` and ``FileSystemWriterAsync``: a persistent worker copies device tensors by CUDA IPC."""

    title = "nvidia-resiliency-ext"
    setting = "default (worker, CUDA IPC)"
    durability = DCP_DURABILITY
    threads: ClassVar[int] = 1
    is_cached: ClassVar[bool] = False
    by_shm: ClassVar[bool] = False

    def __init__(self, trainer: Trainer, ground: Ground, folder: Path) -> None:
        super().__init__(trainer, ground, folder)
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver

        self.core, self.writers, self.savers = core, filesystem_async, state_dict_saver
        self.queue: Any = core.AsyncCallsQueue(persistent=True, cpu_shm_mode=self.by_shm)
        self.cache: Any = state_dict_saver.CheckpointMetadataCache() if self.is_cached else None

    @classmethod
    def check(cls, device: torch.device) -> None:
        try:
            importlib.import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver")
        except ImportError as error:
            raise UnavailableError(f"nvidia-resiliency-ext is not installed: {error}") from error
        if device.type != "cuda":
            raise UnavailableError("nvidia-resiliency-ext needs a CUDA device")

    def save(self, number: int) -> None:
        folder = self.folder / f"save-{number}"
        writer = self.writers.FileSystemWriterAsync(
            str(folder),
            thread_count=self.threads,
            use_cached_data_structure=self.is_cached,
            use_cpu_shm_for_gpu_tensors=self.by_shm,
        )
        planned = self.savers.save_state_dict_async_plan(
            dict(self.trainer.state),
            writer,
            planner=DefaultSavePlanner(),
            enable_cache=self.is_cached,
            metadata_cache=self.cache,
        )
        write, preload, arguments = writer.get_save_function_and_args()
        request = self.core.AsyncRequest(write, arguments, [], preload_fn=preload)
        request.add_finalize_fn(lambda: self.savers.save_state_dict_async_finalize(*planned))
        self.queue.schedule_async_request(request)

    def is_done(self) -> bool:
        # Finalizing is collective: with several ranks all of them must find the same step to do it in.
        self.queue.maybe_finalize_async_calls(blocking=False, no_dist=self.ground.world == 1)
        return not self.queue.get_num_unfinalized_calls()

    def wait(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True, no_dist=self.ground.world == 1)


class NvrxTuned(Nvrx):
    """Four threads write; the plan and the IPC handles are kept."""

    setting = "worker, CUDA IPC, cached structure and plan, 4 threads"
    threads = 4
    is_cached = True


class NvrxShm(Nvrx):
    """The trainer copies to shared memory, fresh each time."""

    setting = "cpu_shm_mode"
    by_shm = True


class NvrxShmTuned(NvrxTuned):
    """The trainer copies to shared memory that is kept."""

    setting = "cpu_shm_mode, cached structure and plan, 4 threads"
    by_shm = True


# -- torch_checkpointing --------------------------------------------------------------------------


class TorchCheckpointing(Saver):
    """``CheckpointManager.save``, the optimizer step under its lock, as its documentation shows."""

    title = "torch_checkpointing"
    setting = "default"
    durability = NO_DURABILITY
    is_tuned: ClassVar[bool] = False

    def __init__(self, trainer: Trainer, ground: Ground, folder: Path) -> None:
        super().__init__(trainer, ground, folder)
        import torch_checkpointing

        self.items = self.payload()
        self.manager: Any = torch_checkpointing.CheckpointManager(self.config(torch_checkpointing))
        self.write: Future[object] | None = None
        if self.is_tuned:
            self.manager.prewarm_staging(self.items)
            # A trainer does this minutes before its first save, which would wait for both.
            self.manager._prewarm_staging_future.result(WAIT_SECS)
            self.manager._saver._checkpoint_process.wait_for_init()

    @classmethod
    def check(cls, device: torch.device) -> None:
        try:
            importlib.import_module("torch_checkpointing")
        except ImportError as error:
            raise UnavailableError(f"torch_checkpointing is not installed: {error}") from error

    def payload(self) -> dict[str, object]:
        """One item is one file."""
        return {"state": local_of(self.trainer.state)}

    def config(self, library: Any) -> Any:
        """Of the manager."""
        return library.CheckpointManager.Config()

    def save(self, number: int) -> None:
        self.write = self.manager.save(str(self.folder / f"save-{number}"), self.items)

    def wait_staged(self) -> None:
        with self.manager.lock():
            pass

    def updating(self) -> AbstractContextManager[object]:
        lock: AbstractContextManager[object] = self.manager.lock()
        return lock

    def is_done(self) -> bool:
        return self.write is None or self.write.done()

    def wait(self) -> None:
        if self.write is not None:
            self.write.result(WAIT_SECS)


class TorchCheckpointingTuned(TorchCheckpointing):
    """Without O_DIRECT, which fails on ext4; four files by four threads; the staging pool made ahead."""

    setting = "no O_DIRECT, 4 files by 4 threads, staging made ahead"
    is_tuned = True

    def payload(self) -> dict[str, object]:
        """Four items of about the same size."""
        parts: list[dict[str, torch.Tensor]] = [{} for _ in range(4)]
        for index, (name, value) in enumerate(local_of(self.trainer.state).items()):
            parts[index % 4][name] = value
        return {f"part{index}": part for index, part in enumerate(parts)}

    def config(self, library: Any) -> Any:
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        writer = library.CheckpointWriterConfig(file_write_max_threads=4)
        return library.CheckpointManager.Config(
            save=library.AsyncCheckpointSaverConfig(writer_config=writer),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )


class TorchCheckpointingAwaited(TorchCheckpointingTuned):
    """As tuned, but the trainer waits for the staging inside the save."""

    setting = "the same, staging awaited"

    def save(self, number: int) -> None:
        super().save(number)
        self.wait_staged()

    def updating(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


GUESTS: dict[str, type[Saver]] = {
    "nvrx-tuned": NvrxTuned,
    "nvrx-shm-tuned": NvrxShmTuned,
    "tc-tuned": TorchCheckpointingTuned,
    "tc": TorchCheckpointing,
    "nvrx": Nvrx,
    "nvrx-shm": NvrxShm,
    "tc-awaited": TorchCheckpointingAwaited,
}
"""By key."""
