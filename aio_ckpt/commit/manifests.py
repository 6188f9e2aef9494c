"""Render the manifests of a save from its plan and its write results, once these are complete. Pure."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from aio_ckpt._version import __version__
from aio_ckpt.errors import PlanChangedError
from aio_ckpt.format.checkpoint_files import METADATA_FILE, data_file_name, trailer
from aio_ckpt.format.checksum import crc32_combine, crc32_of
from aio_ckpt.format.dcp_metadata_write import MetadataTemplate
from aio_ckpt.format.rank_manifest import FrozenOut, ObjectEntry, encode_rank
from aio_ckpt.format.root_manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FROZEN_FORMAT,
    FileEntry,
    RootManifest,
    encode_root,
)
from aio_ckpt.leaves.objects import ObjectBytes
from aio_ckpt.plan.save_plan import Plan
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
    begin, region = _objects_at(plan), memoryview(objects.region)
    return [
        ObjectEntry(tuple(fqns), begin + start, nbytes, crc32_of(region[start : start + nbytes]))
        for (start, nbytes), fqns in names.items()
    ]


def _objects_at(plan: Plan) -> int:
    """Return the offset of the objects in the data file."""
    return plan.layout.tensor_bytes - plan.layout.main_start


def written_names(plan: Plan, entries: Sequence[ObjectEntry], results: Sequence[WriteResult]) -> frozenset[str]:
    """Return the names of the leaves that were written completely, according to the results of all data files."""
    layout, written = plan.layout, frozenset[int]().union(*(result.chunks_written for result in results))
    lost = [chunk for chunk in range(sum(result.chunks for result in results)) if chunk not in written]
    spans = [(item.fqns, item.item_offset, item.envelope.item_bytes) for item in layout.items] if lost else []
    spans += [(entry.fqns, layout.main_start + entry.offset, entry.nbytes) for entry in entries] if lost else []
    holes = {
        name
        for names, start, nbytes in spans
        if any(layout.chunk_at(start) <= chunk <= layout.chunk_at(start + nbytes - 1) for chunk in lost)
        for name in names
    }
    patched = sum(result.items_patched for result in results)
    unpatched = plan.stored_names if patched != len(layout.items) else frozenset()
    stored, gone = plan.stored_names, unpatched | holes
    stored = stored.union(*(entry.fqns for entry in entries)) if entries else stored
    return stored - gone if gone else stored


def check_complete(requested: frozenset[str], written: frozenset[str]) -> None:
    """Check the post-condition of every save: the written leaves are exactly the requested ones.

    Raises:
        PlanChangedError: the sets differ; the message names up to five missing and five extra leaves.
    """
    if requested == written:
        return
    missing, extra = sorted(requested - written)[:5], sorted(written - requested)[:5]
    raise PlanChangedError(
        f"the plan does not cover the state: not written {missing}, not asked for {extra}; "
        "nothing was committed and the next save plans anew"
    )


def render_rank(
    plan: Plan,
    entries: Sequence[ObjectEntry],
    result: WriteResult,
    frozen: WriteResult | None = None,
    *,
    step: int,
    save_id: str,
    rank: int,
    world_size: int,
) -> bytes:
    """Return the bytes of the rank's manifest. ``frozen``: result of the frozen file, if the plan has one."""
    table = None
    if frozen is not None:
        name = data_file_name(save_id, rank, is_frozen=True)
        table = FrozenOut(
            file=FileEntry(name, frozen.image_bytes, frozen.file_crc32),
            sums=frozen.sums,
            columns=msgspec.Raw(plan.frozen_static),
        )
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
        frozen=table,
    )


@dataclass(frozen=True, slots=True)
class MetadataFile:
    """``.metadata``, with its length and CRC32 for the root manifest."""

    parts: tuple[bytes, ...]
    """Bytes of the file, in parts. The part that is the same for every save of a plan is never copied."""
    entry: FileEntry
    has_frozen: bool = False


def render_metadata_file(
    template: MetadataTemplate, spans: Sequence[tuple[int, int]], *, checkpoint_id: str, save_id: str
) -> MetadataFile:
    """Fill a template of ``.metadata`` with the places of this save's objects: (offset in the data file, length)."""
    start, fixed, rest = template.fill(spans, checkpoint_id=checkpoint_id, save_id=save_id)
    rest += trailer(save_id)
    crc32 = crc32_combine(crc32_of(start), template.fixed_crc32, len(fixed))
    nbytes = len(start) + len(fixed) + len(rest)
    entry = FileEntry(METADATA_FILE, nbytes, crc32_of(rest, crc32))
    return MetadataFile((start, fixed, rest), entry, any(is_frozen for _, is_frozen, _ in template.files))


def object_spans(plan: Plan, objects: ObjectBytes) -> tuple[tuple[int, int], ...]:
    """Return (offset in the data file, length) of each object."""
    begin = _objects_at(plan)
    return tuple((begin + start, nbytes) for start, nbytes in objects.spans)


def metadata_file(data: bytes) -> MetadataFile:
    """Return the :class:`MetadataFile` of a ``.metadata`` that was rendered before."""
    entry = FileEntry(METADATA_FILE, len(data), crc32_of(data))
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
            format=FROZEN_FORMAT if metadata.has_frozen else (FORMAT_MAJOR, FORMAT_MINOR),
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
