"""What ranks write into a store, and how long one that writes nothing is waited for. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from aio_ckpt.errors import PeerFailedError

__all__ = ["Failure", "Frame", "Patience", "Verdict", "Word", "failure_of", "lost", "pack", "unpack"]

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the leader decided."""

    common: bytes = b""
    """For every rank."""
    each: tuple[bytes, ...] = ()
    """By rank, instead of ``common``, where the ranks are told different things."""

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

    def error(self, topic: str, here: int) -> PeerFailedError:
        """As an error for rank ``here``."""
        whom = "this rank" if self.rank == here else f"rank {self.rank}"
        return PeerFailedError(f"{whom} failed in {topic}: {self.cause}", rank=self.rank, stage=self.stage)


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
    if isinstance(error, PeerFailedError):  # handed on: the first to fail is named
        return Failure(error.rank, error.stage, str(error))
    stage = getattr(error, "stage", "") or stage
    return Failure(rank, stage, f"{type(error).__name__}: {error}")


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


def lost(ranks: Sequence[int], topic: str, stage: str, stall_secs: float, unmet: str) -> PeerFailedError:
    """The error for ranks that gave no sign of life; ``unmet``: what they may never have opened."""
    names = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    hint = (
        f": each rank must open an engine on {unmet} (a rank that saves alone needs coordinator=SoloCoordinator())"
        if unmet
        else ": it died, hangs, or never came to this call"
    )
    return PeerFailedError(
        f"rank {names} gave no sign of life in {topic} for {stall_secs} s{hint}", rank=ranks[0], stage=stage
    )
