"""Thousands of simulated runs of the pipeline; any failure replays by its seed.

The stages are the real ones (in flight, pipeline, snapshot, write, commit, read); simulated are the clock, the threads
and the disk. A seed draws the states, how long each call takes, so the order in which calls end, which calls fail or
hang, what is cancelled when, the deadlines, and the instants of power losses.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVarTuple
from unittest import mock

import anyio
import anyio.abc
import torch

from aio_ckpt.commit import discovery
from aio_ckpt.commit.owner import Owner
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.commit.root_claim import Claim
from aio_ckpt.commit.trash import Trash
from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.capture_job import JobCapturer
from aio_ckpt.engine.capture_resources import CaptureResources
from aio_ckpt.engine.common_stages import CommonStages
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.earlier_run import EarlierRun
from aio_ckpt.engine.job import SaveCall, SaveJob, SaveTimer
from aio_ckpt.engine.job_queue import JobQueue
from aio_ckpt.engine.known_steps import KnownSteps
from aio_ckpt.engine.loader import Loader
from aio_ckpt.engine.newest_frozen_file import NewestFrozenFile
from aio_ckpt.engine.newest_good import WantedCheckpoint
from aio_ckpt.engine.outcomes import OutcomeRecorder
from aio_ckpt.engine.remove_pipeline import RemovePipeline
from aio_ckpt.engine.root_session import RootSession
from aio_ckpt.engine.state_pipeline import StatePipeline
from aio_ckpt.errors import AioCkptError, SaveCancelledError, StallError
from aio_ckpt.format.checkpoint_files import data_file_name
from aio_ckpt.format.root_names import ENGINE_DIRS, LOCK_FILE, PENDING_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.leaves.objects import ObjectEncoder
from aio_ckpt.memory.arena_lifetimes import Lease, LifetimeManager
from aio_ckpt.memory.staging_kind import StagingChoice
from aio_ckpt.plan import chunks
from aio_ckpt.plan.plan_cache import PlanCache
from aio_ckpt.ranks.coordinator import SoloCoordinator
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.save_ledger import ContentSums
from aio_ckpt.ranks.save_round import SaveRound
from aio_ckpt.runtime.deadline import Deadline
from aio_ckpt.runtime.futures import follow
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.snapshot.captured_chunks import CapturedChunks
from aio_ckpt.snapshot.image import lease_image
from aio_ckpt.state.flatten import flatten
from aio_ckpt.storage.mounts import UNKNOWN
from aio_ckpt.write.part import Part
from aio_ckpt.write.throttle import WriteThrottle
from tests.campaigns.simulation.world import HANG_SECS, Chances, Directory, File, SimStorage, SimThreads, virtual_loop

__all__ = ["BrokenPromiseError", "Run", "simulate"]

Ts = TypeVarTuple("Ts")
ROOT = Path("/simulated")
CHUNK_BYTES = 64 << 10
_BUDGET_BYTES = 1 << 30
_STALL_SECS = 30.0
_SETTLE_SECS = 20.0
"""What a failed save may take to clean up, over its limit."""


class BrokenPromiseError(AssertionError):
    """An invariant does not hold; the message names it."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One save of a run."""

    save: SaveJob
    """In the pipeline."""
    state: dict[str, Any]
    """What was given."""
    began: float
    """When, by the virtual clock."""
    ended: float = 0.0
    """When it was settled."""
    is_cancelled: bool = False
    """Whether ``cancel`` was accepted."""
    was_first: bool = True
    """Whether every save before it was settled by then."""

    @property
    def may_be_visible(self) -> bool:
        """Committed, being committed, or given up in the middle of its rename."""
        error = self.save.ticket.committed.peek()
        return self.save.round.is_committing if error is None else isinstance(error, AioCkptError) and error.in_doubt


@dataclass(slots=True, kw_only=True)
class Run:
    """What one seed did."""

    seed: int
    """Draws everything."""
    outcomes: list[str] = field(default_factory=list)
    """Of each save: committed, or the type of its error."""
    losses: int = 0
    """Power losses that were looked at."""
    trace: list[str] = field(default_factory=list)
    """Calls of the storage in the order of their effects."""


class SimPortal(Portal):
    """The real portal on the simulated loop; what it posts arrives later, in order."""

    def attach(self, loop: asyncio.AbstractEventLoop, group: anyio.abc.TaskGroup, threads: SimThreads) -> None:
        """Use these instead of starting threads."""
        self._loop, self._group, self._executor = loop, group, threads
        self._context = contextvars.copy_context()
        self._thread = SimpleNamespace(is_alive=lambda: True)  # type: ignore[assignment]
        self._posted = loop.time()

    def post_after(self, secs: float) -> None:
        """The next post arrives so long after the last."""
        assert self._loop is not None
        self._posted = max(self._posted, self._loop.time()) + secs

    def post(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        """Soon, in order."""
        assert self._loop is not None
        self._loop.call_at(max(self._posted, self._loop.time()), fn, *args)


class CountingLifetime(LifetimeManager):
    """Counts how often leases end."""

    def __init__(self, threads: SimThreads) -> None:
        super().__init__(budget_bytes=_BUDGET_BYTES, executor=threads, debug=True)
        self.ended = 0

    def _give_back(self, lease: Lease) -> None:
        self.ended += 1
        super()._give_back(lease)


def _root_of_a_writer() -> Directory:
    """A root whose lock was taken: the engine's own directories are there, durably."""
    root = Directory()
    for name in ENGINE_DIRS:
        at = root
        for part in Path(name).parts:
            if at.now(part) is None:
                at.put(part, Directory())
                at.sync()
            below = at.now(part)
            assert isinstance(below, Directory)
            at = below
    own = root.now(Path(LOCK_FILE).parts[0])
    assert isinstance(own, Directory)
    own.put(Path(LOCK_FILE).name, File())
    own.sync()
    return root


class World:
    """One run: an engine without its face, driven by one task."""

    stall_secs = _STALL_SECS
    host = "h"

    def __init__(self, seed: int, loop: asyncio.AbstractEventLoop) -> None:
        self.run = Run(seed=seed)
        self.rng = rng = random.Random(seed)
        self.loop = loop
        self.chances = self.draw_chances()
        workers = rng.randrange(1, 5)
        self.threads = SimThreads(loop, rng, workers + 4, self.chances)
        self.disk = _root_of_a_writer()
        self.storage = self.mount(self.threads)
        config = EngineConfig(workers=workers, max_in_flight=rng.randrange(1, 4), stall_timeout_secs=self.stall_secs)
        self.ctx = self._ctx(self.storage, self.threads, config)
        self.portal = SimPortal("simulated", 1)
        self.lifetime = CountingLifetime(self.threads)
        self.cache = PlanCache()
        self.encoder = ObjectEncoder(trusted=False)
        self.attempts: list[Attempt] = []

    def draw_chances(self) -> Chances:
        """What may go wrong in this run."""
        rng = self.rng
        return Chances(
            fails=rng.choice((0.0, 0.0, 0.01, 0.05)),
            hangs=rng.choice((0.0, 0.0, 0.0, 0.01)),
            slow=rng.choice((0.0, 0.05)),
        )

    def draw_limit(self) -> float | None:
        """The deadline of the next save, in seconds."""
        return self.rng.choice((None, None, self.rng.expovariate(5.0) + 0.01))

    def mount(self, threads: SimThreads) -> SimStorage:
        """The disk as the writer sees it."""
        return SimStorage(threads, self.rng, self.chances, self.disk, ROOT)

    def _ctx(self, storage: SimStorage, threads: SimThreads, config: EngineConfig) -> EngineContext:
        owner = Owner(
            session=f"s{self.host}",
            host=self.host,
            machine_id=self.host,
            boot_id="b",
            pid_namespace="n",
            pid=1,
            started_ticks=0,
            heartbeat_unix=0.0,
        )
        return EngineContext(
            root=ROOT,
            names=StepNames(config.step_dir),
            owner=owner,
            storage=storage,
            mount=UNKNOWN,
            members=Membership(SoloCoordinator(), owner, stall_secs=self.stall_secs),
            executor=threads,
            config=config,
            rank=0,
            world_size=1,
        )

    # -- the trainer --------------------------------------------------------------------------------

    async def train(self) -> None:
        """A few saves, then everything that must hold."""
        async with anyio.create_task_group() as group:
            capturer, pipeline = await self.open(group)
            queue = capturer.queue
            for number in range(1, self.rng.randrange(2, 6)):
                while (settled := queue.finished_before_room) is not None:
                    await asyncio.wrap_future(follow(settled))
                await self._learn(queue)
                attempt = self._save(capturer, pipeline, number)
                if self.rng.random() < 0.2:
                    group.start_soon(self._cancel, attempt, self.rng.expovariate(10.0))
                if self.rng.random() < 0.5:
                    await anyio.sleep(self.rng.expovariate(5.0))
                if self.rng.random() < 0.5:
                    await self.lose_power()
            for attempt in self.attempts:
                await asyncio.wrap_future(follow(attempt.save.finished))
                await self.lose_power()
            self._check_settled()
            await anyio.sleep(3 * HANG_SECS)  # what hung ends, late
            self._check_nothing_held()
            await self.lose_power()
            await self._check_disk(self.disk.copy(), "at the end")

    def claim(self) -> Claim:
        """The claim that this writer makes."""
        return Claim(self.storage, ROOT, self.ctx.owner, stale_after_secs=self.ctx.config.stale_after_secs)

    async def open(self, group: anyio.abc.TaskGroup) -> tuple[JobCapturer, StatePipeline]:
        """The engine of a writer that has the root."""
        self.portal.attach(self.loop, group, self.threads)
        quarantine = Quarantine()
        pipeline = StatePipeline(
            ctx=self.ctx,
            root_session=mock.create_autospec(RootSession, instance=True),
            claim=self.claim(),
            stages=CommonStages(ctx=self.ctx, throttle=WriteThrottle()),
            renames=quarantine.renames,
            trash=Trash(self.storage),
            newest_frozen=NewestFrozenFile(leaves=None, relink_limit=1),
        )
        while True:  # a root that cannot be claimed is no writer's: the next call of a user tries again
            try:
                with anyio.fail_after(self.stall_secs):
                    await pipeline.claim.take(UNKNOWN, is_locked=True)
                    break
            except (OSError, TimeoutError):
                continue
        outcomes = mock.create_autospec(OutcomeRecorder, instance=True)
        resources = CaptureResources(self.ctx, WriteThrottle(), None)
        removals = RemovePipeline(ctx=self.ctx, claim=pipeline.claim, renames=pipeline.renames, trash=pipeline.trash)
        queue = JobQueue(
            self.ctx,
            self.portal,
            KnownSteps(quarantine, counts_calls=False),
            removals,
            outcomes,
            pipeline.root_session,
            None,
        )
        capturer = JobCapturer(
            ctx=self.ctx,
            portal=self.portal,
            queue=queue,
            resources=resources,
        )
        return capturer, pipeline

    async def _learn(self, queue: JobQueue) -> None:
        while not queue.steps.are_known:
            try:
                with anyio.fail_after(_STALL_SECS):
                    found = await discovery.discover(self.storage, ROOT, self.ctx.names)
            except (OSError, TimeoutError):
                continue
            queue.steps.learn(lambda: [checkpoint.step for checkpoint in found])  # noqa: B023 - called at once

    def _save(self, capturer: JobCapturer, pipeline: StatePipeline, number: int) -> Attempt:
        rng, now = self.rng, self.loop.time()
        committed = [a.save.stored_step for a in self.attempts if a.save.ticket.committed.state == "reached"]
        queue = capturer.queue
        overwrite = bool(committed) and not queue.pending_count and rng.random() < 0.2
        state = self._state(number)
        flat = flatten(state, rank=0)
        planned = self.cache.resolve(flat)
        objects = self.encoder.encode(planned.objects)
        image = lease_image(
            planned,
            len(objects.region),
            self.lifetime,
            StagingChoice("pageable"),
            timeout_secs=_STALL_SECS,
            limit_secs=_STALL_SECS,
        )
        deadline = Deadline(secs=self.draw_limit(), began=now)
        call = queue.next_number()
        step = queue.claim_step(call, max(committed) if overwrite else None)
        queue.steps.check(step, queue.pending_steps, overwrite=overwrite, read=lambda: committed)
        save = queue.assign_ticket(
            SaveJob(
                target=step,
                round=SaveRound(self.ctx.members, self.ctx.executor, topic=Topic("save", 1)),
                timer=SaveTimer(now, waited_secs=0.0),
                place=ROOT,
                number=call,
                deadline=deadline,
                call=SaveCall(step=step, overwrite=overwrite, metrics={}, extra={}, deadline=deadline, started=now),
                pending=self.ctx.pending_path(call),
                write_dir=self.ctx.pending_path(call),
                final=self.ctx.final_path(step),
                save_id=self.ctx.save_id(call),
                requested=flat.names,
                plan=planned.plan,
                plan_hit=planned.plan_hit,
                fingerprint_hit=planned.fingerprint_hit,
                objects=objects,
                content=ContentSums(b""),
            )
        )
        part = Part(
            name=data_file_name(save.save_id, 0),
            layout=planned.plan.layout,
            tail=objects.region,
            renders_constants=not image.has_constants or planned.plan.copies.gathers,
            image=image,
            chunks=CapturedChunks(len(image.chunks), save.stall),
        )
        attempt = Attempt(save=save, state=state, began=now)
        self.attempts.append(attempt)
        save.finished.add_done_callback(lambda _: self._ended(attempt))
        self.portal.post_after(rng.expovariate(100.0))
        capturer.capture(save, pipeline, [(planned, part)])
        for value in state.values():  # what a trainer does next must not reach the checkpoint
            if isinstance(value, torch.Tensor):
                value.fill_(-1)
        attempt.state = self._state(number)
        return attempt

    def _ended(self, attempt: Attempt) -> None:
        attempt.ended = self.loop.time()
        before = self.attempts[: self.attempts.index(attempt)]
        attempt.was_first = all(earlier.save.finished.done() for earlier in before)

    def _state(self, number: int) -> dict[str, Any]:
        rng = random.Random(self.run.seed * 1000 + number // 2)  # a pair of saves shares its structure
        tensors = {
            f"t{i}": torch.full((rng.randrange(1, 40_000),), float(number + i)) for i in range(rng.randrange(1, 5))
        }
        return {**tensors, "number": number, "note": "n" * number}

    async def _cancel(self, attempt: Attempt, after: float) -> None:
        await anyio.sleep(after)
        attempt.is_cancelled |= await attempt.save.cancel()

    # -- what must hold -----------------------------------------------------------------------------

    async def lose_power(self) -> None:
        """What a power loss at this instant may leave is whole, and holds all that was promised."""
        self.run.losses += 1
        await self._check_disk(self.disk.after_loss(self.rng), f"after power loss {self.run.losses}")

    async def _check_disk(self, disk: Directory, when: str) -> None:
        promised = {a.save.stored_step: a for a in self.attempts if a.save.ticket.committed.state == "reached"}
        possible = {a.state["number"]: a for a in self.attempts if a.may_be_visible}
        calm = SimThreads(self.loop, random.Random(0), 8, Chances())
        storage = SimStorage(calm, random.Random(0), Chances(), disk, ROOT)
        ctx = self._ctx(storage, calm, self.ctx.config)
        loader = Loader(ctx=ctx, quarantine=Quarantine(), earlier_run=EarlierRun(ctx))
        found = {checkpoint.step for checkpoint in await discovery.discover(storage, ROOT, ctx.names)}
        if not promised.keys() <= found:
            raise BrokenPromiseError(
                f"{when}: steps {sorted(promised.keys() - found)} were committed and are not there"
            )
        for step in sorted(found):
            state: Any = await loader.read(WantedCheckpoint(step=step), None, before=nothing_pending)
            attempt = possible.get(state["number"])
            if attempt is None or attempt.save.stored_step != step:
                raise BrokenPromiseError(f"{when}: step {step} shows save {state['number']}, which was not committed")
            if step in promised and attempt.state["number"] < promised[step].state["number"]:
                raise BrokenPromiseError(f"{when}: step {step} went back to save {attempt.state['number']}")
            if names := differing(attempt.state, state):
                raise BrokenPromiseError(f"{when}: step {step}: {names} are not what was saved")

    def _check_settled(self) -> None:
        for attempt in self.attempts:
            save = attempt.save
            error = save.ticket.committed.peek()
            self.run.outcomes.append("committed" if error is None else type(error).__name__)
            if error is None and not attempt.was_first:
                raise BrokenPromiseError(f"save {attempt.state['number']} was committed before one that came earlier")
            if error is not None and not isinstance(error, AioCkptError | OSError):
                raise BrokenPromiseError(f"save {attempt.state['number']} failed with {error!r}") from error
            limit = save.deadline.secs
            late = attempt.ended - attempt.began - (limit or 0.0) > _STALL_SECS * 2 + _SETTLE_SECS
            if limit is not None and late:
                raise BrokenPromiseError(f"save {attempt.state['number']} ended long after its deadline of {limit} s")
            if isinstance(error, StallError) and limit is None and not self.threads.has_hung:
                raise BrokenPromiseError(f"save {attempt.state['number']} stalled although nothing hung: {error}")
            if isinstance(error, SaveCancelledError) and not attempt.is_cancelled:
                raise BrokenPromiseError(f"save {attempt.state['number']} was cancelled by nobody")

    def _check_nothing_held(self) -> None:
        if not self.threads.are_idle:
            raise BrokenPromiseError("threads are still at work")
        if self.storage.poisoned:
            raise BrokenPromiseError(f"written from buffers that were given back: {self.storage.poisoned}")
        if self.lifetime.stats.leases or self.lifetime.ended != len(self.attempts):
            raise BrokenPromiseError(f"{self.lifetime.ended} leases ended, {len(self.attempts)} were had")
        tasks = asyncio.all_tasks(self.loop) - {asyncio.current_task(self.loop)}
        if tasks:
            raise BrokenPromiseError(f"tasks are left: {tasks}")
        own = self.disk.now(Path(PENDING_DIR).parts[0])
        pending = own.now(Path(PENDING_DIR).parts[1]) if isinstance(own, Directory) else None
        leftovers = pending.listing() if isinstance(pending, Directory) else []
        # A thread that outlasts the settlement keeps its pending directory: it is cleared when its owner is dead.
        is_calm = not self.chances.slow and not self.threads.has_hung
        if leftovers and is_calm and not any("fails" in call for call in self.storage.trace):
            raise BrokenPromiseError(f"left behind: {leftovers}")


def differing(saved: dict[str, Any], loaded: dict[str, Any]) -> list[str]:
    """Names whose values are not equal."""
    return [
        name
        for name, value in saved.items()
        if not (torch.equal(value, loaded[name]) if isinstance(value, torch.Tensor) else value == loaded[name])
    ]


def simulate(seed: int) -> Run:
    """One run.

    Raises:
        BrokenPromiseError, DeadlockError: something that must hold does not; the seed replays it.
    """
    with mock.patch.object(chunks, "chunk_bytes_for", return_value=CHUNK_BYTES), virtual_loop() as loop:
        world = World(seed, loop)
        anyio.run(world.train, backend="asyncio", backend_options={"loop_factory": lambda: loop})
        world.run.trace = world.storage.trace
        return world.run


async def nothing_pending() -> None:
    """What a load awaits first, where no save of its engine is pending."""
