"""Topics of the ranks, and the messages about them that ranks write into a store. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from aio_ckpt.ranks.failure import Failure
from aio_ckpt.runtime.waiting import call_text

_NUMBERED_WITH_SAVES = frozenset({"rollback", "delete", "remove"})
_PARTS = {
    "room": "whether there is room",
    "planned": "once the ranks have planned it",
    "outcome": "how it ended",
    "poll": "which poll finds its end",
}
"""By part of a topic, what messages say of it."""


class Topic(NamedTuple):
    """What the ranks agree on in one exchange, alike on every rank."""

    kind: str
    """Method of a numbered call, such as ``save``; else the name by which messages know the topic."""
    number: int = 0
    """Number of the call, from 1, the same on every rank; 0 if the topic is part of no numbered call."""
    part: str = ""
    """Part of the call that the ranks agree on; empty for its first or only one."""

    @property
    def key(self) -> str:
        """Prefix of the topic's keys in the store."""
        return " ".join(map(str, filter(None, self)))

    @property
    def call(self) -> tuple[str, int] | None:
        """Numbered call that the topic is part of, as ``("save", 3)``; None if there is none.

        Saves, rollbacks, deletions and removals share one numbering, so ranks that call different ones never meet in
        one topic.
        """
        return ("save" if self.kind in _NUMBERED_WITH_SAVES else self.kind, self.number) if self.number else None

    def text(self, step: int | None = None) -> str:
        """Return the topic in the user's words: "the save of step 2"; ``step`` is that of its call, if it is known."""
        part = _PARTS.get(self.part, self.part)
        if step is not None:
            return f"the {self.kind} of step {step}" + (f" ({part})" if part else "")
        notes = ", ".join(filter(None, [f"call {self.number}" if self.number else "", part]))
        return (f"{self.kind}()" if self.number else self.kind) + (f" ({notes})" if notes else "")


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """Message of one rank. The ranks append their frames to one value of the store."""

    rank: int
    body: bytes | None
    """The encoded message; empty if ``failure`` is set; None if it is stored under a key of its own."""
    failure: Failure | None = None
    """Why the rank sends no message; None if it sends one."""


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Reply of the leader, which all ranks read."""

    common: bytes
    """Reply to every rank; empty if ``is_each``."""
    is_each: bool = False
    """Whether each rank's reply is stored under a key of its own."""
    failure: Failure | None = None
    """Why the leader decided nothing; None if it decided."""
    then: Topic | None = None
    """Topic in which every rank goes on; None if none follows. A rank that fails after this reply aborts that topic."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One numbered call of a rank."""

    kind: str
    """Name of the method: ``save``, ``load``, ``rollback``, ``delete`` or ``remove``."""
    number: int
    step: int | None = None
    """Step that the call names; None if it names none, or if that is not known yet."""

    @property
    def numbering(self) -> tuple[str, int]:
        """Kind and number by which a rank counts the calls that it begins; see :attr:`Topic.call`."""
        return Topic(self.kind, self.number).call or (self.kind, self.number)

    @property
    def text(self) -> str:
        """The call in the user's words."""
        return call_text(self.kind, self.step)

    def has(self, topic: Topic) -> bool:
        """Return whether ``topic`` is part of this call."""
        return topic.call == self.numbering


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """Sign of life of a rank."""

    count: int
    """Number of the heartbeat, from 1."""
    over: tuple[tuple[str, int], ...] = ()
    """Calls that ended on the rank, the last few of each kind, as :attr:`Topic.call` names them."""
    has_left: bool = False
    """Whether this is the rank's last heartbeat: it has closed its engine."""
    begun: Mapping[str, int] = {}
    """Number of the newest call that began on the rank, by the kind of :attr:`Topic.call`."""
    waits: tuple[Topic, ...] = ()
    """Topics in which the rank waits for other ranks now."""
    call: Call | None = None
    """The newest call that began on the rank; None if there was none."""


_FRAMES = msgspec.msgpack.Decoder(Frame)
HEARTBEATS = msgspec.msgpack.Decoder(Heartbeat)
REPLIES = msgspec.msgpack.Decoder(Reply)
"""Decoders made once, at import: msgspec crashes if two threads decode a type that is new to it at the same time."""


def pack(frame: Frame) -> bytes:
    """Return the length of a frame, 4 bytes little-endian, and the frame."""
    data = msgspec.msgpack.encode(frame)
    return len(data).to_bytes(4, "little") + data


def unpack(data: bytes) -> Iterator[Frame]:
    """Yield the frames of a value to which :func:`pack` ed frames were appended."""
    at = 0
    while at < len(data):
        stop = at + 4 + int.from_bytes(data[at : at + 4], "little")
        yield _FRAMES.decode(data[at + 4 : stop])
        at = stop
