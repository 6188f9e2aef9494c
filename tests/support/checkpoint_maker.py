"""Makes checkpoints of our format without the writer: items, manifests and ``.metadata`` from the pure modules."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import saved_files
import torch
from isal import isal_zlib
from tensor_bits import bytes_of
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.format import checkpoint_files, root_manifest, tensor_zip
from aio_ckpt.format import rank_manifest as manifest
from aio_ckpt.format.constants import BLOCK_BYTES, PAGE_BYTES, TensorSpec, align_up
from aio_ckpt.format.dcp_metadata_write import dump_metadata
from aio_ckpt.format.tensor_columns import TensorEntry
from aio_ckpt.leaves.arrays import as_tensor
from aio_ckpt.leaves.objects import encode_object
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.state.dcp_paths import dcp_paths
from aio_ckpt.state.flatten import flatten
from aio_ckpt.state.skeleton import Skeleton, encode_skeleton


@dataclass
class Shard:
    fqns: tuple[str, ...]
    tensor: torch.Tensor
    offsets: tuple[int, ...]


@dataclass
class RankContent:
    shards: list[Shard]
    objects: list[tuple[tuple[str, ...], bytes]]
    skeleton: Skeleton
    paths: dict[str, tuple[str | int, ...]]
    data: bytearray = field(default_factory=bytearray)
    entries: list[TensorEntry] = field(default_factory=list)
    object_entries: list[manifest.ObjectEntry] = field(default_factory=list)
    sums: bytearray = field(default_factory=bytearray)


def content_of(state: object, rank: int = 0, *, trusted: bool = False) -> RankContent:
    """What rank ``rank`` stores if it alone stores ``state``; tied tensors become one item."""
    flat = flatten(state, rank=rank)
    shards: dict[object, Shard] = {}
    objects = []
    for name, value, kind in zip(flat.names, flat.values, flat.kinds, strict=True):
        if kind is LeafKind.OBJECT:
            objects.append(((name,), encode_object(name, value)))
            continue
        tensor = as_tensor(value, kind).detach()
        key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        if kind is not LeafKind.TENSOR:
            key = name
        found = shards.get(key)
        if found is None:
            shards[key] = Shard((name,), tensor, (0,) * tensor.dim())
        else:
            found.fqns += (name,)
    return RankContent(list(shards.values()), objects, flat.skeleton, dcp_paths(flat.skeleton, rank=rank))


def raw_of(tensor: torch.Tensor, stride: tuple[int, ...]) -> bytes:
    """The elements in the order of ``stride``."""
    plain = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype)
    plain.copy_(tensor.detach().resolve_conj().resolve_neg())
    return bytes_of(plain).numpy().tobytes()


def _lay_out(content: RankContent) -> None:
    for shard in content.shards:
        tensor = shard.tensor
        stride = tensor_zip.stored_stride(tensor.shape, tensor.stride())
        made = tensor_zip.render(TensorSpec(tensor.dtype, tuple(tensor.shape), stride))
        raw = raw_of(tensor, stride)
        alignment = PAGE_BYTES if len(raw) >= BLOCK_BYTES else 64
        raw_offset = align_up(len(content.data) + len(made.header), alignment)
        item_offset = raw_offset - len(made.header)
        trailer = bytearray(made.trailer)
        tensor_zip.fill_crc(trailer, made, isal_zlib.crc32(raw))
        content.data += bytes(item_offset - len(content.data)) + made.header + raw + trailer
        blocks = [raw[at : at + BLOCK_BYTES] for at in range(0, len(raw), BLOCK_BYTES)]
        content.sums += b"".join(isal_zlib.crc32(block).to_bytes(4, "little") for block in blocks)
        content.entries.append(
            TensorEntry(
                fqns=shard.fqns,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                stride=stride,
                offsets=shard.offsets,
                item_offset=item_offset,
                item_bytes=made.item_bytes,
                raw_offset=raw_offset,
                raw_bytes=len(raw),
            )
        )
    for fqns, data in content.objects:
        content.object_entries.append(manifest.ObjectEntry(fqns, len(content.data), len(data), isal_zlib.crc32(data)))
        content.data += data
    content.data += bytes(-len(content.data) % PAGE_BYTES)


def _render_metadata(contents: Sequence[RankContent], files: Sequence[str], save_id: str) -> bytes:
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for content, file in zip(contents, files, strict=True):
        for entry, shard in zip(content.entries, content.shards, strict=True):
            for name in entry.fqns:
                properties = TensorProperties(dtype=shard.tensor.dtype)
                known = found.setdefault(name, TensorStorageMetadata(properties, torch.Size(entry.shape), []))
                known.chunks.append(ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.shape)))
                stops = [c.offsets[d] + c.sizes[d] for c in known.chunks for d in range(len(entry.shape))]
                known.size = torch.Size(max(stops[d :: len(entry.shape)]) for d in range(len(entry.shape)))
                index = MetadataIndex(name, entry.offsets)
                places[index] = _StorageInfo(file, entry.item_offset, entry.item_bytes)
        for entry in content.object_entries:
            for name in entry.fqns:
                found[name] = BytesStorageMetadata()
                places[MetadataIndex(name)] = _StorageInfo(file, entry.offset, entry.nbytes)
    paths = {name: path for content in contents for name, path in content.paths.items()}
    return dump_metadata(Metadata(found, paths, places, StorageMeta("made", save_id)))


def write_checkpoint(path: Path, contents: Sequence[RankContent], *, step: int = 7, save_id: str = "save-1") -> Path:
    """Lay out and write one checkpoint of ``len(contents)`` ranks."""
    path.mkdir(parents=True)
    files = [checkpoint_files.data_file_name(save_id, rank) for rank in range(len(contents))]
    ranks = []
    for rank, (content, file) in enumerate(zip(contents, files, strict=True)):
        encoded = _encoded_rank(content, rank, len(contents), step, save_id)
        (path / file).write_bytes(content.data)
        ranks.append(write_small(path / checkpoint_files.rank_manifest_name(save_id, rank), encoded))
    dcp = _render_metadata(contents, files, save_id) + checkpoint_files.trailer(save_id)
    root = _root(write_small(path / ".metadata", dcp), ranks, step, save_id)
    (path / checkpoint_files.root_manifest_name(save_id)).write_bytes(root_manifest.encode_root(root))
    return path


def opened_checkpoint(contents: Sequence[RankContent]) -> Checkpoint:
    """What opening a checkpoint of ``len(contents)`` ranks gives. No file is written."""
    encoded = [_encoded_rank(content, rank, len(contents), 7, "save-1") for rank, content in enumerate(contents)]
    files = [checkpoint_files.data_file_name("save-1", rank) for rank in range(len(contents))]
    none = root_manifest.FileEntry("none", 0, 0)
    return Checkpoint(
        path=Path("made"),
        step=7,
        metadata_bytes=_render_metadata(contents, files, "save-1") + checkpoint_files.trailer("save-1"),
        root=_root(none, [none] * len(contents), 7, "save-1"),
        ranks={rank: manifest.decode_rank(data, name="made") for rank, data in enumerate(encoded)},
    )


def opened_plain_dcp(state: object) -> Checkpoint:
    """What opening a checkpoint of stock DCP gives. No file is written."""
    content = content_of(state)
    _lay_out(content)
    data = _render_metadata([content], ["__0_0.distcp"], "save-1")
    return Checkpoint(path=Path("plain"), step=None, metadata_bytes=data, root=None, ranks={})


def _encoded_rank(content: RankContent, rank: int, world_size: int, step: int, save_id: str) -> bytes:
    _lay_out(content)
    file = checkpoint_files.data_file_name(save_id, rank)
    return manifest.encode_rank(
        save_id=save_id,
        step=step,
        rank=rank,
        world_size=world_size,
        file=root_manifest.FileEntry(file, len(content.data), isal_zlib.crc32(content.data)),
        tensors=manifest.encode_static(content.entries),
        sums=bytes(content.sums),
        objects=content.object_entries,
        skeleton=encode_skeleton(content.skeleton),
    )


def _root(
    metadata: root_manifest.FileEntry,
    ranks: Sequence[root_manifest.FileEntry],
    step: int,
    save_id: str,
) -> root_manifest.RootManifest:
    return root_manifest.RootManifest(
        format=(root_manifest.FORMAT_MAJOR, root_manifest.FORMAT_MINOR),
        save_id=save_id,
        step=step,
        world_size=len(ranks),
        metadata=metadata,
        ranks=tuple(ranks),
        written_by={"aio_ckpt": "test"},
        created_unix=time.time(),
    )


def write_small(path: Path, data: bytes) -> root_manifest.FileEntry:
    path.write_bytes(data)
    return root_manifest.FileEntry(path.name, len(data), isal_zlib.crc32(data))


def reseal(path: Path, rank: int, encoded: bytes) -> None:
    """Put a changed rank manifest in place and vouch for it, as a forger would."""
    root_path = saved_files.root_manifest(path)
    root = root_manifest.decode_root(root_path.read_bytes(), name="root")
    entry = write_small(path / root.ranks[rank].name, encoded)
    ranks = tuple(entry if number == rank else old for number, old in enumerate(root.ranks))
    fields = {name: getattr(root, name) for name in root.__struct_fields__}
    changed = root_manifest.RootManifest(**{**fields, "ranks": ranks})
    root_path.write_bytes(root_manifest.encode_root(changed))


def forge(path: Path, *, crc32: int | None = None, **changed: object) -> None:
    """Change fields of the only tensor of rank 0 (and the sum of its file), and vouch for it."""
    old = manifest.decode_rank(saved_files.rank_manifest(path).read_bytes(), name="old")
    assert old.file is not None
    fields = {name: getattr(old.tensors[0], name) for name in old.tensors[0].__struct_fields__}
    entry = TensorEntry(**fields | changed)
    encoded = manifest.encode_rank(
        save_id=old.save_id,
        step=old.step,
        rank=0,
        world_size=1,
        file=root_manifest.FileEntry(old.file.name, old.file.nbytes, old.file.crc32 if crc32 is None else crc32),
        tensors=manifest.encode_static([entry]),
        sums=old.sums,
        objects=old.objects,
        skeleton=old.skeleton,
    )
    reseal(path, 0, encoded)


def save_state(path: Path, state: object, *, step: int = 7, trusted: bool = False) -> Path:
    """One rank that stores all of ``state``."""
    return write_checkpoint(path, [content_of(state, trusted=trusted)], step=step)
