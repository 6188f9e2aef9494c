"""``python -m bench.files``: ``save_file()`` beside ``torch.save`` and safetensors: blocked, and until durable.

The rivals' files are fsynced afterwards, as a careful user would.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from aio_ckpt import SyncCheckpointEngine
from bench.common.measure import DONE, Contender, Waitable, interleave
from bench.common.options import Options, log, parse, work_folder
from bench.common.results import Report, Row, make_row, publish
from bench.common.states import SHAPES, Shape

__all__ = ["bench_shape", "main"]

STOCK: Mapping[str, Callable[[dict[str, torch.Tensor], Path], object]] = {".pt": torch.save, ".safetensors": save_file}
"""Function that writes a file of each format."""


def main() -> None:
    """Run the bench."""
    options = parse("files", __doc__ or "")
    shapes: dict[str, list[Row]] = {}
    with work_folder(options) as folder:
        for name in options.shapes:
            shapes |= bench_shape(SHAPES[name], folder / name, options)
    report = Report(bench="files", settings=options.settings(), shapes=shapes)
    path = publish(report, options.folder, out=options.out)
    log(f"wrote {path}")


class _Stock(Contender):
    durability = "fsynced by the bench"

    def __init__(self, state: dict[str, torch.Tensor], path: Path) -> None:
        self.name = "torch.save" if path.suffix == ".pt" else "safetensors"
        self._state, self._path = state, path

    def start(self) -> Waitable:
        """Write and fsync."""
        STOCK[self._path.suffix](self._state, self._path)
        with self._path.open("rb") as file:
            os.fsync(file.fileno())
        return DONE


class _Ours(Contender):
    name = "aio_ckpt, save_file"
    durability = "file and directory fsynced, then renamed"
    is_async = True

    def __init__(self, state: dict[str, torch.Tensor], path: Path, engine: SyncCheckpointEngine) -> None:
        self._state, self._path, self._engine = state, path, engine

    def start(self) -> Waitable:
        """Returns the ticket's milestone."""
        return self._engine.save_file(self._state, self._path).committed


def bench_shape(shape: Shape, folder: Path, options: Options) -> dict[str, list[Row]]:
    """Return the rows of both formats by title; the ratios are to the rival of the format."""
    state = shape.make(options.sizes, options.device)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    found: dict[str, list[Row]] = {}
    with SyncCheckpointEngine(folder / "engine", options.config) as engine:
        for suffix in STOCK:
            contenders = [_Stock(state, folder / f"stock{suffix}"), _Ours(state, folder / f"ours{suffix}", engine)]
            first, samples = interleave(contenders, options.rounds, log=log)
            limits = samples[contenders[0].name]
            found[f"{suffix}: {len(state)} tensors, {nbytes / 1e6:.1f} MB"] = [
                make_row(each, first[each.name], samples[each.name], limits, nbytes, None) for each in contenders
            ]
    shutil.rmtree(folder)
    return found


if __name__ == "__main__":
    main()
