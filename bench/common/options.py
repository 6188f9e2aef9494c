"""Command line that the benches share."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.config import EngineConfig
from bench.common.results import out_folder
from bench.common.states import SHAPES, Sizes

__all__ = ["Options", "log", "parse", "work_folder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Parsed command line."""

    folder: Path
    """Where checkpoints go: on the file system that is to be measured."""
    rounds: int
    """Timed rounds, after one that warms up."""
    shapes: tuple[str, ...]
    """Which states."""
    sizes: Sizes
    """How large."""
    device: str
    """Where the tensors are."""
    beside: int
    """Operations under the ticker and beside the Python loop; 0 leaves them out."""
    saves: int
    """Of the memory bench."""
    only: tuple[str, ...]
    """Names of contenders beside the limits; empty: all."""
    config: EngineConfig
    """Of the engine."""
    out: Path
    """Where the JSON goes."""
    quick: bool
    """A smoke test: figures prove nothing."""

    def settings(self) -> dict[str, object]:
        """What the report says about the run."""
        return {
            "rounds": self.rounds,
            "workers": self.config.workers,
            "device": self.device,
            "beside": self.beside,
            "quick": self.quick,
        }


def parse(bench: str, about: str) -> Options:
    """Parse ``sys.argv``."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{bench}", description=about)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="file system to measure")
    parser.add_argument("--rounds", type=int, help="timed rounds (default 7; 2 with --quick)")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {','.join(SHAPES)}")
    parser.add_argument("--only", default="", help="contenders beside the limits, by name, comma-separated")
    parser.add_argument("--quick", action="store_true", help="small states and few rounds: a smoke test")
    parser.add_argument("--large-count", type=int, help="tensors in the shape large")
    parser.add_argument("--large-mib", type=int, help="MiB of each")
    parser.add_argument("--small-count", type=int, help="tensors of 4 KiB in the shape small")
    parser.add_argument("--gpt-layers", type=int, help="blocks of the GPT")
    parser.add_argument("--gpt-width", type=int, help="width of the GPT")
    parser.add_argument("--device", default="cpu", help="where the tensors are")
    parser.add_argument("--workers", type=int, default=4, help="EngineConfig.workers")
    parser.add_argument("--beside", type=int, help="operations under ticker and Python loop (default 10; 2)")
    parser.add_argument("--saves", type=int, help="saves of the memory bench (default 100; 30 with --quick)")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default: bench-results below --dir)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results, by machine")
    given = parser.parse_args()
    quick = given.quick
    standard = Sizes.quick() if quick else Sizes()
    names = ("large_count", "large_mib", "small_count", "gpt_layers", "gpt_width")
    chosen = {name: getattr(given, name) or getattr(standard, name) for name in names}
    unknown = set(given.shapes.split(",")) - set(SHAPES)
    if unknown:
        parser.error(f"no such shapes: {', '.join(sorted(unknown))}")
    return Options(
        folder=given.dir.absolute(),
        rounds=given.rounds or (2 if quick else 7),
        shapes=tuple(given.shapes.split(",")),
        sizes=Sizes(**chosen),
        device=given.device,
        beside=(2 if quick else 10) if given.beside is None else given.beside,
        saves=given.saves or (30 if quick else 100),
        only=tuple(filter(None, given.only.split(","))),
        config=EngineConfig(workers=given.workers),
        out=out_folder(given.dir.absolute(), out=given.out, write=given.write, quick=quick),
        quick=quick,
    )


@contextmanager
def work_folder(options: Options) -> Iterator[Path]:
    """A fresh folder on the file system to measure, removed at the end."""
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="aio_ckpt-bench-", dir=options.folder))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def log(text: str) -> None:
    """Progress, apart from the report."""
    print(text, file=sys.stderr, flush=True)
