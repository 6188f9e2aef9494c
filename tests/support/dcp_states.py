"""States for ``torch.distributed.checkpoint``, and what is compared after a load."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator, Mapping
from typing import IO, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensor_bits import assert_same_tensor, random_tensor
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.tensor import DTensor

HAS_STAGERS = "async_stager" in inspect.signature(dcp.async_save).parameters
needs_stagers = pytest.mark.skipif(not HAS_STAGERS, reason="torch before 2.9 takes no stager but the writer")


def state_of(seed: int, mebibytes: int = 1) -> dict[str, Any]:
    """Tensors of many kinds, objects, tied names; another for every seed."""
    tied = random_tensor((33, 5), torch.float32, seed)
    return {
        "model": {
            "big": random_tensor((mebibytes, 1 << 18), torch.float32, seed + 1),
            "half": random_tensor((300, 77), torch.bfloat16, seed + 2),
            "transposed": random_tensor((40, 30), torch.float64, seed + 3).t(),
            "cut": random_tensor((40, 30), torch.float32, seed + 4)[::2, 1:20],
            "flags": random_tensor((1000,), torch.bool, seed + 5),
            "complex": random_tensor((9, 4), torch.complex64, seed + 6),
            "parameter": torch.nn.Parameter(random_tensor((12,), torch.float32, seed + 7)),
            "empty": torch.empty(0, 3),
            "scalar": torch.tensor(float(seed)),
            "tied": tied,
            "head": tied,
        },
        "steps": [torch.tensor(seed), {"exp_avg": random_tensor((70, 70), torch.float32, seed + 8)}],
        "lr": 0.1 * seed,
        "names": ["a", "b", {"c": seed}],
        "step": seed,
    }


def blank(value: Any) -> Any:
    """The same state without its values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.detach(), memory_format=torch.preserve_format)
    if isinstance(value, Mapping):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return type(value)()


def leaves_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_of(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from leaves_of(item, f"{name}.{key}")
    else:
        yield name, value


def assert_same_state(got: Any, wanted: Any) -> None:
    found, expected = dict(leaves_of(got)), dict(leaves_of(wanted))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        if isinstance(value, DTensor):
            assert other.placements == value.placements
            other, value = other.to_local(), value.to_local()
        if isinstance(value, torch.Tensor):
            assert_same_tensor(other.detach(), value.detach())
        else:
            assert other == value, name


class Flip(StreamTransformExtension):
    """Inverts every byte: what zstd does to a stream, without zstd."""

    @staticmethod
    def registry_name() -> str:
        return "stream.flip"

    @staticmethod
    def from_descriptor(version: str) -> Flip:
        assert version == "1"
        return Flip()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return _Flipped(output)

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        return io.BytesIO(bytes(byte ^ 0xFF for byte in input.read()))


class _Flipped(io.RawIOBase):
    def __init__(self, below: IO[bytes]) -> None:
        self._below = below

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._below.write(bytes(byte ^ 0xFF for byte in view))
        return view.nbytes

    def close(self) -> None:
        if not self.closed:
            self._below.close()
        super().close()
