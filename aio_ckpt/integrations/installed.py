"""``Installed``: handle of an ``install()`` that puts a queue and other names in the place of another library's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from aio_ckpt.config import EngineConfig
from aio_ckpt.integrations.async_calls import AsyncCallsQueue
from aio_ckpt.integrations.async_saves import Shared
from aio_ckpt.integrations.places import Placed


class Installed(ABC):
    """Handle of an ``install()``. The block of its ``with`` ends with :meth:`uninstall`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._shared = Shared(config)
        self._placed = Placed()

    @abstractmethod
    def _queues(self) -> Iterable[AsyncCallsQueue]:
        """Return the queues that may hold pending calls."""

    def uninstall(self) -> None:
        """Finalize what is pending, and put the library's own back. Idempotent. Call it on all ranks."""
        try:
            for queue in self._queues():
                queue.close()
        finally:
            self._placed.restore()
            self._shared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.uninstall()
