"""Notes on errors: the stage of the save in which an error came, the save made beside it, or a modified template."""

from __future__ import annotations

import contextlib

from aio_ckpt.errors import AioCkptError
from aio_ckpt.ticket import SaveTicket

__all__ = ["mark_modified", "note_stage", "note_ticket"]


def note_stage(error: BaseException, stage: str) -> None:
    """Note on ``error`` the stage of the save in which it came. A stage that an error of ours already has stays."""
    if not isinstance(error, AioCkptError):
        error.add_note(f"while saving, stage {stage}")
    elif not error.stage:
        error.stage = stage


def note_ticket(error: BaseException, ticket: SaveTicket) -> None:
    """Set ``error.ticket``, on an error of any type: the save that the call made before it raised ``error``."""
    with contextlib.suppress(AttributeError):  # a type with slots
        error.ticket = ticket  # type: ignore[attr-defined]


def mark_modified(error: Exception) -> None:
    """Mark ``error``, of any type: the caller's template may now hold a mix of old and new values."""
    with contextlib.suppress(AttributeError):
        error.target_modified = True  # type: ignore[attr-defined]
