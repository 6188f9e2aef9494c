"""Simulated runs of several hosts: a reader beside a writer that removes steps, and a writer that is taken over.

The disk is one. What a host has seen of it, it may believe for 60 s.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any
from unittest import mock

import anyio

from aio_ckpt.commit import discovery
from aio_ckpt.commit.leftovers import clear_leftovers
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.commit.retention import Policy, Retention
from aio_ckpt.engine.earlier_run import EarlierRun
from aio_ckpt.engine.loader import Loader
from aio_ckpt.engine.newest_good import WantedCheckpoint
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, RootError
from aio_ckpt.plan import chunks
from aio_ckpt.runtime.futures import follow
from aio_ckpt.storage.mounts import Mount
from tests.campaigns.simulation.runs import (
    CHUNK_BYTES,
    ROOT,
    Attempt,
    BrokenPromiseError,
    Run,
    World,
    differing,
    nothing_pending,
)
from tests.campaigns.simulation.world import Chances, Directory, HostStorage, SimStorage, SimThreads, virtual_loop

__all__ = ["simulate_a_reader", "simulate_a_takeover"]

_NOLOCK = Mount("nfs", frozenset({"local_lock=all"}))
_PAUSE_SECS = 2_000.0


class _Host(World):
    """A writer on a host of its own, on a disk that other hosts use, too."""

    def mount(self, threads: SimThreads) -> SimStorage:
        """As a host sees it."""
        return HostStorage(threads, self.rng, self.chances, self.disk, ROOT)

    def draw_chances(self) -> Chances:
        """Calls may be slow."""
        return Chances(slow=self.rng.choice((0.0, 0.05)))

    def draw_limit(self) -> float | None:
        """No deadline: nothing but another host ends a save."""
        return None


class _WriterAndReader(_Host):
    """A writer that keeps few steps, and a reader on another host that loads the newest one again and again."""

    def __init__(self, seed: int, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(seed, loop)
        self.loads = 0
        self._is_over = False
        self._threads = SimThreads(loop, self.rng, 4, self.chances, mean_secs=self.rng.choice((0.01, 0.1)))
        self.seen = HostStorage(self._threads, self.rng, self.chances, self.disk, ROOT)

    async def train(self) -> None:
        async with anyio.create_task_group() as group:
            capturer, pipeline = await self.open(group)
            retention = Retention(
                self.storage,
                ROOT,
                self.ctx.names,
                Policy(keep_last=self.rng.choice((1, 2)), keep_every=None, keep_best=None),
                check=pipeline.claim.check,
                committed=lambda: discovery.discover(self.storage, ROOT, self.ctx.names),
                renames=pipeline.renames,
                must_wait=lambda: False,
            )
            group.start_soon(self._read_often)
            for number in range(1, self.rng.randrange(5, 12)):
                await self._learn(capturer.queue)
                attempt = self._save(capturer, pipeline, number)
                await asyncio.wrap_future(follow(attempt.save.finished))
                if error := attempt.save.ticket.committed.peek():
                    raise BrokenPromiseError(f"save {number} failed though nothing else did: {error!r}")
                await retention.enforce(attempt.save.stored_step)
                await anyio.sleep(self.rng.choice((0.1, 0.3, 20.0)))
            self._is_over = True

    async def _read_often(self) -> None:
        ctx = self._ctx(self.seen, self._threads, self.ctx.config)
        loader = Loader(ctx=ctx, quarantine=Quarantine(), earlier_run=EarlierRun(ctx))
        newest = -1
        while not self._is_over:
            before = self._newest_committed()
            try:
                state: Any = await loader.read(WantedCheckpoint(), None, before=nothing_pending)
            except CheckpointNotFoundError as error:
                if before >= 0:
                    raise BrokenPromiseError(f"a reader found nothing, though step {before} was committed") from error
            except AioCkptError as error:
                raise BrokenPromiseError(f"a reader failed beside the writer: {error!r}") from error
            else:
                attempt = next(a for a in self.attempts if a.state["number"] == state["number"])
                if names := differing(attempt.state, state):
                    raise BrokenPromiseError(f"a reader got other values than were saved: {names}")
                step = attempt.save.stored_step
                if step < max(before, newest):
                    raise BrokenPromiseError(f"a reader got step {step} after {newest}, with {before} committed")
                newest, self.loads = step, self.loads + 1
            await anyio.sleep(self.rng.choice((0.0, 0.05, 5.0)))

    def _newest_committed(self) -> int:
        steps = [a.save.stored_step for a in self.attempts if a.save.ticket.committed.state == "reached"]
        return max(steps, default=-1)


class _FirstWriter(_Host):
    """A writer that is cut off from the disk in the middle of a save, for longer than its claim is valid."""

    stall_secs = 2 * _PAUSE_SECS


class _SecondWriter(_Host):
    """A writer on another host, on the disk of the first one."""

    host = "other"
    stall_secs = 2 * _PAUSE_SECS

    def __init__(self, seed: int, loop: asyncio.AbstractEventLoop, disk: Directory) -> None:
        super().__init__(seed, loop)
        self.disk = self.storage._top = disk


async def _take_over(seed: int, loop: asyncio.AbstractEventLoop) -> Run:
    first = _FirstWriter(seed, loop)
    second = _SecondWriter(seed + 1, loop, first.disk)
    rng = random.Random(seed)
    async with anyio.create_task_group() as group:
        capturer, pipeline = await first.open(group)
        beats = anyio.CancelScope()

        async def keep() -> None:
            with beats:
                await pipeline.claim.keep()

        group.start_soon(keep)
        await first._learn(capturer.queue)
        attempts = [first._save(capturer, pipeline, 1)]
        await asyncio.wrap_future(follow(attempts[0].save.finished))
        attempts.append(first._save(capturer, pipeline, 2))
        await anyio.sleep(rng.expovariate(10.0))
        first.threads.paused_until = loop.time() + _PAUSE_SECS
        # The second one is refused until the claim is void; then it has the root, and clears what the first one left.
        refusals = 0
        while True:
            try:
                claim = second.claim()
                await claim.take(_NOLOCK, is_locked=True)
                break
            except RootError:
                refusals += 1
                await anyio.sleep(30.0)
        if not refusals:
            raise BrokenPromiseError("a second writer was let in while the first one held the root")
        await clear_leftovers(second.storage, ROOT, second.ctx.names, claim.check, here=second.ctx.owner)
        visible = {found.step for found in await discovery.discover(second.storage, ROOT, second.ctx.names)}
        await asyncio.wrap_future(follow(attempts[1].save.finished))  # once it can reach the disk again
        error = attempts[1].save.ticket.committed.peek()
        found = {found.step for found in await discovery.discover(second.storage, ROOT, second.ctx.names)}
        if found != visible:
            raise BrokenPromiseError(f"the first writer changed the root of the second one: {visible}, then {found}")
        await _check_visible(second, [each for each in attempts if each.may_be_visible], found)
        first.run.outcomes.append("committed" if error is None else type(error).__name__)
        beats.cancel()
    return first.run


async def _check_visible(world: World, attempts: list[Attempt], found: set[int]) -> None:
    """Check that the steps are those of ``attempts``, and that each holds the values of the last that saved it."""
    last = {attempt.save.stored_step: attempt for attempt in attempts}
    if last.keys() != found:
        raise BrokenPromiseError(f"steps {sorted(found)} are there, and {sorted(last)} were committed")
    loader = Loader(ctx=world.ctx, quarantine=Quarantine(), earlier_run=EarlierRun(world.ctx))
    for step, attempt in last.items():
        state: Any = await loader.read(WantedCheckpoint(step=step), None, before=nothing_pending)
        if names := differing(attempt.state, state):
            raise BrokenPromiseError(f"step {step} has other values than were saved: {names}")


def simulate_a_reader(seed: int) -> tuple[int, int]:
    """One run of a writer and a reader. Returns the number of loads, and of old answers that the reader got.

    Raises:
        BrokenPromiseError, DeadlockError: something that must hold does not; the seed replays it.
    """
    with mock.patch.object(chunks, "chunk_bytes_for", return_value=CHUNK_BYTES), virtual_loop() as loop:
        world = _WriterAndReader(seed, loop)
        anyio.run(world.train, backend="asyncio", backend_options={"loop_factory": lambda: loop})
        return world.loads, world.seen.old_answers


def simulate_a_takeover(seed: int) -> str:
    """One run of two writers. Returns how the save ended during which the first one was taken over.

    Raises:
        BrokenPromiseError, DeadlockError: something that must hold does not; the seed replays it.
    """
    with mock.patch.object(chunks, "chunk_bytes_for", return_value=CHUNK_BYTES), virtual_loop() as loop:
        run = anyio.run(_take_over, seed, loop, backend="asyncio", backend_options={"loop_factory": lambda: loop})
        return run.outcomes[-1]
