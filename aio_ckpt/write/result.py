"""Result of the write stage."""

from __future__ import annotations

from dataclasses import dataclass, replace

from aio_ckpt.reports import WriteMode


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """Result of writing one data file. With the plan, it is all that the rank's manifest needs."""

    image_bytes: int
    """Length of the data file, padding included."""
    file_crc32: int
    sums: bytes
    """CRC32 of each block of the raw bytes of each item of the file, little-endian, in the order of the layout."""
    mode: WriteMode
    """How the bytes reached the disk."""
    chunks: int
    """Number of chunks of the file."""
    chunks_written: frozenset[int]
    """Indices in the image of the chunks that were written."""
    items_patched: int
    """Number of items whose trailer holds their CRC32."""

    def moved(self, chunks: int) -> WriteResult:
        """Return the result for an image in which ``chunks`` more, those of a frozen file, precede these."""
        return replace(self, chunks_written=frozenset(index + chunks for index in self.chunks_written))
