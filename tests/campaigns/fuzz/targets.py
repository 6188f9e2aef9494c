"""What the fuzzers feed: every reader of bytes from disk. Each may raise the typed errors and nothing else."""

from __future__ import annotations

import datetime
import io
import random
import tempfile
import uuid
import zipfile
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes

from aio_ckpt.checkpoint.catalog import catalog_of_manifests
from aio_ckpt.checkpoint.foreign_items import catalog_of_metadata, check_zip
from aio_ckpt.cli.sources import mapped_state
from aio_ckpt.errors import AioCkptError, CorruptCheckpointError
from aio_ckpt.format.checkpoint_files import TRAILER_BYTES
from aio_ckpt.format.dcp_metadata_read import parse_metadata
from aio_ckpt.format.rank_manifest import decode_rank
from aio_ckpt.format.root_manifest import add_checksum, decode_root
from aio_ckpt.format.tensor_pickle import read_pickle
from aio_ckpt.format.tensor_zip import HEAD_BYTES, TAIL_BYTES, parse, records_of
from aio_ckpt.leaves.objects import decode_object, encode_object
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.state.dcp_paths import dcp_paths, unflatten_dcp
from aio_ckpt.state.names import skeleton_names
from aio_ckpt.state.skeleton import decode_skeleton
from tests.support.tensor_bits import cut_items

__all__ = ["TARGETS", "Target", "feed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One reader."""

    read: Callable[[bytes], object]
    """Reads the bytes, as deep as they allow."""
    seeds: Callable[[Path], list[bytes]]
    """Sound inputs, from a checkpoint of ours and one of stock DCP below the path."""


def feed(name: str, data: bytes) -> None:
    """Read ``data``; a typed error is an answer, anything else is a finding."""
    with suppress(AioCkptError):
        TARGETS[name].read(data)


# -- readers --------------------------------------------------------------------------------------


def _metadata(data: bytes) -> None:
    metadata = parse_metadata(data, name="m")
    catalog = catalog_of_metadata(metadata)
    paths = metadata.planner_data
    unflatten_dcp(paths if isinstance(paths, dict) else None, dict.fromkeys(catalog.names(), 0))


def _rank(data: bytes) -> None:
    manifest = decode_rank(data, name="m")
    [table.block_sums() for table in manifest.data_files]
    catalog_of_manifests([manifest])
    _skeleton(manifest.skeleton)


def _root(data: bytes) -> None:
    for document in (data, add_checksum(data)):
        with suppress(CorruptCheckpointError):
            decode_root(document, name="r")


def _skeleton(data: bytes) -> None:
    skeleton = decode_skeleton(data, name="s")
    skeleton_names(skeleton, rank=0)
    dcp_paths(skeleton, rank=0)


def _item(data: bytes) -> None:
    found = parse(data[:HEAD_BYTES], data[-TAIL_BYTES:], len(data))
    assert found.raw_offset + found.raw_bytes <= len(data)


def _object(data: bytes) -> None:
    with suppress(CorruptCheckpointError):
        check_zip("o", data)
    decode_object(data, name="o", trusted=False)


def _object_pickle(data: bytes) -> None:
    decode_object(_archive(data), name="o", trusted=False)


def _archive(pickled: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, record in (("version", b"3\n"), ("byteorder", b"little"), ("data/0", b"12345678")):
            archive.writestr(f"archive/{name}", record)
    return made.getvalue()


def _file(name: str) -> Callable[[bytes], None]:
    """Return a reader of what ``aio-ckpt import`` takes, by the end of its name."""

    def read(data: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="aio_ckpt-fuzz-") as folder:
            path = Path(folder, name)
            path.write_bytes(data)
            mapped_state(path, trusted=False)

    return read


# -- seeds ----------------------------------------------------------------------------------------


def _files(pattern: str) -> Callable[[Path], list[bytes]]:
    return lambda folder: [file.read_bytes() for file in sorted(folder.glob(pattern))]


def _metadata_files(folder: Path) -> list[bytes]:
    return [data[:-TRAILER_BYTES] for data in _files("*/*/.metadata")(folder)]


def _items(folder: Path) -> list[bytes]:
    found = []
    for step in sorted(folder.glob("*/*/aio_ckpt.*.0.bin")):
        manifest = decode_rank(step.read_bytes(), name="m")
        items = cut_items(step.parent)
        found += [items[entry.fqns[0]] for entry in manifest.tensors]
    made = io.BytesIO()
    torch.save(torch.arange(6).reshape(2, 3).t(), made)
    return [*found, made.getvalue()]


def _objects(_: Path) -> list[bytes]:
    values = [1e-3, "text", [1, {"a": (None, True)}], b"", io.BytesIO(b"abc"), bytearray(b"x"), {1, 2}, 1 << 3000, 1j]
    values += [datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), Path("/x"), uuid.UUID(int=5), deque([1], maxlen=2)]
    values += [np.array(["a"]), np.zeros(2, "i4,f4"), np.datetime64("2026"), np.random.default_rng(1), random.Random(1)]
    values += [[torch.ones(2).conj(), torch.nn.Parameter(torch.ones(1))], torch.Generator(), LeafKind.ARRAY]
    return [encode_object("o", value) for value in values]


def _pickles(folder: Path) -> list[bytes]:
    return [bytes(records_of(data)["data.pkl"][0]) for data in (*_objects(folder), *_items(folder))]


def _skeletons(folder: Path) -> list[bytes]:
    return [decode_rank(data, name="m").skeleton for data in _files("*/*/aio_ckpt.*.0.bin")(folder)]


def _torch_files(_: Path) -> list[bytes]:
    made = io.BytesIO()
    values = {"w": torch.arange(6), "best": np.float64(0.5), "history": np.ones((2, 3)), "texts": np.array(["a", "bc"])}
    torch.save({**values, "dtype": np.dtype("f4"), "empty": np.ones(0), "none": [(None, {1: torch.ones(2)})]}, made)
    return [made.getvalue()]


def _safetensors(_: Path) -> list[bytes]:
    return [safetensors_bytes({"a": torch.arange(6), "b": torch.ones(2, 3)}, {"c": "a"})]


TARGETS: Mapping[str, Target] = {
    "metadata": Target(read=_metadata, seeds=_metadata_files),
    "rank-manifest": Target(read=_rank, seeds=_files("*/*/aio_ckpt.*.0.bin")),
    "root-manifest": Target(read=_root, seeds=_files("*/*/aio_ckpt.*.json")),
    "skeleton": Target(read=_skeleton, seeds=_skeletons),
    "item": Target(read=_item, seeds=_items),
    "tensor-pickle": Target(read=read_pickle, seeds=_pickles),
    "object": Target(read=_object, seeds=_objects),
    "object-pickle": Target(read=_object_pickle, seeds=_pickles),
    "torch-file": Target(read=_file("a.pt"), seeds=_torch_files),
    "safetensors-file": Target(read=_file("a.safetensors"), seeds=_safetensors),
}
