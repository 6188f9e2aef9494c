"""``Reader``: a ``FileSystemReader`` for ``dcp.load`` that reads only the ranges it needs, and proves them."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from aio_ckpt._torch import StorageInfo, reader_transforms
from aio_ckpt.checkpoint.open import Checkpoint, open_checkpoint
from aio_ckpt.checks import shown
from aio_ckpt.commit.directory import recoverable_names
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.rank_load import Load
from aio_ckpt.dcp.runtime import Face, Runtime
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from aio_ckpt.format.manifests import METADATA_FILE, ROOT_MANIFEST
from aio_ckpt.storage.local import Storage, read_small_file
from aio_ckpt.storage.paths import checked_path

__all__ = ["Reader"]


class Reader(Face, StorageReader):
    """Loads for ``dcp.load(storage_reader=...)``: what :class:`Writer`, an engine (a step's directory) or stock saved.

    Of a shard only the blocks that a rank needs are read. What has a sum is checked before it is passed on; tensors
    of the template are filled as they are proven, so after an error they may hold a mix. ``.metadata`` is read without
    running code; an object is unpickled by DCP's planner, as with stock: load what you trust. Where a save died in the
    directory, the checkpoint that it was to replace is read.

    Args:
        path: directory of the checkpoint.
        _extension_registry: knows the extensions that a checkpoint was written with, as stock's.
        config: ``workers`` (reads in flight), ``direct_io``, ``verify`` and ``stall_timeout_secs`` have their meaning.
        storage: where the bytes are; the local file system unless given.

    Raises:
        ConfigError: an argument of another type.
        RootError: ``path`` is none.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        config: EngineConfig | None = None,
        storage: Storage | None = None,
    ) -> None:
        super().__init__(config, storage)
        self.path = checked_path(path)
        self.load_id = str(uuid.uuid4())
        self.storage_data: Mapping[MetadataIndex, StorageInfo] = {}
        self._metadata: Metadata | None = None
        self._checkpoint: Checkpoint | None = None
        self._fault: AioCkptError | None = None
        self._transforms = _transforms(_extension_registry)

    # -- what DCP calls, in this order ------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A load begins; from ``checkpoint_id`` if one is given."""
        self.storage_data, self._checkpoint, self._metadata, self._fault = {}, None, None, None
        if checkpoint_id:
            self.path = checked_path(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and prove the small files. ``rank``: those of a checkpoint that stock saved without collectives.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptCheckpointError: a small file is missing or not the one that was written; names it.
        """
        rank: int | None = kwargs.get("rank")
        try:
            with self._running() as runtime:
                checkpoint = runtime.portal.call(
                    _open, runtime, self.path.absolute(), rank, timeout=runtime.config.stall_timeout_secs
                )
            metadata = checkpoint.metadata
        except AioCkptError as error:
            if rank is None or self._fault is None:
                self._fault = error
                raise
            # DCP asks once more with a rank, and in place of what either call raised it says that there are no
            # metadata. So that the first fault reaches the caller it is raised where the reader is set up.
            return Metadata({}, storage_data={})
        self._fault = None
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        self._checkpoint = checkpoint
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take over where everything is; raises what was wrong with the small files, if DCP kept that to itself."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        if metadata.storage_data is None:
            raise CorruptCheckpointError(f"{self.path / METADATA_FILE}: tells no place for anything")
        self._metadata, self.storage_data = metadata, metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every item of ``plan``; returns when all is read and proven.

        Raises:
            CorruptCheckpointError: names file and tensor.
            TemplateMismatchError: the planner gives a tensor of another shape than it planned.
            ReadError: with errno and path.
        """
        if self._checkpoint is None or self._metadata is None:
            self.set_up_storage_reader(self.read_metadata(), is_coordinator=False)
        assert self._checkpoint is not None
        assert self._metadata is not None
        with self._running() as runtime:
            load = Load(runtime=runtime, checkpoint=self._checkpoint, metadata=self._metadata)
            load.run(plan, planner, self._transforms)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    # -- the rest ---------------------------------------------------------------------------------

    @property
    def checkpoint_id(self) -> str:
        """Path of the checkpoint as it was given."""
        return str(self.path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, as stock decides it."""
        return bool(FileSystem.validate_checkpoint_id(checkpoint_id))


async def _open(runtime: Runtime, path: Path, rank: int | None) -> Checkpoint:
    storage, executor = runtime.storage, runtime.portal.executor
    if rank is None:
        metadata_name, root_name = METADATA_FILE, ROOT_MANIFEST
        if not await storage.exists(path / METADATA_FILE) and await storage.exists(path):
            metadata_name, root_name = await recoverable_names(storage, path)
        return await open_checkpoint(storage, path, executor=executor, metadata_name=metadata_name, root_name=root_name)
    data = await read_small_file(storage, path / f"__{rank}{METADATA_FILE}")
    if data is None:
        raise CheckpointNotFoundError(errno.ENOENT, f"no checkpoint: no .metadata, none of rank {rank}", str(path))
    return Checkpoint(path=path, step=None, metadata_bytes=data, root=None, ranks=())


def _transforms(registry: Any) -> Any:
    """Return torch's own way to undo extensions."""
    if registry is not None and not hasattr(registry, "from_descriptor_list"):
        raise ConfigError(f"_extension_registry={shown(registry)}: give a registry of torch's stream extensions")
    return reader_transforms(registry)
