"""Power loss: the shutdown ioctl on a mounted file system, and a disk's log replayed up to every point."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.campaigns.crash.block_log import MARK, WRITE, Crash, Entry, parse, prefixes, reorderings
from tests.campaigns.crash.contenders import Contender
from tests.campaigns.crash.disks import EXT4, FileSystem, make, mounted, shut_down
from tests.campaigns.crash.forks import Tell, fork
from tests.campaigns.crash.fuse_disk import DISK, MARKS, recording_disk
from tests.campaigns.crash.trial import HarnessError, Known, Tally, judge, train

__all__ = ["block_log_campaign", "shutdown_campaign"]

TRIALS_PER_DISK = 25
LAST_INSTANT_SECS = 0.12
"""Random cuts come until then, counted from the fork."""
MOST_SAVES = 4
"""Saves before a cut that comes right after one has resolved: two plain ones and an overwrite among them."""
RECORDED_SAVES = 7


def shutdown_campaign(
    contender: Contender, kind: FileSystem, folder: Path, *, flags: int, at_random: bool, trials: int, seed: int
) -> Iterator[Tally]:
    """``trials`` shutdowns, right after a save has resolved or at random instants; yields the tally after each."""
    rng = random.Random(seed)
    when = "random instants" if at_random else "right after resolved"
    tally = Tally(contender=contender.name, campaign=f"{kind.name} shutdown {flags}, {when}")
    folder.mkdir(parents=True)
    image, known = folder / "disk.img", Known(file=folder / "known.json")
    while tally.tried < trials:
        if tally.tried % TRIALS_PER_DISK == 0 or tally.tried != tally.survived:
            image.unlink(missing_ok=True)
            make(kind, image)
            known = Known(file=known.file)
        with mounted(kind, image, folder / "mnt") as mount:
            if at_random:
                said = _cut_at(contender, mount, known, flags, secs=rng.uniform(0.0, LAST_INSTANT_SECS))
            else:
                said = _cut_after(contender, mount, known, flags, saves=rng.randint(1, MOST_SAVES))
            known.hear(said)
        with mounted(kind, image, folder / "mnt") as mount:
            problem = judge(contender, mount / "root", known)
        tally.count(f"flags {flags}", problem)
        yield tally


def _cut_after(contender: Contender, mount: Path, known: Known, flags: int, *, saves: int) -> list[str]:
    """The trainer itself pulls the plug, at once after its last save has resolved."""
    last = known.begun + saves

    def cut(number: int) -> None:
        if number == last:
            shut_down(mount, flags)
            os.kill(os.getpid(), signal.SIGKILL)

    child = fork(train(contender, mount / "root", known.begun + 1, saves=saves, after=cut))
    if child.wait() != -signal.SIGKILL:
        raise HarnessError(f"{contender.name}: the trainer did not get to its {saves} saves: {child.lines[-1:]}")
    return child.lines


def _cut_at(contender: Contender, mount: Path, known: Known, flags: int, *, secs: float) -> list[str]:
    """Only what was said before the cut was heard: XFS lets an fsync that meets a shutdown in its way succeed."""
    child = fork(train(contender, mount / "root", known.begun + 1, saves=1000))
    try:
        child.listen(secs)
        child.listen(0.0)
        before = len(child.lines)
        shut_down(mount, flags)
    finally:
        child.kill()
        child.wait()  # by the signal, or by the error that the shutdown gave it
    return [line for number, line in enumerate(child.lines) if number < before or line.startswith("begun")]


# -- the block log --------------------------------------------------------------------------------


def block_log_campaign(contender: Contender, folder: Path, *, samples: int, seed: int) -> Iterator[Tally]:
    """One recorded run of a trainer; then every prefix of its log and ``samples`` reorderings, each in an image that
    is mounted, loaded and saved to; yields the tally after each."""
    folder.mkdir(parents=True)
    entries, first = record(contender, folder)
    rng, known = random.Random(seed), Known(file=folder / "known.json")
    in_order = Tally(contender=contender.name, campaign="block log: prefixes")
    reordered = Tally(contender=contender.name, campaign="block log: reorderings, torn sectors")
    crashes = [(crash, in_order) for crash in prefixes(entries, first)]
    crashes += [(crash, reordered) for crash in reorderings(entries, first, count=samples, rng=rng)]
    rng.shuffle(crashes)  # a campaign that runs out of time has seen some of every part of the log
    image = folder / "disk.img"
    for crash, tally in crashes:
        known.resolved = known.begun = 0
        known.hear([entry.data.decode() for entry in entries[: crash.end] if entry.kind == MARK])
        image.write_bytes(_disk_after(crash, EXT4.nbytes))
        problem = _judge_image(contender, image, folder / "mnt", known)
        tally.count("a point of the log", problem and f"{crash.name}: {problem}")
        yield tally


def _disk_after(crash: Crash, nbytes: int) -> bytearray:
    disk = bytearray(nbytes)
    for entry in crash.writes:
        disk[entry.offset : entry.offset + len(entry.data)] = entry.data
    return disk


def record(contender: Contender, folder: Path) -> tuple[list[Entry], int]:
    """What a disk under ext4 is told while a trainer saves, up to its last word; and where the trainer begins."""
    log = folder / "disk.log"
    with recording_disk(folder / "disk", EXT4.nbytes, log) as disk:
        make(EXT4, disk / DISK)
        with mounted(EXT4, disk / DISK, folder / "mnt") as mount:
            child = fork(_marking(train(contender, mount / "root", 1, saves=RECORDED_SAVES), disk / MARKS))
            if child.wait() != 0:
                raise HarnessError(f"{contender.name}: a recorded run failed: {child.lines[-1:]}")
    entries = parse(log.read_bytes())
    log.unlink()
    marks = [at for at, entry in enumerate(entries) if entry.kind == MARK]
    if not any(entry.kind == WRITE for entry in entries):
        raise HarnessError("the disk recorded no write")
    return entries[: marks[-1] + 1], marks[0]


def _marking(run: Callable[[Tell], None], marks: Path) -> Callable[[Tell], None]:
    """``run``, all it tells written into the log as well."""

    def marked(tell: Tell) -> None:
        descriptor = os.open(marks, os.O_WRONLY)

        def both(line: str) -> None:
            os.write(descriptor, line.encode())
            tell(line)

        run(both)

    return marked


def _judge_image(contender: Contender, image: Path, folder: Path, known: Known) -> str | None:
    try:
        with mounted(EXT4, image, folder) as mount:
            return judge(contender, mount / "root", known)
    except OSError as error:
        return f"the file system cannot be mounted: {error}"
