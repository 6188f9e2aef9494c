"""What fails after a save was committed: it is not called failed, and nothing of it is removed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.engine import job_runner, state_pipeline
from aio_ckpt.errors import PeerFailedError, StallError
from aio_ckpt.storage.local import Storage

TIMEOUT = 20.0
STATE = {"w": torch.ones(10)}


def test_a_deadline_that_strikes_as_the_save_ends_is_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(*_: object) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise StallError("too late")

    monkeypatch.setattr(job_runner, "_watch", late)
    with SyncCheckpointEngine(tmp_path) as engine:
        report = engine.save(STATE).result(TIMEOUT)
        assert report is not None
        assert engine.steps() == [1]


def test_what_fails_behind_the_rename_leaves_the_step_in_doubt_and_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = state_pipeline.StatePipeline._publish

    async def failing(*given: Any) -> None:
        await publish(*given)
        raise StallError("the others cannot be told")

    with SyncCheckpointEngine(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(state_pipeline.StatePipeline, "_publish", failing)
            error = engine.save(STATE).exception(TIMEOUT)
        assert isinstance(error, StallError)
        assert error.in_doubt
        assert engine.steps() == [1]
        assert engine.save(STATE, step=2).result(TIMEOUT) is not None
        after = {"w": torch.zeros(10)}
        assert engine.load(after, step=1).step == 1
        assert torch.equal(after["w"], STATE["w"])


@pytest.mark.parametrize("is_committing", [False, True])
async def test_a_sign_of_life_that_nobody_hears_ends_a_save_until_it_is_committed(is_committing: bool) -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        beats += 1
        save.stall.last += 1
        if beats == 3:
            scope.cancel()
        raise PeerFailedError("the store cannot be reached", rank=None, stage="agree")

    ctx: Any = SimpleNamespace(
        config=SimpleNamespace(stall_timeout_secs=0.01), members=SimpleNamespace(coordinator=SimpleNamespace(beat=beat))
    )
    stall, agreement = SimpleNamespace(last=0, is_paused=True), SimpleNamespace(is_committing=is_committing)
    save: Any = SimpleNamespace(stall=stall, round=agreement)
    with anyio.move_on_after(TIMEOUT) as scope:
        if is_committing:
            await state_pipeline._send_heartbeats(ctx, save)
        else:
            with pytest.raises(PeerFailedError):
                await state_pipeline._send_heartbeats(ctx, save)
    assert beats == (3 if is_committing else 1)


def test_memory_that_ends_while_what_was_replaced_is_removed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        monkeypatch.setattr(Storage, "remove_file", _no_memory)
        assert engine.save(STATE).result(TIMEOUT) is not None
        assert engine.steps() == [1]


async def _no_memory(*_: object) -> None:
    raise MemoryError
