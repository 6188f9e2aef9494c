"""Retention by itself: what a pass that is given up midway leaves to the next one."""

from __future__ import annotations

import functools
from pathlib import Path

import anyio
import pytest
from builders import listing

from aio_ckpt.commit.discovery import discover
from aio_ckpt.commit.in_place import unclaimed
from aio_ckpt.commit.owner import make_engine_dirs
from aio_ckpt.commit.retention import Policy, Retention
from aio_ckpt.format.root_names import StepNames
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


@pytest.mark.parametrize("is_protected", [False, True])
async def test_the_trash_of_a_pass_that_is_cancelled_during_its_rename_is_deleted_by_the_next_one(
    tmp_path: Path, is_protected: bool
) -> None:
    executor = Executor("test", 2)
    storage = StuckStorage(executor)
    storage.renamed = anyio.Event()
    retention = Retention(
        storage,
        tmp_path,
        NAMES,
        Policy(keep_last=1, keep_every=None, keep_best=None),
        check=unclaimed,
        committed=functools.partial(discover, storage, tmp_path, NAMES),
        renames=anyio.Lock(),
        must_wait=lambda: False,
    )
    for step in (1, 2):
        (tmp_path / NAMES.name(step)).mkdir()
        (tmp_path / NAMES.name(step) / ".metadata").write_bytes(b"x")
    try:
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
    finally:
        assert executor.close(5.0)
