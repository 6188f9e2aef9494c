"""``aio_ckpt.integrations.nvrx`` with the real package, on two gloo ranks; skipped without it.

The wheels of NVRx need glibc 2.39. Its modules for checkpoints are pure Python: an unpacked wheel on ``PYTHONPATH`` is
enough for these tests.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from file_limits import files_up_to
from gated_storage import GatedStorage
from log_lines import kept_lines
from rank_processes import Ranks, ranks
from saved_files import ROOT_MANIFEST, without_save_id
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import aio_ckpt.dcp.call_resources
from aio_ckpt import EngineConfig
from aio_ckpt.errors import ConfigError, PeerFailedError
from aio_ckpt.integrations import nvrx
from aio_ckpt.integrations.nvrx import names
from aio_ckpt.integrations.patch_points import PatchPoint, missing

REPOSITORY = Path(__file__).parents[2]
PACKAGE = "nvidia_resiliency_ext.checkpointing.async_ckpt"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.skipif(
        importlib.util.find_spec("nvidia_resiliency_ext") is None, reason="nvidia-resiliency-ext is not installed"
    ),
]
LONG_SECS = 300.0
TRACKER = "latest"
CONFIG = EngineConfig(budget_bytes=64 << 20, stall_timeout_secs=60.0)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """Ranks of this module alone: install() refuses a process whose modules, of Megatron say, hold names of NVRx."""
    with ranks(2) as running:
        yield running


# -- what the ranks share -------------------------------------------------------------------------------


def of_nvrx(module: str, name: str) -> Any:
    """What ``from nvidia_resiliency_ext...module import name`` gives now."""
    return getattr(importlib.import_module(f"{PACKAGE}.{module}"), name)


def stock(name: str) -> Any:
    """NVRx's own object, while nothing is installed."""
    return getattr(names.replaced, name).value


def told(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns. A CheckpointException is no Exception, which alone a rank reports."""
    warnings.simplefilter("ignore")
    try:
        return fn()
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error


def state_of(seed: int, rank: int, rows: int = 4) -> dict[str, Any]:
    """Plain tensors, an object, and a DTensor whose shards are uneven, as those of Megatron-FSDP."""
    generator = torch.Generator().manual_seed(seed)
    whole, weight = torch.randn(6, generator=generator), torch.randn(rows, 5, generator=generator)
    cut = slice(0, 4) if rank == 0 else slice(4, 6)
    local = whole[cut].clone()
    chunk = ChunkStorageMetadata(offsets=torch.Size([cut.start]), sizes=local.size())

    def write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(tensor.to_local())
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size([6]))
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    uneven = DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=(1,), run_check=False)
    uneven._local_tensor.__create_write_items__ = write_items  # type: ignore[attr-defined]
    uneven._local_tensor.__create_chunk_list__ = lambda: [chunk]  # type: ignore[attr-defined]
    return {"model": {"weight": weight, "uneven": uneven}, "iteration": seed, "args": types.SimpleNamespace(seed=seed)}


def assert_holds(folder: Path, seed: int, rows: int = 4, **reader: Any) -> None:
    """Stock DCP loads the values of ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    whole, weight = torch.randn(6, generator=generator), torch.randn(rows, 5, generator=generator)
    target: dict[str, Any] = {
        "model": {"weight": torch.zeros(rows, 5), "uneven": torch.zeros(6)},
        "iteration": -1,
        "args": None,
    }
    dcp.load(target, **(reader or {"storage_reader": dcp.FileSystemReader(folder)}), no_dist=True)
    assert torch.equal(target["model"]["weight"], weight)
    assert torch.equal(target["model"]["uneven"], whole)
    assert (target["iteration"], target["args"].seed) == (seed, seed)


def overwrite(state: dict[str, Any]) -> None:
    """Training goes on."""
    state["model"]["weight"].zero_()
    state["model"]["uneven"].to_local().zero_()
    state["args"].seed = -1


class Run:
    """A trainer that saves as NVRx's users do, polls, and makes a collective between the polls."""

    def __init__(self, folder: Path, rank: int, queue: Any = None) -> None:
        self.folder, self.rank, self.polls = folder, rank, 0
        self.queue = queue or of_nvrx("core", "AsyncCallsQueue")(persistent=True)

    def save(self, name: str, state: dict[str, Any], **options: Any) -> Path:
        path = self.folder / name
        writer = of_nvrx("filesystem_async", "FileSystemWriterAsync")(path, thread_count=2)
        planned = of_nvrx("state_dict_saver", "save_state_dict_async_plan")(state, writer, **options)
        save_fn, preload_fn, args = writer.get_save_function_and_args()

        def finalize() -> None:
            of_nvrx("state_dict_saver", "save_state_dict_async_finalize")(*planned)

        request = of_nvrx("core", "AsyncRequest")(save_fn, args, [finalize], preload_fn=preload_fn)
        request.add_finalize_fn(lambda: self.track(name))
        self.queue.schedule_async_request(request)
        return path

    def track(self, name: str) -> None:
        if self.rank == 0:
            (self.folder / TRACKER).write_text(name)
        dist.barrier()

    @property
    def tracked(self) -> str:
        dist.barrier()
        return (self.folder / TRACKER).read_text()

    def step(self) -> list[int]:
        self.polls += 1
        finalized: list[int] = self.queue.maybe_finalize_async_calls(blocking=False)
        numbers = torch.tensor([self.polls, len(finalized)])
        dist.all_reduce(numbers)
        assert numbers.tolist() == [dist.get_world_size() * self.polls, dist.get_world_size() * len(finalized)]
        return finalized

    def until_finalized(self) -> list[int]:
        while not (finalized := self.step()):
            pass
        return finalized


# -- saves and loads --------------------------------------------------------------------------------------


def saves_and_loads(rank: int, count: int, folder: Path) -> None:
    def body() -> None:
        before = {name: stock(name) for name in names.replaced.__dict__ if not name.startswith("_")}
        with nvrx.install(CONFIG) as installed:
            assert nvrx.install() is installed
            with pytest.raises(ConfigError, match=r"uninstall\(\) of its handle first"):
                nvrx.install(EngineConfig())
            run = Run(folder, rank)
            states = [state_of(seed, rank) for seed in (1, 2, 3)]
            paths = [run.save(f"step {seed}", state) for seed, state in enumerate(states, 1)]
            for state in states:
                overwrite(state)
            assert run.queue.get_num_unfinalized_calls() == 3
            done = run.until_finalized()
            done += run.queue.maybe_finalize_async_calls(blocking=True)
            assert done == [0, 1, 2]
            assert run.tracked == "step 3"
            reader = of_nvrx("cached_metadata_filesystem_reader", "CachedMetadataFileSystemReader")
            reader.clear_metadata_cache()
            for seed, path in enumerate(paths, 1):
                assert {ROOT_MANIFEST, ".metadata"} <= set(map(without_save_id, os.listdir(path)))
                assert_holds(path, seed)
                assert_holds(path, seed, storage_reader=reader(path, cache_metadata=True))
            run.queue.close()
        assert {name: stock(name) for name in before} == before
        installed.uninstall()

    told(body)


def test_what_nvrxs_names_save_stock_loads(pair: Ranks, tmp_path: Path) -> None:
    pair.run(saves_and_loads, tmp_path / "run", timeout=LONG_SECS)


def saves_without_room(rank: int, count: int, folder: Path) -> None:
    def body() -> None:
        with nvrx.install(EngineConfig(budget_bytes=(2 << 20) if rank == 1 else (64 << 20))):
            run = Run(folder, rank)
            first = run.save("small", state_of(5, rank))
            state = state_of(6, rank, rows=1 << 19)
            second = run.save("large", state)
            overwrite(state)
            assert run.queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
            assert_holds(first, 5)
            assert_holds(second, 6, rows=1 << 19)

    told(body)


def test_a_rank_whose_budget_holds_no_copy_saves_before_it_goes_on(pair: Ranks, tmp_path: Path) -> None:
    pair.run(saves_without_room, tmp_path / "run", timeout=LONG_SECS)


def saves_on_one_rank(rank: int, count: int, folder: Path) -> None:
    def body() -> None:
        alone = dist.new_group([1])
        with nvrx.install(CONFIG):
            run = Run(folder, rank)
            if rank == 1:
                run.save("alone", {"w": torch.full((3,), 7.0)}, process_group=alone)
            else:
                run.queue.schedule_async_request(
                    of_nvrx("core", "AsyncRequest")(None, (), [lambda: run.track("alone")])
                )
            run.until_finalized()
            target = {"w": torch.zeros(3)}
            dcp.load(target, checkpoint_id=folder / "alone", no_dist=True)
            assert target["w"].tolist() == [7.0] * 3

    told(body)


def test_a_group_of_some_ranks_saves_alone(pair: Ranks, tmp_path: Path) -> None:
    pair.run(saves_on_one_rank, tmp_path / "run", timeout=LONG_SECS)


def finalized_by_stock(rank: int, count: int, folder: Path) -> None:
    def body() -> None:
        torch.cuda.current_device = lambda: "cpu"  # stock's queue asks for CUDA
        queue = stock("AsyncCallsQueue")(persistent=True)
        with nvrx.install(CONFIG):
            run = Run(folder, rank, queue)
            path = run.save("one", state_of(1, rank))
            assert run.step() == [0]  # the first poll has waited for the commit
            assert_holds(path, 1)
            assert run.tracked == "one"

    told(body)


def test_a_queue_of_nvrx_finalizes_what_ours_has_committed(pair: Ranks, tmp_path: Path) -> None:
    pair.run(finalized_by_stock, tmp_path / "run", timeout=LONG_SECS)


def passed_on(rank: int, count: int, folder: Path) -> None:
    """A writer of NVRx, as for ``msc://``, in a queue and with functions of ours."""

    def body() -> None:
        torch.cuda.current_device = lambda: "cpu"
        original = stock("FileSystemWriterAsync")
        folder.mkdir(exist_ok=True)
        with nvrx.install(CONFIG):
            assert (
                type(of_nvrx("filesystem_async", "FileSystemWriterAsync")("msc://bucket/x", use_msc=True)) is original
            )
            plan = of_nvrx("state_dict_saver", "save_state_dict_async_plan")
            finalize = of_nvrx("state_dict_saver", "save_state_dict_async_finalize")
            state = state_of(1, rank)
            writer = original(folder / "theirs", thread_count=1)
            planned = plan(state, writer)
            write, preload, args = writer.get_save_function_and_args()
            run = Run(folder, rank)
            args[-1] = writer.results_queue = Results()
            run.queue.schedule_async_request(
                of_nvrx("core", "AsyncRequest")(write, args, [lambda: finalize(*planned)], preload_fn=preload)
            )
            run.until_finalized()
            assert not [*(folder / "theirs").glob(ROOT_MANIFEST)]
            assert_holds(folder / "theirs", 1)

    filesystem_async = importlib.import_module(f"{PACKAGE}.filesystem_async")
    filesystem_async._results_queue = Results()  # stock starts a process for it
    told(body)


class Results:
    """What stock's writer needs of a queue."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: Any) -> None:
        self.values.append(value)

    def get_nowait(self) -> Any:
        return self.values.pop(0)


def test_a_writer_of_nvrx_works_in_a_queue_of_ours(pair: Ranks, tmp_path: Path) -> None:
    pair.run(passed_on, tmp_path / "run", timeout=LONG_SECS)


# -- failures ---------------------------------------------------------------------------------------------


class Refuses(DefaultSavePlanner):
    """Planner that fails on rank 1."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        if dist.get_rank() == 1:
            raise OSError(5, "the device is gone")
        return super().resolve_data(write_item)


def fails_on_one(rank: int, count: int, folder: Path, kind: str) -> tuple[int, str, str]:
    def body() -> tuple[int, str, str]:
        with nvrx.install(CONFIG):
            run = Run(folder, rank)
            first = run.save("one", state_of(1, rank))
            run.until_finalized()
            nbytes = 1 << 20 if kind == "disk" and rank == 1 else resource.RLIM_INFINITY
            refuses = {"planner": Refuses()} if kind == "planner" else {}
            with files_up_to(nbytes):
                big = state_of(2, rank, rows=1 << 17)
                big["model"] |= {f"of rank {rank}": torch.ones(1 << 19)}
                second = run.save("two", big, **refuses)
                with pytest.raises(PeerFailedError) as raised:
                    run.until_finalized()
            polls, text = run.polls, str(raised.value)
            assert raised.value.rank == 1
            assert run.tracked == "one"
            assert ".metadata" not in os.listdir(second)
            assert_holds(first, 1)
            third = run.save("one", state_of(3, rank))
            run.until_finalized()
            assert_holds(third, 3)
            return polls, text, run.tracked

    return told(body)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "cause"), [("disk", "WriteError"), ("planner", "the device is gone")])
def test_a_failure_on_one_rank_is_raised_alike_and_nothing_is_finalized(
    pair: Ranks, tmp_path: Path, kind: str, cause: str
) -> None:
    one, other = pair.run(fails_on_one, tmp_path / "run", kind, timeout=LONG_SECS)
    assert one == other
    assert "failed on rank 1" in one[1]
    assert cause in one[1]


def saves_until_killed(rank: int, count: int, folder: Path, call: str) -> None:
    def body() -> None:
        storages: list[GatedStorage] = []

        class Gated(GatedStorage):
            def __init__(self, executor: Any, *_: object) -> None:
                super().__init__(executor)
                storages.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(aio_ckpt.dcp.call_resources, "Storage", Gated)
            nvrx.install(CONFIG)
            run = Run(folder, rank)
            run.save("same", state_of(1, rank))
            run.until_finalized()
            gate = storages[0].hold(call) if rank == 0 else None
            run.save("same", state_of(2, rank))
            if gate is not None:
                gate.wait_reached()
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()

    told(body)


@pytest.mark.parametrize("call", ["write_file", "sync_dir", "replace"])
def test_a_kill_within_a_save_leaves_the_checkpoint_before(tmp_path: Path, call: str) -> None:
    with ranks(2) as doomed:
        for rank in range(2):
            doomed.start(rank, saves_until_killed, tmp_path / "run", call)
        doomed.wait_until_dead(0)
        doomed.kill(1)
    target = {"iteration": 0}
    dcp.load(target, checkpoint_id=tmp_path / "run/same", no_dist=True)
    assert target["iteration"] == 1


def restarts(rank: int, count: int, folder: Path) -> None:
    """Do what NVRx's in-process restart does."""

    def body() -> None:
        with nvrx.install(CONFIG):
            run = Run(folder, rank)
            run.save("one", state_of(1, rank))
            of_nvrx("core", "abort_nvrx_checkpoint")()
            assert run.queue.get_num_unfinalized_calls() == 0
            dist.barrier()  # a restart begins when all ranks have aborted
            path = run.save("two", state_of(2, rank))
            assert run.queue.maybe_finalize_async_calls(blocking=True) == [1]
            assert_holds(path, 2)

    told(body)


def test_the_queue_serves_again_after_nvrx_has_aborted_it(pair: Ranks, tmp_path: Path) -> None:
    pair.run(restarts, tmp_path / "run", timeout=LONG_SECS)


# -- the names --------------------------------------------------------------------------------------------


def names_are_known(rank: int, count: int) -> tuple[str, list[str], list[str], list[str]]:
    import nvidia_resiliency_ext

    with nvrx.install(CONFIG) as installed:
        ours = {name: stock(name) for name, place in vars(names.replaced).items() if isinstance(place, PatchPoint)}
    unknown = [
        f"{name}.{each}"
        for name, own in ours.items()
        for each, value in vars(stock(name)).items()
        if inspect.isclass(own) and inspect.isfunction(value) and each[0] != "_" and not hasattr(own, each)
    ]
    return nvidia_resiliency_ext.__version__, list(map(str, missing(names.replaced))), installed.changed, unknown


def test_this_nvrx_has_the_names_and_parameters_that_are_known(pair: Ranks) -> None:
    found, _ = pair.run(names_are_known, timeout=LONG_SECS)
    version, gone, changed, unknown = found
    known = ", ".join(names.TRIED)
    assert [gone, changed, unknown] == [[], [], []], (
        f"NVRx {version} has changed its contract: missing {gone}, new parameters {changed}, new methods {unknown}; "
        f"versions known to work: {known}: mend names.py and faces.py, then add it to TRIED"
    )


def changes(rank: int, count: int) -> list[Any]:
    """Install where a name is gone, and where a function takes a new argument."""
    saver = importlib.import_module(f"{PACKAGE}.state_dict_saver")
    before = saver.save_state_dict_async_plan
    found: list[Any] = []

    def newer(state_dict: Any, storage_writer: Any, sharding: Any = None) -> None:
        raise AssertionError

    for put in (lambda: delattr(saver, "save_state_dict_async_plan"), lambda: setattr(saver, before.__name__, newer)):
        put()
        try:
            with kept_lines() as lines, nvrx.install(CONFIG) as installed:
                found += [installed.changed, lines.messages]
                assert stock("FileSystemWriterAsync").__module__.startswith(PACKAGE)
        finally:
            saver.save_state_dict_async_plan = before
    return found


def test_if_a_name_has_changed_install_warns_and_nvrxs_own_stay(pair: Ranks) -> None:
    (gone, of_gone, new, of_new), _ = pair.run(changes, timeout=LONG_SECS)
    assert gone == [f"{PACKAGE}.state_dict_saver.save_state_dict_async_plan"]
    assert new == ["sharding of save_state_dict_async_plan()"]
    for lines in (of_gone, of_new):
        assert len(lines) == 1
        assert lines[0].startswith("NVRx saves by itself: its names have changed (")
        assert f"knows NVRx {', '.join(names.TRIED)}" in lines[0]


def imported_by_value(rank: int, count: int) -> None:
    script = types.ModuleType("a_script")
    script.Writer = stock("FileSystemWriterAsync")  # type: ignore[attr-defined]
    sys.modules["a_script"] = script
    try:
        with pytest.raises(ConfigError, match=r"before install\(\): a_script\.Writer: call install\(\) before"):
            nvrx.install(CONFIG)
    finally:
        del sys.modules["a_script"]
    assert stock("FileSystemWriterAsync") is script.Writer


def test_names_that_were_imported_before_are_refused(pair: Ranks) -> None:
    pair.run(imported_by_value, timeout=LONG_SECS)


def mixed(rank: int, count: int, folder: Path) -> None:
    plan = stock("save_state_dict_async_plan")
    with nvrx.install(CONFIG):
        writer = of_nvrx("filesystem_async", "FileSystemWriterAsync")(folder)
        with pytest.raises(ConfigError, match=r"call install\(\) before the imports from nvidia_resiliency_ext"):
            plan({"w": torch.ones(2)}, writer)
        with pytest.raises(ConfigError, match=r"call save_state_dict_async_plan\(\) with this writer first"):
            writer.get_save_function_and_args()


def test_the_planning_of_nvrx_itself_is_refused(pair: Ranks, tmp_path: Path) -> None:
    pair.run(mixed, tmp_path / "run", timeout=LONG_SECS)


# -- the page and a script ------------------------------------------------------------------------------------


def test_the_page_changes_two_lines_and_its_script_runs(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/coming-from/nvrx.md").read_text()
    before, after = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "resiliency" in text)
    assert max(len(text.splitlines()) for text in (before, after)) <= 10
    assert [line for line in after.splitlines() if line not in before.splitlines()] == [
        "from aio_ckpt.integrations import nvrx",
        "nvrx.install()",
    ]
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nimport torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        f"state, folder = {{'w': torch.arange(4.0)}}, {str(tmp_path / 'run')!r}\n" + after + "queue.close()\n"
    )
    subprocess.run([sys.executable, script], check=True, cwd=REPOSITORY, timeout=LONG_SECS)
    assert [*(tmp_path / "run").glob(ROOT_MANIFEST)]
    target = {"w": torch.zeros(4)}
    dcp.load(target, checkpoint_id=tmp_path / "run", no_dist=True)
    assert target["w"].tolist() == [0, 1, 2, 3]


def runs_script(root: Path, device: str) -> None:
    script = REPOSITORY / "tests/integrations/nvrx_script.py"
    given = [sys.executable, script, "--root", root, "--device", device, "--mib", "16"]
    subprocess.run(given, check=True, cwd=REPOSITORY, timeout=LONG_SECS)


@pytest.mark.gpu
def test_a_script_of_nvrxs_users_saves_from_a_gpu(tmp_path: Path) -> None:
    runs_script(tmp_path / "run", "cuda")


def test_a_script_of_nvrxs_users_saves(tmp_path: Path) -> None:
    runs_script(tmp_path / "run", "cpu")
