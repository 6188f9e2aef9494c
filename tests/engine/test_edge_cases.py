"""What an attack by somebody new to the code found, each as the property that it broke."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from gated_storage import gated_engine

from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.commit.step_numbers import MAX_STEP
from aio_ckpt.engine import job_queue
from aio_ckpt.engine.job import SaveJob
from aio_ckpt.errors import (
    ConfigError,
    CorruptCheckpointError,
    MissingNameError,
    SaveCancelledError,
    StepOrderError,
    TemplateMismatchError,
    UnexpectedNameError,
)

T = torch.arange(4.0)
TIMEOUT = 60


@pytest.mark.parametrize(
    "step_dir",
    [
        "{step:x}",
        "{step:+d}",
        "{step:>8}",
        "{{a}}{step}",
        "{step:.2f}",
        "{step:08b}",
        "{step:zz}",
        "x\0{step}",
        5,
        None,
    ],
)
def test_a_step_dir_that_could_not_be_found_again_is_refused(step_dir: object) -> None:
    with pytest.raises(ConfigError, match="step_dir="):
        EngineConfig(step_dir=step_dir)


@pytest.mark.parametrize("step_dir", ["{step}", "run_{step:d}", "ckpt-{step:04d}-x"])
def test_a_step_dir_that_is_allowed_is_found_again(tmp_path: Path, step_dir: str) -> None:
    with SyncCheckpointEngine(tmp_path, EngineConfig(step_dir=step_dir)) as engine:
        engine.save({"a": T}, 12).result(TIMEOUT)
        assert engine.steps() == [12]


def test_targets_that_overlap_are_refused_unless_they_are_one_tensor_of_one_value(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"a": T, "b": T + 1, "c": T}).result(TIMEOUT)
        one, line = torch.zeros(4), torch.zeros(6)
        with pytest.raises(TemplateMismatchError, match="'b' shares memory with 'a'"):
            engine.load({"a": one, "b": one, "c": T.clone()})
        with pytest.raises(TemplateMismatchError, match="shares memory"):
            engine.load({"a": line[:4], "b": line[2:], "c": T.clone()})
        assert not one.any()
        engine.load({"a": one, "b": torch.zeros(4), "c": one})
        assert torch.equal(one, T)


def test_rollback_takes_every_directory_of_a_later_step(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in (1, 2, 3):
            engine.save({"a": T + step}, step=step).result(TIMEOUT)
        shutil.copytree(tmp_path / "step_000000003", tmp_path / "step-3")
        assert engine.rollback(2) == [3]
        assert engine.steps() == [1, 2]
        engine.save({"a": T}, step=3).result(TIMEOUT)


def test_an_interrupt_while_copying_is_raised_once_and_cancels_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with SyncCheckpointEngine(tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(job_queue, "capture", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.save({"a": T})
        assert engine.lifetime.leases == 0
        assert [name for name in os.listdir(tmp_path) if not name.startswith(".aio_ckpt")] == []
        assert engine.save({"a": T}).result(TIMEOUT).step == 1


def test_the_pipeline_hears_of_an_interrupt_as_of_a_cancelled_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[SaveJob] = []
    enter = job_queue.JobQueue.enter

    def remember(*args: object, **kwargs: object) -> SaveJob:
        entered.append(enter(*args, **kwargs))
        return entered[-1]

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job_queue.JobQueue, "enter", remember)
    monkeypatch.setattr(job_queue, "capture", interrupted)
    with SyncCheckpointEngine(tmp_path) as engine, pytest.raises(KeyboardInterrupt):
        engine.save({"a": T})
    assert isinstance(entered[0].ticket.exception(TIMEOUT), SaveCancelledError)


@pytest.mark.parametrize("step", [2**62 + 1, 10**30, pytest.param(10**5000, id="huge")])
def test_a_step_that_no_manifest_holds_is_refused(tmp_path: Path, step: int) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        for call in (
            lambda: engine.save({"a": T}, step),
            lambda: engine.load({"a": T}, step),
            lambda: engine.read(step),
        ):
            with pytest.raises(StepOrderError, match="at most"):
                call()
        assert os.listdir(tmp_path) == []


def test_the_step_after_the_largest_is_refused_and_directories_beyond_it_are_no_steps(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"w": torch.ones(3)}, MAX_STEP).result()
        (tmp_path / f"step_{MAX_STEP}").rename(tmp_path / f"step_{MAX_STEP}0")
        assert engine.steps() == []
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.save({"w": torch.ones(3)}).result().step == 1
        engine.save({"w": torch.ones(3)}, MAX_STEP).result()
        with pytest.raises(StepOrderError, match=f"no step exceeds step {MAX_STEP}, the newest: rollback"):
            engine.save({"w": torch.ones(3)})


def test_directories_that_changed_their_names_are_found_out(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in (1, 2):
            engine.save({"a": T + step}, step=step).result(TIMEOUT)
        one, two, aside = tmp_path / "step_000000001", tmp_path / "step_000000002", tmp_path / "aside"
        one.rename(aside)
        two.rename(one)
        aside.rename(two)
        with pytest.raises(CorruptCheckpointError, match="holds step 2 by its manifest"):
            engine.read(1)


def test_a_missing_root_manifest_is_a_fault_and_no_plain_checkpoint(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        report = engine.save({0: T, "e": {}}).result(TIMEOUT)
        (report.path / "aio_ckpt.json").unlink()
        with pytest.raises(CorruptCheckpointError, match=r"aio_ckpt\.json: missing"):
            engine.read()


def test_the_replaced_checkpoint_has_an_owner_when_it_takes_the_pending_name(tmp_path: Path) -> None:
    with gated_engine(tmp_path) as (engine, storage):
        engine.save({"a": T}, step=5).result(TIMEOUT)
        seen: list[bool] = []
        exchange = storage.exchange

        async def look(pending: Path, final: Path) -> None:
            seen.extend((path / "writer.json").exists() for path in (pending, final))
            await exchange(pending, final)

        storage.exchange = look
        engine.save({"a": T + 1}, step=5, overwrite=True).result(TIMEOUT)
        assert seen == [True, True]
        assert not (tmp_path / "step_000000005" / "writer.json").exists()


def test_strict_sees_a_name_that_only_looks_as_if_it_lay_in_a_module(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"a": module, "a.extra": T, "zzz": T}).result(TIMEOUT)
        with pytest.raises(UnexpectedNameError, match="zzz"):
            engine.load({"a": module, "a.extra": T.clone()}, strict=True)


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def test_floats_keep_their_bits_and_large_ints_their_digits(tmp_path: Path) -> None:
    payload = struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf8\x7f")[0]
    state = {
        "t": T,
        "nan": float("nan"),
        "minus": -float("nan"),
        "payload": payload,
        "pair": (payload, 1),
        "big": 10**5000,
    }
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(state).result(TIMEOUT)
        engine.save({**state, "nan": payload}).result(TIMEOUT)
        first, second = engine.read(1), engine.read(2)
    for name in ("nan", "minus", "payload"):
        assert bits(first[name]) == bits(state[name]), name
    assert bits(first["pair"][0]) == bits(payload)
    assert first["big"] == 10**5000
    assert bits(second["nan"]) == bits(payload)


async def test_one_name_may_be_given_to_only_as_it_is(tmp_path: Path) -> None:
    async with CheckpointEngine(tmp_path) as engine:
        await engine.save({"model": {"w": T}, "m": T + 1})
        assert (await engine.read(only="model")).keys() == {"model"}


async def test_the_async_face_hands_on_how_a_load_treats_what_does_not_match(tmp_path: Path) -> None:
    async with CheckpointEngine(tmp_path) as engine:
        await engine.save({"a": T, "b": T + 1})
        report = await engine.load({"a": torch.zeros(4)})
        assert (list(report.unexpected), list(report.missing)) == (["b"], [])
        with pytest.raises(UnexpectedNameError, match="b"):
            await engine.load({"a": torch.zeros(4)}, strict=True)
        with pytest.raises(MissingNameError, match="c"):
            await engine.load({"a": torch.zeros(4), "c": torch.zeros(4)})
        report = await engine.load({"a": torch.zeros(4), "c": torch.zeros(4)}, allow_missing=True)
        assert list(report.missing) == ["c"]
