"""S6: what the caller changes right after ``save()`` returned is not in that save (nvidia-resiliency-ext #376).

Every test holds the storage before its first byte is written until the state was changed.
"""

from __future__ import annotations

import io
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from gated_storage import gated_engine
from tree_states import same

from aio_ckpt import PerRank
from aio_ckpt.plan.copy_plan import SMALL_COPY_BYTES


def state_before() -> dict[str, object]:
    """CPU tensors (Adam's ``step``), arrays, streams, and every nesting of them."""
    large = SMALL_COPY_BYTES  # floats: more bytes than are copied by address
    return {
        "adam": {"step": torch.tensor(7.0), "exp_avg": torch.full((33,), 7.0)},
        "large": torch.full((large,), 7.0),
        "strided": torch.full((64, 64), 7.0)[:, ::2],
        "conj": torch.full((64,), 7.0 + 7.0j).conj(),
        "array": np.full((5, 5), 7.0),
        "large_array": np.full(large, 7.0),
        "reversed_array": np.full(9, 7.0)[::-1],
        "text_array": np.array(["seven", "eight"]),
        "stream": io.BytesIO(b"seven"),
        "objects": [7, [7, [7]], {"k": 7}, {7}, bytearray(b"7")],
        "array_in_a_list": [np.full(3, 7.0), "7"],
        "nested": {"list": [torch.full((3,), 7.0), {"deep": [7]}], "tuple": (torch.full((2,), 7.0), [7])},
        "ordered": OrderedDict(a=[7], b=OrderedDict(c=[7])),
        "mine": PerRank({"position": [7], "rng": torch.full((4,), 7, dtype=torch.uint8)}),
        "empty": {},
    }


def change(value: object) -> None:
    """Change everything in place that can be, as deep as it goes."""
    if isinstance(value, torch.Tensor):
        value.fill_(9)
    elif isinstance(value, np.ndarray):
        value[...] = "nine" if value.dtype.kind == "U" else 9
    elif isinstance(value, io.BytesIO):
        value.seek(0)
        value.write(b"other")
    elif isinstance(value, bytearray):
        value[:] = b"99"
    elif isinstance(value, set):
        value.add(9)
    elif isinstance(value, dict):
        for inner in value.values():
            change(inner)
        value.pop(next(iter(value), None), None)
        value["added"] = 9
    elif isinstance(value, list):
        for inner in value:
            change(inner)
        value.append(9)
        value[0] = 9
    elif isinstance(value, tuple):
        for inner in value:
            change(inner)
    elif isinstance(value, PerRank):
        change(value.value)


def wanted() -> dict[str, object]:
    state = state_before()
    state["mine"] = state["mine"].value
    state["conj"] = state["conj"].resolve_conj()
    return state


def assert_is_as_before(found: dict[str, object]) -> None:
    expected = wanted()
    assert list(found) == list(expected)
    assert [name for name in expected if not same(found[name], expected[name])] == []


def test_the_change_reaches_every_value():
    """Else the tests below would prove nothing."""
    state, values = state_before(), list(state_before().items())
    kept = dict(state)
    change(state)
    assert [name for name, before in values if same(kept[name], before)] == []


@pytest.mark.parametrize("saves", [1, 2, 3], ids=["planning", "planned", "planned again"])
async def test_a_state_changed_right_after_save_returned_is_stored_as_it_was(tmp_path, saves: int):
    """On a miss and on hits: each takes another path through the copies."""
    with gated_engine(tmp_path) as (engine, storage):
        for _ in range(saves - 1):
            await engine.save(state_before())
        gate = storage.hold("create_data_file")
        state = state_before()
        ticket = engine.save(state)
        change(state)
        assert not ticket.done()
        gate.open()
        report = await ticket
        assert report.plan_hit == (saves > 1)
        assert_is_as_before(await engine.read(report.step))


async def test_a_state_changed_while_chunks_wait_to_be_written_is_stored_as_it_was(tmp_path):
    state = {f"w{index}": torch.full((1 << 20,), 7.0) for index in range(6)}
    with gated_engine(tmp_path) as (engine, storage):
        gate = storage.hold("write")
        ticket = engine.save(state)
        await ticket.staged
        for tensor in state.values():
            tensor.fill_(9)
        gate.wait_reached()
        gate.open()
        await ticket
        found = await engine.read()
    assert {value.unique().item() for value in found.values()} == {7.0}


async def test_a_state_captured_in_waves_is_stored_as_it_was(tmp_path):
    """A budget smaller than the image: later chunks are captured in the memory of those already written."""
    state = {"w": torch.full((10 << 18,), 7.0), "blob": [b"7" * (8 << 20)]}
    with gated_engine(tmp_path, budget_bytes=12 << 20, stall_timeout_secs=15) as (engine, storage):
        gate = storage.hold("sync")
        ticket = engine.save(state)
        change(state)
        gate.open()
        report = await ticket
        assert report.image_bytes > engine.lifetime.arena_bytes
        found = await engine.read()
    assert found["w"].unique().tolist() == [7.0]
    assert found["blob"] == [b"7" * (8 << 20)]


async def test_every_step_of_adam_has_its_own_state(tmp_path):
    """A trainer that steps on while the writer is held: each checkpoint is the optimizer as it was at its save."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    wanted = []
    with gated_engine(tmp_path, max_in_flight=3) as (engine, storage):
        gate = storage.hold("create_data_file")
        tickets = []
        for _ in range(3):
            model(torch.randn(5, 6)).sum().backward()
            optimizer.step()
            tickets.append(engine.save({"model": model, "optimizer": optimizer}))
            wanted.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        gate.open()
        for number, ticket in enumerate(tickets):
            report = await ticket
            found = await engine.read(report.step)
            assert found["optimizer"]["state"][0]["step"].item() == number + 1
            assert same(dict(found["model"]), wanted[number])


async def test_a_generator_drawn_from_after_save_returned_is_stored_as_it_was(tmp_path):
    generator = random.Random(7)
    before = generator.getstate()
    with gated_engine(tmp_path) as (engine, storage):
        gate = storage.hold("create_data_file")
        ticket = engine.save({"python": generator.getstate(), "torch": torch.get_rng_state()})
        kept = torch.get_rng_state()
        generator.random()
        torch.rand(3)
        gate.open()
        await ticket
        found = await engine.read()
    assert found["python"] == before
    assert torch.equal(found["torch"], kept)
