"""Verify: read every byte of a checkpoint once and list all that does not match. Changes nothing, runs no code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

from isal import isal_zlib
from torch.distributed.checkpoint.metadata import MetadataIndex

from aio_ckpt.checkpoint.catalog import Slot, StoredObject
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.fetch import fetch
from aio_ckpt.checkpoint.foreign_items import Ends, check_inside, check_zip, parse_slot, read_ends
from aio_ckpt.checkpoint.open import Checkpoint, check_digest, check_metadata, check_rank, open_checkpoint
from aio_ckpt.checkpoint.read_plan import ReadPlan
from aio_ckpt.checkpoint.requests import PieceRows, ReadRequest, ReassemblyBuffer
from aio_ckpt.errors import AioCkptError, CorruptCheckpointError, FormatVersionError, UnsupportedLeafError
from aio_ckpt.format.constants import PAGE_BYTES, TensorSpec, align_up
from aio_ckpt.format.dcp_metadata_read import DTYPES
from aio_ckpt.format.manifests import (
    METADATA_FILE,
    ROOT_MANIFEST,
    FileEntry,
    RankManifest,
    TensorEntry,
    block_sums,
    decode_root,
    rank_manifest_name,
)
from aio_ckpt.format.tensor_zip import fill_crc, render
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.state.skeleton import decode_skeleton
from aio_ckpt.storage.local import Storage, read_small_file

__all__ = ["Fault", "verify_checkpoint"]

_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong."""

    file: str
    """Relative to the checkpoint."""
    tensor: str | None
    """Name of the tensor or object, where one is known."""
    message: str
    """What is wrong with it."""


class _CheckedRange(NamedTuple):
    """Bytes of a file that have a CRC32 of their own."""

    start: int
    nbytes: int
    crc32: int
    """CRC32 of these bytes."""
    name: str
    """Tensor or object that the bytes belong to."""


async def verify_checkpoint(
    storage: Storage,
    path: Path,
    *,
    step: int | None = None,
    executor: Executor,
    readers: int,
    on_progress: Callable[[int], None],
) -> tuple[Fault, ...]:
    """All faults of the checkpoint at ``path``; none if every byte is as it was written.

    Checked of ours: the small files against each other, the CRC32 of each data file, block and object, and each item's
    zip against manifest and ``.metadata``. Of plain DCP: the CRC32 of each zip record. ``step`` is the one that the
    directory is named for, if it is. ``on_progress`` is given the bytes read since the last call.

    Raises:
        CheckpointNotFoundError: no ``.metadata``, so no checkpoint.
        FormatVersionError: written by a newer major version.
    """
    faults: list[Fault] = []
    checkpoint = await _open(storage, path, executor, faults)
    if checkpoint is not None:
        if step is not None and checkpoint.step not in (None, step):
            message = f"holds step {checkpoint.step}, its directory is named for step {step}: renamed or swapped"
            faults.append(Fault(file=ROOT_MANIFEST, tensor=None, message=message))
        async with Files(storage, path, readers=readers, page_cache="pass") as files:
            run = _Verification(files, executor, readers, on_progress, faults)
            await (run.ours if checkpoint.root else run.plain)(checkpoint)
    return tuple(faults)


async def _open(storage: Storage, path: Path, executor: Executor, faults: list[Fault]) -> Checkpoint | None:
    """The checkpoint; if its small files do not match, what is left of it."""
    try:
        return await open_checkpoint(storage, path, executor=executor)
    except FormatVersionError:
        raise
    except CorruptCheckpointError as error:
        first = error
    metadata = await read_small_file(storage, path / METADATA_FILE)
    root_data = await read_small_file(storage, path / ROOT_MANIFEST)
    try:
        root = decode_root(root_data or b"", name=ROOT_MANIFEST)
    except CorruptCheckpointError:
        faults.append(Fault(file=ROOT_MANIFEST, tensor=None, message=str(first)))
        return None
    wrong = check_metadata(root, metadata or b"")
    if wrong:
        faults.append(Fault(file=METADATA_FILE, tensor=None, message=wrong))
    ranks = []
    for rank, entry in enumerate(root.ranks):
        with _noting(faults, entry.name):
            data = await read_small_file(storage, path / entry.name, max_bytes=entry.nbytes)
            ranks.append(check_rank(root, rank, data))
    metadata_bytes = b"" if wrong or metadata is None else metadata
    return Checkpoint(path=path, step=root.step, metadata_bytes=metadata_bytes, root=root, ranks=tuple(ranks))


@contextmanager
def _noting(faults: list[Fault], file: str, tensor: str | None = None) -> Iterator[None]:
    """Note an error of the block as a fault."""
    try:
        yield
    except AioCkptError as error:
        faults.append(Fault(file=file, tensor=tensor, message=str(error)))


@dataclass(slots=True)
class _Verification:
    """One verification: notes faults and goes on."""

    files: Files
    executor: Executor
    """Threads that read and sum."""
    readers: int
    on_progress: Callable[[int], None]
    """Told of bytes read."""
    faults: list[Fault]

    async def ours(self, checkpoint: Checkpoint) -> None:
        """Every rank's data file, against its manifest and ``.metadata``."""
        places: dict[MetadataIndex, _Place] = {}
        for manifest in checkpoint.ranks:
            places.update(_places_of(manifest))
            name = rank_manifest_name(manifest.rank)
            if checkpoint.has_skeleton:
                with _noting(self.faults, name):
                    decode_skeleton(manifest.skeleton, name=name)
            if manifest.file is not None:
                with _noting(self.faults, manifest.file.name):
                    await self._data_file(manifest, manifest.file)
        root = checkpoint.root
        if checkpoint.metadata_bytes and root is not None and len(checkpoint.ranks) == root.world_size:
            with _noting(self.faults, METADATA_FILE):
                check_digest(root, checkpoint.metadata_bytes)
                self._compare_metadata(checkpoint, places)

    async def plain(self, checkpoint: Checkpoint) -> None:
        """A checkpoint of stock DCP."""
        with _noting(self.faults, METADATA_FILE):
            catalog = checkpoint.catalog
            slots = [shard for found in catalog.shards.values() for shard in found if isinstance(shard, Slot)]
            for file in sorted(catalog.files):
                with _noting(self.faults, file):
                    await self.files.measure([file], catalog.files)
                    spans, others = await self._record_spans([slot for slot in slots if slot.file == file])
                    await self._sum_file(file, spans)
                    await self._zips([*others, *(stored for stored in catalog.objects.values() if stored.file == file)])

    # -- ours ---------------------------------------------------------------------------------------

    async def _data_file(self, manifest: RankManifest, file: FileEntry) -> None:
        await self.files.measure([file.name], {file.name: file.nbytes})
        known = len(self.faults)
        crc32 = await self._sum_file(file.name, _spans_of(manifest))
        slots = [_slot_of(entry, file.name) for entry in manifest.tensors]
        ends = await read_ends(self.files, slots, executor=self.executor, readers=self.readers)
        await run_blocking(self.executor, self._compare_items, manifest, slots, ends)
        # A block or an item that does not match explains it, and names the tensor.
        if crc32 not in (None, file.crc32) and len(self.faults) == known:
            await run_blocking(self.executor, self._compare_envelopes, manifest, slots, ends)
        if crc32 not in (None, file.crc32) and len(self.faults) == known:
            self._note(file.name, None, "the file does not match its CRC32, outside of tensors and objects")

    def _compare_items(self, manifest: RankManifest, slots: Sequence[Slot], ends: Ends) -> None:
        for entry, sums, slot in zip(manifest.tensors, block_sums(manifest), slots, strict=True):
            with _noting(self.faults, slot.file, slot.name):
                item = parse_slot(slot, *ends[id(slot)])
                place = item.raw_offset, item.raw_bytes, item.stride, item.storage_offset
                if place != (entry.raw_offset, entry.raw_bytes, entry.stride, 0):
                    self._note(slot.file, slot.name, f"the manifest and the item's zip disagree: {place}")
                lengths = _block_lengths(entry, manifest)
                if item.record_crc32 not in (None, _combine_all(zip(sums, lengths, strict=True))):
                    self._note(slot.file, slot.name, "the CRC32 in the item's zip is not that of its blocks")

    def _compare_envelopes(self, manifest: RankManifest, slots: Sequence[Slot], ends: Ends) -> None:
        """Name the item whose header or trailer is not as we render it; one of another version may differ soundly."""
        for entry, sums, slot in zip(manifest.tensors, block_sums(manifest), slots, strict=True):
            head, tail = ends[id(slot)]
            wanted = render(TensorSpec(slot.dtype, entry.shape, entry.stride))
            trailer = bytearray(wanted.trailer)
            fill_crc(trailer, wanted, _combine_all(zip(sums, _block_lengths(entry, manifest), strict=True)))
            if not (head.startswith(wanted.header) and tail.endswith(trailer)):
                self._note(slot.file, slot.name, "the file does not match its CRC32: the item's zip is not as written")

    def _compare_metadata(self, checkpoint: Checkpoint, places: Mapping[MetadataIndex, _Place]) -> None:
        stored = {
            index: (info.relative_path, info.offset, info.length)
            for index, info in (checkpoint.metadata.storage_data or {}).items()
        }
        # A tensor that is stored as bytes has an offset there and none here.
        anywhere = {(index.fqn, place) for index, place in stored.items()}
        for index, place in places.items():
            if stored.get(index) != place and (index.offset is not None or (index.fqn, place) not in anywhere):
                self._note(METADATA_FILE, index.fqn, f"tells another place than the manifest: {place}")
        if len(stored) > len(places) or checkpoint.metadata.state_dict_metadata.keys() != checkpoint.catalog.names():
            self._note(METADATA_FILE, None, "names more or less than the manifests")

    # -- plain DCP ----------------------------------------------------------------------------------

    async def _record_spans(self, slots: Sequence[Slot]) -> tuple[list[_CheckedRange], list[StoredObject]]:
        """Of the plain tensors, and the others (subclasses, say), whose zips can be proven all the same."""
        spans, others = list[_CheckedRange](), list[StoredObject]()
        for slot in (slot for slot in slots if not slot.is_transformed):
            with _noting(self.faults, slot.file, slot.name):
                ends = await read_ends(self.files, [slot], executor=self.executor, readers=1)
                try:
                    item = parse_slot(slot, *ends[id(slot)])
                except UnsupportedLeafError:
                    others.append(StoredObject.of_slot(slot))
                    continue
                if item.record_crc32 is not None:
                    spans.append(_CheckedRange(item.raw_offset, item.raw_bytes, item.record_crc32, slot.name))
        return spans, others

    async def _zips(self, objects: Iterable[StoredObject]) -> None:
        for stored in objects:
            if stored.is_transformed:
                continue
            with _noting(self.faults, stored.file, stored.name):
                check_inside(stored.name, stored.file, stored.offset, stored.nbytes, self.files.sizes)
                plan = ReadPlan()
                plan.add_object(stored, functools.partial(check_zip, stored.name))
                await fetch(self.files, plan.requests(1), executor=self.executor, readers=1, verify=True)

    # -- sums ---------------------------------------------------------------------------------------

    async def _sum_file(self, file: str, spans: Sequence[_CheckedRange]) -> int | None:
        """Read ``file`` once and note each range that does not match. Return the file's CRC32.

        None if a part of the file could not be read; the ranges in that part are neither proven nor noted.
        """
        nbytes = self.files.sizes[file]
        parts = _cut(spans, nbytes)
        requests = [_summed(file, chunk) for chunk in parts]
        failed: set[int] = set()

        def on_read(request: ReadRequest, error: AioCkptError | None) -> None:
            if error is not None:
                failed.add(request.start)
                self._note(file, None, str(error))
            self.on_progress(min(request.stop, nbytes) - request.start)

        await fetch(self.files, requests, executor=self.executor, readers=self.readers, verify=True, on_read=on_read)
        total: int | None = 0
        sums: dict[int, int | None] = {}
        for request, chunk in zip(requests, parts, strict=True):
            is_read = request.start not in failed
            for (number, _, _), (crc32, part_bytes) in zip(chunk, request.pieces.reassemblies[0].sums, strict=True):
                part_sum = crc32 if is_read else None
                if number >= 0:
                    sums[number] = _combine(sums.get(number, 0), part_sum, part_bytes)
                if number == _WHOLE or chunk[0][0] != _WHOLE:
                    total = _combine(total, part_sum, part_bytes)
        for number, span in enumerate(spans):
            if sums.get(number) not in (None, span.crc32):
                where = f"bytes {span.start} to {span.start + span.nbytes} of the file"
                self._note(file, span.name, f"{where} do not match their CRC32")
        return total

    def _note(self, file: str, tensor: str | None, message: str) -> None:
        self.faults.append(Fault(file=file, tensor=tensor, message=message))


# -- pure -------------------------------------------------------------------------------------------

_Place: TypeAlias = tuple[str, int, int]
"""File, offset, length."""

_Part: TypeAlias = tuple[int, int, int]
"""Number of the range, or ``_GAP`` or ``_WHOLE``, and the file offsets between which it lies in a chunk."""
_GAP, _WHOLE = -1, -2


def _places_of(manifest: RankManifest) -> dict[MetadataIndex, _Place]:
    """What ``.metadata`` must say of one rank's file."""
    places: dict[MetadataIndex, _Place] = {}
    file = manifest.file.name if manifest.file else ""
    for entry in manifest.tensors:
        for name in entry.fqns:
            places[MetadataIndex(name, entry.offsets)] = file, entry.item_offset, entry.item_bytes
    for stored in manifest.objects:
        for name in stored.fqns:
            places[MetadataIndex(name)] = file, stored.offset, stored.nbytes
    return places


def _block_lengths(entry: TensorEntry, manifest: RankManifest) -> list[int]:
    return [min(manifest.block_bytes, entry.raw_bytes - at) for at in range(0, entry.raw_bytes, manifest.block_bytes)]


def _slot_of(entry: TensorEntry, file: str) -> Slot:
    return Slot(
        name=entry.fqns[0],
        file=file,
        item_offset=entry.item_offset,
        item_bytes=entry.item_bytes,
        dtype=DTYPES[entry.dtype],
        shape=entry.shape,
        offsets=entry.offsets,
        is_transformed=False,
    )


def _spans_of(manifest: RankManifest) -> list[_CheckedRange]:
    """Every block and object of one rank's file."""
    spans: list[_CheckedRange] = []
    block = manifest.block_bytes
    for entry, sums in zip(manifest.tensors, block_sums(manifest), strict=True):
        for at, crc32 in zip(range(0, entry.raw_bytes, block), sums, strict=True):
            spans.append(_CheckedRange(entry.raw_offset + at, min(block, entry.raw_bytes - at), crc32, entry.fqns[0]))
    spans += [_CheckedRange(stored.offset, stored.nbytes, stored.crc32, stored.fqns[0]) for stored in manifest.objects]
    return spans


def _cut(spans: Sequence[_CheckedRange], nbytes: int) -> list[list[_Part]]:
    """For each chunk of the file, the parts of the ranges inside it, and the gaps between them.

    If the parts overlap, which no writer makes, the whole chunk comes first, and there are no gaps.
    """
    parts: list[list[_Part]] = [[] for _ in range(0, nbytes, _CHUNK_BYTES)]
    for number, span in enumerate(spans):
        stop = span.start + span.nbytes
        for chunk in range(span.start // _CHUNK_BYTES, -(-stop // _CHUNK_BYTES)):
            low = max(span.start, chunk * _CHUNK_BYTES)
            parts[chunk].append((number, low, min(stop, (chunk + 1) * _CHUNK_BYTES)))
    starts = range(0, nbytes, _CHUNK_BYTES)
    return [
        _filled(found, start, min(start + _CHUNK_BYTES, nbytes)) for start, found in zip(starts, parts, strict=True)
    ]


def _filled(parts: Sequence[_Part], start: int, stop: int) -> list[_Part]:
    filled: list[_Part] = []
    position = start
    for part in sorted(parts, key=lambda part: part[1]):
        _, low, high = part
        if low < position:
            return [(_WHOLE, start, stop), *parts]
        if low > position:
            filled.append((_GAP, position, low))
        filled.append(part)
        position = high
    if position < stop:
        filled.append((_GAP, position, stop))
    return filled


def _summed(file: str, parts: Sequence[_Part]) -> ReadRequest:
    """Read one chunk of the file; the ``sums`` of its buffer get the CRC32 of each part, in their order."""
    start, stop = parts[0][1], max(high for _, _, high in parts)
    buffer = ReassemblyBuffer(label=file, start=start, nbytes=stop - start)
    buffer.sums, buffer.pieces_left = [(0, 0)] * len(parts), len(parts)
    rows = PieceRows()
    for index, (_, low, high) in enumerate(parts):
        rows.rows.append((low, high - low, -1, 0, 0, file, buffer, index))
    return ReadRequest(file=file, start=start, stop=align_up(stop, PAGE_BYTES), pieces=rows.ascending())


def _combine(first: int | None, second: int | None, nbytes: int) -> int | None:
    """CRC32 of two runs of bytes, the second ``nbytes`` long; None if either could not be read."""
    if first is None or second is None:
        return None
    return int(isal_zlib.crc32_combine(first, second, nbytes))


def _combine_all(parts: Iterable[tuple[int, int]]) -> int:
    """CRC32 of consecutive (CRC32, length)."""
    total = 0
    for crc32, nbytes in parts:
        total = isal_zlib.crc32_combine(total, crc32, nbytes)
    return total
