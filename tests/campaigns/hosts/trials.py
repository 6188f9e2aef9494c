"""Trials of the engine on two hosts. Each one returns what it measured and whether that is what the engine promises."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from aio_ckpt import AioCkptError, EngineConfig, PerRank, Shard, StoreCoordinator, SyncCheckpointEngine
from aio_ckpt.storage.probe import try_names
from aio_ckpt.storage.probe_peer import Meeting
from tests.campaigns.hosts.cluster import EXPORTED, SHARED, Call, Host, calls_between, remote_calls

_PORTS = itertools.count(29555)
_STALE_SECS = 180.0
_CUT_SECS = 40.0


@dataclass(frozen=True)
class Measured:
    """What a trial found."""

    good: bool
    found: str
    """One sentence."""
    figures: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """Two hosts and the mount's name."""

    first: Host
    second: Host
    mount: str
    loads: int
    """Loads beside a writer that removes steps."""
    training_secs: float
    """Time for which two ranks train."""


def state(step: int) -> dict[str, object]:
    """A state of 16 MiB whose values tell the step."""
    return {f"layer{i}": torch.full((256, 1024), float(step)) for i in range(16)} | {"step": step}


def config(**settings: object) -> EngineConfig:
    """The settings of the trials."""
    given: dict[str, object] = {"stale_after_secs": _STALE_SECS, "stall_timeout_secs": 60.0}
    return EngineConfig(**(given | settings))  # type: ignore[arg-type]


def first_step_is_seen_at_once(cluster: Cluster, root: Path) -> Measured:
    """A reader on another host that asked before the first save sees the first step within a second of its commit."""
    committed = _signal("committed")
    reader = cluster.second.start(_seen_after, root, committed)
    time.sleep(3.0)
    saved = cluster.first.call(_save_steps, root, 1, committed)
    seen = reader.outcome()
    if saved.error or seen.error:
        return Measured(False, saved.error or seen.error)
    late = float(seen.value) - float(committed.read_text())  # type: ignore[arg-type]
    return Measured(late < 1.0, f"the first step was seen {late:.2f} s after its commit", {"late_secs": round(late, 2)})


def readers_load_beside_retention(cluster: Cluster, root: Path) -> Measured:
    """No load fails while a writer on another host saves and removes steps."""
    enough = _signal("enough")
    writer = cluster.first.start(_save_until, root, enough)
    loads = cluster.second.call(_load_often, root, cluster.loads, timeout=60.0 + 3.0 * cluster.loads)
    enough.touch()
    saved = writer.outcome()
    if loads.error or saved.error:
        return Measured(False, loads.error or saved.error)
    good, errors = _counted(loads.value)
    text = f"{good} of {good + len(errors)} loads were good beside {saved.value} saves"
    return Measured(
        not errors, "; ".join([text, *errors[:2]]), {"good": good, "bad": len(errors), "saves": saved.value}
    )


def a_checkpoint_is_replaced(cluster: Cluster, root: Path) -> Measured:
    """A step and a path are saved again, and a reader on another host finds a checkpoint at each instant."""
    enough = _signal("enough")
    first = cluster.first.call(_save_path, root / "best", 1)
    if first.error:
        return Measured(False, first.error)
    reader = cluster.second.start(_load_path_often, root / "best", enough)
    replaced = cluster.first.call(_replace, root)
    enough.touch()
    loads = reader.outcome()
    if replaced.error or loads.error:
        return Measured(False, replaced.error or loads.error)
    good, errors = _counted(loads.value)
    text = f"replaced ten times; {good} of {good + len(errors)} loads were good"
    return Measured(not errors, "; ".join([text, *errors[:2]]), {"good": good, "bad": len(errors)})


def two_ranks_save_and_load(cluster: Cluster, root: Path) -> Measured:
    """Two ranks on two hosts save and load, also by path, right after the save."""
    return _of_both(cluster, _group, (root, root))


def two_ranks_train_beside_a_reader(cluster: Cluster, root: Path) -> Measured:
    """Two ranks on two hosts save, overwrite, save by path and load for a while; a reader loads the newest step."""
    enough = _signal("enough")
    reader = cluster.second.start(_load_newest, root, enough)
    trained = _of_both(
        cluster, _train, (root, root), cluster.training_secs, timeout=200.0 + 2.0 * cluster.training_secs
    )
    enough.touch()
    loads = reader.outcome()
    if not trained.good or loads.error:
        return Measured(False, f"{trained.found}; {loads.error}")
    good, errors = _counted(loads.value)
    text = f"{trained.found}; {good} of {good + len(errors)} loads of the reader were good"
    return Measured(not errors and good > 0, "; ".join([text, *errors[:2]]), trained.figures | {"loads": good})


def what_does_not_change_is_cloned(cluster: Cluster, root: Path) -> Measured:
    """A writer clones what stays, beside retention; a reader on another host finds all of it in each step."""
    saved = cluster.first.call(_save_adapters, root)
    loaded = cluster.second.call(_load_adapters, root)
    if saved.error or loaded.error:
        return Measured(False, saved.error or loaded.error)
    clones, steps = saved.value, loaded.value
    text = f"{clones} of 8 saves cloned; steps {steps} are as saved"
    return Measured(clones == 6 and steps == [7, 8], text, {"clones": clones})


def ranks_mount_at_different_paths(cluster: Cluster, root: Path) -> Measured:
    """Two ranks whose hosts mount the directory at different paths save and load one run."""
    roots = (Path("/mnt/one") / root.name, Path("/mnt/other") / root.name)
    return _of_both(cluster, _group_save_only, roots, mounted_at=tuple(path.parent for path in roots))


def a_probe_finds_what_the_mount_keeps(cluster: Cluster, root: Path) -> Measured:
    """Two hosts probe the directory together, and find nothing bad."""
    cluster.first.call(root.mkdir)
    calls = [host.start(_probe, root) for host in (cluster.first, cluster.second)]
    outcomes = [call.outcome(200.0) for call in calls]
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        return Measured(False, "; ".join(errors))
    rows = [row for outcome in outcomes for row in outcome.value or ()]  # type: ignore[attr-defined]
    bad = [row for row in rows if row[2] == "bad"]
    return Measured(bool(rows) and not bad, str(bad or rows))


def second_writer_is_refused(cluster: Cluster, root: Path) -> Measured:
    """A second writer on another host is refused by name while the first one holds the root."""
    return _second_writer(cluster.first, cluster.second, root)


def second_writer_of_the_same_name_is_refused(cluster: Cluster, root: Path) -> Measured:
    """A second writer is refused if its host has the name and the machine id of the first one."""
    twin = cluster.second.named(cluster.first.name)
    return _second_writer(cluster.first, twin, root)


def a_killed_writer_is_followed(cluster: Cluster, root: Path) -> Measured:
    """After the writer's host is lost, a writer on another host goes on once the claim is stale; nothing is lost."""
    committed = _signal("committed")
    writer = cluster.first.start(_save_steps, root, 3, committed, 600.0)
    _await(committed)
    cluster.first.cut_off()
    try:
        writer.kill()
        early = cluster.second.call(_save_one, root, 100)
        _age(root, _STALE_SECS + 1.0)
        begun = time.monotonic()
        late = cluster.second.call(_save_one, root, 101)  # though the server keeps the lock of the host that is gone
        secs = time.monotonic() - begun
        steps = cluster.second.call(_steps, root)
    finally:
        cluster.first.connect()
    good = not late.error and {3, 101} <= set(steps.value or ())  # type: ignore[call-overload]
    text = (
        f"at once: {early.error[:160] or 'saved'}; after the claim was stale: {late.error or f'saved in {secs:.1f} s'}"
    )
    return Measured(good, f"{text}; steps {steps.value or steps.error}")


def a_writer_that_is_cut_off_says_so_and_goes_on(cluster: Cluster, root: Path) -> Measured:
    """A writer that does not reach the server for 40 s logs that within 60 s; what it called durable is there."""
    begun, enough = _signal("begun"), _signal("enough")
    writer = cluster.first.start(_save_and_listen, root, begun, enough)
    _await(begun)
    cluster.first.cut_off()
    try:
        time.sleep(_CUT_SECS)
    finally:
        cluster.first.connect()
    time.sleep(_CUT_SECS)
    enough.touch()
    saved = writer.outcome(240.0)
    steps = cluster.second.call(_verified_steps, root)
    if saved.error or steps.error:
        return Measured(False, saved.error or steps.error)
    assert isinstance(saved.value, Saved)
    last, lines = saved.value.durable[-1], saved.value.lines
    good = bool(lines) and last in steps.value  # type: ignore[operator]
    text = f"durable to step {last}, steps that verify {steps.value}; {saved.value.failures}; logged: {lines[:2]}"
    return Measured(good, text)


def a_paused_writer_is_fenced(cluster: Cluster, root: Path) -> Measured:
    """A writer that stood still while another one took over fails, and nothing of its save is visible."""
    committed, go = _signal("committed"), _signal("go")
    writer = cluster.first.start(_save_two, root, committed, go)
    _await(committed)
    writer.stop()
    try:
        _age(root, _STALE_SECS + 1.0)
        taken = cluster.second.call(_save_one, root, 100)
        go.touch()
    finally:
        writer.go_on()
    resumed = writer.outcome()
    steps = cluster.second.call(_steps, root)
    found = set(steps.value or ())  # type: ignore[call-overload]
    return Measured(
        not taken.error and "RootError" in str(resumed.value) and found == {1, 100},
        f"takeover: {taken.error or 'saved'}; resumed writer: {resumed.value or resumed.error}; steps {sorted(found)}",
    )


def a_restarted_server_loses_nothing(cluster: Cluster, root: Path) -> Measured:
    """The server is restarted while saves run: each save that was called durable is found afterwards."""
    enough = _signal("enough")
    writer = cluster.first.start(_save_until, root, enough, 3)
    time.sleep(2.0)
    subprocess.run(["rpc.nfsd", "0"], check=True)
    time.sleep(1.0)
    subprocess.run(["rpc.nfsd", "-G", "10", "-L", "10", "-V", "3", "-V", "4", "8"], check=True)
    time.sleep(15.0)
    enough.touch()
    saved = writer.outcome()
    steps = cluster.second.call(_verified_steps, root)
    good = not saved.error and not steps.error and saved.value in (steps.value or ())  # type: ignore[operator]
    return Measured(
        good, f"saved to step {saved.value or saved.error}; steps that verify: {steps.value or steps.error}"
    )


def a_full_server_is_reported(cluster: Cluster, root: Path) -> Measured:
    """A save that finds the server's disk full fails by name, older steps stay, and the next save works."""
    first = cluster.first.call(_save_one, root, 1)
    filler = EXPORTED / "filler"
    free = os.statvfs(EXPORTED)
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(4096, free.f_bfree * free.f_frsize * 99 // 100 - (8 << 20)))
    begun = time.monotonic()
    full = cluster.first.call(_save_one, root, 2)
    secs = time.monotonic() - begun
    filler.unlink()
    later = cluster.first.call(_save_one, root, 3)
    steps = cluster.second.call(_verified_steps, root)
    good = not first.error and "space" in full.error and not later.error and list(steps.value or ()) == [1, 3]  # type: ignore[call-overload]
    return Measured(
        good and secs < 60.0,
        f"full: {full.error[:200] or 'saved'} after {secs:.1f} s; later: {later.error or 'saved'}; steps {steps.value}",
    )


TRIALS: tuple[Callable[[Cluster, Path], Measured], ...] = (
    first_step_is_seen_at_once,
    readers_load_beside_retention,
    a_checkpoint_is_replaced,
    two_ranks_save_and_load,
    two_ranks_train_beside_a_reader,
    what_does_not_change_is_cloned,
    ranks_mount_at_different_paths,
    a_probe_finds_what_the_mount_keeps,
    second_writer_is_refused,
    second_writer_of_the_same_name_is_refused,
    a_killed_writer_is_followed,
    a_writer_that_is_cut_off_says_so_and_goes_on,
    a_paused_writer_is_fenced,
    a_restarted_server_loses_nothing,
    a_full_server_is_reported,
)


# What runs on a host.


@contextmanager
def _engine(root: Path, **settings: object) -> Iterator[SyncCheckpointEngine]:
    torch.set_num_threads(1)
    with SyncCheckpointEngine(root, config(**settings)) as engine:
        yield engine


def _probe(root: Path) -> list[tuple[str, str, str]]:
    folder = root / f"of-{socket.gethostname()}"
    folder.mkdir()
    meeting = Meeting(root / "meeting", 100.0, print)
    findings = [*try_names(folder), *meeting.findings()]
    meeting.end()
    return [(each.check, each.found, each.verdict) for each in findings]


def _seen_after(root: Path, committed: Path) -> float:
    with _engine(root) as engine:
        deadline = time.monotonic() + 90.0
        while time.monotonic() < deadline:
            if engine.latest_step() == 1:
                return time.time()
            time.sleep(0.05)
    raise TimeoutError(f"step 1 was not seen within 90 s ({committed.exists()=})")


def _save_steps(root: Path, last: int, committed: Path, hold_secs: float = 0.0) -> None:
    with _engine(root) as engine:
        for step in range(1, last + 1):
            engine.save(state(step), step=step).result()
        _stamp(committed)
        time.sleep(hold_secs)


def _adapters(step: int) -> dict[str, object]:
    """Four MiB that stay, and a little that changes."""
    base = torch.nn.Parameter(torch.arange(float(1 << 20)), requires_grad=False)
    return {"base": base, "adapter": torch.full((1000,), float(step))}


def _save_adapters(root: Path) -> int:
    with _engine(root, keep_last=2, relink_limit=4) as engine:
        reports = [engine.save(_adapters(step), step=step).result() for step in range(1, 9)]
    return sum(report is not None and report.cloned_bytes > 0 for report in reports)


def _load_adapters(root: Path) -> list[int]:
    with _engine(root) as engine:
        steps = engine.steps()
        for step in steps:
            loaded = {"base": torch.zeros(1 << 20), "adapter": torch.zeros(1000)}
            engine.load(loaded, step=step)
            for name, tensor in _adapters(step).items():
                assert torch.equal(loaded[name], tensor), (step, name)  # type: ignore[arg-type]
        return steps


def _save_until(root: Path, enough: Path, keep_last: int = 1) -> int:
    with _engine(root, keep_last=keep_last) as engine:
        step = 0
        while not enough.exists():
            step += 1
            engine.save(state(step), step=step).result()
        return step


@dataclass(frozen=True)
class Saved:
    """What a writer did."""

    durable: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Warnings in the log."""


def _save_and_listen(root: Path, begun: Path, enough: Path) -> Saved:
    saved, step = Saved(), 0
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: saved.lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("aio_ckpt").addHandler(handler)
    with _engine(root, keep_last=3) as engine:
        while not enough.exists():
            step += 1
            try:
                engine.save(state(step), step=step).result()
                saved.durable.append(step)
            except AioCkptError as error:
                saved.failures.append(f"step {step}: {type(error).__name__}: {error}"[:200])
            if step == 2:
                _stamp(begun)
    return saved


def _load_often(root: Path, count: int) -> tuple[int, list[str]]:
    good, errors = 0, []
    with _engine(root) as engine:
        while engine.latest_step() is None:
            time.sleep(0.05)
        for _ in range(count):
            loaded = state(0)
            try:
                engine.load(loaded)
            except AioCkptError as error:
                errors.append(f"{type(error).__name__}: {error}"[:300])
                continue
            if any(float(loaded[f"layer{i}"][0, 0]) != loaded["step"] for i in range(16)):  # type: ignore[index]
                errors.append(f"a mixture was loaded at step {loaded['step']}")
            good += 1
    return good, errors


def _counted(value: object) -> tuple[int, list[str]]:
    assert isinstance(value, tuple)
    good, errors = value
    return good, errors


def _save_path(path: Path, step: int) -> None:
    with _engine(path.parent) as engine:
        engine.save(state(step), path=path).result()


def _replace(root: Path) -> None:
    with _engine(root) as engine:
        for step in range(2, 12):
            engine.save(state(step), path=root / "best").result()
        engine.save(state(1), step=1).result()
        engine.save(state(2), step=1, overwrite=True).result()
        loaded = state(0)
        engine.load(loaded, step=1)
        if loaded["step"] != 2:
            raise AssertionError(f"the replaced step holds the values of {loaded['step']}")


def _load_path_often(path: Path, enough: Path) -> tuple[int, list[str]]:
    good, errors = 0, []
    with _engine(path.parent) as engine:
        while not enough.exists():
            loaded = state(0)
            try:
                engine.load(loaded, path=path)
                good += 1
            except AioCkptError as error:
                errors.append(f"{type(error).__name__}: {error}"[:300])
    return good, errors


def _save_one(root: Path, step: int) -> None:
    with _engine(root) as engine:
        engine.save(state(step), step=step).result()


def _save_two(root: Path, committed: Path, go: Path) -> str:
    with _engine(root) as engine:
        engine.save(state(1), step=1).result()
        _stamp(committed)
        _await(go)
        try:
            engine.save(state(2), step=2).result()
        except AioCkptError as error:
            return f"{type(error).__name__}: {error}"
    return "saved"


def _steps(root: Path) -> list[int]:
    with _engine(root) as engine:
        return list(engine.steps())


def _verified_steps(root: Path) -> list[int]:
    with _engine(root) as engine:
        good = []
        for step in engine.steps():
            loaded = state(0)
            engine.load(loaded, step=step)
            if float(loaded["layer15"][0, 0]) == step == loaded["step"]:  # type: ignore[index]
                good.append(step)
        return good


_COUNTED = 9  # saves of which the calls are counted


def _group_state(rank: int, step: int) -> dict[str, object]:
    half = torch.full((1024, 1024), float(step * 10 + rank))
    return {
        "sharded": Shard(half, global_shape=(2048, 1024), offsets=(rank * 1024, 0)),
        "own": PerRank(rank),
        "replicated": torch.full((512, 1024), float(step)),
        "step": step,
    }


@contextmanager
def _rank(
    root: Path, rank: int, address: str, port: int, **settings: object
) -> Iterator[tuple[SyncCheckpointEngine, Any]]:
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
        address, port, 2, is_master=rank == 0, timeout=timedelta(seconds=100)
    )
    coordinator = StoreCoordinator(store, rank=rank, world_size=2)
    with SyncCheckpointEngine(root, config(keep_last=2, **settings), coordinator=coordinator) as engine:
        yield engine, store


def _group(root: Path, rank: int, address: str, port: int) -> dict[str, object]:
    os.path.exists(root)  # The client keeps the answer that the name is missing.
    figures: dict[str, object] = {}
    with _rank(root, rank, address, port) as (engine, _):
        saves: list[int] = []
        for step in range(1, _COUNTED + 1):
            before = remote_calls()
            engine.save(_group_state(rank, step), step=step).result()
            saves.append(sum(calls_between(before, remote_calls()).values()))
            figures["kinds"] = calls_between(before, remote_calls())
            time.sleep(0.3)
        # The first save opens what the others find open. What the client asks again of its own depends on its clock.
        figures["calls a save"] = statistics.median_low(saves[1:])
        figures["calls of each save"] = saves
        for _ in range(2):
            before, loaded = remote_calls(), _group_state(rank, 0)
            engine.load(loaded)
            figures["calls a load"] = sum(calls_between(before, remote_calls()).values())
            if loaded["step"] != _COUNTED:
                raise AssertionError(f"step {loaded['step']} was loaded")
        for step in (_COUNTED + 1, _COUNTED + 2):
            engine.save(_group_state(rank, step), path=root / "best").result()
            loaded = _group_state(rank, 0)
            engine.load(loaded, path=root / "best")
            if loaded["step"] != step:
                raise AssertionError(f"step {loaded['step']} was loaded from the path in place of {step}")
    return figures


def _train(root: Path, rank: int, address: str, port: int, secs: float) -> dict[str, object]:
    begun, step = time.monotonic(), 0
    with _rank(root, rank, address, port) as (engine, store):
        while True:
            step += 1
            if rank == 0:  # which alone looks at the clock
                store.set(f"round {step}", "on" if time.monotonic() - begun < secs else "end")
            if store.get(f"round {step}") == b"end":
                store.set(f"rank {rank}", "ended")
                store.get(f"rank {1 - rank}")  # the store ends with rank 0
                return {"steps": step - 1}
            engine.save(_group_state(rank, step), step=step).result()
            if step % 3 == 0:
                engine.save(_group_state(rank, step), step=step, overwrite=True).result()
                engine.save(_group_state(rank, step), path=root / "best").result()
            if step % 5 == 0:
                for path in (None, *([root / "best"] if step >= 3 else [])):
                    loaded = _group_state(rank, 0)
                    engine.load(loaded, path=path)
                    saved = step if path is None else step // 3 * 3
                    if loaded["step"] != saved or float(loaded["replicated"][0, 0]) != saved:  # type: ignore[index]
                        raise AssertionError(f"{path or 'the newest step'} holds {loaded['step']}, not {saved}")


def _load_newest(root: Path, enough: Path) -> tuple[int, list[str]]:
    """Load all of the ranks' shards, in one process, until there is ``enough``."""
    good, errors, newest = 0, [], 0
    with _engine(root) as engine:
        while not enough.exists():
            if engine.latest_step() is None:
                time.sleep(0.05)
                continue
            loaded = {"sharded": torch.zeros(2048, 1024), "replicated": torch.zeros(512, 1024), "step": 0}
            try:
                engine.load(loaded)
            except AioCkptError as error:
                errors.append(f"{type(error).__name__}: {error}"[:300])
                continue
            step = int(loaded["step"])  # type: ignore[call-overload]
            rows = [float(loaded["sharded"][0, 0]), float(loaded["sharded"][-1, -1]), float(loaded["replicated"][0, 0])]  # type: ignore[index]
            if rows != [step * 10, step * 10 + 1, step] or step < newest:
                errors.append(f"step {step} after {newest} holds {rows}")
            good, newest = good + 1, step
    return good, errors


def _group_save_only(root: Path, rank: int, address: str, port: int) -> dict[str, object]:
    with _rank(root, rank, address, port) as (engine, _):
        engine.save(_group_state(rank, 1), step=1).result()
        loaded = _group_state(rank, 0)
        engine.load(loaded)
        if loaded["step"] != 1:
            raise AssertionError(f"step {loaded['step']} was loaded")
    return {}


def _of_both(
    cluster: Cluster,
    function: Callable[..., object],
    roots: tuple[Path, Path],
    *given: object,
    mounted_at: tuple[Path, ...] = (SHARED, SHARED),
    timeout: float = 200.0,
) -> Measured:
    port = next(_PORTS)
    calls: list[Call] = []
    for rank, host in enumerate((cluster.first, cluster.second)):
        arguments = (roots[rank], rank, cluster.first.address, port, *given)
        calls.append(host.start(function, *arguments, mounted_at=mounted_at[rank]))
    outcomes = [call.outcome(timeout) for call in calls]
    errors = [outcome.error for outcome in outcomes if outcome.error]
    figures = {f"rank {rank}": outcome.value for rank, outcome in enumerate(outcomes)}
    return Measured(not errors, "; ".join(errors) or f"good: {figures}", figures)


def _second_writer(first: Host, second: Host, root: Path) -> Measured:
    committed = _signal("committed")
    writer = first.start(_save_steps, root, 1, committed, 30.0)
    _await(committed)
    refused = second.call(_save_one, root, 2)
    writer.kill()
    return Measured("RootError" in refused.error, refused.error[:300] or "the second writer was let in")


def _signal(name: str) -> Path:
    """Return the path of a file, on no shared file system, that does not exist yet."""
    folder = Path("/run/signals") / str(time.monotonic_ns())
    folder.mkdir(parents=True)
    return folder / name


def _stamp(path: Path) -> None:
    path.with_suffix(".new").write_text(str(time.time()))
    path.with_suffix(".new").rename(path)


def _await(path: Path, timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing came within {timeout:.0f} s: {path.name}")
        time.sleep(0.02)


def _age(root: Path, secs: float) -> None:
    """Make what the writer touches look ``secs`` older, on the server: no trial waits for minutes."""
    folder = EXPORTED / root.relative_to(SHARED) / ".aio_ckpt"
    for file in folder.iterdir():
        old = file.stat().st_mtime - secs
        os.utime(file, (old, old))
