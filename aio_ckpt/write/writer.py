"""Write the chunks of an image: place constants and objects, compute sums, write. Writes may end in any order.

One task prepares the chunks in order, because the CRC of the file runs from one to the next. It prepares up to
``workers`` chunks ahead of the tasks that write. Writes to one disk often end together, and then begin again together.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import anyio
import numpy as np
from anyio.streams.memory import MemoryObjectReceiveStream

from aio_ckpt.format.checksum import crc32_combine, crc32_of
from aio_ckpt.format.constants import BLOCK_BYTES
from aio_ckpt.plan.chunks import Chunk, Piece
from aio_ckpt.plan.layout import ImageLayout
from aio_ckpt.reports import WriteMode
from aio_ckpt.runtime.portal import Executor, run_blocking, watch_submissions
from aio_ckpt.snapshot.image import Image
from aio_ckpt.storage.data_file import DataFile
from aio_ckpt.storage.local import Storage
from aio_ckpt.write.result import WriteResult

RenderTail: TypeAlias = Callable[[Sequence[int]], bytes]
"""Function from the CRC32 of each item to the bytes behind the items. Their length does not depend on the CRC32s."""


@dataclass(frozen=True, slots=True)
class BlockSums:
    """Sums of the raw bytes of one chunk."""

    spans: Sequence[int]
    """CRC32 of each of :attr:`ChunkSums.spans`."""
    parts: Sequence[Sequence[tuple[int, int]]]
    """For each of :attr:`ChunkSums.parts`, CRC32 and length of what it holds of each block."""


class ChunkPreparer:
    """Preparation of captured chunks for the write, in order: constants, objects, padding, sums.

    One thread at a time uses it, chunk after chunk, except for :meth:`sum`. It holds sums, and no byte of an image.
    """

    def __init__(
        self,
        layout: ImageLayout,
        objects: bytes,
        *,
        renders_constants: bool,
        render_tail: RenderTail | None = None,
        is_frozen: bool = False,
    ) -> None:
        """Begin a data file: the frozen one if ``is_frozen``.

        ``render_tail`` makes what replaces ``objects`` once all items are summed; see :data:`RenderTail`.
        """
        self._layout = layout
        count = layout.frozen_items
        self._items = range(count) if is_frozen else range(count, len(layout.items))
        self._render_tail = render_tail
        self._objects = objects
        self._renders_constants = renders_constants
        self._item_crc32s = np.zeros(len(layout.items), dtype="<u4")
        self._blocks: dict[int, list[int]] = {}
        self.file_crc32 = 0
        """CRC32 of all chunks so far."""
        self.items_patched = 0

    @property
    def sums(self) -> bytes:
        """CRC32 of each block of each item, little-endian. It is complete when every chunk was prepared."""
        parts: list[bytes] = []
        begin = self._items.start
        for index in sorted(self._blocks):
            parts += [
                self._single_sums(begin, index),
                struct.pack(f"<{len(self._blocks[index])}I", *self._blocks[index]),
            ]
            begin = index + 1
        return b"".join([*parts, self._single_sums(begin, self._items.stop)])

    def result(self, image: Image, mode: WriteMode, written: frozenset[int]) -> WriteResult:
        """Return the result of a file that holds all chunks of ``image``; ``written``: indices of those written."""
        return WriteResult(
            image_bytes=image.nbytes,
            file_crc32=self.file_crc32,
            sums=self.sums,
            mode=mode,
            chunks=len(image.chunks),
            chunks_written=written,
            items_patched=self.items_patched,
        )

    def prepare(self, chunk: Chunk, view: memoryview) -> None:
        """Complete the captured ``chunk`` in its memory ``view``, and compute its sums."""
        self.add(chunk, view, self.sum(chunk, view))

    def sum(self, chunk: Chunk, view: memoryview) -> BlockSums:
        """Place the constants of the captured ``chunk`` in its memory ``view``, and sum its raw bytes.

        Several threads may each sum a chunk. :meth:`add` completes them in their order.
        """
        if self._renders_constants:
            for start, data in chunk.constants:
                offset = start - chunk.start
                view[offset : offset + len(data)] = data
        return BlockSums(
            spans=[crc32_of(view[start:stop]) for start, stop in chunk.sums.spans],
            parts=[_sum_part(piece, view, chunk.start) for piece in chunk.sums.parts],
        )

    def add(self, chunk: Chunk, view: memoryview, sums: BlockSums) -> None:
        """Complete the summed ``chunk`` in its memory ``view``: its trailers, objects and padding."""
        plan = chunk.sums
        self._item_crc32s[plan.span_items] = sums.spans
        totals = [self._add_part(piece, parts) for piece, parts in zip(plan.parts, sums.parts, strict=True)]
        fields = self._item_crc32s[plan.crc_patches].view(np.uint8).reshape(-1, 1, 4)
        np.frombuffer(view, dtype=np.uint8)[plan.patch_offsets] = fields
        self.items_patched += len(plan.crc_patches)
        self._place_objects(chunk, view)
        self._sum_file(chunk, view, totals)

    def _single_sums(self, begin: int, end: int) -> bytes:
        """Return the sums of the items from ``begin`` to ``end``. Each has one block, or, if it is empty, none."""
        nonempty = [index for index in range(begin, end) if self._layout.items[index].envelope.raw_bytes]
        return self._item_crc32s[nonempty].tobytes()

    def _place_objects(self, chunk: Chunk, view: memoryview) -> None:
        begin = self._layout.tensor_bytes
        end = begin + len(self._objects)
        start, stop = max(chunk.start, begin), min(chunk.stop, end)
        if start < stop:
            if self._render_tail is not None:  # all items end before the objects, so that their sums are known by now
                self._objects, self._render_tail = self._render_tail(self._item_crc32s.tolist()), None
            view[start - chunk.start : stop - chunk.start] = self._objects[start - begin : stop - begin]
        padding = max(chunk.start, end)
        if padding < chunk.stop:
            view[padding - chunk.start :] = bytes(chunk.stop - padding)

    def _add_part(self, piece: Piece, parts: Sequence[tuple[int, int]]) -> int:
        """Return the CRC32 of the piece with these ``parts``, and extend the sums of its item."""
        blocks = self._blocks.setdefault(piece.item, [])
        total, position = 0, piece.raw_start
        for part, nbytes in parts:
            if position % BLOCK_BYTES:
                blocks[-1] = crc32_combine(blocks[-1], part, nbytes)
            else:
                blocks.append(part)
            total = crc32_combine(total, part, nbytes)
            position += nbytes
        before = int(self._item_crc32s[piece.item])
        self._item_crc32s[piece.item] = crc32_combine(before, total, piece.nbytes)
        return total

    def _sum_file(self, chunk: Chunk, view: memoryview, totals: Sequence[int]) -> None:
        """Extend the CRC32 of the file. The pieces with ``totals`` are combined into it and not summed again."""
        running, position = self.file_crc32, 0
        for piece, total in zip(chunk.sums.parts, totals, strict=True):
            start = piece.image_start - chunk.start
            running = crc32_combine(crc32_of(view[position:start], running), total, piece.nbytes)
            position = start + piece.nbytes
        self.file_crc32 = crc32_of(view[position:], running)


def _sum_part(piece: Piece, view: memoryview, chunk_start: int) -> list[tuple[int, int]]:
    """Return the CRC32 and the length of what the piece holds of each block of its item."""
    offset = piece.image_start - chunk_start - piece.raw_start
    parts: list[tuple[int, int]] = []
    position, stop = piece.raw_start, piece.raw_start + piece.nbytes
    while position < stop:
        end = min(stop, (position // BLOCK_BYTES + 1) * BLOCK_BYTES)
        parts.append((crc32_of(view[offset + position : offset + end]), end - position))
        position = end
    return parts


async def no_wait(_: object = None) -> None:
    """Wait for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWriter:
    """Writer of the data files of one save, which share storage, threads, limits and listeners."""

    storage: Storage
    executor: Executor
    """Threads that prepare the chunks."""
    workers: int
    """Most writes of one file that are in flight."""
    thread_wait_secs: float
    """Longest time that closing a file waits for threads that still use it."""
    admit: Callable[[int], Awaitable[None]] = no_wait
    """Returns once a write of so many bytes may begin."""
    on_activity: Callable[[str], None] = lambda _: None
    """Gets the name of each activity that begins. This tells, as ``on_written`` does, that the save goes on."""
    on_written: Callable[[int], None] = lambda _: None
    """Gets the bytes of each write that ended."""

    async def write_image(
        self,
        image: Image,
        preparer: ChunkPreparer,
        path: Path,
        *,
        issued: Callable[[], Awaitable[None]] = no_wait,
        captured: Callable[[Chunk], Awaitable[None]] = no_wait,
    ) -> WriteResult:
        """Write each chunk of ``image`` to a new file, durably, once ``captured(chunk)`` returns and it is admitted.

        If the file is :attr:`~DataFile.begins_late` and the image is whole, nothing is written until ``issued()``
        returns. The first chunks are prepared while the file is opened. Each thread that touches the image holds the
        lease of the image until it ends. The first error cancels all other work and is raised.

        Raises:
            WriteError: the file exists, or there is no room (before a byte is written), or a write failed.
        """

        async def prepare(chunk: Chunk) -> None:
            await captured(chunk)
            await run_blocking(self.executor, preparer.prepare, chunk, image.view(chunk))

        return await self._write_chunks(image, preparer, prepare, path, issued=issued)

    async def sum_image(
        self, image: Image, preparer: ChunkPreparer, *, captured: Callable[[Chunk], Awaitable[None]]
    ) -> None:
        """Prepare each chunk of the whole ``image`` once ``captured(chunk)`` returns, and write nothing."""
        sums: dict[int, BlockSums] = {}
        left = iter(image.chunks)

        async def sum_some() -> None:
            for chunk in left:
                await captured(chunk)
                sums[chunk.index] = await run_blocking(self.executor, preparer.sum, chunk, image.view(chunk))
                self.on_written(0)

        def add_all() -> None:
            for chunk in image.chunks:
                preparer.add(chunk, image.view(chunk), sums[chunk.index])

        with watch_submissions(image.lease.hold_until):
            async with anyio.create_task_group() as group:
                for _ in range(self.workers):
                    group.start_soon(sum_some)
            await run_blocking(self.executor, add_all)

    async def write_summed(self, image: Image, preparer: ChunkPreparer, path: Path) -> WriteResult:
        """Write an image that :meth:`sum_image` has prepared, as :meth:`write_image` does."""
        return await self._write_chunks(image, preparer, no_wait, path, issued=no_wait)

    async def _write_chunks(
        self,
        image: Image,
        preparer: ChunkPreparer,
        prepare: Callable[[Chunk], Awaitable[None]],
        path: Path,
        *,
        issued: Callable[[], Awaitable[None]],
    ) -> WriteResult:
        """Write each chunk once ``prepare(chunk)`` returns, by ``preparer``."""
        sender, receiver = anyio.create_memory_object_stream[Chunk](self.workers)
        written: set[int] = set()
        start = image.chunks[0].start

        async def prepare_all() -> None:
            async with sender:
                for chunk in image.chunks:
                    await prepare(chunk)
                    with contextlib.suppress(anyio.BrokenResourceError):  # no writer is left, and their error is raised
                        await sender.send(chunk)

        async def write(file: DataFile, chunks: MemoryObjectReceiveStream[Chunk]) -> None:
            async with chunks:
                async for chunk in chunks:
                    nbytes = chunk.stop - chunk.start
                    await self.admit(nbytes)
                    await file.write(chunk.start - start, image.view(chunk))
                    written.add(chunk.index)
                    if chunk.index < len(image.written):
                        image.written[chunk.index].set_result(None)
                    self.on_written(nbytes)

        async with anyio.create_task_group() as group, receiver:
            with watch_submissions(image.lease.hold_until):
                group.start_soon(prepare_all)
            async with self._new_file(path, image.nbytes) as file, anyio.create_task_group() as writing:
                if file.begins_late and image.is_whole:
                    await issued()
                with watch_submissions(image.lease.hold_until):
                    for _ in range(min(self.workers, len(image.chunks))):
                        writing.start_soon(write, file, receiver.clone())
        return preparer.result(image, file.mode, frozenset(written))

    @contextlib.asynccontextmanager
    async def _new_file(self, path: Path, nbytes: int) -> AsyncIterator[DataFile]:
        """Create a data file with room for ``nbytes``. If the block succeeds, make it durable. Close it in any case."""
        self.on_activity("reserving room for its data")
        file = await self.storage.create_data_file(path, nbytes)
        try:
            self.on_activity("writing its data")
            yield file
            self.on_activity("making its data durable")
            await file.sync()
        finally:
            with anyio.move_on_after(self.thread_wait_secs, shield=True):
                await file.close()
