"""Many ranks save and remove one checkpoint by its path: together, in one order, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_engines import SECS, acting_engine, no_space, told
from rank_processes import Ranks
from rank_states import assert_same, mixed_state, zeroed

from aio_ckpt.errors import CheckpointNotFoundError, ConfigError, PeerFailedError, StallError, WriteError


def replace_and_remove(rank: int, count: int, top: Path) -> list[int]:
    with acting_engine(top / "root", SECS, max_in_flight=2) as (engine, _):
        for number in (1, 2):
            report = engine.save(mixed_state(rank, count, number), path=top / "last.ckpt").result(SECS)
            assert report is not None
            assert report.path == top / "last.ckpt"
        engine.save(mixed_state(rank, count, 3), path=top / "best.ckpt")
        removal = engine.remove(top / "last.ckpt")
        step = engine.save(mixed_state(rank, count, 4)).step
        loading = engine.load(
            template := zeroed(mixed_state(rank, count)),
            None,
            path=top / "best.ckpt",
            strict=False,
            allow_missing=False,
            fallback=True,
        )
        assert loading.result(SECS).step == 0
        assert_same(template, mixed_state(rank, count, 3))
        assert removal.result(SECS) is None
        engine.wait_ready()
        dist.barrier()
        with pytest.raises(CheckpointNotFoundError if rank == 0 else PeerFailedError, match="does not exist"):
            engine.remove(top / "last.ckpt").result(SECS)
    return [step]


def test_ranks_replace_and_remove_checkpoints_by_path_beside_their_steps(two: Ranks, tmp_path: Path) -> None:
    assert two.run(replace_and_remove, tmp_path) == [[1], [1]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "root"]
    assert len(list((tmp_path / "best.ckpt").glob("*.distcp"))) == 2


def save_amid_calls(rank: int, count: int, top: Path) -> bool:
    with acting_engine(top / "root", SECS, max_in_flight=2) as (engine, storage):
        engine.save(mixed_state(rank, count, 1), step=1).result(SECS)
        engine.save(mixed_state(rank, count, 2), path=top / "old.ckpt").result(SECS)
        gate = storage.hold("sync")
        first = engine.save(mixed_state(rank, count, 3), path=top / "new.ckpt")
        removal = engine.remove(top / "old.ckpt")
        second = engine.save(mixed_state(rank, count, 4), step=2, deadline_secs=SECS / 3)  # raises if it waits for one
        are_both_pending = not first.done() and not second.done()
        with pytest.raises(StallError):  # a third one has to wait
            engine.save(mixed_state(rank, count, 5), step=3, deadline_secs=0.2)
        gate.open()
        for ended in (first, removal, second):
            ended.result(SECS)
    return are_both_pending


def test_a_removal_between_two_saves_takes_no_room_of_theirs(two: Ranks, tmp_path: Path) -> None:
    assert two.run(save_amid_calls, tmp_path) == [True, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.ckpt", "root"]


def name_different_paths(rank: int, count: int, top: Path) -> list[tuple[str, int | None, str]]:
    state: dict[str, Any] = {"a": torch.ones(3)}
    errors = []
    with acting_engine(top / "root", SECS) as (engine, _):
        for _ in range(2):  # without a plan, and with one
            engine.save(state, path=top / "a").result(SECS)
            with pytest.raises(PeerFailedError) as caught:
                engine.save(state, path=top / f"of {rank}").result(SECS)
            errors.append(told(caught.value))
        with pytest.raises(PeerFailedError) as caught:
            engine.remove(top / ("a" if rank else "b")).result(SECS)
        errors.append(told(caught.value))
        if rank == 1:
            with pytest.raises(ConfigError):
                engine.remove(top / "root")
        else:
            with pytest.raises(PeerFailedError, match=r"ConfigError: path="):
                engine.remove(top / "a").result(SECS)
        with pytest.raises(ConfigError if rank else PeerFailedError, match="extra"):
            engine.save(state, path=top / "a", extra={"a": {1}} if rank else None).result(SECS)
        assert engine.save(state).step == 1, "no call by path takes a step, not even a refused one"
        engine.wait_ready()
    return errors


def test_ranks_that_name_different_paths_are_told_and_nothing_is_touched(two: Ranks, tmp_path: Path) -> None:
    for first, second, removal in two.run(name_different_paths, tmp_path):
        for error in (first, second):
            assert "rank 1 saves ROOT/../of 1 where rank 0 saves ROOT/../of 0" in error[2]
        assert "rank 1 removes ROOT/../a where rank 0 removes ROOT/../b" in removal[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "root"]


def remove_after_a_failure(rank: int, count: int, top: Path) -> tuple[str, int | None, str]:
    with acting_engine(top / "root", SECS, on_failure="log") as (engine, storage):
        engine.save(mixed_state(rank, count, 1), path=top / "old").result(SECS)
        if rank == 1:
            storage.at, storage.act = ("write_file", "aio_ckpt.*.1.bin"), no_space
        engine.save(mixed_state(rank, count, 2), path=top / "new")
        with pytest.raises((PeerFailedError, WriteError, OSError)) as caught:
            engine.remove(top / "old").result(SECS)
        dist.barrier()
        assert (top / "old").exists()
        assert engine.save(mixed_state(rank, count, 3), path=top / "new").result(SECS) is not None
        engine.remove(top / "old").result(SECS)
    return told(caught.value)


def test_if_one_rank_fails_the_old_checkpoint_is_kept_by_all(two: Ranks, tmp_path: Path) -> None:
    for _, _, text in two.run(remove_after_a_failure, tmp_path):
        assert "disk of one rank" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "root"]
