"""The root of many ranks: it must be the same on all of them, and only the first save makes it."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from builders import weights
from disk_tree import tree_of
from log_lines import kept_lines
from rank_processes import Ranks, engine_on
from waits import until

from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError
from aio_ckpt.format.root_names import CLAIM_FILE, ENGINE_DIR
from aio_ckpt.storage.root_lock import RootLock

SECS = 30.0
OWN = Path("/proc/self/cwd/ckpt")
"""One path, which leads to another directory on each rank: like a disk of each host."""


def text_of(call: Callable[[], object]) -> str:
    try:
        call()
    except AioCkptError as error:
        return f"{type(error).__name__}: {error}"
    return "went well"


def on_disks_of_their_own(rank: int, count: int, folder: Path, disks: tuple[str, ...]) -> tuple[str, str]:
    """Save, then load, with the root on the disk of this rank."""
    here = os.getcwd()
    (folder / disks[rank]).mkdir(exist_ok=True, parents=True)
    os.chdir(folder / disks[rank])
    try:
        with engine_on(OWN, SECS, on_failure="log") as engine:
            saved = text_of(lambda: engine.save(weights(1), step=1).result(SECS))
            state = weights(0)
            loaded = text_of(lambda: engine.load(state))
            assert loaded == "went well" or not state["w"].any()
    finally:
        os.chdir(here)
    return saved, loaded


def test_the_first_save_of_ranks_with_different_roots_fails_and_names_the_hosts(two: Ranks, tmp_path: Path) -> None:
    (leader, _), (other, _) = two.run(on_disks_of_their_own, tmp_path, ("a", "b"))
    assert other.startswith("RootError: ")
    assert leader.startswith("PeerFailedError: rank 1 failed")
    host = os.uname().nodename
    for text in (leader, other):
        assert f"rank 1 on {host} does not see that of rank 0 on {host}" in text
        assert "a file system that all of them share" in text
    assert not any(name.startswith("step") for _, names, _ in os.walk(tmp_path) for name in names)
    assert two.run(on_disks_of_their_own, tmp_path, ("one", "one")) == [("went well", "went well")] * 2


def load_own(rank: int, count: int, folder: Path, disks: tuple[str, ...]) -> str:
    here = os.getcwd()
    os.chdir(folder / disks[rank])
    try:
        with engine_on(OWN, SECS) as engine:
            state = weights(0)
            text = text_of(lambda: engine.load(state))
            assert not state["w"].any()
    finally:
        os.chdir(here)
    return text


def test_a_load_of_ranks_with_different_roots_fails_and_names_the_hosts(two: Ranks, tmp_path: Path) -> None:
    for disk, steps in (("full", 1), ("other", 1), ("empty", 0)):
        (tmp_path / disk).mkdir()
        for step in range(1, steps + 1):
            with engine_on(tmp_path / disk / "ckpt", SECS) as engine:
                engine.save(weights(step), step=step).result(SECS)
    before = tree_of(tmp_path)
    for disks in (("full", "other"), ("full", "empty")):
        for text in two.run(load_own, tmp_path, disks):
            assert text.startswith("RootError: ")
            assert "rank 1 on " in text
            assert "does not see that of rank 0" in text
    for text in two.run(load_own, tmp_path, ("empty", "full")):
        assert text.startswith(CheckpointNotFoundError.__name__)
    assert tree_of(tmp_path) == before


def through_its_own_mount(rank: int, count: int, mounts: tuple[Path, ...]) -> list[float]:
    """Save and load at a step and at a path, below what this rank's host calls the directory."""
    root, found = mounts[rank] / "run", []
    with engine_on(root, SECS) as engine:
        engine.save(weights(1), step=1).result(SECS)
        for value in (2, 3):
            engine.save(weights(value), path=root.parent / "final", overwrite=True).result(SECS)
    with engine_on(root, SECS) as engine:
        for place in (None, root.parent / "final"):
            state = weights(0)
            engine.load(state, path=place)
            found.append(float(state["w"][0]))
    return found


def test_ranks_whose_hosts_mount_the_directory_at_different_paths_save_and_load(two: Ranks, tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    mounts = tmp_path / "mnt", tmp_path / "data"
    for mount in mounts:
        mount.symlink_to(tmp_path / "export")
    assert two.run(through_its_own_mount, mounts) == [[1.0, 3.0]] * 2


def in_its_own_order(rank: int, count: int, folder: Path) -> tuple[str, list[str]]:
    first, second = ("a", "b") if rank == 0 else ("b", "a")
    with (
        kept_lines() as lines,
        engine_on(folder / first, SECS, on_failure="log") as engine,
        engine_on(folder / second, SECS),
    ):
        text = text_of(lambda: engine.save(weights(1), step=1).result(SECS))

        def told() -> list[str]:
            return [line for line in lines.messages if line.startswith("the root of this rank")]

        until(lambda: rank == 0 or len(told()) == 2)  # the other engine meets in the background
    return text, told()


def test_engines_that_were_opened_in_different_orders_fail_and_name_both_roots(two: Ranks, tmp_path: Path) -> None:
    (_, of_leader), (_, told) = found = two.run(in_its_own_order, tmp_path)
    assert not of_leader
    assert len(told) == 2, "one for each engine"
    for mine, of_rank_0 in (("b", "a"), ("a", "b")):  # either engine may meet first
        line = f"the root of this rank is {tmp_path / mine}, and that of rank 0 is {tmp_path / of_rank_0}"
        assert [each for each in told if line in each]
    for text, _ in found:
        assert f"{tmp_path / 'a'}: give a directory" in text
        assert "open several engines in one order on all ranks" in text


def look_around(rank: int, count: int, root: Path, parent: Path) -> list[tuple[str, list[str]]]:
    """What the disk holds beyond the tree at the beginning, after each call that only looks; without the claim.

    ``rollback()`` claims the root until the engine is closed.
    """
    claim = str((root / CLAIM_FILE).relative_to(parent))
    before, found = tree_of(parent), []

    def note(call: str) -> None:
        dist.barrier()
        found.append((call, sorted((tree_of(parent).keys() ^ before.keys()) - {claim})))
        dist.barrier()

    with engine_on(root, SECS) as engine:
        for name, call in (
            ("latest_step", engine.latest_step),
            ("steps", engine.steps),
            ("load", lambda: text_of(lambda: engine.load(weights(0)))),
            ("read", lambda: text_of(engine.read)),
            ("rollback", lambda: text_of(lambda: engine.rollback(7))),
        ):
            call()
            note(name)
    note("close")
    return found


def test_ranks_that_only_look_make_nothing_on_the_disk(two: Ranks, tmp_path: Path) -> None:
    for found in two.run(look_around, tmp_path / "runs" / "missing", tmp_path):
        assert [(call, new) for call, new in found if new] == []
        assert len(found) == 6


def test_ranks_that_only_read_make_nothing_in_a_root_with_steps(two: Ranks, tmp_path: Path) -> None:
    with engine_on(tmp_path / "root", SECS) as engine:
        engine.save(weights(1), step=7).result(SECS)
    for found in two.run(look_around, tmp_path / "root", tmp_path):
        assert [(call, new) for call, new in found if new] == []


def prepare_with_a_step(rank: int, count: int, root: Path) -> tuple[str, int]:
    with engine_on(root, SECS) as engine:
        refused = text_of(lambda: engine.prepare(weights(1), step=7))
        assert not (root / ENGINE_DIR / "lock").exists()
        dist.barrier()
        engine.prepare(weights(1), step=8).result(SECS)
        return refused, engine.save(weights(1), step=8).result(SECS).step


def test_prepare_refuses_a_step_on_every_rank_before_the_root_is_locked(two: Ranks, tmp_path: Path) -> None:
    with engine_on(tmp_path / "used", SECS) as engine:
        engine.save(weights(1), step=7).result(SECS)
    shutil.copytree(tmp_path / "used" / "step_000000007", tmp_path / "root" / "step_000000007")
    for refused, saved in two.run(prepare_with_a_step, tmp_path / "root"):
        assert refused.startswith("StepOrderError: step=7 does not exceed the newest committed or pending step 7: ")
        assert saved == 8


def save_while_the_lock_hangs(rank: int, count: int, root: Path) -> str:
    """Save twice, each time another structure. The file system of rank 0 does not answer in the second save."""
    answers, renew = threading.Event(), RootLock.renew

    def hanging(lock: RootLock) -> bool:
        return answers.wait(SECS) and renew(lock)

    with engine_on(root, 2.0, on_failure="log") as engine:
        engine.save(weights(1), step=1).result(SECS)
        with mock.patch.object(RootLock, "renew", hanging):
            told = text_of(lambda: engine.save(weights(1) | {"more": weights(2)}, step=2).result(SECS))
            answers.set()
    return told


def test_if_the_lock_of_the_leader_hangs_all_ranks_are_told_so(two: Ranks, tmp_path: Path) -> None:
    for told in two.run(save_while_the_lock_hangs, tmp_path / "root"):
        assert "looking at the lock of" in told
        assert "did not end within 2.0 s" in told
