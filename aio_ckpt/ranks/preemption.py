"""Preemption, agreed: a signal to one rank turns ``preempted`` true on all, at the same look."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future

import anyio

from aio_ckpt.errors import AioCkptError, StallError
from aio_ckpt.ranks.coordinator import Exchange
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.runtime.portal import Lock, Portal
from aio_ckpt.runtime.signals import Preemption

__all__ = ["AgreedPreemption"]

_log = logging.getLogger("aio_ckpt")
_LOOKS: Exchange[int, int] = Exchange(int, int, stage="agree")
"""How often each rank has looked; the first look that finds the notice."""
_FLAG = "preempted"
_LOOK_SECS = 0.2
_LOOK_SECS_A_RANK = 1e-4
"""The store is one thread, and all ranks look for the flag all the time."""


class AgreedPreemption:
    """Whether the process is to end, for every rank the same at the same look.

    A look is a call of :meth:`poll`: every rank looks as often as the others, at the same places of its program. Once
    a signal came to any rank, each says how often it has looked and looks no further until the leader has named the
    first look that finds the notice: the one after the last that anybody has had. That takes milliseconds, for the
    engines answer, not the trainers.
    """

    def __init__(self, members: Membership, portal: Portal) -> None:
        self.local = Preemption()
        """Of this process."""
        self._members = members
        self._portal = portal
        self._lock = Lock()
        self._looks = 0
        self._is_held = False
        self._first: int | None = None
        self._decided: Future[None] = Future()
        self._is_watching = False

    @property
    def is_on(self) -> bool:
        """Whether a look has found the notice; itself no look."""
        return self._is_found(self._looks)

    def poll(self) -> bool:
        """Whether the process is to end; stays True.

        Raises:
            StallError: another rank does not answer.
        """
        with self._lock:
            self._looks += 1
            look, is_held = self._looks, self._is_held
        if is_held and self._first is None:
            try:
                self._decided.result(2 * self._members.stall_secs)
            except TimeoutError:
                raise StallError("preempted: the other ranks do not answer") from None
        return self._is_found(look)

    def _is_found(self, look: int) -> bool:
        if not self._is_watching:  # alone, or no rank handles signals
            return self.local.has_come
        return self._first is not None and look >= self._first

    def watch(self) -> None:
        """Begin to look out for signals to other ranks; alone there are none, and a signal counts at once."""
        if self._members.are_several and not self._is_watching:
            self._is_watching = True
            self._portal.submit(self._watch)

    async def _watch(self) -> None:
        coordinator = self._members.coordinator
        pause = max(_LOOK_SECS, _LOOK_SECS_A_RANK * coordinator.world_size)
        try:
            await self._members.met()
            while not (self.local.has_come or await coordinator.is_raised(_FLAG)):  # noqa: ASYNC110 - or in a handler
                await anyio.sleep(pause)
            await coordinator.raise_flag(_FLAG)
            with self._lock:
                self._is_held, looks = True, self._looks
            self._first = await _LOOKS.run(coordinator, "the preemption", looks, _after_all)
        except AioCkptError as error:
            _log.error("preemption is not agreed, this rank goes by its own signal: %s", error)
        finally:
            with self._lock:
                if self._first is None and self.local.has_come:
                    self._first = self._looks + 1
                self._is_held = False
            self._decided.set_result(None)


async def _after_all(looks: Sequence[int]) -> int:
    return max(looks) + 1
