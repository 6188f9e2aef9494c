"""What an editor shows and refuses: mypy checks this file, and nothing runs it.

``assert_type`` fails if a call returns another type. mypy warns of a ``type: ignore`` that is not needed, so each of
those is a mistake that has to be found.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import torch

import aio_ckpt
from aio_ckpt import (
    CheckpointEngine,
    EngineStats,
    LoadReport,
    Progress,
    SaveReport,
    SaveTicket,
    SyncCheckpointEngine,
)
from aio_ckpt.ticket import Milestone

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())


def show(now: Progress) -> None:
    print(now.stage, now.bytes_done)


def tell(milestone: Milestone[SaveReport | None]) -> None:
    print(milestone.peek())


def of_either_engine(engine: CheckpointEngine | SyncCheckpointEngine) -> None:
    ticket = engine.save({"model": model, "step": 1}, metrics={"loss": torch.ones(()), "f1": np.float32(1), "n": 1})
    assert_type(ticket, SaveTicket)
    assert_type(ticket.result(), SaveReport | None)
    assert_type(ticket.staged.result(), None)
    assert_type(ticket.progress, Progress)
    ticket.committed.add_done_callback(tell)
    ticket.fence(torch.Stream())
    assert_type(engine.prepare(model), Milestone[None])
    assert_type(engine.stats(), EngineStats)
    assert_type(engine.undeleted_steps, Mapping[int, str])
    engine.guard(optimizer)
    for stateful in (model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)):
        engine.save(stateful)
    assert_type(engine.save({"model": model}, path="ckpts/last.ckpt"), SaveTicket)
    assert_type(engine.remove(Path("ckpts/last.ckpt")), Milestone[None])


def of_the_sync_engine(engine: SyncCheckpointEngine) -> None:
    assert_type(engine.load(model, progress=show, rename={"a": "b"}), LoadReport)
    assert_type(engine.steps(), list[int])
    assert_type(engine.latest_step(), int | None)
    assert_type(engine.rollback(1), list[int])
    assert_type(engine.read(only=["model"]), Any)
    assert_type(aio_ckpt.load("runs/ckpt/step_000000001", {"model": model}), LoadReport)
    with engine as entered:
        assert_type(entered, SyncCheckpointEngine)


async def of_the_async_engine(engine: CheckpointEngine) -> None:
    assert_type(await engine.load(model, progress=show, rename=str.lower), LoadReport)
    assert_type(await engine.save({"model": model}), SaveReport | None)
    assert_type(await engine.prepare(model), None)
    assert_type(await engine.steps(), list[int])
    assert_type(await engine.latest_step(), int | None)
    assert_type(engine.latest_step().result(), int | None)
    assert_type(await engine.rollback(1), list[int])
    await engine.protect(1)
    await engine.delete(1)
    assert_type(await engine.remove("ckpts/last.ckpt"), None)
    async with engine as entered:
        assert_type(entered, CheckpointEngine)


def mistakes(engine: SyncCheckpointEngine, ticket: SaveTicket) -> None:
    engine.save(torch.ones(1))  # type: ignore[arg-type]
    engine.save([model])  # type: ignore[arg-type]
    engine.prepare(3)  # type: ignore[arg-type]
    engine.load(3)  # type: ignore[arg-type]
    aio_ckpt.load("runs/ckpt", 3)  # type: ignore[arg-type]
    engine.save({}, path=3)  # type: ignore[arg-type]
    engine.remove(3)  # type: ignore[arg-type]
    engine.save({}, metrics={"loss": "low"})  # type: ignore[dict-item]
    engine.load({}, progress=len)  # type: ignore[arg-type]
    engine.guard(model)  # type: ignore[arg-type]
    ticket.fence(3)  # type: ignore[arg-type]
    ticket.committed.add_done_callback(show)  # type: ignore[arg-type]
