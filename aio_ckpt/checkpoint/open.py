"""Open a checkpoint: read its small files and check them against each other. No data file is touched."""

from __future__ import annotations

import errno
import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from aio_ckpt.checkpoint.catalog import Catalog, catalog_of_manifests
from aio_ckpt.checkpoint.foreign_items import catalog_of_metadata
from aio_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, MismatchError
from aio_ckpt.format.checkpoint_files import (
    METADATA_FILE,
    TRAILER_BYTES,
    root_manifest_name,
    save_of_metadata,
)
from aio_ckpt.format.constants import PAGE_BYTES
from aio_ckpt.format.dcp_metadata_read import parse_metadata
from aio_ckpt.format.rank_manifest import RankManifest, decode_rank
from aio_ckpt.format.root_manifest import RootManifest
from aio_ckpt.leaves.containers import Notes
from aio_ckpt.runtime.futures import run_all
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.runtime.waiting import disk_warning
from aio_ckpt.state.names import compound_notes, skeleton_names
from aio_ckpt.state.skeleton import Skeleton, decode_skeleton, has_empty_part, may_hold_compounds
from aio_ckpt.state.skeleton_union import completed
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.small_files import read_root_of, read_small_file, save_of, saves_in

V = TypeVar("V")
MAX_BLOCK_BYTES = 16 << 20
"""Largest block, in bytes. A block is read and summed as a whole; a manifest with a larger one is forged."""

_MANIFESTS_IN_FLIGHT = 8


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Opened checkpoint: its small files, read and checked against each other. No data file was touched."""

    path: Path
    step: int | None
    """Step of the root manifest; None for plain DCP."""
    metadata_bytes: bytes | None
    """Bytes of ``.metadata``, checked against the root manifest if there is one; None if it was not read."""
    root: RootManifest | None
    """None for plain DCP."""
    ranks: Mapping[int, RankManifest]
    """Rank manifests by rank: of all ranks, or of a :class:`RankSubset`; empty for plain DCP."""
    part: RankSubset | None = None
    """The part that was opened; None if all was. Of a part, only the names of its rank are known."""
    names: Mapping[str, str | None] = field(default_factory=dict)
    """Stored name -> name in the template, if they differ; None if another leaf took the name."""

    union: Skeleton | None = None
    """Skeleton of what all ranks hold, if it is read in the place of that of each rank."""

    @property
    def identity(self) -> str:
        """Identity of the save: the same on every rank that opened it, and different from that of any other save."""
        if self.root is not None:
            return self.root.save_id
        assert self.metadata_bytes is not None, "plain DCP has nothing else"
        return hashlib.blake2b(self.metadata_bytes, digest_size=16).hexdigest()

    @property
    def is_plain_dcp(self) -> bool:
        """Whether the checkpoint has no manifests of aio_ckpt, so that only ``.metadata`` describes it."""
        return self.root is None

    @property
    def world_size(self) -> int:
        """Number of ranks that saved; 0 for plain DCP, which does not tell."""
        return 0 if self.root is None else self.root.world_size

    @property
    def stored_bytes(self) -> int:
        """Approximate length of all stored items, in bytes. Of a part, it is estimated."""
        return self.catalog.nbytes * (self.world_size or 1) // (len(self.ranks) or 1)

    @property
    def extra(self) -> Mapping[str, Any]:
        """JSON values that ``save(extra=)`` stored; empty for plain DCP."""
        return {} if self.root is None else self.root.extra

    @property
    def has_skeleton(self) -> bool:
        """Whether the manifests hold the containers of the state. If not, names are as DCP flattened them."""
        return any(rank.skeleton for rank in self.ranks.values())

    @functools.cached_property
    def metadata(self) -> Metadata:
        """Parsed ``.metadata``. Parsed at the first use, because it takes 20 us an entry and the manifests hold it all.

        Raises:
            CorruptCheckpointError: the bytes are no ``.metadata`` of DCP.
            OnlyPartOpenError: they were not read.
        """
        data = self.metadata_bytes
        if data is None:
            raise OnlyPartOpenError
        return parse_metadata(data if self.is_plain_dcp else data[:-TRAILER_BYTES], name=METADATA_FILE)

    @functools.cached_property
    def catalog(self) -> Catalog:
        """Stored names with their items.

        Raises:
            CorruptCheckpointError: the manifests or the metadata contradict themselves.
        """
        found = catalog_of_metadata(self.metadata) if self.is_plain_dcp else catalog_of_manifests(self.ranks.values())
        if self.part is not None:
            found = found.only(self.names_of(self.part.rank))
        return found.renamed(self.names) if self.names else found

    @functools.cached_property
    def stored_names(self) -> Mapping[str, str]:
        """Name in the template -> stored name, if they differ."""
        return {new: stored for stored, new in self.names.items() if new is not None}

    def as_named(self, stored: Iterable[str]) -> list[str]:
        """Return the names in the template of stored ones, less those that ``rename=`` leaves out or gave to others."""
        named = (self.names.get(name, name) for name in stored)
        return [name for name in named if name is not None]

    def stored_name(self, name: str) -> str:
        """Return the stored name of the leaf ``name`` of a template."""
        return self.stored_names.get(name, name)

    def by_stored_name(self, values: Mapping[str, V]) -> Mapping[str, V]:
        """Return values by their stored names, given by the names in the template."""
        return {self.stored_name(name): value for name, value in values.items()} if self.names else values

    def label(self, name: str) -> str:
        """Return the leaf ``name`` of a template as messages name it, with its stored name if that differs."""
        return f"{name!r} (stored as {self.stored_names[name]!r})" if name in self.stored_names else repr(name)

    def holds(self, name: str) -> bool:
        """Return whether a tensor or object is stored for the leaf ``name`` of a template."""
        return name in self.catalog.shards or name in self.catalog.objects

    # -- the state of a rank --------------------------------------------------------------------------

    def skeleton(self, rank: int) -> Skeleton:
        """Return the skeleton that ``rank`` saved; that of rank 0 if there was no such rank.

        Parts that ``rank`` saved as ``{}`` are as rank 0 saved them. If ranks of another number read, it is the union
        of all. Plain DCP has none.
        """
        if self.union is not None:
            return self.union
        if not 0 < rank < self.world_size:
            return self.saved_skeleton(0)
        data = self._stored_skeleton(rank)
        if data not in self._completed:
            saved = self.saved_skeleton(rank)
            is_own = not has_empty_part(data) or data == self._stored_skeleton(0)
            self._completed[data] = saved if is_own else completed(saved, self.saved_skeleton(0))
        return self._completed[data]

    def saved_skeleton(self, rank: int) -> Skeleton:
        """Return the skeleton that ``rank`` saved, also if a union takes its place. It is decoded once."""
        data = self._stored_skeleton(rank)
        if data not in self._decoded:
            self._decoded[data] = decode_skeleton(data, name=self.manifest_name(rank))
        return self._decoded[data]

    def _stored_skeleton(self, rank: int) -> bytes:
        if rank not in self.ranks:
            raise OnlyPartOpenError
        return self.ranks[rank].skeleton

    @functools.cached_property
    def _decoded(self) -> dict[bytes, Skeleton]:
        return {}

    @functools.cached_property
    def _completed(self) -> dict[bytes, Skeleton]:
        return {}

    def manifest_name(self, rank: int) -> str:
        assert self.root is not None
        return self.root.ranks[rank].name

    def skeletons(self, rank: int) -> Iterator[Skeleton]:
        """Yield the skeleton of each rank, that of ``rank`` first. Ranks with equal ones count once."""
        own = rank if rank < self.world_size else 0
        seen: set[bytes] = set()
        for number in (own, *range(self.world_size)):
            if (data := self._stored_skeleton(number)) not in seen:
                seen.add(data)
                yield self.skeleton(number)

    def owners(self) -> dict[bytes, list[int]]:
        """Return the ranks by the skeleton, as it is stored, that they saved."""
        found: dict[bytes, list[int]] = {}
        for rank in range(self.world_size):
            found.setdefault(self._stored_skeleton(rank), []).append(rank)
        return found

    def names_of(self, rank: int) -> list[str]:
        """Return the names of the leaves of the state of ``rank``, in its order; of plain DCP, all names."""
        if not self.has_skeleton:
            return self.as_named(self.metadata.state_dict_metadata)
        return self.as_named(skeleton_names(self.skeleton(rank), rank=rank))

    def compounds(self, rank: int) -> dict[str, Notes]:
        """Return the notes of every stored compound tensor by stored name, from the skeletons of all ranks.

        If several ranks saved a name, that of ``rank`` is returned.
        """
        if self.part is not None:
            return compound_notes(self.skeleton(rank), rank=rank)
        if not any(map(may_hold_compounds, owners := self.owners())):
            return {}
        found: dict[str, Notes] = {}
        for number, *_ in reversed(owners.values()):
            found |= compound_notes(self.skeleton(number), rank=number)
        return found | compound_notes(self.skeleton(rank), rank=rank)

    @property
    def dcp_paths(self) -> dict[str, tuple[str | int, ...]] | None:
        """Path of each name in the state, as stock DCP noted it; None if it noted none."""
        paths = self.metadata.planner_data
        if not isinstance(paths, dict) or not all(isinstance(path, tuple) for path in paths.values()):
            return None
        return paths


# -- opening ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankSubset:
    """What one of several ranks needs of a checkpoint that as many ranks saved: its own state.

    That is its manifest, and those of the ranks that it names. Thousands of ranks then read few small files each.
    """

    rank: int
    world_size: int
    """Number of ranks that load."""


class OnlyPartOpenError(Exception):
    """A part of a checkpoint is open, and all of it is needed."""


async def open_checkpoint(
    storage: Storage, path: Path, *, executor: Executor, step: int | None = None, part: RankSubset | None = None
) -> Checkpoint:
    """Read ``.metadata`` and the manifests of the checkpoint at ``path`` and check them against each other.

    Args:
        step: step that the root manifest must have, if there is one; None if it may have any.
        part: what to open; None opens all.

    Raises:
        CheckpointNotFoundError: there is neither ``.metadata`` nor a root manifest.
        CorruptCheckpointError: a small file is missing, differs from the written one, or is of another step; names it.
        FormatVersionError: a newer major version wrote the checkpoint.
    """
    lines = disk_warning("opening a checkpoint", path)
    with lines.on_loop():
        data, save_id = None, None
        if part is not None and part.rank:  # rank 0 reads .metadata whole, and proves it for all
            save_id = await save_of(storage, path)
        if save_id is None:  # plain DCP, too, has nothing but .metadata
            data = await read_small_file(storage, path / METADATA_FILE)
            save_id = None if data is None else save_of_metadata(data)
            if save_id is None:
                await _check_plain(storage, path, data)
    if save_id is None:
        if data is None:
            raise CheckpointNotFoundError(errno.ENOENT, "no checkpoint: there is no .metadata", str(path))
        return Checkpoint(path=path, step=None, metadata_bytes=data, root=None, ranks={})
    with lines.on_loop():
        root = await read_root_of(storage, path, save_id)
    fault: str | None = None
    ranks: dict[int, RankManifest] | CorruptCheckpointError = {}

    async def prove_metadata() -> None:
        nonlocal fault
        if data is not None:
            fault = await run_blocking(executor, check_metadata, root, data)

    async def prove_manifests() -> None:
        nonlocal ranks
        try:
            ranks = await _read_ranks(storage, path, root, executor, part)
        except CorruptCheckpointError as error:
            ranks = error  # a fault of .metadata is raised first

    # Both run at once, because summing .metadata takes as long as reading and decoding the manifests.
    with lines.on_loop():
        await run_all((prove_manifests, prove_metadata), at_once=2)
    if fault is not None:
        raise MismatchError(fault)
    if isinstance(ranks, CorruptCheckpointError):
        raise ranks
    if not root.is_of_step(step):
        raise CorruptCheckpointError(
            f"{path}: holds step {root.step} by its manifest: the directory was renamed or swapped"
        )
    opened = part if len(ranks) < root.world_size else None
    own = root.step if step is None else step
    return Checkpoint(path=path, step=own, metadata_bytes=data, root=root, ranks=ranks, part=opened)


async def _check_plain(storage: Storage, path: Path, data: bytes | None) -> None:
    """Refuse a ``.metadata`` without trailer, or a missing one (None), if a root manifest tells that it was ours.

    Stock DCP may have saved over a checkpoint of ours: its ``.metadata`` does not hold the id of our save.

    Raises:
        MismatchError: it is of ours, and damaged or missing.
    """
    for save_id in await saves_in(storage, path):
        name = root_manifest_name(save_id)
        if data is None:
            raise MismatchError(f"{METADATA_FILE}: missing, although {name} is there")
        if save_id.encode() in data:
            raise MismatchError(f"{METADATA_FILE}: not as it was written: its end is missing, although {name} is there")
        try:
            parse_metadata(data, name=METADATA_FILE)
        except CorruptCheckpointError as error:
            raise MismatchError(f"{error}, although {name} is there") from error


def check_metadata(root: RootManifest, data: bytes) -> str | None:
    """Return the fault if the bytes of ``.metadata`` do not match length and CRC32 of the root manifest, else None."""
    if root.metadata.vouches_for(data):
        return None
    name = root_manifest_name(root.save_id)
    return f"{METADATA_FILE}: not the {root.metadata.nbytes} bytes that {name} vouches for"


def check_rank(root: RootManifest, rank: int, data: bytes | None) -> RankManifest:
    """Decode the manifest of ``rank`` and check that it belongs to this save. ``data``: its bytes; None if missing.

    Raises:
        CorruptCheckpointError: the manifest is missing or damaged, or of another save; names the file.
        FormatVersionError: a newer major version wrote it.
    """
    entry = root.ranks[rank]
    if data is None:
        raise MismatchError(f"{entry.name}: missing")
    if not entry.vouches_for(data):
        raise MismatchError(f"{entry.name}: not the {entry.nbytes} bytes that the root manifest vouches for")
    found = decode_rank(data, name=entry.name)
    if (found.save_id, found.step, found.rank, found.world_size) != (root.save_id, root.step, rank, root.world_size):
        raise CorruptCheckpointError(f"{entry.name}: of another save or rank (step {found.step}, rank {found.rank})")
    if found.block_bytes > MAX_BLOCK_BYTES or found.block_bytes % PAGE_BYTES:
        raise CorruptCheckpointError(f"{entry.name}: sums over blocks of {found.block_bytes} bytes")
    return found


async def _read_ranks(
    storage: Storage, path: Path, root: RootManifest, executor: Executor, part: RankSubset | None
) -> dict[int, RankManifest]:
    """Return the manifests of ``part``, or of all ranks if that is not known, in the order of the ranks."""
    found: dict[int, RankManifest] = {}

    async def read(rank: int) -> None:
        entry = root.ranks[rank]
        data = await read_small_file(storage, path / entry.name, max_bytes=entry.nbytes)
        found[rank] = await run_blocking(executor, check_rank, root, rank, data)

    numbers: Iterable[int] = range(root.world_size)
    if part is not None and part.world_size == root.world_size:
        await read(part.rank)
        own = found[part.rank]
        needed = [own.stored_by if own.skeleton else None]
        if part.rank and has_empty_part(own.skeleton):
            await read(0)  # see Checkpoint.skeleton
            if found[0].skeleton != own.skeleton:
                needed.append(found[0].stored_by)
        if None not in needed:
            numbers = {rank for ranks in needed for rank in ranks or ()}
    works = [functools.partial(read, rank) for rank in numbers if rank not in found]
    await run_all(works, at_once=_MANIFESTS_IN_FLIGHT)
    return dict(sorted(found.items()))
