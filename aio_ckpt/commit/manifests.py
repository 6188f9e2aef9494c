"""Render the manifests of a save from its plan and its write results. Pure."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from isal import isal_zlib

from aio_ckpt._version import __version__
from aio_ckpt.format.checkpoint_files import METADATA_FILE, data_file_name, trailer
from aio_ckpt.format.dcp_metadata_write import MetadataTemplate
from aio_ckpt.format.rank_manifest import ObjectEntry, encode_rank
from aio_ckpt.format.root_manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FileEntry,
    RootManifest,
    encode_root,
)
from aio_ckpt.leaves.objects import ObjectBytes
from aio_ckpt.plan.local_plan import Plan
from aio_ckpt.write.result import WriteResult

_VERSIONS = {
    "aio_ckpt": __version__,
    "torch": str(torch.__version__),
    "python": platform.python_version(),
}


def object_entries(plan: Plan, objects: ObjectBytes) -> list[ObjectEntry]:
    """Return one entry for each distinct object. Names whose objects have equal bytes share an entry."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, span in zip(plan.object_names, objects.spans, strict=True):
        names.setdefault(span, []).append(name)
    begin, region = plan.layout.tensor_bytes, memoryview(objects.region)
    return [
        ObjectEntry(tuple(fqns), begin + start, nbytes, isal_zlib.crc32(region[start : start + nbytes]))
        for (start, nbytes), fqns in names.items()
    ]


def written_names(plan: Plan, entries: Sequence[ObjectEntry], result: WriteResult) -> frozenset[str]:
    """Return the names of the leaves that were written completely, according to the write result."""
    lost = [chunk for chunk in range(result.chunks) if chunk not in result.chunks_written]
    spans = [(item.fqns, item.item_offset, item.envelope.item_bytes) for item in plan.layout.items] if lost else []
    spans += [(entry.fqns, entry.offset, entry.nbytes) for entry in entries] if lost else []
    size = plan.layout.chunk_bytes
    holes = {
        name
        for names, start, nbytes in spans
        if any(start // size <= chunk <= (start + nbytes - 1) // size for chunk in lost)
        for name in names
    }
    unpatched = plan.stored_names if result.items_patched != len(plan.layout.items) else frozenset()
    stored, gone = plan.stored_names, unpatched | holes
    stored = stored.union(*(entry.fqns for entry in entries)) if entries else stored
    return stored - gone if gone else stored


def render_rank(
    plan: Plan,
    entries: Sequence[ObjectEntry],
    result: WriteResult,
    *,
    step: int,
    save_id: str,
    rank: int,
    world_size: int,
) -> bytes:
    """Return the bytes of the rank's manifest."""
    return encode_rank(
        save_id=save_id,
        step=step,
        rank=rank,
        world_size=world_size,
        file=FileEntry(data_file_name(save_id, rank), result.image_bytes, result.file_crc32),
        tensors=plan.tensors_static,
        sums=result.sums,
        objects=entries,
        skeleton=plan.skeleton,
        stored_by=plan.stored_by,
    )


@dataclass(frozen=True, slots=True)
class MetadataFile:
    """``.metadata``, with its length and CRC32 for the root manifest."""

    parts: tuple[bytes, ...]
    """Bytes of the file, in parts. The part that is the same for every save of a plan is never copied."""
    entry: FileEntry


def render_metadata_file(
    template: MetadataTemplate, spans: Sequence[tuple[int, int]], *, checkpoint_id: str, save_id: str
) -> MetadataFile:
    """Fill a template of ``.metadata`` with the places of this save's objects: (offset in the data file, length)."""
    start, fixed, rest = template.fill(spans, checkpoint_id=checkpoint_id, save_id=save_id)
    rest += trailer(save_id)
    crc32 = isal_zlib.crc32_combine(isal_zlib.crc32(start), template.fixed_crc32, len(fixed))
    nbytes = len(start) + len(fixed) + len(rest)
    return MetadataFile((start, fixed, rest), FileEntry(METADATA_FILE, nbytes, isal_zlib.crc32(rest, crc32)))


def object_spans(plan: Plan, objects: ObjectBytes) -> tuple[tuple[int, int], ...]:
    """Return (offset in the data file, length) of each object."""
    begin = plan.layout.tensor_bytes
    return tuple((begin + start, nbytes) for start, nbytes in objects.spans)


def metadata_file(data: bytes) -> MetadataFile:
    """Return the :class:`MetadataFile` of a ``.metadata`` that was rendered before."""
    entry = FileEntry(METADATA_FILE, len(data), isal_zlib.crc32(data))
    return MetadataFile((data,), entry)


def render_root(
    metadata: MetadataFile,
    ranks: Sequence[FileEntry],
    *,
    step: int,
    save_id: str,
    created_unix: float,
    metrics: Mapping[str, float | None],
    extra: Mapping[str, Any],
    files: Iterable[str] = (),
) -> bytes:
    """Return the bytes of the root manifest.

    ``ranks`` are the rank manifests, by rank; ``files`` the names that ``save(files=)`` gave.
    """
    return encode_root(
        RootManifest(
            format=(FORMAT_MAJOR, FORMAT_MINOR),
            save_id=save_id,
            step=step,
            world_size=len(ranks),
            metadata=metadata.entry,
            ranks=tuple(ranks),
            written_by=_VERSIONS,
            created_unix=created_unix,
            metrics=dict(metrics),
            extra=dict(extra),
            files=tuple(files),
        )
    )
