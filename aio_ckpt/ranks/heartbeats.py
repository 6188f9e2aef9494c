"""Liveness: how a rank sends heartbeats and waits for other ranks."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

import anyio

from aio_ckpt.errors import EngineClosedError, PeerFailedError
from aio_ckpt.ranks.coordinator import Coordinator
from aio_ckpt.ranks.messages import Call, Heartbeat, Topic
from aio_ckpt.ranks.missing_ranks import HEARTBEATS_A_STALL, LostPeer, RankWait
from aio_ckpt.ranks.store import StoreClient, StoreKeys
from aio_ckpt.runtime import waiting
from aio_ckpt.runtime.error_notes import copy_to_raise
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.waiting import WaitWarning, forgiving_suspension

T = TypeVar("T")

POLL_SECS_MAX = 0.01
_POLL_SECS_A_RANK = 1e-4
"""Longest pause between two polls, per rank. The store has one thread: all ranks together poll it 1 / this a second."""
_POLL_SHARE = 1 / 8
"""A pause is this share of the wait so far: a reply is found at most that much too late."""

_CALLS_TOLD = 16
"""Ended calls of each kind that a heartbeat names, the newest ones."""


def heartbeat_pauses(stall_secs: float) -> Iterator[float]:
    """Yield the pauses before the heartbeats of a call.

    The first is short, so that the heartbeat has come when other ranks log what this rank does.
    """
    pause_secs = stall_secs / HEARTBEATS_A_STALL
    yield min(pause_secs, waiting.FIRST_LINE_SECS / 2)
    yield from itertools.repeat(pause_secs)


class Liveness(Coordinator):
    """Heartbeats and waits of one rank. The ranks of an engine share its keys in the store.

    Invariant: a rank that waits sends heartbeats. Each names the topics in which the rank waits, the calls that have
    begun and those that have ended. So every rank finds out whom it waits for in vain, even if that rank lives.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.stall_secs = math.inf
        self._client: StoreClient | None = None
        self._keys: StoreKeys | None = None
        self._name = ""
        self._is_met = False
        self._lost: dict[int, LostPeer] = {}
        """Ranks for which the last wait was in vain."""
        self._beats = 0
        self._begun: dict[str, int] = {}
        self._calls: deque[Call] = deque(maxlen=_CALLS_TOLD)
        """The newest calls that began here, with their steps."""
        self._heard: dict[str, Call] = {}
        """The newest call of each numbering in which the ranks that this rank waits for sent a message."""
        self._waits: list[Topic] = []
        self._over: defaultdict[str, deque[tuple[str, int]]] = defaultdict(lambda: deque(maxlen=_CALLS_TOLD))
        self._is_leaving = False
        """Whether this rank leaves. It waits for no reply any more, because the last rank to leave deletes the keys."""

    async def beat(self, *, has_left: bool = False) -> None:
        self._beats += 1
        await self._ask(functools.partial(self._the_keys().beat, self._own_beat(has_left=has_left)))

    async def while_beating(self, work: Callable[[], Awaitable[T]]) -> T:
        async def beat() -> None:
            for pause_secs in heartbeat_pauses(self.stall_secs):
                await anyio.sleep(pause_secs)
                await self.beat()

        result: list[T] = []
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(beat)
                result.append(await work())
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        return result[0]

    def _own_beat(self, *, has_left: bool = False) -> Heartbeat:
        over = tuple(chain.from_iterable(self._over.values()))
        newest = self._calls[-1] if self._calls else None
        return Heartbeat(self._beats, over, has_left, dict(self._begun), tuple(self._waits), newest)

    def begin_call(self, topic: Topic, *, step: int | None = None) -> None:
        call = Call(topic.kind, topic.number, step)
        kind, number = call.numbering
        self._begun[kind] = max(number, self._begun.get(kind, 0))
        self._calls.append(call)

    def end_call(self, topic: Topic) -> None:
        if topic.call is not None:
            self._over[topic.call[0]].append(topic.call)

    # -- waiting --------------------------------------------------------------------------------------

    async def _wait_for(
        self, topic: Topic, stage: str, find: Callable[[], T | None], missing: Callable[[], Awaitable[Sequence[int]]]
    ) -> T:
        """Poll ``find`` until it returns a value. Meanwhile send heartbeats, and look at the ranks that are missing.

        Raises:
            PeerFailedError: one of them will not come, judged by its heartbeat.
        """
        longest = max(POLL_SECS_MAX, _POLL_SECS_A_RANK * self.world_size)
        begun = time.monotonic()
        pauses = heartbeat_pauses(self.stall_secs)
        due = begun + next(pauses)
        wait = RankWait(topic, self._call_in(topic), stage=stage, stall_secs=self.stall_secs, name=self._name)
        warning = WaitWarning(step=None if wait.call is None else wait.call.step, rank=self.rank)
        self._waits.append(topic)
        try:
            while (found := await self._ask(find)) is None:
                if self._is_leaving:
                    raise EngineClosedError(f"{self._name}: the engine was closed while it waited in {wait.where}")
                is_beat_due, is_line_due = time.monotonic() >= due, warning.is_due
                if is_beat_due:
                    due = time.monotonic() + next(pauses)
                    await self.beat()
                if is_beat_due or is_line_due:
                    try:
                        await self._check_alive(wait, await missing())
                    except PeerFailedError:
                        found = await self._ask(find)  # a rank may have sent its message and left since the last poll
                        if found is not None:
                            return found
                        raise
                    if is_line_due:
                        is_first = warning.is_first
                        warning.log(
                            functools.partial(wait.line, heard=self._heard, leader=self.leader, is_first=is_first)
                        )
                now = time.monotonic()
                pause = min(max(now - begun, longest) * _POLL_SHARE, longest, max(due - now, 0))
                with forgiving_suspension(pause, wait.forgive, limit_secs=self.stall_secs):
                    await anyio.sleep(pause)
            return found
        finally:
            self._waits.remove(topic)

    async def _poll(self, find: Callable[[], T | None], limit_secs: float) -> T | None:
        """Poll ``find`` until it returns a value; None after ``limit_secs``. No heartbeat tells of this wait."""
        with anyio.move_on_after(limit_secs):
            while (found := await self._ask(find)) is None:  # noqa: ASYNC110 - the store has no event
                await anyio.sleep(POLL_SECS_MAX)
            return found
        return None

    def _call_in(self, topic: Topic) -> Call | None:
        """Return the call that ``topic`` is part of, as it began here; None if the topic has no number."""
        begun = (call for call in reversed(tuple(self._calls)) if call.has(topic))
        return next(begun, Call(topic.kind, topic.number) if topic.number else None)

    def _where(self, topic: Topic) -> str:
        """Return ``topic`` in the user's words."""
        call = self._call_in(topic)
        return topic.text(None if call is None else call.step)

    async def _the_leader(self) -> Sequence[int]:
        """Return the rank that any other rank waits for."""
        return (self.leader,)

    def _hear(self, topic: Topic) -> None:
        """Note that the ranks that this rank waits for have sent a message in ``topic``."""
        call = self._call_in(topic)
        if call is not None:
            kind = call.numbering[0]
            before = self._heard.pop(kind, call)
            self._heard[kind] = call if call.number >= before.number else before

    async def _check_alive(self, wait: RankWait, ranks: Sequence[int]) -> None:
        """Raise PeerFailedError if one of ``ranks`` will not come, judged by its heartbeat."""
        beats = await self._ask(functools.partial(self._the_keys().beats, ranks)) if ranks else []
        lost = wait.look(ranks, beats, self._own_beat(), is_met=self._is_met)
        if lost is not None:
            self._lost[lost.error.rank] = lost
            raise copy_to_raise(lost.error)  # kept, it must not keep the frames of the caller, and so the engine

    def _is_undecidable(self, topic: Topic) -> bool:
        """Return whether the leader closed its engine before it began the call that ``topic`` is part of."""
        call, lost = topic.call, self._lost.get(self.leader)
        beat = None if lost is None else lost.left_behind
        return call is not None and beat is not None and beat.begun.get(call[0], 0) < call[1]

    async def _ask(self, question: Callable[[], T]) -> T:
        if self._client is None:
            raise EngineClosedError(f"{self._name}: the engine was closed")
        return await self._client.ask(question, limit_secs=self.stall_secs)

    def _the_keys(self) -> StoreKeys:
        if self._keys is None:
            raise EngineClosedError(f"{self._name}: the engine was closed")
        return self._keys
