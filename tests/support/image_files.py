"""What a committed checkpoint holds, taken from its bytes by the manifest and the standard library alone."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from saved_files import data_file, rank_manifest

from aio_ckpt.format.rank_manifest import RankManifest, decode_rank
from aio_ckpt.plan import chunks

MIB = 1 << 20


CHUNK_BYTES = 4 * MIB


def pin_chunk_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 4 MiB, whatever the engine is tuned to: tests count them."""
    monkeypatch.setattr(chunks, "chunk_bytes_for", lambda raw_bytes: CHUNK_BYTES)


def uniform(count: int, nbytes: int, value: float) -> dict[str, torch.Tensor]:
    """``count`` float32 tensors of ``nbytes`` bytes, every element ``value``."""
    return {f"w{i}": torch.full((nbytes // 4,), value) for i in range(count)}


def manifest_of(path: Path) -> RankManifest:
    return decode_rank(rank_manifest(path).read_bytes(), name="manifest")


def raw_of(path: Path) -> dict[str, bytes]:
    """Name -> raw bytes of every tensor, each checked against its block sums and as a zip file of its own."""
    manifest = manifest_of(path)
    data = data_file(path).read_bytes()
    assert manifest.file is not None
    assert (len(data), zlib.crc32(data)) == (manifest.file.nbytes, manifest.file.crc32)
    sums = [crc32 for (crc32,) in struct.iter_unpack("<I", manifest.sums)]
    found: dict[str, bytes] = {}
    for entry in manifest.tensors:
        raw = data[entry.raw_offset : entry.raw_offset + entry.raw_bytes]
        blocks = [raw[at : at + manifest.block_bytes] for at in range(0, len(raw), manifest.block_bytes)]
        assert [zlib.crc32(block) for block in blocks] == sums[: len(blocks)], entry.fqns
        del sums[: len(blocks)]
        item = data[entry.item_offset : entry.item_offset + entry.item_bytes]
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            assert archive.testzip() is None, entry.fqns
        found.update(dict.fromkeys(entry.fqns, raw))
    assert not sums
    return found


def assert_uniform(path: Path, value: float, *, count: int) -> None:
    """Every element of each of the ``count`` float32 tensors in the checkpoint is ``value``; sums agree."""
    found = raw_of(path)
    assert len(found) == count
    for name, raw in found.items():
        values = torch.frombuffer(bytearray(raw), dtype=torch.float32)
        assert bool((values == value).all()), f"{path.name}: {name} holds {values.unique()[:5].tolist()}, not {value}"
