"""kill -9 at every named point of the commit protocol, and at random instants."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaigns.crash.contenders import Contender
from tests.campaigns.crash.forks import Tell, fork
from tests.campaigns.crash.points import KillPoint, When
from tests.campaigns.crash.trial import SAVES_PER_TRAINER, HarnessError, Known, Tally, judge, train

__all__ = ["Site", "named_points", "points_campaign", "random_campaign"]

KILLS_PER_ROOT = 25
"""A root is used again and again, as in life, then given up."""
LAST_INSTANT_SECS = 0.15
"""Random kills come until then, counted from the fork: engine, recovery and about eight saves."""
MOST_SKIPPED = 1
"""A point is passed up to so often before it kills."""


@dataclass(slots=True, kw_only=True)
class Site:
    """Where a contender saves, root after root."""

    folder: Path
    """Of the roots and, beside them, what the supervisor knows."""
    kills: int = 0
    """So far."""
    known: Known = field(init=False)
    """Of the root in use."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.known = Known(file=self.folder / "known.json")

    @property
    def root(self) -> Path:
        """The root in use."""
        return self.folder / str(self.kills // KILLS_PER_ROOT) / "root"

    def next(self, problem: str | None) -> None:
        """Move on after a kill; a root with a problem, or used up, is left."""
        before = self.root
        self.kills = (self.kills // KILLS_PER_ROOT + 1) * KILLS_PER_ROOT if problem else self.kills + 1
        if self.root != before:
            shutil.rmtree(before.parent, ignore_errors=True)
            self.known = Known(file=self.known.file)
        self.root.parent.mkdir(exist_ok=True)


def named_points(contender: Contender, folder: Path) -> list[KillPoint]:
    """The points that a run without a kill passes, in the order of their first coming."""

    def run(tell: Tell) -> None:
        def on_call(call: str, whens: tuple[When, ...]) -> None:
            for when in whens:
                tell(f"{when} {call}")

        folder.mkdir(parents=True)
        with contender.saving(folder / "root", None, on_call) as save:
            for number in range(1, SAVES_PER_TRAINER + 1):
                save(number)

    child = fork(run)
    if child.wait() != 0:
        raise HarnessError(f"{contender.name}: a run without a kill failed: {child.lines[-1:]}")
    shutil.rmtree(folder)
    names = dict.fromkeys(child.lines)
    whens: dict[str, When] = {"before": "before", "within": "within", "after": "after"}
    return [KillPoint(call=name.partition(" ")[2], when=whens[name.partition(" ")[0]]) for name in names]


def points_campaign(contender: Contender, folder: Path, *, kills: int, seed: int) -> Iterator[Tally]:
    """``kills`` in rounds over all named points, each round shuffled; yields the running tally after each."""
    site, rng = Site(folder=folder), random.Random(seed)
    points = named_points(contender, folder / "rehearsal")
    tally = Tally(contender=contender.name, campaign="kill -9, named points")
    turns: list[KillPoint] = []
    while tally.tried < kills:
        turns = turns or rng.sample(points, len(points))
        point = turns.pop()
        point = KillPoint(call=point.call, when=point.when, skip=rng.randint(0, MOST_SKIPPED))
        site.root.parent.mkdir(exist_ok=True)
        child = fork(train(contender, site.root, site.known.begun + 1, point=point))
        code = child.wait()
        if code != -signal.SIGKILL:
            raise HarnessError(f"{contender.name}: {point} was not reached: {code}, {child.lines[-1:]}")
        site.known.hear(child.lines)
        problem = judge(contender, site.root, site.known)
        tally.count(point.name, problem)
        site.next(problem)
        yield tally


def random_campaign(contender: Contender, folder: Path, *, kills: int, seed: int) -> Iterator[Tally]:
    """``kills`` at random instants of a trainer's life; yields the running tally after each."""
    site, rng = Site(folder=folder), random.Random(seed)
    tally = Tally(contender=contender.name, campaign="kill -9, random instants")
    while tally.tried < kills:
        site.root.parent.mkdir(exist_ok=True)
        child = fork(train(contender, site.root, site.known.begun + 1, saves=1000))
        child.listen(rng.uniform(0.0, LAST_INSTANT_SECS))
        child.kill()
        code = child.wait()
        if code != -signal.SIGKILL:
            raise HarnessError(f"{contender.name}: the trainer ended by itself: {code}, {child.lines[-1:]}")
        site.known.hear(child.lines)
        problem = judge(contender, site.root, site.known)
        tally.count("random", problem)
        site.next(problem)
        yield tally
