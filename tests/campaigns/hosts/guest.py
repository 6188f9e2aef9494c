"""The trials of one mount, inside of the machine: ``guest MOUNT RESULTS LOADS SECS TRIAL...``."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from tests.campaigns.hosts.cluster import MOUNTS, SHARED, Host
from tests.campaigns.hosts.trials import TRIALS, Cluster, Measured


def main() -> None:
    """Write one line of JSON a trial to the file that the command line names."""
    mount = next(mount for mount in MOUNTS if mount.name == sys.argv[1])
    wanted = set(sys.argv[5:])
    cluster = Cluster(Host(1, mount), Host(2, mount), mount.name, int(sys.argv[3]), float(sys.argv[4]))
    with open(sys.argv[2], "w", buffering=1) as results:
        for trial in TRIALS:
            if wanted and trial.__name__ not in wanted:
                continue
            begun = time.monotonic()
            print(f"== {trial.__name__}", flush=True)
            try:
                measured = trial(cluster, SHARED / trial.__name__)
            except Exception as error:  # noqa: BLE001 - a trial that breaks is a result, and the next one runs
                measured = Measured(False, f"the trial ended with {type(error).__name__}: {error}")
            line = {"trial": trial.__name__, "secs": round(time.monotonic() - begun, 1)} | asdict(measured)
            results.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
