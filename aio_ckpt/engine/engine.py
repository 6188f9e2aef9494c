"""The engine: the state machine that wires capture, pipeline and restore, and the async face."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import uuid
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from aio_ckpt._torch import log_untried_torch
from aio_ckpt.checks import check_flag, check_kind
from aio_ckpt.commit import step_numbers
from aio_ckpt.commit.cleanup import PendingCleanup
from aio_ckpt.commit.owner import Owner
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.load import Loader, selection, wanted_checkpoint
from aio_ckpt.engine.pipeline import SavePipeline
from aio_ckpt.engine.root import RootSession, make_root
from aio_ckpt.engine.save_call import SaveFrontend
from aio_ckpt.engine.shutdown import Shutdown
from aio_ckpt.engine.stages import SaveCall
from aio_ckpt.errors import EngineClosedError, StallError
from aio_ckpt.format.names import StepNames
from aio_ckpt.memory.kind import check_staging
from aio_ckpt.memory.lifetime import LifetimeStats
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.ranks.preemption import AgreedPreemption
from aio_ckpt.ranks.store_coordinator import Coordinator, default_coordinator
from aio_ckpt.read.rename import Rename
from aio_ckpt.reports import LoadReport
from aio_ckpt.rescue import open_rescue
from aio_ckpt.runtime.futures import follow, outcome
from aio_ckpt.runtime.portal import HOUSEKEEPING_THREADS, STOP_SECS, Portal
from aio_ckpt.runtime.priority import lower_priority
from aio_ckpt.storage.local import LocalStorage, Storage
from aio_ckpt.ticket import Milestone, SaveTicket
from aio_ckpt.write.throttle import WriteThrottle

__all__ = ["BaseEngine", "CheckpointEngine"]


class BaseEngine:
    """Parts of an engine, and the calls that its async and its sync face have in common."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        coordinator: Coordinator | None = None,
        storage: Storage | None = None,
    ) -> None:
        check_kind("config", config, EngineConfig)
        check_kind("coordinator", coordinator, Coordinator)
        check_kind("storage", storage, Storage)
        config = config or EngineConfig()
        coordinator = coordinator or default_coordinator()
        check_staging(config.staging, config.shm_path, coordinator.world_size)
        path = make_root(root)
        owner = Owner.of_this_process(session := uuid.uuid4().hex[:12])
        self._portal = Portal(
            f"aio_ckpt-{session}",
            config.workers + HOUSEKEEPING_THREADS,
            functools.partial(lower_priority, config.thread_nice, config.thread_ioprio),
        )
        log_untried_torch()
        with self._portal.opening():
            self._ctx = self._make_context(path, config, owner, coordinator, storage)
            self._make_parts()
            self._rescue.announce(self._portal)
            self._portal.at_exit(self._drain)
            self._frontend.meet()

    def _make_context(
        self, root: Path, config: EngineConfig, owner: Owner, coordinator: Coordinator, storage: Storage | None
    ) -> EngineContext:
        rules = {"when_busy": repr(config.when_busy), "step_dir": repr(config.step_dir)}
        executor = self._portal.executor
        return EngineContext(
            root=root,
            names=StepNames(config.step_dir),
            owner=owner,
            storage=storage or LocalStorage(executor, config.direct_io),
            members=Membership(coordinator, owner, stall_secs=config.stall_timeout_secs, rules=rules),
            executor=executor,
            config=config,
        )

    def _make_parts(self) -> None:
        """Make the parts of the engine, each from those above it."""
        ctx, portal = self._ctx, self._portal
        self._preemption = AgreedPreemption(ctx.members, portal)
        self._throttle = WriteThrottle(ctx.config.max_write_bytes_per_sec, is_urgent=lambda: self._preemption.is_on)
        self._quarantine = Quarantine()
        self._pending_cleanup = PendingCleanup()
        self._rescue = open_rescue(ctx.storage, ctx.executor, ctx.root, ctx.names, ctx.owner, ctx.config)
        self._loader = Loader(ctx=ctx, quarantine=self._quarantine)
        self._root_session = RootSession(
            ctx,
            portal,
            quarantine=self._quarantine,
            pending_cleanup=self._pending_cleanup,
            rescue=self._rescue,
            must_wait=lambda: self._preemption.is_on,
        )
        pipeline = SavePipeline(
            ctx=ctx,
            throttle=self._throttle,
            quarantine=self._quarantine,
            pending_cleanup=self._pending_cleanup,
            rescue=self._rescue,
        )
        self._frontend = SaveFrontend(
            ctx,
            portal,
            self._root_session,
            pipeline,
            rescue=self._rescue,
            is_urgent=self._preemption.poll,
            on_committed=self._expire,
        )
        self._shutdown = Shutdown(
            self._frontend.in_flight,
            background=lambda: [*self._root_session.last_passes(), *self._frontend.dropping],
            release=self._shut_down,
        )

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
        state: object,
        step: int | None = None,
        *,
        overwrite: bool = False,
        deadline_secs: float | None = None,
        metrics: Mapping[str, object] | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> SaveTicket:
        """Capture ``state`` now and save it in the background.

        When this returns, the caller may change all it passed. ``await`` the ticket for a durable, visible checkpoint.
        A state larger than ``budget_bytes`` is captured and written in waves: this returns when the last is captured.

        Args:
            state: nested dicts, lists and tuples of tensors, arrays, plain Python values and Stateful objects.
            step: whole number, numpy's too; must exceed every committed and pending step; default one more than the
                newest.
            overwrite: replace the committed checkpoint of this very step, in one exchange.
            deadline_secs: fail this save if it is not committed so many seconds after this call; nothing becomes
                visible then. Only the last rename and its fsync, once begun, are waited for.
            metrics: numbers to keep with the step, by name, as for ``EngineConfig.keep_best``. One that is not finite
                is stored as such and is never the best.
            trace: file for a Chrome trace of this save (Perfetto, chrome://tracing), replaced before the ticket is
                settled, also if the save fails once it has begun. A trace that cannot be written is logged.

        Raises:
            StepOrderError, EmptyStateError, ConfigError: bad input; nothing was touched.
            UnsupportedLeafError, UnsafeObjectError, SourceChangedError: a bad leaf; nothing was touched.
            BudgetExceededError: the system refuses the staging memory.
            BusyError: ``when_busy="raise"`` and ``max_in_flight`` saves are pending.
            RootError: the root is not writable, or another writer holds it.
            StallError: ``deadline_secs`` passed before everything was captured, or the disk stalled meanwhile.
            WriteError: the disk failed before everything was captured.
            PeerFailedError: another rank failed, and all had to agree before this one captured.
            Exception: an earlier save failed and nobody awaited it; raised once.
        """
        step = step_numbers.whole_number(step)
        call = SaveCall.of(step, overwrite=overwrite, deadline_secs=deadline_secs, metrics=metrics, trace=trace)
        return self._frontend.save(state, step, call)

    def prepare(self, state: object) -> Milestone[None]:
        """Do ahead what makes a first save slow: take the root's lock, plan, map and register staging memory.

        The state is walked now, by this thread, and nothing of it is captured or kept; memory is mapped in the
        background. A save of the same names, types and shapes is a plan hit; one that comes before the memory is there
        waits for it. ``await`` what is returned, or call its ``result()``, to know when. It waits for no save.

        Raises:
            Exception: what :meth:`save` would raise of this state or root. Memory that cannot be had
                (BudgetExceededError) is raised by what is returned, and again by the save.
        """
        return self._frontend.prepare(state)

    def guard(self, guarded: object) -> None:
        """Let the device go on while tensors of ``guarded``, an optimizer, are copied: its ``step()`` waits for them.

        Covers its parameters and state on devices, which nothing but its ``step`` may change.

        Raises:
            ConfigError: no ``step()`` or ``param_groups``; raised by a step inside a captured CUDA graph, too.
        """
        self._frontend.in_flight.guards.add(guarded)

    def clear_cache(self) -> None:
        """Forget the cached plan and give its gather buffers back: the next save plans anew."""
        self._frontend.clear_cache()

    @property
    def plan_hits(self) -> int:
        """Saves, and calls of :meth:`prepare`, that reused the cached layout."""
        return self._frontend.cache.hits

    @property
    def plan_misses(self) -> int:
        """Saves, and calls of :meth:`prepare`, that planned anew."""
        return self._frontend.cache.misses

    @property
    def lifetime(self) -> LifetimeStats:
        """Arenas and leases held now."""
        return self._frontend.lifetime.stats

    # -- steps --------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Committed steps, ascending, less those that a load of this engine proved damaged and passed by."""
        return self._root_session.steps()

    def latest_step(self) -> int | None:
        """Newest committed step, or None."""
        return max(self.steps(), default=None)

    def rollback(self, step: int) -> list[int]:
        """Make ``step`` the newest: later steps move below ``.aio_ckpt/abandoned/``, never deleted; returns them.

        With several ranks every rank calls it, as it calls ``save()``.

        Raises:
            CheckpointNotFoundError: ``step`` is not committed.
            BusyError: saves are pending: await their tickets first.
            RootError: the root is not writable, or another writer holds it.
            PeerFailedError, StallError: as :meth:`load`.
        """
        return self._frontend.rollback(step)

    def protect(self, step: int) -> None:
        """Never delete ``step``, durably. Any process may ask for it, also beside a writer.

        Raises:
            CheckpointNotFoundError: ``step`` is not committed (any more).
        """
        self._root_session.protect(step)

    def unprotect(self, step: int) -> None:
        """Let ``step`` expire again, at the next commit; nothing if it was not protected."""
        self._root_session.unprotect(step)

    def protected_steps(self) -> list[int]:
        """Steps that are protected, ascending."""
        return self._root_session.protected_steps()

    @property
    def undeleted_steps(self) -> Mapping[int, str]:
        """Expired steps that could not be deleted after the last commit, and why; tried again after the next."""
        return self._root_session.undeleted

    # -- ending ---------------------------------------------------------------------------------------

    def on_preemption(self, signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        """From now on ``signals`` set :attr:`preempted`, until the engine is closed.

        The process goes on: a loop has to look at ``preempted``, save and end. Handlers that were Python functions
        are called too, after the flag was set; what the system does by default (to end the process) no longer
        happens. Closing the engine, and a fork in the child, restores what was there before.

        Raises:
            WrongThreadError: not called on the main thread.
            ConfigError: a signal cannot be handled.
            EngineClosedError: the engine was closed.
        """
        if self._portal.is_closed:
            raise EngineClosedError("the engine was closed: open a new one")
        self._preemption.local.install(signals)
        self._preemption.watch()

    @property
    def preempted(self) -> bool:
        """Whether a signal of :meth:`on_preemption` came; stays True.

        From then on the disk belongs to the saves: retention deletes nothing more (the next run's does), and
        ``save()`` waits for room even where ``when_busy`` would skip or raise. With many ranks a signal to one of them
        turns it true on all, at the same look: each has to look as often as the others (a ``save()`` is a look too).
        """
        return self._preemption.poll()

    def terminate(self) -> None:
        """Abandon pending saves and release everything; nothing of them becomes visible."""
        self._shutdown.abandon(self.config.stall_timeout_secs)

    def _wait_ready(self) -> None:
        """Block until ``save()`` would not have to wait for an earlier save."""
        self._portal.check_thread("ready()")
        while (settled := self._frontend.in_flight.settled_before_room) is not None:
            settled.result()

    def _submit_load(
        self, state: object, step: int | None, given_up: Future[None] | None = None, **options: Any
    ) -> Future[LoadReport]:
        """Future of a load. Once ``given_up`` is done it ends early."""
        self._portal.check_thread("load()")
        return self._portal.submit(self._loader.load, state, step, options, given_up or Future())

    def _submit_read(
        self,
        step: int | None,
        *,
        only: Collection[str] | None,
        path: str | os.PathLike[str] | None = None,
        skip_untrusted: bool = False,
        with_report: bool = False,
    ) -> Future[Any]:
        """Future of the state that is read; ``with_report``: and of its report."""
        self._portal.check_thread("read()")
        check_flag("skip_untrusted", skip_untrusted)
        check_flag("with_report", with_report)
        wanted = wanted_checkpoint(step, path)
        return self._portal.submit(self._loader.read, wanted, selection(only), skip_untrusted, with_report)

    def _close_blocking(self) -> None:
        """Finish pending saves, then release everything."""
        self._shutdown.finish_blocking()

    def _expire(self, step: int) -> None:
        """``step`` was committed: older ones may expire."""
        if not self._preemption.is_on:
            self._root_session.delete_expired(step)

    def _drain(self) -> None:
        """At interpreter exit: nothing trains any more."""
        self._throttle.lift()
        self._shutdown.drain(self.config.drain_timeout_secs)

    def _shut_down(self) -> None:
        coordinator = self._ctx.members.coordinator
        with contextlib.ExitStack() as steps:  # the last comes first; each, whatever the others raise
            steps.callback(self._preemption.local.restore)
            steps.callback(self._root_session.release)
            steps.callback(self._frontend.lifetime.close)
            steps.callback(coordinator.close)
            steps.callback(self._portal.close, STOP_SECS)
            steps.enter_context(contextlib.suppress(EngineClosedError, StallError))
            steps.callback(lambda: self._portal.call(coordinator.leave, timeout=STOP_SECS))
            steps.callback(self._frontend.let_go)


class CheckpointEngine(BaseEngine):
    """Saves and loads the checkpoints of one root. Usable from any thread and any event loop.

    The engine owns one event loop on one thread of its own; saves run there, in the order of the calls, while
    the caller goes on. Invariant: a save is pending from ``save()`` until its ticket is settled, at most
    ``max_in_flight`` are, and its step exceeds every committed and pending one. Any call may raise EngineClosedError
    once it is closed, and WrongThreadError on the engine's own threads.

    Args:
        root: directory of the checkpoints; made if it is missing.
        config: settings; the defaults suit a trainer on a local disk.
        coordinator: the ranks that save together; all of torch.distributed's default group if it is initialised. Give
            ``SoloCoordinator()`` for an engine of this process alone.
        storage: where the bytes go; the local file system unless given.

    Raises:
        RootError: ``root`` is a file or cannot be made.
        ConfigError: a setting that this machine or this number of ranks cannot have, an argument of another type.
        OSError, RuntimeError: no more threads or descriptors; those that it had are given back.
    """

    async def ready(self) -> None:
        """Return when ``save()`` would not have to wait for an earlier save."""
        while (settled := self._frontend.in_flight.settled_before_room) is not None:
            await asyncio.wrap_future(follow(settled))

    async def load(
        self,
        state: object,
        step: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        strict: bool = False,
        allow_missing: bool = False,
        fallback: bool = True,
        skip_untrusted: bool = False,
        cast: bool = False,
        rename: Rename | None = None,
    ) -> LoadReport:
        """Fill ``state`` in place from a checkpoint; a cancelled load returns when nothing is filled any more.

        Tensors are filled as they are read, once the templates of all ranks match: after an error with
        ``target_modified`` they may hold anything. Objects and Stateful values are set once everything was verified.

        Args:
            state: the template: same names, shapes and dtypes as what was saved.
            step: which one; None takes the newest that verifies.
            path: the directory of a checkpoint, which may lie anywhere, in the place of a step.
            strict: refuse names of the checkpoint that the template lacks.
            allow_missing: leave template names that the checkpoint lacks as they are.
            fallback: with ``step=None``, pass damaged ones by (:mod:`aio_ckpt.commit.quarantine`);
                False raises at the newest.
            skip_untrusted: leave objects that only running code reads as they are, and list them in the report.
            cast: convert tensors of another dtype to that of the template, as far as ``torch.can_cast`` allows.
            rename: what the template calls a stored leaf: a mapping from stored names of leaves or branches, or a
                function from the stored name of each leaf. A renamed leaf takes the place of one of that name.

        Raises:
            CheckpointNotFoundError: no committed checkpoint, or not this step.
            CorruptCheckpointError: it does not verify (with ``step=None``: none does; names each, moves none).
            MissingNameError, UnexpectedNameError, TemplateMismatchError: the template does not match.
            ConfigError, StepOrderError: an argument that cannot be; nothing was touched.
            UnsafeObjectError: only running code reads an object; see ``trusted_objects`` and ``skip_untrusted``.
            UnsupportedLeafError: a leaf that nothing can fill.
            FormatVersionError, ReadError: a newer version wrote it; the operating system could not read it.
            PeerFailedError, StallError: another rank failed, or gave no sign of life.
            Exception: of a ``load_state_dict``, with ``target_modified``: all tensors are filled by then.
        """
        given_up: Future[None] = Future()
        options = {
            "strict": strict,
            "allow_missing": allow_missing,
            "fallback": fallback,
            "skip_untrusted": skip_untrusted,
            "path": path,
            "cast": cast,
            "rename": rename,
        }
        return await outcome(self._submit_load(state, step, given_up, **options), given_up)

    async def read(
        self,
        step: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        only: Collection[str] | None = None,
        skip_untrusted: bool = False,
        with_report: bool = False,
    ) -> Any:
        """The nested state of a checkpoint without a template: what this rank saved, or rank 0 if it did not.

        Args:
            step: which one; None takes the newest that verifies.
            path: the directory of a checkpoint, which may lie anywhere, in the place of a step.
            only: names of leaves, or of branches above them.
            skip_untrusted: put an :class:`UntrustedObject` in the place of objects that only running code reads.
            with_report: return a tuple of the state and a :class:`ReadReport`.

        Raises:
            MissingNameError: one of ``only`` selects nothing of this rank's; tells whose it is.
            CheckpointNotFoundError, CorruptCheckpointError and others: as :meth:`load`.
        """
        reading = self._submit_read(step, only=only, path=path, skip_untrusted=skip_untrusted, with_report=with_report)
        return await asyncio.wrap_future(reading)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        await self._shutdown.leave(error)
        return False

    async def close(self) -> None:
        """Finish pending saves, then release everything. Raises once what an unawaited save failed with."""
        await self._shutdown.finish()

    # For a caller without a loop.
    wait_ready = BaseEngine._wait_ready
    submit_load = BaseEngine._submit_load
    submit_read = BaseEngine._submit_read
    close_blocking = BaseEngine._close_blocking
