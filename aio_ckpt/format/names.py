"""Names of what lies under a root. Pure."""

from __future__ import annotations

import re

__all__ = [
    "ABANDONED_PREFIX",
    "CORRUPT_PREFIX",
    "LOCK_FILE",
    "OWNER_FILE",
    "PENDING_PREFIX",
    "PROTECTED_PREFIX",
    "SEGMENTS_FILE",
    "TRASH_PREFIX",
    "StepNames",
    "protected_name",
    "protected_step",
]

PENDING_PREFIX = ".pending-"
"""A save that is being written, or whose writer died."""
ABANDONED_PREFIX = ".abandoned-"
"""A step that ``rollback`` set aside; never deleted here."""
CORRUPT_PREFIX = ".corrupt-"
"""A step that a load proved damaged; never deleted here."""
TRASH_PREFIX = ".trash-"
"""What is being deleted, by the holder of the lock only."""
PROTECTED_PREFIX = ".protected-"
"""An empty file: the step in its name is never deleted."""
OWNER_FILE = "writer.json"
LOCK_FILE = ".aio_ckpt.lock"
SEGMENTS_FILE = ".aio_ckpt.shm"
"""Where a writer with ``shm_path`` makes its segments, so that what it leaves is found; gone after a clean end."""

_LITERAL = re.compile(r"\{step[^}]*\}")
_FOREIGN_STEP = re.compile(r"(?:step[-_]|iter_|checkpoint-|global_step)(\d+)")
_PROTECTED = re.compile(rf"{re.escape(PROTECTED_PREFIX)}(\d{{1,19}})")


class StepNames:
    """Directory names of steps: one pattern for writing, several known ones for discovery."""

    def __init__(self, step_dir: str) -> None:
        self._step_dir = step_dir
        before, after = _LITERAL.split(step_dir)
        self._own = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")

    def name(self, step: int) -> str:
        """Directory name of a step."""
        return self._step_dir.format(step=step)

    def step(self, name: str) -> int | None:
        """Step of a directory name; None if it is no name of a step."""
        match = self._own.fullmatch(name) or _FOREIGN_STEP.fullmatch(name)
        return int(match[1]) if match else None


def protected_name(step: int) -> str:
    """Name of the file that protects a step, whatever its directory is called."""
    return f"{PROTECTED_PREFIX}{step}"


def protected_step(name: str) -> int | None:
    """Step that a file of this name protects; None if it is no such name."""
    match = _PROTECTED.fullmatch(name)
    return int(match[1]) if match else None
