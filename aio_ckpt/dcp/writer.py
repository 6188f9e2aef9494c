"""``Writer``: a ``FileSystemWriter`` for ``dcp.save`` and ``dcp.async_save`` that writes as the engine does."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from aio_ckpt._torch import DCP_VERSION, writer_transforms
from aio_ckpt.argument_checks import check_flag
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.call_resources import CallResources
from aio_ckpt.dcp.item_sources import Sources, collect_sources
from aio_ckpt.dcp.rank_save import (
    ManifestResult,
    RankSave,
    begin_dcp_save,
    check_parts,
    commit_dcp_save,
    find_save,
    rank_save_of,
    write_rank,
)
from aio_ckpt.dcp.replacement import DirectoryReplacement, checkpoint_path_of
from aio_ckpt.dcp.stager import plan_staging
from aio_ckpt.dcp.uncopied_state import UncopiedState
from aio_ckpt.errors import BusyError, CheckpointExistsError, ConfigError, WriteError
from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.format.root_names import ENGINE_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import shown
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.storage.directories import make_dirs
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.os_errors import translate_errors

_log = logging.getLogger("aio_ckpt")


class Writer(DirectoryReplacement, StorageWriter, AsyncStager):
    """Storage writer into a directory of the caller, for ``dcp.save(storage_writer=...)`` and ``dcp.async_save``.

    Each rank writes one new data file, by O_DIRECT if the file system supports it. All files have checksums and are
    fsynced. The checkpoint before stays whole and visible until the new one is durable, and is then removed. Files of
    other programs stay. One job at a time may save into a directory.

    Outside ``with``, every call starts threads of its own and ends them before it returns. Inside, threads and memory
    are kept from save to save. As a stager (``dcp.async_save`` without ``async_stager=``), it copies the whole state,
    host tensors too, before ``async_save`` returns. If ``budget_bytes`` cannot hold a copy, ``async_save`` returns
    when the last wave of the state is captured.

    Args:
        path: the directory, made if it is missing; or its URL in an object store.
        single_file_per_rank: accepted; there is always one file a rank.
        sync_files: accepted; files are always fsynced.
        thread_count: writes in flight at once; ``config.workers`` unless given.
        per_thread_copy_ahead: accepted; how far copies run ahead follows from the chunks in flight.
        cache_staged_state_dict: accepted; inside ``with`` staging memory is always used again.
        overwrite: whether a checkpoint in the directory is replaced; if False, CheckpointExistsError is raised.
        _extensions: stream extensions, applied to each item as stock does. Each item is transformed in memory.
        serialization_format: only torch's own, ``TORCH_SAVE``.
        config: ``workers``, ``staging``, ``direct_io``, ``budget_bytes``, ``gather_bytes``,
            ``max_write_bytes_per_sec``, ``thread_nice``, ``thread_ioprio``, ``stall_timeout_secs``, ``step_dir`` and
            ``debug`` are used; the others are for an engine.
        storage: file system of the checkpoint; None for the one that ``path`` names.

    Raises:
        ConfigError: an argument has the wrong type, or is one of stock's that this writer does not support.
        RootError: ``path`` is no path.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
        *,
        config: EngineConfig | None = None,
        storage: Storage | None = None,
    ) -> None:
        super().__init__(path, config, storage)
        if thread_count is not None:
            self._config = _with_workers(self._config, thread_count)
        check_flag("overwrite", overwrite)
        if serialization_format is not None and getattr(serialization_format, "name", None) != "TORCH_SAVE":
            raise ConfigError(
                f"serialization_format={serialization_format}: this writer writes torch's own; use stock's "
                "HuggingFaceStorageWriter for safetensors"
            )
        self.overwrite = overwrite
        self.save_id = uuid.uuid4().hex
        """Id of the save, for ``.metadata``. On the leader, another one is taken when the save begins."""
        self._begun: dict[str, Path] = {}
        """Path of each begun save, by id. DCP may set another path while a save still runs."""
        self._unwritten: set[str] = set()
        """Ids of begun saves that no plan has named yet. DCP's plan cache may name the id of an earlier save."""
        self._awaited: UncopiedState | None = None
        """State that the caller's thread waits for, or is about to."""
        self._uncopied: list[UncopiedState] = []
        """States that are not captured yet."""
        self._transforms = _transforms(_extensions)

    # -- called by DCP, in this order -------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save, into ``checkpoint_id`` if one is given."""
        if checkpoint_id:
            self.path = checkpoint_path_of(checkpoint_id)
        self.save_id = uuid.uuid4().hex

    def storage_meta(self) -> StorageMeta | None:
        """Return the path and :attr:`save_id`, for the planner."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise ConfigError for ``use_collectives=False``: without a leader, the ranks cannot commit one checkpoint."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives=False: not supported here; use stock's FileSystemWriter for it")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory.

        Raises:
            CheckpointExistsError: with ``overwrite=False``, the directory holds a checkpoint.
            WriteError: the directory cannot be made, a file has its name, or it is the root of an engine.
        """
        if not isinstance(self.path, RemotePath):
            _make_directory(self.path)
        if not self.overwrite:
            metadata, timeout_secs = self.path / METADATA_FILE, self._config.stall_timeout_secs
            with self._running() as resources:
                is_there = resources.portal.call(resources.storage.exists, metadata, timeout=timeout_secs)
            if is_there:
                text = "holds a checkpoint, and overwrite=False keeps it"
                raise CheckpointExistsError(errno.EEXIST, text, str(self.path))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save on the leader: remove what dead saves left, mark the save, give each rank its part."""
        # Saves of one writer may overlap, so no two may take the id of one reset().
        save_id, path = uuid.uuid4().hex, self.path
        self.save_id = save_id
        self._begun[save_id] = self.path
        self._unwritten.add(save_id)
        with self._running() as resources:
            resources.portal.call(
                begin_dcp_save, resources.storage, path, save_id, timeout=resources.config.stall_timeout_secs
            )
        return [
            replace(plan, storage_data=RankSave(save_id, rank, len(plans), self._step(path)))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items. Returns once they are durable.

        Raises:
            WriteError, StallError, SourceChangedError, PlanChangedError, RootError, BusyError: the save failed, and
                nothing becomes visible.
        """
        path = self.path
        part = rank_save_of(plan.storage_data, self._step(path))
        save_id = part.save_id
        is_begun, begun = save_id in self._unwritten, self._begun.get(save_id, path)
        self._unwritten.discard(save_id)
        if is_begun and begun != path:
            del self._begun[save_id]
            raise BusyError(
                f"this writer still saved into {begun} when it was turned to {path}: await the first save, or give "
                "each a writer of its own"
            )
        with self._running() as resources:
            find = functools.partial(find_save, is_begun=is_begun)
            save: RankSave = resources.portal.call(
                find, resources.storage, path, part, timeout=resources.config.stall_timeout_secs
            )
            sources = self._sources(resources, plan, planner, self._transforms)
            results = write_rank(resources, path, save, sources, on_captured=self._captured)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _sources(self, resources: CallResources, plan: SavePlan, planner: SavePlanner, transforms: Any) -> Sources:
        gather_bytes, budget_bytes = self._config.gather_bytes, resources.window.budget_bytes
        return collect_sources(plan, planner, transforms, gather_bytes=gather_bytes, budget_bytes=budget_bytes)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint visible. DCP calls this on the leader once all ranks have written.

        Raises:
            WriteError, RootError, StallError: the commit failed, and the checkpoint before stays.
        """
        written = list(itertools.chain.from_iterable(results))
        manifests = [found for found in written if isinstance(found, ManifestResult)]
        if DCP_VERSION is not None:
            metadata.version = DCP_VERSION
        metadata.storage_data = {
            found.index: found.storage_data for found in written if not isinstance(found, ManifestResult)
        }
        check_parts([found.save for found in manifests])
        save_id = manifests[0].save.save_id
        path = self._begun.pop(save_id, self.path)
        self._unwritten.discard(save_id)
        metadata.storage_meta = StorageMeta(checkpoint_id=str(path), save_id=save_id)
        with self._running() as resources:
            timeout_secs = resources.config.stall_timeout_secs
            commit = functools.partial(
                commit_dcp_save,
                metadata=metadata,
                manifests=[found.storage_data for found in manifests],
                save_id=save_id,
                step=self._step(path),
                timeout_secs=timeout_secs,
            )
            resources.portal.call(commit, resources.storage, path, timeout=2 * timeout_secs, what="finish()")

    # -- staging and properties -------------------------------------------------------------------------------

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``state_dict`` in host memory, see :class:`aio_ckpt.dcp.AsyncStager`.

        If the state is larger than the staging memory of ``budget_bytes``, the caller's own tensors are returned, and
        :meth:`synchronize_staging` waits until they are captured.
        """
        with self._running() as resources:
            staging = plan_staging(resources, state_dict)
            if staging.fits:
                return staging.copied(resources)
        _log.warning(
            "%s: %d bytes are saved in waves, as budget_bytes holds no copy of them: dcp.async_save returns when the "
            "last wave is captured, which takes as long as the storage needs for the others; raise budget_bytes where "
            "there is memory",
            self.path,
            staging.nbytes,
        )
        self._awaited = staging.uncopied()
        self._uncopied.append(self._awaited)
        return self._awaited

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``dcp.async_save`` has to call :meth:`synchronize_staging`."""
        return self._awaited is not None

    def synchronize_staging(self) -> None:
        """Wait until the state of the last :meth:`stage` is captured, if it was not copied.

        Raises:
            StallError: the save did not begin within ``stall_timeout_secs``.
        """
        state, self._awaited = self._awaited, None
        if state is not None:
            state.wait_captured(self._config.stall_timeout_secs)
            self._forget(state)  # not after an exception, so that the save still learns of it

    def _captured(self) -> None:
        """Release the states that this thread saves without a copy: their tensors are captured."""
        for state in [state for state in self._uncopied if state.is_saved_here]:
            self._forget(state)
            state.release()

    def _forget(self, state: UncopiedState) -> None:
        self._uncopied = [kept for kept in self._uncopied if kept is not state]

    def _step(self, path: Path) -> int:
        return StepNames(self._config.step_dir).step(path.name) or 0


def _make_directory(path: Path) -> None:
    """Make the directory of a checkpoint.

    Raises:
        WriteError: that fails, a file has its name, or it is the root of an engine.
    """
    if path.is_file():
        raise WriteError(
            errno.EEXIST,
            "is a file, and a checkpoint is a directory: move it away, or save to another checkpoint_id",
            str(path),
        )
    if (path / ENGINE_DIR).is_dir():
        text = "is the root of an engine, which cannot be a checkpoint itself: give a directory of its own"
        raise WriteError(errno.EEXIST, text, str(path))
    with translate_errors(WriteError, path):
        make_dirs(path)


def _with_workers(config: EngineConfig, thread_count: int) -> EngineConfig:
    try:
        return replace(config, workers=thread_count)
    except ConfigError as error:
        raise ConfigError(f"thread_count={shown(thread_count)}: {error}") from error


def _transforms(extensions: Sequence[Any] | None) -> Any:
    """Return torch's own object that applies stream extensions; None if there are none.

    Raises:
        ConfigError: ``extensions`` is no list.
    """
    if not extensions:
        return None
    if isinstance(extensions, str) or not isinstance(extensions, Sequence):
        raise ConfigError(f"_extensions={shown(extensions)}: give a list of torch's stream extensions")
    return writer_transforms(extensions)
