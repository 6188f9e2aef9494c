"""Crash points tried and survived, side by side: as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tests.campaigns.common import keep_result, machine
from tests.campaigns.crash.trial import Tally

__all__ = ["Summary", "publish"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One run of the command."""

    settings: Mapping[str, object]
    """Options of the run."""
    tallies: Sequence[Tally]
    """Crashes of each contender in each campaign."""
    skipped: Sequence[str]
    """What could not run here, and why."""
    failures: Sequence[str]
    """How campaigns failed that should have run."""

    @property
    def stem(self) -> str:
        """Of the JSON's name: a run of some of the campaigns says which."""
        only = str(self.settings["only"]).split(",")
        return "crash" if len(only) == 3 else "-".join(["crash", *only])

    @property
    def tried(self) -> int:
        """Number of crashes."""
        return sum(tally.tried for tally in self.tallies)

    @property
    def survived(self) -> int:
        """Number of crashes after which everything held."""
        return sum(tally.survived for tally in self.tallies)

    @property
    def is_survived(self) -> bool:
        """Whether everything held after every crash, of which there was one, and no campaign failed."""
        return 0 < self.tried == self.survived and not self.failures


def render(summary: Summary, described: Mapping[str, object], date: str) -> str:
    """As Markdown."""
    about = ", ".join(f"{key} {value}" for key, value in described.items() if value != [])
    options = ", ".join(f"{key}={value}" for key, value in summary.settings.items())
    columns = list(dict.fromkeys(tally.contender for tally in summary.tallies))
    rows = list(dict.fromkeys(tally.campaign for tally in summary.tallies))
    cells = {(tally.campaign, tally.contender): f"{tally.survived} / {tally.tried}" for tally in summary.tallies}
    lines = [f"Run of {date}. {about}. Options: {options}.", ""]
    lines += ["| survived / tried | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    lines += [f"| {row} | " + " | ".join(cells.get((row, column), "-") for column in columns) + " |" for row in rows]
    named = [tally for tally in summary.tallies if "named" in tally.campaign]
    lines += [
        "",
        *(
            f"{tally.contender}: {len(tally.by_point)} named points, each killed at {min(tally.by_point.values())} to "
            f"{max(tally.by_point.values())} times."
            for tally in named
        ),
        f"In all: {summary.survived} survived of {summary.tried} tried.",
        *(f"Not run: {reason}." for reason in summary.skipped),
        *(f"A campaign {failure}." for failure in summary.failures),
    ]
    return "\n".join(lines) + "\n"


def publish(summary: Summary, folder: Path, *, out: Path | None) -> None:
    """Print the table and what was not survived; write the JSON to ``out``."""
    described, date = machine(folder), datetime.now(UTC).strftime("%Y-%m-%d")
    text = render(summary, described, date)
    print(text)
    for tally in summary.tallies:
        for problem in tally.problems:
            print(f"not survived: {tally.contender}: {tally.campaign}: {problem}")
    if out is not None:
        document = {"machine": described, "tried": summary.tried, "survived": summary.survived}
        keep_result(summary.stem, document | asdict(summary), out)
