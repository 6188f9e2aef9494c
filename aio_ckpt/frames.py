"""What ranks write into a store, and how long one that writes nothing is waited for. Pure but for the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from aio_ckpt.errors import PeerFailedError

__all__ = [
    "Beat",
    "Failure",
    "Frame",
    "Patience",
    "Verdict",
    "Word",
    "absence",
    "call_of",
    "failure_of",
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
        error = PeerFailedError(f"{whom} failed in {topic}: {self.cause}", rank=self.rank, stage=self.stage)
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
    """Calls that ended on it, the last few, as :func:`call_of` names them."""
    has_left: bool = False
    """It was the last one: the engine is closed."""


def pack(frame: Frame) -> bytes:
    """A frame behind its length."""
    data = msgspec.msgpack.encode(frame)
    return len(data).to_bytes(4, "little") + data


def unpack(data: bytes) -> Iterator[Frame]:
    """All frames that were appended."""
    at = 0
    while at < len(data):
        stop = at + 4 + int.from_bytes(data[at : at + 4], "little")
        yield msgspec.msgpack.decode(data[at + 4 : stop], type=Frame)
        at = stop


def failure_of(rank: int, stage: str, error: BaseException) -> Failure:
    """What to tell of ``error``, which came to ``rank`` in ``stage`` unless it says otherwise."""
    is_in_doubt = bool(getattr(error, "in_doubt", False))
    if isinstance(error, PeerFailedError):  # handed on: the first to fail is named
        return Failure(error.rank, error.stage, str(error), is_in_doubt)
    stage = getattr(error, "stage", "") or stage
    # anyio's text of a cancellation is the address of a scope
    text = "the call was cancelled" if isinstance(error, asyncio.CancelledError) else str(error)
    return Failure(rank, stage, f"{type(error).__name__}: {text}", is_in_doubt)


_NUMBERED_TOGETHER = {"rollback": "save"}


def call_of(topic: str) -> tuple[str, int] | None:
    """The numbered call that ``topic`` is part of, as ``("save", 3)``; None where there is no number.

    A rollback takes its number from the saves: where one rank rolls back and another saves, they never meet.
    """
    kind, _, number = topic.partition(",")[0].rpartition(" ")
    return (_NUMBERED_TOGETHER.get(kind, kind), int(number)) if kind and number.isdecimal() else None


class Patience:
    """When each rank was last seen to move."""

    def __init__(self, stall_secs: float) -> None:
        self.stall_secs = stall_secs
        self._began = time.monotonic()
        self._seen: dict[int, tuple[bytes, float]] = {}

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


def absence(
    ranks: Sequence[int], beats: Sequence[bytes], patience: Patience, topic: str, stage: str, unmet: str
) -> PeerFailedError | None:
    """The error if any of ``ranks`` will not come to ``topic``; ``unmet``: what they may never have opened."""
    silent = patience.exhausted(ranks, beats)
    return _elsewhere(ranks, beats, topic, stage) or (
        _silent(silent, topic, stage, patience.stall_secs, unmet) if silent else None
    )


def _silent(ranks: Sequence[int], topic: str, stage: str, stall_secs: float, unmet: str) -> PeerFailedError:
    names = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    hint = (
        f": each rank must open an engine on {unmet} (a rank that saves alone needs coordinator=SoloCoordinator())"
        if unmet
        else ": it died, hangs, or never came to this call"
    )
    return PeerFailedError(
        f"rank {names} gave no sign of life in {topic} for {stall_secs} s{hint}", rank=ranks[0], stage=stage
    )


def _elsewhere(ranks: Sequence[int], beats: Sequence[bytes], topic: str, stage: str) -> PeerFailedError | None:
    """The error if any of ``ranks`` lives, but comes to ``topic`` no more: it ended that call, or its engine.

    Only what a rank says has ended counts: saves, loads and rollbacks may be under way beside each other, and a later
    one may be ahead of an earlier one.
    """
    call = call_of(topic)
    for rank, data in zip(ranks, beats, strict=True):
        beat = msgspec.msgpack.decode(data, type=Beat) if data else Beat(0)
        if call in beat.over:
            text = "is elsewhere: that call has ended there; every rank must make the same calls in the same order"
        elif beat.has_left:
            text = "has closed its engine"
        else:
            continue
        return PeerFailedError(f"rank {rank} does not come to {topic}, it {text}", rank=rank, stage=stage)
    return None
