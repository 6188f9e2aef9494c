"""Sums by which replicas are compared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from aio_ckpt.snapshot import replica_sums
from aio_ckpt.snapshot.replica_sums import content_sums

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


@pytest.fixture(params=["CPU", "another device"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs with the checksum of the CPU, and with the sum that other devices compute, here on the CPU."""
    if request.param != "CPU":

        def summed(tensor: torch.Tensor) -> int:
            return int(replica_sums._sum_of(tensor, replica_sums._weights(tensor.device)))

        monkeypatch.setattr(replica_sums, "_crc_of", summed)


def sums(*tensors: torch.Tensor) -> list[int]:
    return np.frombuffer(content_sums(tensors), "<i8").tolist()


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.arange(count * torch.empty(0, dtype=dtype).element_size()) * 7919 % 251
    return (made % 2 if dtype is torch.bool else made).to(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_depends_on_the_content_alone_and_on_every_part_of_it(dtype: torch.dtype) -> None:
    for count in (1, 3, 1000, 100_003):
        tensor = values(count, dtype)
        found, same = sums(tensor, tensor.clone())
        assert found == same, count
        raw = tensor.view(torch.uint8)
        for place in {0, raw.numel() // 2, raw.numel() - 1}:
            raw[place] ^= 1
            assert sums(tensor) != [found], (count, place)
            raw[place] ^= 1


def test_an_order_is_seen() -> None:
    """As of the permutation that a sampler keeps, which each rank may draw by itself."""
    one = torch.randperm(100_000, generator=torch.Generator().manual_seed(1))
    two = torch.randperm(100_000, generator=torch.Generator().manual_seed(2))
    assert len(set(sums(one, two, one.sort().values))) == 3


def one_hot(count: int, places: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.zeros(count, dtype=dtype)
    made[places] = 1
    return made


MOVED: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "experts": ((experts := torch.randn(2, 128, 128)), experts.flip(0)),
    "rows": ((rows := torch.randn(64, 8192)), rows.flip(0)),
    "rolled": (torch.arange(100_000), torch.arange(100_000).roll(4096)),
    "identity": (torch.eye(1024), torch.eye(1024).roll(3, 0)),
    "two rows of a one-hot matrix": (one_hot(8 * 8192, [0, 8197]), one_hot(8 * 8192, [5, 8192])),
    "two values, one up and one down": (one_hot(100, [0, 6]), one_hot(100, [2, 4])),
    **{
        f"one value by {places}": (one_hot(1 << 18, [0]), one_hot(1 << 18, [places]))
        for places in (1, 2, 512, 4096, 8192)
    },
    "a mask": (one_hot(1 << 18, [7], torch.bool), one_hot(1 << 18, [7 + 1024], torch.bool)),
}


@pytest.mark.parametrize(("tensor", "moved"), MOVED.values(), ids=MOVED)
def test_values_that_stand_in_another_place_are_seen(tensor: torch.Tensor, moved: torch.Tensor) -> None:
    assert len(set(sums(tensor, moved))) == 2


@pytest.mark.parametrize("shape", [(3, 1 << 10, 7), (1, 50, 300), (2000, 5)])
def test_equal_values_have_equal_sums_whatever_their_strides(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    small_pieces(monkeypatch)
    tensor = torch.randn(shape)
    others = [tensor.transpose(0, dim).contiguous().transpose(0, dim) for dim in range(tensor.ndim)]
    assert len(set(sums(tensor, *others))) == 1


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aio_ckpt.snapshot.replica_sums._COLUMNS", 16)
    monkeypatch.setattr("aio_ckpt.snapshot.replica_sums._PIECE_BYTES", 1024)


@pytest.mark.parametrize("count", [3, 512, 5003])
def test_a_replica_in_a_buffer_of_another_layout_has_the_same_sum(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A weight that stages share stands in another flat buffer on each, where its words may be split."""
    small_pieces(monkeypatch)
    wanted = values(count, torch.bfloat16)
    inside = torch.cat([values(7, torch.bfloat16), wanted])[7:]
    assert len(set(sums(wanted, inside))) == 1
    inside[-1] = 0
    assert len(set(sums(wanted, inside))) == 2


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda matrix: matrix.t(),
    "strided": lambda matrix: matrix[:, ::2],
    "conjugated": lambda matrix: matrix.conj(),
    "negated": lambda matrix: matrix.conj().imag,
    "within a word": lambda matrix: matrix.real.to(torch.float16).reshape(-1)[1:].view(-1, 11),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_is_summed_as_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Equal views have equal sums; every value that a view shows counts."""
    small_pieces(monkeypatch)
    matrix = torch.randn(40, 30, dtype=torch.complex64)
    (found, same) = sums(view(matrix), view(matrix.clone()).requires_grad_())
    assert found == same
    shown = view(matrix.clone())
    shown[-1, -1] += 1
    assert sums(shown) != [found]


def test_nothing_and_scalars_have_sums() -> None:
    assert content_sums([]) == b""
    assert sums(torch.empty(0), torch.empty(3, 0)) == [0, 0]
    assert len(set(sums(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(1)))) == 3
