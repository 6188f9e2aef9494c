"""Command line of ``python -m bench.gpu``, and what one trial's process is told."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

__all__ = ["SHAPES", "GpuOptions", "Trial", "parse"]

SHAPES = ("blocks", "small", "fsdp2")
Mode = Literal["save", "load"]
REPEATED = ("aio-default", "aio-half", "aio-fenced", "aio-guarded")
GB_PER_SIZE = 1.0625
"""``--gb 8`` is 8.5 GB, the state that the goals are stated for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One contender on one state, in processes of its own: one a rank."""

    contender: str
    """Its key."""
    mode: Mode
    """Saving or loading."""
    shape: str
    """One of ``SHAPES``."""
    gb: float
    """GB of state a rank, as far as the shape can be sized."""
    dtype: str
    """``bf16`` or ``fp32``: what the fsdp2 transformer computes in."""
    step_ms: float
    """Length of a training step that is aimed at."""
    every: tuple[int, ...]
    """Steps from save to save, for tokens/s; empty: not measured."""
    repeats: int
    """Saves without training beside them after the first, saves beside training, loads: each at most."""
    base_steps: int
    """Steps without a save, before and after those with one."""
    secs: float
    """Repeats end when so many seconds have passed; one of each is always made."""
    folder: str
    """On the file system to measure, one for all ranks."""

    @classmethod
    def from_json(cls, text: str) -> Trial:
        """What :meth:`to_json` wrote."""
        given = json.loads(text)
        return cls(**given | {"every": tuple(given["every"])})

    def to_json(self) -> str:
        """For the command line of the process."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """Parsed command line."""

    folder: Path
    """File system to measure."""
    mode: Mode
    """Saving or loading."""
    shapes: tuple[str, ...]
    """Of ``SHAPES``."""
    sizes: tuple[float, ...]
    """``--gb``."""
    dtype: str
    """This field and those below: see :class:`Trial`."""
    step_ms: float
    every: tuple[int, ...]
    repeats: int
    base_steps: int
    only: tuple[str, ...]
    """Keys of contenders, or beginnings of keys; empty: all."""
    without: tuple[str, ...]
    """Left out, likewise."""
    secs: float
    """For the whole run: what does not begin in it is a row that says so."""
    limit: float | None
    """Seconds after which a contender is killed; None: from the size."""
    label: str | None
    """In the name of the JSON; None: from the machine."""
    out: Path | None
    """Folder of the JSON; None: among the results of this machine."""
    plot: Path | None
    """Draw this JSON file, measure nothing."""

    def settings(self) -> dict[str, object]:
        """What the results say about the run."""
        return {
            "mode": self.mode,
            "step_ms": self.step_ms,
            "dtype": self.dtype,
            "every": list(self.every),
            "repeats": self.repeats,
            "secs": self.secs,
        }

    def trial(self, contender: str, shape: str, gb: float, folder: str, *, world: int) -> Trial:
        """One contender's; the ranks share a disk, so that ``world`` of them take so many times as long."""
        return Trial(
            contender=contender,
            mode=self.mode,
            shape=shape,
            gb=gb * GB_PER_SIZE,
            dtype=self.dtype,
            step_ms=self.step_ms,
            every=self.every if shape == "fsdp2" and self.mode == "save" else (),
            repeats=self.repeats,
            base_steps=self.base_steps,
            # Where the figures are milliseconds, several repeats tell more than one.
            secs=world * ((10 + 1.5 * gb) + (gb if contender in REPEATED or self.mode == "load" else 0)),
            folder=folder,
        )

    def limit_secs(self, gb: float) -> float:
        """When a contender is taken for hung."""
        return self.limit or 60 + 10 * gb + 45 * len(self.every)


def parse(arguments: list[str] | None = None) -> GpuOptions:
    """Parse ``arguments`` (None: ``sys.argv``)."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="file system to measure")
    parser.add_argument("--gb", default="8" if has_gpu else "0.01", help="sizes a GPU; 8 is 8.5 GB (comma-separated)")
    parser.add_argument("--shape", default="blocks", help=f"of {','.join(SHAPES)} (comma-separated)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="fsdp2: what it computes in")
    parser.add_argument("--step-ms", type=float, default=70 if has_gpu else 20, help="training step aimed at")
    parser.add_argument("--every", default="", help="fsdp2: saves every so many steps, e.g. 1,10,100")
    parser.add_argument("--repeats", type=int, default=3, help="saves or loads after the first, at most")
    parser.add_argument("--base-steps", type=int, default=15 if has_gpu else 4, help="steps without a save")
    parser.add_argument("--only", default="", help="contenders, by key or beginning of key (comma-separated)")
    parser.add_argument("--without", default="", help="contenders left out, likewise")
    parser.add_argument("--load", action="store_true", help="measure loads instead of saves")
    parser.add_argument("--secs", type=float, default=540, help="seconds for the whole run")
    parser.add_argument("--limit", type=float, help="seconds after which one contender is killed")
    parser.add_argument("--label", help="in the name of the JSON")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default: bench-results below --dir)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results, by machine")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="JSON to PNG beside it, no run; needs matplotlib")
    given = parser.parse_args(arguments)
    shapes = tuple(given.shape.split(","))
    if unknown := set(shapes) - set(SHAPES):
        parser.error(f"no such shapes: {', '.join(sorted(unknown))}")
    folder = given.dir.absolute()
    return GpuOptions(
        folder=folder,
        mode="load" if given.load else "save",
        shapes=shapes,
        sizes=tuple(float(size) for size in given.gb.split(",")),
        dtype=given.dtype,
        step_ms=given.step_ms,
        every=tuple(int(steps) for steps in filter(None, given.every.split(","))),
        repeats=given.repeats,
        base_steps=given.base_steps,
        only=tuple(filter(None, given.only.split(","))),
        without=tuple(filter(None, given.without.split(","))),
        secs=given.secs,
        limit=given.limit,
        label=given.label,
        out=given.out or (None if given.write else folder / "bench-results"),
        plot=given.plot,
    )
