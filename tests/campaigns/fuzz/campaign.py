"""``python -m tests.campaigns.fuzz --secs 3600``: fuzz every reader with atheris; exit code 1 on any finding.

A reader may raise the typed errors only. Needs ``pip install aio-ckpt[fuzz]``. Each target runs in a process
of its own under a limit of memory and of time per input. A finding's bytes stay in ``--out``; put the file into
``tests/campaigns/fuzz/findings`` and it is a test.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from aio_ckpt import SyncCheckpointEngine
from tests.campaigns.common import every_kind, keep_result, log, machine
from tests.campaigns.fuzz.targets import TARGETS

__all__ = ["Fuzzed", "main"]

_RSS_MIB = 2048
_INPUT_SECS = 20
_GRACE_SECS = 120
"""For imports, seeds and the last input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuzzed:
    """What became of one target."""

    target: str
    """Which reader."""
    executions: int
    """Inputs that were read."""
    secs: float
    """Wall time, imports included."""
    findings: tuple[str, ...]
    """Files with inputs that ended in an untyped error, a crash, a hang or a huge allocation."""
    tail: str
    """The end of the fuzzer's output, if it found anything."""


def main() -> None:
    """Run the fuzzers one after the other."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.fuzz", description=__doc__)
    parser.add_argument("--secs", type=float, default=60.0, help="wall time in all, shared by the targets")
    parser.add_argument("--targets", default=",".join(TARGETS), help=f"of {','.join(TARGETS)}")
    parser.add_argument("--corpus", type=Path, help="kept between runs; a folder for each target")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "aio_ckpt-fuzz", help="findings")
    parser.add_argument("--write", action="store_true", help="keep the figures in tests/campaigns/results")
    given = parser.parse_args()
    targets = given.targets.split(",")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="aio_ckpt-fuzz-") as name:
        folder = Path(name)
        _make_seeds(folder / "seeds")
        corpus = given.corpus or folder / "corpus"
        found = [_fuzz(target, given.secs / len(targets), folder / "seeds", corpus, given.out) for target in targets]
    report = {
        "machine": machine(given.out),
        "executions": sum(result.executions for result in found),
        "findings": sum(len(result.findings) for result in found),
        "targets": [asdict(result) for result in found],
    }
    print(json.dumps(report, indent=1))
    if given.write:
        keep_result("fuzz", report)
    sys.exit(1 if report["findings"] else 0)


def _make_seeds(folder: Path) -> None:
    state = every_kind(large_elements=1000)
    with SyncCheckpointEngine(folder / "ours") as engine:
        engine.save(state).result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's own
        dcp_save(state, checkpoint_id=str(folder / "stock" / "step_1"), no_dist=True)


def _fuzz(target: str, secs: float, seeds: Path, corpus: Path, out: Path) -> Fuzzed:
    inputs = corpus / target
    inputs.mkdir(parents=True, exist_ok=True)
    began = time.time()
    options = [
        f"-max_total_time={int(secs)}",
        f"-rss_limit_mb={_RSS_MIB}",
        f"-timeout={_INPUT_SECS}",
        "-max_len=65536",
        "-print_final_stats=1",
        "-verbosity=0",
        f"-artifact_prefix={out}/{target}-",
    ]
    command = [sys.executable, "-m", "tests.campaigns.fuzz.child", target, str(seeds), *options, str(inputs)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=secs + _GRACE_SECS)
    findings = [str(path) for path in sorted(out.glob(f"{target}-*")) if path.stat().st_mtime >= began - 1]
    if done.returncode and not findings:
        findings = [f"the fuzzer ended with {done.returncode}"]
    executions = re.findall(r"number_of_executed_units: (\d+)", done.stderr)
    result = Fuzzed(
        target=target,
        executions=int(executions[-1]) if executions else 0,
        secs=round(time.time() - began, 1),
        findings=tuple(findings),
        tail=_tail(done, findings),
    )
    log(f"{target}: {result.executions} executions in {result.secs} s, {len(findings)} findings {result.tail}")
    return result


def _tail(done: subprocess.CompletedProcess[str], findings: Sequence[str]) -> str:
    return (done.stdout[-1000:] + done.stderr[-1500:]) if findings else ""
