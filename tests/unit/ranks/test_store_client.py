"""The connection to the store of the ranks: its thread may be stuck in a store whose host is stopped."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import anyio
import pytest

from aio_ckpt.errors import StallError
from aio_ckpt.ranks.store_client import StoreClient
from aio_ckpt.runtime.futures import unless_given_up
from aio_ckpt.runtime.portal import ON_SUBMIT

SECS = 10.0


async def test_a_load_ends_although_the_thread_that_asks_the_store_does_not() -> None:
    """Its deadline is that of the question: what waits for its threads does not wait for this one."""
    connection, answer = StoreClient("ranks", host_rank=3), threading.Event()
    late = threading.Timer(SECS, answer.set)  # so that it fails, and does not hang
    late.start()
    try:
        with anyio.fail_after(SECS), pytest.raises(StallError, match=r"not answering within 0\.05 s.*rank 3"):
            await unless_given_up(Future(), lambda: connection.ask(answer.wait, limit_secs=0.05))
        assert not answer.is_set(), "the thread is still about it"
    finally:
        late.cancel()
        answer.set()
        connection.close()


async def test_a_question_leaves_the_watcher_as_it_was() -> None:
    connection, told = StoreClient("ranks", host_rank=0), list[object]()
    token = ON_SUBMIT.set(told.append)
    try:
        assert await connection.ask(lambda: 7, limit_secs=SECS) == 7
        assert ON_SUBMIT.get() == told.append
        assert not told
    finally:
        ON_SUBMIT.reset(token)
        connection.close()
