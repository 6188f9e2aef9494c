"""Liveness: how one rank shows the others that it lives, and how long it waits for one that does not."""

from __future__ import annotations

import functools
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import TypeVar

import anyio

from aio_ckpt.errors import EngineClosedError, PeerFailedError
from aio_ckpt.ranks.failure_detector import LivenessTimer, lost_peer
from aio_ckpt.ranks.messages import Heartbeat, call_of, numbering
from aio_ckpt.ranks.store_client import StoreClient
from aio_ckpt.ranks.store_keys import StoreKeys

__all__ = ["HEARTBEATS_A_STALL", "Liveness"]

T = TypeVar("T")

_POLL_SECS_MAX = 0.01
_POLL_SECS_A_RANK = 1e-4
"""The store is one thread: however many ranks wait for long, it is asked at most so often a second (1 / this)."""
_POLL_SHARE = 1 / 8
"""Of the wait so far, and of the longest pause: what is there is found an eighth too late, and not twice as late."""

HEARTBEATS_A_STALL = 4
"""Signs of life in ``stall_secs``: one may be late."""

_CALLS_TOLD = 16
"""Each sign of life names the last calls of each kind that ended: whoever waits in an older one waits in vain."""

_STALL_SECS = 600.0


class Liveness:
    """One rank among those that share a keys.

    Invariant: who waits gives signs of life, and each says what it waits for, what has begun and what has ended; so
    whoever is waited for in vain is found out, also where it lives.
    """

    leader = 0

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.stall_secs = _STALL_SECS
        """How long a rank may give no sign of life."""
        self._client: StoreClient | None = None
        self._keys: StoreKeys | None = None
        self._name = ""
        self._is_met = False
        self._absent: set[int] = set()
        self._silent: set[int] = set()
        """Of those absent, who gave no sign of life."""
        self._left_behind: dict[int, Heartbeat] = {}
        """Last sign of life of those that closed their engine."""
        self._beats = 0
        self._begun: dict[str, int] = {}
        self._waits: list[str] = []
        self._over: defaultdict[str, deque[tuple[str, int]]] = defaultdict(lambda: deque(maxlen=_CALLS_TOLD))
        self._is_leaving = False
        """Nothing is waited for any more: with the last rank to leave goes what could be found."""

    async def beat(self, *, has_left: bool = False) -> None:
        """See :class:`Coordinator`."""
        self._beats += 1
        await self._ask(functools.partial(self._the_keys().beat, self._own_beat(has_left=has_left)))

    def _own_beat(self, *, has_left: bool = False) -> Heartbeat:
        over = tuple(chain.from_iterable(self._over.values()))
        return Heartbeat(self._beats, over, has_left, dict(self._begun), tuple(self._waits))

    def begin_call(self, topic: str) -> None:
        """See :class:`Coordinator`."""
        call = numbering(topic)
        if call is not None:
            self._begun[call[0]] = call[1]

    def end_call(self, topic: str) -> None:
        """See :class:`Coordinator`."""
        call = call_of(topic)
        if call is not None:
            self._over[call[0]].append(call)

    # -- waiting --------------------------------------------------------------------------------------

    async def _look(self, find: Callable[[], T | None], check: Callable[[], Awaitable[None]], topic: str) -> T:
        """What ``find`` gives once it gives something; a few times in ``stall_secs`` beat and ``check()``."""
        longest = max(_POLL_SECS_MAX, _POLL_SECS_A_RANK * self.world_size)
        begun = time.monotonic()
        due = begun + self.stall_secs / HEARTBEATS_A_STALL
        self._waits.append(topic)
        try:
            while (found := await self._ask(find)) is None:
                if self._is_leaving:
                    raise EngineClosedError(f"{self._name}: the engine was closed while it waited in {topic}")
                if time.monotonic() >= due:
                    due = time.monotonic() + self.stall_secs / HEARTBEATS_A_STALL
                    await self.beat()
                    try:
                        await check()
                    except PeerFailedError:
                        if (found := await self._ask(find)) is not None:  # whoever has gone since said so before
                            return found
                        raise
                now = time.monotonic()
                pause = min(max(now - begun, longest) * _POLL_SHARE, longest)
                await anyio.sleep(min(pause, max(due - now, 0)))
            return found
        finally:
            self._waits.remove(topic)

    async def _poll(self, find: Callable[[], T | None], limit_secs: float) -> T | None:
        """What ``find`` gives once it gives something; None if that takes too long. Nobody is told of the wait."""
        with anyio.move_on_after(limit_secs):
            while (found := await self._ask(find)) is None:  # noqa: ASYNC110 - it is in the store
                await anyio.sleep(_POLL_SECS_MAX)
            return found
        return None

    async def _check_alive(self, ranks: Sequence[int], timer: LivenessTimer) -> None:
        """Raise PeerFailedError if the last sign of life of any of ``ranks`` is too long ago, or from elsewhere."""
        beats = await self._ask(functools.partial(self._the_keys().beats, ranks)) if ranks else []
        absent = lost_peer(ranks, beats, timer, own=self._own_beat(), unmet="" if self._is_met else self._name)
        if absent is not None:
            self._absent.add(absent.error.rank)
            if absent.is_silent:
                self._silent.add(absent.error.rank)
            else:
                self._silent.discard(absent.error.rank)
            if absent.left_behind is not None:
                self._left_behind[absent.error.rank] = absent.left_behind
            raise absent.error

    def _is_undecidable(self, topic: str) -> bool:
        """Whether the leader closed its engine before the call that ``topic`` is part of began there."""
        call, beat = numbering(topic), self._left_behind.get(self.leader)
        return call is not None and beat is not None and beat.begun.get(call[0], 0) < call[1]

    async def _ask(self, question: Callable[[], T]) -> T:
        if self._client is None:
            raise EngineClosedError(f"{self._name}: the engine was closed")
        return await self._client.ask(question, limit_secs=self.stall_secs)

    def _the_keys(self) -> StoreKeys:
        if self._keys is None:
            raise EngineClosedError(f"{self._name}: the engine was closed")
        return self._keys
