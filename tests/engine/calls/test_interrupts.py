"""Ctrl-C at every place of ``save()`` and ``save_file()`` where the interpreter looks for signals."""

from __future__ import annotations

import concurrent.futures
import dis
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from slow import slow

from aio_ckpt import EngineConfig, SaveTicket, SyncCheckpointEngine
from aio_ckpt.engine import agreement, capture_job, capture_resources, engine, file_save, job_queue
from aio_ckpt.engine import root_session as keeper
from aio_ckpt.engine import state_save as saver
from aio_ckpt.engine.job import SaveJob, WriteJob
from aio_ckpt.errors import SaveCancelledError
from aio_ckpt.memory import arena_lifetimes
from aio_ckpt.plan import save_plan as plan
from aio_ckpt.runtime import ctrl_c, deadline, futures, portal
from aio_ckpt.snapshot import capture as snapshot
from aio_ckpt.snapshot import captured_chunks, image, stall_timer
from aio_ckpt.storage import root_lock as rootlock

TIMEOUT = 30.0
COUNT = 40_000
"""Numbers in a state: some chunks where the budget is the least."""
TRACED = {
    module.__file__
    for module in (
        agreement,
        capture_resources,
        concurrent.futures._base,
        ctrl_c,
        deadline,
        futures,
        engine,
        file_save,
        saver,
        image,
        job_queue,
        keeper,
        arena_lifetimes,
        plan,
        portal,
        captured_chunks,
        stall_timer,
        rootlock,
        snapshot,
        capture_job,
    )
}
FOREIGN = {"Condition.__enter__", "Condition.__exit__"}
"""Of the standard library, in Python: a lock that is taken there is lost when they are interrupted. Nothing of ours
enters a Condition, nor does a future of ours."""
EVERY = [pytest.param(59, id="every 59th place"), slow(1, id="every place")]
NEVER = 1 << 60
"""A place that no call reaches. CPython 3.12 traces the opcodes of a function only if its first call was traced."""
LOOKS_BEHIND = {"RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}


class Interrupt:
    """Raises KeyboardInterrupt at the ``at``-th place of this thread's calls where a signal could come."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.left = at
        self.where = ""
        self._last: dict[FrameType, int] = {}

    def run(self, call: Callable[[], object]) -> None:
        """``call()``, then no more tracing."""
        before = sys.gettrace()
        gc.disable()  # or what the tests before left might be finalized here, and get the interrupt
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(before)
            gc.enable()
            self._last.clear()

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code, caller = frame.f_code, frame.f_back
        is_entered = code.co_qualname in FOREIGN and caller is not None and caller.f_code.co_filename in TRACED
        if code.co_filename not in TRACED and not is_entered:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._step

    def _step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            last, self._last[frame] = self._last.get(frame), frame.f_lasti
            if last is not None and is_place(frame.f_code, last, frame.f_lasti):
                self.left -= 1
                if self.left == 0:
                    self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                    raise KeyboardInterrupt
        return self._step


def is_place(code: CodeType, last: int, offset: int) -> bool:
    """Whether a signal is looked for behind ``last``: raised there, it is caught by what guards ``last``."""
    name = dis.opname[code.co_code[last]]
    return name in LOOKS_BEHIND and guard_of(code, last) == guard_of(code, offset)


def guard_of(code: CodeType, offset: int) -> int | None:
    """Where an exception at ``offset`` is handled in its function."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


def check_intact(opened: SyncCheckpointEngine, interrupt: Interrupt) -> None:
    """Nothing stays pending, leased or locked: the next save commits."""
    for save in opened._queue.pending(WriteJob):
        save.finished.result(TIMEOUT)
    assert opened._queue.pending(WriteJob) == (), interrupt.where
    state = {"a": torch.full((COUNT,), 7.0 + interrupt.at), "note": "n"}  # of the same plan
    report = opened.save(state).result(TIMEOUT)
    assert report is not None
    assert torch.equal(opened.read(report.step)["a"], state["a"]), interrupt.where
    assert (opened.lifetime.leases, opened._resources.lifetime._reserved_bytes) == (0, 0), interrupt.where
    assert opened.latest_step() == report.step


def interrupted_saves(opened: SyncCheckpointEngine, at: int) -> Interrupt:
    interrupt = Interrupt(at)
    state = {"a": torch.arange(float(COUNT)), "note": "n"}
    try:
        interrupt.run(lambda: opened.save(state))
    except KeyboardInterrupt:
        assert interrupt.left == 0, "raised twice"
    return interrupt


@pytest.mark.skipif(
    sys.version_info >= (3, 13),
    reason="settrace of Python 3.13 passes over most opcodes of functions that ran before; first saves are tried there",
)
@pytest.mark.parametrize("budget_bytes", [pytest.param(None, id="whole"), pytest.param(64 << 10, id="in waves")])
@pytest.mark.parametrize("stride", EVERY)
def test_wherever_ctrl_c_comes_in_save_nothing_stays_pending_or_leased(
    tmp_path: Path, stride: int, budget_bytes: int | None
) -> None:
    config = EngineConfig(stall_timeout_secs=5.0, workers=1, keep_last=1, budget_bytes=budget_bytes)
    with SyncCheckpointEngine(tmp_path, config) as opened:
        Interrupt(NEVER).run(lambda: opened.save({"a": torch.zeros(COUNT)}).result(TIMEOUT))
        at = 1
        while (interrupt := interrupted_saves(opened, at)).left == 0:
            check_intact(opened, interrupt)
            at += stride
    assert at > 100


@pytest.mark.parametrize("stride", EVERY)
def test_wherever_ctrl_c_comes_in_the_first_save_the_root_and_the_memory_are_free(tmp_path: Path, stride: int) -> None:
    config = EngineConfig(stall_timeout_secs=5.0, workers=1)
    with SyncCheckpointEngine(tmp_path / "traced", config) as opened:
        Interrupt(NEVER).run(lambda: opened.save({"a": torch.zeros(COUNT)}).result(TIMEOUT))
    at, is_over = 1 - stride, False
    while not is_over:
        at += stride
        with SyncCheckpointEngine(tmp_path / str(at), config) as opened:
            interrupt = interrupted_saves(opened, at)
            is_over = interrupt.left > 0
            check_intact(opened, interrupt)
    assert at > 100


def test_a_save_that_ctrl_c_ends_while_it_copies_is_cancelled_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[SaveJob] = []
    assign_ticket = job_queue.JobQueue.assign_ticket

    def remember(*args: object, **kwargs: object) -> SaveJob:
        entered.append(assign_ticket(*args, **kwargs))
        return entered[-1]

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with SyncCheckpointEngine(tmp_path) as opened:
        with monkeypatch.context() as patch:
            patch.setattr(job_queue.JobQueue, "assign_ticket", remember)
            patch.setattr(capture_job, "capture", interrupted)
            with pytest.raises(KeyboardInterrupt):
                opened.save({"a": torch.zeros(5000)})
        assert isinstance(entered[0].ticket.exception(TIMEOUT), SaveCancelledError)
        assert [name for name in os.listdir(tmp_path) if not name.startswith(".aio_ckpt")] == []


def test_closing_ends_the_lease_that_ctrl_c_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with SyncCheckpointEngine(tmp_path) as opened:
        monkeypatch.setattr(job_queue.JobQueue, "assign_ticket", lost)
        with pytest.raises(KeyboardInterrupt):
            opened.save({"a": torch.zeros(5000)})
        stats = opened._resources.lifetime
        assert stats.stats.leases == 1
    assert (stats.stats.leases, stats.stats.arenas) == (0, 0)


@pytest.mark.sampled
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="settrace of Python 3.13 passes over most opcodes")
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
@pytest.mark.parametrize("stride", EVERY)
def test_wherever_ctrl_c_comes_in_save_file_nothing_stays_pending_or_leased(
    tmp_path: Path, stride: int, name: str
) -> None:
    config = EngineConfig(stall_timeout_secs=5.0, workers=1)
    path = tmp_path / "out" / name
    options = {"max_shard_bytes": 2 * COUNT} if name.endswith("s") else {}
    with SyncCheckpointEngine(tmp_path / "root", config) as opened:

        def saved(value: float) -> SaveTicket:
            state = {"a": torch.full((COUNT,), value), "b": torch.full((COUNT,), value)}
            return opened.save_file(state, path, **options)

        Interrupt(NEVER).run(lambda: saved(0.0).result(TIMEOUT))
        for at in range(1, NEVER, stride):
            interrupt = Interrupt(at)
            try:
                interrupt.run(lambda: saved(1.0))
            except KeyboardInterrupt:
                assert interrupt.left == 0, "raised twice"
            for pending in opened._queue.pending(WriteJob):
                pending.finished.result(TIMEOUT)
            assert opened._queue.pending(WriteJob) == (), interrupt.where
            saved(2.0).result(TIMEOUT)
            assert (opened.lifetime.leases, opened._resources.lifetime._reserved_bytes) == (0, 0), interrupt.where
            if interrupt.left > 0:
                break
        assert at > 100
