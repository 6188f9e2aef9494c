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

    def step(self, name: str) -> int | None:
        """Return the step of a directory name; None if it is no name of a step."""
        match = self._own.fullmatch(name) or _FOREIGN_STEP.fullmatch(name)
        return int(match[1]) if match else None
