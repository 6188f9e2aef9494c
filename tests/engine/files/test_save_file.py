"""``save_file()``: the file is the one that ``torch.save`` writes, captured at the call and replaced as a whole."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import signal
import struct
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gated_storage import TIMEOUT, gated_engine
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from safetensors.torch import load_file
from tensor_bits import random_tensor
from warm_python import WarmPython, run_warm

from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.engine import outcomes
from aio_ckpt.errors import (
    ConfigError,
    EngineClosedError,
    SaveCancelledError,
    StallError,
    UnsupportedLeafError,
    WriteError,
    WrongThreadError,
)

MIB = 1 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SyncCheckpointEngine]:
    with SyncCheckpointEngine(tmp_path / "root") as opened:
        yield opened


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)


def shape_of(value: Any) -> Any:
    """The containers, keys and plain values, and what each tensor is but its bytes."""
    if isinstance(value, torch.Tensor):
        kind = type(value), value.dtype, value.shape, value.stride(), value.storage_offset()
        return *kind, value.requires_grad, value.is_conj(), value.is_neg(), value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return type(value), [(key, shape_of(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shape_of(inner) for inner in value]
    return value


def sharing(value: Any) -> list[int]:
    """Per tensor, the first one with the same storage; an empty storage has no address."""
    addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)]
    return [addresses.index(address) if address else -1 for address in addresses]


def assert_same_object(got: Any, wanted: Any) -> None:
    assert shape_of(got) == shape_of(wanted)
    assert sharing(got) == sharing(wanted)
    for mine, stock in zip(tensors_in(got), tensors_in(wanted), strict=True):
        assert torch.equal(*(torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage()) for each in (mine, stock)))


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# -- the file -------------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Tensors over few storages: whole ones, slices, transposed, expanded, lazily conjugated, empty."""
    found = []
    for seed in range(draw(st.integers(0, 4))):
        base = random_tensor((draw(st.integers(0, 5)), draw(st.integers(1, 4))), draw(st.sampled_from(DTYPES)), seed)
        found.append(base)
        for kind in draw(
            st.lists(st.sampled_from(("self", "t", "row", "flat", "expand", "conj", "param")), max_size=3)
        ):
            match kind:
                case "self":
                    found.append(base)
                case "t":
                    found.append(base.t())
                case "row":
                    found.append(base[1:])
                case "flat":
                    found.append(base.flatten()[:2])
                case "expand":
                    found.append(base[:1].expand(3, -1) if len(base) else base)
                case "conj":
                    found.append(base.conj())
                case "param":
                    found.append(torch.nn.Parameter(base, requires_grad=base.is_floating_point()))
    return found


def nested(leaves: list[Any]) -> st.SearchStrategy[Any]:
    leaf = st.sampled_from([*leaves, 1, 2.5, "text", None, True, b"bytes"])
    keys = st.one_of(st.text(max_size=3), st.integers(0, 9))
    return st.recursive(leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))


@given(data=st.data())
@examples(nightly=300)
def test_save_file_writes_the_file_of_torch_save(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    obj = data.draw(views().flatmap(nested))
    folder = tmp_path_factory.mktemp("file")
    torch.save(obj, folder / "stock.pt")
    with SyncCheckpointEngine(folder / "root") as engine:
        engine.save_file(obj, folder / "ours.pt").result(TIMEOUT)
    with zipfile.ZipFile(folder / "ours.pt") as archive:
        assert archive.testzip() is None
    for options in ({"weights_only": True}, {"weights_only": True, "mmap": True}, {"weights_only": False}):
        got = torch.load(folder / "ours.pt", **options)
        assert_same_object(got, torch.load(folder / "stock.pt", **options))


def test_a_module_and_its_optimizer_go_on_from_it(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = made()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    engine.save_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "last.pt").result()
    stored = torch.load(tmp_path / "last.pt")
    other, other_optimizer = made()
    other.load_state_dict(stored["model"])
    other_optimizer.load_state_dict(stored["optimizer"])
    assert stored["model"]["0.weight"].data_ptr() == stored["model"]["1.weight"].data_ptr()
    assert_same_object(other_optimizer.state_dict(), torch.load(tmp_path / "last.pt")["optimizer"])


def test_raw_bytes_are_aligned_and_no_byte_lies_between_two_records(
    engine: SyncCheckpointEngine, tmp_path: Path
) -> None:
    tensors = [random_tensor((n,), torch.uint8, n) for n in (0, 1, 63, 64, MIB, 5 * MIB + 3)]
    engine.save_file(tensors, tmp_path / "t.pt").result(TIMEOUT)
    data = (tmp_path / "t.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "t.pt") as archive:
        ends = [0]
        for info in sorted(archive.infolist(), key=lambda each: each.header_offset):
            assert info.header_offset == ends[-1], info
            lengths = sum(struct.unpack_from("<2H", data, info.header_offset + 26))
            start = info.header_offset + 30 + lengths
            assert "/data/" not in info.filename or start % 64 == 0
            ends.append(start + info.file_size + (16 if info.flag_bits & 8 else 0))
        assert archive.start_dir == ends[-1]


def test_a_flipped_bit_is_found_by_torch_load(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    engine.save_file({"w": torch.full((1000,), 3.0)}, tmp_path / "w.pt").result(TIMEOUT)
    data = bytearray((tmp_path / "w.pt").read_bytes())
    data[data.index(torch.full((4,), 3.0).numpy().tobytes()) + 100] ^= 1
    (tmp_path / "w.pt").write_bytes(data)
    with zipfile.ZipFile(tmp_path / "w.pt") as archive:
        assert archive.testzip() == "archive/data/0"


def test_a_state_beyond_the_budget_is_written_in_waves(tmp_path: Path) -> None:
    state = {str(n): random_tensor((3 * MIB + n,), torch.uint8, n) for n in range(8)}
    with SyncCheckpointEngine(tmp_path / "root", EngineConfig(budget_bytes=8 * MIB)) as engine:
        engine.save_file(state, tmp_path / "big.pt").result(TIMEOUT)
    assert_same_object(torch.load(tmp_path / "big.pt"), state)


def test_two_dtypes_over_the_same_bytes_are_refused(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    base = torch.zeros(8)
    with pytest.raises(UnsupportedLeafError, match=r"torch.float32 and as torch.int32.*clone\(\)"):
        engine.save_file([base, base.view(torch.int32)], tmp_path / "x.pt")
    assert listing(tmp_path) == []


def test_an_error_of_pickle_is_raised_and_nothing_is_left(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"):
        engine.save_file({"f": lambda: 0, "w": torch.ones(1)}, tmp_path / "x.pt")
    assert listing(tmp_path) == []
    engine.save_file({}, tmp_path / "x.pt").result(TIMEOUT)


# -- the call -------------------------------------------------------------------------------------


def test_what_changes_after_the_call_is_not_in_the_file(tmp_path: Path) -> None:
    state = {"w": torch.ones(MIB), "n": [1]}
    with gated_engine(tmp_path / "root") as (engine, storage):
        gate = storage.hold("create_data_file")
        ticket = engine.save_file(state, tmp_path / "w.pt")
        assert ticket.staged.result(TIMEOUT) is None
        state["w"].zero_()
        state["n"].append(2)
        gate.wait_reached()
        assert ticket.progress.stage == "write"
        assert not (tmp_path / "w.pt").exists()
        gate.open()
        report = ticket.result(TIMEOUT)
    assert report is not None
    assert (report.step, report.path) == (0, tmp_path / "w.pt")
    assert report.image_bytes == (tmp_path / "w.pt").stat().st_size == ticket.progress.bytes_done
    assert_same_object(torch.load(tmp_path / "w.pt"), {"w": torch.ones(MIB), "n": [1]})


async def test_the_ticket_can_be_awaited(tmp_path: Path) -> None:
    async with CheckpointEngine(tmp_path / "root") as engine:
        tickets = [engine.save_file({"n": n}, tmp_path / f"{n}.pt") for n in range(4)]
        await asyncio.gather(*tickets)
    assert [torch.load(tmp_path / f"{n}.pt") for n in range(4)] == [{"n": n} for n in range(4)]


def test_the_last_call_wins_whichever_is_written_first(tmp_path: Path) -> None:
    with gated_engine(tmp_path / "root", max_in_flight=2) as (engine, storage):
        gate = storage.hold("sync")
        first = engine.save_file({"n": 1}, tmp_path / "x.pt")
        gate.wait_reached()
        storage.release(gate)
        second = engine.save_file({"n": 2}, tmp_path / "x.pt")
        storage.wait_for("sync")
        assert not second.done()
        gate.open()
        assert second.result(TIMEOUT) is not None
        assert first.done()
    assert torch.load(tmp_path / "x.pt") == {"n": 2}
    assert listing(tmp_path) == ["x.pt"]


def test_steps_and_files_are_saved_side_by_side(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    state = {"w": torch.arange(MIB)}
    tickets = []
    for n in range(1, 5):
        state["w"].fill_(n)
        tickets += [engine.save(state), engine.save_file(state, tmp_path / f"{n}.pt")]
    for ticket in tickets:
        ticket.result(TIMEOUT)
    assert engine.steps() == [1, 2, 3, 4]
    for n in range(1, 5):
        assert torch.load(tmp_path / f"{n}.pt")["w"].unique().tolist() == [n]
        assert engine.read(n)["w"].unique().tolist() == [n]
    assert engine.lifetime.leases == 0


def test_missing_directories_are_made_and_a_link_stays(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    engine.save_file({"n": 1}, tmp_path / "a" / "b" / "x.pt").result(TIMEOUT)
    (tmp_path / "latest.pt").symlink_to("a/b/x.pt")
    engine.save_file({"n": 2}, str(tmp_path / "latest.pt")).result(TIMEOUT)
    assert (tmp_path / "latest.pt").is_symlink()
    assert torch.load(tmp_path / "a" / "b" / "x.pt") == {"n": 2}
    assert not engine.root.exists(), "a file needs no root"


def test_a_link_that_cannot_be_looked_at_is_not_replaced(
    engine: SyncCheckpointEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save_file({"n": 1}, tmp_path / "x.pt").result(TIMEOUT)
    (tmp_path / "latest.pt").symlink_to("x.pt")
    real, failures = os.lstat, [OSError(errno.EIO, os.strerror(errno.EIO))]

    def lstat(path: Any, **options: Any) -> os.stat_result:
        if failures and os.fspath(path).endswith("latest.pt"):
            raise failures.pop()
        return real(path, **options)

    monkeypatch.setattr(os, "lstat", lstat)
    with pytest.raises(WriteError, match="Input/output error") as caught:
        engine.save_file({"n": 2}, tmp_path / "latest.pt")
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "latest.pt"))
    assert torch.load(tmp_path / "x.pt") == {"n": 1}
    engine.save_file({"n": 3}, tmp_path / "latest.pt").result(TIMEOUT)
    assert (tmp_path / "latest.pt").is_symlink()
    assert torch.load(tmp_path / "x.pt") == {"n": 3}


@pytest.mark.parametrize("path", [7, "", "s3://bucket/x.pt", None])
def test_a_bad_path_is_refused(engine: SyncCheckpointEngine, path: Any) -> None:
    with pytest.raises(ConfigError, match="path="):
        engine.save_file({}, path)


def test_a_directory_is_refused(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        engine.save_file({}, tmp_path)


def test_a_call_inside_a_call_is_refused(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    class Calling:
        def __reduce__(self) -> Any:
            engine.save_file({}, tmp_path / "inner.pt")
            return int, (1,)

    with pytest.raises(WrongThreadError, match=r"save_file\(\) inside another call"):
        engine.save_file([Calling()], tmp_path / "x.pt")
    engine.save_file({}, tmp_path / "x.pt").result(TIMEOUT)


# -- failures -------------------------------------------------------------------------------------


def disk_error(code: int) -> WriteError:
    return WriteError(code, os.strerror(code), "/x")


@pytest.mark.parametrize(
    ("call", "where", "code"),
    [
        ("make_dir", "*aio_ckpt-file*", errno.EACCES),
        ("create_data_file", "x.pt", errno.ENOSPC),
        ("write", "x.pt", errno.EIO),
        ("sync", "x.pt", errno.EIO),
        ("replace", "x.pt", errno.EIO),
    ],
)
@pytest.mark.usefixtures("quiet")
def test_a_failing_disk_leaves_the_old_file_alone(tmp_path: Path, call: str, where: str, code: int) -> None:
    with gated_engine(tmp_path / "root") as (engine, storage):
        engine.save_file({"n": 1}, tmp_path / "x.pt").result(TIMEOUT)
        storage.fail(call, where, disk_error(code))
        ticket = engine.save_file({"w": torch.ones(MIB)}, tmp_path / "x.pt")
        with pytest.raises(WriteError) as caught:
            ticket.result(TIMEOUT)
        assert caught.value.errno == code
        assert not caught.value.in_doubt
        assert ("this save needs 4.2 MB" in str(caught.value)) is (code == errno.ENOSPC)
        assert listing(tmp_path) == ["x.pt"]
        assert torch.load(tmp_path / "x.pt") == {"n": 1}
        engine.save_file({"n": 3}, tmp_path / "x.pt").result(TIMEOUT)
        assert engine.lifetime.leases == 0
    assert torch.load(tmp_path / "x.pt") == {"n": 3}


@pytest.mark.usefixtures("quiet")
def test_a_directory_that_cannot_be_synced_leaves_the_new_file_in_doubt(tmp_path: Path) -> None:
    with gated_engine(tmp_path / "root") as (engine, storage):
        engine.save_file({"n": 1}, tmp_path / "x.pt").result(TIMEOUT)
        storage.fail("sync_dir", tmp_path.name, disk_error(errno.EIO))
        error = engine.save_file({"n": 2}, tmp_path / "x.pt").exception(TIMEOUT)
    assert isinstance(error, WriteError)
    assert error.in_doubt
    assert torch.load(tmp_path / "x.pt") == {"n": 2}
    assert listing(tmp_path) == ["x.pt"]


@pytest.mark.usefixtures("quiet")
def test_a_failure_that_nobody_awaited_is_raised_once(tmp_path: Path) -> None:
    with gated_engine(tmp_path / "root") as (engine, storage):
        storage.fail("write", "x.pt", disk_error(errno.EIO))
        lost = engine.save_file({"w": torch.ones(MIB)}, tmp_path / "x.pt")
        while not lost.done():
            engine.wait_ready()
        with pytest.raises(WriteError) as caught:
            engine.save_file({"n": 2}, tmp_path / "y.pt")
        assert f"background save of {tmp_path / 'x.pt'}" in caught.value.__notes__[-1]
        assert caught.value.ticket is not None
        caught.value.ticket.result(TIMEOUT)
        engine.save_file({"n": 3}, tmp_path / "z.pt").result(TIMEOUT)
        storage.fail("write", "x.pt", disk_error(errno.EIO))
        engine.save_file({"w": torch.ones(MIB)}, tmp_path / "x.pt")
        with pytest.raises(WriteError):
            engine.close_blocking()
    assert listing(tmp_path) == ["y.pt", "z.pt"]


@pytest.mark.usefixtures("quiet")
def test_a_disk_that_stands_still_ends_the_save(tmp_path: Path) -> None:
    with gated_engine(tmp_path / "root", stall_timeout_secs=0.3) as (engine, storage):
        gate = storage.hold("sync")
        ticket = engine.save_file({"n": 1}, tmp_path / "x.pt")
        gate.wait_reached()
        with pytest.raises(StallError, match=r"x.pt made no progress for 0.3 s.*it was making its data durable"):
            ticket.result(TIMEOUT)
    assert listing(tmp_path) == []


@pytest.mark.parametrize("succeeds", [True, False])
def test_an_error_while_a_file_is_settled_loses_no_ticket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, succeeds: bool
) -> None:
    """Neither the ticket nor a later call waits for ever."""

    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(outcomes, "log_file", fails)
    with gated_engine(tmp_path / "root") as (engine, storage):
        if not succeeds:
            storage.fail("sync", "x.pt", disk_error(errno.EIO))
        ticket = engine.save_file({"n": 1}, tmp_path / "x.pt")
        assert (ticket.exception(TIMEOUT) is None) is succeeds
        monkeypatch.undo()
        engine.save_file({"n": 2}, tmp_path / "x.pt").result(TIMEOUT)
    assert "MemoryError" in caplog.text, "it is told all the same"


def test_a_cancelled_save_leaves_nothing(tmp_path: Path) -> None:
    with gated_engine(tmp_path / "root") as (engine, storage):
        gate = storage.hold("sync")
        ticket = engine.save_file({"n": 1}, tmp_path / "x.pt")
        gate.wait_reached()
        assert ticket.cancel()
        with pytest.raises(SaveCancelledError, match="nothing became visible"):
            ticket.result(TIMEOUT)
        assert listing(tmp_path) == []
        storage.release(gate)
        engine.save_file({"n": 2}, tmp_path / "y.pt").result(TIMEOUT)


def test_close_finishes_files_and_terminate_cancels_them(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        ticket = engine.save_file({"w": torch.ones(MIB)}, tmp_path / "x.pt")
    assert ticket.done()
    with pytest.raises(EngineClosedError):
        engine.save_file({}, tmp_path / "y.pt")
    with gated_engine(tmp_path / "root") as (held, storage):
        gate = storage.hold("sync")
        lost = held.save_file({"n": 1}, tmp_path / "z.pt")
        gate.wait_reached()
        held.terminate()
        assert isinstance(lost.exception(TIMEOUT), SaveCancelledError)
    assert listing(tmp_path) == ["x.pt"]


# -- the end of the process -----------------------------------------------------------------------

SAVER = """
    import sys, threading
    import torch
    from pathlib import Path
    from gated_storage import gated_engine

    folder = Path(sys.argv[1])
    with gated_engine(folder / "root") as (engine, storage):
        engine.save_file({"n": 1}, folder / "x.pt").result(60)
        gate = storage.hold(sys.argv[2])
        engine.save_file({"n": 2}, folder / "x.pt")
        gate.wait_reached()
        print("held", flush=True)
        threading.Event().wait()
"""


@pytest.mark.parametrize("call", ["sync", "sync_dir"])
def test_a_killed_process_leaves_the_old_file_or_the_new_one(tmp_path: Path, call: str) -> None:
    """Killed before the rename, and after it. The next engine clears what was left."""
    with WarmPython(SAVER, str(tmp_path), call, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
        finally:
            child.send_signal(signal.SIGKILL)
    assert torch.load(tmp_path / "x.pt") == {"n": 1 if call == "sync" else 2}
    assert [name for name in listing(tmp_path) if name.startswith(".aio_ckpt-file-")]
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save_file({"n": 3}, tmp_path / "y.pt").result(TIMEOUT)
    assert listing(tmp_path) == ["x.pt", "y.pt"]


def test_the_end_of_the_interpreter_finishes_files(tmp_path: Path) -> None:
    source = """
        import sys
        from aio_ckpt import SyncCheckpointEngine
        engine = SyncCheckpointEngine(sys.argv[1] + "/root")
        engine.save_file({"n": 1}, sys.argv[1] + "/x.pt")
    """
    assert run_warm(source, str(tmp_path)).returncode == 0
    assert torch.load(tmp_path / "x.pt") == {"n": 1}


# -- places ---------------------------------------------------------------------------------------


def test_a_pipe_is_refused_and_stays(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    """As a device would be: a rename would replace it for every process of the machine."""
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(ConfigError, match="is a device, a pipe or a socket"):
        engine.save_file({}, tmp_path / "pipe.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "pipe.pt")
    with pytest.raises(ConfigError, match="is a device, a pipe or a socket"):
        engine.save_file({}, tmp_path / "link.pt")
    assert (tmp_path / "pipe.pt").is_fifo()


@pytest.mark.parametrize("place", ["runs", "runs/ckpt"])
def test_no_file_takes_the_place_of_a_root_that_the_first_save_makes(tmp_path: Path, place: str) -> None:
    with SyncCheckpointEngine(tmp_path / "runs/ckpt") as engine:
        with pytest.raises(ConfigError, match=r"the root .*/runs/ckpt of the engine lies there"):
            engine.save_file({"n": 1}, tmp_path / place)
        assert engine.save({"n": 1}).result().step == 1


def test_a_file_in_the_place_of_a_directory_is_named(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="/file is a file: give a path in a directory"):
        engine.save_file({}, tmp_path / "file/below/x.pt")


@pytest.mark.parametrize(
    "place", ["root/.aio_ckpt/x.pt", "root/step_000000007", "root/step_000000007/x.pt", "c/.metadata"]
)
def test_the_places_of_checkpoints_are_refused(engine: SyncCheckpointEngine, tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match=r"belongs to the engine|a checkpoint's own files"):
        engine.save_file({}, tmp_path / place)
    assert not (tmp_path / place).exists()


def test_no_file_takes_the_directory_of_a_pending_checkpoint(tmp_path: Path) -> None:
    with gated_engine(tmp_path / "root") as (engine, storage):
        gate = storage.hold("rename", "pending/*")
        ticket = engine.save({"w": torch.ones(3)}, path=tmp_path / "o")
        gate.wait_reached()
        with pytest.raises(ConfigError, match="is pending, and takes that directory: await its ticket"):
            engine.save_file({}, tmp_path / "o/x.pt")
        gate.open()
        ticket.result(TIMEOUT)
        engine.save_file({}, tmp_path / "o/x.pt").result(TIMEOUT)


def test_a_private_file_stays_private(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    (tmp_path / "x.pt").touch(mode=0o600)
    engine.save_file({"w": 1}, tmp_path / "x.pt").result(TIMEOUT)
    assert (tmp_path / "x.pt").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["m.SafeTensors", "m.safetensors.index.json"])
def test_a_name_that_readers_take_for_safetensors_is_refused(
    engine: SyncCheckpointEngine, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.safetensors"):
        engine.save_file({}, tmp_path / name)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_file_of_the_same_structure_reuses_the_plan_and_holds_its_own_values(tmp_path: Path, name: str) -> None:
    def state(value: float, *names: str) -> dict[str, torch.Tensor]:
        return {key: torch.full((1000,), value) for key in names}

    def loaded() -> dict[str, torch.Tensor]:
        return load_file(tmp_path / name) if name.endswith("s") else torch.load(tmp_path / name)

    with SyncCheckpointEngine(tmp_path / "root") as engine:
        kept = []  # so that no tensor of a later state lies where one of an earlier state lay
        for value, names, is_hit in ((1.0, "ab", False), (2.0, "ab", True), (3.0, "abc", False), (4.0, "ab", False)):
            kept.append(state(value, *names))
            report = engine.save_file(kept[-1], tmp_path / name).result(TIMEOUT)
            assert report is not None
            assert report.plan_hit is is_hit
            for key, tensor in loaded().items():
                assert torch.equal(tensor, kept[-1][key]), key


def test_a_plan_is_reused_for_no_other_metadata_or_dtype(tmp_path: Path) -> None:
    state, path = {"a": torch.ones(1000), "b": torch.zeros(7)}, tmp_path / "x.safetensors"
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        hits = [
            engine.save_file(state, path, **options).result(TIMEOUT).plan_hit
            for options in ({}, {"metadata": {"k": "1"}}, {"metadata": {"k": "2"}}, {"dtype": torch.bfloat16}, {})
        ]
    assert hits == [False] * 5
    assert {key: tensor.dtype for key, tensor in load_file(path).items()} == dict.fromkeys("ab", torch.float32)
