"""One crash: a trainer that saves, what the supervisor knows of it, and the judgement of what it left."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaigns.crash.contenders import BrokenError, Contender
from tests.campaigns.crash.forks import Tell, fork
from tests.campaigns.crash.points import KillPoint

__all__ = ["HarnessError", "Known", "Tally", "judge", "train"]

SAVES_PER_TRAINER = 12
"""A trainer ends by itself after so many: every point comes within four."""
SHOWN_PROBLEMS = 5


class HarnessError(Exception):
    """A campaign did not do what it was meant to; no figure of it counts."""


@dataclass(slots=True, kw_only=True)
class Known:
    """What the supervisor knows of a root, from the trainer's words alone; kept in a file far from the root."""

    file: Path
    """Where it is kept."""
    resolved: int = 0
    """Newest save that the trainer called durable."""
    begun: int = 0
    """Newest save that it began."""

    def hear(self, lines: Sequence[str]) -> None:
        """Take in what a trainer said."""
        for line in lines:
            word, _, number = line.partition(" ")
            if word == "begun":
                self.begun = int(number)
            elif word == "resolved":
                self.resolved = int(number)
        self.keep()

    def keep(self) -> None:
        """Write the file."""
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"resolved": self.resolved, "begun": self.begun}))
        os.replace(temporary, self.file)

    def allows(self, number: int | None) -> str | None:
        """What is wrong with a root whose newest checkpoint is ``number``; None if nothing."""
        if self.resolved <= (number or 0) <= self.begun:
            return None
        found = "no checkpoint" if number is None else f"save {number}"
        return f"{found} is found, but save {self.resolved} had been called durable and {self.begun} begun"


@dataclass(slots=True, kw_only=True)
class Tally:
    """Crashes of one contender in one campaign."""

    contender: str
    """Who."""
    campaign: str
    """Which: ``kill``, ``shutdown`` or ``blocklog``, and how."""
    tried: int = 0
    """Crash points."""
    survived: int = 0
    """Those after which everything held."""
    by_point: dict[str, int] = field(default_factory=dict)
    """Crashes tried at each named point."""
    problems: list[str] = field(default_factory=list)
    """The first few that did not hold."""

    def count(self, point: str, problem: str | None) -> None:
        """One crash."""
        self.tried += 1
        self.by_point[point] = self.by_point.get(point, 0) + 1
        if problem is None:
            self.survived += 1
        elif len(self.problems) < SHOWN_PROBLEMS:
            self.problems.append(f"{point}: {problem}")


def train(
    contender: Contender,
    root: Path,
    first: int,
    *,
    saves: int = SAVES_PER_TRAINER,
    point: KillPoint | None = None,
    after: Callable[[int], None] | None = None,
) -> Callable[[Tell], None]:
    """What a trainer process does: save ``first``, ``first + 1``, ..., and say so; ``after`` is called at each
    resolved save."""

    def run(tell: Tell) -> None:
        with contender.saving(root, point, None) as save:
            tell("open")
            for number in range(first, first + saves):
                tell(f"begun {number}")
                save(number)
                tell(f"resolved {number}")
                if after is not None:
                    after(number)

    return run


def judge(contender: Contender, root: Path, known: Known) -> str | None:
    """In a fresh process: what a crash left must be whole, what was called durable must be there, and saving goes
    on. Returns the problem; ``known`` moves on to the newest save."""
    known.keep()

    def run(tell: Tell) -> None:
        expected = json.loads(known.file.read_text())
        number = contender.newest(root)
        tell(f"found {number or 0}")
        wrong = Known(file=known.file, **expected).allows(number)
        if wrong is not None:
            raise BrokenError(wrong)
        if contender.saves_on is not None:
            contender.saves_on(root, (number or 0) + 1)
            tell(f"found {(number or 0) + 1}")

    child = fork(run)
    code = child.wait()
    for line in child.lines:
        word, _, rest = line.partition(" ")
        if word == "found":
            known.resolved = known.begun = int(rest)
        elif word == "failed:":
            return rest
    return None if code == 0 else f"the process that resumed ended with {code}"
