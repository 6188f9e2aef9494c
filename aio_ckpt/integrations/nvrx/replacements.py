"""Names of NVRx's asynchronous checkpointing, on :class:`aio_ckpt.dcp.Writer`, its reader, and a queue of ours.

``save_state_dict_async_plan`` plans and copies, and begins ``dcp.save`` in the thread of :class:`SaverResources`. The
function that ``get_save_function_and_args`` returns is None, so any queue has nothing to run. A queue of ours waits for
the commit, which is among the arguments; with any other queue, the finalize function waits.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from aio_ckpt._torch import DistWrapper
from aio_ckpt.dcp.reader import Reader
from aio_ckpt.dcp.resolved_planner import ResolvedPlanner
from aio_ckpt.dcp.writer import Writer
from aio_ckpt.errors import ConfigError
from aio_ckpt.integrations.async_calls import AsyncCallsQueue, CommitWait, SaverResources

Path = str | os.PathLike[str]
StockOf = Callable[[str], Any]
"""Function that returns the original of a name. It raises an error if there is none."""


def replacements(shared: SaverResources, stock_of: StockOf) -> dict[str, Any]:
    """Return the names. What they cannot serve, such as ``msc://``, goes to the original."""
    bound = {"shared": shared, "stock_of": staticmethod(stock_of)}

    def save_state_dict_async_plan(
        state_dict: dict[str, Any],
        storage_writer: Any,
        process_group: Any = None,
        coordinator_rank: int = 0,
        planner: Any = None,
        enable_cache: bool = False,
        metadata_cache: Any = None,
    ) -> tuple[Any, Any, Any]:
        """Plan, copy, and begin to save. Return (the writer, None, DCP's wrapper of the process group).

        A failure is raised by the queue, or by the finalize function, on all ranks. ``enable_cache`` and
        ``metadata_cache`` are accepted. The first rank of the group leads, whatever ``coordinator_rank`` is.
        """
        if not isinstance(storage_writer, _OurWriter):
            plan = stock_of("save_state_dict_async_plan")
            planned: tuple[Any, Any, Any] = plan(
                state_dict,
                storage_writer,
                process_group,
                coordinator_rank,
                planner,
                enable_cache=enable_cache,
                metadata_cache=metadata_cache,
            )
            return planned
        storage_writer.begin(state_dict, planner, process_group)
        return storage_writer, None, DistWrapper(process_group, dist.is_initialized(), coordinator_rank)

    def save_state_dict_async_finalize(storage_writer: Any, global_metadata: Any, dist_wrapper: Any) -> None:
        """Return once the checkpoint is committed.

        Raises:
            CheckpointException: the save failed; on all ranks alike.
        """
        if isinstance(storage_writer, _OurWriter):
            storage_writer.committed()
        else:
            stock_of("save_state_dict_async_finalize")(storage_writer, global_metadata, dist_wrapper)

    return {
        "AsyncCallsQueue": type("AsyncCallsQueue", (AsyncCallsQueue,), bound | {"queues": []}),
        "FileSystemWriterAsync": type("FileSystemWriterAsync", (_OurWriter,), bound),
        "CachedMetadataFileSystemReader": type("CachedMetadataFileSystemReader", (_OurReader,), bound),
        "save_state_dict_async_plan": save_state_dict_async_plan,
        "save_state_dict_async_finalize": save_state_dict_async_finalize,
    }


def lend_members(stock: Any, replacement: Any) -> None:
    """Give a class of ours the static members of the original that it lacks.

    NVRx's own objects look for them under the name of their class. Such objects are a writer for ``msc://`` and the
    queue of ``TorchAsyncCheckpoint``.
    """
    if not isinstance(replacement, type):
        return
    for name, value in vars(stock).items():
        if not hasattr(replacement, name) and not inspect.isfunction(value):
            setattr(replacement, name, value)


class _OurWriter(Writer):
    """Writer of one checkpoint. With ``use_msc``, or for a URL, the original is made.

    Only ``path`` and ``overwrite`` have an effect: the threads and the memory are those of all saves.
    """

    shared: ClassVar[SaverResources]
    stock_of: ClassVar[StockOf]
    can_run_decentralized_global_plan = False

    def __new__(cls, path: Path, *args: Any, use_msc: bool = False, **given: Any) -> Any:
        if use_msc or not Writer.validate_checkpoint_id(path):
            return cls.stock_of("FileSystemWriterAsync")(path, *args, use_msc=use_msc, **given)
        return super().__new__(cls)

    def __init__(
        self,
        path: Path,
        *args: Any,
        separation_hint: str | None = None,
        use_msc: bool = False,
        is_multiproc_io: bool = False,
        use_cached_data_structure: bool = False,
        use_cpu_shm_for_gpu_tensors: bool = False,
        **given: Any,
    ) -> None:
        super().__init__(path, *args, config=self.shared.config, **given)
        self.share(self.shared.resources)
        self.checkpoint_dir = path
        self._saved: Future[None] | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        """Return whether a writer can be made for ``checkpoint_id``."""
        return str(checkpoint_id).startswith("msc://") or super().validate_checkpoint_id(checkpoint_id)

    def begin(self, state: dict[str, Any], planner: Any, process_group: Any) -> None:
        """Plan and copy, and begin to save. No collective is made here, except the first time, for a group of ours.

        If ``budget_bytes`` cannot hold a copy, this returns once the checkpoint is committed. An error here becomes the
        error of the save, as the other ranks wait for this one.
        """
        shared, resolved, has_copies = self.shared, ResolvedPlanner(planner), True
        group = shared.group(process_group)
        try:
            resolved.resolve(state, is_coordinator=group is None or dist.get_rank(group) == 0)
            copies = shared.copies(resolved.tensors)
            if copies is not None:
                resolved.replace_tensors(copies)
            has_copies = copies is not None
        except Exception as error:  # noqa: BLE001 - DCP tells it to all ranks
            resolved.fail(error)
        save = functools.partial(dcp_save, {}, storage_writer=self, planner=resolved, process_group=group)
        self._saved = shared.submit(save) if has_copies else shared.saved_now(save, self.path)

    def committed(self) -> None:
        """Return once the checkpoint is committed. Raise the error of the save."""
        self._begun_save.result()

    def get_save_function_and_args(self) -> tuple[None, None, list[Any]]:
        """Return (None, None, [the commit]): there is nothing for a queue to run."""
        return None, None, [CommitWait(self._begun_save)]

    @property
    def _begun_save(self) -> Future[None]:
        if self._saved is None:
            raise ConfigError(f"{self.path}: call save_state_dict_async_plan() with this writer first")
        return self._saved

    def _refuse(self, *args: Any) -> Any:
        """Raise ConfigError: the original ``save_state_dict_async_plan`` has called a method of this writer."""
        raise ConfigError(
            "a writer of aio_ckpt was given to NVRx's own save_state_dict_async_plan(), which was imported before "
            "install(): call install() before the imports from nvidia_resiliency_ext"
        )

    prepare_write_data = prepare_decentralized_global_plan = retrieve_write_results = _refuse

    @classmethod
    def register_shm_drain_callback(cls, fn: Any) -> None:
        """Do nothing: no memory is shared with a process."""

    @classmethod
    def cleanup_tensor_caches(cls) -> None:
        """Do nothing: no tensor is cached."""


class _OurReader(Reader):
    """Reader that verifies. For a URL, the original is made. No metadata is cached: the file may have been replaced."""

    shared: ClassVar[SaverResources]
    stock_of: ClassVar[StockOf]

    def __new__(cls, path: Path, *args: Any, **given: Any) -> Any:
        if not Reader.validate_checkpoint_id(path):
            return cls.stock_of("CachedMetadataFileSystemReader")(path, *args, **given)
        return super().__new__(cls)

    def __init__(self, path: Path, cache_metadata: bool = True) -> None:
        super().__init__(path, config=self.shared.config)
        self.share(self.shared.resources)

    @classmethod
    def clear_metadata_cache(cls, path: Path | None = None) -> None:
        """Do nothing: there is no cache."""
