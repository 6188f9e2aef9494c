"""Text of errors, and notes on them: the stage of a save, a modified template, the checkpoint."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path

from aio_ckpt.errors import AioCkptError, CorruptCheckpointError


def named(error: BaseException) -> str:
    """Return type and text of ``error``. The text of a caller's exception may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001
        return f"{type(error).__name__} (its text cannot be shown)"


def note_stage(error: BaseException, stage: str) -> None:
    """Note on ``error`` the stage of the save in which it came. A stage that an error of ours already has stays."""
    if not isinstance(error, AioCkptError):
        error.add_note(f"while saving, stage {stage}")
    elif not error.stage:
        error.stage = stage


def name_checkpoint(error: AioCkptError, path: Path) -> None:
    """Put the directory of the checkpoint before the text of ``error``, unless the text names it."""
    if str(path) not in str(error):
        error.args = (f"{path}: {error}",)


@contextlib.contextmanager
def naming_checkpoint(path: Path) -> Iterator[None]:
    """Call :func:`name_checkpoint` with a CorruptCheckpointError that the block raises."""
    try:
        yield
    except CorruptCheckpointError as error:
        name_checkpoint(error, path)
        raise


def copy_to_raise(error: BaseException) -> BaseException:
    """Return a copy of an error that a ticket keeps, or the error itself if its type cannot be copied.

    Raised itself, a kept error would keep the frames of its callers, and so the engine.
    """
    try:
        copied = copy.copy(error)
    except Exception:  # noqa: BLE001 - a type's own __reduce__ raises any error
        return error
    copied.args = error.args  # a type's own __init__ may have changed them
    if isinstance(error, OSError):  # the remedy in its text was set later
        for name in ("errno", "strerror", "filename", "filename2"):
            if (value := getattr(error, name)) is not None:
                setattr(copied, name, value)
    if hasattr(error, "__notes__"):
        copied.__notes__ = [*error.__notes__]
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


def mark_modified(error: Exception) -> None:
    """Mark ``error``, of any type: the caller's template may now hold a mix of old and new values."""
    with contextlib.suppress(AttributeError):
        error.target_modified = True  # type: ignore[attr-defined]
