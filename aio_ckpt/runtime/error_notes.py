"""What is written on an error before it is raised: the stage of the save, or that a template was modified."""

from __future__ import annotations

import contextlib

from aio_ckpt.errors import AioCkptError

__all__ = ["tell_modified", "tell_stage"]


def tell_stage(error: BaseException, stage: str) -> None:
    """Write on ``error`` at which stage it came, unless it says so; on an error that is not ours, as a note."""
    if not isinstance(error, AioCkptError):
        error.add_note(f"while saving, stage {stage}")
    elif not error.stage:
        error.stage = stage


def tell_modified(error: Exception) -> None:
    """Write on ``error``, of any type, that the caller's template may hold a mix of old and new values."""
    with contextlib.suppress(AttributeError):
        error.target_modified = True  # type: ignore[attr-defined]
