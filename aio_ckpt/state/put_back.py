"""Put loaded values back into the caller's own containers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from aio_ckpt.leaves.containers import UnreadableError, entries_of, fields_of, is_frozen, is_mapping, parts_of, remade
from aio_ckpt.leaves.keys import frozen_keys
from aio_ckpt.leaves.refill import refilled
from aio_ckpt.leaves.values import LeafKind, PerRank
from aio_ckpt.state.leaf_or_container import CONTAINERS_FROM, code_of
from aio_ckpt.state.names import prefix_of
from aio_ckpt.state.skeleton import MAPPINGS, Container


def put_back(
    state: object,
    objects: Mapping[str, object],
    *,
    rank: int,
    empty: Sequence[str] | None = None,
) -> None:
    """Set the leaves named in ``objects`` in the caller's containers.

    A tuple, a frozen dataclass or a ``PerRank`` is made anew in its parent.

    A list, a random generator and other mutable values of the same type as the stored one stay, and get its content. If
    one has two names, it stays under the first. What such a list holds is replaced.

    If a named value is an empty mapping or list, an object of the same form fills it; another object replaces it.
    Tensors, Stateful values and names that ``objects`` lacks stay as they are. ``empty``: names of the empty mappings
    and lists that may be filled; None: all.
    """
    for_empty = objects.keys() if empty is None else objects.keys() & set(empty)
    _PutBack(objects=objects, for_empty=for_empty, rank=rank).replaced(state, None)


@dataclass(slots=True, kw_only=True)
class _PutBack:
    """Walk of :func:`put_back`."""

    objects: Mapping[str, object]
    """Values to set, by name."""
    for_empty: Set[str]
    """Names of the values that an empty mapping or list may take."""
    rank: int
    """Rank whose PerRank values are set."""
    enclosing: set[int] = field(default_factory=set)
    """Ids of the containers that enclose the current value."""
    refilled: set[int] = field(default_factory=set)
    """Ids of the leaves that have got the content of a stored value."""

    def replaced(self, value: Any, name: str | None) -> Any:
        """Return ``value``, changed in place if its type allows that; otherwise what replaces it in its parent."""
        code = code_of(value, name)
        if code < CONTAINERS_FROM:
            return self.leaf(value, name, code)
        if code == Container.STATEFUL or id(value) in self.enclosing:
            return value
        self.enclosing.add(id(value))
        try:
            return self.entered(value, code, name)
        finally:
            self.enclosing.discard(id(value))

    def leaf(self, value: Any, name: str | None, code: int) -> Any:
        """Return a leaf with the stored content; the stored value if it cannot take that, or has got another."""
        if name is None or code == LeafKind.TENSOR:
            return value
        found = self.objects.get(name, value)
        if found is value or id(value) in self.refilled:
            return found
        now = _with_all(value, found) if isinstance(value, list) and not value else refilled(value, found)
        if now is value:
            self.refilled.add(id(value))
        return now

    def entered(self, value: Any, code: int, name: str | None) -> Any:
        """Return a container with its parts replaced: itself if it can be changed."""
        prefix = prefix_of(name)
        if code == Container.PER_RANK:
            inner = self.replaced(value.value, f"{prefix}rank{self.rank}")
            return value if inner is value.value else PerRank(inner)
        if code in MAPPINGS:
            try:
                keys, items = entries_of(value, name)
            except UnreadableError:
                return self.leaf(value, name, LeafKind.OBJECT)
            texts = frozen_keys(keys, name)[1]
        elif code == Container.FIELDS:
            keys, items = fields_of(value)  # type: ignore[assignment]
            texts = keys  # type: ignore[assignment]
        else:
            items = parts_of(value)
            keys = range(len(items))  # type: ignore[assignment]
            texts = list(map(str, keys))
        if not items and (name or "") in self.for_empty:
            return _with_all(value, self.objects[name or ""])
        # A foreign mapping may hand out copies, which are set, too.
        is_foreign = code in MAPPINGS and not isinstance(value, dict)
        new = [self.replaced(item, prefix + text) for text, item in zip(texts, items, strict=True)]
        changed = [
            (key, now)
            for key, was, now in zip(keys, items, new, strict=True)
            if now is not was or (is_foreign and id(now) in self.refilled)
        ]
        return _with(value, code, changed, new) if changed else value


def _with_all(value: Any, found: Any) -> Any:
    """Return ``value``, an empty mapping or list, filled from ``found``; ``found`` itself if their forms differ."""
    if is_mapping(type(value)) and isinstance(found, Mapping):
        if isinstance(value, OrderedDict) and "_metadata" in getattr(found, "__dict__", ()):
            value._metadata = found._metadata  # type: ignore[attr-defined]
        return _with(value, Container.DICT, list(found.items()), [])
    if isinstance(value, list) and isinstance(found, list):
        value.extend(found)
        return value
    return refilled(value, found)


def _with(value: Any, code: int, changed: list[tuple[Any, object]], items: list[object]) -> Any:
    """Set the changed parts of ``value`` and return it; for an immutable type, return a new value."""
    if code == Container.TUPLE:
        return tuple(items) if type(value) is tuple else remade(type(value), items)
    if code == Container.FIELDS:
        if is_frozen(type(value)):  # it may be a key, or a default that others have, too
            fields = dict(zip(*fields_of(value), strict=True))
            value, changed = object.__new__(type(value)), [*(fields | dict(changed)).items()]
        for key, item in changed:
            object.__setattr__(value, key, item)
        return value
    if isinstance(value, MappingProxyType):
        return MappingProxyType({**value, **dict(changed)})
    for key, item in changed:
        value[key] = item
    return value
