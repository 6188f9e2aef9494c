"""``python -m bench.adapters``: how long a save keeps a trainer, in each framework's own way and with our adapter.

Each door (a framework, and what saves in it) trains one model. Its saves take turns, in another order in each round.
From the same rest, three things are timed: some steps, a save with as many steps, and a save that is waited for.
``torchrun`` starts the ranks of a door. A door whose package is not installed is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib.util
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from bench.common.doors import DOORS, OURS, STOCK, Door, Job
from bench.common.measure import Spread, ratio
from bench.common.options import log
from bench.common.results import BENCH, FigureRow, Figures, Report, figure_rows, out_folder, publish, slowest

__all__ = ["main", "table"]

dist: Any = torch.distributed  # whose stubs leave most of it out

FIGURES = {"training lost": "lost", "the call": "call", "until done": "done"}
"""What is measured of a save, as tables show it, and its name in the samples."""


def _rounds(door: Door, job: Job, samples: Figures) -> Iterator[None]:
    """Time every save in turns. Each item that it yields is a step that the trainer makes."""
    wait_for_stream = torch.cuda.current_stream().synchronize if job.is_cuda else lambda: None

    def rest() -> None:
        gc.collect()
        wait_for_stream()
        dist.barrier()
        if dist.get_rank() == 0:
            _clear(job.saved)
        os.sync()
        dist.barrier()

    for number in range(job.rounds + 1):
        for way in sorted(door.saves, reverse=number % 2 == 0):
            path = job.saved / f"{way}-{number}.ckpt"
            rest()
            began = time.perf_counter()
            yield from itertools.repeat(None, job.steps)
            wait_for_stream()
            alone = time.perf_counter() - began
            rest()
            began = time.perf_counter()
            wait = door.saves[way](path)
            yield from itertools.repeat(None, job.steps)
            wait_for_stream()
            beside = time.perf_counter() - began
            wait()
            rest()
            began = time.perf_counter()
            wait = door.saves[way](path.with_name(f"waited-{path.name}"))
            called = time.perf_counter() - began
            wait()
            done = time.perf_counter() - began
            yield  # frameworks name a checkpoint by its step
            if number:
                found = {"lost": beside - alone, "call": called, "done": done, "step": alone / job.steps}
                for name, secs in found.items():
                    samples.setdefault(f"{way} {name}", []).append(secs * 1e3)


def _clear(folder: Path) -> None:
    """Delete the checkpoints. Hidden folders belong to the engines."""
    for path in folder.glob("[!.]*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def table(door: str, samples: Figures) -> list[FigureRow]:
    """Return the rows of a door: ratios first."""
    rows, milliseconds = list[FigureRow](), Figures()
    ways = [way for way in (STOCK, OURS) if f"{way} call" in samples]
    for text, name in FIGURES.items():
        if len(ways) == 2:
            relative, by_round = ratio(samples[f"{OURS} {name}"], samples[f"{STOCK} {name}"])
            values = Spread(median=relative, low=by_round.low, high=by_round.high)
            rows.append(FigureRow(text=f"{door}: {text}, ours / stock", values=values, unit="x"))
        milliseconds |= {f"{text} ({way}), ms": samples[f"{way} {name}"] for way in ways}
    steps = [secs for way in ways for secs in samples[f"{way} step"]]
    return rows + figure_rows(door, milliseconds | {"a step without a save, ms": steps})


# -- processes --------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """Run the bench."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__)
    parser.add_argument("doors", nargs="*", metavar="door", help=f"of {', '.join(DOORS)} (default: all)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="file system to save to")
    parser.add_argument("--mib", type=int, default=2000 if has_gpu else 500, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one that warms up")
    parser.add_argument("--steps", type=int, default=10, help="steps beside a save, and without one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if has_gpu else "cpu")
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count() or 1, help="ranks of each door")
    parser.add_argument("--limit-secs", type=float, default=600.0, help="a door that takes longer is ended")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default: bench-results below --dir)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results, by machine")
    given = parser.parse_args(arguments)
    if unknown := {*given.doors} - {*DOORS}:
        parser.error(f"no such doors: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks end with a run that is given up
    folder = given.dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    out = out_folder(folder, out=given.out, write=given.write, quick=False, ranks=given.ranks)
    figures, absent = list[FigureRow](), list[str]()
    sizes: dict[str, Any] = {name: getattr(given, name) for name in ("mib", "rounds", "steps", "device")}
    for door in given.doors or DOORS:
        _, package, remedy = DOORS[door]
        if importlib.util.find_spec(package) is None:
            absent.append(f"{door}: {remedy}")
        else:
            with tempfile.TemporaryDirectory(prefix="aio_ckpt-bench-", dir=folder) as place:
                log(f"{door}")
                job = Job(door=door, folder=Path(place), **sizes)
                found, said = _run(job, 1 if door == "files" else given.ranks, given.limit_secs)
            figures += table(door, found) if found else []
            absent += [f"{door}: {said}"] if said else []
    for line in absent:
        log(f"not measured: {line}")
    settings = {**sizes, "ranks": given.ranks, "not measured": absent}
    report = Report(bench="-".join(["adapters", *given.doors]), settings=settings, figures=figures)
    log(f"wrote {publish(report, folder, out=out)}")


def _run(job: Job, ranks: int, limit_secs: float) -> tuple[Figures, str]:
    """Run a door under torchrun. Return the slowest rank's samples, and what is missing."""
    job.saved.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "bench.adapters", _PART, json.dumps(asdict(job), default=str)]
    words = job.folder / "words"
    with words.open("w") as file:
        process = subprocess.Popen(command, cwd=BENCH.parent, stdout=file, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(limit_secs)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.terminate()  # torchrun ends its ranks
            process.wait()
    if code != 0:
        lines = words.read_text(errors="replace").splitlines()
        log("\n".join(lines[-60:]))
        said = next((line for line in reversed(lines) if line.startswith("[rank") and "Error" in line), f"code {code}")
        return {}, "failed: " + (f"not done after {limit_secs:.0f} s" if code is None else said.strip()[-200:])
    found = slowest([json.loads(path.read_text()) for path in job.folder.glob("samples.*.json")])
    return found, "" if f"{STOCK} call" in found else "stock: needs CUDA"


_PART = "--part"


def _part(told: str) -> None:
    """Measure one door; this process is one of its ranks."""
    given = json.loads(told)
    job = Job(**given | {"folder": Path(given["folder"])})
    faulthandler.register(signal.SIGTERM, chain=True)  # a rank that hangs shows where
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    sys.path.append(str(BENCH.parent / "tests" / "support"))  # of the GPT of Megatron
    if job.is_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(("nccl" if job.door == "megatron" else "cpu:gloo,cuda:nccl") if job.is_cuda else "gloo")
    samples = Figures()
    door = DOORS[job.door][0](job)
    door.drive(_rounds(door, job, samples))
    dist.barrier()
    door.close()
    (job.folder / f"samples.{dist.get_rank()}.json").write_text(json.dumps(samples))
    dist.destroy_process_group()


if __name__ == "__main__":
    _part(sys.argv[2]) if sys.argv[1:2] == [_PART] else main()
