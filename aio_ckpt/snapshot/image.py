"""Image: one save's data file in memory, a ring of chunk-sized slots in a leased arena.

An arena that holds the whole image has a slot for every chunk; a smaller one (byte budget) makes the capture wait
until an earlier chunk of the slot was written.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from isal import isal_zlib

from aio_ckpt.errors import BudgetExceededError
from aio_ckpt.format.constants import PAGE_BYTES, align_up
from aio_ckpt.memory.arena import ArenaKind
from aio_ckpt.memory.lifetime import ArenaSpec, Lease, LifetimeManager
from aio_ckpt.plan.assignment import Assignment
from aio_ckpt.plan.layout import file_chunks
from aio_ckpt.plan.planner import ImagePlan, PlannedImage
from aio_ckpt.plan.values import Chunk, ImageLayout
from aio_ckpt.state.objects import ObjectBytes

__all__ = ["Image", "arena_spec", "item_sums", "lease_image", "narrowed_image", "narrowed_objects", "ring_slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One save's data file in memory: a ring of ``slots`` chunks in a leased arena.

    The slot of chunk ``i`` belongs to the capture until it was captured, then to the writer until
    ``written[i]`` resolves, then to chunk ``i + slots``.
    """

    lease: Lease
    """Right over the arena."""
    chunks: tuple[Chunk, ...]
    """Of the whole file, objects included."""
    chunk_bytes: int
    """Size of a slot."""
    slots: int
    """Chunks that the arena holds at once."""
    written: tuple[Future[None], ...]
    """Per chunk whose slot is used again: it is free."""
    has_constants: bool = False
    """Whether the constant bytes of the layout stand in the arena already, from an earlier save of the same layout."""

    @property
    def is_whole(self) -> bool:
        """Whether every chunk has a slot of its own."""
        return self.slots >= len(self.chunks)

    def slot_offset(self, chunk: Chunk) -> int:
        """Where in the arena the chunk stands."""
        return (chunk.index % self.slots) * self.chunk_bytes

    def view(self, chunk: Chunk) -> memoryview:
        """The chunk's bytes."""
        offset = self.slot_offset(chunk)
        return memoryview(self.lease.arena.memory)[offset : offset + chunk.stop - chunk.start]


def ring_slots(image_bytes: int, chunk_bytes: int, must_hold_bytes: int, budget_bytes: int) -> int:
    """How many chunks the arena holds: all of them, or as many as the budget allows (waves).

    Raises:
        BudgetExceededError: what must be captured at once does not fit, or not even two chunks do.
    """
    chunks = -(-image_bytes // chunk_bytes)
    if image_bytes <= budget_bytes:
        return chunks
    slots = budget_bytes // chunk_bytes
    if must_hold_bytes > budget_bytes or slots < 2:
        raise BudgetExceededError(
            f"{must_hold_bytes} bytes of host state (image {image_bytes} bytes, chunks of {chunk_bytes}) must be "
            f"captured at once, budget_bytes={budget_bytes}: raise it, or save less at once"
        )
    return slots


def arena_spec(plan: ImagePlan, objects_bytes: int, kind: ArenaKind, *, budget_bytes: int) -> ArenaSpec:
    """What a save of ``plan`` with so many bytes of objects needs.

    Raises:
        BudgetExceededError: see :func:`ring_slots`.
    """
    image_bytes = _image_bytes(plan, objects_bytes)
    slots = ring_slots(image_bytes, plan.layout.chunk_bytes, plan.host_bytes, budget_bytes)
    return ArenaSpec(nbytes=min(image_bytes, slots * plan.layout.chunk_bytes), kind=kind, source=plan.source)


def _image_bytes(plan: ImagePlan, objects_bytes: int) -> int:
    return align_up(max(plan.layout.tensor_bytes + objects_bytes, 1), PAGE_BYTES)


def lease_image(
    planned: PlannedImage,
    objects_bytes: int,
    lifetime: LifetimeManager,
    kind: ArenaKind,
    *,
    timeout_secs: float,
    limit_secs: float,
) -> Image:
    """Lease an arena for the image of one save; blocks while earlier saves hold the budget.

    Raises:
        BudgetExceededError: see :func:`ring_slots`; or the memory cannot be had.
        StallError: an earlier save keeps its arena and made no progress for ``timeout_secs``, or ``limit_secs``
            passed.
    """
    layout = planned.plan.layout
    spec = arena_spec(planned.plan, objects_bytes, kind, budget_bytes=lifetime.budget_bytes)
    chunks = file_chunks(layout, _image_bytes(planned.plan, objects_bytes))
    slots = min(len(chunks), -(-spec.nbytes // layout.chunk_bytes))
    lease = lifetime.acquire(spec, timeout_secs=timeout_secs, limit_secs=limit_secs)
    try:
        return Image(
            lease=lease,
            chunks=chunks,
            chunk_bytes=layout.chunk_bytes,
            slots=slots,
            written=tuple(Future() for _ in chunks[slots:]),
            has_constants=lease.arena.take_constants(layout) and slots >= len(chunks),
        )
    except BaseException:
        lease.close()
        raise


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
    image_bytes = align_up(max(after.tensor_bytes + objects_bytes, 1), PAGE_BYTES)
    chunks = file_chunks(after, image_bytes)
    return replace(image, chunks=chunks, has_constants=False)


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
