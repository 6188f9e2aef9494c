"""Names of the directories of steps, and the steps of such names. Pure."""

from __future__ import annotations

import re

_LITERAL = re.compile(r"\{step[^}]*\}")
_FOREIGN_STEP = re.compile(r"(?:step[-_]|iter_|checkpoint-|global_step)(\d+)")


class StepNames:
    """One pattern for writing, several known ones for discovery."""

    def __init__(self, step_dir: str) -> None:
        self.step_dir = step_dir
        """Pattern for writing, as in ``EngineConfig``."""
        before, after = _LITERAL.split(step_dir)
        self._own = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")

    def name(self, step: int) -> str:
        return self.step_dir.format(step=step)

    @property
    def option(self) -> tuple[str, ...]:
        """Words that a command needs in order to find these names; none if every command knows them."""
        return () if _FOREIGN_STEP.fullmatch(self.name(0)) else ("--step-dir", self.step_dir)

    def step(self, name: str) -> int | None:
        """Return the step of a directory name; None if it is no name of a step."""
        match = self._own.fullmatch(name) or _FOREIGN_STEP.fullmatch(name)
        return int(match[1]) if match else None
