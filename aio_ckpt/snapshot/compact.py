"""Narrowing: all of a rank was captured, a share of it is written. The image closes up over what others write."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Sequence
from dataclasses import replace

from isal import isal_zlib

from aio_ckpt.format.constants import PAGE_BYTES, align_up
from aio_ckpt.plan.assignment import Assignment
from aio_ckpt.plan.layout import file_chunks
from aio_ckpt.plan.values import ImageLayout
from aio_ckpt.snapshot.image import Image
from aio_ckpt.state.object_cache import ObjectBytes

__all__ = ["item_sums", "narrowed_image", "narrowed_objects"]


def item_sums(image: Image, layout: ImageLayout) -> bytes:
    """CRC32 of the raw bytes of each item of a captured image, little-endian."""
    memory = memoryview(image.lease.arena.memory)
    sums = [isal_zlib.crc32(memory[item.raw_offset : item.raw_offset + item.raw_bytes]) for item in layout.items]
    return struct.pack(f"<{len(sums)}I", *sums)


def narrowed_image(
    image: Image, before: ImageLayout, share: Assignment, after: ImageLayout, objects_bytes: int
) -> Image:
    """The image of ``after``, in the same memory: each item of the share moves forward to its new place.

    ``image`` is whole and captured, and ``after`` is the layout of the share, whose items begin nowhere behind where
    they began: moved in their order, none overwrites another that is still to move.
    """
    base = image.lease.arena.address
    for (index, _), item in zip(share.items([item.fqns for item in before.items]), after.items, strict=True):
        source = before.items[index].raw_offset
        if source != item.raw_offset:
            ctypes.memmove(base + item.raw_offset, base + source, item.raw_bytes)
    image.lease.arena.rendered = None
    image_bytes = align_up(max(after.tensor_bytes + objects_bytes, 1), PAGE_BYTES)
    chunks = file_chunks(after, image_bytes)
    return replace(image, chunks=chunks)


def narrowed_objects(objects: ObjectBytes, names: Sequence[str], kept: Collection[str]) -> ObjectBytes:
    """The objects called ``kept`` out of all ``names``."""
    parts: dict[tuple[int, int], int] = {}
    spans: list[tuple[int, int]] = []
    end = 0
    for name, span in zip(names, objects.spans, strict=True):
        if name in kept:
            start = parts.setdefault(span, end)
            end += span[1] if start == end else 0
            spans.append((start, span[1]))
    region = b"".join(objects.region[start : start + nbytes] for start, nbytes in parts)
    return ObjectBytes(region=region, spans=tuple(spans))
