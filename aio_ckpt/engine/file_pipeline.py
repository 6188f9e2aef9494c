"""One call of ``save_file()`` on the engine's loop: write beside the place, then rename; and its cleanup.

A file is written into a directory of its own beside its place, and fsynced there. One rename then makes it visible.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel

from aio_ckpt.commit.owner import owner_by_name
from aio_ckpt.commit.publish_files import only_writer, publish_files
from aio_ckpt.commit.trash import SETTLE_SECS, Trash
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.stages import SaveTimer
from aio_ckpt.errors import AioCkptError, SaveCancelledError, StallError
from aio_ckpt.format.safetensors_file import SUFFIX
from aio_ckpt.memory.copies import CopyEvent
from aio_ckpt.memory.lifetime import Lease
from aio_ckpt.plan.file_plan import FileContent, FilePart
from aio_ckpt.ranks.save_round import SaveRound, SaveState
from aio_ckpt.reports import Progress, SaveReport, Stage
from aio_ckpt.runtime.error_notes import note_stage
from aio_ckpt.runtime.futures import ThreadTracker, first_cause, follow
from aio_ckpt.runtime.portal import watch_submissions
from aio_ckpt.runtime.waiting import WaitLines
from aio_ckpt.snapshot.image import Image
from aio_ckpt.snapshot.progress import CaptureProgress
from aio_ckpt.storage.local import names_in
from aio_ckpt.ticket import SaveTicket
from aio_ckpt.write.full_disk import explain_full_disk
from aio_ckpt.write.result import WriteResult
from aio_ckpt.write.throttle import WriteThrottle
from aio_ckpt.write.writer import ChunkPreparer, new_file, write_image

TEMPORARY = ".aio_ckpt-file-"
"""Begin of the names of temporary directories."""
_log = logging.getLogger("aio_ckpt")


@dataclass(slots=True, kw_only=True, eq=False)
class CapturedPart:
    """One file whose capture has begun."""

    part: FilePart
    image: Image
    progress: CaptureProgress
    """Captured chunks of the image."""


@dataclass(slots=True, kw_only=True, eq=False)
class PendingFile:
    """One call of ``save_file()`` between the call and its settlement.

    The caller's thread changes it until the pipeline is submitted, then the loop's thread.
    """

    path: Path
    """Place of the file, or of the index of several."""
    temporary: Path
    """Directory in which the files are written."""
    content: FileContent
    round: SaveRound
    """State of the save. Only its state is used, as no other rank takes part."""
    ticket: SaveTicket
    earlier: tuple[Future[None], ...]
    """Settlements of the files that were pending at the call: commits keep the order of the calls."""
    timer: SaveTimer
    progress: CaptureProgress = field(default_factory=lambda: CaptureProgress(0))
    """Stall timer of the save, and the failure of its capture."""
    threads: ThreadTracker = field(default_factory=ThreadTracker)
    settled: Future[None] = field(default_factory=Future)
    """Done once the files are committed, or have failed and are cleaned up."""
    events: tuple[CopyEvent, ...] = ()
    """Events after the copies from devices."""
    leases: list[Lease] = field(default_factory=list)
    """Memory of all parts."""
    images: list[Image] = field(default_factory=list)
    """Images of all parts."""
    is_begun: bool = False
    """Whether the pipeline was submitted."""
    captured: list[CapturedPart] = field(default_factory=list)
    """Parts that the pipeline may write; changed on the loop."""
    is_all_captured: bool = False
    """Whether no part follows ``captured``."""
    changed: asyncio.Event | None = None
    """Set when a part is added; made by the pipeline."""
    activity: str = "beginning"
    stage: Stage = "write"
    written_bytes: int = 0
    scope: anyio.CancelScope | None = None
    """Cancels the pipeline; None until the pipeline has begun."""

    @property
    def image_bytes(self) -> int:
        """Length of the files whose capture has begun."""
        return sum(image.chunks[-1].stop for image in self.images)

    @property
    def so_far(self) -> Progress:
        """Progress for the ticket. Any thread may read it."""
        is_capturing = self.stage == "write" and not self.ticket.staged.done()
        stage: Stage = "capture" if is_capturing else self.stage
        return Progress(stage=stage, bytes_done=self.written_bytes, bytes_total=self.image_bytes)

    def begin(self, activity: str, *, stage: Stage | None = None) -> None:
        """Note, on the loop, the activity that begins now, and its stage if that changes."""
        self.activity = activity
        self.stage = stage or self.stage
        self.progress.touch()

    def add(self, part: CapturedPart | None) -> None:
        """Add a part on the loop; None ends them."""
        if part is None:
            self.is_all_captured = True
        else:
            self.captured.append(part)
        if self.changed is not None:
            self.changed.set()

    async def cancel(self) -> bool:
        """Cancel the save, on the loop; False if it is too late."""
        if self.settled.done() or not self.round.cancel():
            return False
        if self.scope is not None:
            self.scope.cancel()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePipeline:
    """Runs the save of a file, from its captured image to a visible file. :meth:`_write` shows all of it."""

    ctx: EngineContext
    throttle: WriteThrottle
    """Limits the rate of writing."""
    trash: Trash
    """Gets the temporary directories that cannot be removed at once."""
    cleared: set[Path] = field(default_factory=set)
    """Directories in which the leftovers of dead processes were removed."""

    async def run(self, save: PendingFile) -> SaveReport:
        """Write and commit a file whose capture has begun."""
        if save.settled.done():
            raise SaveCancelledError(f"the save of {save.path} ended before its pipeline began")
        try:
            with watch_submissions(save.threads.add), self._stall_lines(save).on_loop():
                return await self._watched(save)
        except BaseException as error:
            cause = first_cause(error)
            note_stage(cause, save.stage)
            with anyio.CancelScope(shield=True):
                await explain_full_disk(
                    cause, self.ctx.storage, save.path.parent, save.image_bytes, remedy="save to another disk"
                )
                await self._clean_up(save, cause)
            if cause is error:
                raise
            raise cause from cause.__cause__

    async def _watched(self, save: PendingFile) -> SaveReport:
        report = None
        with anyio.CancelScope() as scope:
            save.scope, save.changed = scope, asyncio.Event()
            if save.round.state is SaveState.CANCELLED:
                scope.cancel()
            else:
                save.round.advance(SaveState.WRITING)
            async with anyio.create_task_group() as group:
                group.start_soon(self._watch, save)
                report = await self._write(save)
                group.cancel_scope.cancel()
        if report is None:
            raise SaveCancelledError(f"the save of {save.path} was cancelled; {what_is_there(None)}")
        return report

    async def _watch(self, save: PendingFile) -> None:
        """Raise the failure of the capture; StallError if nothing moves for too long."""
        limit_secs = self.ctx.config.stall_timeout_secs
        while not save.round.is_committing:
            idle_left = save.progress.idle_left_secs(limit_secs)
            if idle_left <= 0:
                raise StallError(
                    f"the save of {save.path} made no progress for {limit_secs} s: its file system is stalled, "
                    f"it was {save.activity}"
                )
            with anyio.move_on_after(idle_left):
                await save.progress.raise_failure()

    async def _write(self, save: PendingFile) -> SaveReport:
        """Write all files beside their places, then rename them."""
        storage, folder = self.ctx.storage, save.path.parent
        save.begin("making its directory")
        await storage.make_dir(folder, parents=True)
        await self._clear_leftovers(folder)
        await storage.make_dir(save.temporary)
        await storage.set_mode(save.temporary, 0o700)  # until its rename, nobody else may read a private file either
        results: dict[str, WriteResult] = {}
        raw_bytes = 0
        while (captured := await self._next_part(save, len(results))) is not None:
            results[captured.part.name] = await self._write_part(save, captured)
            raw_bytes += captured.part.planned.plan.layout.raw_bytes
            captured.image.lease.close()
        save.timer.reached("synced")
        save.begin("waiting for the file before")
        with save.progress.paused():
            for settled in save.earlier:
                await asyncio.wrap_future(follow(settled))
        names = await self._commit(save)
        return SaveReport(
            step=0,
            path=save.path,
            image_bytes=save.image_bytes,
            raw_bytes=raw_bytes,
            plan_hit=False,
            fingerprint_hit=False,
            mode=next(iter(results.values())).mode,
            timings=save.timer.timings(),
            crc32s={name: result.file_crc32 for name, result in zip(names, results.values(), strict=True)},
        )

    async def _next_part(self, save: PendingFile, index: int) -> CapturedPart | None:
        """Wait for part ``index`` to be captured; None if there is no such part."""
        assert save.changed is not None
        with save.progress.paused():  # the caller's thread plans and waits for memory
            while len(save.captured) <= index and not save.is_all_captured:
                save.changed.clear()
                await save.changed.wait()
        return save.captured[index] if len(save.captured) > index else None

    async def _write_part(self, save: PendingFile, captured: CapturedPart) -> WriteResult:
        ctx, image, part = self.ctx, captured.image, captured.part
        workers = ctx.config.workers
        preparer = ChunkPreparer(
            part.planned.plan.layout, bytes(part.tail_bytes), renders_constants=True, seal=part.seal
        )

        def on_written(nbytes: int) -> None:
            save.timer.reached("written")
            save.written_bytes += nbytes
            save.progress.touch()

        file = new_file(
            ctx.storage,
            save.temporary / part.name,
            image.chunks[-1].stop,
            writers=workers,
            settle_secs=SETTLE_SECS,
            on_activity=save.begin,
        )
        return await write_image(
            image,
            preparer,
            file,
            ctx.executor,
            workers=workers,
            captured=lambda index: captured.progress.wait(index, ctx.executor),
            admit=functools.partial(self.throttle.admit, is_hurried=False, on_wait=save.progress.touch),
            on_written=on_written,
        )

    async def _commit(self, save: PendingFile) -> Sequence[str]:
        """Make the files visible. Returns their names."""
        ctx, folder = self.ctx, save.path.parent
        save.begin(f"waiting for another save that renames files in {folder}")
        is_plain = save.content.index is None and not save.path.name.endswith(SUFFIX)
        async with contextlib.nullcontext() if is_plain else only_writer(ctx.storage, ctx.executor, folder):
            await anyio.lowlevel.checkpoint_if_cancelled()  # a cancellation may have been accepted since the last wait
            save.round.advance(SaveState.VOTED)
            save.round.advance(SaveState.COMMITTING)
            save.begin("making it visible (rename, fsync)", stage="commit")
            return await self._publish(save)

    async def _publish(self, save: PendingFile) -> Sequence[str]:
        limit_secs = self.ctx.config.stall_timeout_secs
        names: Sequence[str] = ()
        # Shielded, because renames that have begun are completed.
        with anyio.move_on_after(limit_secs, shield=True) as scope:
            parts = [captured.part.name for captured in save.captured]
            names = await publish_files(self.ctx.storage, save.temporary, save.path, parts, index=save.content.index)
            await self.trash.delete(save.temporary)
        if scope.cancelled_caught:
            save.round.advance(SaveState.IN_DOUBT)
            stalled = StallError(f"the rename of {save.path} did not end within {limit_secs} s: its disk is stalled")
            stalled.in_doubt = True
            raise stalled
        save.round.advance(SaveState.VISIBLE)
        return names

    # -- clean up -------------------------------------------------------------------------------------

    async def _clean_up(self, save: PendingFile, cause: BaseException) -> None:
        """Give the memory back once the last thread has ended, and remove the temporary directory."""
        for image in save.images:
            image.fail_slots(cause)
            image.lease.close()
        with anyio.move_on_after(SETTLE_SECS):
            await save.threads.wait()
        if save.threads.is_idle:
            await self.trash.delete(save.temporary)
        else:
            _log.error("a thread still works for %s; %s stays until it has ended", save.path, save.temporary)
            self.trash.add(save.temporary, lambda: save.threads.is_idle)

    async def _clear_leftovers(self, folder: Path) -> None:
        """Remove the temporary directories of dead processes in ``folder``, once for each folder."""
        if folder in self.cleared:
            return
        self.cleared.add(folder)
        here, storage = self.ctx.owner, self.ctx.storage
        for name in await names_in(storage, folder):
            owner = owner_by_name(name, here) if name.startswith(TEMPORARY) else None
            if owner is not None and owner.is_proven_dead(here):
                await self.trash.delete(folder / name)

    def _stall_lines(self, save: PendingFile) -> WaitLines:
        def describe(idle: str) -> str:
            return f"the save of {save.path} has made no progress for {idle}: it is {save.activity}"

        return WaitLines(describe, waited_secs=lambda: save.progress.idle_secs, rank=self.ctx.rank)


def what_is_there(error: BaseException | None) -> str:
    """Return what stands at the path after a failed save."""
    if isinstance(error, AioCkptError) and error.in_doubt:
        return "the new one may be in its place, and a power loss may undo that"
    return "what was at its path is unchanged"
