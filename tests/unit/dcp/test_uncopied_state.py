"""The caller waits until the thread that saves its state needs the tensors no more, or has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from aio_ckpt.dcp.uncopied_state import UncopiedState
from aio_ckpt.errors import SaveCancelledError, StallError

TIMEOUT = 20.0


def saver(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_the_caller_waits_until_the_saver_has_released_the_state() -> None:
    state, may_release, ends = UncopiedState({"w": 1}, 0), threading.Event(), threading.Event()
    seen: list[object] = []

    def work() -> None:
        seen.extend(state.items())
        seen.append(state.is_saved_here)
        assert may_release.wait(TIMEOUT)
        state.release()
        assert ends.wait(TIMEOUT)

    thread = saver(work)
    with ThreadPoolExecutor(1) as timer:
        timer.submit(may_release.set)
        state.wait_captured(TIMEOUT)
    assert thread.is_alive()
    assert not state.is_saved_here
    ends.set()
    thread.join(TIMEOUT)
    assert seen == [("w", 1), True]


def test_a_saver_that_ends_without_a_release_ends_the_wait() -> None:
    state = UncopiedState({}, 0)
    saver(state.items).join(TIMEOUT)
    state.wait_captured(TIMEOUT)


def test_a_caller_that_reads_the_items_is_no_saver_and_a_save_that_does_not_begin_is_given_up() -> None:
    state = UncopiedState({}, 0)
    state.items()
    with pytest.raises(StallError, match="did not begin"):
        state.wait_captured(0.0)
    with pytest.raises(SaveCancelledError):
        state.release()


def test_the_release_fails_once_an_exception_has_ended_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    state, waits, caller_left = UncopiedState({}, 0), threading.Event(), threading.Event()
    failed: list[type[BaseException]] = []

    def interrupt(timeout: float) -> bool:
        waits.set()
        raise KeyboardInterrupt

    def work() -> None:
        state.items()
        assert waits.wait(TIMEOUT)
        assert caller_left.wait(TIMEOUT)
        try:
            state.release()
        except SaveCancelledError as error:
            failed.append(type(error))

    thread = saver(work)
    monkeypatch.setattr(state._released, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        state.wait_captured(TIMEOUT)
    caller_left.set()
    thread.join(TIMEOUT)
    assert failed == [SaveCancelledError]
