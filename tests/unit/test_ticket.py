"""Tickets and milestones: waited for from any thread and any loop, and never cancelled by a waiter."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from builders import report_of
from warm_python import run_warm

from aio_ckpt.errors import SaveCancelledError, StallError, WrongThreadError
from aio_ckpt.reports import Progress, StageTimings
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.ticket import Milestone, SaveTicket

TIMEOUT = 20.0
REPORT = report_of(200, StageTimings())


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal("engine", 1)
    portal.start()
    yield portal
    portal.close(TIMEOUT)


@pytest.fixture
def milestone(portal: Portal) -> Milestone[int]:
    return Milestone("staged of step 7", portal.check_thread)


def new_loops() -> list[Callable[[], asyncio.AbstractEventLoop]]:
    try:
        import uvloop
    except ImportError:
        return [asyncio.new_event_loop]
    return [asyncio.new_event_loop, uvloop.new_event_loop]


def await_in(new_loop: Callable[[], asyncio.AbstractEventLoop], milestone: Milestone[int], ready: threading.Barrier):
    async def wait() -> list[int]:
        first = asyncio.ensure_future(milestone)
        await asyncio.sleep(0)
        ready.wait(TIMEOUT)
        return [await first, await milestone]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(wait())


# -- waiting --------------------------------------------------------------------------------------


def test_one_outcome_reaches_awaits_in_several_loops_and_waits_in_several_threads(milestone: Milestone[int]) -> None:
    loops = new_loops() * 2
    ready = threading.Barrier(len(loops) + 1)
    with ThreadPoolExecutor(len(loops) + 2) as pool:
        awaits = [pool.submit(await_in, new_loop, milestone, ready) for new_loop in loops]
        waits = [pool.submit(milestone.result, TIMEOUT) for _ in range(2)]
        ready.wait(TIMEOUT)
        assert milestone.resolve(7)
        assert [future.result(TIMEOUT) for future in awaits] == [[7, 7]] * len(loops)
        assert [future.result(TIMEOUT) for future in waits] == [7, 7]


async def test_a_cancelled_await_cancels_nothing_and_the_others_go_on(milestone: Milestone[int]) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    given_up = asyncio.ensure_future(milestone)
    patient = asyncio.ensure_future(milestone)
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await milestone
    assert not milestone.done()
    milestone.resolve(1)
    assert await patient == 1
    assert await asyncio.wait_for(milestone, TIMEOUT) == 1
    assert complaints == []


async def test_awaiting_does_not_block_the_loop(milestone: Milestone[int]) -> None:
    waiting = asyncio.ensure_future(milestone)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    threading.Thread(target=milestone.resolve, args=(5,)).start()
    assert await waiting == 5


def test_a_waiters_loop_that_was_closed_does_no_harm(
    milestone: Milestone[int], caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(milestone._wait_in_loop())
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    called = []
    milestone.add_done_callback(called.append)
    assert milestone.resolve(3)
    assert called == [milestone]
    assert milestone.result() == 3
    assert caplog.records == []


def test_a_wait_that_times_out_names_the_milestone_and_leaves_the_save_alone(milestone: Milestone[int]) -> None:
    with pytest.raises(StallError, match=r"staged of step 7: not reached within 0\.01 s"):
        milestone.result(0.01)
    with pytest.raises(TimeoutError):
        milestone.exception(0.01)
    assert not milestone.done()
    milestone.resolve(1)
    assert milestone.result(0) == 1
    assert milestone.exception(0) is None


def test_a_failure_that_is_a_timeout_is_not_taken_for_the_waits_own() -> None:
    failure = TimeoutError("the store did not answer")
    # The check is made when a wait begins: the milestone fails after that.
    milestone: Milestone[int] = Milestone("staged of step 7", lambda _: milestone.fail(failure))
    with pytest.raises(TimeoutError, match="did not answer") as caught:
        milestone.result(TIMEOUT)
    assert caught.value is failure


def test_waiting_on_the_engines_own_threads_raises_unless_it_is_no_wait(
    portal: Portal, milestone: Milestone[int]
) -> None:
    def wait() -> None:
        with pytest.raises(WrongThreadError, match="staged of step 7"):
            milestone.result(TIMEOUT)
        with pytest.raises(WrongThreadError):
            milestone.exception(TIMEOUT)

    async def wait_in_loop() -> int:
        wait()
        with pytest.raises(WrongThreadError):
            await milestone
        milestone.resolve(2)
        return await milestone + milestone.result()

    portal.executor.submit(wait).result(TIMEOUT)
    assert portal.call(wait_in_loop, timeout=TIMEOUT) == 4


def test_a_forked_child_cannot_wait_for_its_parents_save() -> None:
    source = """
        import os
        from aio_ckpt.errors import EngineForkedError
        from aio_ckpt.runtime.portal import Portal
        from aio_ckpt.ticket import SaveTicket

        portal = Portal("engine", 1)
        portal.start()
        ticket = SaveTicket(step=1, portal_check=portal.check_thread)
        pid = os.fork()
        if not pid:
            try:
                ticket.result(10)
            except EngineForkedError:
                os._exit(0)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        portal.close(10)
        """
    done = run_warm(source)
    assert (done.stdout, done.stderr) == ("0\n", "")


# -- outcomes -------------------------------------------------------------------------------------


def test_the_first_outcome_stands(milestone: Milestone[int]) -> None:
    assert milestone.resolve(1)
    assert not milestone.resolve(2)
    assert not milestone.fail(ValueError())
    assert milestone.result() == 1


async def test_a_failure_is_observed_only_once_a_waiter_was_given_it(portal: Portal) -> None:
    async def by_await(milestone: Milestone[int]) -> None:
        with pytest.raises(ValueError, match="full"):
            await milestone

    async def by_result(milestone: Milestone[int]) -> None:
        with pytest.raises(ValueError, match="full"):
            milestone.result()

    async def by_exception(milestone: Milestone[int]) -> None:
        assert isinstance(milestone.exception(), ValueError)

    for observe in (by_await, by_result, by_exception):
        milestone: Milestone[int] = Milestone("m", portal.check_thread)
        assert milestone.peek() is None
        milestone.fail(ValueError("full"))
        assert milestone.done()
        assert isinstance(milestone.peek(), ValueError)
        assert repr(milestone) == "<Milestone m: failed: ValueError>"
        assert not milestone.observed
        await observe(milestone)
        assert milestone.observed


def test_a_success_is_never_observed_as_a_failure(milestone: Milestone[int]) -> None:
    milestone.resolve(1)
    milestone.result()
    milestone.exception()
    assert not milestone.observed


def test_the_traceback_of_a_failure_does_not_grow_with_its_waiters(milestone: Milestone[int]) -> None:
    def write() -> None:
        raise ValueError("where it happened")

    def frames() -> list[str]:
        with pytest.raises(ValueError) as caught:
            milestone.result()
        return [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]

    try:
        write()
    except ValueError as error:
        milestone.fail(error)
    first = frames()
    assert "write" in first
    assert [frames() for _ in range(20)] == [first] * 20


# -- tickets --------------------------------------------------------------------------------------


@pytest.fixture
def ticket(portal: Portal) -> SaveTicket:
    return SaveTicket(step=200, portal_check=portal.check_thread, waited_secs=0.5)


async def test_awaiting_a_ticket_gives_the_report_of_the_commit(ticket: SaveTicket) -> None:
    waiting = asyncio.ensure_future(ticket)
    assert not ticket.done()
    assert repr(ticket) == "<SaveTicket step 200: pending>"
    ticket.staged.resolve(None)
    await ticket.staged
    assert repr(ticket) == "<SaveTicket step 200: staged>"
    assert not ticket.done()
    ticket.committed.resolve(REPORT)
    assert await waiting is REPORT
    assert ticket.done()
    assert ticket.result() is REPORT
    assert ticket.exception() is None
    assert (ticket.step, ticket.waited_secs, ticket.skipped) == (200, 0.5, False)
    assert repr(ticket) == "<SaveTicket step 200: committed>"


async def test_a_failed_ticket_raises_for_every_way_of_waiting(ticket: SaveTicket) -> None:
    failure = OSError(28, "No space left on device")
    ticket.committed.fail(failure)
    with pytest.raises(OSError, match="No space"):
        await ticket
    with pytest.raises(OSError, match="No space"):
        ticket.result()
    assert ticket.exception() is failure
    assert repr(ticket) == "<SaveTicket step 200: failed: OSError>"


async def test_a_skipped_ticket_is_settled_at_once_without_a_report(portal: Portal) -> None:
    ticket = SaveTicket(step=3, portal_check=portal.check_thread, skipped=True)
    assert ticket.done()
    assert ticket.skipped
    assert await ticket is None
    assert ticket.result(0) is None
    await ticket.staged
    assert not ticket.cancel()
    assert repr(ticket) == "<SaveTicket step 3: skipped>"


def test_cancel_asks_the_engine_once_it_is_not_too_late(portal: Portal) -> None:
    calls: list[str] = []

    def cancel() -> bool:
        calls.append("cancel")
        return ticket.committed.fail(SaveCancelledError("cancelled"))

    ticket = SaveTicket(step=3, portal_check=portal.check_thread, cancel=cancel)
    assert ticket.cancel()
    assert not ticket.cancel()
    assert calls == ["cancel"]
    assert repr(ticket) == "<SaveTicket step 3: cancelled>"
    with pytest.raises(SaveCancelledError):
        ticket.result()


def test_a_fence_is_handed_to_the_engine_until_the_save_is_settled(portal: Portal) -> None:
    streams: list[object] = []
    ticket = SaveTicket(step=3, portal_check=portal.check_thread, fence=streams.append)
    ticket.fence()
    side = torch.Stream(device="cpu")
    ticket.fence(side)
    ticket.committed.resolve(None)
    ticket.fence(side)
    assert streams == [None, side]


def test_a_ticket_that_is_kept_does_not_keep_the_saves_state(portal: Portal) -> None:
    class State:
        def cancel(self) -> bool:
            return True

        def fence(self, stream: object) -> None:
            pass

        def progress(self) -> Progress:
            return Progress(stage="commit", bytes_done=9, bytes_total=9)

    state = State()
    alive = weakref.ref(state)
    ticket = SaveTicket(
        step=3, portal_check=portal.check_thread, cancel=state.cancel, fence=state.fence, progress=state.progress
    )
    assert ticket.progress.stage == "commit"
    del state
    assert alive() is not None
    ticket.committed.resolve(REPORT)
    gc.collect()
    assert alive() is None
    assert ticket.result() is REPORT
    assert ticket.progress == Progress(stage="done", bytes_done=9, bytes_total=9)


@pytest.mark.parametrize("timeout", [float("inf"), 1e10, 10**30])
def test_a_timeout_longer_than_the_system_can_wait_is_none(timeout: float) -> None:
    milestone: Milestone[int] = Milestone("committed", lambda _: None)
    timer = threading.Timer(0.1, milestone.resolve, [5])
    timer.start()
    assert milestone.result(timeout) == 5
    timer.join()
