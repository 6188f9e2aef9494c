"""``install`` and ``default``: unchanged calls of DCP, what they leave to stock, and what an uninstall restores."""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from child_python import child_environment
from dcp_states import assert_same_state, blank, needs_stagers, state_of
from gated_storage import TIMEOUT
from rank_processes import Ranks, ranks
from saved_files import ROOT_MANIFEST, without_save_id
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from warm_python import run_warm

from aio_ckpt import EngineConfig, _torch
from aio_ckpt.config import LEAST_BUDGET_BYTES
from aio_ckpt.dcp import Installation, Reader, Writer, default, drop_in, install
from aio_ckpt.errors import ConfigError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable)",
    "ignore:TypedStorage",
    "ignore:Detected an existing checkpoint",
)
needs_local_saves = pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters, reason="this torch has no use_collectives"
)


def is_ours(path: Path) -> bool:
    """Whether our writer saved into ``path``, and ended its save."""
    return {ROOT_MANIFEST, ".metadata"} <= set(map(without_save_id, os.listdir(path))) and not list(
        path.glob("*.pending-*")
    )


def saved_async(state: dict[str, Any], path: Path, **given: Any) -> None:
    """``dcp.async_save``, awaited; torch gives a future, or two of them."""
    saving = dcp.async_save(state, checkpoint_id=path, **given)
    getattr(saving, "upload_completion", saving).result(TIMEOUT)


def loaded(state: dict[str, Any], path: Path, **given: Any) -> dict[str, Any]:
    target = blank(state)
    dcp.load(target, checkpoint_id=path, **given)
    return target


def names_of_torch() -> dict[str, Any]:
    """All that stands in the modules that DCP makes its objects through."""
    modules = {place.module for place in _torch.dcp_globals(package=True)}
    return {f"{module.__name__}.{name}": value for module in modules for name, value in vars(module).items()}


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Whatever a test did, torch is as before, and no thread of ours is left."""
    before, threads = names_of_torch(), threading.active_count()
    yield
    after = names_of_torch()
    assert {name for name in before if after[name] is not before[name]} == set()
    for thread in threading.enumerate():  # DCP's own end behind their futures
        if thread.name.startswith(("AsyncCheckpoint", "ThreadPoolExecutor")):
            thread.join(TIMEOUT)
    assert threading.active_count() <= threads


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "aio_ckpt"]


# -- what goes through us ---------------------------------------------------------------------------


def test_unchanged_calls_are_served_by_our_classes_and_read_by_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with default():
        dcp.save(state_of(1), checkpoint_id=tmp_path / "a")
        saved_async(state_of(2), tmp_path / "b")
        dcp.save(state_of(3), checkpoint_id=str(tmp_path / "b"))
        assert_same_state(loaded(state_of(1), tmp_path / "a"), state_of(1))
        assert_same_state(loaded(state_of(3), tmp_path / "b"), state_of(3))
    assert is_ours(tmp_path / "a")
    assert is_ours(tmp_path / "b")
    assert_same_state(loaded(state_of(3), tmp_path / "b"), state_of(3))
    assert warned(caplog) == []


def test_an_installed_load_finds_a_flipped_bit(tmp_path: Path) -> None:
    with default():
        dcp.save(state_of(1), checkpoint_id=tmp_path)
        (data,) = tmp_path.glob("*.distcp")
        with open(data, "r+b") as file:
            file.seek(1 << 20)
            [byte] = file.read(1)
            file.seek(1 << 20)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(dcp.api.CheckpointException, match=data.name):
            loaded(state_of(1), tmp_path)


def test_what_changes_after_async_save_returned_is_not_saved(tmp_path: Path) -> None:
    state = {"w": torch.ones(1 << 18), "turned": torch.arange(6.0).reshape(2, 3).t()}
    with default():
        saving = dcp.async_save(state, checkpoint_id=tmp_path)
        state["w"].zero_()
        saving.result(TIMEOUT)
        assert_same_state(loaded(state, tmp_path), {"w": torch.ones(1 << 18), "turned": state["turned"]})


def test_a_save_whose_future_nobody_asks_logs_its_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with default():
        futures.wait([dcp.async_save(state_of(1), checkpoint_id=tmp_path / "file")])
    (line,) = [line for line in warned(caplog) if "failed" in line]
    assert line.startswith(f"the save into {tmp_path / 'file'} failed: WriteError: ")


def test_a_relative_path_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, reset = threading.Event(), threading.Event(), Writer.reset

    def held(self: Writer, checkpoint_id: Any = None) -> None:
        begun.set()
        assert go.wait(TIMEOUT)
        reset(self, checkpoint_id)

    monkeypatch.setattr(Writer, "reset", held)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with default():
        saving = dcp.async_save(state_of(1), checkpoint_id="a")
        assert begun.wait(TIMEOUT)
        monkeypatch.chdir(tmp_path / "other")
        go.set()
        saving.result(TIMEOUT)
    assert_same_state(loaded(state_of(1), tmp_path / "a"), state_of(1))


def test_all_calls_of_a_process_share_threads_and_one_arena(tmp_path: Path) -> None:
    of_tests_before = {thread.name for thread in threading.enumerate()}  # on a loaded machine some still end
    with default() as handle:
        loops = set()
        for seed in range(3):
            saved_async(state_of(seed), tmp_path / "async")
            dcp.save(state_of(seed), checkpoint_id=tmp_path / "now")
            loaded(state_of(seed), tmp_path / "now")
            loops |= {thread.name for thread in threading.enumerate() if thread.name.endswith("-loop")}
            for thread in threading.enumerate():
                if thread.name.startswith("AsyncCheckpoint"):
                    thread.join(TIMEOUT)
            gc.collect()
        assert len(loops - of_tests_before) == 1
        assert [manager.stats.arenas for manager in managers(handle)] == [1, 1]


def managers(handle: Installation) -> list[Any]:
    resources = handle._resources.begin_use(handle)
    resources.portal.call(nothing, timeout=TIMEOUT)  # what was posted is done
    handle._resources.end_use(handle)
    return [resources.window, resources.staging]


async def nothing() -> None: ...


def test_the_config_of_install_is_that_of_the_writer(tmp_path: Path) -> None:
    with default(EngineConfig(step_dir="step-{step}")):
        dcp.save(state_of(1), checkpoint_id=tmp_path / "step-7")
    with Reader(tmp_path / "step-7") as reader:
        reader.read_metadata()
        assert reader._checkpoint is not None
        assert reader._checkpoint.step == 7


# -- the classes of the package ---------------------------------------------------------------------


def test_package_replaces_the_classes_that_callers_make_themselves(tmp_path: Path) -> None:
    with default(package=True):
        writer, reader = dcp.FileSystemWriter(tmp_path / "a", thread_count=2), dcp.FileSystemReader(path=tmp_path / "a")
        dcp.save(state_of(1), storage_writer=writer)
        target = blank(state_of(1))
        dcp.load(target, storage_reader=reader)
        assert_same_state(target, state_of(1))
        assert isinstance(writer, Writer)
        assert isinstance(reader, Reader)
        assert isinstance(writer, dcp.FileSystemWriter)
        assert not isinstance(writer, dcp.FileSystemReader)
        saving = dcp.async_save(state_of(2), storage_writer=writer)
        saving.result(TIMEOUT)
    assert is_ours(tmp_path / "a")
    assert dcp.FileSystemWriter is FileSystemWriter


def test_without_package_the_classes_of_the_package_are_stocks() -> None:
    with default():
        assert dcp.FileSystemWriter is FileSystemWriter
        assert dcp.FileSystemReader is FileSystemReader


def test_a_class_that_is_derived_meanwhile_derives_from_stocks(tmp_path: Path) -> None:
    with default(package=True):

        class Own(dcp.FileSystemWriter):  # type: ignore[misc]
            """What Megatron, NVRx and others do when they are imported."""

        assert Own.__mro__[1] is FileSystemWriter
        assert issubclass(Own, dcp.FileSystemWriter)
        assert dcp.FileSystemWriter | None == FileSystemWriter | None
        assert None | dcp.FileSystemWriter == FileSystemWriter | None
        dcp.save(state_of(1), storage_writer=Own(tmp_path))
    assert not is_ours(tmp_path)


# -- what stays with stock --------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:fsync not supported for this stream")
def test_saves_and_loads_of_urls_are_stocks(caplog: pytest.LogCaptureFixture) -> None:
    url = f"memory://{os.getpid()}/drop-in"
    with default(package=True):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=url)
        saved_async({"w": torch.ones(3)}, url)  # type: ignore[arg-type]
        target = {"w": torch.zeros(3)}
        dcp.load(target, checkpoint_id=url)
        assert type(dcp.FileSystemWriter("hf://org/step-1")) is FileSystemWriter
        assert type(dcp.FileSystemReader("hf://org/step-1")) is FileSystemReader
    assert target["w"].tolist() == [1, 1, 1]
    assert warned(caplog) == []


def test_a_path_with_a_tilde_is_stocks_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with default():
        dcp.save({"w": torch.ones(3)}, checkpoint_id="~/a")
        saved_async({"w": torch.ones(3)}, "~/b")  # type: ignore[arg-type]
    assert len(warned(caplog)) >= 2
    assert all("stock's FileSystemWriter serves this call" in line and "expanduser" in line for line in warned(caplog))
    assert (tmp_path / "~/b/.metadata").exists()


@pytest.mark.parametrize("is_installed", [True, False])
def test_places_in_object_stores_are_ours_if_obstore_is_installed(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drop_in, "has_obstore", lambda: is_installed)
    with default(package=True):
        for url in ("s3://bucket/step-1", "gs://bucket/step-1", "az://bucket/step-1"):
            assert isinstance(dcp.FileSystemWriter(url), Writer) == is_installed
            assert isinstance(dcp.FileSystemReader(url), Reader) == is_installed
            assert dcp.FileSystemWriter.validate_checkpoint_id(url) == is_installed
        assert type(dcp.FileSystemWriter("s3://key:secret@bucket/x")) is FileSystemWriter


@needs_local_saves
def test_a_save_without_a_leader_is_stocks_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with default():
        dcp.save(state_of(1), checkpoint_id=tmp_path / "a", use_collectives=False)
        assert_same_state(loaded(state_of(1), tmp_path / "a"), state_of(1))
    assert len(warned(caplog)) == 1
    assert "use_collectives=False" in warned(caplog)[0]
    assert (tmp_path / "a" / "__0.metadata").exists()


@needs_local_saves
def test_a_save_with_a_leader_is_ours_after_one_without_by_the_same_writer(tmp_path: Path) -> None:
    with default(package=True):
        writer = dcp.FileSystemWriter(tmp_path / "a")
        dcp.save(state_of(1), storage_writer=writer, use_collectives=False)
        assert not is_ours(tmp_path / "a")
        dcp.save(state_of(2), storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert is_ours(tmp_path / "b")


@pytest.mark.parametrize("given", [{"thread_count": 0}, {"unknown_to_us": 1}])
def test_a_writer_with_arguments_that_ours_refuses_is_stocks(
    given: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with default(package=True):
        if "unknown_to_us" in given:
            with pytest.raises(TypeError, match="unknown_to_us"):
                dcp.FileSystemWriter(tmp_path, **given)
        else:
            assert type(dcp.FileSystemWriter(tmp_path, **given)) is FileSystemWriter
        if "unknown_to_us" in given:
            with pytest.raises(TypeError, match="unknown_to_us"):
                dcp.FileSystemReader(tmp_path, **given)
    assert len(warned(caplog)) == 1 + ("unknown_to_us" in given)
    assert next(iter(given)) in warned(caplog)[-1]


@needs_stagers
def test_a_state_beyond_the_budget_is_staged_by_stock_and_written_by_us(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.ones(1 << 20)}
    with default(EngineConfig(budget_bytes=16 * LEAST_BUDGET_BYTES)):
        saving = dcp.async_save(state, checkpoint_id=tmp_path)
        state["w"].zero_()
        saving.result(TIMEOUT)
        assert loaded(state, tmp_path)["w"].eq(1).all()
    assert is_ours(tmp_path)
    assert len(warned(caplog)) == 1
    assert "budget_bytes" in warned(caplog)[0]


class Padding(DefaultSavePlanner):
    """Gives tensors of another shape than it planned."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return torch.cat([data, torch.zeros(2)]) if isinstance(data, torch.Tensor) else data


def test_a_planner_that_ours_cannot_serve_gets_stocks_encoding_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.arange(6.0), "step": 5}
    with default():
        dcp.save(state, checkpoint_id=tmp_path, planner=Padding())
        assert_same_state(loaded(state, tmp_path), state)
    assert_same_state(loaded(state, tmp_path), state)
    assert is_ours(tmp_path)
    assert len(warned(caplog)) == 1
    assert "'w'" in warned(caplog)[0]


def test_a_name_that_this_torch_lacks_is_left_to_stock_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = _torch.DcpGlobal(role="executor", module=state_dict_saver, name="_moved")
    found = _torch.dcp_globals(package=False)
    monkeypatch.setattr("aio_ckpt.dcp.drop_in.dcp_globals", lambda package: [*found, gone])
    with default():
        saved_async(state_of(1), tmp_path)
    assert is_ours(tmp_path)
    assert warned(caplog) == [
        "this torch has no torch.distributed.checkpoint.state_dict_saver._moved: calls of DCP that go through there "
        "stay with stock; a newer aio_ckpt may know this torch"
    ]


# -- install and uninstall --------------------------------------------------------------------------


def test_install_stands_until_its_handle_ends_it(tmp_path: Path) -> None:
    handle = install()
    try:
        assert install() is handle
        assert install(EngineConfig()) is handle
        with default() as inner:
            assert inner is handle
        dcp.save(state_of(1), checkpoint_id=tmp_path / "a")
        with pytest.raises(ConfigError, match="installed already"):
            install(EngineConfig(workers=2))
        with pytest.raises(ConfigError, match="installed already"):
            install(package=True)
    finally:
        handle.uninstall()
        handle.uninstall()
    dcp.save(state_of(1), checkpoint_id=tmp_path / "b")
    assert [is_ours(tmp_path / name) for name in "ab"] == [True, False]
    with install(EngineConfig(workers=2), package=True) as again:
        assert again is not handle
        assert install() is again


def test_an_error_in_the_block_restores_stock() -> None:
    with pytest.raises(KeyError), default(package=True):
        raise KeyError


@pytest.mark.parametrize("place", _torch.dcp_globals(package=True), ids=str)
def test_install_refuses_a_class_of_another_library_and_leaves_it(
    place: _torch.DcpGlobal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Theirs(FileSystemWriter): ...

    before = names_of_torch()
    monkeypatch.setattr(place.module, place.name, Theirs)
    with pytest.raises(ConfigError, match=r"Theirs.*not torch's own"):
        install(package=True)
    changed = {name for name, value in names_of_torch().items() if value is not before[name]}
    assert changed == {str(place)}


def test_uninstall_leaves_a_class_that_another_library_put_in_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Theirs(FileSystemWriter): ...

    handle = install(package=True)
    dcp.FileSystemWriter = Theirs  # type: ignore[misc]
    try:
        handle.uninstall()
        assert dcp.FileSystemWriter is Theirs
        assert "Theirs" in warned(caplog)[0]
    finally:
        dcp.FileSystemWriter = FileSystemWriter  # type: ignore[misc]


@pytest.mark.parametrize("given", [{"config": {}}, {"package": 1}])
def test_arguments_of_another_type_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        install(**given)


def test_a_save_that_was_called_before_the_uninstall_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, save = threading.Event(), state_dict_saver.save

    def gated(*args: Any, **given: Any) -> Any:
        assert gate.wait(TIMEOUT)
        return save(*args, **given)

    with monkeypatch.context() as patched:
        patched.setattr(state_dict_saver, "save", gated)
        with default():
            saving = dcp.async_save(state_of(1), checkpoint_id=tmp_path)
        gate.set()
        saving.result(TIMEOUT)
    assert is_ours(tmp_path)
    assert_same_state(loaded(state_of(1), tmp_path), state_of(1))


EXITS = """
    import sys, torch, warnings
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp
    import aio_ckpt.dcp
    aio_ckpt.dcp.install()
    state = {"w": torch.full((5 << 20,), 7.0)}
    dcp.async_save(state, checkpoint_id=sys.argv[1])
    state["w"].zero_()
"""


@pytest.mark.skipif(
    sys.version_info[:2] == (3, 12), reason="Python 3.12 starts no thread while it exits: docs/limits.md"
)
def test_a_save_that_is_pending_at_interpreter_exit_is_finished(tmp_path: Path) -> None:
    run_warm(EXITS, str(tmp_path / "a")).check_returncode()
    assert is_ours(tmp_path / "a")
    assert loaded({"w": torch.zeros(5 << 20)}, tmp_path / "a")["w"].eq(7).all()


class Gated(DefaultSavePlanner):
    """Waits in the middle of a save."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.gate = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.reached.set()
        assert self.gate.wait(TIMEOUT)
        return super().resolve_data(write_item)


def test_a_save_that_runs_at_the_uninstall_is_finished(tmp_path: Path) -> None:
    planner = Gated()
    with default():
        saving = dcp.async_save(state_of(1), checkpoint_id=tmp_path, planner=planner)
        assert planner.reached.wait(TIMEOUT)
    planner.gate.set()
    saving.result(TIMEOUT)
    assert is_ours(tmp_path)
    assert_same_state(loaded(state_of(1), tmp_path), state_of(1))


def save_in_a_fork(rank: int, count: int, path: Path) -> bool:
    """In a child of fork, whose parent has saved: a save is ours."""
    dist.destroy_process_group()  # whose threads no fork has
    with default(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks beside threads
        dcp.save({"w": torch.ones(3)}, checkpoint_id=path / "parent")
        pid = os.fork()
        if pid == 0:
            try:
                dcp.save({"w": torch.ones(3)}, checkpoint_id=path / "child")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    return is_ours(path / "child")


def test_a_forked_child_saves_with_threads_of_its_own(tmp_path: Path) -> None:
    with ranks(1) as running:
        assert running.run(save_in_a_fork, tmp_path) == [True]


# -- many ranks, and another process ------------------------------------------------------------------


def sharded_of(count: int, seed: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (count,))
    rows = torch.arange(30.0).reshape(10, 3) + seed
    return {"rows": distribute_tensor(rows, mesh, [Shard(0)]), "whole": torch.full((4,), float(seed)), "step": seed}


def save_and_load(rank: int, count: int, path: Path) -> list[bool]:
    warnings.simplefilter("ignore")
    with default():
        dcp.save(sharded_of(count, 1), checkpoint_id=path / "now")
        saved_async(sharded_of(count, 2), path / "async")
        for name, seed in (("now", 1), ("async", 2)):
            target = sharded_of(count, 99)
            dcp.load(target, checkpoint_id=path / name)
            assert_same_state(target, sharded_of(count, seed))
            rows = target["rows"]
            assert isinstance(rows, DTensor)
    dist.barrier()
    for name, seed in (("now", 1), ("async", 2)):  # by stock
        target = sharded_of(count, 99)
        dcp.load(target, checkpoint_id=path / name)
        assert_same_state(target, sharded_of(count, seed))
    return [is_ours(path / name) for name in ("now", "async")]


def test_ranks_save_and_load_shards_by_unchanged_calls(two: Ranks, tmp_path: Path) -> None:
    assert two.run(save_and_load, tmp_path) == [[True, True]] * 2


def save_without_a_leader(rank: int, count: int, path: Path) -> None:
    warnings.simplefilter("ignore")
    with default():
        dcp.save(sharded_of(count, 1), checkpoint_id=path, use_collectives=False)
        dist.barrier()
        target = sharded_of(count, 99)
        dcp.load(target, checkpoint_id=path)
        assert_same_state(target, sharded_of(count, 1))


@needs_local_saves
def test_ranks_without_a_leader_all_take_stock(two: Ranks, tmp_path: Path) -> None:
    two.run(save_without_a_leader, tmp_path)
    assert {path.name for path in tmp_path.glob("*.metadata")} | {path.name for path in tmp_path.glob(".*")} >= {
        "__0.metadata",
        "__1.metadata",
    }


IN_A_PROCESS = """
import os, sys, torch, warnings
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
import aio_ckpt.dcp

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    aio_ckpt.dcp.install()
    state = {"w": torch.full((1000,), 7.0), "turned": torch.ones(5, 3).t()}
    kind = AsyncCheckpointerType.PROCESS
    saving = dcp.async_save(state, checkpoint_id=sys.argv[1], async_checkpointer_type=kind)
    state["w"].zero_()
    getattr(saving, "upload_completion", saving).result(60)
"""


@pytest.mark.slow
def test_the_writer_goes_with_the_state_into_dcps_own_process(tmp_path: Path) -> None:
    script = tmp_path / "save.py"
    script.write_text(IN_A_PROCESS)
    command = [sys.executable, str(script), str(tmp_path / "a")]
    done = subprocess.run(command, env=child_environment(), timeout=20 * TIMEOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert is_ours(tmp_path / "a")
    wanted = {"w": torch.full((1000,), 7.0), "turned": torch.ones(3, 5)}
    assert_same_state(loaded({"w": torch.zeros(1000), "turned": torch.zeros(3, 5)}, tmp_path / "a"), wanted)
