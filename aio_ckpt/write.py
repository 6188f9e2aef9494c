"""Write: run an image's chunks: constants, sums, writes. Chunks may complete in any order.

One task prepares the chunks in order (so that a running CRC can pass from one to the next); ``workers`` tasks
write them, each as soon as it is prepared.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Sequence

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream
from isal import isal_zlib

from aio_ckpt.items import BLOCK_BYTES, Chunk, ImageLayout, Piece, WriteResult
from aio_ckpt.portal import Executor, run_blocking, watch_submissions
from aio_ckpt.snapshot import Image
from aio_ckpt.storage import DataFile

__all__ = ["ChunkPreparer", "write_image"]

_CRC32 = struct.Struct("<I")
_FOLD_BYTES = 64 << 10
"""From this size on, combining two CRCs (0.2 us) is cheaper than summing the bytes a second time."""


class ChunkPreparer:
    """Makes captured chunks ready to be written, in order: constants, objects, padding, sums.

    Used by one thread at a time, chunk after chunk. Holds sums, never bytes.
    """

    def __init__(self, layout: ImageLayout, objects: bytes, *, renders_constants: bool) -> None:
        self._layout = layout
        self._objects = objects
        self._renders_constants = renders_constants
        self._item_crc32s = [0] * len(layout.items)
        self._blocks: list[list[int]] = [[] for _ in layout.items]
        self.file_crc32 = 0
        """Of every chunk so far."""
        self.items_sealed = 0
        """Items whose trailer holds their CRC32."""

    @property
    def block_crc32s(self) -> tuple[tuple[int, ...], ...]:
        """Per item, the CRC32 of each block summed so far."""
        return tuple(map(tuple, self._blocks))

    def prepare(self, chunk: Chunk, view: memoryview) -> None:
        """Complete ``view``, the captured chunk, and sum it."""
        if self._renders_constants:
            for start, data in chunk.constants:
                offset = start - chunk.start
                view[offset : offset + len(data)] = data
        self._place_objects(chunk, view)
        sums = [self._sum_piece(piece, view, chunk.start) for piece in chunk.pieces]
        for index, fields in chunk.seals:
            for field in fields:
                _CRC32.pack_into(view, field - chunk.start, self._item_crc32s[index])
        self.items_sealed += len(chunk.seals)
        self._sum_file(chunk, view, sums)

    def _place_objects(self, chunk: Chunk, view: memoryview) -> None:
        begin = self._layout.tensor_bytes
        end = begin + len(self._objects)
        start, stop = max(chunk.start, begin), min(chunk.stop, end)
        if start < stop:
            view[start - chunk.start : stop - chunk.start] = self._objects[start - begin : stop - begin]
        padding = max(chunk.start, end)
        if padding < chunk.stop:
            view[padding - chunk.start :] = bytes(chunk.stop - padding)

    def _sum_piece(self, piece: Piece, view: memoryview, chunk_start: int) -> int:
        blocks = self._blocks[piece.item]
        offset = piece.image_start - chunk_start
        if not piece.raw_start and piece.nbytes <= BLOCK_BYTES:
            total: int = isal_zlib.crc32(view[offset : offset + piece.nbytes])
            blocks.append(total)
            self._item_crc32s[piece.item] = total
            return total
        total = 0
        position, stop = piece.raw_start, piece.raw_start + piece.nbytes
        while position < stop:
            nbytes = min(stop, (position // BLOCK_BYTES + 1) * BLOCK_BYTES) - position
            start = offset + position - piece.raw_start
            part = isal_zlib.crc32(view[start : start + nbytes])
            if position % BLOCK_BYTES:
                blocks[-1] = isal_zlib.crc32_combine(blocks[-1], part, nbytes)
            else:
                blocks.append(part)
            total = isal_zlib.crc32_combine(total, part, nbytes)
            position += nbytes
        self._item_crc32s[piece.item] = isal_zlib.crc32_combine(self._item_crc32s[piece.item], total, piece.nbytes)
        return total

    def _sum_file(self, chunk: Chunk, view: memoryview, sums: Sequence[int]) -> None:
        running, position = self.file_crc32, 0
        for piece, total in zip(chunk.pieces, sums, strict=True):
            if piece.nbytes < _FOLD_BYTES:
                continue
            start = piece.image_start - chunk.start
            running = isal_zlib.crc32_combine(isal_zlib.crc32(view[position:start], running), total, piece.nbytes)
            position = start + piece.nbytes
        self.file_crc32 = isal_zlib.crc32(view[position:], running)


async def write_image(
    image: Image,
    preparer: ChunkPreparer,
    file: DataFile,
    executor: Executor,
    *,
    workers: int,
    captured: Callable[[int], Awaitable[None]],
    on_written: Callable[[int], None],
) -> WriteResult:
    """Write every chunk of ``image`` to ``file`` as soon as ``captured(index)`` returns.

    At most ``workers`` writes are in flight. Every thread that touches the image is reported to its lease. The
    first error cancels the rest and is raised; threads already in the system call keep the lease until they end.
    """
    sender, receiver = anyio.create_memory_object_stream[Chunk](0)
    written: set[int] = set()

    async def prepare() -> None:
        async with sender:
            for chunk in image.chunks:
                await captured(chunk.index)
                await run_blocking(executor, preparer.prepare, chunk, image.view(chunk))
                await sender.send(chunk)

    async def write(chunks: MemoryObjectReceiveStream[Chunk]) -> None:
        async with chunks:
            async for chunk in chunks:
                await file.write(chunk.start, image.view(chunk))
                written.add(chunk.index)
                image.written[chunk.index].set_result(None)
                on_written(chunk.stop - chunk.start)

    with watch_submissions(image.lease.hold_until):
        async with anyio.create_task_group() as group, receiver:
            for _ in range(min(workers, len(image.chunks))):
                group.start_soon(write, receiver.clone())
            group.start_soon(prepare)
    return WriteResult(
        image_bytes=image.chunks[-1].stop,
        file_crc32=preparer.file_crc32,
        block_crc32s=preparer.block_crc32s,
        mode=file.mode,
        chunks=len(image.chunks),
        chunks_written=frozenset(written),
        items_sealed=preparer.items_sealed,
    )
