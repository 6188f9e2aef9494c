"""The watch of a rank: one request to the store until its bell is rung, and no flag is missed."""

from __future__ import annotations

import datetime
import threading

import pytest
import torch.distributed as dist

from aio_ckpt.ranks.flag_watch import FlagWatch, bell_key, flag_key

SECS = 10.0


class Recording(dist.HashStore):
    """A real store that tells which requests the watch makes, and breaks if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []
        self.waits = threading.Semaphore(0)
        self.is_broken = False

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:  # type: ignore[override]
        self.requests.append(f"wait {keys[0]}")
        self.waits.release()
        super().wait(keys, timeout)
        if self.is_broken:
            raise RuntimeError("the store is gone")

    def check(self, keys: list[str]) -> bool:
        self.requests.append(f"check {keys[0]}")
        return super().check(keys)

    def await_wait(self) -> None:
        assert self.waits.acquire(timeout=SECS)

    def ring(self) -> None:
        self.set(bell_key(1), "1")


def test_a_watch_makes_one_request_until_its_bell_is_rung() -> None:
    store = Recording()
    watch = FlagWatch("test", lambda: store, rank=1)
    with watch.wait_for("one") as one, watch.wait_for("other") as other:
        store.await_wait()
        store.set(flag_key("other"), "1")
        store.ring()
        other.result(SECS)
        store.await_wait()
        assert not one.done()
        store.set(flag_key("one"), "1")
        store.ring()
        one.result(SECS)
        store.await_wait()
    watch.end()
    store.ring()
    watch.close(SECS)
    rung = ["wait bell/1", "check flag/one", "check flag/other"]
    assert store.requests == [*rung, "wait bell/1", "check flag/one", "wait bell/1"]
    assert not store.check([bell_key(1)])


def test_a_flag_that_was_raised_before_the_watch_began_is_found() -> None:
    store = Recording()
    store.set(flag_key("one"), "1")
    watch = FlagWatch("test", lambda: store, rank=1)
    with watch.wait_for("one") as one:
        store.ring()
        one.result(SECS)
    watch.end()
    store.ring()
    watch.close(SECS)


def test_a_store_that_is_gone_is_told_to_all_who_wait_now_and_later() -> None:
    store = Recording()
    watch = FlagWatch("test", lambda: store, rank=1)
    with watch.wait_for("one") as one:
        store.await_wait()
        store.is_broken = True
        store.ring()
        with pytest.raises(RuntimeError, match="the store is gone"):
            one.result(SECS)
    watch.close(SECS)
    with watch.wait_for("one") as one, pytest.raises(RuntimeError, match="the store is gone"):
        one.result(SECS)
