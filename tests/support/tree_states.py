"""States and helpers of the tests of ``aio_ckpt.state``."""

from __future__ import annotations

import collections
import dataclasses
import io
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from aio_ckpt.leaves.arrays import as_tensor
from aio_ckpt.leaves.objects import decode_object, encode_object
from aio_ckpt.leaves.values import LeafKind, PerRank
from aio_ckpt.state.build import build, build_part
from aio_ckpt.state.check_leaves import check_leaves
from aio_ckpt.state.flatten import flatten
from aio_ckpt.state.names import find_named, skeleton_names
from aio_ckpt.state.skeleton import decode_skeleton, encode_skeleton

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Moments:
    mean: Any
    steps: int = 0


class Ordered(dict):
    pass


def same(a, b):
    """Equal by exact type, value, order and, for floats and arrays, bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, (np.ndarray, np.generic)):
        bits = a.dtype == np.longdouble or a.tobytes() == b.tobytes()  # a long double has padding bytes
        return a.dtype == b.dtype and a.shape == b.shape and bits and np.array_equal(a, b)
    if isinstance(a, dict):
        keys = len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        return keys and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue() and a.tell() == b.tell()
    if isinstance(a, PerRank):
        return same(a.value, b.value)
    if isinstance(a, float):
        return a.hex() == b.hex()
    return a == b


def stored(flat):
    """Leaves as a reader has them: tensors for tensor items, decoded objects for the rest."""
    return {
        name: decode_object(encode_object(name, value), name=name, trusted=False)
        if kind is LeafKind.OBJECT
        else as_tensor(value, kind).detach().clone()
        for name, value, kind in zip(flat.names, flat.values, flat.kinds, strict=True)
    }


def round_trip(state, *, rank=0, **kwargs):
    flat = flatten(state, rank=rank)
    check_leaves(flat)
    skeleton = decode_skeleton(encode_skeleton(flat.skeleton), name="m.bin")
    assert skeleton == flat.skeleton
    assert skeleton_names(skeleton, rank=rank) == flat.names
    return build(skeleton, stored(flat), rank=rank, **kwargs)


def build_below(skeleton, name, leaves, *, rank):
    return build_part(find_named(skeleton, [name], rank=rank)[name], name, leaves, rank=rank)


def t(number=1.0):
    return torch.full((2,), float(number))


def through_skeleton(state, **options):
    flat = flatten(state, rank=0)
    skeleton = decode_skeleton(encode_skeleton(flat.skeleton), name="m.bin")
    assert skeleton == flat.skeleton
    return build(skeleton, stored(flat), rank=0, **options)


def through_bytes(value):
    return decode_object(encode_object("leaf", value), name="leaf", trusted=False)


def adamw():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.95))
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


dcp_leaves = (
    st.builds(torch.zeros, st.integers(0, 2)) | st.integers() | st.text(max_size=3) | st.just((1, 2)) | st.just(None)
)
dcp_values = st.recursive(
    dcp_leaves | st.just(np.zeros(2)) | st.just((1, (2, np.zeros(1)))),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab.0", max_size=2) | st.integers(0, 2), inner, max_size=3)
        | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=15,
)


text_keyed = st.recursive(
    dcp_leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab0", max_size=2), inner, max_size=3),
    max_leaves=15,
)
