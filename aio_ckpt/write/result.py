"""What the write stage did, and the post-condition of every save."""

from __future__ import annotations

from dataclasses import dataclass

from aio_ckpt.errors import PlanChangedError
from aio_ckpt.reports import WriteMode

__all__ = ["WriteResult", "check_complete"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """What the write stage did, per rank; enough to render the rank's manifest."""

    image_bytes: int
    """Length of the data file, padding included."""
    file_crc32: int
    """CRC32 of the whole data file."""
    sums: bytes
    """CRC32 of each block of each item's raw bytes, little-endian, items in the order of the layout."""
    mode: WriteMode
    """How the bytes went to the disk."""
    chunks: int
    """Chunks of the file."""
    chunks_written: frozenset[int]
    """Indices of the chunks that were written."""
    items_patched: int
    """Items whose trailer got its CRC32."""


def check_complete(requested: frozenset[str], written: frozenset[str]) -> None:
    """The post-condition of every save: written set == requested set.

    Raises:
        PlanChangedError: names up to five leaves that are missing or that nobody asked for.
    """
    if requested == written:
        return
    missing, extra = sorted(requested - written)[:5], sorted(written - requested)[:5]
    raise PlanChangedError(
        f"the plan does not cover the state: not written {missing}, not asked for {extra}; "
        "nothing was committed and the next save plans anew"
    )
