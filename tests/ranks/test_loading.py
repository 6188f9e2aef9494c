"""Many ranks load: one checkpoint on all of them, whatever layout it was saved in, and only the bytes they need."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import Ranks, engine_on
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from aio_ckpt import PerRank
from aio_ckpt.errors import (
    AioCkptError,
    CorruptCheckpointError,
    MissingNameError,
    PeerFailedError,
    TemplateMismatchError,
)
from tests.ranks.test_saving import assert_same, whole

SECS = 30.0
SHAPE = (1024, 512)
"""2 MiB: two blocks."""


def spread(count: int, placements: tuple[Placement, ...], *, step: int = 0, fill: bool = True) -> dict[str, Any]:
    """One matrix of several, in one layout."""
    shape = (count,) if len(placements) == 1 else (2, count // 2)
    mesh = init_device_mesh("cpu", shape)
    given = whole("matrix", *SHAPE, step=step) if fill else torch.zeros(SHAPE)
    odd = whole("odd", 37, 11, step=step) if fill else torch.zeros(37, 11)
    return {
        "matrix": distribute_tensor(given, mesh, placements),
        "odd": distribute_tensor(odd, mesh, placements),
        "plain": whole("plain", 5, step=step) if fill else torch.zeros(5),
        "step": step,
    }


def save_spread(rank: int, count: int, root: Path, placements: tuple[Placement, ...], steps: tuple[int, ...]) -> None:
    with engine_on(root, SECS) as engine:
        for step in steps:
            engine.save(spread(count, placements, step=step), step=step).result(SECS)


def load_spread(rank: int, count: int, root: Path, placements: tuple[Placement, ...]) -> int:
    with engine_on(root, SECS) as engine:
        template = spread(count, placements, fill=False)
        report = engine.load(template)
        assert report.step == 3
        assert_same(template, spread(count, placements, step=3))
    stock = spread(count, placements, fill=False)
    dcp.load({name: stock[name] for name in ("matrix", "odd", "plain")}, checkpoint_id=str(root / "step_000000003"))
    for name in ("matrix", "odd"):
        assert isinstance(template[name], DTensor)
        assert torch.equal(template[name].to_local(), stock[name].to_local())
    assert torch.equal(template["plain"], stock["plain"])
    return report.bytes_read


ROWS, COLUMNS = (Shard(0),), (Shard(1),)
BOTH, HYBRID = (Shard(0), Shard(1)), (Replicate(), Shard(0))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(ROWS, COLUMNS), (COLUMNS, ROWS), (HYBRID, BOTH), (BOTH, HYBRID), (ROWS, (Replicate(),))],
    ids=["FSDP to TP", "TP to FSDP", "HSDP to FSDP and TP", "FSDP and TP to HSDP", "FSDP to copies"],
)
def test_four_ranks_load_another_layout_bit_for_bit_as_dcp_does(
    four: Ranks, tmp_path: Path, saved: tuple[Placement, ...], loaded: tuple[Placement, ...]
) -> None:
    four.run(save_spread, tmp_path, saved, (3,))
    four.run(load_spread, tmp_path, loaded)


def test_two_ranks_and_one_process_load_what_four_saved_and_four_what_two_saved(
    two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    four.run(save_spread, tmp_path / "of four", ROWS, (3,))
    needed = 4 * SHAPE[0] * SHAPE[1] // 2
    small = 2 << 20  # the other leaves and what they share a block with
    for bytes_read in two.run(load_spread, tmp_path / "of four", ROWS):
        assert bytes_read <= 1.05 * needed + 4 * 37 * 11 * 2 + 8192 < needed + small
    with engine_on(tmp_path / "of four", SECS) as engine:
        state = {"matrix": torch.zeros(SHAPE), "odd": torch.zeros(37, 11), "plain": torch.zeros(5), "step": 0}
        engine.load(state)
        assert torch.equal(state["matrix"], whole("matrix", *SHAPE, step=3))
        assert torch.equal(state["odd"], whole("odd", 37, 11, step=3))
        assert state["step"] == 3
        read = engine.read(only=["odd"])
        assert isinstance(read, dict)
        assert torch.equal(read["odd"], whole("odd", 37, 11, step=3))
    two.run(save_spread, tmp_path / "of two", ROWS, (3,))
    four.run(load_spread, tmp_path / "of two", ROWS)


def save_per_rank(rank: int, count: int, root: Path) -> None:
    with engine_on(root, SECS) as engine:
        engine.save({"rng": PerRank(torch.full((4,), float(rank))), "w": torch.ones(3)}, step=1).result(SECS)


def load_per_rank(rank: int, count: int, root: Path) -> list[str]:
    found = []
    with engine_on(root, SECS) as engine:
        for allow in (False, True):
            state = {"rng": PerRank(torch.full((4,), -1.0)), "w": torch.zeros(3)}
            try:
                engine.load(state, allow_missing=allow)
            except (MissingNameError, PeerFailedError) as error:
                found.append(type(error).__name__)
            else:
                found.append(f"{state['rng'].value[0]:g} {state['w'][0]:g}")
            dist.barrier()
    return found


def test_values_of_each_rank_come_back_on_it_and_are_missed_where_no_such_rank_saved(
    two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    two.run(save_per_rank, tmp_path)
    assert two.run(load_per_rank, tmp_path) == [["0 1", "0 1"], ["1 1", "1 1"]]
    first, second, *others = four.run(load_per_rank, tmp_path)
    assert [first, second] == [["PeerFailedError", "0 1"], ["PeerFailedError", "1 1"]]
    for found in others:
        assert found[0] in ("MissingNameError", "PeerFailedError")
        assert found[1] == "-1 1"
    assert "MissingNameError" in [found[0] for found in others]


# -- one that is damaged ----------------------------------------------------------------------------


def damage(path: Path) -> None:
    """Every byte of the tensors changes: nobody reads it as what it was."""
    data = bytearray(path.read_bytes())
    data[2048:-2048] = bytes(byte ^ 0xFF for byte in data[2048:-2048])
    path.write_bytes(data)


def load_past_damage(rank: int, count: int, root: Path, broken: int) -> tuple[int, list[int], bool, list[int]]:
    with engine_on(root, SECS) as engine:
        engine.save(spread(count, ROWS, step=2), step=2).result(SECS)
        engine.save(spread(count, ROWS, step=3), step=3).result(SECS)
        if rank == 0:
            damage(root / "step_000000003" / f"__{broken}_0.distcp")
        dist.barrier()
        with pytest.raises(CorruptCheckpointError, match="distcp"):
            engine.load(spread(count, ROWS, fill=False), fallback=False)
        template = spread(count, ROWS, fill=False)
        report = engine.load(template)
        assert_same(template, spread(count, ROWS, step=2))
        assert "distcp" in str(report.skipped[0].error)
        dist.barrier()
        steps = engine.steps()
        dist.barrier()
        ticket = engine.save(spread(count, ROWS, step=9))
        assert ticket.result(SECS) is not None
    return (
        report.step,
        [found.step for found in report.skipped],
        report.skipped[0].quarantined is None,
        [*steps, ticket.step],
    )


@pytest.mark.parametrize("broken", [0, 1])
def test_what_one_rank_finds_damaged_all_pass_by(two: Ranks, tmp_path: Path, broken: int) -> None:
    leader, other = two.run(load_past_damage, tmp_path, broken)
    assert leader == (2, [3], False, [2, 4]), "many ranks leave out the step of a save that this engine made"
    assert other[:2] == (2, [3])
    assert other[3] == [2, 4]
    assert list(tmp_path.glob(".aio_ckpt/corrupt/step_000000003-*"))


def load_nothing(rank: int, count: int, root: Path) -> list[str]:
    found = []
    with engine_on(root, SECS) as engine:
        if rank == 1:
            time.sleep(0.3)  # ranks come at different times
        for step in (None, 7):
            try:
                engine.load({"a": torch.zeros(3)}, step=step)
            except AioCkptError as error:
                found.append(type(error).__name__)
    return found


def test_all_ranks_are_told_that_there_is_no_checkpoint(two: Ranks, tmp_path: Path) -> None:
    assert two.run(load_nothing, tmp_path) == [["CheckpointNotFoundError"] * 2] * 2


def load_other_template(rank: int, count: int, root: Path) -> str:
    with engine_on(root, SECS) as engine:
        engine.save({"a": torch.ones(3)}, step=1).result(SECS)
        try:
            engine.load({"a": torch.zeros(3 + rank)})
        except TemplateMismatchError:
            found = "own"
        except PeerFailedError as error:
            found = f"{error.rank} {error.stage} {'TemplateMismatchError' in str(error)}"
        state = {"a": torch.zeros(3)}
        assert engine.load(state).step == 1
        assert torch.equal(state["a"], torch.ones(3))
    return found


def test_a_template_that_fits_not_on_one_rank_is_loaded_by_none(two: Ranks, tmp_path: Path) -> None:
    assert two.run(load_other_template, tmp_path) == ["1 load True", "own"]
