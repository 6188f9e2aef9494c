"""Notes on errors: the stage of the save in which an error came, or that it left a template modified."""

from __future__ import annotations

import contextlib

from aio_ckpt.errors import AioCkptError

__all__ = ["mark_modified", "note_stage"]


def note_stage(error: BaseException, stage: str) -> None:
    """Note on ``error`` the stage of the save in which it came. A stage that an error of ours already has stays."""
    if not isinstance(error, AioCkptError):
        error.add_note(f"while saving, stage {stage}")
    elif not error.stage:
        error.stage = stage


def mark_modified(error: Exception) -> None:
    """Mark ``error``, of any type: the caller's template may now hold a mix of old and new values."""
    with contextlib.suppress(AttributeError):
        error.target_modified = True  # type: ignore[attr-defined]
