"""Image: the data files of one save in memory, as a ring of chunk-sized slots in a leased arena.

An arena that holds the whole image has a slot for every chunk. In a smaller arena (byte budget), the capture of a chunk
waits until the earlier chunk in the same slot was written.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace

from aio_ckpt.format.constants import align_up
from aio_ckpt.memory.arena import ArenaKind
from aio_ckpt.memory.arena_lifetimes import ArenaSpec, Lease, LifetimeManager
from aio_ckpt.memory.staging_kind import StagingChoice
from aio_ckpt.plan.chunks import Chunk
from aio_ckpt.plan.layout import file_chunks
from aio_ckpt.plan.save_plan import ImagePlan, PlannedImage
from aio_ckpt.runtime.ctrl_c import new_future


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Data files of one save in memory: a ring of ``slots`` chunks in a leased arena.

    The slot of chunk ``i`` belongs to the capture until the chunk is captured, then to the writer until ``written[i]``
    is resolved, then to chunk ``i + slots``.
    """

    lease: Lease
    chunks: tuple[Chunk, ...]
    """Chunks of the image, with those of the objects; see :meth:`only`."""
    chunk_bytes: int
    slots: int
    written: tuple[Future[None], ...]
    """For each chunk whose slot is used again, a future that is resolved when the slot is free."""
    base: int = 0
    """Offset of the first slot in the arena."""
    has_constants: bool = False
    """Whether the arena already holds the constant bytes of the layout, from an earlier save of the same layout."""

    @property
    def is_whole(self) -> bool:
        """Whether every chunk has a slot of its own."""
        return not self.written

    @property
    def nbytes(self) -> int:
        """Length of the data files."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    def only(self, chunks: slice) -> Image:
        """Return these chunks alone, which are those of one data file."""
        return replace(self, chunks=self.chunks[chunks])

    def behind(self, chunks: tuple[Chunk, ...], chunk_bytes: int) -> Image:
        """Return an image of other ``chunks`` in the bytes of the arena behind this one, in waves if these are few."""
        base = self.chunks[-1].stop
        slots = min((self.lease.arena.capacity - base) // chunk_bytes, len(chunks))
        return Image(
            lease=self.lease,
            chunks=chunks,
            chunk_bytes=chunk_bytes,
            slots=slots,
            written=tuple(new_future() for _ in chunks[slots:]),
            base=base,
        )

    def fail_slots(self, cause: BaseException) -> None:
        """Fail all slots that are not free: a capture that waits for one raises ``cause``."""
        for slot in self.written:
            with contextlib.suppress(InvalidStateError):  # a free slot stays free
                slot.set_exception(cause)

    def slot_offset(self, chunk: Chunk) -> int:
        """Return the offset of the chunk in the arena. A whole image lies there as it is."""
        return self.base + (chunk.start if self.is_whole else (chunk.index % self.slots) * self.chunk_bytes)

    def view(self, chunk: Chunk) -> memoryview:
        """Return the bytes of the chunk in the arena."""
        offset = self.slot_offset(chunk)
        return memoryview(self.lease.arena.memory)[offset : offset + chunk.stop - chunk.start]


def ring_slots(image_bytes: int, chunk_bytes: int, budget_bytes: int) -> int | None:
    """Return the number of chunks that the arena holds at once in waves, at least 1; None if it holds all."""
    return None if image_bytes <= budget_bytes else max(budget_bytes // chunk_bytes, 1)


def arena_spec(
    plan: ImagePlan, objects_bytes: int, kind: ArenaKind, *, budget_bytes: int, spare_bytes: int
) -> ArenaSpec:
    """Return the requirements on the arena of a save of ``plan`` with ``objects_bytes`` of objects.

    ``spare_bytes``: bytes behind the image.
    """
    image_bytes = image_bytes_of(plan, objects_bytes)
    slots = ring_slots(image_bytes, plan.layout.chunk_bytes, budget_bytes)
    nbytes = image_bytes if slots is None else min(image_bytes, slots * plan.layout.chunk_bytes)
    return ArenaSpec(nbytes=nbytes + spare_bytes, kind=kind, source=plan.source)


def image_bytes_of(plan: ImagePlan, objects_bytes: int) -> int:
    """Return the length of the image of ``plan`` with ``objects_bytes`` of objects."""
    layout = plan.layout
    main_bytes = max(layout.tensor_bytes - layout.main_start + objects_bytes, 1)
    return layout.main_start + align_up(main_bytes, layout.file_alignment)


def lease_image(
    planned: PlannedImage,
    objects_bytes: int,
    lifetime: LifetimeManager,
    staging: StagingChoice,
    *,
    timeout_secs: float,
    limit_secs: float,
    spare_bytes: int = 0,
    step: int | None = None,
) -> Image:
    """Lease an arena for the image of one save. Block while earlier saves hold the budget; log lines name ``step``.

    ``staging`` chooses the kind of the arena, which has ``spare_bytes`` more behind the image.

    Raises:
        BudgetExceededError: what the arena must hold at once exceeds the budget, or the system lacks the memory.
        StallError: an earlier save keeps its arena and made no progress for ``timeout_secs``, or ``limit_secs`` passed.
    """
    plan, layout, budget_bytes = planned.plan, planned.plan.layout, lifetime.budget_bytes

    def acquire(kind: ArenaKind) -> Lease:
        spec = arena_spec(plan, objects_bytes, kind, budget_bytes=budget_bytes, spare_bytes=spare_bytes)
        return lifetime.acquire(spec, timeout_secs=timeout_secs, limit_secs=limit_secs, step=step)

    chunks = file_chunks(layout, image_bytes_of(plan, objects_bytes))
    slots = min(len(chunks), ring_slots(chunks[-1].stop, layout.chunk_bytes, budget_bytes) or len(chunks))
    lease = staging.take(plan.source, acquire)
    try:
        return Image(
            lease=lease,
            chunks=chunks,
            chunk_bytes=layout.chunk_bytes,
            slots=slots,
            written=tuple(new_future() for _ in chunks[slots:]),
            has_constants=lease.arena.take_constants(layout) and slots >= len(chunks),
        )
    except BaseException:
        lease.close()
        raise
