"""Crashes: a bounded part of ``python -m tests.campaigns.crash``, and the parts of it that decide."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from slow import slow
from warm_python import WarmPython, run_warm

from tests.campaigns.crash.block_log import FLUSH, MARK, WRITE, Entry, pack, parse, prefixes, reorderings
from tests.campaigns.crash.contents import differs, is_overwrite, state_of, step_of
from tests.campaigns.crash.trial import Known

ENGINE = {"aio_ckpt": "aio_ckpt", "aio_ckpt:directory-mode": "aio_ckpt, directory mode"}
"""Contenders as the command line and the report name them."""
TRUSTED = {"aio_ckpt:trusted": "aio_ckpt, trusted"}
PATHS = {
    "aio_ckpt:save(path=)": "aio_ckpt, save(path=)",
    "aio_ckpt:save_file()": "aio_ckpt, save_file()",
    "aio_ckpt:save_file(max_shard_bytes=)": "aio_ckpt, save_file(max_shard_bytes=)",
}
SECS = 3
"""Each bounded campaign stops by then, whatever the machine; at least one crash of each kind was tried."""
TIMEOUT = 150.0

Tallies = dict[tuple[str, str], dict[str, Any]]


COMMAND = "from tests.campaigns.crash.__main__ import main; main()"
"""``python -m tests.campaigns.crash``, for a process that has imported torch already."""


def arguments(tmp_path: Path, *options: str) -> list[str]:
    folders = {"--dir": "kills", "--images": "images", "--out": "out"}
    for folder in folders.values():
        (tmp_path / folder).mkdir()
    given = [part for option, folder in folders.items() for part in (option, str(tmp_path / folder))]
    return [*given, *options]


def campaign(tmp_path: Path, *options: str) -> tuple[int, str, dict[str, Any], Tallies]:
    """Exit code, what was printed, the JSON, and its tallies by contender and campaign."""
    done = run_warm(COMMAND, *arguments(tmp_path, *options), options=(), timeout=TIMEOUT)
    shown = done.stdout + done.stderr
    print(shown)
    (report,) = (tmp_path / "out").glob("crash-*.json")
    document = json.loads(report.read_text())
    assert not any((tmp_path / "kills").iterdir())
    assert not any((tmp_path / "images").iterdir())
    return done.returncode, shown, document, {(t["contender"], t["campaign"]): t for t in document["tallies"]}


# -- campaigns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "kills"),
    [
        (ENGINE, 6),
        slow(TRUSTED | PATHS, 12),
        pytest.param(ENGINE | TRUSTED | PATHS, 240, marks=pytest.mark.campaign),
    ],
)
def test_after_kill_9_training_resumes_from_a_whole_checkpoint_never_older_than_the_last_resolved_save(
    tmp_path: Path, ours: dict[str, str], kills: int
) -> None:
    code, shown, document, tallies = campaign(
        tmp_path, "--only", "kill", "--contenders", ",".join(ours), "--kills", str(kills), "--secs", str(SECS)
    )
    assert code == 0, shown
    assert document["tried"] == document["survived"] > 0
    for contender in ours.values():
        for way in ("named points", "random instants"):
            assert tallies[contender, f"kill -9, {way}"]["tried"] > 0


def test_after_a_power_loss_what_save_called_durable_is_there_and_whole(tmp_path: Path) -> None:
    options = ("--only", "shutdown,blocklog", "--trials", "1", "--samples", "10", "--contenders", ",".join(ENGINE))
    code, shown, document, _ = campaign(tmp_path, *options, "--secs", str(SECS))
    if not document["tallies"]:
        pytest.skip("; ".join(document["skipped"]))
    assert code == 0, shown
    assert document["tried"] == document["survived"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.campaign)])
def test_a_campaign_that_is_ended_leaves_no_mount_no_loop_device_and_no_process(
    tmp_path: Path, end: signal.Signals
) -> None:
    given = arguments(tmp_path, "--only", "shutdown", "--trials", "1")
    with WarmPython(COMMAND, *given, options=(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as main:
        assert main.stdout is not None
        said = []
        for line in main.stdout:
            said.append(line)
            if "campaign 4" in line:
                break
        else:
            pytest.skip("".join(said))
        family = psutil.Process(main.pid).children(recursive=True)
        main.send_signal(end)
    assert psutil.wait_procs(family, timeout=TIMEOUT)[1] == []
    deadline = time.monotonic() + TIMEOUT
    while left := loops_below(tmp_path):  # the kernel lets go of them after the last process has ended
        assert time.monotonic() < deadline, left
        os.sched_yield()
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    if end == signal.SIGINT:
        assert [path for folder in ("kills", "images") for path in (tmp_path / folder).iterdir()] == []


def loops_below(folder: Path) -> list[str]:
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found.append(file.read_text().strip())
        except OSError:  # freed meanwhile
            continue
    return [path for path in found if path.startswith(str(folder))]


# -- what is on a disk after a power loss ----------------------------------------------------------


def write(number: int, sectors: int = 4) -> Entry:
    return Entry(WRITE, 4096 * number, bytes([number]) * 512 * sectors)


LOG = [write(1), write(2), Entry(FLUSH, 0, b""), Entry(MARK, 0, b"open"), write(3), Entry(FLUSH, 0, b""), write(4)]


def test_a_log_comes_back_as_it_was_written() -> None:
    assert parse(b"".join(pack(entry.kind, entry.offset, entry.data) for entry in LOG)) == LOG


def test_every_prefix_from_the_trainers_first_word_on_is_a_crash() -> None:
    crashes = list(prefixes(LOG, 3))
    assert [crash.end for crash in crashes] == [4, 5, 7]
    assert [len(crash.writes) for crash in crashes] == [2, 3, 4]


def test_a_reordering_keeps_all_that_was_flushed_and_any_sectors_of_the_rest() -> None:
    crashes = list(reorderings(LOG, 3, count=500, rng=random.Random(1)))
    kept = [[entry for entry in crash.writes if entry.offset >= 4096 * 4] for crash in crashes if crash.end == 7]
    assert {sum(len(entry.data) for entry in entries) // 512 for entries in kept} == {0, 1, 2, 3, 4}
    for crash in crashes:
        flushed = LOG[:2] if crash.end < 6 else [*LOG[:2], LOG[4]]
        assert list(crash.writes[: len(flushed)]) == flushed
        for entry in crash.writes:
            whole = next(w for w in LOG if w.kind == WRITE and w.offset <= entry.offset < w.offset + len(w.data))
            at = entry.offset - whole.offset
            assert at % 512 == 0
            assert entry.data == whole.data[at : at + len(entry.data)]


# -- what the supervisor knows ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "allowed"),
    [
        ([], [None]),
        (["open", "begun 1"], [None, 1]),
        (["begun 1", "resolved 1"], [1]),
        (["begun 1", "resolved 1", "begun 2"], [1, 2]),
    ],
)
def test_a_trainer_may_resume_from_its_last_resolved_save_or_the_one_it_had_begun(
    tmp_path: Path, said: list[str], allowed: list[int | None]
) -> None:
    known = Known(file=tmp_path / "known.json")
    known.hear(said)
    assert [number for number in (None, 1, 2, 3) if known.allows(number) is None] == allowed


def test_steps_go_up_but_for_the_overwritten() -> None:
    steps = [step_of(number) for number in range(1, 10)]
    assert steps == [1, 1, 2, 3, 3, 4, 5, 5, 6]
    assert [is_overwrite(n) for n in range(1, 10)] == [step_of(n) == step_of(n - 1) for n in range(1, 10)]


def test_any_difference_between_two_states_is_seen() -> None:
    assert differs(state_of(5), state_of(5)) is None
    assert differs(state_of(5), state_of(6)) is not None
    changed = state_of(5)
    changed["tensors"]["a"][3] += 1  # type: ignore[index]
    assert differs(changed, state_of(5)) == "tensors.a.tensor"
