"""One save into a directory: the write of each rank, and the commit of the leader."""

from __future__ import annotations

import contextlib
import errno
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from aio_ckpt.commit import in_place
from aio_ckpt.commit.in_place import hold_directory, other_save_error, pending_saves
from aio_ckpt.commit.manifests import check_complete, metadata_file, render_root
from aio_ckpt.commit.trash import THREAD_WAIT_SECS
from aio_ckpt.dcp.call_resources import CallResources
from aio_ckpt.dcp.item_sources import Sources
from aio_ckpt.errors import AioCkptError, PlanChangedError, RootError, SaveCancelledError, StallError, WriteError
from aio_ckpt.format.checkpoint_files import (
    data_file_name,
    new_metadata_name,
    rank_manifest_name,
    root_manifest_name,
    trailer,
)
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.dcp_metadata_write import dump_metadata
from aio_ckpt.format.rank_manifest import encode_rank, encode_static
from aio_ckpt.format.root_manifest import FileEntry
from aio_ckpt.plan.save_plan import tensor_entry
from aio_ckpt.ranks.store_coordinator import rank_in_default_group
from aio_ckpt.runtime.error_notes import note_stage
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.snapshot.captured_chunks import CapturedChunks
from aio_ckpt.snapshot.image import Image
from aio_ckpt.snapshot.stall_timer import StallTimer
from aio_ckpt.storage.local import Storage
from aio_ckpt.write.full_disk import explain_full_disk
from aio_ckpt.write.part import Part, write_part
from aio_ckpt.write.result import WriteResult as Written
from aio_ckpt.write.writer import FileWriter

_MANIFEST_INDEX = MetadataIndex("aio_ckpt.manifest")


@dataclass(frozen=True)
class RankSave:
    """Part of a rank in a save. The leader sends it to the rank in its plan."""

    save_id: str
    """Id of the save. The name of every file of the save contains it."""
    rank: int
    """Number of the rank's plan."""
    world_size: int
    """Number of plans."""
    step: int
    """Step in the name of the directory; 0 if the name holds none."""

    @property
    def prefix(self) -> str:
        """Begin of the names of files, which stock's writer takes from a plan that DCP has cached."""
        return f"__{self.rank}_"

    @property
    def data_file(self) -> str:
        return data_file_name(self.save_id, self.rank)

    @property
    def manifest(self) -> str:
        return rank_manifest_name(self.save_id, self.rank)


@dataclass(frozen=True)
class ManifestResult(WriteResult):
    """Result by which the leader learns a rank's manifest. ``storage_data`` is the FileEntry of the manifest."""

    save: RankSave


async def begin_dcp_save(storage: Storage, directory: Path, save_id: str) -> None:
    """Remove what other saves left and mark the new save. The leader calls this before any rank writes.

    Raises:
        RootError: another save is being committed there, or begins at the same time.
    """
    async with hold_directory(storage, directory):
        await in_place.begin_save(storage, directory, save_id)


async def find_save(storage: Storage, directory: Path, save: RankSave, *, is_begun: bool) -> RankSave:
    """Return the pending save that ``save`` belongs to.

    DCP's plan cache may return the plan of an earlier save, whose mark is gone. Then the one pending save is taken.
    ``is_begun``: whether ``save`` is known to be of the current save.

    Raises:
        RootError: none or several saves are pending (the ranks see different directories), or another save has begun.
    """
    pending = await pending_saves(storage, directory)
    if save.save_id in pending:
        return save
    if is_begun:
        raise other_save_error(directory)
    if len(pending) == 1:
        return replace(save, save_id=pending[0])
    raise RootError(
        errno.ENOENT,
        f"rank {save.rank} finds {len(pending)} pending saves, not the leader's one: give all ranks one shared "
        "directory, and let one job at a time save into it",
        str(directory),
    )


def rank_save_of(storage_data: Any, step: int) -> RankSave:
    """Return what a plan tells of its part.

    DCP's plan cache may hold that of a save by stock, which tells nothing. Then the save is taken for one of all ranks.
    """
    if isinstance(storage_data, RankSave):
        return storage_data
    rank, world_size = rank_in_default_group()
    return RankSave("", rank, world_size, step)


def check_parts(parts: Sequence[RankSave]) -> None:
    """Raise PlanChangedError unless ``parts`` are those of ranks 0, 1, … of one save of as many ranks."""
    if [(part.rank, part.world_size) for part in parts] != [(rank, len(parts)) for rank in range(len(parts))]:
        raise PlanChangedError(
            "DCP's plan cache holds the plan of a save by stock, which does not tell the ranks of a process group: "
            "leave enable_plan_caching=True out, or save by one kind of writer"
        )


# -- every rank -----------------------------------------------------------------------------------


def write_rank(
    resources: CallResources, directory: Path, save: RankSave, sources: Sources, *, on_captured: Callable[[], None]
) -> list[WriteResult]:
    """Write the rank's data file and manifest, durably, while this thread captures the tensors.

    ``on_captured`` is called once no tensor is needed any more. If it raises, the save fails.

    Raises:
        WriteError: the operating system could not write; has errno and path.
        StallError: no progress for ``stall_timeout_secs``.
        Exception: the first error of any stage. The written files were removed.
    """
    rank = _RankWrite(resources=resources, directory=directory, save=save, sources=sources)
    if sources.is_empty:
        on_captured()
        return [resources.portal.call(rank.write_manifest, None, timeout=resources.config.stall_timeout_secs)]
    tail = b"".join(stream.data for stream in sources.streams)
    image = resources.lease(sources.planned, len(tail), resources.window)
    try:
        part = Part(
            name=save.data_file,
            layout=sources.planned.plan.layout,
            tail=tail,
            image=image,
            chunks=CapturedChunks(len(image.chunks), rank.stall),
        )
        writing = resources.portal.submit(rank.write, part)
        try:
            resources.capture(sources.planned, image, lambda runs: resources.portal.post(part.chunks.add, runs))
            on_captured()
            manifest = rank.wait(writing)
        except BaseException as error:
            writing.cancel()
            with contextlib.suppress(TimeoutError):
                rank.ended.result(THREAD_WAIT_SECS)
            note_stage(error, "write")
            raise
    finally:
        image.lease.close()
    return [*sources.results(save.data_file), manifest]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankWrite:
    """Write of one rank's files. Its coroutines run on the loop."""

    resources: CallResources
    directory: Path
    save: RankSave
    sources: Sources
    stall: StallTimer = field(default_factory=StallTimer)
    ended: Future[None] = field(default_factory=Future)
    """Done once :meth:`write` has ended and, after an error, the files are removed."""

    def wait(self, writing: Future[ManifestResult]) -> ManifestResult:
        """Return the result of :meth:`write`, on the caller's thread. Raises StallError if nothing moves."""
        limit_secs = self.resources.config.stall_timeout_secs
        while not writing.done():
            left = self.stall.idle_left_secs(limit_secs)
            if left <= 0:
                raise StallError(
                    f"a save made no progress for {limit_secs} s: storage under {self.directory} is stalled"
                )
            with contextlib.suppress(TimeoutError):
                writing.exception(left)
        return writing.result()

    async def write(self, part: Part) -> ManifestResult:
        """Write data file and manifest, durably. After an error, remove them.

        Raises:
            RootError: the mark of this save is gone: another save has begun, and may have removed the files of this
                one before all of them were there.
        """
        resources, storage, touch = self.resources, self.resources.storage, self.stall.touch
        try:
            writer = FileWriter(
                storage=storage,
                executor=resources.portal.executor,
                workers=resources.config.workers,
                thread_wait_secs=THREAD_WAIT_SECS,
                admit=functools.partial(resources.throttle.admit, is_hurried=False, on_wait=touch),
                on_activity=lambda _: touch(),
                on_written=lambda _: touch(),
            )
            written = await write_part(part, self.directory / part.name, writer)
            manifest = await self.write_manifest(written)
            await storage.sync_dir(self.directory)
            if not await self._is_pending():
                raise other_save_error(self.directory)  # noqa: TRY301
        except BaseException as error:
            cause = first_cause(error)
            with anyio.CancelScope(shield=True):
                cause = await self._clean_up(part.image, cause)
            if cause is error:
                raise
            raise cause from cause.__cause__
        else:
            return manifest
        finally:
            self.ended.set_result(None)

    async def write_manifest(self, written: Written | None) -> ManifestResult:
        """Write the rank's manifest. ``written``: result of the data file; None if the rank has nothing to write."""
        save, sources, plan = self.save, self.sources, self.sources.planned.plan
        layout, structure = plan.layout, plan.structure
        if written is not None:
            names = frozenset(name for item in layout.items for name in item.fqns)
            check_complete(frozenset(index.fqn for index in sources.indices), names)
            if len(written.chunks_written) != written.chunks or written.items_patched != len(layout.items):
                raise PlanChangedError("not every chunk of the data file was written; nothing was committed")
        data = encode_rank(
            save_id=save.save_id,
            step=save.step,
            rank=save.rank,
            world_size=save.world_size,
            file=None if written is None else FileEntry(save.data_file, written.image_bytes, written.file_crc32),
            tensors=encode_static([tensor_entry(item, structure, layout) for item in layout.items]),
            sums=b"" if written is None else written.sums,
            objects=sources.objects,
            skeleton=b"",  # names are as DCP flattened them
        )
        await self.resources.storage.write_file(self.directory / save.manifest, data)
        entry = FileEntry(save.manifest, len(data), crc32_of(data))
        return ManifestResult(index=_MANIFEST_INDEX, size_in_bytes=len(data), storage_data=entry, save=save)

    async def _clean_up(self, image: Image, cause: BaseException) -> BaseException:
        """Wake a capture that waits for room, then remove the written files. Returns the error to raise."""
        save, storage = self.save, self.resources.storage
        await explain_full_disk(
            cause,
            storage,
            self.directory,
            image.chunks[-1].stop,
            whose=f" of rank {save.rank} of {save.world_size}" if save.world_size > 1 else "",
            remedy="delete an older checkpoint",
        )
        image.fail_slots(cause if isinstance(cause, Exception) else SaveCancelledError("the save was cancelled"))
        if isinstance(cause, WriteError) and cause.errno == errno.EEXIST:
            return cause  # the file belongs to another save
        with anyio.move_on_after(THREAD_WAIT_SECS), contextlib.suppress(AioCkptError, OSError):
            for name in (save.manifest, save.data_file):
                await storage.remove_file(self.directory / name)
        if getattr(cause, "errno", 0) == errno.ENOENT:
            with contextlib.suppress(AioCkptError, OSError):
                if not await self._is_pending():  # the save that has removed the file removed the marker before
                    return other_save_error(self.directory)
        return cause

    async def _is_pending(self) -> bool:
        return self.save.save_id in await pending_saves(self.resources.storage, self.directory)


# -- the leader -----------------------------------------------------------------------------------


async def commit_dcp_save(
    storage: Storage,
    directory: Path,
    *,
    metadata: Metadata,
    manifests: Sequence[FileEntry],
    save_id: str,
    step: int,
    timeout_secs: float,
) -> None:
    """Make the save visible in place of the checkpoint before it. If that fails, the checkpoint before it stays.

    Raises:
        RootError: a rank's manifest is missing, or another save has begun.
        WriteError: the operating system could not write; has errno and path.
        StallError: the commit did not end within ``timeout_secs``.

    An error with ``in_doubt`` came after the last rename: the new checkpoint is visible, but a power loss may undo it.
    """
    data = dump_metadata(metadata) + trailer(save_id)
    root = render_root(
        metadata_file(data), manifests, step=step, save_id=save_id, created_unix=time.time(), metrics={}, extra={}
    )
    async with hold_directory(storage, directory):
        await _check_manifests(storage, directory, manifests, save_id)
        with anyio.move_on_after(timeout_secs, shield=True) as scope:  # a rename that was begun is waited for
            await _commit(storage, directory, data, root, save_id)
    if scope.cancelled_caught:
        stalled = StallError(f"the commit did not end within {timeout_secs} s: {directory} is stalled")
        stalled.in_doubt = True
        raise stalled


async def _check_manifests(storage: Storage, directory: Path, manifests: Sequence[FileEntry], save_id: str) -> None:
    for rank, entry in enumerate(manifests):
        if not await storage.exists(directory / entry.name):
            await in_place.check_pending(storage, directory, save_id)  # another save removes the files of this one
            raise RootError(
                errno.ENOENT,
                f"the manifest of rank {rank} is gone: give all ranks one shared directory, and let one job at a time "
                "save into it",
                str(directory / entry.name),
            )


async def _commit(storage: Storage, directory: Path, metadata: bytes, root: bytes, save_id: str) -> None:
    try:
        await storage.write_file(directory / root_manifest_name(save_id), root)
        await storage.write_file(directory / new_metadata_name(save_id), metadata)
        await in_place.commit_save(storage, directory, save_id)
    except (AioCkptError, OSError) as error:
        if not (isinstance(error, AioCkptError) and error.in_doubt):
            await in_place.undo_save(storage, directory, save_id)
        raise
