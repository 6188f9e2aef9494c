"""``python -m tests.campaigns.faults``: the whole campaign; prints fault points tried and survived by class."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.campaigns.common import keep_result, machine
from tests.campaigns.faults import work
from tests.campaigns.faults.campaign import FAULTS, LOADS, SAVES, Point, load_points, save_points
from tests.campaigns.faults.syscalls import INJECTIONS, strace_refusal, syscall_points
from tests.campaigns.faults.upkeep import UPKEEPS, short_reads, upkeep_points

__all__ = ["classes", "main"]

Points = Callable[[Path], Iterator[Point]]


def classes() -> dict[str, list[Points]]:
    """Campaigns by the class under which they are reported."""
    found: dict[str, list[Points]] = {}
    for fault in FAULTS:
        found[f"save: {fault.name}"] = [partial(save_points, saving=saving, fault=fault) for saving in SAVES]
    for fault in FAULTS:
        if fault.code and fault.counts is None:
            found[f"load: {fault.name}"] = [partial(load_points, loading=loading, fault=fault) for loading in LOADS]
    for upkeep in UPKEEPS:
        found[f"{upkeep.name}: each of these"] = [
            partial(upkeep_points, upkeep=upkeep, fault=fault) for fault in FAULTS if fault.code or fault.is_slow
        ]
    found["short reads"] = [short_reads]
    found["short writes"] = [work.short_writes]
    found["a thread's work dies"] = [work.dying_work]
    found["a thread's work hangs"] = [work.hanging_work]
    found["the threads are shut down"] = [work.shut_down_executors]
    found["cancelled at each step of each task"] = [work.cancelled_steps]
    found["no memory for the arena"] = [work.memory_in_growth]
    found["no memory in a stage"] = [work.memory_in_stages]
    found["no memory in a call of save()"] = [partial(work.memory_in_save, stride=5)]
    return found | _strace_classes()


def _strace_classes() -> dict[str, list[Points]]:
    refusal = strace_refusal()
    if refusal is not None:
        print(f"system calls: not run, {refusal}", file=sys.stderr)
        return {}
    return {
        f"strace: {injection.name}": [
            partial(syscall_points, injections=[injection], overwrite=overwrite) for overwrite in (False, True)
        ]
        for injection in INJECTIONS
    }


def main() -> int:
    """Run what was asked for; 1 if a point was not survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.faults", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="file system to use")
    parser.add_argument("--only", default="", help="part of the names of the classes to run")
    parser.add_argument("--write", action="store_true", help="write the figures to tests/campaigns/results")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)  # every fault is logged by the engine
    chosen = {name: points for name, points in classes().items() if given.only in name}
    folder = Path(tempfile.mkdtemp(prefix="aio_ckpt-faults-", dir=given.dir))
    began = time.monotonic()
    try:
        rows = {name: _run(name, points, folder) for name, points in chosen.items()}
    finally:
        shutil.rmtree(folder)
    tried, survived = (sum(row[column] for row in rows.values()) for column in ("tried", "survived"))
    print(f"{'all':45} {tried:5} / {survived}")
    if given.write:
        report = {"machine": machine(given.dir), "classes": rows, "tried": tried, "survived": survived}
        report["seconds"] = round(time.monotonic() - began)
        keep_result("faults", report)
    return int(tried != survived or not tried)


def _run(name: str, campaigns: list[Points], folder: Path) -> dict[str, int]:
    tried = survived = 0
    for index, points in enumerate(campaigns):
        for point in points(folder / name.replace(":", "") / str(index)):
            tried += 1
            survived += not point.problems
            if point.problems:
                print(f"NOT SURVIVED {point.name}", *point.problems, sep="\n    ", file=sys.stderr, flush=True)
    print(f"{name:45} {tried:5} / {survived}", flush=True)
    return {"tried": tried, "survived": survived}


if __name__ == "__main__":
    sys.exit(main())
