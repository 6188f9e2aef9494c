"""The caller's half of a save: room, step, plan, lease, capture. What it starts goes on in :mod:`aio_ckpt.pipeline`."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from aio_ckpt import commit, tree
from aio_ckpt.config import MAX_SECS
from aio_ckpt.errors import BusyError, EngineClosedError
from aio_ckpt.image import Image, arena_spec, lease_image
from aio_ckpt.inflight import InFlight
from aio_ckpt.keeper import RootKeeper
from aio_ckpt.lifetime import ArenaSpec, LifetimeManager, default_budget_bytes
from aio_ckpt.pipeline import SaveCall, Site
from aio_ckpt.plan import Plan, PlanCache, PlannedSave
from aio_ckpt.portal import Lock, Portal
from aio_ckpt.progress import NO_DEADLINE, Deadline
from aio_ckpt.snapshot import ObjectBytes, ObjectEncoder
from aio_ckpt.staging import StagingChoice
from aio_ckpt.ticket import Milestone, SaveTicket
from aio_ckpt.trace import CALLER

__all__ = ["Saver"]

_log = logging.getLogger("aio_ckpt")


class Saver:
    """What the saves of one engine share on the caller's side.

    Invariant: one call at a time plans, leases and captures; who waits for it waits for the lock.
    """

    def __init__(
        self,
        site: Site,
        portal: Portal,
        keeper: RootKeeper,
        *,
        is_urgent: Callable[[], bool],
        on_committed: Callable[[int], None],
    ) -> None:
        """``is_urgent``: there may be no other save to make up for one that is skipped."""
        config = site.config
        self._site = site
        self._portal = portal
        self._keeper = keeper
        self._is_urgent = is_urgent
        self._on_committed = on_committed
        budget_bytes = config.budget_bytes or default_budget_bytes(ranks_on_host=1)
        self.lifetime = LifetimeManager(budget_bytes=budget_bytes, executor=site.executor, debug=config.debug)
        """Arenas."""
        self.cache = PlanCache(
            rank=site.coordinator.rank, world_size=site.coordinator.world_size, gather_bytes=config.gather_bytes
        )
        """The plan of the last save."""
        self.in_flight = InFlight(site, portal, on_settled=self._after)
        """Pending saves."""
        self._encoder = ObjectEncoder(trusted=config.trusted_objects)
        self._staging = StagingChoice(config.staging)
        self._lock = Lock()

    def save(self, state: object, step: int | None, call: SaveCall) -> SaveTicket:
        """See ``CheckpointEngine.save``."""
        with call.trace.span("save()", CALLER):
            return self._save(state, step, call)

    def _save(self, state: object, step: int | None, call: SaveCall) -> SaveTicket:
        in_flight, deadline = self.in_flight, call.deadline
        read_steps = functools.partial(self._keeper.steps, deadline)
        with self._lock:
            # In here nobody else leases: a lease that no pending save has was lost by Ctrl-C.
            self.lifetime.close_lost([save.image.lease for save in in_flight.pending])
            in_flight.raise_unreported()
            when_busy = "wait" if self._is_urgent() else self._site.config.when_busy
            with call.trace.span("wait for room", CALLER):
                waited_secs = in_flight.wait_for_room(step, when_busy, deadline)
            with call.trace.span("read the steps", CALLER):
                if not in_flight.knows_steps:
                    in_flight.learn_steps(read_steps)
            in_flight.next_step(step, overwrite=call.overwrite, read_steps=read_steps)
            if waited_secs is None:
                skipped_step = (in_flight.newest_step or 0) if step is None else step
                return SaveTicket(step=skipped_step, portal_check=self._portal.check_thread, skipped=True)
            with call.trace.span("walk and plan", CALLER):
                flat = tree.flatten(state, rank=self._site.coordinator.rank, trusted=self._site.config.trusted_objects)
                planned = self.cache.resolve(flat)
            plan_secs = time.perf_counter() - call.started - waited_secs
            with call.trace.span("encode objects", CALLER):
                objects = self._encoder.encode(planned.objects)
            with call.trace.span("open the root", CALLER):
                self._keeper.become_writer(in_flight.learn_steps, deadline)
                step = in_flight.next_step(step, overwrite=call.overwrite, read_steps=read_steps)
            with call.trace.span("lease memory", CALLER):
                image = self._lease(planned, objects, deadline)
            save = in_flight.enter(
                call,
                planned,
                objects,
                image,
                step=step,
                requested=flat.names,
                waited_secs=waited_secs + image.lease.waited_secs,
                plan_secs=plan_secs,
            )
            with call.trace.span("capture", CALLER):
                in_flight.start(save, planned)
            self._map_next(planned.plan, objects)
            save.blocked_secs = save.elapsed()
            return save.ticket

    def prepare(self, state: object) -> Milestone[None]:
        """See ``CheckpointEngine.prepare``."""
        self._portal.check_thread("prepare()")
        with self._lock:
            self.in_flight.check_open()
            flat = tree.flatten(state, rank=self._site.coordinator.rank, trusted=self._site.config.trusted_objects)
            planned = self.cache.resolve(flat)
            objects = self._encoder.encode(planned.objects)
            spec = self._spec(planned.plan, objects)
            self._keeper.become_writer(self.in_flight.learn_steps, NO_DEADLINE)
            self.in_flight.prepare_buffers(planned.plan)
            mapped = self.lifetime.map_ahead(spec, arenas=1)
        return _milestone_of(mapped, self._portal)

    def rollback(self, step: int) -> list[int]:
        """See ``CheckpointEngine.rollback``."""
        self._portal.check_thread("rollback()")
        step = commit.check_step_number(step)
        with self._lock:
            if self.in_flight.pending:
                raise BusyError(f"rollback({step}): saves are pending; await their tickets first")
            self._keeper.become_writer(self.in_flight.learn_steps, NO_DEADLINE)
            self.in_flight.forget_steps()  # one that fails midway has renamed some
            return self._keeper.rollback(step)

    def clear_cache(self) -> None:
        """Forget the plan and the gather buffers."""
        with self._lock:
            self.cache.clear()
            self.in_flight.clear_buffers()

    def let_go(self) -> None:
        """Forget the guarded optimizers and the gather buffers. The arenas go later, behind the last thread."""
        self.in_flight.guards.close()
        self.in_flight.clear_buffers()

    def _spec(self, plan: Plan, objects: ObjectBytes) -> ArenaSpec:
        kind, budget_bytes = self._staging.kind(plan.source), self.lifetime.budget_bytes
        return arena_spec(plan, len(objects.region), kind, budget_bytes=budget_bytes)

    def _lease(self, planned: PlannedSave, objects: ObjectBytes, deadline: Deadline) -> Image:
        return lease_image(
            planned,
            len(objects.region),
            self.lifetime,
            self._staging.kind(planned.plan.source),
            timeout_secs=self._site.slot_timeout_secs(planned.plan.layout.chunk_bytes),
            limit_secs=deadline.left_secs(MAX_SECS),
        )

    def _map_next(self, plan: Plan, objects: ObjectBytes) -> None:
        """In the background of this save: the arena that the next one would have to map."""
        arenas = self._site.config.max_in_flight
        if arenas == 1:
            return
        with contextlib.suppress(EngineClosedError):
            mapped = self.lifetime.map_ahead(self._spec(plan, objects), arenas=arenas)
            if mapped is not None:
                mapped.add_done_callback(_log_failure)

    def _after(self, step: int, error: BaseException | None) -> None:
        """A save is about to settle: what a failed one planned is not trusted."""
        if error is not None:
            self.cache.clear()
        else:
            self._on_committed(step)


def _milestone_of(work: Future[None] | None, portal: Portal) -> Milestone[None]:
    milestone: Milestone[None] = Milestone("prepare()", portal.check_thread)

    def settle(done: Future[None]) -> None:
        error = EngineClosedError("the engine was closed") if done.cancelled() else done.exception()
        if error is None:
            milestone.resolve(None)
        else:
            milestone.fail(error)

    if work is None:
        milestone.resolve(None)
    else:
        work.add_done_callback(settle)
    return milestone


def _log_failure(done: Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        _log.info("no arena was mapped ahead, the next save will try: %s: %s", type(error).__name__, str(error))
