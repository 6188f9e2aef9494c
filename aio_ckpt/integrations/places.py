"""Private names of other libraries: whether they have moved, and what of ours stands in their places."""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeAlias

from aio_ckpt.checks import shown

_log = logging.getLogger("aio_ckpt")
_MISSING = object()

Expected: TypeAlias = tuple[str, ...] | frozenset[str] | str | None
"""What an adapter relies on: parameters of a function without ``self``; a set: names that the code of a function uses;
a text: the value; None: the name alone."""


def moved_names(library: Mapping[str, Expected]) -> list[str]:
    """Return the names, each ``module:name``, that the installed library lacks or that are not as expected; sorted."""
    moved = [name for name, expected in library.items() if not _is_as_expected(value_of(name, _MISSING), expected)]
    return sorted(name.replace(":", ".") for name in moved)


def _is_as_expected(value: Any, expected: Expected) -> bool:
    if value is _MISSING:
        return False
    if isinstance(expected, tuple):
        return expected == tuple(name for name in inspect.signature(value).parameters if name != "self")
    if isinstance(expected, frozenset):
        code = getattr(inspect.unwrap(value), "__code__", None)
        return code is not None and expected <= {*_names_in(code)}
    return expected is None or expected == value


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


def value_of(name: str, default: object = None) -> Any:
    """Return the object ``module:name``; ``default`` if the installed library has none."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return default


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Attribute of a module."""

    module: str
    name: str
    is_needed: bool = True
    """Whether nothing works without it. False if some of the tried versions lack it."""

    @property
    def value(self) -> Any:
        """Value of the attribute; None if there is none."""
        value = self._value
        return None if value is _MISSING else value

    @property
    def is_there(self) -> bool:
        """Whether the installed library has the attribute."""
        return self._value is not _MISSING

    def put(self, value: object) -> None:
        """Set the attribute."""
        setattr(importlib.import_module(self.module), self.name, value)

    @property
    def _value(self) -> Any:
        return value_of(f"{self.module}:{self.name}", _MISSING)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Placed:
    """Places that hold something of ours."""

    def __init__(self) -> None:
        self._placed: list[tuple[Place, object, object]] = []

    def put(self, place: Place, ours: object) -> None:
        """Set ``place`` until :meth:`restore`."""
        self._placed.append((place, ours, place.value))
        place.put(ours)

    def restore(self) -> None:
        """Put back what stood there. Idempotent. What another has put there since then stays, with a warning."""
        placed, self._placed = self._placed, []
        for place, ours, stock in reversed(placed):
            if place.value is ours:
                place.put(stock)
            else:
                _log.warning("%s is %s by now, which stays", place, shown(place.value))


def missing(namespace: type) -> list[Place]:
    """Return the needed places of a namespace that the installed library lacks."""
    places: Sequence[Any] = list(vars(namespace).values())
    return [place for place in places if isinstance(place, Place) and place.is_needed and not place.is_there]
