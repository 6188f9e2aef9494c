"""Shards: a box lies inside its tensor."""

from __future__ import annotations

import pytest
import torch

from aio_ckpt.errors import (
    ConfigError,
)
from aio_ckpt.leaves.values import Shard


@pytest.mark.parametrize(
    ("shape", "offsets"), [((4, 3), (3, 0)), ((4, 3), (-1, 0)), ((4, 3), (0,)), ((4,), (0, 0)), ((4, 2), (0, 0))]
)
def test_a_shard_outside_of_its_tensor_is_refused(shape, offsets):
    with pytest.raises(ConfigError, match=r"Shard: a box of shape \(2, 3\) at .* does not lie inside"):
        Shard(torch.ones(2, 3), shape, offsets)
