"""S7, one process: saves in flight together do not mix, nor do two engines (stock DCP mixes them)."""

from __future__ import annotations

import asyncio
import errno

import pytest
import torch
from gated_storage import gated_engine
from tree_states import same

from aio_ckpt import CheckpointEngine, EngineConfig
from aio_ckpt.errors import WriteError


def state_of(step: int, *, numel: int = 1000) -> dict[str, object]:
    """Names, sizes and values of its own for each step."""
    return {
        "common": torch.full((numel,), float(step)),
        f"only_{step}": torch.full((step * 100,), float(step)),
        "large": torch.full((step << 20,), step, dtype=torch.int32),
        "object": {"step": [step] * (step * 1000)},
    }


def same_structure(step: int) -> dict[str, object]:
    return {"w": torch.full((1000,), float(step)), "large": torch.full((3 << 20,), float(step)), "o": step}


STATES = {"other structures": state_of, "one structure": same_structure}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("held", ["create_data_file", "write", "sync"])
async def test_a_save_that_overtakes_another_leaves_each_its_own_bytes_and_the_order(tmp_path, kind: str, held: str):
    """Skew: the first save stands still in ``held`` until the others have written all they have."""
    make = STATES[kind]
    with gated_engine(tmp_path, max_in_flight=3, workers=2) as (engine, storage):
        gate = storage.hold(held)
        tickets = [engine.save(make(1))]
        gate.wait_reached()
        storage.release(gate)
        for step in (2, 3):
            tickets.append(engine.save(make(step)))
            storage.wait_for("write_file", "aio_ckpt.*.0.bin")
        assert not any(ticket.done() for ticket in tickets)  # commits keep the order of the calls
        assert (await engine.steps()) == []
        gate.open()
        reports = [await ticket for ticket in tickets]
        assert [report.step for report in reports] == [1, 2, 3]
        renamed = [call.other.name for call in storage.calls if call.name == "rename"]
        assert renamed == [report.path.name for report in reports]
        for step in (1, 2, 3):
            assert same(await engine.read(step), make(step))


async def test_the_first_of_two_saves_in_flight_fails_alone(tmp_path):
    with gated_engine(tmp_path, max_in_flight=2) as (engine, storage):
        gate = storage.hold("sync")
        first = engine.save(state_of(1))
        gate.wait_reached()
        storage.release(gate)
        second = engine.save(state_of(2))
        storage.wait_for("sync")
        storage.fail("sync", "*", WriteError(errno.EIO, "the disk is gone", "f"))
        gate.open()
        with pytest.raises(WriteError):
            await first
        assert (await second).step == 2
        assert (await engine.steps()) == [2]
        assert same(await engine.read(2), state_of(2))


async def test_the_first_of_two_saves_in_flight_is_cancelled_alone(tmp_path):
    with gated_engine(tmp_path, max_in_flight=2) as (engine, storage):
        gate = storage.hold("create_data_file")
        first, second = engine.save(state_of(1)), engine.save(state_of(2))
        assert first.cancel()
        gate.open()
        await second
        assert (await engine.steps()) == [2]
        assert same(await engine.read(), state_of(2))


async def test_saves_in_flight_have_arenas_of_their_own(tmp_path):
    with gated_engine(tmp_path, max_in_flight=3) as (engine, storage):
        gate = storage.hold("create_data_file")
        tickets = [engine.save(same_structure(step)) for step in (1, 2, 3)]
        assert engine.lifetime.leases == engine.lifetime.arenas == 3
        gate.open()
        for ticket in tickets:
            await ticket
        for step in (1, 2, 3):
            assert same(await engine.read(step), same_structure(step))


async def test_a_model_and_its_ema_do_not_evict_each_others_plans(tmp_path):
    model = {"w": torch.zeros(100), "b": torch.zeros(10)}
    ema = {"w": torch.zeros(100, dtype=torch.float64)}
    async with (
        CheckpointEngine(tmp_path / "model") as of_model,
        CheckpointEngine(tmp_path / "ema") as of_ema,
    ):
        for step in range(1, 5):
            for tensor in (*model.values(), *ema.values()):
                tensor.fill_(step)
            tickets = [of_model.save(model), of_ema.save(ema)]
            reports = await asyncio.gather(*(ticket.committed for ticket in tickets))
            assert [report.plan_hit for report in reports] == [step > 1] * 2
        for engine, state in ((of_model, model), (of_ema, ema)):
            assert (engine.plan_hits, engine.plan_misses) == (3, 1)
            for step in range(1, 5):
                found = await engine.read(step)
                assert found.keys() == state.keys()
                assert {tensor.unique().item() for tensor in found.values()} == {float(step)}


async def test_saves_from_several_threads_do_not_mix(tmp_path):
    """One engine, callers in threads of their own: every checkpoint holds one caller's one value."""
    async with CheckpointEngine(tmp_path, EngineConfig(max_in_flight=2)) as engine:

        def train(caller: int) -> None:
            for value in range(caller, caller + 5):
                engine.save({"a": torch.full((4000,), value), "b": torch.full((90_000,), value), "o": value})

        await asyncio.gather(*(asyncio.to_thread(train, 100 * caller) for caller in (1, 2)))
        await engine.ready()
        await engine.save({"last": torch.ones(1)})
        assert (await engine.steps()) == list(range(1, 12))
        values = []
        for step in range(1, 11):
            found = await engine.read(step)
            assert {*found["a"].tolist(), *found["b"].tolist()} == {found["o"]}
            values.append(found["o"])
        assert sorted(values) == [*range(100, 105), *range(200, 205)]
