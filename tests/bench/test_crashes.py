"""``python -m bench.crashes`` and ``python -m bench.damage``: what rivals lose is seen, and what they keep is too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm_python import run_warm

from bench.damage import RIVALS, try_rival

COMMAND = "from bench.crashes.__main__ import main; main()"
"""``python -m bench.crashes``, for a process that has imported torch already."""
TIMEOUT = 150.0


@pytest.mark.slow
def test_a_file_that_was_never_flushed_is_lost_with_the_power(tmp_path: Path) -> None:
    """The campaign sees a loss where there is one: ``torch.save`` syncs nothing."""
    folders = {"--dir": "kills", "--images": "images", "--out": "out"}
    given = [part for option, name in folders.items() for part in (option, str(tmp_path / name))]
    for name in folders.values():
        (tmp_path / name).mkdir()
    options = ("--only", "shutdown", "--contenders", "torch.save", "--trials", "1", "--secs", "3")
    done = run_warm(COMMAND, *given, *options, options=(), timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = (tmp_path / "out").glob("crash-*.json")
    document = json.loads(report.read_text())
    if not document["tallies"]:
        pytest.skip("; ".join(document["skipped"]))
    survived = {tally["campaign"]: tally["survived"] for tally in document["tallies"]}
    assert survived["ext4 shutdown 2, right after resolved"] == 0


@pytest.mark.parametrize("rival", RIVALS)
def test_every_damaged_file_of_a_rival_is_counted_once(tmp_path: Path, rival: str) -> None:
    tallies = try_rival(rival, tmp_path / "files", count=2, seed=1)
    assert all(tally.tried == tally.found + tally.silent + tally.unharmed > 0 for tally in tallies.values())
    assert tallies["truncate"].found == 2
