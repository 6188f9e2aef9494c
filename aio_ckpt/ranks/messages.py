"""What ranks write into a store, and how long one that writes nothing is waited for. Pure but for the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from aio_ckpt.errors import PeerFailedError

__all__ = [
    "WORDS",
    "Absence",
    "Beat",
    "Failure",
    "Frame",
    "Patience",
    "Verdict",
    "Word",
    "absence",
    "call_of",
    "failure_of",
    "numbering",
    "pack",
    "unpack",
]

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the leader decided."""

    common: bytes = b""
    """For every rank."""
    each: tuple[bytes, ...] = ()
    """By rank, instead of ``common``, where the ranks are told different things."""
    then: str = ""
    """The topic that follows for every rank: one that leaves after this word leaves that one."""

    def of(self, rank: int) -> bytes:
        """What ``rank`` is told."""
        return self.each[rank] if self.each else self.common


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a rank will not take part."""

    rank: int
    """Which."""
    stage: str
    """Where it was."""
    cause: str
    """Type and text of the error."""
    is_in_doubt: bool = False
    """Whether what failed may still come to be."""

    def error(self, topic: str, here: int) -> PeerFailedError:
        """As an error for rank ``here``."""
        whom = "this rank" if self.rank == here else f"rank {self.rank}"
        text = f"{whom} failed in {topic}: {self.cause}"
        error = PeerFailedError(text, rank=self.rank, stage=self.stage, cause=self.cause)
        error.in_doubt = self.is_in_doubt
        return error


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One message of one rank, appended to the others'."""

    rank: int
    """Whose."""
    body: bytes
    """The message."""
    failure: Failure | None = None
    """Instead of it."""


class Word(msgspec.Struct, frozen=True, array_like=True):
    """What the leader tells all."""

    common: bytes
    """For every rank."""
    is_each: bool = False
    """Whether every rank has a value of its own instead."""
    failure: Failure | None = None
    """Why nothing was decided."""
    then: str = ""
    """The topic that follows."""


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """One sign of life."""

    count: int
    """Of this rank, from 1."""
    over: tuple[tuple[str, int], ...] = ()
    """Calls that ended on it, the last few of each kind, as :func:`call_of` names them."""
    has_left: bool = False
    """It was the last one: the engine is closed."""
    begun: Mapping[str, int] = {}
    """Number of the newest call that began on it, by :func:`numbering`."""
    waits: tuple[str, ...] = ()
    """Topics in which it waits for other ranks now."""


_FRAMES = msgspec.msgpack.Decoder(Frame)
_BEATS = msgspec.msgpack.Decoder(Beat)
WORDS = msgspec.msgpack.Decoder(Word)
"""Made here, once: at the first decode of a type that is new to it msgspec crashes where two threads do it at once."""


def pack(frame: Frame) -> bytes:
    """A frame behind its length."""
    data = msgspec.msgpack.encode(frame)
    return len(data).to_bytes(4, "little") + data


def unpack(data: bytes) -> Iterator[Frame]:
    """All frames that were appended."""
    at = 0
    while at < len(data):
        stop = at + 4 + int.from_bytes(data[at : at + 4], "little")
        yield _FRAMES.decode(data[at + 4 : stop])
        at = stop


def failure_of(rank: int, stage: str, error: BaseException) -> Failure:
    """What to tell of ``error``, which came to ``rank`` in ``stage`` unless it says otherwise."""
    is_in_doubt = bool(getattr(error, "in_doubt", False))
    if isinstance(error, PeerFailedError):  # handed on: the first to fail is named
        return Failure(error.rank, error.stage, error.cause or str(error), is_in_doubt)
    stage = getattr(error, "stage", "") or stage
    # anyio's text of a cancellation is the address of a scope
    text = "the call was cancelled" if isinstance(error, asyncio.CancelledError) else str(error)
    return Failure(rank, stage, f"{type(error).__name__}: {text}", is_in_doubt)


_NUMBERED_TOGETHER = {"rollback": "save"}
_BEGUN_TOGETHER = {"rollback": "save", "room": "save"}


def call_of(topic: str) -> tuple[str, int] | None:
    """The numbered call that ``topic`` is part of, as ``("save", 3)``; None where there is no number.

    A rollback takes its number from the saves: where one rank rolls back and another saves, they never meet.
    """
    kind, number = _parts(topic)
    return None if number is None else (_NUMBERED_TOGETHER.get(kind, kind), number)


def numbering(topic: str) -> tuple[str, int] | None:
    """By what, and with which number, a rank counts the call that ``topic`` is part of; None where there is none."""
    kind, number = _parts(topic)
    return None if number is None else (_BEGUN_TOGETHER.get(kind, kind), number)


def _parts(topic: str) -> tuple[str, int | None]:
    kind, _, number = topic.partition(",")[0].rpartition(" ")
    return kind, int(number) if kind and number.isdecimal() else None


class Patience:
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
class Absence:
    """A rank that will not come."""

    error: PeerFailedError
    """Which, and why."""
    left_behind: Beat | None = None
    """Its last sign of life, if it said itself that it closed its engine."""
    is_silent: bool = False
    """Whether it gave no sign of life."""


def absence(
    ranks: Sequence[int], data: Sequence[bytes], patience: Patience, *, own: Beat, unmet: str
) -> Absence | None:
    """If any of ``ranks`` will not come, by the last sign of life of each.

    Args:
        ranks: which are waited for.
        data: their beats, as they stand in the store.
        patience: of this wait.
        own: the beat of who waits.
        unmet: what they may never have opened; empty if all have.
    """
    silent = patience.exhausted(ranks, data)
    for rank, found in zip(ranks, data, strict=True):
        beat = _BEATS.decode(found) if found else Beat(0)
        where = _elsewhere(rank, beat, patience, own)
        if where:
            text = f"rank {rank} does not come to {patience.topic}, it {where}"
            error = PeerFailedError(text, rank=rank, stage=patience.stage)
            return Absence(error=error, left_behind=beat if beat.has_left else None)
    return Absence(error=_silent(silent, patience, unmet), is_silent=True) if silent else None


def _silent(ranks: Sequence[int], patience: Patience, unmet: str) -> PeerFailedError:
    names = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    hint = (
        f": each rank must open an engine on {unmet} (a rank that saves alone needs coordinator=SoloCoordinator())"
        if unmet
        else ": it died, hangs, or never came to this call"
    )
    text = f"rank {names} gave no sign of life in {patience.topic} for {patience.stall_secs} s{hint}"
    return PeerFailedError(text, rank=ranks[0], stage=patience.stage)


_SAME_ORDER = "every rank must make the same calls in the same order; engines opened anew on all ranks begin anew"


def _elsewhere(rank: int, beat: Beat, patience: Patience, own: Beat) -> str:
    """Where a rank is that lives, but comes to the topic no more: it ended that call, or its engine, or waits in turn.

    Only what a rank says has ended counts: saves, loads and rollbacks may be under way beside each other, and a later
    one may be ahead of an earlier one.
    """
    if call_of(patience.topic) in beat.over:
        return f"is elsewhere: that call has ended there; {_SAME_ORDER}"
    if beat.has_left:
        return "has closed its engine"
    other = next((topic for topic in beat.waits if _never_meet(patience.topic, own, topic, beat)), None)
    if patience.is_apart_for_long(rank, is_apart=other is not None and patience.has_moved(rank)):
        return f"waits in {other} for this one, which has not come there; {_SAME_ORDER}"
    return ""


def _never_meet(here: str, own: Beat, there: str, beat: Beat) -> bool:
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
