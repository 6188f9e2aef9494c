"""Which casts have a smaller range."""

from __future__ import annotations

import pytest
import torch

from aio_ckpt.match.dtype_changes import is_narrower


@pytest.mark.parametrize(
    ("stored", "own", "is_so"),
    [
        (torch.uint8, torch.int8, True),
        (torch.int8, torch.uint8, True),
        (torch.int64, torch.int32, True),
        (torch.uint64, torch.int64, True),
        (torch.int32, torch.int64, False),
        (torch.bool, torch.int8, False),
        (torch.int64, torch.float32, False),
        (torch.int64, torch.float16, True),
        (torch.float32, torch.float16, True),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, True),
        (torch.float64, torch.float32, True),
        (torch.float16, torch.float8_e4m3fn, True),
        (torch.float32, torch.complex64, False),
        (torch.complex128, torch.complex64, True),
        (torch.float32, torch.float32, False),
    ],
)
def test_a_dtype_is_narrower_if_finite_values_do_not_fit(stored: torch.dtype, own: torch.dtype, is_so: bool) -> None:
    assert is_narrower(stored, own) == is_so


def test_every_pair_of_dtypes_has_an_answer() -> None:
    dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    assert {is_narrower(stored, own) for stored in dtypes for own in dtypes} == {True, False}
