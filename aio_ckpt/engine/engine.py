"""The engine: wires save, load and shutdown together, and gives them an async interface."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, SupportsFloat, TypeVar

import torch

from aio_ckpt._torch import log_untried_torch
from aio_ckpt.argument_checks import check_callback, check_flag, check_kind
from aio_ckpt.commit.owner import Owner
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.commit.root_claim import Claim
from aio_ckpt.commit.trash import Trash
from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.agreed_changes import AgreedChanges
from aio_ckpt.engine.agreement import Agreement
from aio_ckpt.engine.call_lock import CallLock
from aio_ckpt.engine.capture_job import JobCapturer
from aio_ckpt.engine.capture_resources import CaptureResources
from aio_ckpt.engine.common_stages import CommonStages
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.earlier_run import EarlierRun
from aio_ckpt.engine.file_pipeline import FilePipeline
from aio_ckpt.engine.file_save import FileSaves
from aio_ckpt.engine.job import SaveCall
from aio_ckpt.engine.job_queue import JobQueue
from aio_ckpt.engine.known_steps import KnownSteps
from aio_ckpt.engine.loader import Loader, PendingLoad, selection, wanted_checkpoint
from aio_ckpt.engine.newest_frozen_file import NewestFrozenFile
from aio_ckpt.engine.outcomes import OutcomeRecorder
from aio_ckpt.engine.remove_pipeline import RemovePipeline
from aio_ckpt.engine.root_session import (
    RootSession,
    check_in_store,
    check_stale_after,
    log_mount,
    usable_mirror,
    usable_root,
)
from aio_ckpt.engine.shutdown import Shutdown
from aio_ckpt.engine.state_pipeline import StatePipeline
from aio_ckpt.engine.state_save import StateSaves
from aio_ckpt.engine.trusted_leaves import TrustedLeaves
from aio_ckpt.errors import EngineClosedError, StallError, SystemLimitError
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.leaves.values import State
from aio_ckpt.match.options import LoadOptions
from aio_ckpt.match.rename import Rename
from aio_ckpt.memory.arena_lifetimes import LifetimeStats
from aio_ckpt.memory.staging_kind import check_staging
from aio_ckpt.mirror.mirror_queue import MirrorQueue
from aio_ckpt.plan.safetensors_plan import FileRename, SafetensorsOptions
from aio_ckpt.ranks.coordinator import Coordinator
from aio_ckpt.ranks.failure import Failure
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.ranks.polls import AgreedPreemption, AgreedTimer, AgreedWork, Work
from aio_ckpt.ranks.store_coordinator import default_coordinator, has_default_group
from aio_ckpt.remote_path import Place, RemotePath
from aio_ckpt.reports import EngineStats, LoadReport, OnProgress
from aio_ckpt.rescue.hooks import Rescue
from aio_ckpt.runtime.ctrl_c import new_future
from aio_ckpt.runtime.futures import follow
from aio_ckpt.runtime.portal import SMALL_IO_THREADS, STOP_SECS, Executor, Portal, await_at_exit, start_beside
from aio_ckpt.runtime.signals import PREEMPTION_SIGNALS
from aio_ckpt.runtime.thread_priority import lower_priority
from aio_ckpt.snapshot.optimizer_guard import OptimizerLike
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.mounts import Mount
from aio_ckpt.storage.object_store import AnyStorage, store_of
from aio_ckpt.ticket import Milestone, PendingCall, SaveTicket
from aio_ckpt.write.throttle import WriteThrottle

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("aio_ckpt")
_AGAIN_SECS = 1.0
"""Time after which a thread is asked for again that the system has refused."""


class BaseEngine:
    """Parts of an engine, and the calls that the async and the sync engine have in common."""

    def __init__(
        self,
        root: Place,
        config: EngineConfig | None = None,
        *,
        coordinator: Coordinator | None = None,
        storage: Storage | None = None,
    ) -> None:
        check_kind("config", config, EngineConfig)
        check_kind("coordinator", coordinator, Coordinator)
        check_kind("storage", storage, Storage)
        config = config or EngineConfig()
        is_solo_by_default = coordinator is None and not has_default_group()
        coordinator = coordinator or default_coordinator()
        check_staging(config.staging, config.shm_path, coordinator.world_size)
        path, mount = usable_root(root, config.stall_timeout_secs)
        check_stale_after(config.stale_after_secs, mount)
        check_in_store(config, mount)
        mirror = None if config.mirror is None else usable_mirror(config.mirror, path, config.stall_timeout_secs)
        if coordinator.rank == coordinator.leader:
            log_mount(path, mount)
        self._given = (root,) if config.mirror is None else (root, config.mirror.place)
        owner = Owner.of_this_process()
        self._portal = Portal(
            f"aio_ckpt-{owner.session}",
            config.workers + SMALL_IO_THREADS,
            functools.partial(lower_priority, config.thread_nice, config.thread_ioprio),
        )
        log_untried_torch()
        with contextlib.ExitStack() as undo, self._portal.opening():
            storage = storage or AnyStorage(self._portal.executor, config.direct_io, self._given)
            self._ctx = self._make_context(
                path, config, owner, coordinator, storage, mount, mirror, is_solo_by_default=is_solo_by_default
            )
            if isinstance(path, RemotePath):
                store_of(self._ctx.storage, path)  # raises ConfigError now, if it cannot be opened
            self._make_parts()
            if self._mirror_queue is not None:
                self._mirror_queue.start()
                undo.callback(self._mirror_queue.close)
            self._rescue.announce(self._portal)
            self._portal.at_exit(functools.partial(_drain, self._throttle, self._shutdown))
            self._state_saves.meet()
            undo.pop_all()
        # No part refers to the engine: once nobody else does, it is gone at once.
        held = path, self._portal, self._root_session, self._throttle, self._shutdown
        dropped = weakref.finalize(self, _forsake, *held)
        dropped.atexit = False

    def _make_context(
        self,
        root: Path,
        config: EngineConfig,
        owner: Owner,
        coordinator: Coordinator,
        storage: Storage,
        mount: Mount,
        mirror: Path | None,
        *,
        is_solo_by_default: bool,
    ) -> EngineContext:
        rules = {
            "when_busy": repr(config.when_busy),
            "step_dir": repr(config.step_dir),
            # Hosts may mount a directory at different places.
            "mirror": str(mirror) if mirror is None or isinstance(mirror, RemotePath) else "a directory",
        }
        members = Membership(
            coordinator,
            owner,
            stall_secs=config.stall_timeout_secs,
            rules=rules,
            differing=config.differing_replicas,
            is_solo_by_default=is_solo_by_default,
        )
        return EngineContext(
            root=root,
            names=StepNames(config.step_dir),
            owner=owner,
            storage=storage,
            mount=mount,
            members=members,
            executor=self._portal.executor,
            config=config,
            rank=coordinator.rank,
            world_size=coordinator.world_size,
            mirror=mirror,
        )

    def _make_parts(self) -> None:
        """Make the parts of the engine. Each part uses only the parts made before it."""
        ctx, portal = self._ctx, self._portal
        self._preemption = preemption = AgreedPreemption(ctx.members, portal)
        self._timers = 0
        self._agreements = 0
        self._agreed = agreed_works = list[AgreedWork]()
        self._throttle = WriteThrottle(ctx.config.max_write_bytes_per_sec, is_urgent=lambda: preemption.is_on)
        self._quarantine = Quarantine()
        self._trash = Trash(ctx.storage)
        self._rescue = Rescue(ctx.storage, ctx.executor, ctx.root, ctx.names, ctx.owner, ctx.config)
        earlier_run = EarlierRun(ctx)
        self._loader = Loader(ctx=ctx, quarantine=self._quarantine, earlier_run=earlier_run)
        steps = KnownSteps(self._quarantine, counts_calls=ctx.world_size > 1, mirror=ctx.mirror)
        claim = Claim(ctx.storage, ctx.root, ctx.owner, stale_after_secs=ctx.config.stale_after_secs)
        self._mirror_queue = mirror_queue = self._make_mirror_queue(lambda: queue.pending_count > 0)
        self._root_session = root_session = RootSession(
            ctx,
            portal,
            claim=claim,
            quarantine=self._quarantine,
            known_steps=steps,
            trash=self._trash,
            rescue=self._rescue,
            must_wait=lambda: preemption.is_on or not (mirror_queue is None or mirror_queue.is_ready),
            held=(lambda: ()) if mirror_queue is None else mirror_queue.held_steps,
            newest_copy=lambda: None if mirror_queue is None else mirror_queue.newest,
        )
        stages, renames = CommonStages(ctx=ctx, throttle=self._throttle), self._quarantine.renames
        self._call_lock = call_lock = CallLock(portal)
        self._resources = resources = CaptureResources(ctx, self._throttle, self._rescue.shared_memory)
        newest_frozen = NewestFrozenFile(leaves=resources.frozen, relink_limit=ctx.config.relink_limit)
        trusted = TrustedLeaves(ctx=ctx, portal=portal, resources=resources, newest_frozen=newest_frozen)
        pipeline = StatePipeline(
            ctx=ctx,
            stages=stages,
            root_session=self._root_session,
            claim=claim,
            renames=renames,
            trash=self._trash,
            newest_frozen=newest_frozen,
            rescue=self._rescue,
        )
        self._recorder = OutcomeRecorder(ctx, resources)
        removals = RemovePipeline(ctx=ctx, claim=claim, renames=renames, trash=self._trash)
        self._queue = queue = JobQueue(ctx, portal, steps, removals, self._recorder, self._root_session, mirror_queue)
        capturer = JobCapturer(ctx=ctx, portal=portal, queue=queue, resources=resources)
        self._state_saves = StateSaves(
            call_lock=call_lock,
            ctx=ctx,
            portal=portal,
            resources=resources,
            trusted=trusted if ctx.config.frozen == "trusted" else None,
            root_session=self._root_session,
            queue=queue,
            agreement=Agreement(ctx=ctx, portal=portal, queue=queue, cache=resources.cache, trash=self._trash),
            capturer=capturer,
            pipeline=pipeline,
            statistics=self._recorder.statistics,
            earlier_run=earlier_run,
            is_urgent=self._preemption.poll,
        )
        self._file_saves = FileSaves(
            ctx, call_lock, queue, capturer, FilePipeline(ctx=ctx, stages=stages, trash=self._trash)
        )
        self._agreed_changes = AgreedChanges(
            call_lock=call_lock,
            ctx=ctx,
            portal=portal,
            root_session=self._root_session,
            queue=queue,
            earlier_run=earlier_run,
            rescue=self._rescue,
            mirror_queue=mirror_queue,
        )
        self._shutdown = Shutdown(
            self._queue,
            background=lambda: [
                *root_session.last_passes(),
                *(agreed.ended for agreed in agreed_works),
                *([] if mirror_queue is None else mirror_queue.finish()),
            ],
            agreements=lambda: [agreed.name for agreed in agreed_works if not agreed.ended.done()],
            copying=lambda: "" if mirror_queue is None else mirror_queue.activity,
            release=functools.partial(_release, ctx, portal, root_session, resources, mirror_queue),
            restore=preemption.local.restore,
            drain_secs=ctx.config.drain_timeout_secs,
        )

    def _make_mirror_queue(self, is_saving: Callable[[], bool]) -> MirrorQueue | None:
        """Return what copies steps to the mirror: on the leader, if there is a mirror."""
        ctx, rule = self._ctx, self._ctx.config.mirror
        if rule is None or ctx.mirror is None or not ctx.members.is_leader:
            return None
        return MirrorQueue(ctx.root, ctx.mirror, rule, ctx.config, self._given, is_saving=is_saving)

    @property
    def root(self) -> Path:
        """Directory of the checkpoints."""
        return self._ctx.root

    @property
    def config(self) -> EngineConfig:
        """Settings that the engine was opened with."""
        return self._ctx.config

    # -- saving ---------------------------------------------------------------------------------------

    def save(
        self,
        state: State,
        step: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        deadline_secs: float | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        extra: dict[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> SaveTicket:
        """Capture ``state`` now and save it in the background.

        When this returns, the caller may change ``state``. ``await`` the ticket, or call its ``result()``, for a
        durable, visible checkpoint. A state larger than ``budget_bytes`` is captured and written in waves: this returns
        when the last is captured.

        Args:
            state: a dict or a Stateful object. A dict may hold tensors, arrays, plain Python values, Stateful objects,
                and dicts, lists and tuples of these.
            step: whole number, numpy's too; must exceed every committed and pending step; default one more than the
                newest.
            path: directory to save at, in the place of a step. A checkpoint there is replaced, in place. It must
                be on the file system of the root, and its parents are made. A relative path counts from the working
                directory at the call. Retention, ``steps()`` and ``rollback`` do not know such a checkpoint.
            overwrite: replace the committed checkpoint of the same step, in place. With ``path``, it changes nothing.
            deadline_secs: fail this save if it is not committed this many seconds after the call; nothing becomes
                visible then. A last rename and fsync that have begun are completed.
            metrics: numbers to keep with the step, by name, as for ``EngineConfig.keep_best``. One that is not finite
                is stored as such and is never the best.
            extra: JSON values to keep with the step, by name: loss, epoch, commit of the code. A dict of str, int,
                finite float, bool, None, lists and dicts, at most 64 KiB as JSON, copied now. Reports of saves and
                loads hold it. If there are several ranks, the value of rank 0 counts, and others may pass None.
            files: small files to put beside the data, by name, for other programs: durable and visible with it, copied
                now. Nothing of aio_ckpt reads or verifies them. If there are several ranks, those of rank 0 count.

        Raises:
            StepOrderError, EmptyStateError, ConfigError: bad input; nothing was touched.
            UnsupportedLeafError, UnsafeObjectError, SourceChangedError: a bad leaf; nothing was touched.
            BudgetExceededError: the system refuses the staging memory.
            BusyError: ``when_busy="raise"`` and ``max_in_flight`` saves are pending.
            RootError: the root is not writable, or another writer holds it. The ticket raises it if a later save finds
                that the lock was lost.
            StallError: ``deadline_secs`` passed before everything was captured, or the disk stalled meanwhile.
            WriteError: the disk failed before everything was captured.
            DuplicateNameError: ranks hold different parameters, or states of optimizers, under one name. The ticket
                raises it if this shows in a later save.
            PeerFailedError: another rank failed, and all ranks had to agree before the capture.
            Exception: an earlier save failed and nobody awaited it; raised once. The save of this call was made all
                the same: ``error.ticket`` is its ticket.
        """
        call = SaveCall.of(
            step,
            path=path,
            overwrite=overwrite,
            deadline_secs=deadline_secs,
            metrics=metrics,
            extra=extra,
            files=files,
        )
        return self._state_saves.save(state, call)

    def remove(self, path: str | os.PathLike[str]) -> Milestone[None]:
        """Remove the checkpoint at ``path`` in the background, after the commits of all saves called before.

        Saves that are called later are committed after the removal, also at the same path. The directory is renamed to
        trash first, so that the checkpoint is whole or gone at any instant. ``await`` the returned milestone, or call
        its ``result()``, until its files are deleted. A failure is logged too.

        If the last save before this call fails, or one that is pending now, nothing is removed: the checkpoint may be
        the only good one. The milestone then raises the error of that save. A failure that was awaited before this call
        does not count.

        If there are several ranks, every rank calls this, as it calls ``save()``. The leader removes.

        Args:
            path: the directory of a checkpoint, on the file system of the root. For a step, use ``delete(step)``.

        Raises:
            ConfigError: a path that :meth:`save` would refuse; nothing was touched.
            RootError: the root is not writable, or another writer holds it.
            PeerFailedError, StallError: as :meth:`load`.
            CheckpointNotFoundError: by the milestone: there is no checkpoint at ``path``, so that nothing is removed.
            WriteError: by the milestone: the disk failed. The checkpoint is whole, or gone.
        """
        return self._agreed_changes.remove(path)

    def save_file(
        self,
        obj: Any,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, str] | None = None,
        max_shard_bytes: int | None = None,
        dtype: torch.dtype | None = None,
        rename: FileRename | None = None,
    ) -> SaveTicket:
        """Capture ``obj`` now and write it to a file in the background. The suffix of ``path`` tells the format.

        ``.safetensors``: the file that ``safetensors.torch.save_file`` would write. ``obj`` is a dict of tensors, such
        as a ``state_dict()``. Of several names of one tensor, the first is stored, and the metadata holds the others.

        Any other suffix: the file that ``torch.save(obj, path)`` would write, with its checksums. ``torch.load`` opens
        it, also with ``weights_only=True`` and ``mmap=True``. Tensors that share memory share it in the file.

        The file is durable before it takes the place of an older one in one rename. Files commit in the order of the
        calls. They belong to no step, and no other rank takes part. Objects that are no tensors are pickled now. If
        ``max_in_flight`` files are pending, this waits for the oldest.

        Args:
            obj: any object that ``torch.save`` takes; for safetensors, a dict of plain tensors by name.
            path: place of the file. Missing directories are made. If it is a link, the file that it names is replaced.
            metadata: texts for the metadata of the file. This and the options below are for safetensors alone.
            max_shard_bytes: most bytes of tensors in one file. If there are more, ``model-00001-of-00002.safetensors``
                and so on are written in the place of ``model.safetensors``, with ``model.safetensors.index.json``.
                If an older index names files so, the new ones are ``model-alternate-00001-of-00002.safetensors``.
            dtype: dtype to which floating-point tensors are cast, one file at a time.
            rename: the name in the file of each tensor: a mapping, which leaves other names as they are, or a function.

        Raises:
            ConfigError: a bad argument; nothing was touched.
            UnsupportedLeafError: tensors that the format cannot hold: those of two dtypes over the same bytes, or, for
                safetensors, of another type or dtype, or that share a part of their memory.
            SourceChangedError: the memory of a tensor was freed.
            BudgetExceededError: the system refuses the staging memory.
            WriteError, StallError: the disk failed or stalled before everything was captured.
            Exception: any error of pickle. Or the failure of an earlier file that nobody awaited, raised once; the file
                of this call is saved all the same: ``error.ticket`` is its ticket.
        """
        options = SafetensorsOptions(metadata=metadata, max_shard_bytes=max_shard_bytes, dtype=dtype, rename=rename)
        return self._file_saves.save_file(obj, path, options)

    def prepare(self, state: State, step: int | None = None) -> Milestone[None]:
        """Do the slow parts of a first save ahead: take the root's lock, plan, map and register staging memory.

        So mistakes show before training begins. A warning names the leaves that only running code can read back. What
        differs between ranks shows at the first save, as this compares no ranks.

        This thread walks the state now; no value of it is captured or kept. Memory is mapped in the background. A later
        save of the same names, types and shapes is a plan hit, and waits until the memory is mapped. ``await`` the
        returned milestone, or call its ``result()``, to wait for the memory. It waits for no save.

        If there are several ranks, they agree in the first save which rank writes what. Until then, this maps no memory
        and no save is a plan hit. The rest is done ahead.

        Args:
            state: a state like those to be saved.
            step: the step that the first save will have. It is checked as ``save()`` would check it, before anything
                is touched. If there are several ranks, this waits until all have opened their engines.

        Raises:
            StepOrderError: ``step`` does not exceed every committed and pending step.
            UnsupportedLeafError, UnsafeObjectError: leaves that cannot be stored. The message names all of them.
            Exception: any other error that :meth:`save` would raise for this state or root. The milestone, and again
                the save, raises BudgetExceededError if the system refuses the memory.
        """
        return self._state_saves.prepare(state, step)

    def guard(self, guarded: OptimizerLike) -> None:
        """Let the device compute while the tensors of an optimizer are copied: its ``step()`` waits for the copies.

        The guard covers parameters and state on devices. Only ``step()`` may change them.

        Args:
            guarded: the optimizer. To guard it again does nothing.

        Raises:
            ConfigError: ``guarded`` has no ``step()`` or ``param_groups``. So does a step inside a CUDA graph.
        """
        self._resources.guards.add(guarded)

    def clear_cache(self) -> None:
        """Forget the cached plan and free its gather buffers: the next save plans anew."""
        self._state_saves.clear_cache()

    def stats(self) -> EngineStats:
        """Return what the engine has done so far, and what it holds now, on this rank.

        This never waits. Any thread and any signal handler may call it, also once the engine is closed.
        """
        resources, counters, newest = self._resources, self._recorder.statistics.counters, self._queue.steps.newest(())
        return EngineStats(
            rank=self._ctx.rank,
            committed=counters.committed,
            failed=counters.failed,
            skipped=counters.skipped,
            pending=self._queue.pending_count,
            committed_bytes=counters.committed_bytes,
            blocked_secs=counters.blocked_secs,
            stage_secs=counters.stage_secs,
            newest_step=newest,
            newest_age_secs=counters.age_secs(newest),
            memory_bytes=resources.lifetime.arena_bytes,
            plan_hits=resources.cache.hits,
            plan_misses=resources.cache.misses,
            mirrored_step=None if self._mirror_queue is None else self._mirror_queue.newest,
        )

    @property
    def plan_hits(self) -> int:
        """Saves, and calls of :meth:`prepare`, that reused the cached layout."""
        return self._resources.cache.hits

    @property
    def plan_misses(self) -> int:
        """Saves, and calls of :meth:`prepare`, that planned anew."""
        return self._resources.cache.misses

    @property
    def lifetime(self) -> LifetimeStats:
        """Arenas and leases held now."""
        return self._resources.lifetime.stats

    @property
    def undeleted_steps(self) -> Mapping[int, str]:
        """Expired steps that could not be deleted after the last commit, with the reason.

        The next commit tries again.
        """
        return self._root_session.undeleted

    # -- ending ---------------------------------------------------------------------------------------

    def on_preemption(self, signals: Iterable[int] = PREEMPTION_SIGNALS) -> None:
        """Set :attr:`preempted` when one of ``signals`` comes, until the engine is closed.

        The process goes on: the training loop polls ``preempted``, saves and ends. A previous handler that is a Python
        function is called too, after the flag is set. The default action of the system, which ends the process, no
        longer happens. The previous handlers are restored when the engine is closed, and in a forked child.

        Args:
            signals: numbers of the signals, as the module ``signal`` names them.

        Raises:
            WrongThreadError: the caller is not the main thread.
            ConfigError: a signal cannot be handled.
            EngineClosedError: the engine was closed.
        """
        if self._portal.is_closed:
            raise EngineClosedError
        self._preemption.local.install(signals)
        self._preemption.watch()

    @property
    def preempted(self) -> bool:
        """Whether a signal of :meth:`on_preemption` came. Once True, it stays True.

        From then on, retention deletes nothing in this run, and ``save()`` waits for room even if ``when_busy`` says to
        skip or raise. If there are several ranks, a signal to one rank turns this True on all ranks at the same poll.
        Reading this is a poll, and so is a ``save()``: every rank has to poll as often as the others.
        """
        return self._preemption.poll()

    def _make_timer(self, secs: float) -> AgreedTimer:
        """Return a timer that ends at the same poll on every rank, if every rank makes its timers in the same order."""
        self._timers += 1
        name = f"the save timer {self._timers}"
        return AgreedTimer(self._ctx.members, self._portal, secs, name=name, now=time.monotonic)

    def agree(
        self,
        works: Sequence[Work],
        *,
        on_leader: Callable[[Executor, Storage, Failure | None], Awaitable[None]],
        what: str,
    ) -> AgreedWork:
        """Let all ranks agree how their work ends, for an adapter. Every rank calls this in the same order.

        ``close()`` waits for the agreement.

        Args:
            works: work of this rank that has begun.
            on_leader: gets the threads for I/O, the storage, and the first failure, see :class:`AgreedWork`.
            what: name of the work in messages.
        """
        self._agreements += 1
        agreed = AgreedWork(
            self._ctx.members,
            self._portal,
            works,
            name=f"agreement {self._agreements} on {what}",
            on_leader=functools.partial(on_leader, self._ctx.executor, self._ctx.storage),
        )
        self._agreed[:] = [*(earlier for earlier in self._agreed if not earlier.ended.done()), agreed]
        return agreed

    def terminate(self) -> None:
        """Cancel pending saves and release all resources. No cancelled save becomes visible.

        A save that does not end within ``stall_timeout_secs`` is logged and left behind.
        """
        self._shutdown.abandon(self.config.stall_timeout_secs)

    def _wait_ready(self) -> None:
        """Block until ``save()`` would not have to wait for an earlier save.

        If an earlier save fails meanwhile, this does not raise: the next ``save()`` or ``close()`` does.
        """
        self._check_thread("ready()")
        queue = self._queue
        warning = queue.wait_warning("ready")
        while (finished := queue.finished_before_room) is not None:
            warning.wait_for([finished])

    def _before_load(self, kind: str, step: object, path: object) -> Callable[[], Awaitable[None]]:
        """Return what a load or read awaits first: the pending calls that change what it finds. ``kind`` names it.

        Raises:
            WrongThreadError: the call stands inside a save of the same thread, which may be one of these.
        """
        calls = self._queue.calls_before_load(step, path)
        if calls:
            self._call_lock.check(f"{kind}()")
        return functools.partial(self._queue.await_calls, kind, path, calls)

    def _beside(self, name: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> PendingCall[T]:
        """Run ``call``, which blocks, in a thread of its own. ``name`` is used in messages."""
        self._check_thread(name)
        work = start_beside(call, *args, **kwargs)
        return PendingCall(name, self._check_thread, work)

    def _check_thread(self, what: str) -> None:
        """Do :meth:`Portal.check_thread`. A pending call refers to the engine by this, so that it stays open."""
        self._portal.check_thread(what)

    def _close_blocking(self) -> None:
        """Finish pending saves, then release all resources. A second call does nothing.

        If Ctrl-C ends the wait, nothing is released: pending saves go on, and a later call, or the interpreter's exit,
        finishes them.

        Raises:
            Exception: the failure of a save that nobody awaited, once, after all resources were released. With
                ``on_failure="log"``, failures are only logged.
        """
        self._shutdown.finish_blocking()


class CheckpointEngine(BaseEngine):
    """Saves and loads the checkpoints of one root. Usable from any thread and any event loop.

    Every call that reads or changes the root is awaited, or its ``result()`` is called in a thread without a loop.
    ``save``, ``save_file``, ``remove`` and ``prepare`` take their place in the order of the calls at once. So they wait
    for a disk that does not answer, ``stall_timeout_secs`` at most for each answer.

    The engine owns one event loop on one thread of its own; saves run there, in the order of the calls, while
    the caller goes on. Invariant: a save is pending from ``save()`` until its ticket is finished. At most
    ``max_in_flight`` saves are pending, and the step of a new save exceeds every committed and pending one. Any call
    may raise EngineClosedError once the engine is closed, and WrongThreadError on the engine's own threads.

    Args:
        root: directory of the checkpoints, or its ``file:`` URL; the first save makes it if it is missing. Or a place
            in an object store: its URL (``s3://``, ``gs://``, ``az://``; needs ``aio-ckpt[remote]``), or a store object
            of obstore, such as ``S3Store("bucket", prefix="run")``.
        config: settings; the defaults suit a trainer on a local disk.
        coordinator: the ranks that save together; all of torch.distributed's default group if it is initialised. Give
            ``SoloCoordinator()`` for an engine of this process alone.
        storage: file system of the checkpoints; by default the local one.

    Raises:
        RootError: ``root`` is a file, a URL of another kind, or cannot be made.
        ConfigError: a setting does not suit this machine or this number of ranks, or an argument has a wrong type.
            Later, by a call that saves or loads: the engine was opened before the process group of its ranks.
        SystemLimitError: the system gives no thread, or no open file. The engine keeps none.
    """

    async def ready(self) -> None:
        """Wait until ``save()`` would not have to wait for an earlier save.

        If an earlier save fails meanwhile, this does not raise: the next ``save()`` or ``close()`` does.
        """
        queue = self._queue
        with queue.wait_warning("ready").on_loop():
            while (finished := queue.finished_before_room) is not None:
                await asyncio.wrap_future(follow(finished))

    def load(
        self,
        state: State,
        step: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        strict: bool = False,
        allow_missing: bool = False,
        fallback: bool = True,
        skip_untrusted: bool = False,
        skip_mismatched: bool = False,
        cast: bool = False,
        rename: Rename | None = None,
        progress: OnProgress | None = None,
    ) -> PendingCall[LoadReport]:
        """Fill ``state`` in place from a checkpoint. A cancelled load returns once no thread fills ``state`` any more.

        Tensors are filled as they are read, once the templates of all ranks match: after an error with
        ``target_modified`` they may hold anything. Objects and Stateful values are set once everything was verified.

        Pending saves of this engine that may be loaded end first: those of ``step`` or ``path``, or of all steps. If
        one fails, this goes on with what is committed, and the next ``save()`` or ``close()`` raises the failure.

        Args:
            state: the template, with the names, shapes and dtypes of the saved state.
            step: step of the checkpoint; None takes the newest that verifies.
            path: the directory of a checkpoint, which may lie anywhere, in the place of a step; or its URL in an object
                store (``s3://``, ``gs://``, ``az://``; needs ``aio-ckpt[remote]``).
            strict: refuse names of the checkpoint that the template lacks.
            allow_missing: leave template names that the checkpoint lacks as they are, also keys of modules and other
                Stateful values: these get them from their own ``state_dict()``.
            fallback: with ``step=None``, pass damaged ones by (:mod:`aio_ckpt.commit.quarantine`);
                False raises at the newest.
            skip_untrusted: leave objects that only running code reads as they are, and list them in the report.
            skip_mismatched: leave tensors of another shape as they are, and list them in the report. Those of modules
                and of optimizers that hold state count, too.
            cast: convert tensors of another dtype to that of the template, as far as ``torch.can_cast`` allows.
                Values beyond the range of the template's dtype are not kept; a warning names such tensors.
            rename: what the template calls a stored leaf: a mapping from stored names of leaves or branches, or a
                function from the stored name of each leaf. A renamed leaf takes the place of one of that name. None in
                the place of a name leaves the leaf or branch out.
            progress: function that gets a :class:`Progress` of this rank: at each change of the stage, and at most ten
                times a second between. It runs on a thread of the engine, one call at a time, and calls no engine. The
                load waits for it. If it raises, that is logged once, it is not called again, and the load goes on. In
                the last call the stage is ``done``, with all bytes, or ``failed``. If a damaged checkpoint is read
                again or passed by, the bytes begin anew.

        Raises:
            CheckpointNotFoundError: no committed checkpoint, or not this step.
            CorruptCheckpointError: the checkpoint does not verify; with ``step=None``, none does, and none is moved.
            MissingNameError, UnexpectedNameError, TemplateMismatchError: the template does not match.
            ConfigError, StepOrderError: a bad argument; nothing was touched.
            UnsafeObjectError: only running code reads an object; see ``trusted_objects`` and ``skip_untrusted``.
            UnsupportedLeafError: a leaf of the template that cannot be filled.
            FormatVersionError: a newer version wrote the checkpoint.
            ReadError: the operating system could not read the checkpoint.
            PeerFailedError, StallError: another rank failed, or gave no heartbeat.
            Exception: any error of a ``load_state_dict``. All tensors are filled by then; ``target_modified`` is False
                if there was nothing to fill.
        """
        given_up: Future[None] = new_future()
        options = LoadOptions(
            step=step,
            path=path,
            fallback=fallback,
            strict=strict,
            allow_missing=allow_missing,
            skip_untrusted=skip_untrusted,
            skip_mismatched=skip_mismatched,
            cast=cast,
            rename=rename,
            progress=progress,
        )
        self._check_thread("load()")
        self._ctx.members.check_group()
        before = self._before_load("load", step, path)
        loading = self._portal.submit(self._loader.load, state, options, given_up, before)
        return PendingLoad(self._check_thread, loading, given_up)

    def read(
        self,
        step: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        only: Collection[str] | None = None,
        skip_untrusted: bool = False,
        with_report: bool = False,
        progress: OnProgress | None = None,
    ) -> PendingCall[Any]:
        """Return the nested state of a checkpoint, without a template.

        If as many ranks read as saved, each gets the state that the same rank saved. Otherwise it gets the names of all
        ranks, and of ``PerRank`` values its own. Pending saves of this engine that may be read end first.

        Args:
            step: step of the checkpoint; None takes the newest that verifies.
            path: the directory of a checkpoint, which may lie anywhere, in the place of a step.
            only: names of leaves, or of branches above them.
            skip_untrusted: put an :class:`UntrustedObject` in the place of objects that only running code reads.
            with_report: return a tuple of the state and a :class:`ReadReport`.
            progress: function that gets a :class:`Progress`, as for :meth:`load`; there is no stage ``apply``.

        Raises:
            MissingNameError: a name of ``only`` selects no leaf of this rank; tells which rank has it.
            CheckpointNotFoundError, CorruptCheckpointError and others: as :meth:`load`.
        """
        self._check_thread("read()")
        self._ctx.members.check_group()
        check_flag("skip_untrusted", skip_untrusted)
        check_flag("with_report", with_report)
        check_callback("progress", progress)
        wanted = wanted_checkpoint(step, path)
        names, before = selection(only), self._before_load("read", step, path)
        read = functools.partial(self._loader.read, wanted, names, skip_untrusted, with_report, progress, before=before)
        work = self._portal.submit(read)
        return PendingCall("read()", self._check_thread, work)

    # -- steps --------------------------------------------------------------------------------------

    def steps(self) -> PendingCall[list[int]]:
        """Return the committed steps, ascending, without those that a load of this engine proved damaged.

        Raises:
            StallError: the disk does not answer within ``stall_timeout_secs``.
            ReadError: the root cannot be read.
        """
        return self._beside("steps()", self._root_session.steps)

    def latest_step(self) -> PendingCall[int | None]:
        """Return the newest committed step, that of the mirror too, or None.

        Raises:
            StallError, ReadError: as :meth:`steps`.
        """
        return self._beside("latest_step()", self._root_session.latest_step)

    def rollback(self, step: int) -> PendingCall[list[int]]:
        """Make ``step`` the newest; return the later steps, which move below ``.aio_ckpt/abandoned/`` for good.

        If there are several ranks, every rank calls this, as it calls ``save()``.

        Args:
            step: step of the checkpoint.

        Raises:
            CheckpointNotFoundError: ``step`` is not committed.
            BusyError: saves are pending: await their tickets first.
            RootError: the root is not writable, or another writer holds it.
            WriteError: the disk failed.
            PeerFailedError, StallError: as :meth:`load`.
        """
        self._call_lock.check("rollback()")
        return self._beside("rollback()", self._agreed_changes.rollback, step)

    def protect(self, step: int) -> PendingCall[None]:
        """Never delete ``step``. The protection is durable. Any process may set it, also beside a writer.

        Args:
            step: step of the checkpoint.

        Raises:
            CheckpointNotFoundError: ``step`` is not committed (any more).
            StepOrderError: ``step`` is no valid step.
            WriteError, StallError: the disk failed, or does not answer.
        """
        return self._beside("protect()", self._root_session.protect, step)

    def unprotect(self, step: int) -> PendingCall[None]:
        """Let ``step`` expire again, from the next commit on. Does nothing if the step is not protected.

        Args:
            step: step of the checkpoint.

        Raises:
            StepOrderError, WriteError, StallError: as :meth:`protect`.
        """
        return self._beside("unprotect()", self._root_session.unprotect, step)

    def protected_steps(self) -> PendingCall[list[int]]:
        """Return the protected steps, ascending.

        Raises:
            StallError, ReadError: as :meth:`steps`.
        """
        return self._beside("protected_steps()", self._root_session.protected_steps)

    def delete(self, step: int, *, allow_newest: bool = False) -> PendingCall[None]:
        """Delete a committed step. When this returns, its files are deleted, and a power loss does not bring it back.

        The step is renamed to trash first, so that it is whole or gone at any instant. A load of the newest step that
        reads it meanwhile takes another one; a load of this step is told that it is gone. ``protect()`` a step that
        must stay. If the await is cancelled, the deletion goes on.

        If there are several ranks, every rank calls this, as it calls ``save()``. The leader deletes.

        Args:
            step: step of the checkpoint.
            allow_newest: delete ``step`` even if it is the newest. A later ``save()`` may have its number again.

        Raises:
            CheckpointNotFoundError: ``step`` is not committed.
            ProtectedStepError: ``step`` is protected: ``unprotect()`` it first.
            StepOrderError: ``step`` is the newest committed step, or no valid step.
            BusyError: saves are pending: await their tickets first.
            ConfigError: a bad argument; nothing was touched.
            RootError: the root is not writable, or another writer holds it.
            WriteError: the disk failed. The step is whole, or gone; what is left of it is deleted later.
            PeerFailedError, StallError: as :meth:`load`.
        """
        self._call_lock.check("delete()")
        return self._beside("delete()", self._agreed_changes.delete, step, allow_newest=allow_newest)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        await self._shutdown.leave(error)
        return False

    async def close(self) -> None:
        """Finish pending saves, then release all resources. A second call does nothing.

        ``async with`` does this at the end of its block, even if the task is cancelled. If the wait is cancelled here,
        nothing is released: pending saves go on, and a later call, or the interpreter's exit, finishes them.

        Raises:
            Exception: the failure of a save that nobody awaited, once, after all resources were released. With
                ``on_failure="log"``, failures are only logged.
        """
        await self._shutdown.finish()

    # For a caller without a loop.
    wait_ready = BaseEngine._wait_ready
    """:meth:`ready` that blocks."""

    close_blocking = BaseEngine._close_blocking
    """:meth:`close` that blocks."""


def _drain(throttle: WriteThrottle, shutdown: Shutdown) -> None:
    """At interpreter exit, when training has ended: finish pending saves, for a limited time."""
    throttle.lift()
    shutdown.drain()


def _forsake(
    root: Path, portal: Portal, root_session: RootSession, throttle: WriteThrottle, shutdown: Shutdown
) -> None:
    """Close an engine that nobody refers to any more, unless it is closed.

    The garbage collector calls this on any thread, which may hold any lock. So this logs nothing and starts no thread.
    An engine that has not written to its root closes without a word.
    """
    if portal.is_of_this_process and not portal.is_closed:
        root_session.forsake()
        if root_session.is_writer:
            portal.post(_log_forsaken, root)
        portal.post(_close_forsaken, root_session, throttle, shutdown)


def _log_forsaken(root: Path) -> None:
    _log.warning(
        "%s: an engine was dropped without close(), and closes once its saves have ended: call close(), or use 'with'",
        root,
    )


def _close_forsaken(root_session: RootSession, throttle: WriteThrottle, shutdown: Shutdown) -> None:
    """Close an engine, from its loop. If the system refuses a thread for that, try again."""
    try:
        finished = start_beside(shutdown.finish_forsaken, root_session.give_way)
        await_at_exit(finished, throttle.lift, shutdown.drain_secs)
    except SystemLimitError:
        asyncio.get_running_loop().call_later(_AGAIN_SECS, _close_forsaken, root_session, throttle, shutdown)


def _release(
    ctx: EngineContext,
    portal: Portal,
    root_session: RootSession,
    resources: CaptureResources,
    mirror_queue: MirrorQueue | None,
) -> None:
    """Release all that an engine holds. Idempotent."""
    coordinator = ctx.members.coordinator
    with contextlib.ExitStack() as steps:  # from the last to the first; each step runs whatever the others raise
        steps.callback(root_session.release)
        steps.callback(resources.lifetime.close)
        steps.callback(coordinator.close)
        steps.callback(portal.close, STOP_SECS)
        steps.enter_context(contextlib.suppress(EngineClosedError, StallError))
        steps.callback(lambda: portal.call(coordinator.leave, timeout=STOP_SECS))
        steps.callback(root_session.release_claim)
        steps.callback(resources.release_devices)
        if mirror_queue is not None:
            steps.callback(mirror_queue.close)
