"""``dcp.save``, ``dcp.load`` on our Writer and Reader, in one process: beside stock, with faults, deaths and leaks."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import re
import signal
import threading
import warnings
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_states import Flip, assert_same_state, blank, needs_stagers, state_of
from gated_storage import TIMEOUT, Call, GatedStorage
from property_examples import gate_stride
from rank_processes import ranks
from slow import slow
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.dcp import AsyncStager, Reader, Writer, call_resources
from aio_ckpt.dcp.call_resources import CallResources
from aio_ckpt.dcp.rank_save import RankSave, check_parts
from aio_ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    PlanChangedError,
    RootError,
    StallError,
    TemplateMismatchError,
    UnsupportedLeafError,
    WriteError,
)
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.data_file import ReadFile
from aio_ckpt.storage.direct_io import PageCache
from aio_ckpt.storage.local import Storage

T = TypeVar("T")
HAS_PLAN_CACHE = hasattr(DefaultSavePlanner, "_cached_metadata")
needs_plan_cache = pytest.mark.skipif(not HAS_PLAN_CACHE, reason="torch 2.7 caches plans in part only")
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable)",
    "ignore:Detected an existing checkpoint",
    "ignore:TypedStorage",
)


def save(state: dict[str, Any], path: Path, **arguments: Any) -> None:
    dcp.save(state, storage_writer=Writer(path, **arguments))


def save_stock(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, checkpoint_id=path)


def load(state: dict[str, Any], path: Path, **arguments: Any) -> dict[str, Any]:
    """What our reader reads into a blank state like ``state``."""
    target = blank(state)
    dcp.load(target, storage_reader=Reader(path, **arguments))
    return target


def load_stock(state: dict[str, Any], path: Path) -> dict[str, Any]:
    target = blank(state)
    dcp.load(target, checkpoint_id=path)
    return target


def names_in(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def assert_holds(path: Path, state: dict[str, Any]) -> None:
    """Both readers find this very state."""
    assert_same_state(load(state, path), state)
    assert_same_state(load_stock(state, path), state)


# -- beside stock ---------------------------------------------------------------------------------


def test_what_our_writer_saves_both_readers_load_bit_for_bit(tmp_path: Path) -> None:
    state = state_of(1)
    save(state, tmp_path / "a")
    assert_holds(tmp_path / "a", state)


def test_what_stock_saves_our_reader_loads_bit_for_bit(tmp_path: Path) -> None:
    state = state_of(2)
    save_stock(state, tmp_path / "a")
    assert_same_state(load(state, tmp_path / "a"), state)


def test_a_step_of_an_engine_is_loaded_and_what_we_save_as_a_step_an_engine_loads(tmp_path: Path) -> None:
    state = state_of(3)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(state, step=1).result()
    assert_same_state(load(state, tmp_path / "step_000000001"), state)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    given = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "x": 1.5}
    save(given, tmp_path / "step_000000002")
    other = torch.nn.Linear(5, 3)
    restored: dict[str, Any] = {"model": other, "optimizer": torch.optim.AdamW(other.parameters()), "x": 0.0}
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.load(restored).step == 2
    assert restored["x"] == 1.5
    assert_same_state(other.state_dict(), given["model"])
    assert restored["optimizer"].state_dict()["state"].keys() == {0, 1}
    assert_same_state(restored["optimizer"].state_dict(), given["optimizer"])


async def test_every_byte_that_our_writer_saves_verifies(tmp_path: Path) -> None:
    from aio_ckpt.checkpoint.verify import verify_checkpoint

    save(state_of(4), tmp_path / "a")
    save(state_of(4, mebibytes=1), tmp_path / "b", _extensions=[Flip()])
    executor = Executor("verify", 2)
    try:
        for name in ("a", "b"):
            faults = await verify_checkpoint(
                Storage(executor), tmp_path / name, executor=executor, readers=2, on_progress=lambda _: None
            )
            assert faults == ()
    finally:
        assert executor.close(TIMEOUT)


def test_values_that_are_no_tensors_come_back_as_stock_gives_them_back(tmp_path: Path) -> None:
    state = {"array": np.arange(5), "file": io.BytesIO(b"abc"), "none": None, "set": {1, 2}, "t": torch.ones(1)}
    save(state, tmp_path / "a")
    target: dict[str, Any] = dict.fromkeys(state, 0) | {"t": torch.zeros(1)}
    dcp.load(target, storage_reader=Reader(tmp_path / "a"))
    assert (target["array"] == state["array"]).all()
    assert (target["file"].getvalue(), target["none"], target["set"]) == (b"abc", None, {1, 2})


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    tensor = torch.rand(1 << 20)
    save({"a": tensor, "b": tensor, "c": tensor[:100]}, tmp_path / "a")
    (data,) = (tmp_path / "a").glob("*.distcp")
    assert data.stat().st_size < 1.1 * tensor.nbytes
    assert_holds(tmp_path / "a", {"a": tensor, "b": tensor.clone(), "c": tensor[:100]})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_a_tensor_that_only_torch_save_knows_is_stored_as_stock_stores_it(tmp_path: Path) -> None:
    state = {"q": torch.quantize_per_tensor(torch.arange(6.0), 0.5, 1, torch.qint8), "t": torch.ones(2)}
    target = {"q": torch.quantize_per_tensor(torch.zeros(6), 0.5, 1, torch.qint8), "t": torch.zeros(2)}
    for path, write in ((tmp_path / "a", save), (tmp_path / "b", save_stock)):
        write(state, path)
        dcp.load(target, storage_reader=Reader(path))
        assert torch.equal(target["q"].int_repr(), state["q"].int_repr())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_lazy_conjugates_and_negatives_are_read_as_stock_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    pair = torch.view_as_complex(torch.arange(80.0).view(8, 5, 2) - 30)
    save_stock({"conj": pair.conj(), "imag": pair.conj().imag, "neg": torch._neg_view(pair).mH}, tmp_path / "a")
    shapes = {"conj": (8, 5), "imag": (8, 5), "neg": (5, 8)}
    wanted, found = ({name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()} for _ in "ab")
    dcp.load(wanted, checkpoint_id=tmp_path / "a")
    dcp.load(found, storage_reader=Reader(tmp_path / "a"))
    assert_same_state(found, wanted)


def test_a_target_of_another_dtype_is_converted_as_stock_does(tmp_path: Path) -> None:
    save({"w": torch.arange(10.0)}, tmp_path / "a")
    target = {"w": torch.zeros(10, dtype=torch.float64)}
    dcp.load(target, storage_reader=Reader(tmp_path / "a"))
    assert target["w"].tolist() == list(range(10))


def test_a_state_without_a_template_is_loaded_as_stock_does(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    state = state_of(5)
    save(state, tmp_path / "a")
    found = _load_state_dict_from_keys(storage_reader=Reader(tmp_path / "a"))
    assert_same_state(found, _load_state_dict_from_keys(checkpoint_id=tmp_path / "a"))
    assert_same_state(found["model"], state["model"])


# -- planners -------------------------------------------------------------------------------------


class Halving(DefaultSavePlanner):
    """Makes another tensor of each, as planners that cast do."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data / 2 if isinstance(data, torch.Tensor) and data.is_floating_point() else data


class Replacing(DefaultLoadPlanner):
    """Gives fresh memory and puts it in place when told that it is filled."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn].copy_(tensor)


def test_planners_that_transform_are_asked_as_by_stock(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0), "b": torch.arange(4)}
    dcp.save(state, storage_writer=Writer(tmp_path / "a"), planner=Halving())
    target = blank(state)
    dcp.load(target, storage_reader=Reader(tmp_path / "a"), planner=Replacing())
    assert_same_state(target, {"a": state["a"] / 2, "b": state["b"]})


@pytest.fixture
def plan_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP's plan cache, empty."""
    for cache in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        monkeypatch.setattr(dcp.SavePlanner, f"_cached_{cache}", {})


@needs_plan_cache
@pytest.mark.usefixtures("plan_cache")
def test_with_dcps_plan_cache_every_save_has_its_own_values_and_files(tmp_path: Path) -> None:
    state = state_of(0, mebibytes=1)
    for seed in (1, 2, 3):
        state = state_of(seed, mebibytes=1)
        dcp.save(state, storage_writer=Writer(tmp_path / "a"), planner=DefaultSavePlanner(enable_plan_caching=True))
        assert_holds(tmp_path / "a", state)
    dcp.save(state, storage_writer=Writer(tmp_path / "b"), planner=DefaultSavePlanner(enable_plan_caching=True))
    assert_holds(tmp_path / "b", state)
    assert len(names_in(tmp_path / "a")) == 4
    changed = {**state, "lr": torch.ones(2)}
    dcp.save(changed, storage_writer=Writer(tmp_path / "a"), planner=DefaultSavePlanner(enable_plan_caching=True))
    assert_holds(tmp_path / "a", changed)


@needs_plan_cache
@pytest.mark.usefixtures("plan_cache")
@pytest.mark.parametrize("first", ["stock", "ours"])
def test_with_dcps_plan_cache_stock_and_ours_save_by_turns(tmp_path: Path, first: str) -> None:
    for seed in range(4):
        state, path, is_ours = state_of(seed, mebibytes=1), tmp_path / f"{seed}", (seed % 2 == 0) is (first == "ours")
        writer = Writer(path) if is_ours else dcp.FileSystemWriter(path)
        dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
        assert_holds(path, state)


def test_a_plan_of_stock_in_the_cache_that_is_not_of_all_ranks_commits_nothing() -> None:
    check_parts([RankSave("id", rank, 2, 0) for rank in range(2)])
    for parts in ([RankSave("id", 1, 2, 0)], [RankSave("id", 0, 2, 0)]):
        with pytest.raises(PlanChangedError, match="leave enable_plan_caching=True out"):
            check_parts(parts)


@needs_plan_cache
@pytest.mark.usefixtures("plan_cache")
def test_with_dcps_plan_cache_a_writer_works_again_behind_a_save_that_failed(
    storage: GatedStorage, tmp_path: Path
) -> None:
    writer = Writer(tmp_path / "a", storage=storage)
    storage.fail("create_data_file", "*.distcp", WriteError(errno.ENOSPC, "full", "x"))
    for seed, path in ((0, "a"), (1, "a"), (2, "a"), (3, "b")):
        state = state_of(seed, mebibytes=1)

        def save_again(state: dict[str, Any] = state, path: str = path) -> None:
            planner = DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(state, checkpoint_id=tmp_path / path, storage_writer=writer, planner=planner)

        if seed == 0:
            assert isinstance(failure_of(save_again), WriteError)
        else:
            save_again()
            assert_holds(tmp_path / path, state)


# -- arguments and resources --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Writer, Reader, lambda _, **given: AsyncStager(**given)])
def test_arguments_of_another_type_are_refused(make: Callable[..., object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config="):
        make(tmp_path, config={"workers": 2})


@pytest.mark.parametrize("make", [Writer, Reader])
def test_a_storage_of_another_type_is_refused(make: Callable[..., object], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="storage="):
        make(tmp_path, storage=tmp_path)


@pytest.mark.parametrize("path", [None, 5, b"x", 1.5, [], "", "a\0b", "\ud800"])
@pytest.mark.parametrize("make", [Writer, Reader])
def test_a_value_that_is_no_path_is_refused(make: Callable[[Any], object], path: Any) -> None:
    with pytest.raises(RootError):
        make(path)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"serialization_format": "safetensors"}, "serialization_format=safetensors"),
        ({"_extensions": 5}, "_extensions="),
        ({"thread_count": 0}, "thread_count=0.*workers"),
    ],
)
def test_arguments_of_stock_that_the_writer_does_not_support_are_refused(
    given: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=named):
        Writer(tmp_path, **given)


def test_an_extension_registry_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="_extension_registry=5"):
        Reader(tmp_path, _extension_registry=5)


def test_a_sparse_tensor_is_refused_by_name(tmp_path: Path) -> None:
    error = failure_of(lambda: save({"w": torch.eye(3).to_sparse()}, tmp_path / "a"))
    assert isinstance(error, UnsupportedLeafError)
    assert "'w'" in str(error)
    state = {"w": torch.eye(3)}
    save(state, tmp_path / "a")
    target = {"w": torch.eye(3).to_sparse()}
    error = failure_of(lambda: dcp.load(target, storage_reader=Reader(tmp_path / "a")))
    assert isinstance(error, TemplateMismatchError)


def test_overwrite_takes_a_bool_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="overwrite="):
        Writer(tmp_path, overwrite="no")  # type: ignore[arg-type]


def test_resources_close_behind_the_call_that_runs(tmp_path: Path) -> None:
    with Reader(tmp_path) as reader, reader._running() as resources:
        reader.close()
        assert not resources.portal.is_closed
    assert resources.portal.is_closed


def test_threads_of_a_writer_have_a_lower_priority_than_the_trainers(tmp_path: Path) -> None:
    resources = CallResources.open(EngineConfig(thread_nice=7), None)
    try:
        nice = resources.portal.executor.submit(os.getpriority, os.PRIO_PROCESS, 0).result(TIMEOUT)
    finally:
        resources.close()
    assert nice == max(os.getpriority(os.PRIO_PROCESS, 0), 7)


# -- extensions -----------------------------------------------------------------------------------


def registry() -> Any:
    from torch.distributed.checkpoint._extension import ExtensionRegistry

    made = ExtensionRegistry()
    made.register(Flip)
    return made


@pytest.mark.sampled
@pytest.mark.parametrize("is_ours", [True, False])
def test_what_went_through_extensions_is_read_by_both(tmp_path: Path, is_ours: bool) -> None:
    state, path = state_of(6, mebibytes=1), tmp_path / "a"
    made = Writer if is_ours else dcp.FileSystemWriter
    dcp.save(state, storage_writer=made(path, _extensions=[Flip(), Flip(), Flip()]))
    places = dcp.FileSystemReader(path).read_metadata().storage_data.values()
    assert {tuple(place.transform_descriptors) for place in places} == {("stream.flip/1",) * 3}
    for reader in (Reader, dcp.FileSystemReader):
        target = blank(state)
        dcp.load(target, storage_reader=reader(path, registry()))
        assert_same_state(target, state)
    with pytest.raises(dcp.api.CheckpointException, match="Unknown extension"):
        load(state, path)


def test_a_flipped_bit_behind_an_extension_is_found(tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0)}
    save(state, tmp_path / "a", _extensions=[Flip()])
    damage(tmp_path / "a", -3000)
    assert isinstance(failure_of(lambda: load(state, tmp_path / "a", _extension_registry=registry())), Exception)


# -- one directory, many saves --------------------------------------------------------------------


def test_the_old_checkpoint_goes_and_foreign_files_stay(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep"
    save(state_of(1), path)
    (path / "notes.txt").write_bytes(b"mine")
    (path / "__9_0.distcp").write_bytes(b"somebody's")
    before = names_in(path)
    save(state_of(2), path)
    assert_holds(path, state_of(2))
    assert names_in(path) & before == {".metadata", "notes.txt", "__9_0.distcp"}
    assert len(names_in(path)) == len(before)


def test_overwrite_false_keeps_the_checkpoint(tmp_path: Path) -> None:
    save(state_of(1), tmp_path / "a", overwrite=False)
    before = names_in(tmp_path / "a")
    error = failure_of(lambda: save(state_of(2), tmp_path / "a", overwrite=False))
    assert isinstance(error, CheckpointExistsError)
    assert isinstance(error, RuntimeError)
    assert names_in(tmp_path / "a") == before
    assert_holds(tmp_path / "a", state_of(1))


def test_ours_and_stock_replace_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a"
    save_stock(state_of(1), path)
    save(state_of(2), path)
    assert_holds(path, state_of(2))
    save_stock(state_of(3), path)
    assert_holds(path, state_of(3))
    save(state_of(4), path)
    assert_holds(path, state_of(4))


def test_one_writer_saves_again_and_again_also_to_other_places(tmp_path: Path) -> None:
    with Writer(tmp_path / "a") as writer:
        for seed in (1, 2):
            dcp.save(state_of(seed), storage_writer=writer)
            assert_holds(tmp_path / "a", state_of(seed))
        dcp.save(state_of(3), storage_writer=writer, checkpoint_id=tmp_path / "b")
    dcp.save(state_of(4), storage_writer=writer, checkpoint_id=str(tmp_path / "c"))
    assert_holds(tmp_path / "a", state_of(2))
    assert_holds(tmp_path / "b", state_of(3))
    assert_holds(tmp_path / "c", state_of(4))


# -- what fails -----------------------------------------------------------------------------------


def failure_of(act: Callable[[], object]) -> BaseException:
    """The error of the only rank."""
    with pytest.raises(dcp.api.CheckpointException) as caught:
        act()
    ((error, _),) = caught.value.failures.values()
    return error


FAILING = {
    "mark": ("write_file", "aio_ckpt.pending-*"),
    "data": ("write", "__*.distcp"),
    "fdatasync": ("sync", "__*.distcp"),
    "rank manifest": ("write_file", "aio_ckpt.*.0.bin"),
    "directory": ("sync_dir", "a"),
    "root manifest": ("write_file", "aio_ckpt.*.json"),
    "metadata": ("write_file", ".metadata.tmp-*"),
    "visible": ("replace", ".metadata.tmp-*"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("where", FAILING)
def test_a_full_disk_fails_the_save_with_errno_and_path_and_keeps_the_old_checkpoint(
    storage: GatedStorage, tmp_path: Path, where: str
) -> None:
    path = tmp_path / "a"
    save(state_of(1), path)
    before = names_in(path)
    storage.fail(*FAILING[where], WriteError(errno.ENOSPC, "full", f"{path}/x"))
    error = failure_of(lambda: save(state_of(2), path, storage=storage))
    assert isinstance(error, WriteError)
    assert (error.errno, error.filename) == (errno.ENOSPC, f"{path}/x")
    assert_holds(path, state_of(1))
    save(state_of(3), path, storage=storage)
    assert_holds(path, state_of(3))
    assert len(names_in(path)) == len(before)


def test_a_failed_first_save_leaves_no_checkpoint_and_the_next_one_clears_up(
    storage: GatedStorage, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    storage.fail("write_file", ".metadata.tmp-*", WriteError(errno.EIO, "broken", "x"))
    failure_of(lambda: save(state_of(1), path, storage=storage))
    assert names_in(path) == set()
    storage.fail("write_file", "aio_ckpt.*.0.bin", WriteError(errno.EIO, "broken", "x"))
    failure_of(lambda: save(state_of(1), path, storage=storage))
    assert isinstance(failure_of(lambda: load(state_of(1), path)), CheckpointNotFoundError)
    save(state_of(2), path, storage=storage)
    assert len(names_in(path)) == 4


def test_a_file_that_cannot_be_removed_after_the_commit_fails_no_save(storage: GatedStorage, tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(state_of(1), path)
    storage.fail("remove_file", "*.distcp", WriteError(errno.EIO, "broken", "x"))
    save(state_of(2), path, storage=storage)
    assert_holds(path, state_of(2))
    save(state_of(3), path, storage=storage)
    assert len(names_in(path)) == 4


def test_an_error_after_the_last_rename_says_that_the_new_checkpoint_may_stand(
    storage: GatedStorage, tmp_path: Path
) -> None:
    path = tmp_path / "top" / "a"
    save(state_of(1), path)
    gate = storage.hold("replace", ".metadata.tmp-*")
    first = dcp.async_save(state_of(2), storage_writer=Writer(path, storage=storage))
    gate.wait_reached()
    storage.fail("sync_dir", "a", WriteError(errno.EIO, "broken", "x"))
    gate.open()
    error = failure_of(lambda: first.result(TIMEOUT))
    assert isinstance(error, WriteError)
    assert error.in_doubt
    assert_holds(path, state_of(2))
    storage.fail("replace", ".metadata.tmp-*", WriteError(errno.EIO, "broken", "x"))
    error = failure_of(lambda: save(state_of(3), path, storage=storage))
    assert isinstance(error, WriteError)
    assert not error.in_doubt
    assert_holds(path, state_of(2))


def test_of_two_saves_at_once_into_one_directory_the_first_fails_and_nothing_mixes(
    storage: GatedStorage, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    gate = storage.hold("write_file", "aio_ckpt.*.0.bin")
    first = dcp.async_save(state_of(1), storage_writer=Writer(path, storage=storage))
    gate.wait_reached()
    save(state_of(2), path)
    gate.open()
    with pytest.raises(dcp.api.CheckpointException, match="another save"):
        first.result(TIMEOUT)
    assert_holds(path, state_of(2))
    save(state_of(3), path)
    assert_holds(path, state_of(3))


def test_a_disk_that_hangs_ends_in_a_stall_error(storage: GatedStorage, tmp_path: Path) -> None:
    path = tmp_path / "a"
    save(state_of(1), path)
    config = EngineConfig(stall_timeout_secs=0.2)
    storage.hold("write")
    error = failure_of(lambda: save(state_of(2), path, storage=storage, config=config))
    assert isinstance(error, StallError)
    storage.open_gates()
    assert_holds(path, state_of(1))


def test_a_save_larger_than_its_window_goes_in_waves_and_a_failure_in_it_is_the_writers(
    storage: GatedStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aio_ckpt.dcp.call_resources.chunk_bytes_for", lambda _: 4 << 20)
    state, path = state_of(1, mebibytes=33), tmp_path / "a"
    dcp.save(state, storage_writer=Writer(path, thread_count=1))
    assert_holds(path, state)
    storage.fail("write", "__*.distcp", WriteError(errno.ENOSPC, "full", "x"))
    error = failure_of(lambda: save(state_of(2, mebibytes=33), path, storage=storage, thread_count=1))
    assert isinstance(error, WriteError)
    assert re.search(r"full: this save needs 34\.\d MB, .* are free on its file system.*; free space, or", str(error))
    assert_holds(path, state)


def test_a_tensor_whose_memory_was_freed_is_named(tmp_path: Path) -> None:
    state = {"kept": torch.ones(3), "gone": torch.ones(8)}
    state["gone"].untyped_storage().resize_(0)
    assert "'gone'" in str(failure_of(lambda: save(state, tmp_path / "a")))


def test_a_planner_that_changes_shapes_is_refused(tmp_path: Path) -> None:
    class Cutting(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item)[1:]

    error = failure_of(lambda: dcp.save({"a": torch.ones(4)}, storage_writer=Writer(tmp_path / "a"), planner=Cutting()))
    assert isinstance(error, PlanChangedError)


def test_errors_name_what_a_writer_or_reader_does_not_support_or_find(tmp_path: Path) -> None:
    if hasattr(filesystem, "SerializationFormat"):
        with pytest.raises(ConfigError, match="HuggingFace"):
            Writer(tmp_path, serialization_format=filesystem.SerializationFormat.SAFETENSORS)
    with pytest.raises(ConfigError, match="use_collectives"):
        Writer(tmp_path / "a").set_up_storage_writer(True, rank=0, use_collectives=False)
    (tmp_path / "file").touch()
    assert isinstance(failure_of(lambda: save({"a": torch.ones(1)}, tmp_path / "file")), WriteError)
    with pytest.raises(CheckpointNotFoundError, match="the directory does not exist"):
        Reader(tmp_path / "nowhere").read_metadata()
    save({"a": torch.ones(1)}, tmp_path / "root" / "step_000000007")
    with pytest.raises(CheckpointNotFoundError, match=r"it is a root; give one of its steps, such as .*000000007"):
        Reader(tmp_path / "root").read_metadata()


@needs_stagers  # the same torch has both
def test_a_checkpoint_that_each_rank_saved_for_itself_is_read(tmp_path: Path) -> None:
    state = state_of(7)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "a"), use_collectives=False)
    assert names_in(tmp_path / "a") == {"__0.metadata", "__0_0.distcp"}
    assert_same_state(load(state, tmp_path / "a"), state)


# -- damage ---------------------------------------------------------------------------------------


def damage(path: Path, at: int) -> None:
    (data,) = path.glob("*.distcp")
    raw = bytearray(data.read_bytes())
    raw[at] ^= 1
    data.write_bytes(raw)


@pytest.mark.parametrize("write", [save, save_stock])
def test_a_flipped_bit_is_found_and_named(tmp_path: Path, write: Callable[[dict[str, Any], Path], None]) -> None:
    state = {"w": torch.rand(1 << 19)}
    write(state, tmp_path / "a")
    damage(tmp_path / "a", 1 << 20)
    error = failure_of(lambda: load(state, tmp_path / "a"))
    assert isinstance(error, CorruptCheckpointError)
    for part in (f"{tmp_path / 'a'}: ", "'w'", ".distcp"):
        assert part in str(error)
    load(state, tmp_path / "a", config=EngineConfig(verify="never"))


@pytest.mark.parametrize("victim", [".metadata", "aio_ckpt.*.json", "aio_ckpt.*.bin"])
def test_a_changed_small_file_is_named(tmp_path: Path, victim: str) -> None:
    save({"w": torch.rand(10)}, tmp_path / "a")
    (file,) = (tmp_path / "a").glob(victim)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=rf"{tmp_path}/a.*{re.escape(file.name)}"):
        Reader(tmp_path / "a").read_metadata()
    error = failure_of(lambda: load({"w": torch.rand(10)}, tmp_path / "a"))
    assert isinstance(error, CorruptCheckpointError)
    assert file.name in str(error)


def test_the_root_of_an_engine_is_no_place_for_a_checkpoint(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(state_of(1), step=1).result(TIMEOUT)
    error = failure_of(lambda: save(state_of(1), tmp_path))
    assert isinstance(error, WriteError)
    assert "is the root of an engine" in str(error)
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.steps() == [1]


def test_a_file_in_place_of_a_checkpoint_is_named_with_the_remedy_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_text("mine")
    error = failure_of(lambda: save(state_of(1), path))
    assert isinstance(error, WriteError)
    assert "is a file, and a checkpoint is a directory: move it away" in str(error)
    error = failure_of(lambda: dcp.load(state_of(0), storage_reader=Reader(path)))
    assert isinstance(error, CheckpointNotFoundError)
    assert "let torch.load or safetensors read the file" in str(error)
    assert path.read_text() == "mine"


def test_a_missing_or_short_data_file_is_named(tmp_path: Path) -> None:
    state = {"w": torch.rand(1000)}
    save(state, tmp_path / "a")
    (data,) = (tmp_path / "a").glob("*.distcp")
    os.truncate(data, 4096)
    assert data.name in str(failure_of(lambda: load(state, tmp_path / "a")))
    data.unlink()
    error = failure_of(lambda: load(state, tmp_path / "a"))
    assert isinstance(error, CorruptCheckpointError)
    assert data.name in str(error)


class CountingStorage(Storage):
    """Counts the bytes that are read from data files."""

    read_bytes = 0

    async def open_data_file(self, path: Path, *, page_cache: PageCache = "pass") -> ReadFile:
        file = await super().open_data_file(path, page_cache=page_cache)
        read_into = file.read_into

        async def counted(offset: int, *views: memoryview) -> int:
            self.read_bytes += sum(view.nbytes for view in views)
            return await read_into(offset, *views)

        file.read_into = counted  # type: ignore[method-assign]
        return file


def test_a_load_reads_the_wanted_tensors_only(tmp_path: Path) -> None:
    save({name: torch.rand(1 << 20) for name in "abcdef"}, tmp_path / "a")
    executor = Executor("count", 4)
    try:
        storage = CountingStorage(executor)
        dcp.load({"c": torch.zeros(1 << 20)}, storage_reader=Reader(tmp_path / "a", storage=storage))
        assert 4 << 20 <= storage.read_bytes <= 1.05 * (4 << 20)
    finally:
        assert executor.close(TIMEOUT)


class OvertakenStorage(Storage):
    """Another save begins in the directory when a rank's manifest was written."""

    async def write_file(self, path: Path, *parts: bytes) -> None:
        await super().write_file(path, *parts)
        if path.suffix == ".bin":
            for mark in path.parent.glob("aio_ckpt.pending-*"):
                mark.unlink()


def test_a_save_that_is_overtaken_leaves_nothing_behind(tmp_path: Path) -> None:
    executor = Executor("overtaken", 4)
    try:
        error = failure_of(
            lambda: dcp.save(
                {"w": torch.ones(1 << 20)}, storage_writer=Writer(tmp_path / "a", storage=OvertakenStorage(executor))
            )
        )
        assert "another save into this directory has begun" in str(error)
        assert [path.name for path in (tmp_path / "a").iterdir()] == []
    finally:
        assert executor.close(TIMEOUT)


def test_two_threads_that_use_a_new_writer_at_once_share_its_resources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []
    both = threading.Barrier(2)
    open_resources = call_resources.CallResources.open

    def slow(*given: Any) -> object:
        opened.append(open_resources(*given))
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)  # where the other one opens a second, they meet here
        return opened[-1]

    monkeypatch.setattr(call_resources.CallResources, "open", slow)
    writer = Writer(tmp_path / "a")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: writer._keep(), range(2)))
    writer.close()
    assert len(opened) == 1


# -- deaths ---------------------------------------------------------------------------------------


class DyingStorage(GatedStorage):
    """Ends, for good, before its call number ``lives``: with its process, or with every further call."""

    lives = 0
    kills = False

    async def run(self, call: Call, act: Callable[[], Awaitable[T]]) -> T | None:
        if self.lives == 0:
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise WriteError(errno.EIO, "the process is dead", str(call.path))
        self.lives -= 1
        return await super().run(call, act)


SAVE = [
    "write_file",  # its mark
    "create_data_file",
    "write",
    "sync",
    "write_file",  # the rank's manifest
    "sync_dir",
    "write_file",
    "write_file",
    "sync_dir",
    "replace",  # .metadata: from here on it is the new checkpoint
    "sync_dir",
    *["remove_file"] * 4,
]
COMMITTED = SAVE.index("replace")


def check_mended(path: Path, lives: int) -> None:
    """Our reader and stock find the one or the other at once; the next save leaves nothing behind."""
    wanted = state_of(2 if lives > COMMITTED else 1, mebibytes=1)
    assert_same_state(load(wanted, path), wanted)
    assert_holds(path, wanted)
    save(state_of(3, mebibytes=1), path)
    assert_holds(path, state_of(3, mebibytes=1))
    assert len(names_in(path)) == 4


def test_a_save_calls_the_storage_in_this_order(storage: GatedStorage, tmp_path: Path) -> None:
    save(state_of(1, mebibytes=1), tmp_path / "a")
    save(state_of(2, mebibytes=1), tmp_path / "a", storage=storage)
    assert [call.name for call in storage.calls] == SAVE


@pytest.mark.sampled
@pytest.mark.parametrize("lives", range(0, len(SAVE), gate_stride(2)))
def test_a_save_that_dies_before_any_of_its_calls_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, lives: int
) -> None:
    path = tmp_path / "a"
    save(state_of(1, mebibytes=1), path)
    executor = Executor("dying", 6)
    try:
        storage = DyingStorage(executor)
        storage.lives = lives
        if lives < len(SAVE) - 4:
            failure_of(lambda: save(state_of(2, mebibytes=1), path, storage=storage))
        else:
            save(state_of(2, mebibytes=1), path, storage=storage)
    finally:
        assert executor.close(TIMEOUT)
    check_mended(path, lives)


def save_and_die(rank: int, count: int, path: Path, lives: int) -> None:
    storage = DyingStorage(Executor("dying", 6))
    storage.lives, storage.kills = lives, True
    dcp.save(state_of(2, mebibytes=1), storage_writer=Writer(path, storage=storage))


@pytest.mark.sampled
@pytest.mark.parametrize("lives", [3, slow(9), COMMITTED, COMMITTED + 4])
def test_kill_9_in_the_middle_leaves_the_old_checkpoint_or_the_new_one(tmp_path: Path, lives: int) -> None:
    save(state_of(1, mebibytes=1), tmp_path / "a")
    with ranks(1) as running:
        running.start(0, save_and_die, tmp_path / "a", lives)
        running.processes[0].wait(TIMEOUT)
        assert running.processes[0].returncode == -signal.SIGKILL
    check_mended(tmp_path / "a", lives)


# -- lifetimes ------------------------------------------------------------------------------------


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_saves_and_loads_leave_no_thread_and_no_file_open(tmp_path: Path) -> None:
    state = {"w": torch.rand(1000), "x": 1}

    def turn() -> None:
        save(state, tmp_path / "a")
        load(state, tmp_path / "a")

    turn()
    before = threading.active_count(), open_files()
    for _ in range(5):
        turn()
    assert (threading.active_count(), open_files()) == before


def test_inside_with_threads_are_kept_and_afterwards_they_are_gone(tmp_path: Path) -> None:
    before = threading.active_count()
    with Writer(tmp_path / "a") as writer, Reader(tmp_path / "a") as reader:
        dcp.save({"w": torch.ones(3)}, storage_writer=writer)
        kept = threading.active_count()
        assert kept > before
        for _ in range(3):
            dcp.save({"w": torch.ones(3)}, storage_writer=writer)
            dcp.load({"w": torch.zeros(3)}, storage_reader=reader)
        assert threading.active_count() == kept
    assert threading.active_count() == before
    writer.close()


def test_a_failed_save_leaves_no_thread_and_no_file_open(storage: GatedStorage, tmp_path: Path) -> None:
    save({"w": torch.rand(1000)}, tmp_path / "a")
    before = threading.active_count(), open_files()
    for name, where in FAILING.values():
        storage.fail(name, where, WriteError(errno.ENOSPC, "full", "x"))
        failure_of(lambda: save({"w": torch.rand(1000)}, tmp_path / "a", storage=storage))
    assert (threading.active_count(), open_files()) == before


def test_a_writer_and_a_reader_can_be_sent_to_another_process(tmp_path: Path) -> None:
    with Writer(tmp_path / "a") as writer, Reader(tmp_path / "a") as reader:
        dcp.save({"w": torch.ones(3)}, storage_writer=pickle.loads(pickle.dumps(writer)))
        dcp.load(found := {"w": torch.zeros(3)}, storage_reader=pickle.loads(pickle.dumps(reader)))
    assert torch.equal(found["w"], torch.ones(3))


def save_in_a_fork(rank: int, count: int, path: Path) -> str:
    """In a child of fork: what a save by a writer that its parent keeps raises, and one by a new writer."""
    dist.destroy_process_group()  # whose threads no fork has
    with Writer(path) as kept, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
        reader, writer = os.pipe()
        if os.fork() == 0:
            failed = [
                type(_error_of(lambda each=each: dcp.save({"w": torch.ones(3)}, storage_writer=each))).__name__
                for each in (kept, Writer(path))
            ]
            os.write(writer, " ".join(failed).encode())
            os._exit(0)
        os.close(writer)
        with open(reader) as answer:
            return answer.read()


def _error_of(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except BaseException as error:  # noqa: BLE001 - of any kind: it is told by name
        return error
    return None


def test_a_fork_saves_with_threads_of_its_own_also_by_a_writer_that_its_parent_keeps(tmp_path: Path) -> None:
    with ranks(1) as running:
        assert running.run(save_in_a_fork, tmp_path / "a") == ["NoneType NoneType"]
    assert (tmp_path / "a" / ".metadata").exists()
