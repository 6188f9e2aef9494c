"""Sums of replicas on a GPU: those of the CPU's formula, whatever the strides, and others for values that moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aio_ckpt.snapshot import replica_sums
from aio_ckpt.snapshot.replica_sums import content_sums

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int16, torch.bool]


def sums(*tensors: torch.Tensor) -> list[int]:
    return np.frombuffer(content_sums(tensors), "<i8").tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [0, 1, 7, 4096, 3_000_017])
def test_a_sum_is_that_of_the_same_bytes_elsewhere(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randint(0, 2, (count,)).to(dtype)
    wanted = int(replica_sums._sum_of(tensor, replica_sums._weights(tensor.device)))
    on_device = tensor.cuda()
    within = torch.cat([on_device[:1].view(torch.uint8), on_device.view(torch.uint8)])[tensor.element_size() :]
    assert sums(on_device, on_device.clone()) == [wanted, wanted]
    if count:
        assert sums(within.view(dtype)) == [wanted]


def test_strides_do_not_count_and_places_do() -> None:
    tensor = torch.randn(512, 512, 3, 3, device="cuda")
    turned = tensor.flip(0)
    assert len(set(sums(tensor, tensor.to(memory_format=torch.channels_last), turned))) == 2
