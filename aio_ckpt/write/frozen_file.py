"""Frozen file of a save: written, or cloned from the step before if all its sums are those of that step."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import anyio

from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.plan.chunks import Chunk
from aio_ckpt.plan.layout import ImageLayout
from aio_ckpt.storage.clone import Stamp
from aio_ckpt.storage.local import Storage
from aio_ckpt.write.part import Part
from aio_ckpt.write.result import WriteResult
from aio_ckpt.write.writer import ChunkPreparer, FileWriter

NOT_CAPTURED = "the tensors that it holds were not captured (frozen='trusted'): saves from now on write them"
"""Text of the error of a save whose trusted file is lost."""


@dataclass(slots=True)
class Sharers:
    """Number of saves that may share the bytes of one written file."""

    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenFile:
    """Frozen file of a committed checkpoint, from which the next save may clone its own."""

    path: Path
    result: WriteResult
    stamp: Stamp
    """Mark of its content. A file that somebody has edited has another one, and is not cloned."""
    is_clone: bool
    sharers: Sharers
    """Sharers of its bytes, the same object for all clones of one written file."""

    def holds(self, result: WriteResult) -> bool:
        """Return whether it holds the bytes that ``result`` tells of, by their length and sums."""
        mine, theirs = ((each.image_bytes, each.file_crc32, each.sums) for each in (self.result, result))
        return mine == theirs


async def write_frozen(
    part: Part,
    directory: Path,
    place: Path,
    clone_source: FrozenFile | None,
    writer: FileWriter,
) -> FrozenFile:
    """Make the frozen file of ``part`` in ``directory``, durable once that is synced.

    Args:
        place: directory of the checkpoint once it is committed.
        clone_source: file that may be cloned. An image in waves is written, as it is never in memory as a whole.
    """
    image, path = part.image.only(slice(part.layout.frozen_chunks)), directory / part.frozen_name
    preparer = ChunkPreparer(part.layout, b"", renders_constants=part.renders_constants, is_frozen=True)

    async def captured(chunk: Chunk) -> None:
        await part.chunks.wait(chunk.index, writer.executor)

    if clone_source is None or not image.is_whole:
        result = await writer.write_image(image, preparer, path, issued=part.chunks.wait_issued, captured=captured)
        return await _written(path, place, result, writer.storage)
    await writer.sum_image(image, preparer, captured=captured)
    if clone_source.holds(preparer.result(image, clone_source.result.mode, frozenset())):
        writer.on_activity("cloning its frozen file")
        cloned = await _clone(clone_source, path, place, writer.storage)
        if cloned is not None:
            writer.on_written(image.nbytes)
            return cloned
    return await _written(path, place, await writer.write_summed(image, preparer, path), writer.storage)


async def write_trusted(
    part: Part,
    layout: ImageLayout,
    directory: Path,
    place: Path,
    trusted: FrozenFile,
    writer: FileWriter,
    *,
    may_clone: bool,
) -> FrozenFile:
    """Make a frozen file in ``directory`` that holds the bytes of ``trusted``, which were not captured.

    It is a clone, or a copy, of which each byte is verified.

    Args:
        part: part of the main data file. There is room for a chunk behind its image.
        layout: layout of both files.
        place: see :func:`write_frozen`.
        trusted: frozen file of a committed checkpoint.
        may_clone: whether one checkpoint more may share its bytes.

    Raises:
        ReadError: ``trusted`` cannot be read.
        CorruptCheckpointError: its bytes are not those that were written.
    """
    path, storage = directory / part.frozen_name, writer.storage
    if may_clone:
        writer.on_activity("cloning its frozen file")
        cloned = await _clone(trusted, path, place, storage)
        if cloned is not None:
            return cloned
    image = part.image.behind(layout.chunks[: layout.frozen_chunks], layout.chunk_bytes)
    preparer = ChunkPreparer(layout, b"", renders_constants=False, is_frozen=True)
    source = await storage.open_data_file(trusted.path)

    async def read(chunk: Chunk) -> None:
        if chunk.index >= image.slots:
            await asyncio.wrap_future(image.written[chunk.index - image.slots])
        await source.read_into(chunk.start, image.view(chunk))

    try:
        result = await writer.write_image(image, preparer, path, captured=read)
    finally:
        with anyio.CancelScope(shield=True):
            await source.close()
    if not trusted.holds(result):
        raise CorruptCheckpointError(
            f"{trusted.path}: its bytes are not those that were written, and {NOT_CAPTURED}; look at older steps, "
            "which share the file, by `aio-ckpt verify ROOT`"
        )
    return await _written(path, place, result, storage)


async def _clone(source: FrozenFile, path: Path, place: Path, storage: Storage) -> FrozenFile | None:
    stamp = await storage.clone(source.path, path, source.stamp)
    if stamp is None:
        return None
    return FrozenFile(path=place / path.name, result=source.result, stamp=stamp, is_clone=True, sharers=source.sharers)


async def _written(path: Path, place: Path, result: WriteResult, storage: Storage) -> FrozenFile:
    stamp = await storage.stamp(path)
    return FrozenFile(path=place / path.name, result=result, stamp=stamp, is_clone=False, sharers=Sharers())
