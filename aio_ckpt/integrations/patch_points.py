"""Private names of other libraries: whether they have moved, and how one is replaced."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, TypeAlias

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
class PatchPoint:
    """Attribute of a module."""

    module: str
    name: str
    is_needed: bool = True
    """Whether nothing works without it. False if some of the tried versions lack it."""

    @property
    def value(self) -> Any:
        """Value of the attribute; None if there is none."""
        return value_of(f"{self.module}:{self.name}")

    @property
    def is_there(self) -> bool:
        """Whether the installed library has the attribute."""
        return value_of(f"{self.module}:{self.name}", _MISSING) is not _MISSING

    def put(self, value: object) -> None:
        setattr(importlib.import_module(self.module), self.name, value)

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@contextlib.contextmanager
def replaced(place: PatchPoint, ours: object) -> Iterator[None]:
    """Set ``place`` for the block of a ``with``."""
    stock = place.value
    place.put(ours)
    try:
        yield
    finally:
        place.put(stock)


def missing(namespace: type) -> list[PatchPoint]:
    """Return the needed places of a namespace that the installed library lacks."""
    places: Sequence[Any] = list(vars(namespace).values())
    return [place for place in places if isinstance(place, PatchPoint) and place.is_needed and not place.is_there]
