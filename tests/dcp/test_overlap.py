"""Saves that overlap in one directory, in any order of their calls: nothing mixes, nothing stays behind."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gated_storage import TIMEOUT, Call, GatedStorage
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from aio_ckpt.dcp import Reader, Writer
from aio_ckpt.runtime.portal import Executor

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable)",
    "ignore:Detected an existing checkpoint",
    "ignore:TypedStorage",
)

T = TypeVar("T")
FILES = 4
"""Of a checkpoint of one rank: .metadata, root manifest, rank manifest, data."""


class Turns:
    """Lets the calls of several saves pass one at a time, in the order that ``play`` is told."""

    def __init__(self, saves: int) -> None:
        self._changed = threading.Condition()
        self._waiting: list[deque[Future[None]]] = [deque() for _ in range(saves)]
        self._has_ended = [False] * saves
        self._is_over = False

    async def wait(self, save: int) -> None:
        turn: Future[None] = Future()
        with self._changed:
            if self._is_over:
                return
            self._waiting[save].append(turn)
            self._changed.notify_all()
        await asyncio.wrap_future(turn)

    def end(self, save: int) -> None:
        with self._changed:
            self._has_ended[save] = True
            self._changed.notify_all()

    def play(self, order: Sequence[tuple[int, int]]) -> None:
        """``order``: which save makes how many calls; then all go on as they come."""
        for save, calls in order:
            for _ in range(calls):
                with self._changed:
                    assert self._changed.wait_for(self._are_all_at_a_call, TIMEOUT)
                    if self._waiting[save]:
                        self._waiting[save].popleft().set_result(None)
        with self._changed:
            self._is_over = True
            for turn in (turn for waiting in self._waiting for turn in waiting):
                turn.set_result(None)

    def _are_all_at_a_call(self) -> bool:
        return all(ended or bool(waiting) for ended, waiting in zip(self._has_ended, self._waiting, strict=True))


class TurnStorage(GatedStorage):
    """Of one save; every call awaits its turn, those that only look, too."""

    def __init__(self, executor: Executor, turns: Turns, save: int) -> None:
        super().__init__(executor)
        self._turns = turns
        self._save = save

    async def run(self, call: Call, act: Callable[[], Awaitable[T]]) -> T | None:
        await self._turns.wait(self._save)
        return await super().run(call, act)

    async def list_dir(self, path: Path) -> list[str]:
        await self._turns.wait(self._save)
        return await super().list_dir(path)

    async def exists(self, path: Path) -> bool:
        await self._turns.wait(self._save)
        return await super().exists(path)

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        await self._turns.wait(self._save)
        return await super().read_file(path, max_bytes=max_bytes)


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    executor = Executor("turns", 6)
    yield executor
    assert executor.close(TIMEOUT)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def value_in(path: Path) -> float:
    found = {"w": torch.zeros(9)}
    dcp.load(found, storage_reader=Reader(path))
    assert len(set(found["w"].tolist())) == 1
    return float(found["w"][0])


@given(order=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 12)), max_size=14))
@examples(60, gate=8)
def test_of_two_saves_in_any_order_of_their_calls_one_fails_and_the_other_is_committed(
    tmp_path: Path, executor: Executor, pool: ThreadPoolExecutor, order: list[tuple[int, int]]
) -> None:
    path = tmp_path / "a"
    shutil.rmtree(path, ignore_errors=True)
    dcp.save({"w": torch.full((9,), 7.0)}, storage_writer=Writer(path))
    turns = Turns(2)

    def save(number: int) -> None:
        try:
            writer = Writer(path, storage=TurnStorage(executor, turns, number))
            dcp.save({"w": torch.full((9,), float(number))}, storage_writer=writer)
        finally:
            turns.end(number)

    saves = [pool.submit(save, number) for number in range(2)]
    try:
        turns.play(order)
    finally:
        errors = [saving.exception(TIMEOUT) for saving in saves]
    done = [float(number) for number, error in enumerate(errors) if error is None]
    assert all("another save into this directory" in str(error) for error in errors if error is not None)
    assert value_in(path) in (done or [7.0])
    assert len(list(path.iterdir())) == FILES
