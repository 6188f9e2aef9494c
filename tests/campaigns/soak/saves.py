"""Thousands of saves that change and fail; memory, files, threads and disk must stay flat."""

from __future__ import annotations

import argparse
import errno
import gc
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import torch

from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.errors import SaveCancelledError, StallError, WriteError
from aio_ckpt.format.root_names import CLAIM_FILE, ENGINE_DIR, LOCK_FILE
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.data_file import DataFile
from aio_ckpt.storage.local import Storage
from tests.campaigns.common import keep_result, log

__all__ = ["Limits", "Outcome", "Sample", "main", "soak", "verdict"]

_KEEP_LAST = 3
_FAULTS = (errno.ENOSPC, errno.EIO, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may grow, per save."""

    rss_bytes: float = 1024.0
    """Slope of the resident memory."""
    files: float = 1e-4
    """Slope of the open descriptors."""
    threads: float = 1e-4
    """Slope of the threads."""
    disk_bytes: float = 64.0
    """Slope of the bytes under the root, beside those of the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the process holds after one save, nothing being pending."""

    save: int
    """Number of the save."""
    rss_bytes: int
    """Resident memory."""
    files: int
    """Open descriptors."""
    threads: int
    """Threads."""
    disk_bytes: int
    """Below the root, beside what belongs to the steps: their size changes with the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run."""

    saves: int
    """Saves asked for."""
    committed: int
    """Saves that became visible."""
    failed: int
    """Saves that an injected failure, a cancellation or a deadline ended."""
    plan_misses: int
    """Saves that were planned anew: the structure had changed."""
    wall_secs: float
    """Time of the whole run."""
    first: int
    """Slopes are taken from this save on."""
    slopes: dict[str, float]
    """Growth a save, by least squares."""
    samples: list[Sample]
    """Measured now and then."""
    left: list[str]
    """Names below the root, once the engine is closed, that no step which is kept explains."""


class FailingStorage(Storage):
    """The local file system; the call after :meth:`arm` counted down raises instead."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._calls_left = -1
        self._errno = 0

    def arm(self, calls: int, code: int) -> None:
        """Fail the call after ``calls`` more."""
        self._calls_left, self._errno = calls, code

    def disarm(self) -> None:
        """No failure."""
        self._calls_left = -1

    def _count(self, path: Path) -> None:
        self._calls_left -= 1
        if self._calls_left == 0:
            raise WriteError(self._errno, os.strerror(self._errno), str(path))

    async def create_data_file(self, path: Path, nbytes: int) -> DataFile:
        """See :class:`Storage`."""
        self._count(path)
        return await super().create_data_file(path, nbytes)

    async def write_file(self, path: Path, *parts: bytes) -> None:
        """See :class:`Storage`."""
        self._count(path)
        await super().write_file(path, *parts)

    async def make_dir(self, path: Path) -> None:
        """See :class:`Storage`."""
        self._count(path)
        await super().make_dir(path)

    async def make_dirs(self, *paths: Path) -> None:
        """See :class:`Storage`."""
        self._count(paths[0])
        await super().make_dirs(*paths)

    async def sync_dir(self, path: Path) -> None:
        """See :class:`Storage`."""
        self._count(path)
        await super().sync_dir(path)

    async def rename(self, src: Path, dst: Path) -> None:
        """See :class:`Storage`."""
        self._count(dst)
        await super().rename(src, dst)


class States:
    """Small states whose structure changes every so often, and their values always."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._state: dict[str, object] = {}
        self._anew()

    def next(self, number: int) -> dict[str, object]:
        """The state of save ``number``."""
        if number % 7 == 0:
            self._anew()
        for tensor in self._state.values():
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(number % 251)
        return {**self._state, "step": number, "note": "x" * self._rng.randrange(200), "array": np.full(8, number)}

    def _anew(self) -> None:
        kinds = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
        self._state = {
            f"layer.{self._rng.randrange(40)}.{kind}": torch.zeros(self._rng.randrange(1, 4096), dtype=kind)
            for kind in self._rng.choices(kinds, k=self._rng.randrange(1, 12))
        }


def soak(root: Path, saves: int, *, seed: int = 0, every: int | None = None, first: int | None = None) -> Outcome:
    """Save ``saves`` times; every 11th is given a failing storage, every 13th is cancelled, every 17th hurried."""
    rng, began = random.Random(seed), time.perf_counter()
    every = every or max(10, saves // 400)
    first = saves // 10 if first is None else first
    executor = Executor("soak", 4)
    storage = FailingStorage(executor)
    states, samples, failed = States(rng), list[Sample](), 0
    config = EngineConfig(workers=2, max_in_flight=2, keep_last=_KEEP_LAST, on_failure="log", direct_io="off")
    engine = CheckpointEngine(root, config, storage=storage)
    try:
        for number in range(1, saves + 1):
            failed += not _save(engine, storage, states.next(number), number, rng)
            if number % every == 0:
                samples.append(_sample(root, number))
        misses = engine.plan_misses
    finally:
        engine.close_blocking()
        executor.close(10.0)
    return Outcome(
        saves=saves,
        committed=saves - failed,
        failed=failed,
        plan_misses=misses,
        wall_secs=time.perf_counter() - began,
        first=first,
        slopes=_slopes([sample for sample in samples if sample.save >= first]),
        samples=samples,
        left=_left(root),
    )


def _save(
    engine: CheckpointEngine, storage: FailingStorage, state: dict[str, object], number: int, rng: random.Random
) -> bool:
    """Whether it was committed. Waited for every time, so that what a sample holds is what stays."""
    if number % 11 == 0:
        storage.arm(rng.randrange(1, 10), rng.choice(_FAULTS))
    try:
        ticket = engine.save(state, deadline_secs=1e-3 if number % 17 == 0 else None)
        if number % 13 == 0:
            ticket.cancel()
        ticket.result()
    except (WriteError, SaveCancelledError, StallError):
        return False
    finally:
        storage.disarm()
    return True


def _sample(root: Path, number: int) -> Sample:
    gc.collect()
    process = psutil.Process()
    return Sample(
        save=number,
        rss_bytes=process.memory_info().rss,
        files=process.num_fds(),
        threads=process.num_threads(),
        disk_bytes=_disk_bytes(root),
    )


def _disk_bytes(root: Path) -> int:
    """Retention works beside the saves: what it is about to delete does not count here, but at the end (``left``)."""
    tops = [path for path in root.iterdir() if not path.name.startswith(("step_", ENGINE_DIR))]
    tops += [path for path in (root / ENGINE_DIR).iterdir() if path.name != "trash"]
    return sum(path.lstat().st_blocks * 512 for top in tops for path in (top, *top.rglob("*")))


def _left(root: Path) -> list[str]:
    """Everything but the newest steps, the lock and empty directories of the engine's own."""
    steps = sorted(path for path in root.iterdir() if path.name.startswith("step_"))
    others = [path for path in root.iterdir() if not path.name.startswith(("step_", ENGINE_DIR))]
    own = [path for top in (root / ENGINE_DIR).iterdir() if top.is_dir() for path in top.iterdir()]
    kept = (root / LOCK_FILE, root / CLAIM_FILE)
    files = [path for path in (root / ENGINE_DIR).iterdir() if path.is_file() and path not in kept]
    return [str(path.relative_to(root)) for path in (*steps[:-_KEEP_LAST], *others, *own, *files)]


def _slopes(samples: Sequence[Sample]) -> dict[str, float]:
    saves = [sample.save for sample in samples]
    fields = asdict(Limits())
    return {name: float(np.polyfit(saves, [getattr(s, name) for s in samples], 1)[0]) for name in fields}


_ONCE = {"rss_bytes": 1 << 20, "files": 1, "threads": 1}
"""Growth of a whole run that is no growth a save: memory settles, and a retention pass may hold a descriptor in one
sample. In 10,000 saves it is within the limits, in 60 it would be beyond them."""


def verdict(outcome: Outcome, limits: Limits) -> list[str]:
    """What grew too much, and what is left; empty if all is flat."""
    return [f"{name} is left" for name in outcome.left] + [
        f"{name}: {outcome.slopes[name]:.4g} a save, at most {limit:.4g} are allowed"
        for name, a_save in asdict(limits).items()
        for limit in [max(a_save, _ONCE.get(name, 0) / outcome.saves)]
        if outcome.slopes[name] > limit
    ]


def main() -> None:
    """Run; exit code 1 if anything grows."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.soak", description=__doc__)
    parser.add_argument("--saves", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to save; a temporary directory unless given")
    parser.add_argument("--write", action="store_true", help="keep the figures in tests/campaigns/results")
    options = parser.parse_args()
    logging.getLogger("aio_ckpt").setLevel(logging.CRITICAL)  # every injected failure is logged
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=options.folder))
    try:
        outcome = soak(folder / "root", options.saves, seed=options.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    limits = Limits()
    faults = verdict(outcome, limits)
    rates = ", ".join(f"{name} {slope:.4g}" for name, slope in outcome.slopes.items())
    log(f"{outcome.saves} saves, {outcome.failed} failed as injected, {outcome.plan_misses} planned anew")
    log(f"growth a save from save {outcome.first} on: {rates}")
    if options.write:
        figures = {"seed": options.seed, "limits": asdict(limits), **asdict(outcome), "faults": faults}
        log(f"wrote {keep_result('soak', figures)}")
    for fault in faults:
        log(f"FAILED {fault}")
    sys.exit(bool(faults))
