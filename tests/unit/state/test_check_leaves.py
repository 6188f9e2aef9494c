"""Leaves that no item can hold are refused by name."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedParameter

from aio_ckpt.errors import (
    UnsupportedLeafError,
)
from aio_ckpt.leaves.values import Shard
from aio_ckpt.state.check_leaves import check_leaves
from aio_ckpt.state.flatten import flatten


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the end of quantized tensors
        return torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint4x2)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def fake():
    with FakeTensorMode():
        return torch.ones(2)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.ones(2, 2).to_mkldnn(), "to_dense"),
        (quantized, "quantized"),
        (nested, "unbind"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (fake, "FakeTensor"),
        (lambda: UninitializedParameter(), "forward"),
    ],
)
def test_a_tensor_that_no_item_can_hold_is_refused_by_name(make, word):
    flat = flatten({"some": [make()]}, rank=0)
    with pytest.raises(UnsupportedLeafError, match=rf"'some\.0'.*{word}"):
        check_leaves(flat)


def test_a_shard_over_a_tensor_that_is_no_plain_one_is_refused_by_name():
    flat = flatten({"s": Shard(torch.eye(2).to_sparse(), (4, 2), (0, 0))}, rank=0)
    with pytest.raises(UnsupportedLeafError, match="'s': a tensor of layout"):
        check_leaves(flat)


def test_a_name_that_is_no_utf8_is_refused():
    with pytest.raises(UnsupportedLeafError, match="surrogate"):
        check_leaves(flatten({"x\ud800": torch.ones(1)}, rank=0))
    check_leaves(flatten({"gewicht_ä": torch.ones(1)}, rank=0))
