"""``aio_ckpt.integrations.megatron`` with the real package, on two gloo ranks; skipped without it.

``pip install -e '.[dev,integrations]'`` installs it. On a machine without triton, ``megatron_stubs`` stands for it.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import multiprocessing
import os
import resource
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from file_limits import files_up_to
from log_lines import kept_lines
from megatron_stubs import has_training, stub_triton
from rank_processes import Ranks
from saved_files import ROOT_MANIFEST, without_save_id

from aio_ckpt import EngineConfig, dcp
from aio_ckpt.errors import ConfigError, CorruptCheckpointError, PeerFailedError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"),
]
needs_training = pytest.mark.skipif(not has_training(), reason="this megatron-core comes without megatron.training")
LONG_SECS = 300.0
TRACKER = "latest_checkpointed_iteration.txt"
if multiprocessing.parent_process() is not None:  # a rank; other tests of this process need the real torch.compile
    stub_triton()
logging.getLogger("megatron").setLevel(logging.ERROR)


# -- what the ranks share -------------------------------------------------------------------------------


def sharded(rank: int, count: int, seed: int, rows: int = 4) -> dict[str, Any]:
    """A state as Megatron's modules make it; with ``seed`` 0, all its tensors are zero."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) if seed else torch.zeros(*shape)

    generator = torch.Generator().manual_seed(seed)
    column, layers, bias, blocks = numbers(rows * count, 6), numbers(count, 3, 5), numbers(7), numbers(4 * count, 2)
    of = ShardedTensor.from_rank_offsets
    return {
        "column": of("column", column.chunk(count)[rank].clone(), (0, rank, count)),
        "layer": of("layer", layers[rank].clone(), (0, rank, count), prepend_axis_num=1),
        "bias": of("bias", torch.nn.Parameter(bias.clone()), replica_id=rank),
        "first": of("blocks", blocks[4 * rank : 4 * rank + 2].clone(), (0, 2 * rank, 2 * count)),
        "second": of("blocks", blocks[4 * rank + 2 : 4 * rank + 4].clone(), (0, 2 * rank + 1, 2 * count)),
        "rng": ShardedObject("rng", {"of": rank if seed else -1}, (count,), (rank,)),
        "iteration": seed,
    }


def data_of(state: dict[str, Any]) -> dict[str, Any]:
    return {key: getattr(value, "data", value) for key, value in state.items()}


def assert_loaded(loaded: dict[str, Any], rank: int, count: int, seed: int, **shape: int) -> None:
    wanted = data_of(sharded(rank, count, seed, **shape))
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(loaded[key].detach(), value.detach()), key
        else:
            assert loaded[key] == value, key


def made(folder: Path, rank: int) -> str:
    """The directory, as ``save_checkpoint`` makes it."""
    if rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    return str(folder)


def is_ours(folder: Path) -> bool:
    return {ROOT_MANIFEST, ".metadata", "metadata.json"} <= set(map(without_save_id, os.listdir(folder)))


def stock_load(state: dict[str, Any], folder: Path, **options: Any) -> Any:
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load(state, str(folder), **options)


def told(fn: Callable[[], Any]) -> Any:
    """What ``fn`` returns. A CheckpointException is no Exception, which alone a rank reports."""
    warnings.simplefilter("ignore")
    try:
        return fn()
    except torch.distributed.checkpoint.api.CheckpointException as error:
        raise RuntimeError(str(error)) from error


class Run:
    """What ``pretrain`` does around a queue: polls between steps, each of which makes a collective."""

    def __init__(self, queue: Any, folder: Path, rank: int) -> None:
        self.queue = queue
        self.folder = folder
        self.rank = rank
        self.polls = 0

    def save(self, strategy: Any, iteration: int, state: dict[str, Any]) -> Path:
        """Do what ``save_checkpoint`` does with ``--async-save``."""
        folder = self.folder / f"iter_{iteration:07d}"
        request = self.request(strategy, state, folder)
        request.add_finalize_fn(lambda: self.track(iteration))
        self.queue.schedule_async_request(request)
        return folder

    def request(self, strategy: Any, state: dict[str, Any], folder: Path) -> Any:
        from megatron.core import dist_checkpointing

        return dist_checkpointing.save(state, made(folder, self.rank), strategy, async_sharded_save=True)

    def track(self, iteration: int) -> None:
        if self.rank == 0:
            (self.folder / TRACKER).write_text(str(iteration))
        dist.barrier()

    @property
    def tracked(self) -> str:
        dist.barrier()
        tracker = self.folder / TRACKER
        return tracker.read_text() if tracker.exists() else ""

    def step(self) -> list[int]:
        """One poll and one step of training, whose collective must meet that of the same step of every rank."""
        self.polls += 1
        finalized: list[int] = self.queue.maybe_finalize_async_calls(blocking=False, no_dist=False)
        numbers = torch.tensor([self.polls, len(finalized)])
        dist.all_reduce(numbers)
        assert numbers.tolist() == [dist.get_world_size() * self.polls, dist.get_world_size() * len(finalized)]
        return finalized

    def until_finalized(self) -> list[int]:
        while not (finalized := self.step()):
            pass
        return finalized


@contextmanager
def ours(folder: Path, rank: int, **settings: Any) -> Iterator[tuple[Any, Run]]:
    """A strategy and a run with a queue, on shared resources."""
    from aio_ckpt.integrations.async_calls import SaverResources
    from aio_ckpt.integrations.megatron import AsyncCallsQueue, SaveStrategy

    shared = SaverResources(EngineConfig(**{"budget_bytes": 64 << 20, "stall_timeout_secs": 60.0, **settings}))
    queue = AsyncCallsQueue(shared=shared)
    try:
        yield SaveStrategy(shared=shared), Run(queue, folder, rank)
    finally:
        queue.close(abort=True)
        shared.close()


# -- strategies -------------------------------------------------------------------------------------------


def saves_and_loads(rank: int, count: int, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    from aio_ckpt.integrations.megatron import LoadStrategy

    def body() -> None:
        with ours(folder, rank) as (strategy, run):
            dist_checkpointing.save(sharded(rank, count, 3), made(folder / "sync", rank), strategy)
            state = sharded(rank, count, 4)
            before = data_of(state)
            request = run.request(strategy, state, folder / "async")
            for value in before.values():  # training goes on
                if isinstance(value, torch.Tensor):
                    value.detach().zero_()
            run.queue.schedule_async_request(request)
            run.queue.maybe_finalize_async_calls(blocking=True)
            for name, seed in (("sync", 3), ("async", 4)):
                assert is_ours(folder / name)
                assert_loaded(stock_load(sharded(rank, count, 0), folder / name), rank, count, seed)
                mine = stock_load(sharded(rank, count, 0), folder / name, sharded_strategy=LoadStrategy())
                assert_loaded(mine, rank, count, seed)
                for load in (None, LoadStrategy()):
                    template = sharded(rank, count, 0)
                    template["unknown"] = copy.copy(template["bias"])
                    template["unknown"].key = "unknown"
                    del template["column"]
                    loaded, missing, unexpected = stock_load(
                        template, folder / name, strict="return_all", sharded_strategy=load
                    )
                    assert loaded["iteration"] == seed
                    assert "column" in str(missing), (missing, unexpected)
                    assert "unknown" in str(unexpected), (missing, unexpected)

    told(body)


def test_stock_and_ours_load_what_ours_saved(two: Ranks, tmp_path: Path) -> None:
    two.run(saves_and_loads, tmp_path / "run", timeout=LONG_SECS)


def events_of_dcp(rank: int, count: int, folder: Path) -> tuple[int, int]:
    """Events that DCP logs in a save of few values, and in one of many."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from torch.distributed.checkpoint.logger import _dcp_logger

    from aio_ckpt.integrations.megatron import SaveStrategy

    def events(tensors: int) -> int:
        ones = (ShardedTensor.from_rank_offsets(str(n), torch.ones(4), (0, rank, count)) for n in range(tensors))
        path = made(folder / str(tensors), rank)
        _dcp_logger.addHandler(kept)
        lines.clear()
        dist_checkpointing.save({str(number): one for number, one in enumerate(ones)}, path, SaveStrategy())
        _dcp_logger.removeHandler(kept)
        return len(lines)

    lines: list[str] = []
    kept = logging.Handler()
    kept.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    counts = told(lambda: (events(2), events(20)))
    assert counts[0] > 0, "DCP logs elsewhere"
    return counts


def test_dcp_logs_no_event_for_each_value_beside_training(two: Ranks, tmp_path: Path) -> None:
    for few, many in two.run(events_of_dcp, tmp_path, timeout=LONG_SECS):
        assert few == many


def stock_saves(rank: int, count: int, folder: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from aio_ckpt.integrations.megatron import LoadStrategy

    def body() -> None:
        torch.cuda.synchronize, torch.cuda.current_device = (lambda *_: None), (lambda: "cpu")  # stock asks for CUDA
        multiprocessing.current_process()._config["daemon"] = False  # stock starts a process
        stock = TorchDistSaveShardedStrategy("torch_dist", 1)
        dist_checkpointing.save(sharded(rank, count, 5), made(folder, rank), stock)
        assert not [*(folder).glob(ROOT_MANIFEST)]
        assert_loaded(stock_load(sharded(rank, count, 0), folder, sharded_strategy=LoadStrategy()), rank, count, 5)

    told(body)


def test_ours_loads_what_stock_saved(two: Ranks, tmp_path: Path) -> None:
    two.run(stock_saves, tmp_path / "run", timeout=LONG_SECS)


def saves_by_stock_queue(rank: int, count: int, folder: Path) -> None:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    def body() -> None:
        torch.cuda.current_device = lambda: "cpu"  # stock's queue asks for CUDA
        with ours(folder, rank) as (strategy, run):
            run.queue = AsyncCallsQueue()
            gate = threading.Event()
            strategy._shared.submit(gate.wait)  # stands before the save in its thread
            folder_of = run.save(strategy, 3, sharded(rank, count, 3))
            gate.set()
            assert run.step() == [0]  # the first poll has waited for the commit
            assert run.tracked == "3"
            executed = run.request(strategy, sharded(rank, count, 4), folder / "executed")
            executed.execute_sync()
            assert_loaded(stock_load(sharded(rank, count, 0), folder_of), rank, count, 3)
            assert_loaded(stock_load(sharded(rank, count, 0), folder / "executed"), rank, count, 4)

    told(body)


def test_a_queue_of_megatron_finalizes_what_ours_has_committed(two: Ranks, tmp_path: Path) -> None:
    two.run(saves_by_stock_queue, tmp_path / "run", timeout=LONG_SECS)


def saves_fully_parallel(rank: int, count: int, folder: Path) -> list[str]:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    def body() -> list[str]:
        with ours(folder, rank) as (strategy, run):
            wrapped = FullyParallelSaveStrategyWrapper(strategy, do_cache_distribution=True)
            dist_checkpointing.save(sharded(rank, count, 3), made(folder / "sync", rank), wrapped)
            run.save(wrapped, 4, sharded(rank, count, 4))
            run.until_finalized()
            for name, seed in (("sync", 3), ("iter_0000004", 4)):
                assert is_ours(folder / name)
                assert_loaded(stock_load(sharded(rank, count, 0), folder / name), rank, count, seed)
            return sorted(name for name in os.listdir(folder / "sync") if name.endswith(".distcp"))

    return told(body)  # type: ignore[no-any-return]


def test_the_fully_parallel_wrapper_works_around_ours(two: Ranks, tmp_path: Path) -> None:
    files, _ = two.run(saves_fully_parallel, tmp_path / "run", timeout=LONG_SECS)
    assert len(files) == 2


def saves_without_room(rank: int, count: int, folder: Path) -> None:
    def body() -> None:
        state = sharded(rank, count, 6, rows=1 << 19)
        budget_bytes = (2 << 20) if rank == 1 else (64 << 20)
        with ours(folder, rank, budget_bytes=budget_bytes) as (strategy, run):
            earlier = run.save(strategy, 5, sharded(rank, count, 5))
            later = run.save(strategy, 6, state)
            if rank == 1:
                state["column"].data.zero_()  # it is saved already
            assert [*run.until_finalized(), *run.queue.maybe_finalize_async_calls(blocking=True)] == [0, 1]
        assert_loaded(stock_load(sharded(rank, count, 0), earlier), rank, count, 5)
        assert_loaded(stock_load(sharded(rank, count, 0, rows=1 << 19), later), rank, count, 6, rows=1 << 19)

    told(body)


def test_a_rank_whose_budget_holds_no_copy_saves_before_it_goes_on(two: Ranks, tmp_path: Path) -> None:
    two.run(saves_without_room, tmp_path / "run", timeout=LONG_SECS)


# -- the queue ----------------------------------------------------------------------------------------------


def finalizes_together(rank: int, count: int, folder: Path, idle_polls: int) -> tuple[int, list[int], str]:
    """Rank 1 ends its second request only after ``idle_polls`` polls of all ranks, and its save after as many more."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    def body() -> tuple[int, list[int], str]:
        foreign, saving = threading.Event(), threading.Event()
        if rank == 0:
            foreign.set()
            saving.set()
        with ours(folder, rank) as (strategy, run):
            run.queue.schedule_async_request(AsyncRequest(foreign.wait, (), [lambda: run.track(1)]))
            strategy._shared.submit(saving.wait)  # stands before the save in its thread
            run.save(strategy, 2, sharded(rank, count, 2))
            for _ in range(idle_polls):
                assert run.step() == []
            assert run.queue.get_num_unfinalized_calls() == 2
            foreign.set()
            found = run.until_finalized()
            assert run.tracked == "1"
            for _ in range(idle_polls):
                assert run.step() == []
            saving.set()
            found += run.until_finalized()
            assert run.queue.get_num_unfinalized_calls() == 0
            run.queue.close()
            return run.polls, found, run.tracked

    return told(body)  # type: ignore[no-any-return]


def test_ranks_that_end_apart_finalize_in_the_same_poll(two: Ranks, tmp_path: Path) -> None:
    one, other = two.run(finalizes_together, tmp_path / "run", 20, timeout=LONG_SECS)
    assert one == other
    assert one[0] >= 42
    assert one[1:] == ([0, 1], "2")


def fails_on_one(rank: int, count: int, folder: Path, takes_over: bool) -> tuple[int, str, str, str]:
    """Rank 1's disk refuses the second save. If ``takes_over``, a request behind it has its finalize functions."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    def body() -> tuple[int, str, str, str]:
        with ours(folder, rank) as (strategy, run):
            run.save(strategy, 1, sharded(rank, count, 1))
            run.until_finalized()
            with files_up_to(1 << 20) if rank == 1 else files_up_to(resource.RLIM_INFINITY):
                request = run.request(strategy, sharded(rank, count, 2, rows=1 << 17), folder / "iter_0000002")
                request.add_finalize_fn(lambda: run.track(2))
                if takes_over:
                    logits = AsyncRequest(lambda: None, (), request.finalize_fns.copy())
                    request.finalize_fns.clear()
                    run.queue.schedule_async_request(request)
                    run.until_finalized()
                    request = logits
                run.queue.schedule_async_request(request)
                with pytest.raises(PeerFailedError) as raised:
                    run.until_finalized()
            assert "metadata.json" not in os.listdir(folder / "iter_0000002")
            assert raised.value.rank == 1
            cause = type(raised.value.__cause__).__name__
            polls, text, tracked = run.polls, str(raised.value), run.tracked
            assert run.queue.get_num_unfinalized_calls() == 0
            third = run.save(strategy, 3, sharded(rank, count, 3))
            run.until_finalized()
            assert run.tracked == "3"
            assert_loaded(stock_load(sharded(rank, count, 0), third), rank, count, 3)
            return polls, text, cause, tracked

    return told(body)  # type: ignore[no-any-return]


@pytest.mark.parametrize("takes_over", [False, True])
def test_a_failure_on_one_rank_is_raised_alike_and_nothing_is_finalized(
    two: Ranks, tmp_path: Path, takes_over: bool
) -> None:
    one, other = two.run(fails_on_one, tmp_path / "run", takes_over, timeout=LONG_SECS)
    assert one == other
    assert one[2:] == ("WriteError", "1")
    assert "failed on rank 1: WriteError" in one[1]


def foreign_fails(rank: int, count: int, folder: Path) -> tuple[int, str, str, str]:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

    def work(values: list[int], doubled: list[int], *, sign: int) -> None:
        assert doubled == [2]
        if rank == 1:
            raise OSError(5, f"no disk {sign * values[0]}")

    with ours(folder, rank) as (_, run):
        folder.mkdir(exist_ok=True)
        finalize = [lambda: run.track(1)]
        run.queue.schedule_async_request(AsyncRequest(work, ([3], None), finalize, {"sign": -1}, lambda: [2]))
        with pytest.raises(PeerFailedError) as raised:
            run.until_finalized()
        return run.polls, str(raised.value), type(raised.value.__cause__).__name__, run.tracked


def test_a_foreign_function_that_fails_on_one_rank_is_raised_alike(two: Ranks, tmp_path: Path) -> None:
    one, other = two.run(foreign_fails, tmp_path / "run", timeout=LONG_SECS)
    assert one[:2] == other[:2]
    assert "failed on rank 1: OSError: [Errno 5] no disk -3" in one[1]
    assert (one[2], other[2]) == ("NoneType", "OSError")
    assert one[3] == ""


# -- install() --------------------------------------------------------------------------------------------


def names_are_there(rank: int, count: int) -> tuple[str, list[str], list[str]]:
    import megatron.core

    from aio_ckpt.integrations.megatron import names
    from aio_ckpt.integrations.patch_points import missing

    of_training = [each for each in vars(names.training).values() if isinstance(each, names.PatchPoint)]
    in_core, in_training = missing(names.core), [place for place in of_training if not place.is_there]
    return megatron.core.__version__, list(map(str, in_core)), list(map(str, in_training))


def test_this_megatron_has_every_name_that_is_used(two: Ranks) -> None:
    found, _ = two.run(names_are_there, timeout=LONG_SECS)
    version, in_core, in_training = found
    assert not in_core, f"megatron.core {version} has moved them: mend names.py, and add the version to TRIED_CORE"
    if has_training():
        assert not in_training, f"megatron.training {version} has moved them: mend names.py; see TRIED_TRAINING"


def installs(rank: int, count: int, folder: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.training import async_utils, checkpointing, global_vars, initialize

    from aio_ckpt.integrations import megatron
    from aio_ckpt.integrations.megatron import names

    def values() -> list[Any]:
        spaces = (names.core, names.training)
        return [each.value for space in spaces for each in vars(space).values() if isinstance(each, names.PatchPoint)]

    def body() -> None:
        global_vars.set_args(SimpleNamespace(async_save=True, async_strategy="nvrx"))
        before = values()
        config = EngineConfig(budget_bytes=64 << 20)
        installed = megatron.install(config)
        assert installed.missing == []
        assert megatron.install() is installed
        with pytest.raises(ConfigError, match=r"uninstall\(\) of its handle first"):
            megatron.install(EngineConfig())
        initialize.init_persistent_async_worker(rank, "forkserver")  # starts nothing
        run = Run(async_utils._async_calls_queue, folder, rank)
        for iteration in (1, 2):
            strategy = checkpointing.TorchDistSaveShardedStrategy(cpu_shm_mode=False)
            assert isinstance(strategy, TorchDistSaveShardedStrategy)
            request = run.request(strategy, sharded(rank, count, iteration), folder / f"iter_{iteration:07d}")
            request.add_finalize_fn(lambda iteration=iteration: run.track(iteration))
            async_utils.schedule_async_save(request)
        assert not async_utils.is_empty_async_queue()
        async_utils.maybe_finalize_async_save(blocking=False)
        async_utils.maybe_finalize_async_save(blocking=True, terminate=True)
        assert async_utils.is_empty_async_queue()
        assert run.tracked == "2"
        newest = folder / "iter_0000002"
        assert_loaded(stock_load(sharded(rank, count, 0), newest), rank, count, 2)
        dist.barrier()
        if rank == 0:
            flip(newest)
        dist.barrier()
        with pytest.raises(
            (CorruptCheckpointError, RuntimeError), match=r"distcp: .* (does not match its|do not match their) CRC32"
        ):
            told(lambda: stock_load(sharded(rank, count, 0), newest))
        async_utils.reset_persistent_async_worker("nvrx")
        installed.uninstall()
        installed.uninstall()
        assert values() == before
        dist_checkpointing.load_common_state_dict(str(folder / "iter_0000001"))

    told(body)


def flip(folder: Path) -> None:
    """Change a byte in the middle of each data file."""
    for path in folder.glob("*.distcp"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@needs_training
def test_install_serves_megatrons_own_functions_until_it_is_undone(two: Ranks, tmp_path: Path) -> None:
    two.run(installs, tmp_path / "run", timeout=LONG_SECS)


def whole(seed: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((6, 2), float(seed))}, "iteration": seed, "args": None}


def saves_torch_dcp(rank: int, count: int, folder: Path) -> None:
    """Save by ``save_checkpoint`` with ``--ckpt-format torch_dcp --async-save``, whose state alone is made here."""
    from megatron.core import parallel_state
    from megatron.training import async_utils, checkpointing, global_vars

    from aio_ckpt.integrations import megatron

    class Args(SimpleNamespace):
        """What the command line sets; None for all other options."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    def save(iteration: int, state: dict[str, Any]) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpointing, "generate_state_dict", lambda *_, **__: state)
            patch.setattr(checkpointing, "get_rng_state", lambda *_, **__: [])
            patch.setattr(checkpointing, "get_rerun_state_machine", MagicMock())
            patch.setattr(checkpointing, "unwrap_model", lambda model: model)
            checkpointing.save_checkpoint(iteration, [None], None, None, 0)
        return folder / f"iter_{iteration:07d}"

    def until_finalized() -> int:
        polls = 0
        while not async_utils.is_empty_async_queue():
            polls += 1
            async_utils.maybe_finalize_async_save(blocking=False)
            dist.barrier()  # a step of training
        return polls

    def tracked() -> str:
        dist.barrier()
        return (folder / TRACKER).read_text()

    def body() -> None:
        parallel_state.initialize_model_parallel()
        folder.mkdir(exist_ok=True)
        args = Args(
            async_save=True,
            async_strategy="nvrx",
            ckpt_format="torch_dcp",
            use_dist_ckpt=True,
            save=str(folder),
            dist_ckpt_workers=2,
            enable_msc=False,
        )
        global_vars.set_args(args)
        try:
            with megatron.install(EngineConfig(budget_bytes=64 << 20)):
                first = save(1, state := whole(1))
                state["model"]["weight"].zero_()  # training goes on
                assert until_finalized() > 0
                assert tracked() == "1"
                assert {ROOT_MANIFEST, ".metadata"} <= set(map(without_save_id, os.listdir(first)))
                with files_up_to(1 << 20) if rank == 0 else files_up_to(resource.RLIM_INFINITY):
                    failed = save(2, {"model": {"weight": torch.ones(1 << 19)}})
                    with pytest.raises(PeerFailedError, match="failed on rank 0: WriteError"):
                        until_finalized()
                assert ".metadata" not in os.listdir(failed)
                assert tracked() == "1"
                third = save(3, whole(3))
                async_utils.maybe_finalize_async_save(blocking=True)
                assert tracked() == "3"
                args.async_save = False
                with dcp.default(package=True):
                    fourth = save(4, whole(4))
                assert [*(fourth).glob(ROOT_MANIFEST)]
            for seed, path in ((1, first), (3, third), (4, fourth)):
                target = whole(0)
                torch.distributed.checkpoint.load(
                    target, storage_reader=torch.distributed.checkpoint.FileSystemReader(path)
                )
                assert torch.equal(target["model"]["weight"], whole(seed)["model"]["weight"])
                assert target["iteration"] == seed
        finally:
            parallel_state.destroy_model_parallel()

    told(body)


@needs_training
def test_torch_dcp_is_saved_by_ours_after_install(two: Ranks, tmp_path: Path) -> None:
    two.run(saves_torch_dcp, tmp_path / "run", timeout=LONG_SECS)


def installs_without_training(rank: int, count: int) -> list[str]:
    from aio_ckpt.integrations import megatron

    with kept_lines() as lines, megatron.install():
        return list(lines.messages)


def installs_without(rank: int, count: int) -> tuple[list[str], list[str]]:
    from megatron.training import async_utils

    from aio_ckpt.integrations import megatron
    from aio_ckpt.integrations.megatron import names

    moved, stock = async_utils.init_persistent_async_worker, names.training.save_strategy.value
    del async_utils.init_persistent_async_worker
    try:
        with kept_lines() as lines, megatron.install() as installed:
            assert names.training.save_strategy.value is stock
        return lines.messages, list(map(str, installed.missing))
    finally:
        async_utils.init_persistent_async_worker = moved


def installs_without_torch_dcp(rank: int, count: int) -> list[str]:
    from megatron.training import checkpointing

    from aio_ckpt.integrations import megatron
    from aio_ckpt.integrations.megatron import names

    moved, stock = checkpointing.get_async_strategy, names.training.strategy_of_calls.value
    del checkpointing.get_async_strategy
    try:
        with kept_lines() as lines, megatron.install():
            assert names.training.save_strategy.value.owner
            assert names.training.strategy_of_calls.value is stock
            return lines.messages
    finally:
        checkpointing.get_async_strategy = moved


@needs_training
def test_if_the_names_for_torch_dcp_have_moved_megatron_saves_that_alone(two: Ranks) -> None:
    lines, _ = two.run(installs_without_torch_dcp, timeout=LONG_SECS)
    assert len(lines) == 1
    assert "has no megatron.training.checkpointing.get_async_strategy: Megatron itself saves torch_dcp" in lines[0]


@pytest.mark.skipif(has_training(), reason="this megatron-core comes with megatron.training")
def test_without_the_training_package_install_names_the_strategies(two: Ranks) -> None:
    for lines in two.run(installs_without_training, timeout=LONG_SECS):
        assert ["give dist_checkpointing.save() and load() a SaveStrategy" in line for line in lines] == [True]


@needs_training
def test_if_a_name_has_moved_install_warns_and_megatrons_own_saving_stays(two: Ranks) -> None:
    (lines, missing), _ = two.run(installs_without, timeout=LONG_SECS)
    assert missing == ["megatron.training.async_utils.init_persistent_async_worker"]
    assert len(lines) == 1
    assert lines[0].startswith("Megatron saves by itself: megatron.core ")
    assert missing[0] in lines[0]
    assert "was tried with 0.19.2" in lines[0]
    assert json.dumps(lines)
