"""A wait without a loop that a signal ends: the work has ended, too, before the wait returns."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from aio_ckpt.runtime.futures import cancellable_result_blocking


class InterruptedWork(Future[int]):
    """Work that ends after a signal has ended the wait for it, and another one the wait behind that."""

    def __init__(self, raised: type[BaseException], given_up: Future[None]) -> None:
        super().__init__()
        self._raised, self._given_up = raised, given_up
        self._waits = 0

    def result(self, timeout: float | None = None) -> int:
        raise self._raised("the first signal")

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._waits += 1
        if self._waits == 1:
            raise self._raised("the second signal")
        if self._given_up.done():
            self.set_result(1)
        return super().exception(timeout=0)


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_a_wait_that_two_signals_end_returns_once_its_work_has_ended(raised: type[BaseException]) -> None:
    given_up = Future[None]()
    work = InterruptedWork(raised, given_up)
    with pytest.raises(raised, match="the first signal"):
        cancellable_result_blocking(work, given_up)
    assert work.done()
