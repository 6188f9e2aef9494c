"""The messages that ranks write into a store, and how a topic names the call that it is part of. Pure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from aio_ckpt.errors import PeerFailedError

__all__ = [
    "HEARTBEATS",
    "REPLIES",
    "Decision",
    "Failure",
    "Frame",
    "Heartbeat",
    "Reply",
    "call_of",
    "failure_of",
    "numbering",
    "pack",
    "unpack",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the leader decided."""

    common: bytes = b""
    """For every rank."""
    each: tuple[bytes, ...] = ()
    """By rank, instead of ``common``, where the ranks are told different things."""
    then: str = ""
    """The topic that follows for every rank: one that leaves after this reply leaves that one."""

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


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """What the leader tells all."""

    common: bytes
    """For every rank."""
    is_each: bool = False
    """Whether every rank has a value of its own instead."""
    failure: Failure | None = None
    """Why nothing was decided."""
    then: str = ""
    """The topic that follows."""


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
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
HEARTBEATS = msgspec.msgpack.Decoder(Heartbeat)
REPLIES = msgspec.msgpack.Decoder(Reply)
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
