"""``python -m bench.frozen``: each step of a LoRA run is saved, beside what people write by hand.

A base of tensors stays, and adapters with their AdamW moments change before each save. A second state has nothing that
stays, and shows what the search for it costs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from aio_ckpt import EngineConfig
from aio_ckpt.engine.engine import CheckpointEngine
from bench.common.measure import DONE, Contender, Spread, Waitable, interleave
from bench.common.options import log
from bench.common.pagecache import fsync_tree
from bench.common.results import FigureRow, Goal, Report, Row, make_row, out_folder, publish

__all__ = ["main"]

_BASE_TENSORS, _ADAPTERS = 48, 96
_KNOWN_AFTER = 4
"""Saves after which an engine knows what stays, and has written its file."""
State = dict[str, torch.Tensor]


class _Saver(Contender):
    """Keeps the bytes that the process writes in each operation."""

    durability = "fsync of every file"

    def __init__(self, state: State, changing: Sequence[str]) -> None:
        self.state, self.changing = state, changing
        self.written: list[int] = []

    def before(self) -> None:
        """Train one step, and begin to count."""
        for name in self.changing:
            self.state[name].add_(1)
        if self.state[self.changing[0]].is_cuda:
            torch.cuda.current_stream().synchronize()
        self._begun = _written()

    def after(self) -> None:
        """Note what was written."""
        self.written.append(_written() - self._begun)


def _written() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


class EngineSave(_Saver):
    """``engine.save(state)``; done when committed."""

    is_async = True

    def __init__(self, name: str, state: State, changing: Sequence[str], root: Path, **settings: Any) -> None:
        super().__init__(state, changing)
        self.name = name
        self.engine = CheckpointEngine(root, EngineConfig(keep_last=1, **settings))
        for _ in range(_KNOWN_AFTER):
            self.before()
            self.engine.save(state).result()

    def start(self) -> Waitable:
        """Return the ticket's milestone."""
        return self.engine.save(self.state).committed

    def close(self) -> None:
        """Close the engine."""
        self.engine.close_blocking()


class TorchSave(_Saver):
    """``torch.save`` of some leaves, and an fsync."""

    def __init__(self, name: str, state: State, changing: Sequence[str], saved: Sequence[str], folder: Path) -> None:
        super().__init__(state, changing)
        self.name, self._saved, self._folder = name, saved, folder
        folder.mkdir()

    def start(self) -> Waitable:
        """Save."""
        torch.save({name: self.state[name] for name in self._saved}, self._folder / "state.pt")
        fsync_tree(self._folder)
        return DONE


class DcpSave(_Saver):
    """``dcp.save`` with its defaults."""

    name = "dcp.save"

    def __init__(self, state: State, changing: Sequence[str], folder: Path) -> None:
        super().__init__(state, changing)
        self._folder = folder

    def start(self) -> Waitable:
        """Save."""
        from torch.distributed.checkpoint.state_dict_saver import save

        save(dict(self.state), checkpoint_id=self._folder, no_dist=True)
        return DONE


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench.frozen", description=__doc__)
    parser.add_argument("--mb", type=int, default=1500, help="size of the base")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, after one that warms up")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="disk of the checkpoints")
    parser.add_argument("--quick", action="store_true", help="a smoke test: 48 MB, 2 rounds")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default: bench-results below --dir)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results, by machine")
    given = parser.parse_args()
    nbytes, rounds = (48_000_000, 2) if given.quick else (given.mb * 1_000_000, given.rounds)
    torch.manual_seed(0)
    base = {f"base.{at}": _tensor(nbytes // _BASE_TENSORS, given.device) for at in range(_BASE_TENSORS)}
    adapters = {f"adapter.{at}": _tensor(nbytes // 200 // _ADAPTERS, given.device) for at in range(_ADAPTERS)}
    moments = {f"{name}.{kind}": torch.zeros_like(each) for name, each in adapters.items() for kind in ("m", "v")}
    lora, trained = {**base, **adapters, **moments}, [*adapters, *moments]
    total, changed = (sum(lora[name].nbytes for name in names) for names in (lora, trained))
    shapes: dict[str, list[Row]] = {}
    given.dir.mkdir(parents=True, exist_ok=True)
    log(f"{total / 1e6:.0f} MB, of which {changed / 1e6:.0f} MB change")
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        place = Path(folder)
        frozen = EngineSave("aio_ckpt", lora, trained, place / "cloned")
        full = EngineSave("aio_ckpt, relink_limit=1", lora, trained, place / "written", relink_limit=1)
        savers = [
            full,
            frozen,
            EngineSave("aio_ckpt, frozen='trusted'", lora, trained, place / "trusted", frozen="trusted"),
            TorchSave("torch.save", lora, trained, [*lora], place / "torch"),
            TorchSave("torch.save, adapters only", lora, trained, trained, place / "adapters"),
            DcpSave(lora, trained, place / "dcp"),
        ]
        title = f"LoRA: {total / 1e6:.0f} MB, of which {changed / 1e6:.0f} MB change"
        shapes[title] = rows = _rows(savers, rounds, total)
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        place = Path(folder)
        both = [
            EngineSave("all changes, relink_limit=1", lora, [*lora], place / "written", relink_limit=1),
            EngineSave("all changes", lora, [*lora], place / "compared"),
        ]
        shapes[f"all {total / 1e6:.0f} MB change"] = all_rows = _rows(both, rounds, total)
    written = [FigureRow(text=f"written: {each.name}", values=_megabytes(each), unit="MB") for each in savers]
    report = Report(
        bench="frozen",
        settings={"rounds": rounds, "megabytes": total / 1e6, "changed": changed / 1e6, "device": given.device},
        shapes=shapes,
        figures=written,
        goals=[
            Goal(text="bytes written / bytes changed", figure=_megabytes(frozen).median * 1e6 / changed, bound=1.1),
            Goal(text="durable: with clones / written", figure=rows[1].total.median / rows[0].total.median, bound=0.15),
            Goal(text="durable: trusted / written", figure=rows[2].total.median / rows[0].total.median, bound=0.15),
            Goal(
                text="save(): with clones / written", figure=rows[1].blocked.median / rows[0].blocked.median, bound=1.05
            ),
            Goal(text="save(): trusted / written", figure=rows[2].blocked.median / rows[0].blocked.median, bound=1.05),
            Goal(text="all changes: durable / relink_limit=1", figure=all_rows[1].ratio, bound=1.02),
        ],
    )
    out = out_folder(given.dir.absolute(), out=given.out, write=given.write, quick=given.quick)
    log(f"wrote {publish(report, given.dir.absolute(), out=out)}")


def _tensor(nbytes: int, device: str) -> torch.Tensor:
    return torch.nn.Parameter(torch.randn(nbytes // 4, device=device), requires_grad=False)


def _rows(contenders: Sequence[_Saver], rounds: int, nbytes: int) -> list[Row]:
    """Return a row for each contender; the first is the limit."""
    try:
        first, samples = interleave(contenders, rounds, log=log)
        limits = samples[contenders[0].name]
        return [make_row(each, first[each.name], samples[each.name], limits, nbytes, None) for each in contenders]
    finally:
        for each in contenders:
            each.close()


def _megabytes(saver: _Saver) -> Spread:
    """Return what one operation of the timed rounds wrote."""
    return Spread.of([written / 1e6 for written in saver.written[1:]])


if __name__ == "__main__":
    main()
