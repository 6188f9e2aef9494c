"""The skeleton of a state: its containers, keys and order without the leaves; names and values by it.

A skeleton is built of tuples and ints only, so that it compares and hashes by value, and is stored as msgpack in each
rank's manifest. DCP's own flattening loses all of this: key 0 comes back as ``'0'``, and ``{}`` does not come back.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

import msgspec
import torch

from aio_ckpt.checks import shown
from aio_ckpt.errors import CorruptCheckpointError, DuplicateNameError, MissingNameError, UnsupportedLeafError
from aio_ckpt.state.objects import MAX_DEPTH, from_tensor
from aio_ckpt.state.values import LeafKind

__all__ = [
    "MAPPINGS",
    "Container",
    "Key",
    "Skeleton",
    "build",
    "build_below",
    "check_names",
    "dcp_paths",
    "decode_skeleton",
    "encode_skeleton",
    "freeze_key",
    "is_below",
    "skeleton_names",
    "subtree",
    "unflatten_dcp",
]


class Container(IntEnum):
    """Containers of a skeleton. The numbers are part of the on-disk skeleton, disjoint from ``LeafKind``."""

    DICT = 16
    ORDERED_DICT = 17
    COUNTER = 18
    """Schedulers of torch keep their milestones in one."""
    LIST = 19
    TUPLE = 20
    PER_RANK = 21
    """One child, whose name ends in ``.rank{rank}``."""
    STATEFUL = 22
    """Never stored: its ``state_dict()`` stands in its place."""


Key: TypeAlias = "str | tuple[str, str | tuple[Key, ...]]"
"""A mapping's key: a str as itself, others as (type tag, text), so that 1, True and 1.0 never compare equal."""

Skeleton: TypeAlias = "int | tuple[int, tuple[Key, ...], tuple[Skeleton, ...]]"
"""A ``LeafKind``, or (``Container``, keys (of a mapping), children). Equal if and only if types, keys, order are."""

MAPPINGS: dict[int, type[dict[Any, Any]]] = {
    Container.DICT: dict,
    Container.ORDERED_DICT: OrderedDict,
    Container.COUNTER: Counter,
}
"""Mappings that are kept as what they are."""

_INDEXED: frozenset[int] = frozenset({Container.LIST, Container.TUPLE})
_MISSING = object()
_LEAF_CODES = frozenset(map(int, LeafKind))
_KEY_BITS = 1024
_INDEX_SLACK = 1000
"""A list index of foreign metadata may exceed its number of leaves by this factor (empty containers have none)."""


# -- keys -------------------------------------------------------------------------------------------


def freeze_key(key: object, name: str) -> Key:
    """A mapping's key as it stands in a skeleton.

    Raises:
        UnsupportedLeafError: not a str, int, bool, finite float, None, or tuple of those.
    """
    kind = type(key)
    if isinstance(key, str) and kind is str:
        return key
    if isinstance(key, int) and kind in (bool, int):
        if key.bit_length() > _KEY_BITS:
            raise UnsupportedLeafError(
                f"{name}: a whole number of {key.bit_length()} bits as a key, at most {_KEY_BITS}"
            )
        return ("b" if kind is bool else "i", str(int(key)))
    if isinstance(key, float) and kind is float and math.isfinite(key):
        return ("f", key.hex())
    if key is None:
        return ("n", "")
    if isinstance(key, tuple) and kind is tuple:
        return ("t", tuple(freeze_key(part, name) for part in key))
    raise UnsupportedLeafError(
        f"{name}: a key of type {kind.__qualname__} ({shown(key)}): "
        "keys are str, int, bool, finite float, None or tuples of those"
    )


def _thaw_key(key: Any) -> Any:
    """Inverse of :func:`freeze_key`; ValueError, TypeError or KeyError if ``key`` is none of its values."""
    if isinstance(key, str):
        return key
    tag, text = key
    return _THAW[tag](text)


_THAW: dict[str, Any] = {
    "i": lambda text: int(text),
    "b": lambda text: {"0": False, "1": True}[text],
    "f": lambda text: float.fromhex(text),
    "n": lambda text: {"": None}[text],
    "t": lambda parts: tuple(map(_thaw_key, parts)),
}


# -- names ------------------------------------------------------------------------------------------


def is_below(name: str, prefix: str) -> bool:
    """Whether ``name`` is ``prefix`` or lies below it; everything lies below ``""``, the state itself."""
    return not prefix or name == prefix or name.startswith(prefix + ".")


def skeleton_names(skeleton: Skeleton, *, rank: int) -> list[str]:
    """Names of the leaves, in the order of ``flatten``."""
    return [name for name, _ in _leaf_paths(skeleton, "", (), (rank,))]


def dcp_paths(skeleton: Skeleton, *, rank: int, others: Sequence[int] = ()) -> dict[str, tuple[str | int, ...]]:
    """Name -> path as DCP's ``planner_data`` has it: mapping keys as str, list and tuple indices as int.

    ``others``: ranks with the same skeleton, whose PerRank values are named too.
    """
    return {
        name: tuple(part if is_index else str(part) for is_index, part in path)
        for name, path in _leaf_paths(skeleton, "", (), (rank, *others))
    }


def check_names(names: list[str], skeleton: Skeleton, *, rank: int) -> None:
    """Every name once.

    Raises:
        DuplicateNameError: names both paths.
    """
    if len(set(names)) == len(names):
        return
    seen: dict[str, str] = {}
    for name, path in _leaf_paths(skeleton, "", (), (rank,)):
        place = "state" + "".join(f"[{part!r}]" for _, part in path)
        if name in seen:
            raise DuplicateNameError(f"{seen[name]} and {place} are both named {name!r}: rename one of the keys")
        seen[name] = place


_Path: TypeAlias = "tuple[tuple[bool, Any], ...]"


def _leaf_paths(node: Skeleton, prefix: str, path: _Path, ranks: tuple[int, ...]) -> Iterator[tuple[str, _Path]]:
    """(name, path of (whether it is an index, key)) of every leaf of these ranks."""
    if isinstance(node, int):
        yield prefix[:-1], path
        return
    is_own = node[0] == Container.PER_RANK
    for rank in ranks if is_own else ranks[:1]:
        below = (rank,) if is_own else ranks
        for part, text, child in _children(node, rank):
            yield from _leaf_paths(child, f"{prefix}{text}.", (*path, (node[0] in _INDEXED, part)), below)


def _children(
    node: tuple[int, tuple[Key, ...], tuple[Skeleton, ...]], rank: int
) -> Iterator[tuple[Any, str, Skeleton]]:
    """(key or index, the same as a part of the name, child)."""
    code, keys, children = node
    if code in MAPPINGS:
        for key, child in zip(keys, children, strict=True):
            part = _thaw_key(key)
            yield part, str(part), child
    elif code == Container.PER_RANK:
        yield f"rank{rank}", f"rank{rank}", children[0]
    else:
        for index, child in enumerate(children):
            yield index, str(index), child


# -- bytes ------------------------------------------------------------------------------------------


def encode_skeleton(skeleton: Skeleton) -> bytes:
    """msgpack.

    Raises:
        UnsupportedLeafError: a key has a lone surrogate.
    """
    try:
        return msgspec.msgpack.encode(skeleton)
    except UnicodeEncodeError as error:
        raise UnsupportedLeafError(
            f"the key {error.object!r} has a lone surrogate, which no UTF-8 file holds; rename it"
        ) from error


def decode_skeleton(data: bytes, *, name: str) -> Skeleton:
    """Inverse of :func:`encode_skeleton`; every number and key is checked.

    Raises:
        CorruptCheckpointError: names ``name``, the file that held it.
    """
    try:
        skeleton = _checked(msgspec.msgpack.decode(data), 0)
        if isinstance(skeleton, int):
            raise ValueError("the state is a leaf")  # noqa: TRY004, TRY301 - wrapped below like every other fault
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as exc:
        raise CorruptCheckpointError(f"{name}: the skeleton of the state is damaged: {exc}") from exc
    return skeleton


def _checked(raw: Any, depth: int) -> Skeleton:
    if type(raw) is int and raw in _LEAF_CODES:
        return raw
    code, raw_keys, raw_children = raw
    keys = tuple(map(_checked_key, raw_keys))
    children = tuple(_checked(child, depth + 1) for child in raw_children)
    wanted = len(children) if code in MAPPINGS else 0
    is_known = code in MAPPINGS or code in _INDEXED or code == Container.PER_RANK
    if not is_known or len(keys) != wanted or len(set(keys)) != wanted or depth > MAX_DEPTH:
        raise ValueError(f"container {code!r} with {len(keys)} keys and {len(children)} children")
    if code == Container.PER_RANK and len(children) != 1:
        raise ValueError(f"a per-rank value with {len(children)} children")
    return int(code), keys, children


def _checked_key(raw: Any) -> Key:
    return freeze_key(_thaw_key(raw), "key")


# -- values -----------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class _Builder:
    """Rebuilds containers around leaves."""

    leaves: Mapping[str, object]
    """Value of each leaf, by its name."""
    rank: int
    """Rank whose PerRank values are built."""
    only: frozenset[str] | None
    """Names to keep, with all below; None keeps all."""
    absent: list[str] = field(default_factory=list)
    """Leaves that were wanted and not given."""

    def value(self, node: Skeleton, prefix: str, is_kept: bool) -> Any:
        """The value at ``node``, or ``_MISSING`` if it was not selected; its name is ``prefix`` less the last dot."""
        name = prefix[:-1]
        is_kept = is_kept or self.only is None or (prefix != "" and name in self.only)
        if isinstance(node, int):
            return self.leaf(name, node) if is_kept else _MISSING
        parts = [
            (part, self.value(child, f"{prefix}{text}.", is_kept)) for part, text, child in _children(node, self.rank)
        ]
        if not is_kept and all(item is _MISSING for _, item in parts):
            return _MISSING
        if node[0] in MAPPINGS:
            return MAPPINGS[node[0]]({key: item for key, item in parts if item is not _MISSING})
        items = [None if item is _MISSING else item for _, item in parts]
        if node[0] == Container.PER_RANK:
            return items[0]
        return items if node[0] == Container.LIST else tuple(items)

    def leaf(self, name: str, kind: int) -> object:
        value = self.leaves.get(name, _MISSING)
        if value is _MISSING:
            self.absent.append(name)
        elif isinstance(value, torch.Tensor):
            return from_tensor(value, LeafKind(kind))
        return value


def build(
    skeleton: Skeleton, leaves: Mapping[str, object], *, rank: int, only: Collection[str] | None = None
) -> object:
    """The nested state from leaf values by name; arrays and numpy scalars arrive as tensors. PerRank is unwrapped.

    With ``only``, what is neither one of these names nor below one is left out; list and tuple elements become None.

    Raises:
        MissingNameError: ``only`` selects nothing, or a selected leaf is not in ``leaves``.
    """
    builder = _Builder(leaves=leaves, rank=rank, only=None if only is None else frozenset(only))
    value: object = builder.value(skeleton, "", False)
    if value is _MISSING:
        raise MissingNameError(f"the checkpoint holds nothing named or below {sorted(only or ())[:5]}")
    if builder.absent:
        raise MissingNameError(f"the checkpoint lacks {len(builder.absent)} leaves of its state: {builder.absent[:5]}")
    return value


def subtree(skeleton: Skeleton, name: str, *, rank: int) -> Skeleton:
    """The skeleton of the value called ``name``; ``""`` is the state itself.

    Raises:
        MissingNameError: nothing is called so.
    """
    found = skeleton if not name else _find(skeleton, "", name, rank)
    if found is None:
        raise MissingNameError(f"the checkpoint holds nothing named {name!r}")
    return found


def _find(node: Skeleton, prefix: str, wanted: str, rank: int) -> Skeleton | None:
    if isinstance(node, int):
        return None
    for _, text, child in _children(node, rank):
        name = prefix + text
        if name == wanted:
            return child
        found = _find(child, f"{name}.", wanted, rank) if wanted.startswith(f"{name}.") else None
        if found is not None:
            return found
    return None


def build_below(skeleton: Skeleton, name: str, leaves: Mapping[str, object], *, rank: int) -> object:
    """The value called ``name`` (a module's or optimizer's ``state_dict()``), from leaves by their full names.

    Raises:
        MissingNameError: nothing is called so, or one of its leaves is not in ``leaves``.
    """
    node = subtree(skeleton, name, rank=rank)
    builder = _Builder(leaves=leaves, rank=rank, only=None)
    value: object = builder.value(node, f"{name}." if name else "", True)
    if builder.absent:
        raise MissingNameError(f"the checkpoint lacks {len(builder.absent)} leaves of {name!r}: {builder.absent[:5]}")
    return value


def unflatten_dcp(paths: Mapping[str, tuple[str | int, ...]] | None, leaves: Mapping[str, object]) -> dict[str, object]:
    """The nested state of a plain DCP checkpoint; a leaf without a path stands under its name.

    Int parts become list indices, and what a list lacks None: DCP stores no empty container.

    Raises:
        CorruptCheckpointError: paths that contradict each other.
    """
    root: dict[Any, Any] = {}
    branches = {id(root)}
    for name, leaf in leaves.items():
        path = (paths or {}).get(name) or (name,)
        if not isinstance(path, tuple) or not all(type(part) in (str, int) for part in path):
            raise CorruptCheckpointError(f"{name}: the metadata gives this leaf the path {path!r}")
        node = root
        for part in path[:-1]:
            if part not in node:
                node[part] = {}
                branches.add(id(node[part]))
            node = node[part]
            if id(node) not in branches:
                raise CorruptCheckpointError(f"{name}: the metadata puts this leaf below another leaf")
        if path[-1] in node:
            raise CorruptCheckpointError(f"{name}: the metadata puts two values at {path!r}")
        node[path[-1]] = leaf
    listed: dict[str, object] = _with_lists(root, branches, is_root=True)
    return listed


def _with_lists(node: Any, branches: set[int], *, is_root: bool = False) -> Any:
    """``node`` with every branch whose keys are all int made a list."""
    if id(node) not in branches:
        return node
    items = {key: _with_lists(item, branches) for key, item in node.items()}
    if is_root or not all(type(key) is int for key in items):
        return items
    size = max(items) + 1
    if min(items) < 0 or size > _INDEX_SLACK * (len(items) + 1):
        raise CorruptCheckpointError(f"the metadata places a list element at index {size - 1}")
    return [items.get(index) for index in range(size)]
