"""A zip bomb without compression: records that lie inside of each other's bytes."""

from __future__ import annotations

from aio_ckpt.format import zip_records

__all__ = ["overlapping"]


def overlapping(count: int, body: bytes) -> bytes:
    """A zip whose local headers lie inside of each other's bytes: each record holds all that follow."""
    names = [b"archive/data/%d" % number for number in range(count)]
    after = b"".join(zip_records.LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, 0, len(name), 0) + name for name in names) + body
    entries, at = b"", 0
    for name in names:
        nbytes = len(after) - at - zip_records.LOCAL.size - len(name)
        entries += zip_records.CENTRAL.pack(b"PK\1\2", 0, 0, 0, nbytes, nbytes, len(name), 0, 0, 0, at) + name
        at += zip_records.LOCAL.size + len(name)
    return after + entries + zip_records.end_of_zip(count, len(entries), len(after), zip64=False)
