"""What a save wrote, as manifests. Pure: from results to bytes."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from isal import isal_zlib

from aio_ckpt._version import __version__
from aio_ckpt.format.dcp_metadata_write import MetadataTemplate
from aio_ckpt.format.manifests import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    METADATA_FILE,
    FileEntry,
    ObjectEntry,
    RootManifest,
    data_file_name,
    encode_rank,
    encode_root,
)
from aio_ckpt.plan.planner import Plan
from aio_ckpt.state.objects import ObjectBytes
from aio_ckpt.write.result import WriteResult

__all__ = [
    "MetadataFile",
    "metadata_file",
    "object_entries",
    "object_spans",
    "render_metadata_file",
    "render_rank",
    "render_root",
    "written_names",
]

_VERSIONS = {
    "aio_ckpt": __version__,
    "torch": str(torch.__version__),
    "python": platform.python_version(),
}


def object_entries(plan: Plan, objects: ObjectBytes) -> list[ObjectEntry]:
    """One entry for each distinct object; names with equal bytes share it."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, span in zip(plan.object_names, objects.spans, strict=True):
        names.setdefault(span, []).append(name)
    begin, region = plan.layout.tensor_bytes, memoryview(objects.region)
    return [
        ObjectEntry(tuple(fqns), begin + start, nbytes, isal_zlib.crc32(region[start : start + nbytes]))
        for (start, nbytes), fqns in names.items()
    ]


def written_names(plan: Plan, entries: Sequence[ObjectEntry], result: WriteResult) -> frozenset[str]:
    """Names of the leaves whose every byte went to the disk, from what the write stage reports."""
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
    unsealed = plan.stored_names if result.items_patched != len(plan.layout.items) else frozenset()
    stored, gone = plan.stored_names, unsealed | holes
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
    """The rank's manifest."""
    return encode_rank(
        save_id=save_id,
        step=step,
        rank=rank,
        world_size=world_size,
        file=FileEntry(data_file_name(rank), result.image_bytes, result.file_crc32),
        tensors=plan.tensors_static,
        sums=result.sums,
        objects=entries,
        skeleton=plan.skeleton,
    )


@dataclass(frozen=True, slots=True)
class MetadataFile:
    """``.metadata`` and what the root manifest says of it."""

    parts: tuple[bytes, ...]
    """Its bytes, one part after the other: what no save changes is copied by none."""
    entry: FileEntry
    """Name, length, CRC32."""
    blake2b: str
    """Hex digest, 32 bytes."""


def render_metadata_file(
    template: MetadataTemplate, spans: Sequence[tuple[int, int]], *, checkpoint_id: str, save_id: str
) -> MetadataFile:
    """DCP's ``.metadata``: a template with the places of this save's objects, (offset in the data file, length)."""
    fixed, rest = template.fill(spans, checkpoint_id=checkpoint_id, save_id=save_id)
    entry = FileEntry(METADATA_FILE, len(fixed) + len(rest), isal_zlib.crc32(rest, template.fixed_crc32))
    digest = template.fixed_blake2b.copy()
    digest.update(rest)
    return MetadataFile((fixed, rest), entry, digest.hexdigest())


def object_spans(plan: Plan, objects: ObjectBytes) -> tuple[tuple[int, int], ...]:
    """(offset in the data file, length) of each object."""
    begin = plan.layout.tensor_bytes
    return tuple((begin + start, nbytes) for start, nbytes in objects.spans)


def metadata_file(data: bytes) -> MetadataFile:
    """What the root manifest says of a ``.metadata`` that was rendered before."""
    entry = FileEntry(METADATA_FILE, len(data), isal_zlib.crc32(data))
    return MetadataFile((data,), entry, hashlib.blake2b(data, digest_size=32).hexdigest())


def render_root(
    metadata: MetadataFile,
    ranks: Sequence[FileEntry],
    *,
    step: int,
    save_id: str,
    created_unix: float,
    metrics: Mapping[str, float | None],
) -> bytes:
    """The root manifest over ``.metadata`` and the rank manifests, by rank."""
    return encode_root(
        RootManifest(
            format=(FORMAT_MAJOR, FORMAT_MINOR),
            save_id=save_id,
            step=step,
            world_size=len(ranks),
            metadata=metadata.entry,
            metadata_blake2b=metadata.blake2b,
            ranks=tuple(ranks),
            written_by=_VERSIONS,
            created_unix=created_unix,
            metrics=dict(metrics),
        )
    )
