"""Put back: what a load read and proved, into the template. Nothing here reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from aio_ckpt.read.match import Match
from aio_ckpt.read.open import Checkpoint
from aio_ckpt.read.rank_names import skeleton_of
from aio_ckpt.runtime.error_notes import tell_modified
from aio_ckpt.state import flatten as tree

__all__ = ["dcp_paths", "prepare_apply", "target_modified"]


def prepare_apply(
    checkpoint: Checkpoint, state: object, found: Match, values: Mapping[str, object], rank: int
) -> Callable[[], None]:
    """What sets the objects of ``state`` and calls each ``load_state_dict``; all that can be damaged is built before.

    ``values``: fresh tensors and decoded objects, by name.
    """
    leaves = {name: values[name] for name in found.objects}
    for name, kind in found.arrays:
        tensor = values[name]
        assert isinstance(tensor, torch.Tensor)
        leaves[name] = tree.from_tensor(tensor, kind)
    skeleton = skeleton_of(checkpoint, rank) if found.stateful and checkpoint.has_skeleton else None
    below: list[tuple[Any, object]] = []
    for prefix, value, names in found.stateful:
        if skeleton is not None:
            below.append((value, tree.build_below(skeleton, prefix, values, rank=rank)))
        else:
            below.append((value, _plain_below(checkpoint, prefix, {name: values[name] for name in names}, value)))

    def put_back() -> None:
        with target_modified():
            if leaves:
                tree.put_back(state, leaves, rank=rank)
            for value, state_dict in below:
                value.load_state_dict(state_dict)

    return put_back


@contextmanager
def target_modified() -> Iterator[None]:
    """Marks what is raised inside: the template may hold a mix of old and new values."""
    try:
        yield
    except Exception as error:  # also what load_state_dict raises
        tell_modified(error)
        raise


# -- as DCP flattened it --------------------------------------------------------------------------------


def dcp_paths(checkpoint: Checkpoint) -> dict[str, tuple[str | int, ...]] | None:
    """Where each name stands in the state, as stock DCP noted it; None if it did not."""
    paths = checkpoint.metadata.planner_data
    if not isinstance(paths, dict) or not all(isinstance(path, tuple) for path in paths.values()):
        return None
    return paths


def _plain_below(checkpoint: Checkpoint, prefix: str, leaves: dict[str, object], value: object) -> object:
    """The ``state_dict()`` called ``prefix`` as stock DCP flattened it."""
    paths = dcp_paths(checkpoint) or {}
    nested: Any = tree.unflatten_dcp(paths, leaves)
    name = next(iter(leaves))
    path = paths.get(name, (name,))
    depth = next((n for n in range(len(path)) if ".".join(map(str, path[:n])) == prefix), None)
    if depth is None:
        return {name.removeprefix(f"{prefix}."): leaf for name, leaf in leaves.items()}
    for part in path[:depth]:
        nested = nested[part]
    if isinstance(value, torch.optim.Optimizer):
        # DCP makes every key a str and drops {}; an optimizer finds its state by int.
        state = nested.get("state", {})
        nested["state"] = {int(key) if str(key).isdigit() else key: item for key, item in state.items()}
    return nested
