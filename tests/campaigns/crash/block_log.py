"""Pure: the log of a disk, and what may be on the disk after the power fails at any point of it.

A write is on the disk for certain once a flush came after it. Until then the disk may hold it, or not, or some of its
sectors; and any of the writes since the last flush, whatever their order.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["FLUSH", "MARK", "SECTOR_BYTES", "WRITE", "Crash", "Entry", "pack", "parse", "prefixes", "reorderings"]

WRITE, FLUSH, MARK = b"W", b"F", b"M"
SECTOR_BYTES = 512
"""What a disk writes whole."""
_HEAD = struct.Struct("<cQI")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the log."""

    kind: bytes
    """``WRITE``, ``FLUSH`` or ``MARK``."""
    offset: int
    """Of a write, in bytes."""
    data: bytes
    """Of a write; a mark's text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """What the disk holds after one power loss."""

    name: str
    """Where in the log, and how."""
    end: int
    """Entries that came before."""
    writes: Sequence[Entry]
    """What of them is on the disk, in the order to apply it."""


def pack(kind: bytes, offset: int, data: bytes) -> bytes:
    """An entry as bytes."""
    return _HEAD.pack(kind, offset, len(data)) + data


def parse(log: bytes) -> list[Entry]:
    """The entries of a log."""
    entries, at = [], 0
    while at < len(log):
        kind, offset, nbytes = _HEAD.unpack_from(log, at)
        at += _HEAD.size
        entries.append(Entry(kind, offset, log[at : at + nbytes]))
        at += nbytes
    return entries


def _ends(entries: Sequence[Entry], first: int) -> list[int]:
    """Prefixes that end after a write or a mark, from entry ``first`` on; a flush changes nothing on such a disk."""
    return [end for end in range(first + 1, len(entries) + 1) if entries[end - 1].kind != FLUSH]


def prefixes(entries: Sequence[Entry], first: int) -> Iterator[Crash]:
    """Every prefix: a disk that writes in order and loses everything after some write."""
    for end in _ends(entries, first):
        writes = [entry for entry in entries[:end] if entry.kind == WRITE]
        yield Crash(name=f"prefix {end}", end=end, writes=writes)


def reorderings(entries: Sequence[Entry], first: int, *, count: int, rng: random.Random) -> Iterator[Crash]:
    """``count`` samples: a prefix of which all that is flushed stands, and any of the rest, some of it torn."""
    for number in range(count):
        end = rng.randint(first + 1, len(entries))
        flushed = max((at + 1 for at in range(end) if entries[at].kind == FLUSH), default=0)
        kept = [entry for entry in entries[:flushed] if entry.kind == WRITE]
        for entry in entries[flushed:end]:
            if entry.kind == WRITE:
                kept += _lost_in_part(entry, rng)
        yield Crash(name=f"reordering {number} of {end}", end=end, writes=kept)


def _lost_in_part(entry: Entry, rng: random.Random) -> list[Entry]:
    """What a disk may have kept of one write: a third each of nothing, some of its sectors, and all."""
    fate = rng.randrange(3)
    if fate == 0:
        return []
    if fate == 1:
        return [
            Entry(WRITE, entry.offset + at, entry.data[at : at + SECTOR_BYTES])
            for at in range(0, len(entry.data), SECTOR_BYTES)
            if rng.random() < 0.5
        ]
    return [entry]
