"""``Reader``: a ``FileSystemReader`` for ``dcp.load`` that reads only the ranges it needs, and verifies them."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from aio_ckpt._torch import StorageInfo, reader_transforms
from aio_ckpt.checkpoint.open import Checkpoint, open_checkpoint
from aio_ckpt.commit.discovery import checkpoint_at
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.call_resources import CallResources
from aio_ckpt.dcp.rank_load import RankLoad
from aio_ckpt.dcp.replacement import DirectoryReplacement, checkpoint_path_of
from aio_ckpt.errors import (
    AioCkptError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
)
from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import shown
from aio_ckpt.runtime.error_notes import naming_checkpoint
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.small_files import read_small_file


class Reader(DirectoryReplacement, StorageReader):
    """Storage reader for ``dcp.load`` of a checkpoint of :class:`Writer`, of an engine (one step) or of stock DCP.

    Of a shard, only the blocks that the rank needs are read. Bytes with a checksum are verified before they are passed
    on. Tensors of the template are filled block by block, so after an error they may hold a mix of old and new values.
    ``.metadata`` is read without running code. Objects are unpickled by DCP's planner, as with stock: load only
    checkpoints that you trust. If a save died in the directory, the checkpoint that it would have replaced is read.

    Args:
        path: directory of the checkpoint, or its URL in an object store.
        _extension_registry: registry of the stream extensions that the checkpoint was written with, as for stock DCP.
        config: only ``workers`` (reads in flight), ``direct_io``, ``verify``, ``thread_nice``, ``thread_ioprio`` and
            ``stall_timeout_secs`` are used.
        storage: file system of the checkpoint; None for the one that ``path`` names.

    Raises:
        ConfigError: an argument has the wrong type.
        RootError: ``path`` is no path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        config: EngineConfig | None = None,
        storage: Storage | None = None,
    ) -> None:
        super().__init__(path, config, storage)
        self.load_id = str(uuid.uuid4())
        self.storage_data: Mapping[MetadataIndex, StorageInfo] = {}
        self._metadata: Metadata | None = None
        self._checkpoint: Checkpoint | None = None
        self._fault: AioCkptError | None = None
        self._transforms = _transforms(_extension_registry)

    # -- called by DCP, in this order -------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load, from ``checkpoint_id`` if one is given."""
        self.storage_data, self._checkpoint, self._metadata, self._fault = {}, None, None, None
        if checkpoint_id:
            self.path = checkpoint_path_of(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and check the small files. With ``rank``: those that stock DCP saved without collectives.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptCheckpointError: a small file is missing, or differs from the one that was written; names it.
        """
        rank: int | None = kwargs.get("rank")
        try:
            with naming_checkpoint(self.path), self._running() as resources:
                checkpoint = resources.portal.call(
                    _open, resources, self.path, rank, timeout=resources.config.stall_timeout_secs
                )
            metadata = checkpoint.metadata
        except AioCkptError as error:
            if rank is None or self._fault is None:
                self._fault = error
                raise
            # If both calls fail, with and without a rank, DCP reports that there is no metadata and drops the errors.
            # Therefore this call succeeds, and set_up_storage_reader raises the first error.
            return Metadata({}, storage_data={})
        self._fault = None
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._checkpoint = checkpoint
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep the metadata. Raises the error of :meth:`read_metadata` if DCP would have dropped it."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        if metadata.storage_data is None:
            raise CorruptCheckpointError(f"{self.path / METADATA_FILE}: tells no place for anything")
        self._metadata, self.storage_data = metadata, metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return ``plan`` unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return ``plans`` unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of ``plan``. Returns once all items are read and verified.

        Raises:
            CorruptCheckpointError: bytes are damaged; names file and tensor.
            TemplateMismatchError: the planner gives a tensor of another shape than it planned.
            ReadError: the operating system could not read; has errno and path.
        """
        if self._checkpoint is None or self._metadata is None:
            self.set_up_storage_reader(self.read_metadata(), is_coordinator=False)
        assert self._checkpoint is not None
        assert self._metadata is not None
        with naming_checkpoint(self.path), self._running() as resources:
            load = RankLoad(resources=resources, checkpoint=self._checkpoint, metadata=self._metadata)
            load.run(plan, planner, self._transforms)
        future: Future[None] = Future()
        future.set_result(None)
        return future


async def _open(resources: CallResources, path: Path, rank: int | None) -> Checkpoint:
    storage, executor = resources.storage, resources.portal.executor
    if rank is None:
        with contextlib.suppress(CheckpointNotFoundError):
            return await open_checkpoint(storage, path, executor=executor)
        await checkpoint_at(storage, path, StepNames(resources.config.step_dir))  # raises what is there instead
        return await open_checkpoint(storage, path, executor=executor)  # it has just been committed
    data = await read_small_file(storage, path / f"__{rank}{METADATA_FILE}")
    if data is None:
        raise CheckpointNotFoundError(errno.ENOENT, f"no checkpoint: no .metadata, none of rank {rank}", str(path))
    return Checkpoint(path=path, step=None, metadata_bytes=data, root=None, ranks={})


def _transforms(registry: Any) -> Any:
    """Return torch's own object that undoes stream extensions."""
    if registry is not None and not hasattr(registry, "from_descriptor_list"):
        raise ConfigError(f"_extension_registry={shown(registry)}: give a registry of torch's stream extensions")
    return reader_transforms(registry)
