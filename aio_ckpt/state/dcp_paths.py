"""Paths of leaves as DCP's ``planner_data`` has them: from a skeleton, and back to a nested state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.state.names import leaf_paths
from aio_ckpt.state.skeleton import Skeleton

_INDEX_SLACK = 1000
"""A list index of foreign metadata may exceed its number of leaves by this factor (empty containers have none)."""


def dcp_paths(skeleton: Skeleton, *, rank: int, others: Sequence[int] = ()) -> dict[str, tuple[str | int, ...]]:
    """Return the path of each name: mapping keys as str, list and tuple indices as int.

    ``others``: ranks with the same skeleton. Their PerRank values get paths, too.
    """
    return dict(leaf_paths(skeleton, "", (), (rank, *others)))


def unflatten_dcp(paths: Mapping[str, tuple[str | int, ...]] | None, leaves: Mapping[str, object]) -> dict[str, object]:
    """Return the nested state of a checkpoint of stock DCP. A leaf without a path gets its name as key.

    Int parts become list indices. Elements that a list lacks become None, as DCP stores no empty container.

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
    """Return ``node`` with a list for every branch whose keys are all int."""
    if id(node) not in branches:
        return node
    items = {key: _with_lists(item, branches) for key, item in node.items()}
    if is_root or not all(type(key) is int for key in items):
        return items
    size = max(items) + 1
    if min(items) < 0 or size > _INDEX_SLACK * (len(items) + 1):
        raise CorruptCheckpointError(f"the metadata places a list element at index {size - 1}")
    return [items.get(index) for index in range(size)]
