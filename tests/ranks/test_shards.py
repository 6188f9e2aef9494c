"""Shards of people who shard by themselves, and ShardedTensor: saved by some ranks, loaded by others in other boxes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_processes import Ranks, engine_on
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as TorchShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.tensor import DTensor, distribute_tensor, placement_types
from wrapper_tensors import Casting

from aio_ckpt import AioCkptError, EngineConfig, Shard, SyncCheckpointEngine, UnsupportedLeafError

SECS = 60.0
SHAPE = (10, 6)
WHOLE = torch.arange(60.0).reshape(SHAPE)


def rows(rank: int, count: int, number: float) -> Shard:
    """As column parallel layers: the last rank has fewer rows."""
    size = -(-SHAPE[0] // count)
    own = WHOLE[rank * size : (rank + 1) * size] + number
    return Shard(own.clone(), SHAPE, (rank * size, 0))


def columns(rank: int, count: int, number: float) -> Shard:
    """As row parallel layers; the tensor is a view with gaps."""
    size = SHAPE[1] // count
    return Shard((WHOLE + number)[:, rank * size : (rank + 1) * size], SHAPE, (0, rank * size))


def save_and_load(rank: int, count: int, root: Path) -> None:
    def state(number: float) -> dict[str, Any]:
        return {
            "rows": rows(rank, count, number),
            "deep": [columns(rank, count, number), (rows(rank, count, number + 1),)],
            "replica": Shard(WHOLE + number, SHAPE, (0, 0)),
            "plain": torch.full((3,), number),
        }

    with engine_on(root, SECS) as engine:
        engine.save(state(0), step=1).result(SECS)
        assert engine.save(state(5), step=2).result(SECS).plan_hit
        target = state(-1)
        before = dict(target)
        report = engine.load(target, strict=True)
        assert (report.step, report.verified) == (2, True)
        assert target["rows"] is before["rows"]
        read = engine.read()
    wanted = state(5)
    for found, saved in ((target["rows"], wanted["rows"]), (target["deep"][0], wanted["deep"][0])):
        assert torch.equal(found.tensor, saved.tensor)
    assert torch.equal(target["deep"][1][0].tensor, wanted["deep"][1][0].tensor)
    assert torch.equal(read["rows"], WHOLE + 5)
    assert torch.equal(read["deep"][0], WHOLE + 5)


def load_in_other_boxes(rank: int, count: int, root: Path) -> None:
    target = {"rows": columns(rank, count, 0), "deep": [torch.zeros(SHAPE)]}
    mesh = init_device_mesh("cpu", (count,))
    tensors = {"rows": distribute_tensor(torch.zeros(SHAPE), mesh, [placement_types.Shard(1)])}
    with engine_on(root, SECS) as engine:
        engine.load(target)
        engine.load(tensors)
    assert torch.equal(target["rows"].tensor, columns(rank, count, 5).tensor)
    assert torch.equal(target["deep"][0], WHOLE + 5)
    assert torch.equal(tensors["rows"].full_tensor(), WHOLE + 5)


def test_shards_of_one_layout_are_loaded_in_another(two: Ranks, tmp_path: Path) -> None:
    two.run(save_and_load, tmp_path)
    two.run(load_in_other_boxes, tmp_path)
    with SyncCheckpointEngine(tmp_path) as engine:
        read = engine.read()
        assert torch.equal(read["rows"], WHOLE + 5)
        part = Shard(torch.zeros(3, 2), SHAPE, (4, 3))
        engine.load({"rows": part})
        assert torch.equal(part.tensor, (WHOLE + 5)[4:7, 3:5])
        path = engine.load({"rows": torch.zeros(SHAPE)}).path
    stock = {"rows": torch.zeros(SHAPE)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(stock, checkpoint_id=str(path), no_dist=True)
    assert torch.equal(stock["rows"], WHOLE + 5)


class Megatron:
    """Stateful: its state is made of shards, and is there once it was stepped."""

    def __init__(self, shard: Shard | None) -> None:
        self.state = {} if shard is None else {"moment": shard}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def go_on(rank: int, count: int, root: Path) -> None:
    with engine_on(root, SECS) as engine:
        engine.save({"opt": Megatron(rows(rank, count, 1))}, step=1).result(SECS)
        other, fresh = Megatron(columns(rank, count, 0)), Megatron(None)
        engine.load({"opt": other})
        engine.load({"opt": fresh})
    assert torch.equal(other.state["moment"].tensor, columns(rank, count, 1).tensor)
    assert other.state["moment"].offsets == columns(rank, count, 1).offsets
    assert torch.equal(fresh.state["moment"], WHOLE + 1)


def test_a_stateful_value_gets_the_shards_that_it_holds_and_whole_tensors_without_any(
    two: Ranks, tmp_path: Path
) -> None:
    two.run(go_on, tmp_path)


def save_with_a_hole(rank: int, count: int, root: Path) -> str:
    hollow = Shard(torch.ones(2, 2), (8, 2), (4 * rank, 0))
    with engine_on(root, SECS, on_failure="log") as engine:
        try:
            engine.save({"w": hollow}, step=1).result(SECS)
        except AioCkptError as error:
            return f"{error} {error.__cause__!r}"
    return ""


def test_shards_that_leave_a_hole_fail_the_save_by_name(two: Ranks, tmp_path: Path) -> None:
    for found in two.run(save_with_a_hole, tmp_path):
        assert "'w' has 16 elements, its shards of ranks 0, 1 have 8" in found


# -- ShardedTensor ------------------------------------------------------------------------------------


def sharded(rank: int, count: int, number: float) -> Any:
    own = rows(rank, count, number)
    shard = TorchShard.from_tensor_and_offsets(own.tensor, list(own.offsets), rank)
    return init_from_local_shards([shard], list(SHAPE))


def save_sharded(rank: int, count: int, root: Path) -> None:
    with engine_on(root, SECS) as engine:
        engine.save({"w": sharded(rank, count, 1)}, step=1).result(SECS)
        assert engine.save({"w": sharded(rank, count, 2)}, step=2).result(SECS).plan_hit
        target = {"w": sharded(rank, count, -1)}
        tensor = target["w"]
        engine.load(target)
        assert target["w"] is tensor
        assert torch.equal(engine.read()["w"], WHOLE + 2)
    assert torch.equal(tensor.local_shards()[0].tensor, rows(rank, count, 2).tensor)


def test_a_sharded_tensor_is_saved_and_filled_in_place(two: Ranks, tmp_path: Path) -> None:
    two.run(save_sharded, tmp_path)
    part = Shard(torch.zeros(1, 6), SHAPE, (9, 0))
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.load({"w": part})
    assert torch.equal(part.tensor, (WHOLE + 2)[9:])


def fsdp_of(seed: int) -> Any:
    torch.manual_seed(seed)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), device_id=torch.device("cpu"))
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model


def parts_of(model: Any) -> list[torch.Tensor]:
    return [shard.tensor for value in model.state_dict().values() for shard in value.local_shards()]


def save_fsdp(rank: int, count: int, root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated
        saved, model = fsdp_of(1), fsdp_of(2)
        with engine_on(root, SECS) as engine:
            engine.save({"model": saved}, step=1).result(SECS)
            engine.load({"model": model})
            template = fsdp_of(3).state_dict()
            engine.load({"model": template})
        wanted = parts_of(saved)
        assert all(map(torch.equal, parts_of(model), wanted))
        shards = [shard.tensor for value in template.values() for shard in value.local_shards()]
        assert all(map(torch.equal, shards, wanted))


def test_fsdp_without_a_mesh_goes_on(two: Ranks, tmp_path: Path) -> None:
    two.run(save_fsdp, tmp_path)
    torch.manual_seed(1)
    wanted = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).state_dict()
    with SyncCheckpointEngine(tmp_path, EngineConfig()) as engine:
        read = engine.read()["model"]
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)


def save_several(rank: int, count: int, root: Path) -> str:
    shards = [
        TorchShard.from_tensor_and_offsets(torch.ones(2, 2), [2 * (2 * rank + number), 0], rank) for number in (0, 1)
    ]
    with engine_on(root, SECS) as engine:
        try:
            engine.save({"w": init_from_local_shards(shards, [8, 2])}, step=1)
        except UnsupportedLeafError as error:
            return str(error)
    return ""


def test_a_rank_with_several_shards_of_a_sharded_tensor_is_told(two: Ranks, tmp_path: Path) -> None:
    for found in two.run(save_several, tmp_path):
        assert "'w': a ShardedTensor of which this rank holds 2 shards" in found


def test_one_rank_saves_a_shard_that_is_all_of_its_tensor_and_no_other(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"w": rows(0, 1, 3)}).result(SECS)
        assert torch.equal(engine.read()["w"], WHOLE + 3)
        with pytest.raises(UnsupportedLeafError, match=r"'w': a shard of shape .* saves for one rank"):
            engine.save({"w": rows(0, 2, 3)})


def save_and_load_wrapped(rank: int, count: int, root: Path) -> None:
    """The wrapper is that of the template before and after. Its plain tensor is filled in place."""
    mesh = init_device_mesh("cpu", (count,))

    def wrapped(number: float, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, DTensor]:
        plain = WHOLE.chunk(count)[rank].clone() + number
        return plain, DTensor.from_local(Casting(plain, scale), mesh, [placement_types.Shard(0)], run_check=False)

    with engine_on(root, SECS) as engine:
        engine.prepare({"w": wrapped(0)[1]}).result(SECS)
        engine.save({"w": wrapped(0)[1]}, step=1).result(SECS)
        assert engine.save({"w": wrapped(5, torch.ones(()))[1]}, step=2).result(SECS).plan_hit
        plain, target = wrapped(-1)
        engine.load({"w": target})
        assert torch.equal(plain, WHOLE.chunk(count)[rank] + 5)
        assert type(target._local_tensor) is Casting
        unwrapped = distribute_tensor(torch.zeros(SHAPE), mesh, [placement_types.Shard(1)])
        engine.load({"w": unwrapped})
        assert torch.equal(unwrapped.full_tensor(), WHOLE + 5)
        assert torch.equal(engine.read()["w"], WHOLE + 5)
    plain, target = wrapped(-1)
    dcp.load({"w": target}, checkpoint_id=root / "step_000000002")
    assert torch.equal(plain, WHOLE.chunk(count)[rank] + 5), "stock reads it, too"


def test_a_dtensor_over_a_wrapper_of_one_plain_tensor_is_saved_and_loaded_as_that_tensor(
    two: Ranks, tmp_path: Path
) -> None:
    two.run(save_and_load_wrapped, tmp_path)
