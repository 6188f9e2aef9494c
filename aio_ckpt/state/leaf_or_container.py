"""Tell leaves from containers: what each value of a state is stored as."""

from __future__ import annotations

from collections import OrderedDict
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from aio_ckpt.errors import UnsupportedLeafError
from aio_ckpt.leaves.arrays import TORCH_ARRAY_DTYPES
from aio_ckpt.leaves.containers import form_of, is_mapping, is_opened, is_transparent, parts_of
from aio_ckpt.leaves.objects import MAX_DEPTH
from aio_ckpt.leaves.values import LeafKind, PerRank, Shard
from aio_ckpt.state.skeleton import MAPPINGS, Container

TENSOR_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, DTensor)
"""Exact types of the tensors that an item holds."""
_PLAIN_TYPES: tuple[type, ...] = (NoneType, bool, int, float, complex, str, bytes, bytearray, torch.Size)
_NO_LEAVES = frozenset({*_PLAIN_TYPES, np.ndarray})
"""Types of elements for which no list or tuple is entered."""

LEAVES: dict[type, LeafKind] = {
    **dict.fromkeys(_PLAIN_TYPES, LeafKind.OBJECT),
    **dict.fromkeys(TENSOR_TYPES, LeafKind.TENSOR),
}
"""Kinds of leaves by exact type."""
CODES: dict[type, int] = {
    **LEAVES,
    **{kind: int(code) for code, kind in MAPPINGS.items()},
    PerRank: int(Container.PER_RANK),
    Shard: int(LeafKind.TENSOR),
}
"""Codes of leaves and containers by exact type."""
_CODES_BY_FORM: dict[str, int] = {
    "fields": int(Container.FIELDS),
    "tuple": int(Container.TUPLE),
    "list": int(Container.LIST),
}
CONTAINERS_FROM = int(min(Container))
"""Smallest code of a container; those of leaves are smaller."""

_MOST_PARTS = 1024
"""Most elements of a container without tensors that are stored one by one; each takes some hundred bytes."""


def code_of(value: Any, name: str | None) -> int:
    """Return the ``LeafKind`` or ``Container`` of a value. ``name``: of the value, for messages.

    Raises:
        UnsupportedLeafError: a list nested too deep.
    """
    kind = type(value)
    code = CODES.get(kind)
    if code is not None:
        return code
    if isinstance(value, torch.Tensor):
        return LeafKind.TENSOR
    if isinstance(value, np.generic):
        return LeafKind.SCALAR_ARRAY if value.dtype in TORCH_ARRAY_DTYPES else LeafKind.OBJECT
    if kind is np.ndarray:
        return LeafKind.ARRAY if value.dtype in TORCH_ARRAY_DTYPES else LeafKind.OBJECT
    if isinstance(value, type):
        return LeafKind.OBJECT
    if _is_stateful_type(kind):
        return Container.STATEFUL
    form = form_of(kind)
    if form is None:
        return LeafKind.OBJECT
    if form == "mapping":
        return Container.ORDERED_DICT if isinstance(value, OrderedDict) else Container.DICT
    parts = parts_of(value)
    is_entered = is_opened(kind) and len(parts) <= _MOST_PARTS
    if not is_entered and not holds_leaves(parts, name, 0, {id(value)}):
        return LeafKind.OBJECT
    return _CODES_BY_FORM[form]


def holds_leaves(values: Any, name: str | None, depth: int, without: set[int]) -> bool:
    """Return whether a container with these values is entered: it holds a tensor, mapping, Stateful or PerRank value.

    The set of their types decides, so 10,000 ints cost one pass in C. ``without``: ids of containers that were visited;
    a container in many places is visited once.
    """
    nested = False
    for kind in set(map(type, values)) - _NO_LEAVES:
        if issubclass(kind, (torch.Tensor, PerRank, Shard)) or _is_stateful_type(kind) or is_mapping(kind):
            return True
        nested = nested or is_transparent(kind)
    if nested and depth > MAX_DEPTH:
        raise UnsupportedLeafError(f"{name}: a list nested deeper than {MAX_DEPTH} (does it hold itself?)")
    if nested:
        for item in values:
            kind = type(item)
            if id(item) in without or kind in _NO_LEAVES or not is_transparent(kind):
                continue
            without.add(id(item))
            if holds_leaves(parts_of(item), name, depth + 1, without):
                return True
    return False


def _is_stateful_type(kind: type) -> bool:
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))
