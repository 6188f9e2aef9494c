"""Liveness: how a rank sends heartbeats, waits for other ranks, and finds out which of them will not come."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import anyio

from aio_ckpt.errors import EngineClosedError, PeerFailedError
from aio_ckpt.ranks.exchange import Coordinator
from aio_ckpt.ranks.messages import HEARTBEATS, Call, Heartbeat, Topic
from aio_ckpt.ranks.missing import SHOWN, Awaited, Heard, line_about, names_of
from aio_ckpt.ranks.store import StoreClient, StoreKeys
from aio_ckpt.runtime import waiting
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.waiting import WaitWarning

T = TypeVar("T")

_POLL_SECS_MAX = 0.01
_POLL_SECS_A_RANK = 1e-4
"""Longest pause between two polls, per rank. The store has one thread: all ranks together poll it 1 / this a second."""
_POLL_SHARE = 1 / 8
"""A pause is this share of the wait so far: a reply is found at most that much too late."""

HEARTBEATS_A_STALL = 4
"""Heartbeats within ``stall_secs``. Several, because one may be late."""

_CALLS_TOLD = 16
"""Ended calls of each kind that a heartbeat names, the newest ones."""


def heartbeat_pauses(stall_secs: float) -> Iterator[float]:
    """Yield the pauses before the heartbeats of a call.

    The first is short, so that the heartbeat has come when other ranks log what this rank does.
    """
    pause_secs = stall_secs / HEARTBEATS_A_STALL
    yield min(pause_secs, waiting.FIRST_LINE_SECS / 2)
    yield from itertools.repeat(pause_secs)


class LivenessTimer:
    """Timer of one wait for other ranks: its topic, and when the heartbeat of each rank last changed."""

    def __init__(self, stall_secs: float, topic: Topic, stage: str, *, step: int | None = None) -> None:
        """``step``: that of the call which the topic is part of, for errors; None if it is not known."""
        self.stall_secs = stall_secs
        self.topic = topic
        self.stage = stage
        self.where = topic.text(step)
        """The topic in the user's words."""
        self._began = time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._apart: dict[int, float] = {}

    def exhausted(self, ranks: Sequence[int], beats: Sequence[bytes]) -> list[int]:
        """Return the ranks whose heartbeat has not changed for ``stall_secs``; ``beats`` are the newest, by rank."""
        now = time.monotonic()
        for rank, beat in zip(ranks, beats, strict=True):
            known = self._seen.get(rank)
            if known is None:
                self._seen[rank] = (beat, self._began)
            elif known[0] != beat:
                self._seen[rank] = (beat, now)
        return [rank for rank in ranks if now - self._seen[rank][1] >= self.stall_secs]

    def silent_secs(self, rank: int) -> float:
        """Return the seconds since this wait saw a new heartbeat of ``rank``, or began."""
        return time.monotonic() - self._seen[rank][1]

    def has_moved(self, rank: int) -> bool:
        """Return whether the heartbeat of ``rank`` has changed during this wait.

        An older heartbeat may name waits that are over.
        """
        return rank in self._seen and self._seen[rank][1] > self._began

    def is_apart_for_long(self, rank: int, *, is_apart: bool) -> bool:
        """Note whether ``rank`` waits in another call now.

        Returns whether it did at every check for half of ``stall_secs``.
        """
        now = time.monotonic()
        self._apart = {**self._apart, rank: self._apart.get(rank, now) if is_apart else now}
        return now - self._apart[rank] >= self.stall_secs / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPeer:
    """A rank that this wait waits for in vain."""

    error: PeerFailedError
    """Names the rank and says why it will not come."""
    left_behind: Heartbeat | None = None
    """Last heartbeat of the rank if it has closed its engine, else None."""
    is_silent: bool = False
    """Whether the rank gave no heartbeat for ``stall_secs``."""


def lost_peer(
    ranks: Sequence[int], data: Sequence[bytes], timer: LivenessTimer, *, own: Heartbeat, unmet: str
) -> LostPeer | None:
    """Return the first of ``ranks`` that will not come, judged by its last heartbeat; None if all may come.

    Args:
        ranks: the ranks that this rank waits for.
        data: their encoded heartbeats, as they stand in the store; empty bytes for none.
        timer: the timer of this wait.
        own: the heartbeat of this rank.
        unmet: name of the engine if the ranks have not met in it yet, else empty.
    """
    silent = timer.exhausted(ranks, data)
    for rank, found in zip(ranks, data, strict=True):
        beat = HEARTBEATS.decode(found) if found else Heartbeat(0)
        where = _absence(rank, beat, timer, own)
        if where:
            text = f"rank {rank} does not come to {timer.where}, it {where}"
            error = PeerFailedError(text, rank=rank, stage=timer.stage)
            return LostPeer(error=error, left_behind=beat if beat.has_left else None)
    return LostPeer(error=_silent(silent, timer, unmet), is_silent=True) if silent else None


def _silent(ranks: Sequence[int], timer: LivenessTimer, unmet: str) -> PeerFailedError:
    hint = (
        f": each rank must open an engine on {unmet} (a rank that saves alone needs coordinator=SoloCoordinator())"
        if unmet
        else ": it died, hangs, or never came to this call"
    )
    text = f"{names_of(ranks)} gave no sign of life in {timer.where} for {timer.stall_secs} s{hint}"
    return PeerFailedError(text, rank=ranks[0], stage=timer.stage)


_SAME_ORDER = "every rank must make the same calls in the same order; engines opened anew on all ranks begin anew"


def _absence(rank: int, beat: Heartbeat, timer: LivenessTimer, own: Heartbeat) -> str:
    """Return why a living rank will not come to the topic; '' if it may come.

    The rank has ended that call, has closed its engine, or waits for this rank in another call. A later call proves
    nothing: saves, loads and rollbacks run beside each other, and a later one may overtake an earlier one.
    """
    if timer.topic.call in beat.over:
        return f"is elsewhere: that call has ended there; {_SAME_ORDER}"
    if beat.has_left:
        return "has closed its engine"
    other = next((topic for topic in beat.waits if _never_meet(timer.topic, own, topic, beat)), None)
    is_apart = timer.is_apart_for_long(rank, is_apart=other is not None and timer.has_moved(rank))
    if other is not None and is_apart:
        step = beat.call.step if beat.call and beat.call.has(other) else None
        return f"waits in {other.text(step)} for this one, which has not come there; {_SAME_ORDER}"
    return ""


def _never_meet(here: Topic, own: Heartbeat, there: Topic, beat: Heartbeat) -> bool:
    """Return whether this rank, which waits in ``here``, and the other, which waits in ``there``, wait for each other.

    They do if neither has begun the call of the other. Another thread of a program may still begin it, so the caller
    waits for a while before it decides.
    """
    one, other = here.call, there.call
    if one is None or other is None:
        return False
    if one == other:  # one call in two topics: the ranks wait for each other if the topics are of different kinds
        return here.kind != there.kind
    (kind, number), (kind_there, number_there) = one, other
    is_begun_here = own.begun.get(kind_there, 0) >= number_there and other not in own.over
    return kind != kind_there and beat.begun.get(kind, 0) < number and not is_begun_here


class Liveness(Coordinator):
    """Heartbeats and waits of one rank. The ranks of an engine share its keys in the store.

    Invariant: a rank that waits sends heartbeats. Each names the topics in which the rank waits, the calls that have
    begun and those that have ended. So every rank finds out whom it waits for in vain, even if that rank lives.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.stall_secs = math.inf
        """Time without a heartbeat after which a rank is lost."""
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
        self._heard: dict[str, int] = {}
        self._last_heard: Call | None = None
        self._waits: list[Topic] = []
        self._over: defaultdict[str, deque[tuple[str, int]]] = defaultdict(lambda: deque(maxlen=_CALLS_TOLD))
        self._is_leaving = False
        """Whether this rank leaves. It waits for no reply any more, because the last rank to leave deletes the keys."""

    async def beat(self, *, has_left: bool = False) -> None:
        """See :class:`Coordinator`."""
        self._beats += 1
        await self._ask(functools.partial(self._the_keys().beat, self._own_beat(has_left=has_left)))

    async def while_beating(self, work: Callable[[], Awaitable[T]]) -> T:
        """See :class:`Coordinator`."""

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
        """See :class:`Coordinator`."""
        call = Call(topic.kind, topic.number, step)
        kind, number = call.numbering
        self._begun[kind] = max(number, self._begun.get(kind, 0))
        self._calls.append(call)

    def end_call(self, topic: Topic) -> None:
        """See :class:`Coordinator`."""
        if topic.call is not None:
            self._over[topic.call[0]].append(topic.call)

    # -- waiting --------------------------------------------------------------------------------------

    async def _wait_for(self, find: Callable[[], T | None], check: Callable[[], Awaitable[Awaited]], topic: Topic) -> T:
        """Poll ``find`` until it returns a value.

        Meanwhile send heartbeats and call ``check()``, which may raise. If the wait lasts, log the ranks that
        ``check`` returns.
        """
        longest = max(_POLL_SECS_MAX, _POLL_SECS_A_RANK * self.world_size)
        begun = time.monotonic()
        pauses = heartbeat_pauses(self.stall_secs)
        due = begun + next(pauses)
        call = self._call_in(topic)
        lines = WaitWarning(step=self._step_of(topic), rank=self.rank)
        self._waits.append(topic)
        try:
            while (found := await self._ask(find)) is None:
                if self._is_leaving:
                    raise EngineClosedError(
                        f"{self._name}: the engine was closed while it waited in {self._where(topic)}"
                    )
                is_beat_due, is_line_due = time.monotonic() >= due, lines.is_due
                if is_beat_due:
                    due = time.monotonic() + next(pauses)
                    await self.beat()
                if is_beat_due or is_line_due:
                    try:
                        awaited = await check()
                    except PeerFailedError:
                        if (
                            found := await self._ask(find)
                        ) is not None:  # a rank may send its message and leave between poll and check
                            return found
                        raise
                    if is_line_due:
                        lines.tell(functools.partial(self._line_about, topic, call, awaited, lines.is_first))
                now = time.monotonic()
                pause = min(max(now - begun, longest) * _POLL_SHARE, longest)
                await anyio.sleep(min(pause, max(due - now, 0)))
            return found
        finally:
            self._waits.remove(topic)

    async def _poll(self, find: Callable[[], T | None], limit_secs: float) -> T | None:
        """Poll ``find`` until it returns a value; None after ``limit_secs``. No heartbeat tells of this wait."""
        with anyio.move_on_after(limit_secs):
            while (found := await self._ask(find)) is None:  # noqa: ASYNC110 - the store has no event
                await anyio.sleep(_POLL_SECS_MAX)
            return found
        return None

    def _call_in(self, topic: Topic) -> Call | None:
        """Return the call that ``topic`` is part of, as it began here; None if the topic has no number."""
        begun = (call for call in reversed(tuple(self._calls)) if call.has(topic))
        return next(begun, Call(topic.kind, topic.number) if topic.number else None)

    def _step_of(self, topic: Topic) -> int | None:
        """Return the step of the call that ``topic`` is part of; None if there is none, or it is not known yet."""
        call = self._call_in(topic)
        return None if call is None else call.step

    def _where(self, topic: Topic) -> str:
        """Return ``topic`` in the user's words."""
        return topic.text(self._step_of(topic))

    def _timer(self, topic: Topic, stage: str) -> LivenessTimer:
        return LivenessTimer(self.stall_secs, topic, stage, step=self._step_of(topic))

    def _hear(self, topic: Topic) -> None:
        """Note that the ranks that this rank waits for have sent a message in ``topic``."""
        call = self._call_in(topic)
        if call is not None:
            kind, number = call.numbering
            self._heard[kind] = max(number, self._heard.get(kind, 0))
            self._last_heard = call

    def _line_about(self, topic: Topic, call: Call | None, awaited: Awaited, is_first: bool, waited: str) -> str:
        return line_about(
            topic,
            call,
            awaited,
            Heard(numbers=self._heard, last=self._last_heard),
            waited=waited,
            name=self._name,
            leader=self.leader,
            heartbeat_secs=self.stall_secs / HEARTBEATS_A_STALL,
            is_first=is_first,
        )

    async def _check_alive(self, ranks: Sequence[int], timer: LivenessTimer) -> Awaited:
        """Return what is known of ``ranks``; raise PeerFailedError if one will not come, judged by its heartbeat."""
        beats = await self._ask(functools.partial(self._the_keys().beats, ranks)) if ranks else []
        absent = lost_peer(ranks, beats, timer, own=self._own_beat(), unmet="" if self._is_met else self._name)
        if absent is not None:
            self._lost[absent.error.rank] = absent
            raise absent.error
        return Awaited(
            ranks=ranks,
            beats=[HEARTBEATS.decode(beat) if beat else None for beat in beats[:SHOWN]],
            silent_secs=[timer.silent_secs(rank) for rank in ranks[:SHOWN]],
        )

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
