"""Snapshot: capture a state into the image, on the caller's thread.

The image lies in an arena as a ring of chunk-sized slots. An arena that holds the whole image has a slot for
every chunk; a smaller one (byte budget) makes the capture wait until an earlier chunk of the slot was written.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from aio_ckpt import envelope, objects
from aio_ckpt.config import Staging
from aio_ckpt.device import Copies, CopyStreams, Mark
from aio_ckpt.errors import BudgetExceededError, SourceChangedError, StallError
from aio_ckpt.items import PAGE_BYTES, Chunk, Piece, align_up
from aio_ckpt.layout import file_chunks
from aio_ckpt.lifetime import ArenaKind, Lease, LifetimeManager
from aio_ckpt.plan import PlannedSave
from aio_ckpt.structure import addresses

__all__ = ["Capture", "Image", "ObjectBytes", "ObjectEncoder", "capture", "lease_image", "ring_slots"]

# PyDLL: the GIL stays held, which for copies of a few KiB is cheaper than giving it up and winning it back.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p

_DOUBLE = struct.Struct("<d")


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
    """Per chunk: its slot is free again."""

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


def lease_image(
    planned: PlannedSave,
    objects_bytes: int,
    lifetime: LifetimeManager,
    staging: Staging,
    *,
    timeout_secs: float,
    limit_secs: float,
) -> Image:
    """Lease an arena for the image of one save; blocks while earlier saves hold the budget.

    Raises:
        BudgetExceededError: see :func:`ring_slots`.
        StallError: an earlier save keeps its arena and made no progress for ``timeout_secs``, or ``limit_secs``
            passed.
    """
    layout = planned.plan.layout
    image_bytes = align_up(max(layout.tensor_bytes + objects_bytes, 1), PAGE_BYTES)
    chunks = file_chunks(layout, image_bytes)
    slots = ring_slots(image_bytes, layout.chunk_bytes, planned.plan.host_bytes, lifetime.budget_bytes)
    uses_cuda = planned.plan.uses_cuda
    kind: ArenaKind = ("pinned" if uses_cuda else "pageable") if staging == "auto" else staging
    lease = lifetime.acquire(
        min(image_bytes, slots * layout.chunk_bytes),
        kind,
        registers=uses_cuda,
        timeout_secs=timeout_secs,
        limit_secs=limit_secs,
    )
    return Image(
        lease=lease,
        chunks=chunks,
        chunk_bytes=layout.chunk_bytes,
        slots=slots,
        written=tuple(Future() for _ in chunks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectBytes:
    """The objects of one save, encoded; equal immutable values stand there once."""

    region: bytes
    """What follows the tensors in the image."""
    spans: tuple[tuple[int, int], ...]
    """Per object, (offset in the region, length)."""


class ObjectEncoder:
    """Encodes the object leaves of a save; the bytes of the last save's immutable values are used again.

    Borrowed fact: ``torch.save(1e-3)`` costs 39 us (FACTS), 4,000 hyperparameters 150 ms.
    """

    def __init__(self, *, trusted: bool) -> None:
        self._trusted = trusted
        self._known: dict[tuple[object, ...], bytes] = {}

    def encode(self, leaves: Sequence[tuple[str, object]]) -> ObjectBytes:
        """Encode leaves given as (name, value); mutable values are captured by it.

        Raises:
            UnsafeObjectError: names a leaf that could be read back only by running code.
        """
        seen: dict[tuple[object, ...], bytes] = {}
        parts: dict[bytes, int] = {}
        spans: list[tuple[int, int]] = []
        end = 0
        for name, value in leaves:
            data = self._bytes(name, value, seen)
            start = parts.setdefault(data, end)
            if start == end:
                end += len(data)
            spans.append((start, len(data)))
        self._known = seen
        return ObjectBytes(region=b"".join(parts), spans=tuple(spans))

    def _bytes(self, name: str, value: object, seen: dict[tuple[object, ...], bytes]) -> bytes:
        if not objects.is_immutable(value):
            return objects.encode_object(name, value, trusted=self._trusted)
        key = _identity(value)
        data = seen.get(key)
        if data is None:
            data = self._known.get(key)
            seen[key] = data = objects.encode_object(name, value, trusted=self._trusted) if data is None else data
        return data


def _identity(value: object) -> tuple[object, ...]:
    """Equal for immutable values of equal bytes only: 1 and True, 0.0 and -0.0, two nans of other bits all differ."""
    if isinstance(value, float):
        return (float, _DOUBLE.pack(value))
    if isinstance(value, complex):
        return (complex, _DOUBLE.pack(value.real), _DOUBLE.pack(value.imag))
    return (tuple, *map(_identity, value)) if isinstance(value, tuple) else (type(value), value)


class Capture:
    """The copies of one save: issued by :func:`capture`, kept alive until ``release``.

    Owns the references to the source tensors, from the call of ``save()`` until the last copy is done.
    """

    def __init__(self, planned: PlannedSave, streams: CopyStreams) -> None:
        self._planned = planned
        self._streams = streams
        self._copies: dict[torch.device, Copies] = {}
        self._flat: dict[int, torch.Tensor] = {}
        self._marks: tuple[Mark, ...] = ()

    def issue(self, chunk: Chunk, pieces: Sequence[Piece], image: Image) -> tuple[Mark, ...]:
        """Issue the copies of one chunk; the marks tell when they are done."""
        arena = image.lease.arena
        shift = image.slot_offset(chunk) - chunk.start
        moves = self._planned.plan.descriptors.moves
        if chunk.index < len(moves):
            base = arena.address + shift
            for start, address, nbytes in moves[chunk.index]:
                _memmove(base + start, address, nbytes)
        used: set[Copies] = set()
        for piece in pieces:
            leaf = self._planned.plan.layout.items[piece.item].leaf
            copies = self._copies_from(self._planned.tensors[leaf].device)
            source = self._flat_bytes(leaf, copies)
            start = piece.image_start + shift
            copies.copy(
                arena.tensor[start : start + piece.nbytes], source[piece.raw_start : piece.raw_start + piece.nbytes]
            )
            used.add(copies)
        return tuple(copies.mark() for copies in used)

    def fence(self) -> None:
        """Work that the caller enqueues from now on waits for the copies; nothing more is issued."""
        for copies in self._copies.values():
            copies.fence()
        self._marks = tuple(copies.mark() for copies in self._copies.values())

    @property
    def is_done(self) -> bool:
        """Whether every copy is done."""
        return all(mark.query() for mark in self._marks)

    def check_sources(self) -> None:
        """Raise SourceChangedError if a source moved while it was captured (freed or resized by another thread)."""
        planned = self._planned
        if addresses(planned.tensors) != planned.plan.descriptors.fingerprint:
            raise SourceChangedError(
                "a tensor was freed, resized or reassigned by another thread while save() captured it: "
                "keep the state still until save() returns"
            )

    def finish(self) -> None:
        """Block until every copy is done, then let go of the sources."""
        for mark in self._marks:
            mark.synchronize()
        self._flat.clear()
        self._planned.tensors.clear()
        self._planned.objects.clear()

    def _copies_from(self, source: torch.device) -> Copies:
        if source not in self._copies:
            self._copies[source] = self._streams.begin(source)
        return self._copies[source]

    def _flat_bytes(self, leaf: int, copies: Copies) -> torch.Tensor:
        if leaf not in self._flat:
            tensor = self._planned.tensors[leaf].detach()
            plain = envelope.is_dense(tuple(tensor.shape), tensor.stride()) and not (
                tensor.is_conj() or tensor.is_neg()
            )
            packed = tensor if plain else copies.packed(tensor)
            line = torch.as_strided(packed, (packed.numel(),), (1,), packed.storage_offset())
            self._flat[leaf] = line.view(torch.uint8)
        return self._flat[leaf]


def capture(
    planned: PlannedSave,
    image: Image,
    streams: CopyStreams,
    *,
    on_captured: Callable[[int, tuple[Mark, ...]], None],
    stall_timeout_secs: float,
) -> Capture:
    """Issue every copy of a save, chunk by chunk, so that the first are written while later ones are captured.

    When it returns, host memory was copied and the caller's stream waits for the copies from devices: whatever
    the caller does next cannot tear the snapshot.

    Raises:
        SourceChangedError: a source moved meanwhile.
        StallError: a slot of the ring did not become free in time.
    """
    work = Capture(planned, streams)
    copied = planned.plan.copied
    try:
        try:
            for chunk in image.chunks:
                _await_slot(image, chunk, stall_timeout_secs)
                marks = work.issue(chunk, copied[chunk.index] if chunk.index < len(copied) else (), image)
                on_captured(chunk.index, marks)
        except RuntimeError:
            work.check_sources()  # why torch refused to copy
            raise
        work.check_sources()
    except BaseException:
        # The arena goes back when this raises: no copy may still be under way.
        work.fence()
        work.finish()
        raise
    work.fence()
    return work


def _await_slot(image: Image, chunk: Chunk, timeout_secs: float) -> None:
    if chunk.index < image.slots:
        return
    try:
        failure = image.written[chunk.index - image.slots].exception(timeout_secs)
    except TimeoutError as error:
        raise StallError(
            f"chunk {chunk.index - image.slots} was not written within {timeout_secs} s, so chunk {chunk.index} "
            "cannot be captured: the disk is stalled"
        ) from error
    if failure is not None:  # outside of the try: a passed deadline is a TimeoutError too
        raise failure
