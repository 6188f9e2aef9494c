"""One part of a save, and the write of its data file while the capture goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.plan.layout import ImageLayout
from aio_ckpt.snapshot.captured_chunks import CapturedChunks
from aio_ckpt.snapshot.image import Image
from aio_ckpt.write.result import WriteResult
from aio_ckpt.write.writer import ChunkPreparer, FileWriter, RenderTail


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Part of a save, whose capture has begun: a data file, beside a frozen one or none. It keeps no tensor."""

    name: str
    """Name of the data file while it is written."""
    frozen_name: str = ""
    """Name of the frozen file, if the layout has one."""
    layout: ImageLayout
    tail: bytes
    """Bytes that follow the tensors."""
    render_tail: RenderTail | None = None
    """Makes the bytes that take the place of ``tail``; None if ``tail`` is final."""
    renders_constants: bool = True
    """Whether the writer has to place the constant bytes: the arena lacks them, or gather runs overwrite them."""
    image: Image
    chunks: CapturedChunks


async def write_part(part: Part, path: Path, writer: FileWriter) -> WriteResult:
    """Write the data file of ``part`` to ``path``, durably. Each chunk is written once it is captured and admitted.

    Raises:
        WriteError: see :meth:`FileWriter.write_image`.
    """
    return await writer.write_image(
        part.image.only(slice(part.layout.frozen_chunks, None)),
        ChunkPreparer(part.layout, part.tail, renders_constants=part.renders_constants, render_tail=part.render_tail),
        path,
        issued=part.chunks.wait_issued,
        captured=lambda chunk: part.chunks.wait(chunk.index, writer.executor),
    )
