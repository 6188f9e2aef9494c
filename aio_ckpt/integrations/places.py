"""``Place``: an attribute of another library's module, and ``Placed``: what of ours stands in such places."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aio_ckpt.checks import shown

_log = logging.getLogger("aio_ckpt")
_MISSING = object()


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
        with suppress(ImportError):
            return getattr(importlib.import_module(self.module), self.name, _MISSING)
        return _MISSING

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
