"""One contender in its own process, one a rank. Told by three lines: the trial, a file for events, the ranks' port.

Each phase is appended to the file as soon as it is measured, so that a contender that hangs later keeps it.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from bench.common.pagecache import fsync_tree, make_cold
from bench.gpu.contenders import SAVERS, Saver, UnavailableError
from bench.gpu.guests import GUESTS
from bench.gpu.loads import LOADERS, Loader
from bench.gpu.options import Trial
from bench.gpu.raw import RAW, measure_raw
from bench.gpu.train import Ground, StepClock, Trainer, make_trainer, train_for

__all__ = ["contender_keys", "main"]

LEAD_STEPS = 2
"""Before the save, so that the device has work when it comes, as in a real loop."""
MIN_STEPS = 3
"""After a save that is done at once."""
WARM_UP_STEPS = 4
"""Not counted: the first ones are slower."""


def contender_keys(mode: str) -> tuple[str, ...]:
    """Keys of all contenders, in the order of their trials: the limit, then what is compared first."""
    if mode == "load":
        return (RAW, *LOADERS)
    first = (
        "aio-default",
        "aio-half",
        "aio-fenced",
        "aio-guarded",
        "tc-tuned",
        "nvrx-tuned",
        "dcp-async-pinned",
        "nvrx-shm-tuned",
        "torch-save",
    )
    rest = (*SAVERS, *GUESTS)
    return tuple(dict.fromkeys((RAW, *first, *rest)))


class Events:
    """The file that the supervisor reads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin = time.perf_counter()

    def write(self, event: str, **figures: object) -> None:
        """Append one line."""
        line = json.dumps({"event": event, "at_secs": round(time.perf_counter() - self._begin, 3), **figures})
        with self._path.open("a") as file:
            file.write(line + "\n")

    @property
    def secs(self) -> float:
        """Since the process began to work."""
        return time.perf_counter() - self._begin


def main() -> None:
    """Run the trial that the supervisor tells; it may tell none."""
    told = sys.stdin.read().splitlines()
    if len(told) != 3:
        return
    trial, events = Trial.from_json(told[0]), Events(Path(told[1]))
    os.environ["MASTER_PORT"] = told[2]
    try:
        with _ground() as ground:
            _run(trial, ground, events)
            events.write("end")
            sys.stdout.flush()
            sys.stderr.flush()
            # Groups and worker processes of some rivals take long to end, or never do; the supervisor ends them.
            os._exit(0)
    except UnavailableError as error:
        events.write("absent", error=str(error))
    except Exception as error:  # noqa: BLE001 - whatever a rival raises is its row
        traceback.print_exc()
        events.write("failed", error=_told(error))
    sys.stderr.flush()
    os._exit(1)


def _told(error: Exception) -> str:
    """In one line; a worker's traceback says what happened in its last."""
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return " ... ".join(line[:200] for line in dict.fromkeys((lines[0], lines[-1])))


@contextmanager
def _ground() -> Iterator[Ground]:
    has_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_cuda else torch.device("cpu")
    if has_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # a dry run: threads that spin for each other starve on a busy machine
    # DCP's async saves and NVRx need a CPU backend beside training's.
    backend, timeout = "cpu:gloo,cuda:nccl" if has_cuda else "gloo", timedelta(minutes=10)
    dist.init_process_group(backend, timeout=timeout)
    group, saves = (dist.new_group(backend="gloo", timeout=timeout) for _ in range(2))
    yield Ground(rank=dist.get_rank(), world=dist.get_world_size(), device=device, group=group, saves=saves)


def _run(trial: Trial, ground: Ground, events: Events) -> None:
    contenders = SAVERS | GUESTS
    if trial.contender in contenders:
        contenders[trial.contender].check(ground.device)
    if trial.contender in LOADERS:
        LOADERS[trial.contender].check(trial.shape, ground.world)
    torch.manual_seed(ground.rank)
    trainer = make_trainer(trial, ground)
    _collect_garbage()
    cpu, begin = _tree_cpu_secs(), time.perf_counter()
    base = _bare_steps(trainer, ground, trial)
    cpu_rate = (_tree_cpu_secs() - cpu) / (time.perf_counter() - begin)
    _collect_garbage()
    if ground.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ground.device)
    before = _device_bytes(ground)
    events.write(
        "ready",
        tensors=len(trainer.state),
        nbytes=local_bytes(trainer),
        step_secs=statistics.mean(base),
        tokens_per_step=trainer.tokens_per_step,
        device=_uuid(ground.device),
    )
    folder = Path(trial.folder)
    if trial.contender == RAW:
        for name, figures in measure_raw(trainer, ground, folder, trial):
            events.write(name, **figures)
        return
    if trial.mode == "load":
        _load(LOADERS[trial.contender], trial, trainer, ground, events)
        return
    begin = time.perf_counter()
    saver = contenders[trial.contender](trainer, ground, folder)
    events.write("open", secs=time.perf_counter() - begin)
    _save_alone(saver, trial, ground, events)
    _save_beside(saver, trial, base, cpu_rate, events)
    for every in trial.every:
        events.write("every", every=every, **_tokens(saver, trial, every))
    events.write("device", growth_bytes=_device_bytes(ground, peak=True) - before)


def local_bytes(trainer: Trainer) -> int:
    """Bytes of this rank's part of the state."""
    return sum(value.nbytes for value in trainer.local().values())


def _device_bytes(ground: Ground, *, peak: bool = False) -> int:
    if ground.device.type != "cuda":
        return 0
    return torch.cuda.max_memory_reserved(ground.device) if peak else torch.cuda.memory_reserved(ground.device)


def _uuid(device: torch.device) -> str | None:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None


def _bare_steps(trainer: Trainer, ground: Ground, trial: Trial) -> list[float]:
    """Seconds of steps without a save."""
    return train_for(trainer, ground, WARM_UP_STEPS + trial.base_steps)[WARM_UP_STEPS:]


def _tree_cpu_secs() -> float:
    """User and system time of this process, its children and those it has reaped."""
    process = psutil.Process()
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            total += sum(one.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


def _settle(ground: Ground) -> None:
    """Dirty pages, garbage and kernels of what was before must not be paid for by what comes."""
    ground.synchronize()
    _collect_garbage()
    ground.barrier()
    os.sync()
    ground.barrier()


def _collect_garbage() -> None:
    """Now, and never of what is alive now while steps are timed: that takes 0.2 to 0.5 s of one."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _remove(saver: Saver) -> None:
    saver.ground.barrier()
    if saver.ground.rank == 0:
        saver.remove()
    saver.ground.barrier()


# -- phases ---------------------------------------------------------------------------------------


def _save_alone(saver: Saver, trial: Trial, ground: Ground, events: Events) -> None:
    """The first save, then, of those that are async, some with nothing beside them."""
    took = 0.0
    for number in range(1 + trial.repeats):
        # Time is kept for one save beside training.
        is_late = events.secs + 2.2 * took > trial.secs
        if number and not ground.all_agree(saver.is_async and not is_late):
            break
        begin = time.perf_counter()
        events.write("alone", number=number, **_one_alone(saver, number, ground))
        _remove(saver)
        took = time.perf_counter() - begin


def _one_alone(saver: Saver, number: int, ground: Ground) -> dict[str, float]:
    _settle(ground)
    cpu, begin = _tree_cpu_secs(), time.perf_counter()
    saver.save(number)
    free = time.perf_counter()
    saver.wait_staged()
    staged = time.perf_counter()
    saver.wait()
    done = time.perf_counter()
    used = _tree_cpu_secs() - cpu
    return {
        "blocked_secs": free - begin,
        "staged_secs": staged - begin,
        "done_secs": done - begin,
        "durable_secs": done - begin + _fsync_secs(saver),
        "cpu_secs": used,
        **saver.told(),
    }


def _fsync_secs(saver: Saver) -> float:
    """What it takes to make durable what the contender called done."""
    begin = time.perf_counter()
    if saver.needs_fsync:
        fsync_tree(saver.folder)
    return time.perf_counter() - begin


def _save_beside(saver: Saver, trial: Trial, base: list[float], cpu_rate: float, events: Events) -> None:
    """``cpu_rate``: CPU seconds a second that training takes by itself."""
    trainer, ground, longest = saver.trainer, saver.ground, 0.0
    for number in range(max(1, trial.repeats)):
        if number and not ground.all_agree(events.secs + 1.1 * longest < trial.secs):
            break
        begin = time.perf_counter()
        figures = _one_beside(saver, 1_000 + number, cpu_rate)
        after = _bare_steps(trainer, ground, trial)
        _remove(saver)
        longest = max(longest, time.perf_counter() - begin)
        events.write("beside", base_secs=base + after, **figures)


def _one_beside(saver: Saver, number: int, cpu_rate: float) -> dict[str, object]:
    """One save while training goes on, until it is done on all ranks and a step longer."""
    trainer, ground = saver.trainer, saver.ground
    _settle(ground)
    # CPU time is read outside of the steps that are timed: it takes milliseconds of this thread.
    cpu, trains_from = _tree_cpu_secs(), time.perf_counter()
    clock = StepClock(ground)
    for _ in range(LEAD_STEPS):
        _step(trainer, saver, clock)
    begin = time.perf_counter()
    saver.save(number)
    free = time.perf_counter()
    staged, done, steps = 0.0, 0.0, 0
    while not done or steps < MIN_STEPS:
        trainer.compute()
        with saver.updating():
            staged = staged or time.perf_counter()
            trainer.update()
        is_done = saver.is_done()
        clock.end_step()
        steps += 1
        if not done and ground.all_agree(is_done):
            done = time.perf_counter()
    _step(trainer, saver, clock)
    saver.wait()
    steps_secs = clock.steps_secs()[LEAD_STEPS:]
    trained_secs = time.perf_counter() - trains_from - (0.0 if saver.is_async else free - begin)
    used = max(0.0, _tree_cpu_secs() - cpu - cpu_rate * trained_secs)
    done_secs = (done if saver.is_async else free) - begin
    return {
        "blocked_secs": free - begin,
        "staged_secs": (staged if saver.is_async else free) - begin,
        "done_secs": done_secs,
        "durable_secs": done_secs + _fsync_secs(saver),
        "cpu_secs": used,
        "steps_secs": steps_secs,
    }


def _step(trainer: Trainer, saver: Saver, clock: StepClock) -> bool:
    trainer.compute()
    with saver.updating():
        trainer.update()
    is_done = saver.is_done()
    clock.end_step()
    return is_done


def _tokens(saver: Saver, trial: Trial, every: int) -> dict[str, float]:
    """Tokens a second of all ranks: a save, ``every`` steps, a save ...; each waits for the one before."""
    trainer, ground = saver.trainer, saver.ground
    room = shutil.disk_usage(trial.folder).free / (local_bytes(trainer) * ground.world)
    wanted = 6 if every < 4 else 3 if every < 40 else 1
    saves = max(1, int(ground.smallest(min(wanted, room - 1))))
    before = _bare_steps(trainer, ground, trial)
    _settle(ground)
    train_for(trainer, ground, WARM_UP_STEPS)
    clock, begin = StepClock(ground), time.perf_counter()
    for number in range(saves):
        saver.wait()
        saver.save(2_000 + 1_000 * every + number)
        for _ in range(every):
            _step(trainer, saver, clock)
    saver.wait()
    ground.synchronize()
    secs = time.perf_counter() - begin
    bare = before + _bare_steps(trainer, ground, trial)
    _remove(saver)
    tokens = trainer.tokens_per_step * ground.world
    return {
        "saves": saves,
        "tokens_per_sec": tokens * every * saves / secs,
        "bare_tokens_per_sec": tokens / statistics.mean(bare),
        "late_step_secs": statistics.median(clock.steps_secs()[every // 2 : every]),
    }


def _load(kind: type[Loader], trial: Trial, trainer: Trainer, ground: Ground, events: Events) -> None:
    loader = kind(trainer, ground, Path(trial.folder))
    longest = 0.0
    for number in range(1 + trial.repeats):
        if number > 1 and not ground.all_agree(events.secs + longest < trial.secs):
            break
        make_cold(loader.folder)
        _settle(ground)
        cpu, begin = _tree_cpu_secs(), time.perf_counter()
        loader.load()
        ground.synchronize()
        secs = time.perf_counter() - begin
        events.write("load", number=number, secs=secs, cpu_secs=_tree_cpu_secs() - cpu)
        longest = max(longest, secs)
    loader.verify()


if __name__ == "__main__":
    main()
