"""``python -m bench.waves``: save CPU states larger than the budget; memory at the peak, time of ``save()``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from bench.common.measure import Spread
from bench.common.options import log
from bench.common.results import FigureRow, Goal, Report, out_folder, publish

__all__ = ["Case", "Measured", "main", "measured"]

_TENSOR_BYTES = 64 << 20
_PEAK_SHARE = 1.05
"""Of the budget: page tables, plan and manifests come to less than the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One state and one budget."""

    state_bytes: int
    """Of the state, in tensors of 64 MiB."""
    budget_bytes: int | None
    """``EngineConfig.budget_bytes``; None: the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One save in a process of its own. The content was read back and compared."""

    state_bytes: int
    """Of the state."""
    budget_bytes: int
    """As the engine had it."""
    peak_bytes: int
    """Resident memory at the peak of the save, less that before the save."""
    blocked_secs: float
    """Until ``save()`` returned."""
    committed_secs: float
    """Until the step was committed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(prog="python -m bench.waves", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="file system to write to")
    parser.add_argument("--state-mib", type=int, default=2048, help="size of the state beside --budget-mb")
    parser.add_argument("--budget-mb", type=int, default=256, help="budget of the first case, in MB")
    parser.add_argument("--memory-share", type=float, help="second case: a state of so much of the machine's memory")
    parser.add_argument("--out", type=Path, help="folder of the JSON (default: bench-results below --dir)")
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results, by machine")
    given = parser.parse_args(arguments)
    cases = [Case(state_bytes=given.state_mib << 20, budget_bytes=given.budget_mb * 10**6)]
    if given.memory_share is not None:
        state_bytes = int(psutil.virtual_memory().total * given.memory_share)
        cases.append(Case(state_bytes=state_bytes, budget_bytes=None))
    folder = given.dir.absolute()
    found = []
    for case in cases:
        log(f"saving {case}")
        found.append(measured(case, folder))
    settings = {"state_mib": given.state_mib, "budget_mb": given.budget_mb, "memory_share": given.memory_share}
    report = Report(
        bench="waves",
        settings=settings,
        figures=[row for one in found for row in _figures(one)],
        goals=[_goal(one) for one in found],
    )
    out = out_folder(folder, out=given.out, write=given.write, quick=False)
    log(f"wrote {publish(report, folder, out=out)}")


def measured(case: Case, folder: Path) -> Measured:
    """Save ``case`` in a process of its own, below ``folder``."""
    command = [sys.executable, "-m", __name__ if __name__ != "__main__" else "bench.waves", _CHILD]
    with tempfile.TemporaryDirectory(prefix="aio_ckpt-bench-", dir=folder) as root:
        told = json.dumps(asdict(case) | {"root": root})
        done = subprocess.run([*command, told], check=True, stdout=subprocess.PIPE, text=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


_CHILD = "--child"


def _child(told: str) -> None:
    given = json.loads(told)
    root = Path(given.pop("root"))
    case = Case(**given)
    with SyncCheckpointEngine(root / "warm") as engine:  # imports and threads
        engine.save({"w": torch.ones(3)}).result()
    with SyncCheckpointEngine(root / "measured", EngineConfig(budget_bytes=case.budget_bytes)) as engine:
        state = {f"w{number}": _tensor(number) for number in range(case.state_bytes // _TENSOR_BYTES)}
        before = _reset_peak()
        ticket = engine.save(state)
        report = ticket.result()
        peak = _status("VmHWM")
        assert report is not None
        budget_bytes = case.budget_bytes or engine.lifetime.arena_bytes
        for name, tensor in state.items():  # one by one: both would not fit
            back: Any = engine.read(only=[name])
            assert torch.equal(back[name], tensor), name
    found = Measured(
        state_bytes=sum(tensor.nbytes for tensor in state.values()),
        budget_bytes=budget_bytes,
        peak_bytes=peak - before,
        blocked_secs=report.timings.blocked_secs,
        committed_secs=report.timings.committed_secs,
    )
    print(json.dumps(asdict(found)))


def _tensor(number: int) -> torch.Tensor:
    """Other values in each; every fourth has gaps in its memory."""
    count = _TENSOR_BYTES // 8
    if number % 4 == 3:
        return torch.arange(number * count, (number + 1) * count).view(-1, 1024)[:, : 1024 - number % 7 - 1]
    return torch.arange(number * count, (number + 1) * count)


def _reset_peak() -> int:
    """Forget the peak of resident memory. Returns what is resident, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) << 10


def _title(found: Measured) -> str:
    return f"{found.state_bytes / 1e9:.1f} GB, budget {found.budget_bytes / 1e9:.2f} GB"


def _figures(found: Measured) -> list[FigureRow]:
    rows = [
        ("memory at the peak, beyond the state", found.peak_bytes / 1e6, "MB"),
        ("save() returned after", found.blocked_secs, "s"),
        ("committed after", found.committed_secs, "s"),
    ]
    return [FigureRow(text=f"{_title(found)}: {text}", values=Spread.of([v]), unit=unit) for text, v, unit in rows]


def _goal(found: Measured) -> Goal:
    bound = _PEAK_SHARE * found.budget_bytes / 1e6
    return Goal(text=f"{_title(found)}: memory at the peak", figure=found.peak_bytes / 1e6, bound=bound, unit="MB")


if __name__ == "__main__":
    if sys.argv[1:2] == [_CHILD]:
        _child(sys.argv[2])
    else:
        main()
