"""Union of the skeletons of several ranks: the state of all of them, as one process reads it. Pure.

Also the skeleton of one rank, with what rank 0 holds where that rank holds nothing. Names count, as between ranks: a
leaf that two ranks hold under one name is one leaf.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aio_ckpt.leaves.containers import Notes
from aio_ckpt.leaves.keys import Key, key_text
from aio_ckpt.state.skeleton import INDEXED, KEYED, MAPPINGS, Container, Skeleton


@dataclass(slots=True, kw_only=True)
class _Node:
    """A container of the union, while it grows."""

    code: int
    keys: list[Key]
    children: list[_Node | int]
    notes: Notes
    source: int
    """Index of the skeleton whose numbers the notes hold."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """(index of the skeleton, number) of each container that this one stands for."""


def united(skeletons: Mapping[Skeleton, Sequence[int]], rank: int) -> tuple[Skeleton, list[str]]:
    """Return the union of the skeletons, and the names that have no place in it.

    Where ranks differ in a container, a leaf or its kind, ``rank`` counts, or the lowest one if it saved nothing.
    A ``PerRank`` value of other ranks alone becomes a dict by rank: ``{"rank1": value}``.

    Args:
        skeletons: distinct skeletons -> the ranks that saved each.
        rank: rank whose own ``PerRank`` values are kept.
    """
    ascending = sorted(skeletons.items(), key=lambda entry: (rank not in entry[1], min(entry[1])))
    roots = []
    for index, (skeleton, ranks) in enumerate(ascending):
        roots.append(_opened(skeleton, index, ranks if index else None, itertools.count()))
    first, *others = roots
    lost: list[str] = []
    for other in others:
        _join(first, other, "", lost)
    numbers: dict[tuple[int, int], int] = {}
    _count(first, numbers, itertools.count())
    return _closed(first, numbers), lost


def completed(own: Skeleton, lowest: Skeleton) -> Skeleton:
    """Return ``own``, in which each part that is an empty mapping is as rank 0 saved it, in ``lowest``.

    A part is the whole state, or the value of one of its first keys: with the full state on rank 0, the other ranks
    save ``{}``, or ``{"model": {}, "step": 3}``. The state of an optimizer is no such part, as an optimizer without
    one has ``{"state": {}, "param_groups": [...]}``. Nor is what holds ``PerRank`` values, which are rank 0's own.
    """
    if _is_empty(own):
        return lowest
    lent = _lent_parts(own, lowest)
    if not lent:
        return own
    first, other = _opened(own, 0, None, itertools.count()), _opened(lowest, 1, None, itertools.count())
    first.places += other.places
    for position, theirs in lent.items():
        first.children[position] = other.children[theirs]
    numbers: dict[tuple[int, int], int] = {}
    _count(first, numbers, itertools.count())
    return _closed(first, numbers)


def _lent_parts(own: Any, lowest: Any) -> dict[int, int]:
    """Return the positions, in ``own`` and in ``lowest``, of the parts that ``own`` gets from ``lowest``."""
    if own[0] not in KEYED or lowest[0] not in KEYED or "param_groups" in own[1]:
        return {}
    theirs = {
        key_text(key): position
        for position, (key, child) in enumerate(zip(lowest[1], lowest[2], strict=True))
        if isinstance(child, tuple) and child[0] in MAPPINGS and not (_is_empty(child) or _holds_per_rank(child))
    }
    keys = map(key_text, own[1])
    return {position: theirs[key] for position, key in enumerate(keys) if key in theirs and _is_empty(own[2][position])}


def _is_empty(node: Any) -> bool:
    return isinstance(node, tuple) and node[0] in MAPPINGS and not node[1]


def _holds_per_rank(node: Any) -> bool:
    return isinstance(node, tuple) and (node[0] == Container.PER_RANK or any(map(_holds_per_rank, node[2])))


def _opened(node: Any, source: int, ranks: Sequence[int] | None, numbers: Iterator[int]) -> Any:
    """Return a node of a skeleton, to which others can be joined. ``ranks``: None for the first skeleton."""
    if isinstance(node, int):
        return node
    places = [] if node[0] == Container.TENSOR else [(source, next(numbers))]
    made = _Node(
        code=node[0],
        keys=list(node[1]),
        children=[_opened(child, source, ranks, numbers) for child in node[2]],
        notes=node[3] if len(node) > 3 else (),
        source=source,
        places=places,
    )
    if made.code == Container.PER_RANK and ranks is not None:
        made.code, made.keys = Container.DICT, [f"rank{rank}" for rank in ranks]
        made.children += [_without_places(copy.deepcopy(made.children[0])) for _ in ranks[1:]]
    return made


def _without_places(node: Any) -> Any:
    if isinstance(node, _Node):
        node.places = []
        for child in node.children:
            _without_places(child)
    return node


def _join(into: Any, other: Any, name: str, lost: list[str]) -> None:
    """Add to ``into`` what ``other``, of the same name, holds beside it."""
    if isinstance(into, int) or isinstance(other, int):
        if into is not other and not (isinstance(into, int) and isinstance(other, int)):
            lost += _names(other, name)
        return
    into.places += other.places
    if into.code == Container.PER_RANK or into.code == other.code == Container.TENSOR:
        return
    if into.code in KEYED and (into.code == other.code or {into.code, other.code} <= MAPPINGS.keys()):
        if dict(into.notes).get("metadata") != dict(other.notes).get("metadata"):  # versions of some modules alone
            into.notes = tuple(note for note in into.notes if note[0] != "metadata")
        places = {key_text(key): position for position, key in enumerate(into.keys)}
        for key, child in zip(other.keys, other.children, strict=True):
            text = key_text(key)
            if text in places:
                _join(into.children[places[text]], child, f"{name}{text}.", lost)
            else:
                into.keys.append(key)
                into.children.append(child)
    elif into.code in INDEXED and into.code == other.code:
        for position, child in enumerate(other.children):
            if position < len(into.children):
                _join(into.children[position], child, f"{name}{position}.", lost)
            elif into.code == Container.LIST:
                into.children.append(child)
            else:
                lost += _names(child, f"{name}{position}.")
    elif Container.REFERENCE not in (into.code, other.code):
        lost += _names(other, name)


def _names(node: Any, name: str) -> list[str]:
    """Return the names of the leaves of a node. ``name``: that of the node, and a dot."""
    if isinstance(node, int):
        return [name[:-1]]
    texts = map(key_text, node.keys) if node.keys else map(str, range(len(node.children)))
    pairs = zip(texts, node.children, strict=True)
    return [found for text, child in pairs for found in _names(child, f"{name}{text}.")]


def _count(node: Any, numbers: dict[tuple[int, int], int], free: Iterator[int]) -> None:
    """Number the containers of the union, in the order of the walk."""
    if isinstance(node, int):
        return
    if node.code != Container.TENSOR:
        number = next(free)
        for place in node.places:
            numbers.setdefault(place, number)
    for child in node.children:
        _count(child, numbers, free)


def _closed(node: Any, numbers: Mapping[tuple[int, int], int]) -> Skeleton:
    """Return a node as a skeleton, whose notes hold the new numbers."""
    if isinstance(node, int):
        return node
    notes: Notes = ()
    for key, value in node.notes:
        if key != "same":
            notes += ((key, value),)
        elif (node.source, value) in numbers:  # else the container that it shares is not in the union
            notes += ((key, numbers[node.source, value]),)
    children = tuple(_closed(child, numbers) for child in node.children)
    return (node.code, tuple(node.keys), children, notes) if notes else (node.code, tuple(node.keys), children)
