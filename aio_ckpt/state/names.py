"""Names by a skeleton: of its leaves, compound tensors and copies; and the part of a skeleton that has a name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

from aio_ckpt.leaves.containers import Notes
from aio_ckpt.leaves.keys import key_text
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.message_texts import first_of
from aio_ckpt.state.skeleton import INDEXED, KEYED, Container, Skeleton

Path: TypeAlias = "tuple[str | int, ...]"
"""Path of a leaf as DCP has it: str for keys of mappings, int for indices of lists and tuples."""

_LEAF_TYPES = {int, LeafKind}
"""Types of the nodes that are leaves."""


def is_below(name: str, prefix: str) -> bool:
    """Return whether ``name`` is ``prefix`` or lies below it. Every name lies below ``""``, the state itself."""
    return not prefix or name == prefix or name.startswith(prefix + ".")


def is_extra_state(name: str) -> bool:
    """Return whether ``name`` is that of what ``get_extra_state`` of a module of torch returns.

    It need not be a tensor, and ``set_extra_state`` takes a tensor of any shape.
    """
    return name.rpartition(".")[2] == "_extra_state"


def is_selected(name: str, only: Set[str]) -> bool:
    """Return whether ``name`` is one of ``only`` or lies below one of them, in time that grows with its dots alone."""
    return any(branch in only for branch in branches_of(name))


def below_each(places: Collection[str], names: Iterable[str]) -> dict[str, list[str]]:
    """Return ``names`` grouped by the place that they are at or below. A place without names is left out."""
    found: dict[str, list[str]] = {}
    for name in names:
        for branch in branches_of(name):
            if branch in places:
                found.setdefault(branch, []).append(name)
    return found


def branches_of(name: str) -> Iterator[str]:
    """Yield every name that ``name`` lies below: itself first, the longest next, the state itself (``""``) last."""
    end = len(name)
    while end > 0:
        yield name[:end]
        end = name.rfind(".", 0, end)
    yield ""


def prefix_of(name: str | None) -> str:
    """Return what the names below ``name`` begin with; None stands for the state itself."""
    return "" if name is None else name + "."


def children_of(node: Any, rank: int) -> Iterator[tuple[Any, str, Skeleton]]:
    """Yield (stored key or index, its part of the name, child) for each child of a container."""
    code, keys, children = node[:3]
    if code in KEYED:
        for key, child in zip(keys, children, strict=True):
            yield key, key_text(key), child
    elif code == Container.PER_RANK:
        yield f"rank{rank}", f"rank{rank}", children[0]
    else:
        for index, child in enumerate(children):
            yield index, str(index), child


# -- leaves -----------------------------------------------------------------------------------------


def skeleton_names(skeleton: Skeleton, *, rank: int) -> list[str]:
    """Return the names of the leaves, in the order of ``flatten``."""
    return [name for name, _ in leaf_paths(skeleton, "", (), (rank,))]


def leaf_paths(node: Skeleton, prefix: str, path: Path, ranks: tuple[int, ...]) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of every leaf that one of these ranks has."""
    if isinstance(node, int):
        yield prefix[:-1], path
        return
    is_own = node[0] == Container.PER_RANK
    for rank in ranks if is_own else ranks[:1]:
        below = (rank,) if is_own else ranks
        for part, text, child in children_of(node, rank):
            step = part if node[0] in INDEXED else text
            if isinstance(child, int):
                yield f"{prefix}{text}", (*path, step)
            else:
                yield from leaf_paths(child, f"{prefix}{text}.", (*path, step), below)


# -- compound tensors -------------------------------------------------------------------------------


def compound_notes(skeleton: Skeleton, *, rank: int) -> dict[str, Notes]:
    """Return the notes of every compound tensor of a rank, by name."""
    return dict(_compounds(skeleton, "", rank))


def _compounds(node: Any, prefix: str, rank: int) -> Iterator[tuple[str, Notes]]:
    if isinstance(node, int):
        return
    if node[0] == Container.TENSOR:
        yield prefix[:-1], node[3]
    elif set(map(type, node[2])) <= _LEAF_TYPES:
        return
    for _, text, child in children_of(node, rank):
        yield from _compounds(child, f"{prefix}{text}.", rank)


# -- by name ----------------------------------------------------------------------------------------


def node_names(skeleton: Skeleton, *, rank: int) -> Iterator[str]:
    """Yield the names of all containers and leaves, the state's own (``""``) first."""
    yield ""
    yield from _node_names(skeleton, "", rank)


def _node_names(node: Skeleton, prefix: str, rank: int) -> Iterator[str]:
    if isinstance(node, int):
        return
    for _, text, child in children_of(node, rank):
        yield prefix + text
        yield from _node_names(child, f"{prefix}{text}.", rank)


class NamedNode(NamedTuple):
    """Part of a skeleton that was found by its name."""

    node: Skeleton
    number: int
    """Number of its container, counted over the whole skeleton."""


def find_named(skeleton: Skeleton, names: Collection[str], *, rank: int) -> dict[str, NamedNode]:
    """Return the parts of the skeleton with these names, in one walk. A name that no value has is left out."""
    found: dict[str, NamedNode] = {"": NamedNode(skeleton, 0)} if "" in names else {}
    wanted, above = set(names), {branch for name in names for branch in branches_of(name) if branch != name}
    _find(skeleton, "", rank, 0, wanted, above, found)
    return found


def _find(
    node: Skeleton,
    prefix: str,
    rank: int,
    number: int,
    wanted: Set[str],
    above: Set[str],
    found: dict[str, NamedNode],
) -> int:
    """Add the ``wanted`` names below ``node`` to ``found``, the first of each. Returns the number behind the node."""
    if isinstance(node, int):
        return number
    number += _count(node)
    for _, text, child in children_of(node, rank):
        name = prefix + text
        if name in wanted and name not in found:
            found[name] = NamedNode(child, number)
        if name in above:
            number = _find(child, f"{name}.", rank, number, wanted, above, found)
        else:
            number += containers_of(child)
    return number


def containers_of(node: Skeleton) -> int:
    """Return how many containers a skeleton has; a container counts itself."""
    return 0 if isinstance(node, int) else _count(node) + sum(map(containers_of, node[2]))


def _count(node: Any) -> int:
    """Return how many container numbers the node itself takes: a compound tensor has none."""
    return int(node[0] != Container.TENSOR)


def joined(*parts: str) -> str:
    """Return the name of several parts, of which any may be empty."""
    return ".".join(filter(None, parts))


def listed(names: Sequence[str]) -> str:
    """Return the number of names, and the first of them, for a message."""
    number = "1 name" if len(names) == 1 else f"{len(names)} names"
    return f"{number}: {first_of([*map(repr, names)])}"
