"""``Installed``: handle of an ``install()`` that puts objects of ours in the places of another library's."""

from __future__ import annotations

import logging
from typing import Any, Protocol, Self, TypeVar

from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import ConfigError
from aio_ckpt.message_texts import shown

_log = logging.getLogger("aio_ckpt")


class Replaceable(Protocol):
    """Attribute of a module of another library. Its text is its dotted name."""

    @property
    def value(self) -> Any: ...

    def put(self, value: Any) -> None: ...


class Installed:
    """Handle of an ``install()``. The block of its ``with`` ends with :meth:`uninstall`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._placed: list[tuple[Replaceable, object, object]] = []

    def uninstall(self) -> None:
        """Put back what stood in the places, unless another has changed one since then. Idempotent."""
        placed, self._placed = self._placed, []
        for place, ours, stock in reversed(placed):
            if place.value is ours:
                place.put(stock)
            else:
                _log.warning("%s is %s by now, which stays", place, shown(place.value))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def _put(self, place: Replaceable, ours: object) -> None:
        self._placed.append((place, ours, place.value))
        place.put(ours)


_Handle = TypeVar("_Handle", bound=Installed)


def same_handle(handle: _Handle, config: EngineConfig | None, *, module: str, lacks: str = "") -> _Handle:
    """Return the ``handle`` of an earlier ``install()`` of ``module`` to a second one, which asks for ``config``.

    Raises:
        ConfigError: the second one has another ``config``, or asks for what the installation ``lacks``.
    """
    if not lacks and config in (None, handle.config):
        return handle
    raise ConfigError(
        f"{module} is installed already, {lacks}with {shown(handle.config)}: call uninstall() of its handle first"
    )
