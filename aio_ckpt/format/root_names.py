"""Names of files and directories under a root. Pure.

A root holds the committed steps. All other files of the engine lie below :data:`ENGINE_DIR`. Other tools search a root
for steps by patterns without anchors, and would take ``.abandoned-step-30`` for a step.
"""

from __future__ import annotations

import re

ENGINE_DIR = ".aio_ckpt"
PENDING_DIR = f"{ENGINE_DIR}/pending"
"""Saves that are being written, or whose writer died."""
ABANDONED_DIR = f"{ENGINE_DIR}/abandoned"
"""Steps that ``rollback`` set aside; the engine never deletes them."""
CORRUPT_DIR = f"{ENGINE_DIR}/corrupt"
"""Steps that a load proved damaged; the engine never deletes them."""
TRASH_DIR = f"{ENGINE_DIR}/trash"
"""Directories that are being deleted. Only the holder of the writer's lock deletes them."""
PROTECTED_DIR = f"{ENGINE_DIR}/protected"
"""Empty files. The step in the name of each is never deleted."""
ENGINE_DIRS = (PENDING_DIR, ABANDONED_DIR, CORRUPT_DIR, TRASH_DIR, PROTECTED_DIR)
LOCK_FILE = f"{ENGINE_DIR}/lock"
CLAIM_FILE = f"{ENGINE_DIR}/claim.json"
"""Names the engine that may write under the root. Its modification time is the heartbeat."""
SEGMENTS_FILE = f"{ENGINE_DIR}/segments.json"
"""Names the directories in which a writer with ``shm_path`` makes its segments. Removed when the writer ends well."""

_PROTECTED = re.compile(r"\d{1,19}")


def abandoned_name(tag: str, name: str) -> str:
    """Return the path below the root to which the rollback ``tag``, a number, moves the step in directory ``name``."""
    return f"{ABANDONED_DIR}/{tag}-{name}"


def name_before_rollback(name: str) -> str:
    """Return the name that a directory in ``ABANDONED_DIR`` had before; '' if no rollback moved it."""
    return name.partition("-")[2]


def protected_name(step: int) -> str:
    """Return the path of the file that protects a step, below the root. It does not depend on ``step_dir``."""
    return f"{PROTECTED_DIR}/{step}"


def protected_step(name: str) -> int | None:
    """Return the step that a file of this name in ``PROTECTED_DIR`` protects; None if it protects none."""
    return int(name) if _PROTECTED.fullmatch(name) else None
