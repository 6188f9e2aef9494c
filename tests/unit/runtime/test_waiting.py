"""When a wait that lasts is told of, and how."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from log_lines import LogLines, early_lines

from aio_ckpt.remote_path import RemotePath
from aio_ckpt.runtime import waiting
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.runtime.waiting import WaitWarning, call_text, disk_warning, duration_text, next_line_secs

TIMEOUT = 20.0
SECS = 0.02


class Waited:
    """The time of a wait, which a test sets."""

    secs = 0.0

    def __call__(self) -> float:
        return self.secs


@pytest.fixture
def heard() -> Iterator[LogLines]:
    with early_lines(SECS) as lines:
        yield lines


def test_the_lines_of_a_day_come_at_intervals_that_double() -> None:
    due = [next_line_secs(0)]
    while due[-1] < 24 * 3600:
        due.append(next_line_secs(due[-1]))
    assert due[:5] == [30, 60, 120, 240, 480]
    assert len(due) == 13
    assert [next_line_secs(secs) for secs in (29.9, 30, 59.9, 1000)] == [30, 60, 60, 1920]


def test_durations_are_for_people() -> None:
    texts = [duration_text(secs) for secs in (30.4, 60, 119, 120, 480, 7199, 7680)]
    assert texts == ["30 s", "60 s", "119 s", "2 min", "8 min", "120 min", "2.1 h"]
    assert [call_text("load"), call_text("save", 200)] == ["load()", "save() of step 200"]


def test_a_wait_is_told_of_when_it_has_doubled_and_anew_after_progress(caplog: pytest.LogCaptureFixture) -> None:
    waited = Waited()
    lines = WaitWarning(lambda text: f"waits for {text}", waited_secs=waited, step=5, rank=3)
    pauses = []
    for waited.secs in (0, 29, 30, 45, 60, 119, 500, 10, 31, 59, 60):
        pauses.append(lines.pause_secs(100))
    assert pauses == [30, 1, 30, 15, 60, 1, 100, 20, 29, 1, 60]
    assert caplog.messages == [f"waits for {text}" for text in ("30 s", "60 s", "8 min", "31 s", "60 s")]
    assert {(record.levelname, record.name, record.step, record.rank) for record in caplog.records} == {
        ("WARNING", "aio_ckpt", 5, 3)
    }


def test_a_record_has_no_step_where_none_is_known(caplog: pytest.LogCaptureFixture) -> None:
    waited = Waited()
    lines = WaitWarning(lambda text: text, waited_secs=waited)
    waited.secs = 30
    lines.pause_secs()
    assert not hasattr(caplog.records[0], "step")
    assert not hasattr(caplog.records[0], "rank")


def test_an_empty_line_is_not_logged_and_comes_no_sooner_than_the_next(caplog: pytest.LogCaptureFixture) -> None:
    waited = Waited()
    lines = WaitWarning(lambda text: "", waited_secs=waited)
    waited.secs = 30
    assert lines.pause_secs() == 30
    assert not caplog.messages


async def test_a_wait_on_a_loop_is_told_of_until_it_ends(heard: LogLines) -> None:
    with WaitWarning(lambda text: "it waits").on_loop():
        await asyncio.to_thread(heard.wait_for, "it waits", 3)
    told = len(heard.records)
    await asyncio.sleep(20 * SECS)  # the time in which the next line would come
    assert len(heard.records) == told


async def test_a_wait_that_has_ended_keeps_nothing_alive() -> None:
    waits_for = Waited()
    kept = weakref.ref(waits_for)
    with WaitWarning(lambda text: text, waited_secs=waits_for).on_loop():
        await asyncio.sleep(0)
    gc.disable()
    try:
        del waits_for
        assert kept() is None
    finally:
        gc.enable()


def test_futures_are_told_of_until_they_are_done(heard: LogLines) -> None:
    first, second = Future[None](), Future[None]()
    lines = WaitWarning(lambda text: "it waits")

    def resolve() -> None:
        first.set_result(None)
        heard.wait_for("it waits", 3)
        second.set_result(None)

    thread = threading.Thread(target=resolve)
    thread.start()
    assert lines.wait_for([first, second])
    thread.join(TIMEOUT)
    assert lines.wait_for([first, second], 0)
    began = time.monotonic()
    assert not lines.wait_for([Future()], 2 * SECS)
    assert time.monotonic() - began >= 2 * SECS
    assert lines.wait_for([])


def test_a_system_call_that_hangs_is_told_of_from_the_loop(heard: LogLines) -> None:
    async def hang() -> None:
        with disk_warning("taking the lock", Path("/ckpt/100% {a}"), rank=1).on_loop():
            await asyncio.Event().wait()

    portal = Portal("waiting", 1)
    with portal.opening():
        hanging = portal.submit(hang)
        text = r"taking the lock has taken \d+ s: the file system of /ckpt/100% \{a\} is slow, or does not answer"
        assert heard.wait_for(text, 2).rank == 1
        hanging.cancel()
        portal.close(TIMEOUT)


def test_an_answer_from_before_a_wait_makes_no_line_due() -> None:
    """An engine that was opened an hour ago and claims its root now waits for nothing yet."""
    lines = disk_warning("claiming the root", Path("/ckpt"), idle_secs=lambda: 3600.0)
    assert 29 < lines.pause_secs(100) <= 30


def test_a_place_in_a_store_is_no_file_system(caplog: pytest.LogCaptureFixture) -> None:
    lines = disk_warning("reading the steps", RemotePath("s3://bucket/run"))
    assert lines._describe is not None
    lines.log(lines._describe)
    assert "the store of s3://bucket/run is slow, or does not answer" in caplog.text


def test_a_wait_that_ends_late_is_forgiven_the_time_in_which_the_process_was_suspended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, forgiven = [100.0], list[float]()
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    for took in (3.0, 14.9, 65.0):
        with waiting.forgiving_suspension(5.0, forgiven.append, limit_secs=40.0):
            now[0] += took
    assert forgiven == [60.0]
