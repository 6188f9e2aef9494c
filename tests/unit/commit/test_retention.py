"""Retention by itself: what a pass that is given up midway leaves to the next one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import anyio
import pytest
from builders import listing

from aio_ckpt.commit.discovery import discover
from aio_ckpt.commit.engine_dirs import make_engine_dirs
from aio_ckpt.commit.in_place import unclaimed
from aio_ckpt.commit.retention import Policy, Retention
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage

NAMES = StepNames("step_{step:09d}")


class StuckStorage(Storage):
    """Its renames take effect and do not return, as those of a thread whose caller was cancelled."""

    is_stuck = True

    async def rename(self, src: Path, dst: Path) -> None:
        await super().rename(src, dst)
        if self.is_stuck:
            self.renamed.set()
            await anyio.sleep_forever()


class CountedThreads(Executor):
    """Counts the calls that it is given."""

    count = 0

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.count += 1
        return super().submit(*args, **kwargs)


@pytest.fixture
def executor() -> Iterator[CountedThreads]:
    executor = CountedThreads("test", 2)
    yield executor
    assert executor.close(5.0)


def retention_of(storage: Storage, root: Path, keep_every: int | None = None) -> Retention:
    """Retention that keeps the newest step."""
    return Retention(
        storage,
        root,
        NAMES,
        Policy(keep_last=1, keep_every=keep_every, keep_best=None),
        check=unclaimed,
        committed=functools.partial(discover, storage, root, NAMES),
        renames=anyio.Lock(),
        must_wait=lambda: False,
    )


def make_steps(root: Path, *steps: int) -> None:
    for step in steps:
        (root / NAMES.name(step)).mkdir()
        (root / NAMES.name(step) / ".metadata").write_bytes(b"x")


async def test_a_pass_takes_as_many_calls_of_threads_beside_400_kept_steps_as_beside_100(
    executor: CountedThreads, tmp_path: Path
) -> None:
    """A call of a thread for each step would take the trainer tenths of a second of its interpreter at each save."""
    counts, storage = [], Storage(executor)
    for nkept in (100, 400):
        root, kept = tmp_path / str(nkept), [*range(10, 10 * nkept + 1, 10)]
        root.mkdir()
        make_steps(root, *kept, 10 * nkept + 1, 10 * nkept + 2)
        await make_engine_dirs(storage, root)
        executor.count = 0
        await retention_of(storage, root, keep_every=10).enforce(10 * nkept + 2)
        counts.append(executor.count)
        assert listing(root) == sorted(map(NAMES.name, [*kept, 10 * nkept + 2]))
    assert counts[0] == counts[1]


async def test_a_pass_deletes_all_that_has_expired_also_if_that_is_more_than_it_renames_at_once(
    executor: CountedThreads, tmp_path: Path
) -> None:
    storage = Storage(executor)
    make_steps(tmp_path, *range(50))
    await make_engine_dirs(storage, tmp_path)
    await retention_of(storage, tmp_path).enforce(49)
    assert listing(tmp_path) == [NAMES.name(49)]


async def test_of_an_expired_step_with_several_directories_none_stays(executor: CountedThreads, tmp_path: Path) -> None:
    storage = Storage(executor)
    make_steps(tmp_path, 1, 2)
    for name in ("step_1", "checkpoint-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(b"x")
    await make_engine_dirs(storage, tmp_path)
    await retention_of(storage, tmp_path).enforce(2)
    assert listing(tmp_path) == [NAMES.name(2)]


@pytest.mark.parametrize("is_protected", [False, True])
async def test_the_trash_of_a_pass_that_is_cancelled_during_its_rename_is_deleted_by_the_next_one(
    executor: CountedThreads, tmp_path: Path, is_protected: bool
) -> None:
    storage = StuckStorage(executor)
    storage.renamed = anyio.Event()
    retention = retention_of(storage, tmp_path)
    make_steps(tmp_path, 1, 2)
    await make_engine_dirs(storage, tmp_path)
    async with anyio.create_task_group() as group:
        group.start_soon(retention.enforce, 2)
        await storage.renamed.wait()
        group.cancel_scope.cancel()
    assert f"trash/{NAMES.name(1)}" in listing(tmp_path)
    storage.is_stuck = False
    if is_protected:
        (tmp_path / ".aio_ckpt/protected/1").touch()
    await retention.enforce(2)
    kept = [NAMES.name(1), "protected/1"] if is_protected else []
    assert listing(tmp_path) == sorted([*kept, NAMES.name(2)])
