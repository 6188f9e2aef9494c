"""What a leaf is stored as, and the mark of values that each rank stores for itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

__all__ = ["LeafKind", "PerRank", "StockCopy", "UntrustedObject"]


class LeafKind(IntEnum):
    """What a leaf is stored as. The numbers are part of the on-disk skeleton."""

    TENSOR = 0
    ARRAY = 1
    """A numpy array whose dtype torch has: stored as a tensor item."""
    OBJECT = 2
    SCALAR_ARRAY = 3
    """A numpy scalar: stored as a 0-dim tensor item."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a value that each rank stores and gets back for itself (RNG state, data position)."""

    value: object
    """Any state that ``save`` takes."""


@dataclass(frozen=True, slots=True)
class StockCopy:
    """A second item of a container that stock DCP stores as one object and we leaf by leaf: as stock stores it."""

    value: object
    """The container."""


@dataclass(frozen=True, slots=True)
class UntrustedObject:
    """Stands in the place of an object that ``read(skip_untrusted=True)`` left unread: only running code reads it."""

    name: str
    """Name of the leaf."""
    reason: str
    """Why it was not read, and what would read it."""
