"""Each of several ranks clones what did not change in its share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import Ranks, engine_on
from rank_states import assert_same, spread, whole, zeroed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.cli.commands import run

SECS = 60.0
MIB = 1 << 20


def state(count: int, value: float) -> dict[str, Any]:
    """A base in parts and one that each rank holds alike, 4 MiB each, and a part that changes."""
    mesh = init_device_mesh("cpu", (count,))
    return {
        "parts": spread(whole("parts", 1024, 1024), mesh, Shard(0)),
        "alike": {str(number): whole(f"alike {number}", 512, 512) for number in range(4)},
        "trained": spread(torch.full((64, 8), value), mesh, Shard(0)),
        "step": int(value),
    }


def saved(rank: int, count: int, root: Path, steps: range) -> list[tuple[bool, bool]]:
    with engine_on(root, SECS) as engine:
        reports = [engine.save(state(count, step), step=step).result(SECS) for step in steps]
    return [(report.plan_hit, report.cloned_bytes > 0) for report in reports]


def loaded(rank: int, count: int, root: Path, step: int) -> None:
    wanted = state(count, step)
    template = zeroed(wanted)
    with engine_on(root, SECS) as engine:
        engine.load(template, step=step)
    assert_same(template, wanted)


def test_each_rank_clones_its_file_and_every_number_of_ranks_loads_it(two: Ranks, four: Ranks, tmp_path: Path):
    root = tmp_path / "root"
    found = two.run(saved, root, range(1, 8))
    assert found == [[(False, False), (True, False), (True, False), (False, False), *[(True, True)] * 3]] * 2
    for step in (3, 4, 7):
        two.run(loaded, root, step)
        four.run(loaded, root, step)
    assert run(["verify", str(root)]) == 0
    frozen = sorted((root / "step_000000007").glob("__*_1.distcp"))
    assert len(frozen) == 2
    assert sum(path.stat().st_size for path in frozen) > 8 * MIB


@pytest.mark.slow
def test_after_ranks_of_another_number_go_on_the_steps_of_both_are_whole(
    two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    two.run(saved, root, range(1, 6))
    four.run(saved, root, range(6, 11))
    for step in (5, 10):
        two.run(loaded, root, step)
    assert run(["verify", str(root)]) == 0


def trusted(rank: int, count: int, root: Path) -> list[bool]:
    """A base that no save reads again after the first one, until the part of rank 1 changes in save 7."""
    config = EngineConfig(stall_timeout_secs=SECS, frozen="trusted", relink_limit=3)
    base = {
        name: torch.nn.Parameter(value, requires_grad=False)
        for name, value in {"parts": state(count, 0)["parts"], **state(count, 0)["alike"]}.items()
    }
    found = []
    with SyncCheckpointEngine(root, config) as engine:
        for step in range(1, 11):
            given = {**base, "trained": state(count, step)["trained"], "step": step}
            if step == 7 and rank == 1:
                given["parts"].to_local()[0, 0] = step
            found.append(engine.save(given, step=step).result(SECS).cloned_bytes > 0)
            template = zeroed(given)
            engine.load(template)
            assert_same(template, given)
    return found


def test_each_rank_trusts_its_own_frozen_tensors(two: Ranks, tmp_path: Path):
    first, second = two.run(trusted, tmp_path / "root")
    assert first == [False, True, True, False, True, True, False, True, True, False]
    assert second == [False, True, True, False, True, True, False, False, True, True]
    assert run(["verify", str(tmp_path / "root")]) == 0


def one_changes(rank: int, count: int, root: Path) -> list[tuple[bool, bool]]:
    """The part of rank 1 changes in save 6, which that rank alone then plans anew."""
    found = []
    with engine_on(root, SECS) as engine:
        for step in range(1, 11):
            given = state(count, step)
            if step >= 6 and rank == 1:
                given["parts"].to_local()[0, 0] = step
            report = engine.save(given, step=step).result(SECS)
            found.append((report.plan_hit, report.cloned_bytes > 0))
        template = zeroed(given)
        engine.load(template)
        assert_same(template, given)
    return found


def test_a_change_on_one_rank_leaves_the_file_of_the_other_one_alone(two: Ranks, tmp_path: Path):
    first, second = two.run(one_changes, tmp_path / "root")
    settled = [(False, False), (True, False), (True, False), (False, False), (True, True)]
    assert first == [*settled, *[(True, True)] * 5]
    assert second == [*settled, (True, False), (False, False), *[(True, True)] * 3]
    assert run(["verify", str(tmp_path / "root")]) == 0
