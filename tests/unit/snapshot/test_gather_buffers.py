"""Routes and gather buffers, on the host's own implementation of the device's copies."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rings import TIMEOUT, image_of, plan_of

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.memory.arena_lifetimes import LifetimeManager
from aio_ckpt.memory.copies import Copies
from aio_ckpt.plan import gathering
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.snapshot import gather_buffers
from aio_ckpt.snapshot.capture import CopyEngines, capture


@pytest.fixture
def manager() -> Iterator[LifetimeManager]:
    executor = Executor("test", 2)
    manager = LifetimeManager(budget_bytes=256 << 20, executor=executor, debug=True)
    yield manager
    manager.close()
    executor.close(TIMEOUT)


def mixed(count: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
    shapes = ((3, 5), (1000,), (), (0, 2), (64, 33))
    return {f"t{i}": torch.randint(1, 100, shapes[i % 5]).to(dtypes[i % 4]) for i in range(count)}


def test_what_is_gathered_stands_in_the_image_as_it_would_have_alone(
    manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "gathered_below_bytes", lambda _: 1 << 20)
    monkeypatch.setattr(gathering, "LEAST_ITEMS", 4)
    state = mixed(200)
    copy_engines = CopyEngines()
    for _ in range(2):  # the second save uses the lines of the first
        planned = plan_of(state, gather_bytes=80_000)
        assert planned.plan.copies.gathers
        image = image_of(planned, manager)
        capture(
            planned,
            image,
            copy_engines,
            guarded=frozenset(),
            on_captured=lambda *_: None,
            slot_timeout_secs=TIMEOUT,
        ).finish()
        memory = image.lease.arena.tensor
        for item in planned.plan.layout.items:
            (name,) = item.fqns
            raw = memory[item.raw_offset : item.raw_offset + item.raw_bytes].clone()
            got = torch.as_strided(raw.view(item.spec.dtype), item.spec.shape, item.spec.stride)
            assert torch.equal(got, state[name]), name
        image.lease.close()
        state = {name: value + 1 for name, value in state.items()}


def test_without_device_memory_each_tensor_is_copied_alone(
    manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "gathered_below_bytes", lambda _: 1 << 20)
    monkeypatch.setattr(gathering, "LEAST_ITEMS", 4)
    monkeypatch.setattr(Copies, "allocate", lambda *_: None)
    state = mixed(50)
    planned = plan_of(state)
    image = image_of(planned, manager)
    capture(
        planned,
        image,
        CopyEngines(),
        guarded=frozenset(),
        on_captured=lambda *_: None,
        slot_timeout_secs=TIMEOUT,
    ).finish()
    for item in planned.plan.layout.items:
        raw = image.lease.arena.tensor[item.raw_offset : item.raw_offset + item.raw_bytes].clone()
        got = torch.as_strided(raw.view(item.spec.dtype), item.spec.shape, item.spec.stride)
        assert torch.equal(got, state[item.fqns[0]])


@pytest.mark.parametrize(
    ("lengths", "starts", "end"),
    [([], [], 0), ([100], [0], 512), ([600, 600], [0, 1024], 2048), ([1500, 1500, 500], [0, 0, 1536], 2048)],
)
def test_runs_take_turns_in_the_buffer(lengths: list[int], starts: list[int], end: int) -> None:
    assert gather_buffers._ring_offsets(lengths, 2048) == (starts, end)


def test_an_engine_gives_its_gather_buffers_back_when_the_cache_is_cleared_and_when_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "gathered_below_bytes", lambda _: 1 << 20)
    monkeypatch.setattr(gathering, "LEAST_ITEMS", 4)
    buffers: list[weakref.ref[torch.Tensor]] = []
    make = Copies.allocate

    def remembered(self: Copies, nbytes: int) -> torch.Tensor | None:
        memory = make(self, nbytes)
        assert memory is not None
        buffers.append(weakref.ref(memory.untyped_storage()))
        return memory

    monkeypatch.setattr(Copies, "allocate", remembered)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(mixed(50)).result(TIMEOUT)
        engine.clear_cache()
        gc.collect()
        assert [buffer() for buffer in buffers] == [None]
        engine.save(mixed(50)).result(TIMEOUT)
    gc.collect()
    assert [buffer() for buffer in buffers] == [None, None]


@pytest.mark.parametrize("gather_bytes", [0, 20_000, 80_000])
def test_gather_bytes_bounds_the_memory_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gather_bytes: int
) -> None:
    monkeypatch.setattr(gathering, "gathered_below_bytes", lambda _: 1 << 20)
    monkeypatch.setattr(gathering, "LEAST_ITEMS", 2)
    asked: list[int] = []
    make = Copies.allocate
    monkeypatch.setattr(Copies, "allocate", lambda self, nbytes: asked.append(nbytes) or make(self, nbytes))
    state = mixed(200)
    with SyncCheckpointEngine(tmp_path, EngineConfig(gather_bytes=gather_bytes)) as engine:
        engine.save(state).result(TIMEOUT)
        after = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        engine.load(after)
    assert len(asked) == (gather_bytes > 0)
    assert all(0 < nbytes <= gather_bytes for nbytes in asked)
    assert all(torch.equal(after[name], state[name]) for name in state)
