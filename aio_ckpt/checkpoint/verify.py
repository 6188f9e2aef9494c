"""Verify a checkpoint: read every byte once and list all faults. Changes nothing and runs no code of others."""

from __future__ import annotations

import errno
import itertools
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from aio_ckpt.checkpoint.catalog import StoredObject, UnparsedItem, batches
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.fetch import fetch
from aio_ckpt.checkpoint.foreign_items import check_zip, parse_item, parse_or_object
from aio_ckpt.checkpoint.locate import Ends, check_inside, read_ends
from aio_ckpt.checkpoint.open import Checkpoint, check_metadata, check_rank, open_checkpoint
from aio_ckpt.checkpoint.read_plan import ObjectMemory, ReadPlan
from aio_ckpt.checkpoint.read_requests import REQUEST_BYTES_MAX, ReadRequest, ReassemblyBuffer, Row, group_into_requests
from aio_ckpt.errors import (
    AioCkptError,
    CorruptCheckpointError,
    FormatVersionError,
    MismatchError,
    ReadError,
    SystemLimitError,
)
from aio_ckpt.format.checkpoint_files import METADATA_FILE, root_manifest_name, save_of_metadata
from aio_ckpt.format.checksum import crc32_of_parts
from aio_ckpt.format.constants import TensorSpec
from aio_ckpt.format.dtypes import DTYPES
from aio_ckpt.format.rank_manifest import FileTable, RankManifest
from aio_ckpt.format.tensor_columns import TensorEntry
from aio_ckpt.format.tensor_zip import fill_crc, render
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.state.skeleton import decode_skeleton
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.small_files import read_root_of, read_small_file, saves_in

_PART_BYTES = 2 << 20
"""Most bytes of a file that are summed at once."""
_OBJECT_BYTES = 64 << 20
"""Most bytes of the objects of plain DCP that are in memory at once, unless one is longer."""
_ITEMS_AT_ONCE = 1024
"""Most items of plain DCP whose ends are in memory at once: 40 KiB each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of a checkpoint."""

    file: str
    """Path of the file, relative to the checkpoint."""
    tensor: str | None
    """Name of the tensor or object; None if the fault belongs to none."""
    message: str
    is_damage: bool = True
    """False if the system failed to read: that tells nothing of the bytes."""

    def __str__(self) -> str:
        tensor = f" {self.tensor!r}" if self.tensor else ""
        return f"{self.file}{tensor}: {self.message.removeprefix(f'{self.file}: ')}"


SharedFile: TypeAlias = tuple[tuple[int, int, int], int, bytes]
"""Identity, length and sums of a data file that several checkpoints share by hard links."""


class _CheckedRange(NamedTuple):
    """Range of bytes of a file with a CRC32 of its own."""

    start: int
    nbytes: int
    crc32: int
    name: str
    """Tensor or object of these bytes."""


async def verify_checkpoint(
    storage: Storage,
    path: Path,
    *,
    step: int | None = None,
    executor: Executor,
    readers: int,
    on_progress: Callable[[int], None],
    sound: set[SharedFile] | None = None,
) -> tuple[Fault, ...]:
    """Return all faults of the checkpoint at ``path``; empty if every byte is as it was written.

    A checkpoint of aio_ckpt: the small files are checked against each other, each data file, block and object against
    its CRC32, and the zip of each item against manifest and ``.metadata``. A checkpoint of plain DCP: each zip record
    is checked against its CRC32.

    Args:
        step: step in the name of the directory; None if the name holds none.
        on_progress: called with the number of bytes read since its last call.
        sound: files of several checkpoints that were read and have no fault. They are not read again, and this one's
            are added.

    Raises:
        CheckpointNotFoundError: there is neither ``.metadata`` nor a root manifest.
        FormatVersionError: a newer major version wrote the checkpoint.
        SystemLimitError: the process may open no more files.
    """
    async with Files(storage, path, page_cache="pass") as files:
        run = _Verification(files, executor, readers, on_progress, sound)
        return await run.faults_of(storage, step, run.check_own)


async def verify_files(
    storage: Storage,
    path: Path,
    *,
    step: int | None = None,
    executor: Executor,
    readers: int,
    on_progress: Callable[[int], None],
) -> tuple[Fault, ...]:
    """Return the faults of the files of a checkpoint; empty if every byte is as it was written.

    Unlike :func:`verify_checkpoint`, this does not compare what the files of a checkpoint of aio_ckpt tell of each
    item, which takes 0.1 ms of the interpreter for each. It takes and raises the same.
    """
    async with Files(storage, path, page_cache="pass") as files:
        run = _Verification(files, executor, readers, on_progress)
        return await run.faults_of(storage, step, run.check_files)


async def _open(storage: Storage, path: Path, executor: Executor, faults: list[Fault]) -> Checkpoint | None:
    """Open the checkpoint and add the faults of its small files to ``faults``.

    If some small files do not match, the checkpoint holds the others. None if the root manifest cannot be read.
    """
    try:
        return await open_checkpoint(storage, path, executor=executor)
    except FormatVersionError:
        raise
    except CorruptCheckpointError as error:
        first = error
    metadata = await read_small_file(storage, path / METADATA_FILE)
    try:
        save_id = None if metadata is None else save_of_metadata(metadata)
    except MismatchError:
        save_id = None
    saves = await saves_in(storage, path) if save_id is None else [save_id]
    try:
        if len(saves) != 1:
            raise first
        root = await read_root_of(storage, path, saves[0])
    except CorruptCheckpointError as error:
        file = METADATA_FILE if error is first else root_manifest_name(saves[0])
        faults.append(Fault(file=file, tensor=None, message=str(error)))
        return None
    wrong = check_metadata(root, metadata or b"")
    if wrong:
        faults.append(Fault(file=METADATA_FILE, tensor=None, message=wrong))
    ranks: dict[int, RankManifest] = {}
    for rank, entry in enumerate(root.ranks):
        with _collecting(faults, entry.name):
            data = await read_small_file(storage, path / entry.name, max_bytes=entry.nbytes)
            ranks[rank] = check_rank(root, rank, data)
    metadata_bytes = b"" if wrong or metadata is None else metadata
    return Checkpoint(path=path, step=root.step, metadata_bytes=metadata_bytes, root=root, ranks=ranks)


@contextmanager
def _collecting(faults: list[Fault], file: str, tensor: str | None = None) -> Iterator[None]:
    """Add an error of the block to ``faults``."""
    try:
        yield
    except AioCkptError as error:
        faults.append(fault_of(error, file=file, tensor=tensor))


def fault_of(error: AioCkptError, *, file: str, tensor: str | None) -> Fault:
    """Return the fault that ``error`` tells.

    Raises:
        SystemLimitError: the process may open no more files, which tells nothing of this one.
    """
    if isinstance(error, SystemLimitError):
        raise error
    if isinstance(error, ReadError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise SystemLimitError(error.errno, error.strerror, error.filename) from error
    return Fault(
        file=file, tensor=tensor, message=str(error), is_damage=not isinstance(error, ReadError | FormatVersionError)
    )


@dataclass(slots=True)
class _Verification:
    """Verification of one checkpoint. It collects the faults and goes on after each."""

    files: Files
    executor: Executor
    readers: int
    on_progress: Callable[[int], None]
    sound: set[SharedFile] | None = None
    faults: list[Fault] = field(default_factory=list)

    async def faults_of(
        self, storage: Storage, step: int | None, check_own: Callable[[Checkpoint], Coroutine[Any, Any, None]]
    ) -> tuple[Fault, ...]:
        """Open the checkpoint, with all that can be read of it, check its step and then its data, one of ours by
        ``check_own``. Returns the faults."""
        checkpoint = await _open(storage, self.files.directory, self.executor, self.faults)
        if checkpoint is not None:
            root = checkpoint.root
            if root is not None and not root.is_of_step(step):
                message = f"holds step {root.step}, its directory is named for step {step}: renamed or swapped"
                self._note(root_manifest_name(root.save_id), None, message)
            await (self.check_plain if checkpoint.is_plain_dcp else check_own)(checkpoint)
        return tuple(self.faults)

    async def check_files(self, checkpoint: Checkpoint) -> None:
        """Check the data files of aio_ckpt against their sums in the manifests."""
        for manifest in checkpoint.ranks.values():
            for table in manifest.data_files:
                with _collecting(self.faults, table.file.name):
                    known = len(self.faults)
                    crc32 = await self._sum_file(table)
                    if crc32 not in (None, table.file.crc32) and len(self.faults) == known:
                        self._note(table.file.name, None, "the file does not match its CRC32")

    async def check_own(self, checkpoint: Checkpoint) -> None:
        """Check a checkpoint of aio_ckpt: the data file of each rank against its manifest and ``.metadata``."""
        places: dict[MetadataIndex, _ItemRange] = {}
        for manifest in checkpoint.ranks.values():
            name = checkpoint.manifest_name(manifest.rank)
            if checkpoint.has_skeleton:
                with _collecting(self.faults, name):
                    decode_skeleton(manifest.skeleton, name=name)
            for table in manifest.data_files:
                places.update(_places_of(table))
                with _collecting(self.faults, table.file.name):
                    await self._check_data_file(table)
        root = checkpoint.root
        if checkpoint.metadata_bytes and root is not None and len(checkpoint.ranks) == root.world_size:
            with _collecting(self.faults, METADATA_FILE):
                await run_blocking(self.executor, self._compare_metadata, checkpoint, places)

    async def check_plain(self, checkpoint: Checkpoint) -> None:
        """Check a checkpoint of stock DCP."""
        with _collecting(self.faults, METADATA_FILE):
            catalog = checkpoint.catalog
            items: dict[str, list[UnparsedItem]] = {file: [] for file in catalog.files}
            objects: dict[str, list[StoredObject]] = {file: [] for file in catalog.files}
            for shard in itertools.chain.from_iterable(catalog.shards.values()):
                if isinstance(shard, UnparsedItem):
                    items[shard.file].append(shard)
            for stored in catalog.objects.values():
                objects[stored.file].append(stored)
            for file in sorted(catalog.files):
                with _collecting(self.faults, file):
                    await self.files.measure([file], catalog.files)
                    ranges, others = await self._record_ranges(items[file])
                    await self._check_ranges(file, ranges)
                    await self._check_zips(file, [*others, *objects[file]])

    # -- checkpoints of aio_ckpt ---------------------------------------------------------------------------------------

    async def _check_data_file(self, table: FileTable) -> None:
        file, shared = table.file, None
        if self.sound is not None:
            status = await self.files.status(file.name)
            if status is not None and status.links > 1:
                shared = status.identity, file.nbytes, table.sums
            if shared in self.sound:
                self.on_progress(file.nbytes)
                return
        known = len(self.faults)
        crc32 = await self._sum_file(table)
        unparsed_items = [_unparsed_item_of(entry, file.name) for entry in table.tensors]
        ends = await read_ends(self.files, unparsed_items, executor=self.executor, readers=self.readers)
        others = await run_blocking(self.executor, self._compare_items, table, unparsed_items, ends)
        # A fault of a block or an item explains a wrong checksum of the file, and names the tensor.
        if crc32 not in (None, file.crc32) and len(self.faults) == known:
            for name in others:
                self._note(file.name, name, "the file does not match its CRC32: the item's zip is not as written")
            if not others:
                self._note(file.name, None, "the file does not match its CRC32, outside of tensors and objects")
        if self.sound is not None and shared is not None and len(self.faults) == known:
            self.sound.add(shared)

    def _compare_items(self, table: FileTable, unparsed_items: Sequence[UnparsedItem], ends: Ends) -> list[str]:
        """Compare the zip of each item with the manifest. Return the items that are not as this version renders them.

        These may be sound, because another version may have rendered them.
        """
        others = list[str]()
        for entry, sums, unparsed in zip(table.tensors, table.block_sums(), unparsed_items, strict=True):
            starts = range(0, entry.raw_bytes, table.block_bytes)
            lengths = [min(table.block_bytes, entry.raw_bytes - at) for at in starts]
            crc32 = crc32_of_parts(zip(sums, lengths, strict=True))
            head, tail = ends[id(unparsed)]
            if _is_as_rendered(entry, unparsed.dtype, crc32, head, tail):  # to parse takes 20 times as long
                continue
            others.append(unparsed.name)
            with _collecting(self.faults, unparsed.file, unparsed.name):
                item = parse_item(unparsed, head, tail)
                place = item.raw_offset, item.raw_bytes, item.stride, item.storage_offset
                if place != (entry.raw_offset, entry.raw_bytes, entry.stride, 0):
                    self._note(unparsed.file, unparsed.name, f"the manifest and the item's zip disagree: {place}")
                if item.record_crc32 not in (None, crc32):
                    self._note(unparsed.file, unparsed.name, "the CRC32 in the item's zip is not that of its blocks")
        return others

    def _compare_metadata(self, checkpoint: Checkpoint, places: Mapping[MetadataIndex, _ItemRange]) -> None:
        stored = {
            index: (info.relative_path, info.offset, info.length)
            for index, info in (checkpoint.metadata.storage_data or {}).items()
        }
        # A tensor that is stored as bytes has an offset in .metadata and none in the manifest.
        anywhere = {(index.fqn, place) for index, place in stored.items()}
        for index, place in places.items():
            if stored.get(index) != place and (index.offset is not None or (index.fqn, place) not in anywhere):
                self._note(METADATA_FILE, index.fqn, f"tells another place than the manifest: {place}")
        if len(stored) > len(places) or checkpoint.metadata.state_dict_metadata.keys() != checkpoint.catalog.names():
            self._note(METADATA_FILE, None, "names more or less than the manifests")

    # -- plain DCP ----------------------------------------------------------------------------------

    async def _record_ranges(
        self, unparsed_items: Iterable[UnparsedItem]
    ) -> tuple[list[_CheckedRange], list[StoredObject]]:
        """Return the ranges to check of plain tensors, and the other tensors (such as subclasses) as objects.

        The zip of such an object has checksums, too.
        """
        ranges, others = list[_CheckedRange](), list[StoredObject]()
        inside: list[UnparsedItem] = []
        for unparsed in (unparsed for unparsed in unparsed_items if not unparsed.is_transformed):
            with _collecting(self.faults, unparsed.file, unparsed.name):
                check_inside(unparsed.name, unparsed.file, unparsed.item_offset, unparsed.item_bytes, self.files.sizes)
                inside.append(unparsed)
        for start in range(0, len(inside), _ITEMS_AT_ONCE):
            few = inside[start : start + _ITEMS_AT_ONCE]
            ends: Ends = {}
            with _collecting(self.faults, few[0].file):
                ends = await read_ends(self.files, few, executor=self.executor, readers=self.readers)
            for unparsed in few if ends else ():
                with _collecting(self.faults, unparsed.file, unparsed.name):
                    found = parse_or_object(unparsed, *ends[id(unparsed)])
                    if isinstance(found, StoredObject):
                        others.append(found)
                    elif found.record_crc32 is not None:
                        ranges.append(_CheckedRange(found.raw_offset, found.raw_bytes, found.record_crc32, found.name))
        return ranges, others

    async def _check_zips(self, file: str, objects: Iterable[StoredObject]) -> None:
        inside: list[StoredObject] = []
        for stored in objects:
            if stored.is_transformed:
                continue
            with _collecting(self.faults, file, stored.name):
                check_inside(stored.name, file, stored.offset, stored.nbytes, self.files.sizes)
                inside.append(stored)
        for few in batches(inside, _OBJECT_BYTES):
            plan = ReadPlan()
            memory = plan.add_objects(few)
            requests = plan.requests(self.readers)
            await fetch(self.files, requests, executor=self.executor, readers=self.readers, verify=True)
            await run_blocking(self.executor, self._compare_zips, memory)

    def _compare_zips(self, objects: ObjectMemory) -> None:
        for stored in objects.begins:
            with _collecting(self.faults, stored.file, stored.name):
                check_zip(stored.name, objects.bytes_of(stored))

    # -- sums ---------------------------------------------------------------------------------------

    async def _sum_file(self, table: FileTable) -> int | None:
        """Do :meth:`_check_ranges` for a data file of aio_ckpt, once its length is that of the manifest."""
        file = table.file
        await self.files.measure([file.name], {file.name: file.nbytes})
        return await self._check_ranges(file.name, _checked_ranges(table))

    async def _check_ranges(self, file: str, ranges: Sequence[_CheckedRange]) -> int | None:
        """Read ``file`` once and note each range that does not match. Returns the CRC32 of the file.

        Returns None if a part of the file could not be read. The ranges in that part are not compared.
        """
        cuts = _cuts(ranges, self.files.sizes[file])
        sums = ReassemblyBuffer(label=file, start=0, nbytes=cuts[-1], pieces_left=len(cuts) - 1)
        sums.sums = [(0, 0)] * (len(cuts) - 1)
        rows: list[Row] = [
            (start, stop - start, -1, 0, 0, file, sums, number)
            for number, (start, stop) in enumerate(itertools.pairwise(cuts))
        ]
        unread: set[int] = set()

        def on_read(request: ReadRequest, error: AioCkptError | None) -> None:
            if error is not None:
                unread.update(request.pieces.positions.tolist())
                self.faults.append(fault_of(error, file=file, tensor=None))
            self.on_progress(int(request.pieces.nbytes.sum()))

        requests = group_into_requests(file, rows, REQUEST_BYTES_MAX) if rows else []
        await fetch(self.files, requests, executor=self.executor, readers=self.readers, verify=True, on_read=on_read)

        def sum_of(start: int, stop: int) -> int | None:
            parts = range(bisect_left(cuts, start), bisect_left(cuts, stop))
            return None if unread.intersection(parts) else crc32_of_parts(sums.sums[part] for part in parts)

        for checked in ranges:
            stop = checked.start + checked.nbytes
            if sum_of(checked.start, stop) not in (None, checked.crc32):
                message = f"bytes {checked.start} to {stop} of the file do not match their CRC32"
                self._note(file, checked.name, message)
        return sum_of(0, cuts[-1])

    def _note(self, file: str, tensor: str | None, message: str) -> None:
        self.faults.append(Fault(file=file, tensor=tensor, message=message))


# -- pure -------------------------------------------------------------------------------------------

_ItemRange: TypeAlias = tuple[str, int, int]
"""(file, offset, length)."""


def _places_of(table: FileTable) -> dict[MetadataIndex, _ItemRange]:
    """Return the places of all items of one data file, as ``.metadata`` must hold them."""
    places: dict[MetadataIndex, _ItemRange] = {}
    file = table.file.name
    for entry in table.tensors:
        for name in entry.fqns:
            places[MetadataIndex(name, entry.offsets)] = file, entry.item_offset, entry.item_bytes
    for stored in table.objects:
        for name in stored.fqns:
            places[MetadataIndex(name)] = file, stored.offset, stored.nbytes
    return places


def _is_as_rendered(entry: TensorEntry, dtype: torch.dtype, crc32: int, head: bytearray, tail: bytearray) -> bool:
    """Return whether an item's header and trailer are what this version renders for the manifest's ``entry``."""
    wanted = render(TensorSpec(dtype, entry.shape, entry.stride))
    trailer = bytearray(wanted.trailer)
    fill_crc(trailer, wanted, crc32)
    begin = len(wanted.header)
    place = entry.raw_offset - entry.item_offset, entry.raw_bytes, entry.item_bytes
    is_in_place = place == (begin, wanted.raw_bytes, begin + wanted.raw_bytes + len(trailer))
    return is_in_place and head.startswith(wanted.header) and tail.endswith(trailer)


def _unparsed_item_of(entry: TensorEntry, file: str) -> UnparsedItem:
    return UnparsedItem(
        name=entry.fqns[0],
        file=file,
        item_offset=entry.item_offset,
        item_bytes=entry.item_bytes,
        dtype=DTYPES[entry.dtype],
        shape=entry.shape,
        offsets=entry.offsets,
        is_transformed=False,
    )


def _checked_ranges(table: FileTable) -> list[_CheckedRange]:
    """Return every block and object of one data file."""
    ranges: list[_CheckedRange] = []
    block = table.block_bytes
    for entry, sums in zip(table.tensors, table.block_sums(), strict=True):
        for at, crc32 in zip(range(0, entry.raw_bytes, block), sums, strict=True):
            ranges.append(_CheckedRange(entry.raw_offset + at, min(block, entry.raw_bytes - at), crc32, entry.fqns[0]))
    ranges += [_CheckedRange(stored.offset, stored.nbytes, stored.crc32, stored.fqns[0]) for stored in table.objects]
    return ranges


def _cuts(ranges: Iterable[_CheckedRange], nbytes: int) -> list[int]:
    """Return the ascending offsets that cut a file into parts to sum. Each range is one part, or several.

    The parts have at most ``_PART_BYTES``, also if ranges overlap.
    """
    starts = {checked.start for checked in ranges}
    return sorted({*range(0, nbytes, _PART_BYTES), nbytes, *starts, *(each.start + each.nbytes for each in ranges)})
