"""Ctrl-C in a method of a future or portal leaves it usable."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest
from gated_storage import TIMEOUT

from aio_ckpt.runtime.ctrl_c import new_future
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.runtime.waiting import WaitWarning


def interrupted_at(event: int, call: Callable[[], object], error: type[BaseException]) -> bool:
    """Call ``call``, and raise ``error`` at its ``event``-th point; False if it has fewer.

    The points are those where CPython handles a signal: at the begin of a function, and behind a call of one in C.
    """
    left = event

    def profile(_: FrameType, what: str, called: object) -> None:
        nonlocal left
        if what in ("call", "c_return") and called is not sys.setprofile:
            left -= 1
            if left == 0:
                raise error

    sys.setprofile(profile)
    try:
        call()
    except (error, TimeoutError):
        pass
    finally:
        sys.setprofile(None)
    return left <= 0


def wait_for(future: Future[object]) -> bool:
    return WaitWarning(None).wait_for([future], 0.001)


CALLS: dict[str, Callable[[Future[object]], object]] = {
    "done": lambda future: future.done(),
    "wait": lambda future: future.exception(0.001),
    "result": lambda future: future.result(0.001),
    "callback": lambda future: future.add_done_callback(lambda _: None),
    "cancel": lambda future: future.cancel(),
    "wait_for": wait_for,
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])  # the handler of SIGTERM may call sys.exit()
@pytest.mark.parametrize("name", CALLS)
def test_another_thread_gets_on_after_a_signal_at_any_point_of_a_call(name: str, error: type[BaseException]) -> None:
    event, is_reached = 0, True
    while is_reached:
        event += 1
        future = new_future()
        is_reached = interrupted_at(event, lambda future=future: CALLS[name](future), error)
        other = threading.Thread(target=future.cancel, daemon=True)
        other.start()
        other.join(TIMEOUT)
        assert not other.is_alive(), f"the future is locked for ever after a signal at event {event}"
    assert event > 2


def test_a_wait_ends_with_the_result_and_with_its_time() -> None:
    future = new_future()
    with pytest.raises(TimeoutError):
        future.result(0.001)
    with pytest.raises(TimeoutError):
        future.result(-1)
    results: list[int] = []
    waiters = [threading.Thread(target=lambda: results.append(future.result(TIMEOUT))) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    future.set_result(7)
    for waiter in waiters:
        waiter.join()
    assert results == [7, 7, 7]


def test_ctrl_c_while_threads_are_woken_loses_none_of_them() -> None:
    event, is_reached = 0, True
    while is_reached:
        event += 1
        future = new_future()
        condition: Any = future._condition
        others = [threading.Thread(target=future.exception, daemon=True) for _ in range(2)]
        for other in others:
            other.start()
        while len(condition._waiters) < len(others):
            pass
        with condition:
            is_reached = interrupted_at(event, condition.notify_all, KeyboardInterrupt)
        future.set_result(None)  # wakes the rest
        for other in others:
            other.join(TIMEOUT)
            assert not other.is_alive(), f"a waiter is lost after a signal at event {event}"
    assert event > 2


def test_a_portal_serves_on_after_ctrl_c_at_any_point_of_a_submission() -> None:
    async def nothing() -> None:
        pass

    portal = Portal("test", 1)
    with portal.opening():
        event, is_reached = 0, True
        while is_reached:
            event += 1
            is_reached = interrupted_at(event, lambda: portal.submit(nothing), KeyboardInterrupt)
            portal.call(nothing, timeout=TIMEOUT)
    assert event > 2
    portal.close(TIMEOUT)
