"""Retention: what is deleted and what never is, by policy, metric and protection; how, and what a failure leaves."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import listing, save, weights
from gated_storage import TIMEOUT, Call, Gate, GatedStorage, gated_engine
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from saved_files import RANK_MANIFEST, ROOT_MANIFEST, data_file, root_manifest
from warm_python import run_warm

from aio_ckpt import CheckpointEngine, EngineConfig, KeepBest, SyncCheckpointEngine
from aio_ckpt.cli import commands as cli
from aio_ckpt.commit.discovery import CommittedCheckpoint
from aio_ckpt.commit.retention import Policy, best, expired
from aio_ckpt.commit.user_metrics import check_metrics
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, ConfigError, StepOrderError, WriteError
from aio_ckpt.format.checkpoint_files import TRAILER_BYTES
from aio_ckpt.format.root_manifest import decode_root
from aio_ckpt.format.root_names import ABANDONED_DIR, ENGINE_DIRS, PROTECTED_DIR, TRASH_DIR, protected_name

LOSS = KeepBest(metric="loss")


def save_with(engine: SyncCheckpointEngine, losses: Mapping[int, float | None]) -> None:
    for step, loss in losses.items():
        engine.save(weights(step), step, metrics=None if loss is None else {"loss": loss}).result(TIMEOUT)


def committed(root: Path) -> list[int]:
    """Steps left once every deletion has ended: closing waits for them."""
    with SyncCheckpointEngine(root) as engine:
        return engine.steps()


# -- the decision -----------------------------------------------------------------------------------


def listed(steps: list[int]) -> list[CommittedCheckpoint]:
    return [CommittedCheckpoint(step=step, path=Path(f"/{step}")) for step in steps]


def kept(steps: list[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    gone = expired(
        listed(steps),
        Policy(keep_last=keep_last, keep_every=keep_every, keep_best=None),
        good=max(steps, default=0),
    )
    return [step for step in steps if step not in {checkpoint.step for checkpoint in gone}]


def test_the_policy_keeps_the_newest_and_every_nth() -> None:
    steps = [0, 5, 10, 15, 20, 25]
    assert kept(steps, None, None) == steps
    assert kept(steps, None, 10) == steps, "without keep_last nothing is ever deleted"
    assert kept(steps, 2, None) == [20, 25]
    assert kept(steps, 1, 10) == [0, 10, 20, 25]
    assert kept(steps, 99, None) == steps
    assert kept([], 1, None) == []


STEPS = st.lists(st.integers(0, 60), unique=True).map(sorted)
VALUES = st.none() | st.sampled_from([0.0, 1.0, 2.0, -1.0, math.inf, -math.inf, math.nan]) | st.floats(-5, 5)
RULES = st.builds(KeepBest, metric=st.just("m"), mode=st.sampled_from(["min", "max"]), count=st.integers(1, 4))
POLICIES = st.builds(
    Policy,
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 7),
    keep_best=st.none() | RULES,
)


@given(
    steps=STEPS,
    policy=POLICIES,
    good=st.integers(0, 60),
    protected=st.frozensets(st.integers(0, 60)),
    metrics=st.dictionaries(st.integers(0, 60), VALUES),
)
@examples(600)
def test_no_policy_lets_go_what_it_promises_to_keep_and_all_else_goes(
    steps: list[int], policy: Policy, good: int, protected: frozenset[int], metrics: dict[int, float | None]
) -> None:
    gone = [
        checkpoint.step
        for checkpoint in expired(listed(steps), policy, good=good, protected=protected, metrics=metrics)
    ]
    assert gone == sorted(set(gone)), "oldest first, each once"
    assert set(gone) <= set(steps), "only what was listed"
    assert not steps or steps[-1] not in gone, "never the newest"
    assert all(step < good for step in gone), "never before a newer one is known to be whole"
    if policy.keep_last is None or good not in steps:
        assert not gone
        return
    known = {step: metrics[step] for step in steps if step in metrics}
    ranked = best(metrics, policy.keep_best) if policy.keep_best else []
    for step in steps:
        stays = step >= good or step in steps[-policy.keep_last :] or step in protected
        stays = stays or (policy.keep_every is not None and step % policy.keep_every == 0)
        stays = stays or (policy.keep_best is not None and (step not in known or step in ranked))
        assert (step in gone) is not stays


@given(values=st.dictionaries(st.integers(0, 60), VALUES), rule=RULES)
@examples(300)
def test_the_best_are_finite_and_none_that_is_left_out_is_better(
    values: dict[int, float | None], rule: KeepBest
) -> None:
    found = best(values, rule)
    finite = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
    assert len(found) == min(rule.count, len(finite))
    sign = 1 if rule.mode == "min" else -1
    for step, left_out in itertools.product(found, finite.keys() - found):
        better = sign * finite[step], -step
        assert better < (sign * finite[left_out], -left_out), "of equal values the newer step is the better"


@given(losses=st.lists(VALUES, max_size=30), rule=RULES, keep_last=st.integers(1, 3), keep_every=st.none() | st.just(7))
@examples(200)
def test_through_a_whole_run_the_best_of_all_time_are_there(
    losses: list[float | None], rule: KeepBest, keep_last: int, keep_every: int | None
) -> None:
    policy = Policy(keep_last=keep_last, keep_every=keep_every, keep_best=rule)
    left: list[int] = []
    history: dict[int, float | None] = {}
    for step, loss in enumerate(losses, 1):
        left.append(step)
        history[step] = loss
        values = {step: history[step] for step in left}
        gone = {checkpoint.step for checkpoint in expired(listed(left), policy, good=step, metrics=values)}
        left = [step for step in left if step not in gone]
        assert set(best(history, rule)) <= set(left)
        every = sum(step % keep_every == 0 for step in left) if keep_every else 0
        assert len(left) <= keep_last + rule.count + every
        again = expired(listed(left), policy, good=step, metrics={step: history[step] for step in left})
        assert again == [], "what was kept once is kept the next time"


# -- keep_last and keep_every -----------------------------------------------------------------------


def test_old_steps_are_deleted_once_a_new_one_is_committed(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=2, keep_every=10)) as engine:
        save(engine, 5, 10, 15, 20, 25, 30)
    assert listing(root) == [f"step_{step:09d}" for step in (10, 20, 25, 30)]


def test_nothing_is_deleted_unasked(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, *range(1, 12))
        assert engine.steps() == list(range(1, 12))


@pytest.mark.parametrize("setting", [{"keep_every": 10}, {"keep_best": KeepBest(metric="loss")}])
def test_a_setting_that_would_delete_nothing_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} without keep_last: nothing would ever be deleted"):
        EngineConfig(**setting)


def test_a_pass_that_deletes_logs_one_line_with_its_steps(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aio_ckpt")
    with SyncCheckpointEngine(root) as engine:
        save(engine, *range(1, 15))
    with SyncCheckpointEngine(root, EngineConfig(keep_last=2)) as engine:
        save(engine, 15)
    with SyncCheckpointEngine(root, EngineConfig(keep_last=2)) as engine:
        save(engine, 16)
    with SyncCheckpointEngine(root, EngineConfig(keep_last=3)) as engine:
        save(engine, 17)
    told = [(record.levelname, record.getMessage()) for record in caplog.records if "deleted" in record.getMessage()]
    first = f"{root}: deleted steps 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 3 more (keep_last=2)"
    assert told == [("INFO", first), ("INFO", f"{root}: deleted step 14 (keep_last=2)")]


def test_a_step_expires_by_a_rename_that_is_durable_before_a_file_is_deleted(root: Path) -> None:
    with gated_engine(root, keep_last=1) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        storage.calls.clear()
        engine.save(weights(2), 2).result(TIMEOUT)
        storage.wait_for("remove_tree", "trash/*")
        calls = [(call.name, call.path) for call in storage.calls]
        old, trash = root / "step_000000001", root / TRASH_DIR / "step_000000001"
        durable = calls.index(("sync_dir", root))
        expires = [("rename", old), ("sync_dir", trash.parent), ("sync_dir", root)]
        torn = [("remove_file", trash / ".metadata"), ("sync_dir", trash), ("remove_tree", trash)]
        assert calls[-6:] == expires + torn, "renamed, durably, before a file is deleted, .metadata before the others"
        assert durable < len(calls) - 6, "begun before the new step was durable"


def test_a_failed_save_deletes_nothing(root: Path) -> None:
    with gated_engine(root, keep_last=1) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        storage.fail("sync", "*", WriteError(errno.EIO, "broken", "x"))
        with pytest.raises(WriteError):
            engine.save(weights(2), 2).result(TIMEOUT)
        assert engine.steps().result() == [1]


def test_an_engine_that_commits_nothing_deletes_nothing(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2, 3)
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        engine.load(weights(0))
    assert committed(root) == [1, 2, 3]


def test_overwriting_an_old_step_deletes_only_what_is_older(root: Path) -> None:
    """The newest may be damaged; what was just written is not, and what lies between may be all there is."""
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2, 3, 4)
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        engine.save(weights(20), 2, overwrite=True).result(TIMEOUT)
    assert committed(root) == [2, 3, 4]


def test_many_saves_in_a_row_leave_what_the_policy_says(root: Path) -> None:
    """A pass that waits for another one looks at the newest commit, whoever asked for it."""
    with gated_engine(root, keep_last=1) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        gate = storage.hold("remove_tree", "trash/step_000000001")
        engine.save(weights(2), 2).result(TIMEOUT)
        gate.wait_reached()
        for step in (3, 4, 5, 6):
            engine.save(weights(step), step).result(TIMEOUT)
        assert len(engine._root_session.passes) <= 3
        gate.open()
    assert committed(root) == [6]


# -- failures ---------------------------------------------------------------------------------------


def test_what_cannot_be_deleted_fails_no_save_is_told_and_tried_again(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gated_engine(root, keep_last=1) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        storage.fail("rename", "step_000000001", WriteError(errno.EACCES, "not yours", "x"))
        with caplog.at_level(logging.WARNING, "aio_ckpt"):
            engine.save(weights(2), 2).result(TIMEOUT)
            engine._root_session.passes[-1].result(TIMEOUT)
            assert list(engine.undeleted_steps) == [1]
            assert "not yours" in engine.undeleted_steps[1]
            engine.save(weights(3), 3).result(TIMEOUT)
            storage.wait_for("remove_tree", "trash/step_000000002")
        assert "step 1 is kept beyond its time" in caplog.text
        assert engine.steps().result() == [3]
    assert engine.undeleted_steps == {}


def test_a_load_of_a_step_that_is_gone_names_retention_only_if_it_may_have_expired(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=2)) as engine:
        save(engine, 10, 20, 30)
    with SyncCheckpointEngine(root) as engine:
        with pytest.raises(CheckpointNotFoundError, match=r"committed steps: \[20, 30\] \(retention, keep_last"):
            engine.load(weights(0), step=10)
        for step in (25, 32):
            with pytest.raises(CheckpointNotFoundError, match=r"committed steps: \[20, 30\]$"):
                engine.load(weights(0), step=step)


def test_a_pass_renames_several_steps_before_it_deletes_the_first(root: Path) -> None:
    """Deletions take longer than commits: one pair of fsyncs serves all, so that they keep up with several saves."""
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2, 3)
    with gated_engine(root, keep_last=1) as (engine, storage):
        gate = storage.hold("remove_tree", "trash/*")
        engine.save(weights(4), 4).result(TIMEOUT)
        gate.wait_reached()
        assert committed(root) == [4]
        assert sum(call.matches("sync_dir", "trash") for call in storage.calls) == 1
        gate.open()
    assert listing(root) == ["step_000000004"]


def test_a_commit_waits_for_the_renames_of_a_few_steps_only(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, *range(1, 41))
    with gated_engine(root, keep_last=1) as (engine, storage):
        gate = storage.hold("remove_tree", "trash/*")
        engine.save(weights(41), 41).result(TIMEOUT)
        gate.wait_reached()
        assert committed(root) == [*range(17, 42)]
        gate.open()
    assert listing(root) == ["step_000000041"]


@pytest.mark.parametrize("where", ["sync_dir", "remove_tree"])
def test_a_deletion_that_stops_midway_leaves_trash_that_is_never_listed(root: Path, where: str) -> None:
    with gated_engine(root, keep_last=1) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        gate = storage.hold("rename", "step_000000001")
        engine.save(weights(2), 2).result(TIMEOUT)
        gate.wait_reached()
        name = "root" if where == "sync_dir" else "trash/step_000000001"
        storage.fail(where, name, WriteError(errno.EIO, "broken", "x"))
        gate.open()
        engine._root_session.passes[-1].result(TIMEOUT)
        assert list(engine.undeleted_steps) == [1]
        assert engine.steps().result() == [2]
        if where == "remove_tree":
            engine.save(weights(3), 3).result(TIMEOUT)
            storage.wait_for("remove_tree", "trash/step_000000001")
        else:  # whether the rename is durable is not known: removed by the next holder of the lock
            assert "trash/step_000000001" in listing(root)
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(4), 4).result(TIMEOUT)
    assert [name for name in listing(root) if "/" in name] == []


def test_a_deletion_that_hangs_ends_by_its_deadline_and_closing_does_not_wait_longer(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gated_engine(root, keep_last=1, stall_timeout_secs=0.5) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        gate = storage.hold("remove_tree", "*")
        engine.save(weights(2), 2).result(TIMEOUT)
        gate.wait_reached()
        began = time.monotonic()
        engine.close_blocking()
        assert time.monotonic() - began < TIMEOUT, "far above the deadline: no measure of speed"
    assert "did not end within 0.5 s" in caplog.text


def test_no_pass_looks_while_a_commit_may_yet_be_taken_back(root: Path) -> None:
    with gated_engine(root, keep_last=2) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        made_durable = storage.hold("sync_dir", "root")
        saving = engine.save(weights(3), 3)
        made_durable.wait_reached()  # 3 is visible
        storage.fail("sync_dir", "root", WriteError(errno.EIO, "broken", "x"))
        engine._root_session.delete_expired(2)
        renames, deadline = engine._quarantine.renames, time.monotonic() + TIMEOUT
        while not renames.statistics().tasks_waiting:  # the pass; without the lock it would list 3
            assert time.monotonic() < deadline
        made_durable.open()
        assert isinstance(saving.exception(TIMEOUT), WriteError)
        for done in engine._root_session.passes:
            done.result(TIMEOUT)
        assert engine.steps().result() == [1, 2]


def test_after_a_rollback_the_policy_goes_by_what_was_saved_since(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=2)) as engine:
        save(engine, 1, 5)
        engine.rollback(1)
        save(engine, 2, 3)
    assert committed(root) == [2, 3]


def test_the_commit_of_an_old_step_lets_what_newer_ones_made_superfluous_go(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 2, 3, 4, 5)
        engine.protect(3)
    with gated_engine(root, keep_last=1) as (engine, storage):
        gate = storage.hold("remove_tree", "trash/step_000000002")
        engine.save(weights(6), 6).result(TIMEOUT)
        gate.wait_reached()
        engine.save(weights(30), 3, overwrite=True).result(TIMEOUT)
        gate.open()
    assert committed(root) == [3, 6]


def test_a_rollback_to_a_step_that_is_being_deleted_leaves_the_later_ones(root: Path) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root, keep_last=1) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        gate = storage.hold("rename", "step_000000001")
        engine.save(weights(2), 2).result(TIMEOUT)
        gate.wait_reached()
        rolling = pool.submit(lambda: engine.rollback(1).result())
        wait([rolling], 0.5)  # it must not end before the deletion does
        gate.open()
        with pytest.raises(CheckpointNotFoundError):
            rolling.result(TIMEOUT)
        assert engine.steps().result() == [2]


def test_a_damaged_step_that_could_not_be_set_aside_is_none_of_the_kept(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2, 3)
    file = data_file(root / "step_000000003")
    data = bytearray(file.read_bytes())
    data[data.index(weights(3)["w"].numpy().tobytes())] ^= 1
    file.write_bytes(data)
    with gated_engine(root, keep_last=2) as (engine, storage):
        report = engine.load(weights(0), None, strict=False, allow_missing=False, fallback=True).result(TIMEOUT)
        assert report.step == 2
        for _ in range(2):  # of the call, and of the save in the background
            storage.fail("rename", "step_000000003", WriteError(errno.EACCES, "no", "step_000000003"))
        engine.save(weights(4), 4).result(TIMEOUT)
    assert committed(root) == [2, 3, 4]


def test_a_save_that_ends_while_the_engine_closes_settles_all_the_same(root: Path) -> None:
    with gated_engine(root, keep_last=1) as (engine, _):
        engine.save(weights(1), 1).result(TIMEOUT)
    engine._root_session.delete_expired(1)
    assert engine._root_session.passes == ()


def test_steps_that_expired_no_longer_stand_in_the_way(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        save(engine, 1, 2)
        with pytest.raises(StepOrderError):
            engine.save(weights(1), 1)
    with SyncCheckpointEngine(root) as engine:
        assert engine.steps() == [2]


def test_an_expired_step_cannot_be_overwritten_but_a_committed_one_can(root: Path) -> None:
    """The engine remembers the newest step alone; of older ones it asks the disk."""
    with gated_engine(root, keep_last=1) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        storage.wait_for("remove_tree", "trash/step_000000001")
        with pytest.raises(StepOrderError, match=r"step=1 .* pending step 2: .*begins anew$"):
            engine.save(weights(10), 1, overwrite=True)
        engine.save(weights(20), 2, overwrite=True).result(TIMEOUT)
        assert engine.steps().result() == [2]


def sizes(*objects: object) -> dict[str, int]:
    return {
        f"{type(holder).__name__}.{name}": len(value)
        for holder in objects
        for name, value in vars(holder).items()
        if hasattr(value, "__len__") and not isinstance(value, (str, bytes))
    }


def test_nothing_is_remembered_of_each_step(root: Path) -> None:
    config = EngineConfig(keep_last=2, keep_best=LOSS)
    with SyncCheckpointEngine(root, config) as engine:
        counts = []
        for step in range(1, 31):
            engine.save(weights(step), metrics={"loss": -step}).result(TIMEOUT)
            for done in engine._root_session.passes:
                done.result(TIMEOUT)
            counts.append(sizes(engine, engine._queue, engine._root_session, engine._root_session._retention))
    assert counts[-1] == counts[9]


# -- keep_best --------------------------------------------------------------------------------------


def test_the_best_by_a_metric_stay_beside_the_newest(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1, keep_best=KeepBest(metric="loss", count=2))) as engine:
        save_with(engine, {1: 3.0, 2: 1.0, 3: 5.0, 4: 2.0, 5: 9.0, 6: 4.0})
    assert committed(root) == [2, 4, 6]
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1, keep_best=KeepBest(metric="loss", mode="max"))) as engine:
        save_with(engine, {7: 0.5})
    assert committed(root) == [6, 7], "a resumed run goes by the metrics on the disk"


def test_a_step_whose_metric_is_missing_or_not_finite_is_never_the_best(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1, keep_best=LOSS)) as engine:
        save_with(engine, {1: 7.0, 2: None, 3: math.nan, 4: -math.inf, 5: 8.0, 6: math.inf})
        engine.save(weights(7), 7, metrics={"accuracy": -1.0}).result(TIMEOUT)
    assert committed(root) == [1, 7]


def test_a_metric_that_no_step_has_is_told_once_with_those_that_there_are(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(keep_last=1, keep_best=KeepBest(metric="val_loss"))
    with SyncCheckpointEngine(root, config) as engine:
        for step in (1, 2, 3):
            engine.save(weights(step), step, metrics={"val/loss": 1.0}).result(TIMEOUT)
            engine.ready()
    told = [record.getMessage() for record in caplog.records if "no step has the metric" in record.getMessage()]
    assert len(told) == 1
    assert "'val_loss', they have 'val/loss'" in told[0]


def test_an_overwritten_step_is_judged_by_its_new_metric(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1, keep_best=LOSS)) as engine:
        save_with(engine, {1: 1.0, 2: 2.0})
        engine.save(weights(2), 2, overwrite=True, metrics={"loss": 0.5}).result(TIMEOUT)
        save_with(engine, {3: 3.0})
    assert committed(root) == [2, 3]


def test_a_step_whose_metrics_cannot_be_read_is_not_deleted(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SyncCheckpointEngine(root) as engine:
        save_with(engine, {1: 1.0, 2: 2.0})
    root_manifest(root / "step_000000001").write_bytes(b"{")
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1, keep_best=LOSS)) as engine:
        save_with(engine, {3: 0.0})
    assert committed(root) == [1, 3]
    assert "step 1 stays: its metrics cannot be read" in caplog.text


def test_plain_dcp_has_no_metric(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save_with(engine, {1: 1.0, 2: 2.0})
    metadata = root / "step_000000001" / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-TRAILER_BYTES])
    for name in (ROOT_MANIFEST, RANK_MANIFEST):
        next((root / "step_000000001").glob(name)).unlink()
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1, keep_best=LOSS)) as engine:
        save_with(engine, {3: 3.0})
    assert committed(root) == [2, 3]


def test_metrics_are_stored_and_a_manifest_without_any_is_what_it_was(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1), 1, metrics={"loss": 1.5, "nan": math.nan, "n": np.float32(2)}).result(TIMEOUT)
        save(engine, 2)
    data = root_manifest(root / "step_000000001").read_bytes()
    assert decode_root(data, name="x").metrics == {"loss": 1.5, "nan": None, "n": 2.0}
    assert "metrics" not in json.loads(root_manifest(root / "step_000000002").read_bytes())
    assert b"NaN" not in data, "JSON knows no NaN"


def test_what_a_metric_may_be() -> None:
    given = {"a": 1, "b": np.float64(2.5), "c": torch.tensor(3.0), "d": torch.ones(1, requires_grad=True), "e": True}
    assert check_metrics(given) == {"a": 1.0, "b": 2.5, "c": 3.0, "d": 1.0, "e": 1.0}
    assert check_metrics({"a": 10**400, "b": float("-inf")}) == {"a": None, "b": None}
    assert check_metrics(None) == {}


def test_the_name_of_a_metric_that_no_file_holds_is_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the name '\\ud800' has a lone surrogate.*rename"):
        check_metrics({"\ud800": 1})


@pytest.mark.parametrize(
    "metrics", [[1], {"a": "1"}, {"a": b"1"}, {"a": None}, {"a": torch.ones(2)}, {"a": 1j}, {1: 1.0}, {"\ud800": 1.0}]
)
def test_what_is_no_metric_is_refused_before_anything_is_touched(root: Path, metrics: dict[str, object]) -> None:
    with SyncCheckpointEngine(root) as engine:
        with pytest.raises(ConfigError, match="metrics"):
            engine.save(weights(1), 1, metrics=metrics)
        assert engine.plan_misses == 0
        assert not root.exists()


@pytest.mark.parametrize("fields", [{"metric": ""}, {"metric": 3}, {"mode": "least"}, {"count": 0}, {"count": True}])
def test_a_rule_out_of_range_is_refused_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        KeepBest(**{"metric": "loss", **fields})


def test_keep_best_alone_is_refused_because_it_would_delete_nothing() -> None:
    with pytest.raises(ConfigError, match="keep_last=1"):
        EngineConfig(keep_best=LOSS)
    with pytest.raises(ConfigError, match="KeepBest"):
        EngineConfig(keep_last=1, keep_best="loss")


# -- protection -------------------------------------------------------------------------------------


def test_a_protected_step_stays_until_it_is_no_longer_protected(root: Path) -> None:
    config = EngineConfig(keep_last=1)
    with SyncCheckpointEngine(root, config) as engine:
        save(engine, 1)
        engine.protect(1)
        engine.protect(1)  # twice is once
        save(engine, 2, 3)
        assert engine.protected_steps() == [1]
    assert committed(root) == [1, 3]
    with SyncCheckpointEngine(root, config) as engine:
        save(engine, 4)  # a resumed engine honours it
    assert committed(root) == [1, 4]
    with SyncCheckpointEngine(root, config) as engine:
        engine.unprotect(1)
        engine.unprotect(1)
        assert engine.protected_steps() == []
        assert engine.steps() == [1, 4], "deleted at the next commit, not before"
        save(engine, 5)
    assert committed(root) == [5]


def test_a_protected_step_is_not_even_renamed(root: Path) -> None:
    """Taken back at once, it would still be gone for whoever reads it then."""
    with gated_engine(root, keep_last=1) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        engine.protect(1).result()
        for step in (2, 3):
            engine.save(weights(step), step).result(TIMEOUT)
    moved = {call.path.name for call in storage.calls if call.name == "rename"}
    assert "step_000000001" not in moved
    assert "step_000000002" in moved


@pytest.mark.parametrize("step", [2, 7])
def test_only_a_committed_step_can_be_protected(root: Path, step: int) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        save(engine, 1, 2, 3)
    with SyncCheckpointEngine(root) as engine:
        with pytest.raises(CheckpointNotFoundError, match=rf"protect\({step}\).*committed are \[3\]"):
            engine.protect(step)
        for bad in (-1, "3", 1.0):
            with pytest.raises(StepOrderError):
                engine.protect(bad)  # type: ignore[arg-type]
        assert engine.protected_steps() == []
    assert listing(root) == ["step_000000003"]


def test_a_step_stays_protected_when_it_is_overwritten(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        save(engine, 1)
        engine.protect(1)
        engine.save(weights(10), 1, overwrite=True).result(TIMEOUT)
        save(engine, 2)
    assert committed(root) == [1, 2]


def test_a_rollback_past_a_protected_step_leaves_no_mark_for_what_is_saved_anew_under_its_number(root: Path) -> None:
    """The mark was for the checkpoint that is set aside, where nothing deletes it; the new one nobody asked to keep."""
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        save(engine, 1)
        engine.protect(1)
        save(engine, 2)
        engine.protect(2)
        save(engine, 3)
        assert engine.rollback(1) == [3, 2]
        assert engine.protected_steps() == [1]
        save(engine, 2, 3)
    assert committed(root) == [1, 3]
    assert len(list(root.glob(".aio_ckpt/abandoned/*"))) == 2


def test_a_rollback_takes_marks_away_durably_and_not_before_the_steps_are_set_aside(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        engine.protect(2).result()
        storage.calls.clear()
        engine.rollback(1).result()
        assert [(call.name, call.path) for call in storage.calls] == [
            ("rename", root / "step_000000002"),
            ("sync_dir", root / ABANDONED_DIR),
            ("sync_dir", root),
            ("remove_file", root / protected_name(2)),
            ("sync_dir", root / PROTECTED_DIR),
        ]


def test_protection_is_durable_before_the_call_returns(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        storage.calls.clear()
        engine.protect(1).result()
        marked = [Call("write_file", root / protected_name(1)), Call("sync_dir", root / PROTECTED_DIR)]
        assert storage.calls == marked
        storage.calls.clear()
        engine.unprotect(1).result()
        assert [call.name for call in storage.calls] == ["remove_file", "sync_dir"]


@pytest.mark.parametrize("point", ["rename", "sync_dir"])
def test_a_step_protected_while_it_is_being_deleted_stays_or_the_caller_is_told(root: Path, point: str) -> None:
    """Another process protects it between the listing and the rename; after it, it says that it came too late."""
    with gated_engine(root, keep_last=1) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        reached = storage.hold("rename", "step_000000001")
        engine.save(weights(2), 2).result(TIMEOUT)
        reached.wait_reached()
        with SyncCheckpointEngine(root) as other:
            if point == "rename":
                other.protect(1)
                reached.open()
                engine._root_session.passes[-1].result(TIMEOUT)
                assert engine.steps().result() == [1, 2]
            else:
                late = storage.hold("sync_dir", "root")
                reached.open()
                late.wait_reached()
                with pytest.raises(CheckpointNotFoundError):
                    other.protect(1)
                late.open()
                engine._root_session.passes[-1].result(TIMEOUT)
                assert engine.steps().result() == [2]
                assert listing(root) == ["step_000000002"]


def protect_in_the_moment_of_expiry(
    engine: CheckpointEngine, storage: GatedStorage, other: SyncCheckpointEngine
) -> Gate:
    """Step 1, by another engine, while a pass is about to rename it, which it does once the gate is opened."""
    engine.save(weights(1), 1).result(TIMEOUT)
    reached = storage.hold("rename", "step_000000001")
    engine.save(weights(2), 2).result(TIMEOUT)
    reached.wait_reached()
    other.protect(1)
    return reached


def test_a_protected_step_that_could_not_be_put_back_is_put_back_by_the_next_pass(root: Path) -> None:
    with gated_engine(root, keep_last=1) as (engine, storage), SyncCheckpointEngine(root) as other:
        reached = protect_in_the_moment_of_expiry(engine, storage, other)
        storage.fail("rename", "trash/step_000000001", WriteError(errno.EIO, "broken", "x"))
        reached.open()
        engine._root_session.passes[-1].result(TIMEOUT)
        assert engine.steps().result() == [2]
        engine.save(weights(3), 3).result(TIMEOUT)
        engine._root_session.passes[-1].result(TIMEOUT)
        assert engine.steps().result() == [1, 3]


def test_a_step_that_is_rolled_back_and_saved_anew_while_it_is_being_protected_is_protected(root: Path) -> None:
    with ThreadPoolExecutor(1) as pool, SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
        with gated_engine(root) as (other, storage):
            gate = storage.hold("sync_dir", "protected")
            protecting = pool.submit(lambda: other.protect(2).result())
            gate.wait_reached()
            engine.rollback(1)
            save(engine, 2)
            gate.open()
            protecting.result(TIMEOUT)
        assert engine.protected_steps() == [2]


def test_a_mark_that_was_there_stays_when_another_asks_while_the_step_is_being_deleted(root: Path) -> None:
    """The first was told that the step is protected: the second, to whom it is gone, must not take the mark away."""
    with gated_engine(root, keep_last=1) as (engine, storage), SyncCheckpointEngine(root) as other:
        reached = protect_in_the_moment_of_expiry(engine, storage, other)
        back = storage.hold("rename", "trash/*")
        reached.open()
        back.wait_reached()
        with pytest.raises(CheckpointNotFoundError):
            other.protect(1)
        back.open()
        engine._root_session.passes[-1].result(TIMEOUT)
        assert (engine.steps().result(), engine.protected_steps().result()) == ([1, 2], [1])


def test_what_a_rollback_goes_back_to_is_not_deleted_by_a_pass_that_listed_the_later_steps(root: Path) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root, keep_last=2) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        engine.save(weights(2), 2).result(TIMEOUT)
        reached = storage.hold("rename", "step_000000001")
        engine.save(weights(3), 3).result(TIMEOUT)
        reached.wait_reached()
        rollback = pool.submit(lambda: engine.rollback(1).result())
        with pytest.raises(TimeoutError):
            rollback.result(0.3)
        reached.open()
        with pytest.raises(CheckpointNotFoundError, match=r"rollback\(1\).*committed are \[2, 3\]"):
            rollback.result(TIMEOUT)
        assert engine.steps().result() == [2, 3], "the later steps stay while there is nothing to go back to"


def test_a_deletion_whose_rename_could_not_be_made_durable_is_told_and_tried_again(root: Path) -> None:
    with gated_engine(root, keep_last=1) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        reached = storage.hold("rename", "step_000000001")
        engine.save(weights(2), 2).result(TIMEOUT)
        reached.wait_reached()
        storage.fail("sync_dir", "root", WriteError(errno.EIO, "Input/output error"))
        reached.open()
        engine._root_session.passes[-1].result(TIMEOUT)
        assert list(engine.undeleted_steps) == [1]
        assert "trash/step_000000001" in listing(root)
        engine.save(weights(3), 3).result(TIMEOUT)
        for done in engine._root_session.passes:
            done.result(TIMEOUT)
        assert (listing(root), engine.undeleted_steps) == (["step_000000003"], {})


PROTECTOR = """
    import sys
    from aio_ckpt import SyncCheckpointEngine
    with SyncCheckpointEngine(sys.argv[1]) as engine:
        engine.protect(1)
"""


@pytest.mark.slow
def test_another_process_may_protect_beside_the_writer(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        save(engine, 1)
        run_warm(PROTECTOR, str(root), options=()).check_returncode()
        save(engine, 2, 3)
    assert committed(root) == [1, 3]


def test_the_command_line_protects_and_shows_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        save_with(engine, {1: 1.25})
        assert cli.run(["protect", str(root), "1"]) == 0
        save_with(engine, {2: math.nan})
    capsys.readouterr()
    assert cli.run(["ls", str(root)]) == 0
    shown = capsys.readouterr().out
    first = next(line for line in shown.splitlines() if "step_000000001" in line)
    assert "loss=1.25" in first
    assert "protected" in first
    assert "loss=not finite" in shown
    assert [line.count("protected") for line in shown.splitlines()[1:4]] == [1, 0, 1]  # the last one counts
    assert cli.run(["ls", str(root), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["metrics"], row["is_protected"]) for row in rows] == [({"loss": 1.25}, True), ({"loss": None}, False)]
    for command, is_protected in (("protect", True), ("unprotect", False)):
        assert cli.run([command, str(root), "1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"step": 1, "is_protected": is_protected}
    assert cli.run(["unprotect", str(root), "1"]) == 0
    assert cli.run(["protect", str(root), "9"]) == 1
    assert "no such committed step" in capsys.readouterr().err
    assert not list(root.glob(".aio_ckpt/protected/*"))


def test_protection_outlives_the_step_and_the_marks_of_others_are_left_alone(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        save(engine, 1)
        engine.protect(1)
        (root / PROTECTED_DIR / "notes").touch()
        (root / PROTECTED_DIR / "1.bak").touch()
        assert engine.protected_steps() == [1]
        shutil.rmtree(root / "step_000000001")
        save(engine, 2)
    assert listing(root) == ["protected/1", "protected/1.bak", "protected/notes", "step_000000002"]


def test_empty_directories_that_somebody_removed_are_made_again(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As ``find -type d -empty -delete`` does beside a run."""
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        save(engine, 1)
        for name in ENGINE_DIRS:
            (root / name).rmdir()
        save(engine, 2)
    assert committed(root) == [2]
    with SyncCheckpointEngine(root) as engine:
        save(engine, 3)
        for name in (ABANDONED_DIR, TRASH_DIR):
            (root / name).rmdir()
        assert engine.rollback(2) == [3]
    assert not caplog.records


def test_a_root_that_is_gone_is_not_made_again_by_a_save(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        save(engine, 1)
        root.rename(root.with_name("moved"))
        with pytest.raises(AioCkptError, match="the root is gone"):
            save(engine, 2)
    assert not root.exists()
