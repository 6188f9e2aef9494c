"""``python -m bench.gpu``, or ``torchrun --nproc-per-node N -m bench.gpu``."""

from __future__ import annotations

import itertools
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.common.options import log
from bench.gpu.options import GpuOptions, Trial, parse
from bench.gpu.raw import RAW
from bench.gpu.results import Document, Row, row_of
from bench.gpu.supervise import Outcome, Processes, Ranks, free_port
from bench.gpu.trial import contender_keys

__all__ = ["main", "run"]

OVER = "the time of the run was over"
LEAST_SECS = 5.0
"""Nothing is begun with less left."""


def main() -> None:
    """What the command line asks for."""
    options = parse()
    # So that the trial's processes, in sessions of their own, end with a run that is given up.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.plot is not None:
        from bench.gpu.plot import draw

        for path in draw(options.plot):
            log(f"wrote {path}")
    else:
        run(options)


def run(options: GpuOptions) -> None:
    """All trials; the first rank gathers and writes after each."""
    ranks, begin, plan = Ranks(), time.monotonic(), _plan(options)
    processes = Processes(ranks)
    document = Document(options, ranks.world) if ranks.rank == 0 else None
    options.folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="aio_ckpt-bench-gpu-", dir=options.folder)) if document else None
    try:
        for number, (shape, gb, contender) in enumerate(plan):
            decision: dict[str, object] | None = None
            if document is not None and work is not None:
                left = options.secs - (time.monotonic() - begin)
                folder = work / f"trial-{number}"
                folder.mkdir()
                decision = {"left": left, "port": free_port(), "folder": str(folder)}
                log(f"{shape} {gb:g}: {contender}")
            limit_secs = options.limit_secs(gb)
            decided = ranks.decide(decision, wait_secs=limit_secs)
            trial = options.trial(contender, shape, gb, str(decided["folder"]), world=ranks.world)
            has_next = number + 1 < len(plan)
            gathered = ranks.gather(_try(processes, trial, decided, limit_secs, has_next=has_next))
            if document is not None and work is not None:
                _keep(document, row_of(contender, shape, gb, gathered))
                shutil.rmtree(work / f"trial-{number}", ignore_errors=True)  # a killed one leaves anything
    finally:
        processes.close()
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    if document is not None:
        print(document.render())
        log(f"wrote {document.write()}")


def _try(
    processes: Processes, trial: Trial, decided: Mapping[str, Any], limit_secs: float, *, has_next: bool
) -> Outcome:
    left = float(decided["left"])
    if left < LEAST_SECS:
        return Outcome(status="not run", error=OVER)
    outcome = processes.run(trial, int(decided["port"]), min(left, limit_secs), has_next=has_next)
    if outcome.error.startswith("killed") and left < limit_secs:
        outcome.error += f": {OVER}"
    return outcome


def _plan(options: GpuOptions) -> list[tuple[str, float, str]]:
    """(shape, gb, contender) of each trial in order; a shape whose size is fixed is run once."""
    keys = _bracketed([key for key in contender_keys(options.mode) if _is_chosen(key, options)])
    sizes = {shape: options.sizes[:1] if shape == "small" else options.sizes for shape in options.shapes}
    return [(shape, gb, key) for shape in options.shapes for gb in sizes[shape] for key in keys]


def _bracketed(keys: list[str]) -> list[str]:
    """With the limits also behind the first rows of this library: a disk that others share varies by a third."""
    ours = list(itertools.takewhile(lambda key: key.startswith("aio"), keys[1:])) if keys[:1] == [RAW] else []
    return [RAW, *ours, RAW, *keys[1 + len(ours) :]] if ours else keys


def _is_chosen(key: str, options: GpuOptions) -> bool:
    wanted = not options.only or key == RAW or any(key.startswith(start) for start in options.only)
    return wanted and not any(key.startswith(start) for start in options.without)


def _keep(document: Document, row: Row) -> None:
    document.add(row)
    document.write()
    log(f"    {row.summary()}")


if __name__ == "__main__":
    main()
