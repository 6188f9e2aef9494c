"""Tensors compared bit by bit: ``torch.equal`` takes -0.0 for 0.0, refuses NaN and lacks some dtypes."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, conj and neg bits resolved."""
    if "float4" in str(tensor.dtype):  # torch 2.8 copies no such elements
        tensor = tensor.detach().view(torch.uint8)
    raw = torch.empty(tensor.numel() * tensor.itemsize, dtype=torch.uint8)
    raw.view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    return raw.numpy().tobytes()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, shape ``(nbytes,)``, sharing its memory."""
    nbytes = tensor.numel() * tensor.itemsize
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.detach().untyped_storage(), tensor.storage_offset() * tensor.itemsize, (nbytes,), (1,))


def assert_same_tensor(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    assert bits(got) == bits(wanted)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits: NaN payloads, subnormals and negative zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).view(torch.bool)
    nbytes = math.prod(shape) * dtype.itemsize
    words = torch.randint(-(2**63), 2**63 - 1, (-(-nbytes // 8),), generator=generator)
    return words.view(torch.uint8)[:nbytes].clone().view(dtype).reshape(shape)


def cut_items(checkpoint: Path) -> dict[str, bytes]:
    """Every item, cut out of its data file where stock DCP's reader looks for it, by name."""
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    files = {path.name: path.read_bytes() for path in checkpoint.glob("*.distcp")}
    return {
        index.fqn: files[place.relative_path][place.offset : place.offset + place.length]
        for index, place in metadata.storage_data.items()
    }


def assert_is_sound_zip(item: bytes) -> None:
    """Proven by the standard library alone."""
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        assert archive.testzip() is None
