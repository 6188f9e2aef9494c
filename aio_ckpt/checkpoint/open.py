"""Open a checkpoint: read its small files and check them against each other. No data file is touched."""

from __future__ import annotations

import errno
import functools
import hashlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anyio
from torch.distributed.checkpoint.metadata import Metadata

from aio_ckpt.checkpoint.catalog import Catalog, catalog_of_manifests
from aio_ckpt.checkpoint.foreign_items import catalog_of_metadata
from aio_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError, MismatchError
from aio_ckpt.format.constants import PAGE_BYTES
from aio_ckpt.format.dcp_metadata_read import parse_metadata
from aio_ckpt.format.rank_manifest import RankManifest, decode_rank
from aio_ckpt.format.root_manifest import (
    METADATA_FILE,
    ROOT_MANIFEST,
    RootManifest,
    decode_root,
    rank_manifest_name,
)
from aio_ckpt.leaves.containers import Notes
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.runtime.waiting import disk_warning
from aio_ckpt.state.names import compound_notes, skeleton_names
from aio_ckpt.state.skeleton import Skeleton, decode_skeleton, may_hold_compounds
from aio_ckpt.storage.local import Storage, read_small_file

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
    metadata_bytes: bytes
    """Bytes of ``.metadata``, checked against the root manifest if there is one."""
    root: RootManifest | None
    """None for plain DCP."""
    ranks: tuple[RankManifest, ...]
    """Rank manifests by rank; empty for plain DCP."""
    names: Mapping[str, str | None] = field(default_factory=dict)
    """Stored name -> name in the template, if they differ; None if another leaf took the name."""

    union: Skeleton | None = None
    """Skeleton of what all ranks hold, if it is read in the place of that of each rank."""

    @property
    def identity(self) -> str:
        """Identity of the save: the same on every rank that opened it, and different from that of any other save."""
        if self.root is not None:
            return self.root.save_id
        return hashlib.blake2b(self.metadata_bytes, digest_size=16).hexdigest()

    @property
    def is_plain_dcp(self) -> bool:
        """Whether the checkpoint has no manifests of aio_ckpt, so that only ``.metadata`` describes it."""
        return self.root is None

    @property
    def extra(self) -> Mapping[str, Any]:
        """JSON values that ``save(extra=)`` stored; empty for plain DCP."""
        return {} if self.root is None else self.root.extra

    @property
    def has_skeleton(self) -> bool:
        """Whether the manifests hold the containers of the state. If not, names are as DCP flattened them."""
        return any(rank.skeleton for rank in self.ranks)

    @functools.cached_property
    def metadata(self) -> Metadata:
        """Parsed ``.metadata``. Parsed at the first use, because it takes 20 us an entry and the manifests hold it all.

        Raises:
            CorruptCheckpointError: the bytes are no ``.metadata`` of DCP.
        """
        return parse_metadata(self.metadata_bytes, name=METADATA_FILE)

    @functools.cached_property
    def catalog(self) -> Catalog:
        """Stored names with their items.

        Raises:
            CorruptCheckpointError: the manifests or the metadata contradict themselves.
        """
        found = catalog_of_metadata(self.metadata) if self.is_plain_dcp else catalog_of_manifests(self.ranks)
        return found.renamed(self.names) if self.names else found

    @functools.cached_property
    def stored_names(self) -> Mapping[str, str]:
        """Name in the template -> stored name, if they differ."""
        return {new: stored for stored, new in self.names.items() if new is not None}

    def as_named(self, stored: Iterable[str]) -> list[str]:
        """Return the names in the template of stored ones. A stored name is left out if another leaf took it."""
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
        """Return the skeleton that ``rank`` saved; that of rank 0 if there was no such rank, or if it saved ``{}``.

        If ranks of another number read, it is the union of all. Plain DCP has none.
        """
        if self.union is not None:
            return self.union
        for number in (rank, 0) if 0 < rank < len(self.ranks) else (0,):
            skeleton = self.saved_skeleton(number)
            if isinstance(skeleton, tuple) and skeleton[2]:
                break
        return skeleton

    def saved_skeleton(self, rank: int) -> Skeleton:
        """Return the skeleton that ``rank`` saved, also if a union takes its place. It is decoded once."""
        data = self.ranks[rank].skeleton
        if data not in self._decoded:
            self._decoded[data] = decode_skeleton(data, name=rank_manifest_name(rank))
        return self._decoded[data]

    @functools.cached_property
    def _decoded(self) -> dict[bytes, Skeleton]:
        return {}

    def skeletons(self, rank: int) -> Iterator[Skeleton]:
        """Yield the skeleton of each rank, that of ``rank`` first. Ranks with equal ones count once."""
        own = rank if rank < len(self.ranks) else 0
        seen: set[bytes] = set()
        for number in (own, *range(len(self.ranks))):
            if self.ranks[number].skeleton not in seen:
                seen.add(self.ranks[number].skeleton)
                yield self.skeleton(number)

    def owners(self) -> dict[bytes, list[int]]:
        """Return the ranks by the skeleton, as it is stored, that they saved."""
        found: dict[bytes, list[int]] = {}
        for rank, manifest in enumerate(self.ranks):
            found.setdefault(manifest.skeleton, []).append(rank)
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


async def open_checkpoint(
    storage: Storage,
    path: Path,
    *,
    executor: Executor,
    step: int | None = None,
    metadata_name: str = METADATA_FILE,
    root_name: str = ROOT_MANIFEST,
) -> Checkpoint:
    """Read ``.metadata`` and the manifests of the checkpoint at ``path`` and check them against each other.

    Args:
        step: step that the root manifest must have, if there is one; None if it may have any.
        metadata_name: name of ``.metadata``, see :func:`aio_ckpt.commit.directory_mode.recoverable_names`.
        root_name: name of the root manifest, see there.

    Raises:
        CheckpointNotFoundError: there is neither ``.metadata`` nor a root manifest.
        CorruptCheckpointError: a small file is missing, differs from the written one, or is of another step; names it.
        FormatVersionError: a newer major version wrote the checkpoint.
    """
    lines = disk_warning("opening a checkpoint", path)
    with lines.on_loop():
        root_data = await read_small_file(storage, path / root_name)
    if root_data is None:
        data = await read_small_file(storage, path / metadata_name)
        if data is None:
            raise CheckpointNotFoundError(errno.ENOENT, "no checkpoint: there is no .metadata", str(path))
        if await storage.exists(path / rank_manifest_name(0)):
            raise MismatchError(f"{path / ROOT_MANIFEST}: missing, although the manifest of rank 0 is there")
        return Checkpoint(path=path, step=None, metadata_bytes=data, root=None, ranks=())
    root = decode_root(root_data, name=ROOT_MANIFEST)
    data = b""
    fault: str | None = None
    ranks: tuple[RankManifest, ...] | CorruptCheckpointError = ()

    async def prove_metadata() -> None:
        nonlocal data, fault
        data = await _read_metadata(storage, path / metadata_name)
        fault = await run_blocking(executor, check_metadata, root, data)

    async def prove_manifests() -> None:
        nonlocal ranks
        try:
            ranks = await _read_ranks(storage, path, root, executor)
        except CorruptCheckpointError as error:
            ranks = error  # a fault of .metadata is raised first

    # Both run at once, because reading and summing .metadata takes as long as reading and decoding the manifests.
    with lines.on_loop():
        await _run_all(prove_manifests, prove_metadata)
    opened = _opened(path, data, root, ranks, fault)
    if step is not None and opened.step not in (None, step):
        raise CorruptCheckpointError(
            f"{path}: holds step {opened.step} by its manifest: the directory was renamed or swapped"
        )
    return opened


def _opened(
    path: Path,
    data: bytes,
    root: RootManifest,
    ranks: tuple[RankManifest, ...] | CorruptCheckpointError,
    fault: str | None,
) -> Checkpoint:
    if fault is not None:
        plain = Checkpoint(path=path, step=None, metadata_bytes=data, root=None, ranks=())
        if isinstance(ranks, tuple) and _is_foreign(plain, root, ranks):
            return plain
        raise MismatchError(fault)
    if isinstance(ranks, CorruptCheckpointError):
        raise ranks
    return Checkpoint(path=path, step=root.step, metadata_bytes=data, root=root, ranks=ranks)


async def _read_metadata(storage: Storage, path: Path) -> bytes:
    data = await read_small_file(storage, path)
    if data is None:
        raise MismatchError(f"{METADATA_FILE}: missing, although {ROOT_MANIFEST} is there")
    return data


def check_metadata(root: RootManifest, data: bytes) -> str | None:
    """Return the fault if the bytes of ``.metadata`` do not match length and CRC32 of the root manifest, else None."""
    if root.metadata.vouches_for(data):
        return None
    return f"{METADATA_FILE}: not the {root.metadata.nbytes} bytes that {ROOT_MANIFEST} vouches for"


def check_digest(root: RootManifest, data: bytes) -> None:
    """Compare the bytes of ``.metadata`` with their BLAKE2b. It takes 1 ms a MB, so a load compares the CRC32 only.

    Raises:
        MismatchError: the bytes differ from those that were written.
    """
    if hashlib.blake2b(data, digest_size=len(root.metadata_blake2b) // 2).hexdigest() != root.metadata_blake2b:
        raise MismatchError(f"{METADATA_FILE}: not the bytes of which {ROOT_MANIFEST} has the BLAKE2b")


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
        raise MismatchError(f"{entry.name}: not the {entry.nbytes} bytes that {ROOT_MANIFEST} vouches for")
    found = decode_rank(data, name=entry.name)
    if (found.save_id, found.step, found.rank, found.world_size) != (root.save_id, root.step, rank, root.world_size):
        raise CorruptCheckpointError(f"{entry.name}: of another save or rank (step {found.step}, rank {found.rank})")
    if found.block_bytes > MAX_BLOCK_BYTES or found.block_bytes % PAGE_BYTES:
        raise CorruptCheckpointError(f"{entry.name}: sums over blocks of {found.block_bytes} bytes")
    return found


async def _read_ranks(storage: Storage, path: Path, root: RootManifest, executor: Executor) -> tuple[RankManifest, ...]:
    found: dict[int, RankManifest] = {}
    limit = anyio.CapacityLimiter(_MANIFESTS_IN_FLIGHT)

    async def read(rank: int) -> None:
        async with limit:
            entry = root.ranks[rank]
            data = await read_small_file(storage, path / entry.name, max_bytes=entry.nbytes)
        found[rank] = await run_blocking(executor, check_rank, root, rank, data)

    await _run_all(*(functools.partial(read, rank) for rank in range(root.world_size)))
    return tuple(found[rank] for rank in range(root.world_size))


async def _run_all(*works: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run all ``works`` at once. Raises the first error itself, not a group."""
    try:
        async with anyio.create_task_group() as group:
            for work in works:
                group.start_soon(work)
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from None


def _is_foreign(plain: Checkpoint, root: RootManifest, ranks: Sequence[RankManifest]) -> bool:
    """Return whether stock DCP has saved into the directory of this checkpoint of aio_ckpt.

    If so, ``.metadata`` has another save id and names none of the files of the rank manifests. A ``.metadata`` of
    aio_ckpt with a flipped bit still names these files.

    Raises:
        FormatVersionError: a newer torch saved into the directory. A flipped bit may change the name of a class, too,
            but never the length of the file. So the length tells damage from a newer version.
    """
    try:
        metadata = plain.metadata
    except CorruptCheckpointError:
        return False
    except FormatVersionError:
        if len(plain.metadata_bytes) == root.metadata.nbytes:
            return False
        raise
    theirs = {info.relative_path for info in (metadata.storage_data or {}).values()}
    ours = {rank.file.name for rank in ranks if rank.file}
    save_id = getattr(metadata.storage_meta, "save_id", None)
    return save_id != root.save_id and theirs.isdisjoint(ours)
