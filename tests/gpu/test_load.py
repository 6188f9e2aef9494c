"""Loads to CUDA tensors. Skipped without a GPU; tests/engine/loading/test_device_load.py runs the same path."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cuda_machine import MIB, TIMEOUT
from tensor_bits import bytes_of

from aio_ckpt import CheckpointEngine, SyncCheckpointEngine
from aio_ckpt.errors import MismatchError
from aio_ckpt.memory import cuda as device
from aio_ckpt.memory import read_buffers as bounce
from aio_ckpt.storage import data_file as datafile

pytestmark = pytest.mark.gpu

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128),
]
SLEEP_CYCLES = 400_000_000
"""Some tenths of a second of a stream's time."""


def random(dtype: torch.dtype, *shape: int, where: str = "cuda") -> torch.Tensor:
    """Random bytes seen as ``dtype``; of complex ones no NaN: to negate one on the device drops its payload."""
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=where)
    made = torch.empty(shape, dtype=dtype, device=where)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (made.nbytes,), dtype=torch.uint8, device=where)
    bytes_of(made).copy_(raw)
    return made


def bits(tensor: torch.Tensor) -> bytes:
    """Elements in row-major order, NaNs kept apart."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    plain.copy_(tensor.resolve_conj().resolve_neg())
    return bytes_of(plain).cpu().numpy().tobytes()


def large(value: float, where: str = "cuda") -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((24 * MIB,), value, device=where) for i in range(8)}


def check_all(state: dict[str, torch.Tensor], value: float) -> None:
    assert all(bool((tensor == value).all()) for tensor in state.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    state = {
        "blocks": random(dtype, 3 * MIB // dtype.itemsize + 5),
        "small": random(dtype, 70, 30),  # gathered
        "scalar": random(dtype),
        "empty": random(dtype, 0, 4),
        "permuted": random(dtype, 700, 900).t(),
        "as stored": random(dtype, 600, 500).t(),
        "sliced": random(dtype, 1000, 1000),
    }
    template = {name: torch.zeros_like(value) for name, value in state.items()}
    template["permuted"] = torch.zeros(900, 700, dtype=dtype, device="cuda")
    template["sliced"] = torch.zeros(2000, 3000, dtype=dtype, device="cuda")[::2, 1::3]
    if dtype.is_complex:
        template["blocks"] = torch.zeros_like(state["blocks"]).conj()
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(state).result(TIMEOUT)
        assert engine.load(template).verified
    for name, value in state.items():
        assert bits(template[name]) == bits(value), name


def by_columns(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(value.shape[::-1], device="cuda").t() for name, value in state.items()}


def wide() -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    return {f"w{i}": torch.randn(2048, 6 * 1024 + i, device="cuda") for i in range(4)}


def test_what_is_laid_out_anew_on_the_device_takes_little_of_its_memory(tmp_path: Path) -> None:
    state = wide()
    template = by_columns(state)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(state).result(TIMEOUT)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            engine.load(template)
            assert torch.cuda.memory_allocated() == before
            assert 16 * MIB < torch.cuda.max_memory_allocated() - before <= 256 * MIB
        assert torch.cuda.memory_reserved() == reserved, "later loads use what the first one allocated"
    assert all(torch.equal(template[name], value) for name, value in state.items())


def test_work_of_the_trainer_on_memory_that_it_let_go_of_is_done_first(tmp_path: Path) -> None:
    """The allocator gives a load what the trainer's queued work still reads and writes."""
    state = wide()
    template = by_columns(state)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(state).result(TIMEOUT)
        opened, inner = [], device.CudaUploads.allocate
        seen: list[torch.Tensor] = []

        def late(self: device.CudaUploads, nbytes: int) -> torch.Tensor | None:
            if not opened:
                torch.cuda.empty_cache()
                old = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
                torch.cuda._sleep(SLEEP_CYCLES)
                old.fill_(7)
                seen.append(old.clone())
                opened.append(old.data_ptr())
                del old
            return inner(self, nbytes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device.CudaUploads, "allocate", late)
            engine.load(template)
    assert all(torch.equal(template[name], value) for name, value in state.items())
    assert bool((seen[0] == 7).all())


def test_a_device_without_room_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = wide()
    template = by_columns(state)
    inner, made = device.CudaUploads.allocate, []

    def without_room(self: device.CudaUploads, nbytes: int) -> torch.Tensor | None:
        made.append(inner(self, nbytes << 30))
        return made[-1]

    monkeypatch.setattr(device.CudaUploads, "allocate", without_room)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(state).result(TIMEOUT)
        engine.load(template)
    assert made
    assert not any(memory is not None for memory in made)
    assert all(torch.equal(template[name], value) for name, value in state.items())


def test_thousands_of_small_tensors_come_back(tmp_path: Path) -> None:
    torch.manual_seed(2)
    state = {f"t{i}": torch.randn(1 + i % 900, device="cuda") for i in range(3000)}
    template = {name: torch.zeros_like(value) for name, value in state.items()}
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(state).result(TIMEOUT)
        engine.load(template)
    assert all(torch.equal(template[name], value) for name, value in state.items())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_stock_dcp_comes_back(tmp_path: Path) -> None:
    state = {"w": torch.randn(3 * MIB, device="cuda"), "b": torch.randn(7, 5, device="cuda").t()}
    dcp.save(state, checkpoint_id=str(tmp_path / "step_000000001"), no_dist=True)
    template = {name: torch.zeros_like(value) for name, value in state.items()}
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.load(template)
    assert all(torch.equal(template[name], value) for name, value in state.items())


@pytest.mark.parametrize("is_current", [True, False])
def test_work_that_was_queued_before_reads_the_old_values(tmp_path: Path, is_current: bool) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(large(2.0)).result(TIMEOUT)
        state = large(1.0)
        torch.cuda.synchronize()
        stream = torch.cuda.current_stream() if is_current else torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            seen = {name: tensor.clone() for name, tensor in state.items()}
        assert not stream.query(), "the stream must still be busy when the load begins"
        engine.load(state)
        after = {name: tensor.clone() for name, tensor in state.items()}
    torch.cuda.synchronize()
    check_all(seen, 1.0)
    check_all(after, 2.0)


def test_any_stream_sees_the_new_values_when_the_load_has_returned(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(large(2.0)).result(TIMEOUT)
        state = large(1.0)
        engine.load(state)
        with torch.cuda.stream(torch.cuda.Stream()):
            seen = {name: tensor.clone() for name, tensor in state.items()}
    torch.cuda.synchronize()
    check_all(seen, 2.0)


@pytest.mark.gpu(2)
def test_a_state_on_two_devices_comes_back_each_on_its_own(tmp_path: Path) -> None:
    torch.manual_seed(3)
    names = ("cuda:0", "cuda:1")
    state = {f"{where} {i}": torch.randn(5 * MIB + i, device=where) for where in names for i in range(4)}
    state["host"] = torch.randn(2 * MIB)
    template = {name: torch.zeros_like(value) for name, value in state.items()}
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(state).result(TIMEOUT)
        engine.load(template)
    for name, value in state.items():
        assert template[name].device == value.device
        assert torch.equal(template[name], value), name


def test_a_second_device_may_be_filled_from_what_the_first_saved(tmp_path: Path) -> None:
    where = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(large(4.0, "cuda:0")).result(TIMEOUT)
        state = large(0.0, where)
        engine.load(state)
    check_all(state, 4.0)


def test_a_corrupt_block_is_named_and_not_copied(tmp_path: Path) -> None:
    torch.manual_seed(4)
    state = {"first": torch.randn(2 * MIB, device="cuda"), "second": torch.randn(4 * MIB, device="cuda")}
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(state).result(TIMEOUT)
        (path,) = tmp_path.glob("step_*/*.distcp")
        data = bytearray(path.read_bytes())
        data[data.index(bytes_of(state["second"])[9 * MIB :][:64].cpu().numpy().tobytes())] ^= 1
        path.write_bytes(data)
        template = {name: torch.zeros_like(value) for name, value in state.items()}
        with pytest.raises(MismatchError, match="'second'") as caught:
            engine.load(template, step=1)
    assert path.name in str(caught.value)
    assert float(template["second"][9 * MIB // 4]) == 0


async def test_a_load_that_is_given_up_leaves_no_copy_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, events = threading.Event(), threading.Event(), []
    inner, event = datafile.ReadFile._read, device.CudaUploads.record_event

    def held(file: datafile.ReadFile, offset: int, views: list[memoryview]) -> int:
        got = inner(file, offset, views)
        begun.set()
        assert goes_on.wait(TIMEOUT)
        return got

    def noted(self: device.CudaUploads) -> device.CopyEvent:
        events.append(event(self))
        return events[-1]

    async with CheckpointEngine(tmp_path) as engine:
        await engine.save(large(2.0))
        monkeypatch.setattr(datafile.ReadFile, "_read", held)
        monkeypatch.setattr(device.CudaUploads, "record_event", noted)
        state = large(1.0)
        load = asyncio.ensure_future(engine.load(state))
        await asyncio.to_thread(begun.wait, TIMEOUT)
        load.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert all(event.query() for event in events)
        for tensor in state.values():
            tensor.zero_()
        other = large(0.0)
        await engine.load(other)  # by the same threads
        torch.cuda.synchronize()
        check_all(state, 0.0)
        check_all(other, 2.0)


def test_the_ring_is_page_locked_once_and_let_go_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, register = [], bounce.register_host_memory
    let_go, unregister = [], bounce.unregister_host_memory

    def noted(address: int, nbytes: int) -> None:
        register(address, nbytes)
        sizes.append(nbytes)

    def undone(address: int) -> None:
        unregister(address)
        let_go.append(address)

    monkeypatch.setattr(bounce, "register_host_memory", noted)
    monkeypatch.setattr(bounce, "unregister_host_memory", undone)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(large(2.0)).result(TIMEOUT)
        state = large(1.0)
        engine.load(state)
    (nbytes,) = sizes
    assert nbytes <= (4 + 2) * 16 * MIB
    assert len(let_go) == 1
    check_all(state, 2.0)
