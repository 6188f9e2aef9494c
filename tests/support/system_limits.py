"""A system that gives a process few threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def threads_up_to(count: int) -> Iterator[list[str]]:
    """The system gives ``count`` more threads at a time, and refuses others. Yields the names of the refused ones."""
    start = threading.Thread.start
    lock, given, refused = threading.Lock(), list[threading.Thread](), list[str]()

    @functools.wraps(start)
    def limited(self: threading.Thread) -> None:
        with lock:
            given[:] = [thread for thread in given if thread.is_alive()]
            if len(given) >= count:
                refused.append(self.name)
                raise RuntimeError("can't start new thread")
            start(self)
            given.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        yield refused


def names_of_threads() -> set[str]:
    """Names of the threads of aio_ckpt that are alive."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("aio_ckpt")}
