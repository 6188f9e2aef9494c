"""The engine with blocking calls, for a training loop without asyncio."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

from aio_ckpt.engine.engine import BaseEngine
from aio_ckpt.engine.shutdown import log_if_second_to
from aio_ckpt.match.rename import Rename
from aio_ckpt.reports import LoadReport, OnProgress
from aio_ckpt.runtime.futures import cancellable_result_blocking

__all__ = ["SyncCheckpointEngine"]


class SyncCheckpointEngine(BaseEngine):
    """:class:`~aio_ckpt.engine.engine.CheckpointEngine` with calls that block.

    ``load``, ``read``, ``delete``, ``ready`` and ``close`` return once they have ended. ``save`` is the same plain
    function that returns a ticket; ``ticket.result()`` waits for it. Arguments, results and errors are those of the
    async engine.
    """

    def ready(self) -> None:
        """Block until ``save()`` would not have to wait for an earlier save."""
        self._wait_ready()

    def load(
        self,
        state: object,
        step: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        strict: bool = False,
        allow_missing: bool = False,
        fallback: bool = True,
        skip_untrusted: bool = False,
        cast: bool = False,
        rename: Rename | None = None,
        progress: OnProgress | None = None,
    ) -> LoadReport:
        """See :meth:`CheckpointEngine.load`; what a ``load_state_dict`` of the template raises comes through, too."""
        given_up: Future[None] = Future()
        options = {
            "strict": strict,
            "allow_missing": allow_missing,
            "fallback": fallback,
            "skip_untrusted": skip_untrusted,
            "path": path,
            "cast": cast,
            "rename": rename,
            "progress": progress,
        }
        return cancellable_result_blocking(self._submit_load(state, step, given_up, **options), given_up)

    def read(
        self,
        step: int | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        only: Collection[str] | None = None,
        skip_untrusted: bool = False,
        with_report: bool = False,
        progress: OnProgress | None = None,
    ) -> Any:
        """See :meth:`CheckpointEngine.read`."""
        reading = self._submit_read(
            step, only=only, path=path, skip_untrusted=skip_untrusted, with_report=with_report, progress=progress
        )
        return reading.result()

    def delete(self, step: int, *, allow_newest: bool = False) -> None:
        """See :meth:`CheckpointEngine.delete`."""
        self._frontend.delete(step, allow_newest=allow_newest)

    def close(self) -> None:
        """See :meth:`CheckpointEngine.close`."""
        self._close_blocking()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        with log_if_second_to(error):
            self.close()
        return False
