"""Flag watch: the thread of one rank that waits in the store until a flag is raised on another rank."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from torch.distributed import DistStoreError

from aio_ckpt.ranks.store_values import Store
from aio_ckpt.runtime.ctrl_c import Lock, new_future
from aio_ckpt.runtime.portal import Executor

_WAIT = datetime.timedelta(days=1)
"""Time after which the thread begins its request to the store anew. torch's stores count milliseconds as an int."""


def flag_key(name: str) -> str:
    """Return the key that exists while the flag ``name`` is raised."""
    return f"flag/{name}"


def bell_key(rank: int) -> str:
    """Return the key that wakes the watch of ``rank``. Whoever sets it has set what the watch shall find before."""
    return f"bell/{rank}"


class FlagWatch:
    """Waits of one rank for flags, in one thread with a connection of its own.

    Invariant: the thread blocks in one request until the rank's bell is rung. It deletes the bell first and looks for
    the flags then, so that no flag is missed. It ends when the bell is rung after :meth:`end`, or the store is gone.
    """

    def __init__(self, name: str, connect: Callable[[], Store], *, rank: int) -> None:
        """``connect`` returns a store of which no other thread uses the connection."""
        self._connect = connect
        self._bell = bell_key(rank)
        self._lock = Lock()
        self._wanted: dict[str, Future[None]] = {}
        self._error: BaseException | None = None
        self.has_ended = False
        """Whether the thread is to end."""
        self._executor = Executor(f"{name}-flags", 1)
        self._executor.submit(self._run)

    @contextlib.contextmanager
    def wait_for(self, flag: str) -> Iterator[Future[None]]:
        """Wait for ``flag`` in the block: its future is done once the flag is raised. Ring the bell of this rank first.

        The future raises the error of the store if it is gone.
        """
        future: Future[None] = new_future()
        with self._lock:
            self._wanted[flag] = future
            if self._error is not None:
                future.set_exception(self._error)
        try:
            yield future
        finally:
            with self._lock:
                self._wanted.pop(flag, None)

    def end(self) -> None:
        """Let the thread end when the bell of this rank is rung next."""
        self.has_ended = True

    def close(self, timeout_secs: float) -> None:
        """Wait until the thread has ended. A thread that is stuck in the store is left behind."""
        self._executor.close(timeout_secs)

    def _run(self) -> None:
        try:
            store = self._connect()
            while not self.has_ended:
                with contextlib.suppress(DistStoreError):  # _WAIT is over
                    store.wait([self._bell], _WAIT)
                store.delete_key(self._bell)
                self._look(store)
        except RuntimeError as error:
            self._fail(error)

    def _look(self, store: Store) -> None:
        with self._lock:
            wanted = [(name, future) for name, future in self._wanted.items() if not future.done()]
        for name, future in wanted:
            if store.check([flag_key(name)]):
                future.set_result(None)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = error
            wanted = [future for future in self._wanted.values() if not future.done()]
        for future in wanted:
            future.set_exception(error)
