"""A thread that waits until another one needs something no more, or has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from aio_ckpt.runtime.handover import Handover

TIMEOUT = 20.0


def worker(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_the_owner_waits_until_the_worker_has_released_it() -> None:
    lent, may_release, ends = Handover(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def work() -> None:
        lent.take()
        seen.append(lent.is_taken_here)
        assert may_release.wait(TIMEOUT)
        seen.append(lent.release())
        assert ends.wait(TIMEOUT)

    thread = worker(work)
    with ThreadPoolExecutor(1) as timer:
        timer.submit(may_release.set)
        assert lent.wait(TIMEOUT)
    assert thread.is_alive()
    assert not lent.is_taken_here
    ends.set()
    thread.join(TIMEOUT)
    assert seen == [True, True]


def test_a_worker_that_ends_without_a_word_ends_the_wait() -> None:
    lent = Handover()
    worker(lent.take).join(TIMEOUT)
    assert lent.wait(TIMEOUT)


def test_the_owner_is_no_worker_and_a_wait_that_nobody_takes_up_is_given_up() -> None:
    lent = Handover()
    lent.take()
    assert not lent.wait(0.0)
    assert not lent.release()


def test_a_worker_hears_of_a_wait_that_an_exception_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    lent, heard, waits = Handover(), list[bool](), threading.Event()

    def interrupt(timeout: float) -> bool:
        waits.set()
        raise KeyboardInterrupt

    def work() -> None:
        lent.take()
        assert waits.wait(TIMEOUT)
        thread_of_owner_left.wait(TIMEOUT)
        heard.append(lent.release())

    thread_of_owner_left = threading.Event()
    thread = worker(work)
    monkeypatch.setattr(lent._released, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lent.wait(TIMEOUT)
    thread_of_owner_left.set()
    thread.join(TIMEOUT)
    assert heard == [False]
