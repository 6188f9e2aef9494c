"""Failure detection: which rank will not come, by the last heartbeat of each. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from aio_ckpt.errors import PeerFailedError
from aio_ckpt.ranks.messages import HEARTBEATS, Heartbeat, call_of, numbering

__all__ = ["LivenessTimer", "LostPeer", "lost_peer"]

_SHOWN = 5


class LivenessTimer:
    """One wait for other ranks: what for, and when each was last seen to move."""

    def __init__(self, stall_secs: float, topic: str, stage: str) -> None:
        self.stall_secs = stall_secs
        self.topic = topic
        self.stage = stage
        self._began = time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._apart: dict[int, float] = {}

    def exhausted(self, ranks: Sequence[int], beats: Sequence[bytes]) -> list[int]:
        """Ranks whose beat has not changed for ``stall_secs``."""
        now = time.monotonic()
        for rank, beat in zip(ranks, beats, strict=True):
            known = self._seen.get(rank)
            if known is None:
                self._seen[rank] = (beat, self._began)
            elif known[0] != beat:
                self._seen[rank] = (beat, now)
        return [rank for rank in ranks if now - self._seen[rank][1] >= self.stall_secs]

    def has_moved(self, rank: int) -> bool:
        """Whether ``rank`` gave a sign of life during this wait: an older one tells of waits that may be over."""
        return rank in self._seen and self._seen[rank][1] > self._began

    def is_apart_for_long(self, rank: int, *, is_apart: bool) -> bool:
        """Whether ``rank`` has waited in another call at every look for half of ``stall_secs``."""
        now = time.monotonic()
        self._apart = {**self._apart, rank: self._apart.get(rank, now) if is_apart else now}
        return now - self._apart[rank] >= self.stall_secs / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LostPeer:
    """A rank that will not come."""

    error: PeerFailedError
    """Which, and why."""
    left_behind: Heartbeat | None = None
    """Its last sign of life, if it said itself that it closed its engine."""
    is_silent: bool = False
    """Whether it gave no sign of life."""


def lost_peer(
    ranks: Sequence[int], data: Sequence[bytes], timer: LivenessTimer, *, own: Heartbeat, unmet: str
) -> LostPeer | None:
    """If any of ``ranks`` will not come, by the last sign of life of each.

    Args:
        ranks: which are waited for.
        data: their beats, as they stand in the store.
        timer: of this wait.
        own: the beat of who waits.
        unmet: what they may never have opened; empty if all have.
    """
    silent = timer.exhausted(ranks, data)
    for rank, found in zip(ranks, data, strict=True):
        beat = HEARTBEATS.decode(found) if found else Heartbeat(0)
        where = _elsewhere(rank, beat, timer, own)
        if where:
            text = f"rank {rank} does not come to {timer.topic}, it {where}"
            error = PeerFailedError(text, rank=rank, stage=timer.stage)
            return LostPeer(error=error, left_behind=beat if beat.has_left else None)
    return LostPeer(error=_silent(silent, timer, unmet), is_silent=True) if silent else None


def _silent(ranks: Sequence[int], timer: LivenessTimer, unmet: str) -> PeerFailedError:
    names = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    hint = (
        f": each rank must open an engine on {unmet} (a rank that saves alone needs coordinator=SoloCoordinator())"
        if unmet
        else ": it died, hangs, or never came to this call"
    )
    text = f"rank {names} gave no sign of life in {timer.topic} for {timer.stall_secs} s{hint}"
    return PeerFailedError(text, rank=ranks[0], stage=timer.stage)


_SAME_ORDER = "every rank must make the same calls in the same order; engines opened anew on all ranks begin anew"


def _elsewhere(rank: int, beat: Heartbeat, timer: LivenessTimer, own: Heartbeat) -> str:
    """Where a rank is that lives, but comes to the topic no more: it ended that call, or its engine, or waits in turn.

    Only what a rank says has ended counts: saves, loads and rollbacks may be under way beside each other, and a later
    one may be ahead of an earlier one.
    """
    if call_of(timer.topic) in beat.over:
        return f"is elsewhere: that call has ended there; {_SAME_ORDER}"
    if beat.has_left:
        return "has closed its engine"
    other = next((topic for topic in beat.waits if _never_meet(timer.topic, own, topic, beat)), None)
    if timer.is_apart_for_long(rank, is_apart=other is not None and timer.has_moved(rank)):
        return f"waits in {other} for this one, which has not come there; {_SAME_ORDER}"
    return ""


def _never_meet(here: str, own: Heartbeat, there: str, beat: Heartbeat) -> bool:
    """Whether who waits ``here`` and who waits ``there`` wait for each other: neither has begun the other's call.

    One of them may still come, from another thread of its program: it is given time.
    """
    one, other = numbering(here), numbering(there)
    if one is None or other is None:
        return False
    if one == other:  # which one is it, then?
        return call_of(here) == call_of(there) and here.split()[0] != there.split()[0]
    (kind, number), (kind_there, number_there) = one, other
    is_begun_here = own.begun.get(kind_there, 0) >= number_there and call_of(there) not in own.over
    return kind != kind_there and beat.begun.get(kind, 0) < number and not is_begun_here
