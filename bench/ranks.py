"""``python -m bench.ranks``: one checkpoint of 1, 2, 4 and 8 ranks (gloo processes), saved and loaded, beside DCP.

And what 2 to 64 ranks tell each other in a save: processes that share a store and no process group.
"""

from __future__ import annotations

import functools
import multiprocessing
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.checkpoint
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from aio_ckpt import CheckpointEngine, EngineConfig, LoadReport, PerRank, SyncCheckpointEngine
from aio_ckpt.ranks.store_coordinator import StoreCoordinator
from bench.common.measure import Spread
from bench.common.options import log, parse, work_folder
from bench.common.pagecache import fsync_tree, make_cold
from bench.common.results import FigureRow, Figures, Goal, Report, figure_rows, publish, slowest

__all__ = ["main"]

dist: Any = torch.distributed  # whose stubs leave most of it out
dcp: Any = torch.distributed.checkpoint

_WAIT_SECS = 600.0


def main() -> None:
    """Run the bench."""
    options = parse("ranks", __doc__ or "")
    worlds, mib, count = ((1, 2), 8, 200) if options.quick else ((1, 2, 4, 8), 256, 5_000)
    crowds = (2, 4) if options.quick else (2, 4, 8, 16, 32, 64)
    figures: list[FigureRow] = []
    found: dict[int, Figures] = {}
    with work_folder(options) as folder:
        for world in worlds:
            log(f"{world} ranks")
            found[world] = slowest(_run(world, _large, folder / f"large{world}", mib, options.rounds))
            figures += figure_rows(f"{world} ranks, {mib} MiB by rows", found[world])
        many = min(4, worlds[-1])
        small = slowest(_run(many, _small, folder / "small", count, options.rounds))
        figures += figure_rows(f"{many} ranks x {count:,} tensors of 1 KiB", small)
        for crowd in crowds:
            log(f"{crowd} ranks that share a store")
            told = _run(crowd, _agreeing, folder / f"crowd{crowd}", options.rounds, serve=_serve_without_group)
            figures += figure_rows(f"{crowd} ranks that share a store", slowest(told))
    goals = _goals(found[many], small, many, count)
    report = Report(bench="ranks", settings=options.settings(), figures=figures, goals=goals)
    log(f"wrote {publish(report, options.folder, out=options.out)}")


def _goals(large: Figures, small: Figures, world: int, count: int) -> list[Goal]:
    def median(values: list[float]) -> float:
        return Spread.of(values).median

    over = median([done - synced for done, synced in zip(large["save, ms"], large["synced, ms"], strict=True)])
    times = median(small["dcp.save that writes nothing, cached plan, ms"]) / median(small["planning, ms"])
    read = max(large["load in rows, read of needed, x"])
    title = f"{world} ranks"
    return [
        Goal(text=f"{title}: commit adds to the slowest rank's write", figure=over, bound=50.0, unit="ms"),
        Goal(
            text=f"{title}: agreement a rank a save", figure=max(large["agreement, bytes"]), bound=200.0, unit="bytes"
        ),
        Goal(
            text=f"{title} x {count:,} tensors: planning, times cheaper than dcp.save with a cached plan",
            figure=times,
            bound=20.0,
            is_floor=True,
        ),
        Goal(text=f"{title}: load by rows, bytes read of those needed", figure=read, bound=1.05),
    ]


# -- in each rank -----------------------------------------------------------------------------------


def _spread(count: int, mib: int, placement: Placement) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (count,))
    rows = mib * (1 << 20) // 8 // 4096
    return {
        f"t{number}": distribute_tensor(torch.full((rows, 1024), float(number)), mesh, [placement])
        for number in range(8)
    }


def _large(rank: int, count: int, folder: Path, mib: int, rounds: int) -> Figures:
    """One large sharded state: save, load in the same layout and others, cold, and the same by DCP."""
    state, columns = _spread(count, mib, Shard(0)), _spread(count, mib, Shard(1))
    halves = _spread(count, mib, Shard(0) if count == 1 else Replicate())
    layouts = {"rows": state, "columns": columns, "whole": halves}
    by_dcp = folder / "dcp"
    figures: Figures = {}

    def add_cold(name: str, path: Path, load: Callable[[], Any]) -> Any:
        _meet()
        if rank == 0:
            make_cold(path)
        _meet()
        secs, loaded = _timed(load)
        add(name, secs * 1e3)
        return loaded

    def add(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    engine = CheckpointEngine(folder, EngineConfig(keep_last=1))
    coordinator = engine._ctx.members.coordinator
    try:
        engine.save(state).result(_WAIT_SECS)
        for _ in range(rounds):
            before = coordinator.bytes_sent if isinstance(coordinator, StoreCoordinator) else 0
            _meet()
            report = engine.save(state).result(_WAIT_SECS)
            assert report is not None
            add("save, ms", report.timings.committed_secs * 1e3)
            add("synced, ms", report.timings.synced_secs * 1e3)
            add("save() blocks, ms", report.timings.blocked_secs * 1e3)
            sent = coordinator.bytes_sent - before if isinstance(coordinator, StoreCoordinator) else 0
            add("agreement, bytes", sent)
            for name, target in layouts.items():
                needed = sum(_local(value).nbytes for value in target.values())
                loaded = add_cold(f"load in {name}, ms", report.path, functools.partial(_load, engine, target))
                add(f"load in {name}, read of needed, x", loaded.bytes_read / needed)
            _meet()
            if rank == 0:
                shutil.rmtree(by_dcp, ignore_errors=True)
            _meet()
            add("dcp.save, ms", _timed(lambda: dcp.save(state, checkpoint_id=by_dcp))[0] * 1e3)
            _meet()
            if rank == 0:
                fsync_tree(by_dcp)
            for name, target in layouts.items():
                add_cold(f"dcp.load in {name}, ms", by_dcp, functools.partial(dcp.load, target, checkpoint_id=by_dcp))
    finally:
        engine.close_blocking()
    return figures


def _load(engine: CheckpointEngine, target: dict[str, Any]) -> LoadReport:
    return engine.submit_load(target).result(_WAIT_SECS)


def _small(rank: int, count: int, folder: Path, tensors: int, rounds: int) -> Figures:
    """Many small tensors, unchanged: what is planned anew at each save."""
    state = {f"layers.{number}.weight": torch.full((256,), float(number)) for number in range(tensors)}
    figures: Figures = {"planning, ms": [], "save, ms": [], "dcp.save that writes nothing, cached plan, ms": []}
    engine = CheckpointEngine(folder, EngineConfig(keep_last=1))
    try:
        for turn in range(rounds + 2):
            _meet()
            report = engine.save(state).result(_WAIT_SECS)
            assert report is not None
            secs, _ = _timed(
                lambda: dcp.save(
                    state,
                    storage_writer=_Nothing(folder / "dcp"),
                    planner=DefaultSavePlanner(enable_plan_caching=True),
                )
            )
            if turn >= 2:  # the first two make the plans
                figures["planning, ms"].append(report.timings.plan_secs * 1e3)
                figures["save, ms"].append(report.timings.committed_secs * 1e3)
                figures["dcp.save that writes nothing, cached plan, ms"].append(secs * 1e3)
    finally:
        engine.close_blocking()
    return figures


def _agreeing(rank: int, count: int, store: Any, folder: Path, rounds: int) -> Figures:
    """A few tensors of each rank's own, and objects that move in every save: what is told, and what is read.

    How long the ranks take to meet stands apart: they do it once, and each connects to the store for it, which looks up
    its host's name (5 s where a name server does not answer).
    """
    state = {f"of.rank{rank}.{number}": torch.full((256,), float(number)) for number in range(8)}
    coordinator = StoreCoordinator(store, rank=rank, world_size=count)
    figures: Figures = {}
    with SyncCheckpointEngine(folder, EngineConfig(keep_last=1), coordinator=coordinator) as engine:
        secs, _ = _timed(functools.partial(engine._ctx.members.opened.result, _WAIT_SECS))
        figures["meeting, ms"] = [secs * 1e3]
        for turn in range(rounds + 1):
            began, sent, received = coordinator.messages_sent, coordinator.bytes_sent, coordinator.bytes_received
            values = state | {"first": PerRank("x" * turn), "second": PerRank(turn)}
            secs, _ = _timed(functools.partial(_save, engine, values))
            name = "a later save" if turn else "the first save"
            for text, value in (
                ("messages of a rank, messages", coordinator.messages_sent - began),
                ("sent by a rank, bytes", coordinator.bytes_sent - sent),
                ("read by the leader, bytes", coordinator.bytes_received - received),
                ("durable, ms", secs * 1e3),
            ):
                figures.setdefault(f"{name}: {text}", []).append(float(value))
    return figures


def _save(engine: SyncCheckpointEngine, state: Mapping[str, object]) -> None:
    engine.save(state).result(_WAIT_SECS)


class _Nothing(FileSystemWriter):
    """Writes nothing: what is left of ``dcp.save`` is planning and its collectives."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        done: Any = torch.futures.Future()
        done.set_result([])
        return done

    def finish(self, metadata: Any, results: Any) -> None:
        """No ``.metadata``."""


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def _meet() -> None:
    if dist.get_world_size() > 1:
        dist.barrier()


# -- processes --------------------------------------------------------------------------------------


def _run(
    world: int, work: Callable[..., Figures], *args: object, serve: Callable[..., None] | None = None
) -> list[Figures]:
    context = multiprocessing.get_context("forkserver")  # whose children share torch's memory: 64 of them fit
    context.set_forkserver_preload(["bench.ranks"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=serve or _serve, args=(rank, world, store.port, theirs, work, args), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()  # so that the end of a process is seen
    try:
        found = []
        for rank, (mine, _) in enumerate(pipes):
            if not mine.poll(_WAIT_SECS):
                raise TimeoutError(f"rank {rank} is not done after {_WAIT_SECS} s")
            found.append(mine.recv())
        return found
    finally:
        for process in processes:
            process.kill()


def _serve(
    rank: int, world: int, port: int, pipe: Connection, work: Callable[..., Figures], args: tuple[object, ...]
) -> None:
    dist.init_process_group("gloo", store=_store(port), rank=rank, world_size=world)
    pipe.send(work(rank, world, *args))


def _serve_without_group(
    rank: int, world: int, port: int, pipe: Connection, work: Callable[..., Figures], args: tuple[object, ...]
) -> None:
    pipe.send(work(rank, world, _store(port), *args))


def _store(port: int) -> Any:
    torch.set_num_threads(1)
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=_WAIT_SECS))


if __name__ == "__main__":
    main()
