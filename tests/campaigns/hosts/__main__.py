"""``python -m tests.campaigns.hosts``: the trials on each kind of mount, and a table of what was found."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.campaigns.common import keep_result, log, machine
from tests.campaigns.hosts.cluster import MOUNTS, Mount
from tests.campaigns.hosts.machine import boot
from tests.campaigns.hosts.packages import UnavailableError, unpacked

_TIMEOUT_SECS = 900.0
LOADS = 60
TRAINING_SECS = 20.0


def run(
    mount: Mount,
    packages: Path,
    trials: list[str],
    console: Path,
    *,
    loads: int = LOADS,
    training_secs: float = TRAINING_SECS,
) -> list[dict[str, object]]:
    """Boot a machine, run the trials on ``mount`` and return their results."""
    timeout = _TIMEOUT_SECS + 3.0 * loads + 2.0 * training_secs
    results = console.with_suffix(".jsonl")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.campaigns.hosts.guest",
        mount.name,
        str(results),
        str(loads),
        str(training_secs),
        *trials,
    ]
    results.unlink(missing_ok=True)
    try:
        boot(packages, command, log=console, timeout=timeout)
    except subprocess.TimeoutExpired:
        log(f"{mount.name}: the machine was switched off after {timeout:.0f} s")
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mounts", default=",".join(mount.name for mount in MOUNTS))
    parser.add_argument("--trials", default="", help="names of trials, separated by commas; all of them if left out")
    parser.add_argument("--loads", type=int, default=LOADS, help="loads beside a writer that removes steps")
    parser.add_argument("--secs", type=float, default=TRAINING_SECS, help="time for which two ranks train")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "aio_ckpt-hosts")
    parser.add_argument("--write", action="store_true", help="keep the figures in tests/campaigns/results/")
    given = parser.parse_args()
    try:
        unpacked(given.folder)
    except UnavailableError as error:
        sys.exit(f"two hosts cannot be built here: {error}")
    trials = [name for name in given.trials.split(",") if name]
    found: dict[str, list[dict[str, object]]] = {}
    for mount in MOUNTS:
        if mount.name not in given.mounts.split(","):
            continue
        console = given.folder / f"{mount.name.replace(' ', '_')}.log"
        log(f"{mount.name}: console in {console}")
        found[mount.name] = run(mount, given.folder, trials, console, loads=given.loads, training_secs=given.secs)
        for line in found[mount.name]:
            verdict = "good" if line["good"] else "BAD"
            print(f"{mount.name:10} {verdict:4} {line['trial']} ({line['secs']} s): {line['found']}")
    if given.write:
        keep_result("hosts", {"machine": machine(given.folder), "mounts": found})
    sys.exit(0 if all(lines and all(line["good"] for line in lines) for lines in found.values()) else 1)


if __name__ == "__main__":
    main()
