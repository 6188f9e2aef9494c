"""StoreClient: a store of torch.distributed, asked in a thread of its own, with a limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import anyio

from aio_ckpt.errors import AioCkptError, EngineClosedError, PeerFailedError, StallError
from aio_ckpt.runtime.portal import Executor, run_blocking, unwatched

__all__ = ["StoreClient"]

T = TypeVar("T")
_CLOSE_SECS = 5.0


class StoreClient:
    """Invariant: whatever touches the store does so in one thread, in the order in which it was asked."""

    def __init__(self, name: str, *, host_rank: int) -> None:
        """``host_rank``: who is named if the store is gone."""
        self._name = name
        self._host_rank = host_rank
        self._executor: Executor | None = Executor(name, 1)

    def begin(self, question: Callable[[], T], *, wait_secs: float) -> Future[T]:
        """Ask from a thread that may wait so long, whatever comes of it."""
        future = self._open_executor().submit(question)
        wait([future], wait_secs)
        return future

    async def ask(self, question: Callable[[], T], *, limit_secs: float) -> T:
        """What ``question`` gives.

        Raises:
            StallError: nothing for ``limit_secs``.
            PeerFailedError: the store is gone.
            EngineClosedError: so is this connection.
        """
        with unwatched():  # a load that ends waits for its threads, and this one may be stuck for ever
            return await self.limited(run_blocking(self._open_executor(), question), limit_secs=limit_secs)

    async def limited(self, work: Awaitable[T], *, limit_secs: float) -> T:
        """What ``work``, which asks the store, gives; raises as :meth:`ask`."""
        try:
            with anyio.fail_after(limit_secs):
                return await work
        except TimeoutError as error:
            raise StallError(
                f"the store of the ranks was not answering within {limit_secs} s: the process that hosts it, mostly "
                f"that of rank {self._host_rank} or its launcher, is stopped, hangs or cannot be reached"
            ) from error
        except AioCkptError:
            raise
        except RuntimeError as error:  # what torch's stores raise
            raise PeerFailedError(
                f"the store of the ranks cannot be reached, its host may be gone: {type(error).__name__}: {error}",
                rank=self._host_rank,
                stage="agree",
            ) from error

    def close(self) -> None:
        """End the thread; one that is stuck in the store is left behind. Idempotent."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close(_CLOSE_SECS)

    def _open_executor(self) -> Executor:
        if self._executor is None:
            raise EngineClosedError(f"{self._name}: the engine was closed")
        return self._executor
