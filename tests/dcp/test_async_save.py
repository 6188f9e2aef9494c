"""``dcp.async_save`` on our Writer and AsyncStager: what is saved is what was there at the call."""

from __future__ import annotations

import errno
import gc
import io
import itertools
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_states import assert_same_state, blank, leaves_of, needs_stagers, state_of
from gated_storage import TIMEOUT, GatedStorage
from torch.distributed.checkpoint.staging import AsyncStager as StockAsyncStager
from warm_python import run_warm

from aio_ckpt import EngineConfig
from aio_ckpt.dcp import AsyncStager, Reader, Writer
from aio_ckpt.dcp import rank_save as dcp_save
from aio_ckpt.errors import BudgetExceededError, WriteError
from aio_ckpt.runtime.portal import Executor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)", "ignore:TypedStorage")


def spoil(state: dict[str, Any]) -> None:
    """Change everything that can be changed in place."""
    with torch.no_grad():
        for _, value in leaves_of(state):
            if isinstance(value, torch.Tensor) and value.numel():
                value.view(torch.uint8).fill_(0xCB) if value.is_contiguous() and value.dim() else value.zero_()
    state["names"][2]["c"] = "changed"
    state["names"].clear()
    state["added"] = 1


def load(state: dict[str, Any], path: Path) -> dict[str, Any]:
    target = blank(state)
    dcp.load(target, storage_reader=Reader(path))
    return target


def with_writer_as_stager(state: dict[str, Any], path: Path, storage: GatedStorage) -> Any:
    return dcp.async_save(state, storage_writer=Writer(path, storage=storage))


def with_a_stager_of_its_own(state: dict[str, Any], path: Path, storage: GatedStorage) -> Any:
    return dcp.async_save(state, storage_writer=Writer(path, storage=storage), async_stager=AsyncStager())


def with_a_writer_that_is_kept(state: dict[str, Any], path: Path, storage: GatedStorage) -> Any:
    return dcp.async_save(state, storage_writer=Writer(path, storage=storage).__enter__())


@pytest.mark.parametrize(
    "begin",
    [
        with_writer_as_stager,
        pytest.param(with_a_stager_of_its_own, marks=needs_stagers),
        with_a_writer_that_is_kept,
    ],
    ids=lambda begin: begin.__name__,
)
def test_what_changes_after_async_save_returned_is_not_saved(tmp_path: Path, storage: GatedStorage, begin: Any) -> None:
    gate = storage.hold("create_data_file")
    state = state_of(1)
    saving = begin(state, tmp_path / "a", storage)
    spoil(state)
    gate.wait_reached()
    gate.open()
    saving.result(TIMEOUT)
    assert_same_state(load(state_of(1), tmp_path / "a"), state_of(1))


@needs_stagers
def test_our_stager_serves_stocks_writer(tmp_path: Path) -> None:
    state = state_of(2)
    with AsyncStager() as stager:
        saving = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "a"), async_stager=stager)
        spoil(state)
        saving.result(TIMEOUT)
    assert_same_state(load(state_of(2), tmp_path / "a"), state_of(2))


@needs_stagers
def test_saves_that_overlap_have_memory_of_their_own(tmp_path: Path, storage: GatedStorage) -> None:
    gate = storage.hold("create_data_file")
    with AsyncStager(EngineConfig(debug=True)) as stager:
        savings = []
        for seed in (1, 2, 3):
            writer = Writer(tmp_path / str(seed), storage=storage)
            savings.append(dcp.async_save(state_of(seed), storage_writer=writer, async_stager=stager))
        gate.wait_reached()
        gate.open()
        for saving in savings:
            saving.result(TIMEOUT)
    for seed in (1, 2, 3):
        assert_same_state(load(state_of(seed), tmp_path / str(seed)), state_of(seed))


def stats_of(stager: AsyncStager) -> tuple[int, int]:
    """(arenas, leases) once what was posted is done."""
    runtime = stager._keep()

    async def nothing() -> None: ...

    runtime.portal.call(nothing, timeout=TIMEOUT)
    return runtime.staging.stats.arenas, runtime.staging.stats.leases


@needs_stagers
def test_staging_memory_is_used_again_when_the_save_has_ended_and_not_before(
    tmp_path: Path, storage: GatedStorage
) -> None:
    with AsyncStager() as stager:
        gate = storage.hold("create_data_file")
        saving = dcp.async_save(
            state_of(1), storage_writer=Writer(tmp_path / "a", storage=storage), async_stager=stager
        )
        gate.wait_reached()
        gc.collect()
        assert stats_of(stager) == (1, 1)
        gate.open()
        saving.result(TIMEOUT)
        wait_for_executors()
        assert stats_of(stager) == (1, 0)
        for seed in range(2, 7):
            dcp.async_save(state_of(seed), storage_writer=Writer(tmp_path / "a"), async_stager=stager).result(TIMEOUT)
            wait_for_executors()
            assert stats_of(stager) == (1, 0)


def wait_for_executors() -> None:
    """DCP's thread drops what it saved just after it told its future."""
    for thread in threading.enumerate():
        if "AsyncCheckpointExecutor" in thread.name or thread.name.startswith("ThreadPoolExecutor"):
            thread.join(TIMEOUT)


def test_a_copy_keeps_its_memory_after_the_stager_was_closed() -> None:
    state = state_of(3)
    with AsyncStager(EngineConfig(debug=True, drain_timeout_secs=0.1)) as stager:
        staged = stager.stage(state)
        kept = staged["model"]["big"][1:]
        del staged
        gc.collect()
        assert stats_of(stager) == (1, 1)
    torch.testing.assert_close(kept, state["model"]["big"][1:], rtol=0, atol=0, equal_nan=True)


def test_a_copy_is_like_the_state_and_shares_nothing_with_it() -> None:
    state = {**state_of(4), "file": io.BytesIO(b"abc"), "pair": (torch.ones(2), 1), "twice": None}
    state["twice"] = state["pair"]
    with AsyncStager() as stager:
        staged = stager.stage(state)
        assert_same_state({**staged, "file": 0}, {**state, "file": 0})
        assert staged["file"].getvalue() == b"abc"
        assert staged["twice"] is staged["pair"]
        assert staged["model"]["tied"].data_ptr() == staged["model"]["head"].data_ptr()
        ours = {value.untyped_storage().data_ptr() for _, value in leaves_of(staged) if isinstance(value, torch.Tensor)}
        theirs = {
            value.untyped_storage().data_ptr() for _, value in leaves_of(state) if isinstance(value, torch.Tensor)
        }
        assert ours.isdisjoint(theirs - {0})
        assert all(not value.requires_grad for _, value in leaves_of(staged) if isinstance(value, torch.Tensor))


def memory_of(state: dict[str, Any]) -> set[int]:
    tensors = [value for _, value in leaves_of(state) if isinstance(value, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_a_writer_that_is_turned_elsewhere_while_it_saves_mixes_nothing(tmp_path: Path, storage: GatedStorage) -> None:
    writer = Writer(tmp_path / "x", storage=storage)
    first_at, second_at = tmp_path / "1", tmp_path / "2"
    gate = storage.hold("write_file", "aio_ckpt.*.0.bin")
    first = dcp.async_save(state_of(1), storage_writer=writer, checkpoint_id=first_at)
    gate.wait_reached()
    storage.release(gate)
    dcp.async_save(state_of(2), storage_writer=writer, checkpoint_id=second_at).result(TIMEOUT)
    gate.open()
    first.result(TIMEOUT)
    for seed, path in ((1, first_at), (2, second_at)):
        assert_same_state(load(state_of(seed), path), state_of(seed))
    # Turned away before it wrote: told, not mixed.
    gate = storage.hold("write_file", "aio_ckpt.pending-*")
    first = dcp.async_save(state_of(3), storage_writer=writer, checkpoint_id=first_at)
    gate.wait_reached()
    storage.release(gate)
    dcp.async_save(state_of(4), storage_writer=writer, checkpoint_id=second_at).result(TIMEOUT)
    gate.open()
    with pytest.raises(dcp.api.CheckpointException, match="a writer of its own"):
        first.result(TIMEOUT)
    for seed, path in ((1, first_at), (4, second_at)):
        assert_same_state(load(state_of(seed), path), state_of(seed))


def test_while_a_save_is_being_committed_no_other_begins_in_its_directory(
    tmp_path: Path, storage: GatedStorage
) -> None:
    path = tmp_path / "a"
    writer = Writer(path, storage=storage)
    dcp.save(state_of(1), storage_writer=writer)
    gate = storage.hold("replace", ".metadata.tmp-*")
    first = dcp.async_save(state_of(2), storage_writer=writer)
    gate.wait_reached()
    storage.release(gate)
    for other in (writer, Writer(path)):
        with pytest.raises(
            dcp.api.CheckpointException, match="another save into this directory is being begun or committed"
        ):
            dcp.async_save(state_of(3), storage_writer=other).result(TIMEOUT)
    gate.open()
    first.result(TIMEOUT)
    assert_same_state(load(state_of(2), path), state_of(2))


def test_of_saves_that_overlap_in_one_directory_none_takes_another_ones_files(tmp_path: Path) -> None:
    path, held = tmp_path / "a", torch.zeros(200, 200)
    with Writer(path) as writer:
        dcp.save({"w": held}, storage_writer=writer)
        for number in range(6):
            values = [torch.full_like(held, 2.0 * number + which) for which in (1, 2)]
            saves = [dcp.async_save({"w": value}, storage_writer=writer) for value in values]
            errors = [save.exception(TIMEOUT) for save in saves]
            done = [value for value, error in zip(values, errors, strict=True) if error is None]
            found = {"w": torch.zeros_like(held)}
            dcp.load(found, storage_reader=Reader(path))
            assert any(torch.equal(found["w"], value) for value in done or [held])
            held = found["w"]
            assert all("another save" in str(error) for error in errors if error is not None)


def test_what_a_rank_writes_for_a_save_that_another_one_replaces_is_removed(
    tmp_path: Path, storage: GatedStorage
) -> None:
    path = tmp_path / "a"
    writes = storage.hold("write_file", "aio_ckpt.*.0.bin")
    overtaken = dcp.async_save({"w": torch.zeros(9)}, storage_writer=Writer(path, storage=storage))
    writes.wait_reached()
    storage.release(writes)
    looks = storage.hold("sync_dir", "a")
    executor = Executor("other", 6)
    other = GatedStorage(executor)
    with ThreadPoolExecutor(1) as pool:
        other_ends = other.hold("remove_file", "aio_ckpt.pending-*")
        saving = pool.submit(dcp.save, {"w": torch.ones(9)}, storage_writer=Writer(path, storage=other))
        other_ends.wait_reached()  # it has seen what is there
        writes.open()
        looks.wait_reached()  # the rank's manifest is there, and so is still its mark
        other_ends.open()
        other.wait_for("write_file", "aio_ckpt.pending-*")
        assert [name.name for name in path.glob("aio_ckpt.*.bin")] == []
        looks.open()
        saving.result(TIMEOUT)
    assert executor.close(TIMEOUT)
    with pytest.raises(dcp.api.CheckpointException, match="another save into this directory has begun"):
        overtaken.result(TIMEOUT)


def test_a_save_whose_files_another_save_removed_names_the_other_save(tmp_path: Path, storage: GatedStorage) -> None:
    path = tmp_path / "a"
    gate = storage.hold("create_data_file")
    saving = dcp.async_save({"w": torch.zeros(9)}, storage_writer=Writer(path, storage=storage))
    gate.wait_reached()
    storage.fail("create_data_file", "*", WriteError(errno.ENOENT, "No such file or directory", str(path / "x")))
    (mark,) = path.glob("aio_ckpt.pending-*")
    mark.unlink()
    gate.open()
    with pytest.raises(dcp.api.CheckpointException, match="another save into this directory has begun"):
        saving.result(TIMEOUT)


def test_a_save_whose_files_go_before_its_mark_names_the_other_save(
    tmp_path: Path, storage: GatedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, looks = tmp_path / "a", itertools.count(1)
    pending_saves = dcp_save.pending_saves

    async def looked(storage: Any, directory: Path) -> list[str]:
        if next(looks) == 2:  # the first behind the error
            (mark,) = directory.glob("aio_ckpt.pending-*")
            mark.unlink()
        return await pending_saves(storage, directory)

    monkeypatch.setattr(dcp_save, "pending_saves", looked)
    storage.fail("create_data_file", "*", WriteError(errno.ENOENT, "No such file or directory", "x"))
    saving = dcp.async_save({"w": torch.zeros(9)}, storage_writer=Writer(path, storage=storage))
    with pytest.raises(dcp.api.CheckpointException, match="another save into this directory has begun"):
        saving.result(TIMEOUT)
    assert next(looks) == 3


def test_a_file_that_is_gone_for_another_reason_is_named(tmp_path: Path, storage: GatedStorage) -> None:
    storage.fail("create_data_file", "*", WriteError(errno.ENOENT, "No such file or directory", "x"))
    saving = dcp.async_save({"w": torch.zeros(9)}, storage_writer=Writer(tmp_path / "a", storage=storage))
    with pytest.raises(dcp.api.CheckpointException, match="No such file") as caught:
        saving.result(TIMEOUT)
    assert "another save" not in str(caught.value)


def test_our_writer_and_stager_are_stagers_of_dcp() -> None:
    assert isinstance(Writer("x"), StockAsyncStager)
    assert isinstance(AsyncStager(), StockAsyncStager)
    assert not Writer("x").should_synchronize_after_execute


def test_a_state_beyond_the_budget_is_refused_by_a_stager_that_knows_no_writer() -> None:
    with AsyncStager(EngineConfig(budget_bytes=1 << 20)) as stager:
        with pytest.raises(BudgetExceededError, match="budget_bytes"):
            stager.stage({"w": torch.zeros(1 << 20)})
        assert stats_of(stager) == (0, 0)
        stager.stage({"w": torch.zeros(100)})


@needs_stagers
def test_a_failed_save_fails_its_future_and_returns_its_memory(tmp_path: Path, storage: GatedStorage) -> None:
    storage.fail("write", "*", WriteError(28, "full", "x"))
    with AsyncStager() as stager:
        saving = dcp.async_save(
            state_of(1), storage_writer=Writer(tmp_path / "a", storage=storage), async_stager=stager
        )
        with pytest.raises(dcp.api.CheckpointException, match="full"):
            saving.result(TIMEOUT)
        del saving
        wait_for_executors()
        gc.collect()
        assert stats_of(stager)[1] == 0


def test_async_saves_leave_no_thread_and_no_file_open(tmp_path: Path) -> None:
    def turn() -> None:
        dcp.async_save({"w": torch.rand(1000)}, storage_writer=Writer(tmp_path / "a")).result(TIMEOUT)
        wait_for_executors()

    turn()
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        turn()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


EXITS = """
    import sys, torch, warnings
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from aio_ckpt.dcp import AsyncStager, Writer
    planner = DefaultSavePlanner()
    stager = AsyncStager() if sys.argv[2] == "stager" else None
    state = {"w": torch.full((5 << 20,), 7.0)}
    kept = {"async_stager": stager} if stager else {}
    dcp.async_save(state, storage_writer=Writer(sys.argv[1]), planner=planner, **kept)
    state["w"].zero_()
"""


@pytest.mark.sampled
@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="Python 3.12 starts no thread while it exits: docs/limits.md"
)
@pytest.mark.parametrize("stager", ["writer", pytest.param("stager", marks=needs_stagers)])
def test_a_save_that_is_pending_at_interpreter_exit_is_finished(tmp_path: Path, stager: str) -> None:
    run_warm(EXITS, str(tmp_path / "a"), stager).check_returncode()
    target = {"w": torch.zeros(5 << 20)}
    dcp.load(target, storage_reader=Reader(tmp_path / "a"))
    assert (target["w"] == 7).all()


FAILED = """
    import sys, threading, warnings
    from concurrent.futures import ThreadPoolExecutor
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed.checkpoint as dcp
    from aio_ckpt import EngineConfig
    from aio_ckpt.dcp import AsyncStager, Writer

    idle = ThreadPoolExecutor(2)
    idle.submit(print, "in a thread that waits for work from now on", flush=True).result()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    config = EngineConfig(drain_timeout_secs=3600)
    writer = Writer(sys.argv[1], config=config)
    if sys.argv[2] == "kept":
        writer.__enter__()
    saving = dcp.async_save({"w": torch.zeros(9)}, storage_writer=writer)
    error = saving.exception(30)
    print(type(error.__cause__ or error).__name__, error.__traceback__ is not None)
"""


@pytest.mark.parametrize("writer", ["for one call", "kept"])
def test_at_exit_a_failed_save_is_not_waited_for_although_its_error_is_held(tmp_path: Path, writer: str) -> None:
    (tmp_path / "file").touch()
    # Far below drain_timeout_secs, far above what the process takes.
    done = run_warm(FAILED, str(tmp_path / "file" / "below"), writer, timeout=120)
    assert (done.returncode, done.stdout.splitlines()[1:], done.stderr) == (0, ["CheckpointException True"], "")


IN_A_PROCESS = """
import os, sys, torch, warnings
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from aio_ckpt import EngineConfig
from aio_ckpt.dcp import Writer

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = {"w": torch.full((1000,), 7.0), "turned": torch.ones(5, 3).t()}
    path, kind = sys.argv[1], AsyncCheckpointerType.PROCESS
    saving = dcp.async_save(
        state, checkpoint_id=path, storage_writer=Writer(path), async_checkpointer_type=kind
    )
    state["w"].zero_()
    saving.result(60)
    large = {"w": torch.ones(1 << 20)}
    writer = Writer(path, config=EngineConfig(budget_bytes=1 << 20))
    saving = dcp.async_save(large, checkpoint_id=path, storage_writer=writer, async_checkpointer_type=kind)
    error = saving.exception(60)
    assert "AsyncCheckpointerType.THREAD" in str(error) and not large["w"].is_shared(), error
"""


@pytest.mark.slow
@needs_stagers
def test_dcps_own_process_saves_with_our_writer(tmp_path: Path) -> None:
    done = run_warm(IN_A_PROCESS, str(tmp_path / "a"), timeout=3 * TIMEOUT)
    assert done.returncode == 0, done.stderr
    target = {"w": torch.zeros(1000), "turned": torch.zeros(3, 5)}
    dcp.load(target, storage_reader=Reader(tmp_path / "a"))
    assert_same_state(target, {"w": torch.full((1000,), 7.0), "turned": torch.ones(3, 5)})
