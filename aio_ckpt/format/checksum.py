"""CRC32 by ISA-L: the checksum of files, tensors, objects and manifests."""

from __future__ import annotations

from collections.abc import Iterable

from isal import isal_zlib

crc32_of = isal_zlib.crc32
"""(data, CRC32 of the bytes before it = 0) -> CRC32."""
crc32_combine = isal_zlib.crc32_combine
"""(CRC32 of a, CRC32 of b, bytes of b) -> CRC32 of a + b."""


def crc32_of_parts(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC32 of consecutive runs of bytes, each given as (CRC32, length)."""
    total = 0
    for crc32, nbytes in parts:
        total = crc32_combine(total, crc32, nbytes)
    return total
