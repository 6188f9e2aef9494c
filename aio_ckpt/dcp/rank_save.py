"""One save into a directory: what each rank writes, and what the leader makes visible."""

from __future__ import annotations

import contextlib
import errno
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from isal import isal_zlib
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from aio_ckpt.checks import MAX_SECS
from aio_ckpt.commit.cleanup import SETTLE_SECS
from aio_ckpt.commit.directory import (
    begin_directory,
    commit_directory,
    hold_directory,
    is_checkpoint_of,
    pending_saves,
    recover_directory,
    retire_directory,
)
from aio_ckpt.commit.manifests import metadata_file, render_root
from aio_ckpt.dcp.runtime import Runtime
from aio_ckpt.dcp.sources import Sources
from aio_ckpt.errors import AioCkptError, PlanChangedError, RootError, SaveCancelledError, StallError, WriteError
from aio_ckpt.format.dcp_metadata_write import dump_metadata
from aio_ckpt.format.manifests import FileEntry, data_file_name, encode_rank, encode_static, rank_manifest_name
from aio_ckpt.plan.planner import tensor_entry
from aio_ckpt.runtime.error_notes import note_stage
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.snapshot.capture import capture
from aio_ckpt.snapshot.image import Image, lease_image
from aio_ckpt.snapshot.progress import CaptureProgress
from aio_ckpt.storage.local import Storage
from aio_ckpt.write.result import WriteResult as Written
from aio_ckpt.write.result import check_complete
from aio_ckpt.write.trace_file import NO_TRACE
from aio_ckpt.write.writer import ChunkPreparer, new_file, write_image

__all__ = ["ManifestResult", "RankSave", "begin_save", "commit_save", "find_save", "mend", "write_rank"]

_LOOKS_FOR_MARK, _LOOKS_APART_SECS = 100, 0.02
"""The mark of a save that another one ends goes behind its files: a directory is fsynced in between."""
_MANIFEST_INDEX = MetadataIndex("aio_ckpt.manifest")


@dataclass(frozen=True)
class RankSave:
    """One rank's part of a save; goes from the leader to the rank in its plan."""

    save_id: str
    """In the name of every file of the save."""
    rank: int
    """Number of the rank's plan."""
    world_size: int
    """Number of plans."""
    step: int
    """That of the directory's name, 0 if it is named for none."""

    @property
    def data_file(self) -> str:
        """Name of the data file; DCP's own begin with the rank, so that none is ever written over."""
        return f"__{self.save_id}{data_file_name(self.rank).removeprefix('_')}"

    @property
    def manifest(self) -> str:
        """Name of the rank manifest."""
        return rank_manifest_name(self.rank).replace("aio_ckpt.", f"aio_ckpt.{self.save_id}.", 1)


@dataclass(frozen=True)
class ManifestResult(WriteResult):
    """Tells the leader of a rank's manifest, beside the results of its items; ``storage_data`` is its FileEntry."""

    save_id: str
    """Of the save that it belongs to."""


async def begin_save(storage: Storage, directory: Path, save_id: str) -> None:
    """Leader, before any rank writes: mend what a crash left, mark the new save.

    Raises:
        RootError: another save is being committed there, or begins at the same time.
    """
    with hold_directory(storage, directory):
        await recover_directory(storage, directory)
        await begin_directory(storage, directory, save_id=save_id)


async def mend(storage: Storage, directory: Path) -> bool:
    """``recover_directory``, but not while a save begins or is being committed."""
    if not await storage.exists(directory):
        return False
    with hold_directory(storage, directory):
        return await recover_directory(storage, directory)


async def find_save(storage: Storage, directory: Path, save: RankSave, *, is_begun: bool) -> RankSave:
    """The pending save that ``save`` means. DCP's plan cache hands out that of an earlier one, whose mark is gone.

    ``is_begun``: known to be no earlier one.

    Raises:
        RootError: not one save is pending: the ranks see different directories, or another save has begun here.
    """
    pending = await pending_saves(storage, directory)
    if save.save_id in pending:
        return save
    if is_begun:
        raise _overtaken(directory)
    if len(pending) == 1:
        return replace(save, save_id=pending[0])
    raise RootError(
        errno.ENOENT,
        f"rank {save.rank} finds {len(pending)} pending saves, not the leader's one: give all ranks one shared "
        "directory, and let one job at a time save into it",
        str(directory),
    )


# -- every rank -----------------------------------------------------------------------------------


def write_rank(
    runtime: Runtime, directory: Path, save: RankSave, sources: Sources, *, on_captured: Callable[[], None]
) -> list[WriteResult]:
    """Write the rank's data file and manifest, durably, while the tensors are captured on this thread.

    ``on_captured`` is called once no tensor is needed any more; what it raises fails the save.

    Raises:
        WriteError: with errno and path.
        StallError: no progress for ``stall_timeout_secs``.
        Exception: the first error of any stage; then what was written is removed.
    """
    if sources.is_empty:
        on_captured()
        written = runtime.portal.call(
            _write_manifest, runtime.storage, directory, save, sources, None, timeout=runtime.config.stall_timeout_secs
        )
        return [written]
    config = runtime.config
    image = lease_image(
        sources.planned,
        sources.stream_bytes,
        runtime.window,
        runtime.arena_kind(sources.planned.plan.source),
        timeout_secs=config.stall_timeout_secs,
        limit_secs=MAX_SECS,
    )
    try:
        return _capture_and_write(runtime, directory, save, sources, image, on_captured)
    finally:
        image.lease.close()


def _capture_and_write(
    runtime: Runtime,
    directory: Path,
    save: RankSave,
    sources: Sources,
    image: Image,
    on_captured: Callable[[], None],
) -> list[WriteResult]:
    limit_secs = runtime.config.stall_timeout_secs
    progress = CaptureProgress(len(image.chunks))
    ended: Future[None] = Future()
    writing = runtime.portal.submit(_write, runtime, directory, save, sources, image, progress, ended)
    try:
        work = capture(
            sources.planned,
            image,
            runtime.copy_engines,
            guarded=frozenset(),
            on_captured=lambda runs: runtime.portal.post(progress.add, runs),
            stall_timeout_secs=limit_secs,
            trace=NO_TRACE,
        )
        work.finish()
        on_captured()
        manifest = _outcome(writing, progress, limit_secs, directory)
    except BaseException as error:
        writing.cancel()
        with contextlib.suppress(TimeoutError):
            ended.result(SETTLE_SECS)
        note_stage(error, "write")
        raise
    results = [
        WriteResult(index=index, size_in_bytes=place.length, storage_data=place)
        for index, place in sources.places(save.data_file).items()
    ]
    return [*results, manifest]


def _outcome(
    writing: Future[ManifestResult], progress: CaptureProgress, limit_secs: float, directory: Path
) -> ManifestResult:
    while not writing.done():
        left = progress.idle_left_secs(limit_secs)
        if left <= 0:
            raise StallError(f"a save made no progress for {limit_secs} s: storage under {directory} is stalled")
        with contextlib.suppress(TimeoutError):
            writing.exception(left)
    return writing.result()


async def _write(
    runtime: Runtime,
    directory: Path,
    save: RankSave,
    sources: Sources,
    image: Image,
    progress: CaptureProgress,
    ended: Future[None],
) -> ManifestResult:
    try:
        written = await _write_data(runtime, directory / save.data_file, sources, image, progress)
        manifest = await _write_manifest(runtime.storage, directory, save, sources, written)
        await runtime.storage.sync_dir(directory)
        await _check_mark(runtime.storage, directory, save.save_id)
    except BaseException as error:
        cause = first_cause(error)
        with anyio.CancelScope(shield=True):
            await _clear(runtime.storage, directory, save, image, cause)
            cause = await _explained(runtime.storage, directory, save, cause)
        if cause is error:
            raise
        raise cause from cause.__cause__
    else:
        return manifest
    finally:
        ended.set_result(None)


async def _write_data(
    runtime: Runtime, path: Path, sources: Sources, image: Image, progress: CaptureProgress
) -> Written:
    preparer = ChunkPreparer(
        sources.planned.plan.layout, b"".join(stream.data for stream in sources.streams), renders_constants=True
    )
    workers = runtime.config.workers
    written = await write_image(
        image,
        preparer,
        new_file(
            runtime.storage,
            path,
            image.chunks[-1].stop,
            writers=workers,
            settle_secs=SETTLE_SECS,
            on_activity=lambda _: progress.touch(),
        ),
        runtime.portal.executor,
        workers=workers,
        captured=lambda index: progress.wait(index, runtime.portal.executor),
        admit=functools.partial(runtime.throttle.admit, is_hurried=False, on_wait=progress.touch),
        on_written=lambda _: progress.touch(),
        trace=NO_TRACE,
    )
    progress.touch()
    return written


async def _write_manifest(
    storage: Storage, directory: Path, save: RankSave, sources: Sources, written: Written | None
) -> ManifestResult:
    """The rank's manifest; ``written`` is None if the rank has nothing to write."""
    layout = sources.planned.plan.layout
    if written is not None:
        _check_written(sources, written)
    data = encode_rank(
        save_id=save.save_id,
        step=save.step,
        rank=save.rank,
        world_size=save.world_size,
        file=None if written is None else FileEntry(save.data_file, written.image_bytes, written.file_crc32),
        tensors=encode_static([tensor_entry(item) for item in layout.items]),
        sums=b"" if written is None else written.sums,
        objects=sources.object_entries(),
        skeleton=b"",  # names are as DCP flattened them
    )
    await storage.write_file(directory / save.manifest, data)
    entry = FileEntry(save.manifest, len(data), isal_zlib.crc32(data))
    return ManifestResult(index=_MANIFEST_INDEX, size_in_bytes=len(data), storage_data=entry, save_id=save.save_id)


def _check_written(sources: Sources, written: Written) -> None:
    names = frozenset(name for item in sources.planned.plan.layout.items for name in item.fqns)
    check_complete(frozenset(index.fqn for index in sources.indices), names)
    if len(written.chunks_written) != written.chunks or written.items_patched != len(sources.planned.plan.layout.items):
        raise PlanChangedError("not every chunk of the data file was written; nothing was committed")


async def _clear(storage: Storage, directory: Path, save: RankSave, image: Image, cause: BaseException) -> None:
    """Wake a capture that waits for room, then remove what was written, once its threads let go of it."""
    image.fail_slots(cause if isinstance(cause, Exception) else SaveCancelledError("the save was cancelled"))
    if isinstance(cause, WriteError) and cause.errno == errno.EEXIST:
        return  # another save's
    with anyio.move_on_after(SETTLE_SECS), contextlib.suppress(AioCkptError, OSError):
        for name in (save.manifest, save.data_file):
            await storage.remove_file(directory / name)


async def _check_mark(storage: Storage, directory: Path, save_id: str) -> None:
    """Who overtook the save may have looked for what to remove before all of it was there."""
    if save_id not in await pending_saves(storage, directory):
        raise _overtaken(directory)


async def _explained(storage: Storage, directory: Path, save: RankSave, cause: BaseException) -> BaseException:
    """A file that is gone went when another save began; the mark of its own follows."""
    if getattr(cause, "errno", 0) != errno.ENOENT:
        return cause
    with contextlib.suppress(AioCkptError, OSError):
        for _ in range(_LOOKS_FOR_MARK):
            if save.save_id not in await pending_saves(storage, directory):
                return _overtaken(directory)
            await anyio.sleep(_LOOKS_APART_SECS)
    return cause


# -- the leader -----------------------------------------------------------------------------------


async def commit_save(
    storage: Storage,
    directory: Path,
    *,
    metadata: Metadata,
    manifests: Sequence[FileEntry],
    save_id: str,
    step: int,
    timeout_secs: float,
) -> None:
    """Make the save visible in the place of what the directory held; if that fails, what it held stands again.

    Raises:
        RootError: a rank's manifest is not there, or another save has begun.
        WriteError: with errno and path.
        StallError: the commit did not end within ``timeout_secs``.

    An error with ``in_doubt`` came after the last rename: the new checkpoint stands, but may not outlive a power loss.
    """
    data = dump_metadata(metadata)
    root = render_root(metadata_file(data), manifests, step=step, save_id=save_id, created_unix=time.time(), metrics={})
    with hold_directory(storage, directory):
        if await pending_saves(storage, directory) != [save_id]:
            raise _overtaken(directory)
        await _check_manifests(storage, directory, manifests)
        with anyio.move_on_after(timeout_secs, shield=True) as scope:  # renames that were begun are finished or undone
            await _replace(storage, directory, data, root, save_id)
    if scope.cancelled_caught:
        stalled = StallError(f"the commit did not end within {timeout_secs} s: {directory} is stalled")
        stalled.in_doubt = True
        raise stalled


async def _check_manifests(storage: Storage, directory: Path, manifests: Sequence[FileEntry]) -> None:
    for rank, entry in enumerate(manifests):
        if not await storage.exists(directory / entry.name):
            raise RootError(
                errno.ENOENT,
                f"the manifest of rank {rank} is gone: give all ranks one shared directory, and let one job at a time "
                "save into it",
                str(directory / entry.name),
            )


def _overtaken(directory: Path) -> RootError:
    return RootError(
        errno.EBUSY, "another save into this directory has begun: let one at a time save into it", str(directory)
    )


async def _replace(storage: Storage, directory: Path, metadata: bytes, root: bytes, save_id: str) -> None:
    try:
        retired = await retire_directory(storage, directory, save_id=save_id)
        await commit_directory(
            storage, directory, metadata=metadata, root_manifest=root, save_id=save_id, retired=retired
        )
    except (AioCkptError, OSError) as error:
        with contextlib.suppress(AioCkptError, OSError):
            await recover_directory(storage, directory)
            if isinstance(error, AioCkptError):  # what was renamed and not made durable stands, for now
                error.in_doubt = await is_checkpoint_of(storage, directory, save_id=save_id)
        raise
