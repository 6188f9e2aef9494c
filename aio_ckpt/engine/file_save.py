"""Single files through an engine: the caller's half of ``save_file()``, and the table of pending files.

The second half runs on the loop: :mod:`aio_ckpt.engine.file_pipeline`.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from aio_ckpt.checks import MAX_SECS, check_path, shown
from aio_ckpt.commit.by_path import file_refusal
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.file_pipeline import TEMPORARY, CapturedPart, FilePipeline, PendingFile, what_is_there
from aio_ckpt.engine.in_flight import InFlight, note_failure, raise_failure
from aio_ckpt.engine.outcomes import duration, logged_errors, named
from aio_ckpt.engine.pipeline import SavePipeline
from aio_ckpt.engine.stages import SaveTimer
from aio_ckpt.errors import ConfigError, EngineClosedError, SaveCancelledError, StallError, WriteError
from aio_ckpt.format.safetensors_file import SUFFIX, index_name
from aio_ckpt.memory.kind import StagingChoice
from aio_ckpt.memory.lifetime import Lease, LifetimeManager
from aio_ckpt.plan.file_plan import FileContent, FilePart, torch_content
from aio_ckpt.plan.safetensors_plan import SafetensorsOptions, safetensors_content
from aio_ckpt.ranks.group_call import CALL_STAGE
from aio_ckpt.ranks.save_round import SaveRound, SaveState
from aio_ckpt.reports import SaveReport, amount
from aio_ckpt.runtime.error_notes import note_stage
from aio_ckpt.runtime.futures import failed
from aio_ckpt.runtime.portal import Lock, Portal
from aio_ckpt.runtime.waiting import WaitLines, call_within
from aio_ckpt.snapshot.capture import Capture, capture
from aio_ckpt.snapshot.image import Image, lease_image
from aio_ckpt.snapshot.progress import CapturedRun, CaptureProgress
from aio_ckpt.ticket import SaveTicket, settle

_log = logging.getLogger("aio_ckpt")


class FileSaves:
    """The pending files of one engine. The caller holds the lock under which the engine captures.

    Invariant: a file is pending from the call until it is settled. At most ``max_in_flight`` are pending.
    """

    def __init__(
        self,
        ctx: EngineContext,
        portal: Portal,
        pipeline: SavePipeline,
        in_flight: InFlight,
        lifetime: LifetimeManager,
    ) -> None:
        self._ctx = ctx
        self._portal = portal
        self._pipeline = pipeline
        self._in_flight = in_flight
        self._lifetime = lifetime
        # A snapshot that can be rescued belongs to a step, so a file needs no memory with a name.
        staging = "auto" if ctx.config.shm_path is not None else ctx.config.staging
        self._staging = StagingChoice(staging)
        self._files = FilePipeline(ctx=ctx, throttle=pipeline.throttle, trash=pipeline.trash)
        self._lock = Lock()
        self._pending: list[PendingFile] = []
        self._calls = 0

    @property
    def pending(self) -> tuple[PendingFile, ...]:
        """Files that are not settled, oldest first."""
        with self._lock:
            return tuple(self._pending)

    @property
    def leases(self) -> list[Lease]:
        """Memory of the pending files."""
        return [lease for save in self.pending for lease in save.leases]

    def save(self, obj: object, path: Path, options: SafetensorsOptions, started: float) -> SaveTicket:
        """Capture ``obj`` and save it to ``path`` in the background; see ``CheckpointEngine.save_file``.

        ``started`` is ``time.perf_counter`` at the call. The failure of an earlier file is raised as ``save()`` does.
        """
        check, limit_secs = functools.partial(self._check_place, path), self._ctx.config.stall_timeout_secs
        call_within(limit_secs, check, "looking at the file", path)
        content = self._content(obj, path.name, options)
        earlier = self._in_flight.take_unreported(0)
        try:
            ticket = self._save(content, path, started)
        except BaseException as error:
            if earlier is not None:
                note_failure(error, earlier)
            raise
        if earlier is not None:
            raise_failure(earlier, made=ticket)
        return ticket

    def _check_place(self, path: Path) -> None:
        why = file_refusal(path, Path(os.path.realpath(self._ctx.root)), self._ctx.names)
        for place, settled in self._in_flight.calls_by_path():
            if not settled.done() and Path(os.path.realpath(place)) in path.parents:
                why = f"the checkpoint at {place} is pending, and takes that directory: await its ticket first"
        if why:
            raise ConfigError(f"path={str(path)!r}: {why}")

    def _content(self, obj: object, name: str, options: SafetensorsOptions) -> FileContent:
        """Return the files of ``obj``, by the suffix of ``name``. Raises what ``save_file()`` says of ``obj``."""
        memory: Any = {"gather_bytes": self._ctx.config.gather_bytes, "budget_bytes": self._lifetime.measure_budget}
        options.check()
        if name.lower().endswith((SUFFIX, index_name(SUFFIX))) and not name.endswith(SUFFIX):
            raise ConfigError(f"path={name!r}: give a name that ends in {SUFFIX}; an index is written beside its files")
        if name.endswith(SUFFIX):
            return safetensors_content(obj, name, options, **memory)
        if options != SafetensorsOptions():
            raise ConfigError(f"path={name!r}: these options are for files that end in {SUFFIX}: leave them away")
        return torch_content(obj, name, **memory)

    # -- the caller's half ----------------------------------------------------------------------------

    def _save(self, content: FileContent, path: Path, started: float) -> SaveTicket:
        waited_secs = self._wait_for_room(path)
        save = self._enter(content, path, SaveTimer(started, waited_secs=waited_secs, plan_secs=0.0), waited_secs)
        copied: list[tuple[Capture, Future[None] | None]] = []
        try:
            with self._lock:  # inside the try: a file in the table that is never settled would block all later ones
                self._in_flight.check_open()
                self._pending.append(save)
            for plan_part in content.parts:
                work, lease = self._capture(save, plan_part())
                copied.append((work, None))
                copied[-1] = work, self._release_when_copied(work, lease, save)
            self._begin(save, None)
            save.timer.reached("blocked")
            self._resolve_staged(save, [future for _, future in copied if future is not None])
        except BaseException as error:
            for work, _ in copied:
                work.finish()  # no copy may still use an arena when it is given back
            for lease in save.leases:
                lease.release(save)
            self._give_up(save, error)
            raise
        return save.ticket

    def _wait_for_room(self, path: Path) -> float:
        """Wait until fewer than ``max_in_flight`` files are pending. Returns the seconds waited."""
        began = time.perf_counter()

        def describe(waited: str) -> str:
            for oldest in self.pending[:1]:
                return f"save_file() of {path} has waited {waited} for {oldest.path}, which is {oldest.activity}"
            return ""

        lines = WaitLines(describe, rank=self._ctx.rank)
        while True:
            self._in_flight.check_open()
            pending = self.pending
            if len(pending) < self._ctx.config.max_in_flight:
                return time.perf_counter() - began
            lines.wait_for([pending[0].settled])

    def _enter(self, content: FileContent, path: Path, timer: SaveTimer, waited_secs: float) -> PendingFile:
        def cancel() -> bool:
            return self._portal.call(save.cancel, timeout=self._ctx.config.stall_timeout_secs, what="cancel()")

        def fence(stream: object) -> None:
            for event in save.events:
                event.fence(stream)

        self._calls += 1
        path = path if content.index is None else path.with_name(index_name(content.index.single))
        owner = self._ctx.owner
        temporary = path.parent / f"{TEMPORARY}{owner.label}-{self._calls}"
        save = PendingFile(
            path=path,
            temporary=temporary,
            content=content,
            round=SaveRound(self._ctx.members, self._ctx.executor, topic=f"file {self._calls}"),
            ticket=SaveTicket(
                step=0,
                path=path,
                portal_check=self._portal.check_thread,
                cancel=cancel,
                fence=fence,
                progress=lambda: save.so_far,
                waited_secs=waited_secs,
            ),
            earlier=tuple(pending.settled for pending in self.pending),
            timer=timer,
        )
        save.round.advance(SaveState.CAPTURING)
        return save

    def _capture(self, save: PendingFile, part: FilePart) -> tuple[Capture, Lease]:
        """Capture a part. Its lease is held for the save until :meth:`_release_when_copied`."""
        plan, in_flight = part.planned.plan, self._in_flight
        image = self._lease(save, part)
        captured_part = CapturedPart(part=part, image=image, progress=CaptureProgress(len(image.chunks)))
        is_begun = False

        def captured(runs: Sequence[CapturedRun]) -> None:
            nonlocal is_begun
            if not is_begun:  # only now: the loop that wakes takes the GIL in the next call of CUDA
                self._begin(save, captured_part)
                is_begun = True
            self._portal.post(captured_part.progress.add, runs)
            self._portal.post(save.progress.touch)

        def issued(work: Capture) -> None:
            save.events += work.source_events
            in_flight.guards.wait_for(work.source_events)

        image.lease.hold(save)
        work = capture(
            part.planned,
            image,
            in_flight.copy_engines,
            guarded=in_flight.guards.leaves(plan.descriptors.fingerprint, plan.structure),
            on_captured=captured,
            on_issued=issued,
            stall_timeout_secs=self._pipeline.slot_timeout_secs(image.slots * image.chunk_bytes),
        )
        return work, image.lease

    def _release_when_copied(self, work: Capture, lease: Lease, save: PendingFile) -> Future[None] | None:
        """End the capture's hold of its memory once its copies are done. Return the future of that; None if it is done.

        Each part has its own, because the next part may need the memory.
        """
        if work.is_done:
            work.finish()
            lease.release(save)
            return None
        copied = self._portal.executor.submit(work.finish)
        copied.add_done_callback(lambda _: lease.release(save))
        return copied

    def _lease(self, save: PendingFile, part: FilePart) -> Image:
        image = lease_image(
            part.planned,
            part.tail_bytes,
            self._lifetime,
            self._staging,
            timeout_secs=self._pipeline.slot_timeout_secs(part.planned.plan.layout.chunk_bytes),
            limit_secs=MAX_SECS,
        )
        save.leases.append(image.lease)
        save.images.append(image)
        return image

    def _begin(self, save: PendingFile, part: CapturedPart | None) -> None:
        """Hand a part to the pipeline; the first one starts it. None: no part follows."""
        if not save.is_begun:
            save.is_begun = True
            self._portal.submit(self._files.run, save, on_done=lambda done: self._settle(save, done))
        self._portal.post(save.add, part)

    def _resolve_staged(self, save: PendingFile, copied: Sequence[Future[None]]) -> None:
        """Resolve ``staged`` once all of ``copied`` are done."""

        def resolve() -> None:
            for future in copied:
                future.result()
            save.timer.reached("staged")
            save.ticket.staged.resolve(None)

        if copied:
            self._portal.executor.submit(resolve)
        else:
            resolve()

    def _give_up(self, save: PendingFile, error: BaseException) -> None:
        """End a save whose ``save_file()`` is about to raise ``error``, at whatever stage it is."""
        timeout_secs = self._ctx.config.stall_timeout_secs
        interrupted = SaveCancelledError(f"save_file() of {save.path} was interrupted by {type(error).__name__}")
        cause = error if isinstance(error, Exception) else interrupted
        note_stage(cause, CALL_STAGE)
        try:
            self._portal.call(self._stop, save, cause, timeout=timeout_secs, what="save_file()")
        except (EngineClosedError, StallError):  # no pipeline runs any more
            self._settle(save, failed(cause))
        save.ticket.exception(timeout_secs)  # save_file() raises it, so that the failure counts as reported

    async def _stop(self, save: PendingFile, cause: Exception) -> None:
        """Stop a save, on the loop: only there it is certain whether the pipeline has begun."""
        save.progress.fail(cause)
        if save.scope is None:
            for lease in save.leases:
                lease.close()
            self._settle(save, failed(cause))

    def _settle(self, save: PendingFile, done: Future[SaveReport]) -> None:
        """Settle a save: first the table, then the ticket. The first call counts."""
        if save.settled.done():
            return
        error = SaveCancelledError("the engine was closed") if done.cancelled() else done.exception()
        try:
            with logged_errors(f"the outcome of the save of {save.path} was not recorded"):
                if error is None:
                    _tell_commit(done.result())
                else:
                    self._tell_failure(save, error)
        finally:  # a ticket that is never done would block every later call
            with self._lock:
                self._pending = [other for other in self._pending if other is not save]
            save.settled.set_result(None)
            settle(save.ticket, done.result() if error is None else error)

    def _tell_failure(self, save: PendingFile, error: BaseException) -> None:
        for image in save.images:
            image.fail_slots(error)
        if not isinstance(error, SaveCancelledError):
            self._in_flight.add_unreported(save.ticket)
            _log.error("saving %s failed: %s; %s", save.path, named(error), what_is_there(error))


def _tell_commit(report: SaveReport) -> None:
    timings = report.timings
    _log.info(
        "%s: %s durable after %s; save_file() blocked %s, staged after %s",
        report.path,
        amount(report.image_bytes),
        duration(timings.committed_secs),
        duration(timings.blocked_secs),
        duration(timings.staged_secs),
    )


def _resolved(path: Path) -> Path:
    """Return the place that ``path`` leads to. If a link cannot be looked at, the call fails: it would be replaced.

    Raises:
        WriteError: a link cannot be looked at, or the links are a loop.
    """
    try:
        return Path(os.path.realpath(path, strict=True))
    except (FileNotFoundError, NotADirectoryError):  # a new file, or a link to one
        return Path(os.path.realpath(path))
    except OSError as error:
        message = f"cannot tell whether a link lies there ({error.strerror}): call save_file() again"
        raise WriteError(error.errno, message, str(path)) from error


def file_target(path: object) -> Path:
    """Return the place of the file that ``path`` names, absolute.

    If ``path`` is a symbolic link, that is the place of the file that the link names. So the link stays.

    Raises:
        WriteError: a link cannot be looked at.
        ConfigError: ``path`` is no path; or a directory, a device, a pipe or a socket; or a parent of it is a file.
    """
    target = _resolved(check_path("path", path, of="a file"))
    if target.is_dir():
        raise ConfigError(f"path={shown(path)}: is a directory: give the path of a file")
    if target.exists() and not target.is_file():  # a rename would replace the device itself, for every process
        raise ConfigError(f"path={shown(path)}: is a device, a pipe or a socket: give the path of a regular file")
    parent = next(parent for parent in target.parents if parent.exists())
    if not parent.is_dir():
        raise ConfigError(f"path={shown(path)}: {parent} is a file: give a path in a directory")
    return target
