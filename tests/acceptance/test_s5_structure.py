"""S5: a state whose structure changed is never saved by the plan of an earlier one (Megatron-LM #4448, #4378).

Named mutation: compare the cached plan with itself, as the incumbents do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tree_states import same

from aio_ckpt import CheckpointEngine, SaveReport, SyncCheckpointEngine
from aio_ckpt.errors import AioCkptError, PlanChangedError
from aio_ckpt.plan.plan_cache import PlanCache
from aio_ckpt.plan.save_plan import PlannedSave
from aio_ckpt.state.flatten import FlatState
from aio_ckpt.write.result import WriteResult
from aio_ckpt.write.writer import FileWriter

_values = iter(range(10**9))


def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that no other tensor here has."""
    return torch.full(shape or (8,), float(next(_values)), dtype=dtype)


def save(engine: SyncCheckpointEngine, state: object) -> SaveReport:
    return engine.save(state).result(60)


def blank(value: object) -> object:
    """A template: the same containers, names, shapes and dtypes, other values."""
    if isinstance(value, dict):
        return type(value)((key, blank(inner)) for key, inner in value.items())
    if isinstance(value, list) and any(isinstance(inner, (torch.Tensor, dict)) for inner in value):
        return [blank(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, -1)
    return np.zeros_like(value) if isinstance(value, np.ndarray) else None


def assert_loads_as_given(engine: SyncCheckpointEngine, step: int, state: object) -> None:
    assert same(engine.read(step), state)
    template = blank(state)
    report = engine.load(template, step, strict=True)
    assert report.verified
    assert same(template, state)


def recipe() -> list[tuple[str, object, bool]]:
    """(what, state, whether it is a hit), in the order of ACCEPTANCE S5."""
    tied, other = fresh(), fresh()
    return [
        ("s1 a, b", {"a": fresh(), "b": fresh()}, False),
        ("s2 a new object", {"a": fresh(), "b": fresh(), "o": [1, 2]}, False),
        ("s3 resized", {"a": fresh(16), "b": fresh(), "o": [1, 2]}, False),
        ("s4 another dtype", {"a": fresh(16, dtype=torch.float64), "b": fresh(), "o": [1, 2]}, False),
        ("s5 b removed", {"a": fresh(16), "o": [1, 2]}, False),
        ("s6 reordered", {"o": [1, 2], "a": fresh(16)}, False),
        ("s7 as s6", {"o": [3, 4], "a": fresh(16)}, True),
        ("s8 an object ten times as large", {"o": list(range(5000)), "a": fresh(16)}, True),
        ("s9 nested", {"a": {"b": fresh()}}, False),
        ("s9 the same name, flat", {"a.b": fresh()}, False),
        ("s10 three weights", {"x": fresh(), "y": fresh(), "z": fresh()}, False),
        ("s10 x and y tied", {"x": tied, "y": tied, "z": fresh()}, False),
        ("s10 untied", {"x": tied, "y": fresh(), "z": fresh()}, False),
        ("s10 y and z tied", {"x": fresh(), "y": other, "z": other}, False),
        ("s11 an object appears", {"x": fresh(), "y": other, "z": other, "o": None}, False),
        ("s11 and vanishes", {"x": fresh(), "y": other, "z": other}, False),
    ]


def test_every_save_of_the_recipe_loads_as_given_and_only_s7_and_s8_are_hits(tmp_path):
    states = recipe()
    with SyncCheckpointEngine(tmp_path) as engine:
        for step, (what, state, is_hit) in enumerate(states, 1):
            report = save(engine, state)
            assert (what, report.step, report.plan_hit) == (what, step, is_hit)
            assert_loads_as_given(engine, step, state)
        assert (engine.plan_hits, engine.plan_misses) == (2, len(states) - 2)
        for step, (_, state, _) in enumerate(states, 1):  # and no later save changed an earlier one
            assert same(engine.read(step), state)


def test_a_hit_with_a_grown_object_keeps_tensors_and_objects_apart(tmp_path):
    """s8, far: the objects go from the last tensor chunk to several chunks of their own, and back."""
    with SyncCheckpointEngine(tmp_path) as engine:
        for step, nbytes in enumerate([10, 10 << 20, 100, 5 << 20], 1):
            state = {"w": fresh(3000), "blob": bytes([step]) * nbytes, "last": step}
            assert save(engine, state).plan_hit == (step > 1)
            assert_loads_as_given(engine, step, state)


CHANGES: dict[str, Callable[[torch.Tensor], tuple[object, object]]] = {
    "a dict becomes an OrderedDict": lambda w: ({"m": {"w": w}}, {"m": OrderedDict(w=w)}),
    "a list becomes a tuple": lambda w: ({"m": [w]}, {"m": (w,)}),
    "a list becomes a dict of numbers": lambda w: ({"m": [w]}, {"m": {0: w}}),
    "a key changes its type": lambda w: ({"m": {0: w}}, {"m": {"0": w}}),
    "True becomes 1 as a key": lambda w: ({True: w}, {1: w}),
    "an empty container appears": lambda w: ({"w": w}, {"w": w, "e": {}}),
    "an empty container changes its type": lambda w: ({"w": w, "e": {}}, {"w": w, "e": OrderedDict()}),
    "a tensor becomes an array": lambda w: ({"w": w}, {"w": w.numpy()}),
    "an array becomes a scalar": lambda w: ({"w": w.numpy().sum(keepdims=True)[0]}, {"w": w.numpy()[:1].reshape(())}),
    "a tensor becomes an object": lambda w: ({"w": w, "o": 1}, {"w": [1.0], "o": w}),
    "an object becomes a float": lambda w: ({"w": w, "o": 1}, {"w": w, "o": 1.0}),
    "a tensor becomes a parameter": lambda w: ({"w": w}, {"w": torch.nn.Parameter(w)}),
    "names trade places": lambda w: ({"a": w, "b": w[:4]}, {"b": w[:4], "a": w}),
    "a name is renamed": lambda w: ({"a": w}, {"b": w}),
    "a tensor is transposed": lambda w: ({"w": w.view(2, 4)}, {"w": w.view(4, 2).t()}),
    "a tensor is viewed": lambda w: ({"w": w.view(2, 4)}, {"w": w.view(4, 2)}),
    "a dimension of 1 appears": lambda w: ({"w": w}, {"w": w[None]}),
    "a tensor becomes empty": lambda w: ({"w": w}, {"w": w[:0]}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_structure_is_a_miss_and_loads_as_given(tmp_path, change: str):
    with SyncCheckpointEngine(tmp_path) as engine:
        for step, state in enumerate(CHANGES[change](torch.arange(8.0)), 1):
            assert not save(engine, state).plan_hit
            plain = {name: value.data if type(value) is torch.nn.Parameter else value for name, value in state.items()}
            assert same(engine.read(step), plain)


# -- the post-condition ---------------------------------------------------------------------------


class SelfComparingCache(PlanCache):
    """What the incumbents do: once there is a plan, it is held against itself and always found equal."""

    def resolve(self, flat: FlatState) -> PlannedSave:
        cached = self._plan
        planned = super().resolve(flat)
        if cached is None:
            return planned
        self._plan = replace(cached, fingerprint=[tensor.data_ptr() for tensor in planned.tensors])
        return replace(planned, plan=self._plan, plan_hit=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda w: {"a": w, "b": w + 1, "c": w + 2}, r"not written \['c'\], not asked for \[\]"),
        (lambda w: {"a": w, "other": w + 1}, r"not written \['other'\], not asked for \['b'\]"),
    ],
    ids=["a name more", "a renamed name"],
)
async def test_a_plan_that_does_not_cover_the_state_is_found_before_the_commit(tmp_path, changed, message):
    w = torch.arange(8.0)
    async with CheckpointEngine(tmp_path) as engine:
        engine._resources.cache = engine._recorder._cache = SelfComparingCache()
        await engine.save({"a": w, "b": w + 1})
        with pytest.raises(PlanChangedError, match=message):
            await engine.save(changed(w))
        assert (await engine.steps()) == [1]
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".pending", "step"))] == [
            "step_000000001"
        ]
        report = await engine.save(changed(w))  # the cache was dropped: planned anew
        assert not report.plan_hit
        assert same(await engine.read(), changed(w))


async def test_a_plan_that_lacks_an_object_fails_before_the_commit(tmp_path):
    async with CheckpointEngine(tmp_path) as engine:
        engine._resources.cache = engine._recorder._cache = SelfComparingCache()
        await engine.save({"a": torch.ones(2), "o": 1})
        with pytest.raises((AioCkptError, ValueError)):
            await engine.save({"a": torch.ones(2), "o": 1, "p": 2})
        assert (await engine.steps()) == [1]


LOSSES: dict[str, Callable[[WriteResult], WriteResult]] = {
    "the first chunk": lambda result: replace(result, chunks_written=result.chunks_written - {0}),
    "the last chunk": lambda result: replace(result, chunks_written=result.chunks_written - {result.chunks - 1}),
    "a trailer": lambda result: replace(result, items_patched=result.items_patched - 1),
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_write_stage_that_lost_something_cannot_commit(tmp_path, monkeypatch, loss: str):
    """The post-condition rests on what the write stage reports, not on what was planned."""
    state = {"a": torch.ones(3 << 20), "o": b"x" * (6 << 20)}
    write_image = FileWriter.write_image

    async def lossy(*args, **kwargs) -> WriteResult:
        return LOSSES[loss](await write_image(*args, **kwargs))

    async with CheckpointEngine(tmp_path) as engine:
        monkeypatch.setattr(FileWriter, "write_image", lossy)
        with pytest.raises(PlanChangedError, match="not written"):
            await engine.save(state)
        assert (await engine.steps()) == []
        monkeypatch.setattr(FileWriter, "write_image", write_image)
        assert not (await engine.save(state)).plan_hit
        assert same(await engine.read(), state)
