"""Images in arenas of any number of slots, captured and written by the real stages, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import anyio.lowlevel
import torch

from aio_ckpt.config import GATHER_BYTES
from aio_ckpt.format.constants import PAGE_BYTES, align_up
from aio_ckpt.memory.arena_lifetimes import ArenaSpec, LifetimeManager
from aio_ckpt.plan.copy_plan import ChunkCopies, CopyPlan, CopyTable
from aio_ckpt.plan.layout import file_chunks
from aio_ckpt.plan.plan_cache import PlanCache
from aio_ckpt.plan.save_plan import ImagePlan, PlannedImage, PlannedSave
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.snapshot.capture import Capture, CopyEngines, capture
from aio_ckpt.snapshot.captured_chunks import CapturedChunks
from aio_ckpt.snapshot.image import Image
from aio_ckpt.snapshot.stall_timer import StallTimer
from aio_ckpt.state.flatten import flatten
from aio_ckpt.storage.local import Storage
from aio_ckpt.write.result import WriteResult
from aio_ckpt.write.writer import ChunkPreparer, FileWriter

TIMEOUT = 20.0


def plan_of(state: Mapping[str, object], gather_bytes: int = GATHER_BYTES) -> PlannedSave:
    return PlanCache(gather_bytes=gather_bytes).resolve(flatten(state, rank=0))


def issued(state: Mapping[str, object]) -> tuple[ImagePlan, list[torch.Tensor]]:
    """The plan of ``state`` as if every tensor were copied by its address from a device; and the tensors."""
    planned = plan_of(state)
    plan = planned.plan
    chunks = tuple(
        ChunkCopies(gathered=(), packed=(), converted=(), is_issued=bool(chunk.pieces)) for chunk in plan.layout.chunks
    )
    rows = CopyTable.of([item for item in plan.layout.items if item.raw_bytes])
    copies = CopyPlan(chunks=chunks, moved=CopyTable.of([]), issued={torch.device("cpu"): rows})
    return replace(plan, copies=copies).at(plan.fingerprint), planned.tensors


def image_of(planned: PlannedImage, manager: LifetimeManager, slots: int | None = None, objects: bytes = b"") -> Image:
    """A leased image with ``slots`` slots (None: one for every chunk)."""
    layout = planned.plan.layout
    image_bytes = align_up(layout.tensor_bytes + len(objects), PAGE_BYTES)
    chunks = file_chunks(layout, image_bytes)
    slots = slots or len(chunks)
    nbytes = min(slots * layout.chunk_bytes, image_bytes)
    lease = manager.acquire(ArenaSpec(nbytes=nbytes, kind="pageable", source=None), timeout_secs=TIMEOUT)
    return Image(
        lease=lease,
        chunks=chunks,
        chunk_bytes=layout.chunk_bytes,
        slots=slots,
        written=tuple(Future() for _ in chunks[slots:]),
    )


async def save_image(
    planned: PlannedSave,
    image: Image,
    storage: Storage,
    executor: Executor,
    path: Path,
    *,
    objects: bytes = b"",
    workers: int = 2,
    renders_constants: bool = True,
) -> WriteResult:
    """Capture in a trainer's thread while this loop writes; the lease is closed at the end, come what may."""
    chunks = CapturedChunks(len(image.chunks), StallTimer())
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as trainer:
        capturing = trainer.submit(
            capture,
            planned,
            image,
            CopyEngines(),
            guarded=frozenset(),
            on_captured=lambda runs: loop.call_soon_threadsafe(chunks.add, list(runs)),
            slot_timeout_secs=TIMEOUT,
        )
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_finish, capturing)
                writer = FileWriter(storage=storage, executor=executor, workers=workers, thread_wait_secs=TIMEOUT)
                result = await writer.write_image(
                    image,
                    ChunkPreparer(planned.plan.layout, objects, renders_constants=renders_constants),
                    path,
                    issued=chunks.wait_issued,
                    captured=lambda chunk: chunks.wait(chunk.index, executor),
                )
        finally:
            for future in image.written:  # frees a capture that waits for a slot
                if not future.done():
                    future.set_exception(OSError("the write ended"))
            image.lease.close()
    return result


async def _finish(capturing: Future[Capture]) -> None:
    (await asyncio.wrap_future(capturing)).finish()
