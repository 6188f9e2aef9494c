"""The exception tree.

Every error of this package is an :class:`AioCkptError` and also the builtin that it refines, so that
``except OSError`` or ``except FileNotFoundError`` in a trainer keeps working. None is a bare
``BaseException``. A message names the thing that is wrong and, after a colon or a dash, how to mend it.
"""

from __future__ import annotations

__all__ = [
    "AioCkptError",
    "BudgetExceededError",
    "BusyError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ConfigError",
    "CorruptCheckpointError",
    "DuplicateNameError",
    "EmptyStateError",
    "EngineClosedError",
    "EngineForkedError",
    "FormatVersionError",
    "MismatchError",
    "MissingNameError",
    "PeerFailedError",
    "PlanChangedError",
    "ProtectedStepError",
    "ReadError",
    "RootError",
    "SaveCancelledError",
    "SourceChangedError",
    "StallError",
    "StepOrderError",
    "TemplateMismatchError",
    "ThreadDiedError",
    "UnexpectedNameError",
    "UnsafeObjectError",
    "UnsupportedLeafError",
    "WriteError",
    "WrongThreadError",
]


class AioCkptError(Exception):
    """Root of the tree.

    ``target_modified`` is True when the error came after a load had begun to fill the caller's tensors,
    so that the template may hold a mix of old and new values. ``stage`` says where a save failed: ``open`` (the
    root's lock, what is committed, leftovers), ``capture``, ``write``, ``agree`` or ``commit``; else it is empty.
    """

    target_modified: bool = False
    stage: str = ""
    in_doubt: bool = False
    """True when the save failed in the middle of its last rename: its step may still become visible, whole."""


class ConfigError(AioCkptError, ValueError):
    """A setting or an argument is of the wrong type or out of range; names it, the value and what is allowed."""


# -- the state that was given ---------------------------------------------------------------------


class EmptyStateError(AioCkptError, ValueError):
    """The state holds no leaf at all."""


class DuplicateNameError(AioCkptError, ValueError):
    """Two ranks give one name to things of different kind, dtype or shape."""


class UnsupportedLeafError(AioCkptError, TypeError):
    """A leaf, key or container that no checkpoint can hold (sparse, meta, quantized, odd subclass)."""


class UnsafeObjectError(AioCkptError, TypeError):
    """An object that only running code could read back, or that pickle cannot store; names the leaf and its type."""


class SourceChangedError(AioCkptError, RuntimeError):
    """Another thread freed or resized a tensor's memory, or changed a mapping, before or while it was captured."""


class TemplateMismatchError(AioCkptError, ValueError):
    """The template given to ``load`` disagrees with the checkpoint in kind, shape or dtype."""


class MissingNameError(AioCkptError, KeyError):
    """The template names leaves that the checkpoint lacks."""

    def __str__(self) -> str:  # KeyError shows the repr of its argument, which hides line breaks
        return str(self.args[0]) if self.args else ""


class UnexpectedNameError(AioCkptError, ValueError):
    """With ``strict=True``: the checkpoint holds leaves that the template lacks."""


# -- steps and checkpoints ------------------------------------------------------------------------


class StepOrderError(AioCkptError, ValueError):
    """The step does not exceed every committed and pending step, or it is the newest, which ``delete()`` keeps."""


class ProtectedStepError(AioCkptError, PermissionError):
    """The step is protected from deletion: ``unprotect()`` it first."""


class CheckpointNotFoundError(AioCkptError, FileNotFoundError):
    """No committed checkpoint, or not the one asked for."""


class CheckpointExistsError(AioCkptError, FileExistsError, RuntimeError):
    """``dcp.Writer(overwrite=False)``: the directory holds a checkpoint. Stock raises a RuntimeError here."""


class CorruptCheckpointError(AioCkptError, ValueError):
    """Bytes on disk do not match their sums or sizes; names the file and, where known, the tensor."""


class MismatchError(CorruptCheckpointError):
    """The proven kind: a sum or a length is not the one that was written, or a file that a manifest names is missing.

    Only this lets a writer quarantine a checkpoint; anything else that does not read may be sound elsewhere.
    """


class FormatVersionError(AioCkptError, ValueError):
    """A newer aio_ckpt or a newer torch wrote the checkpoint; names what is unknown here. It is no damage."""


# -- the engine -----------------------------------------------------------------------------------


class EngineClosedError(AioCkptError, RuntimeError):
    """The engine was closed or terminated."""


class EngineForkedError(EngineClosedError):
    """The engine was opened by another process: open one of its own in the forked child."""


class WrongThreadError(AioCkptError, RuntimeError):
    """A blocking wait on the engine's own thread, which would never end."""


class ThreadDiedError(AioCkptError, RuntimeError):
    """What an I/O thread ran ended with ``SystemExit`` or the like, which is the cause; the engine goes on."""


class BusyError(AioCkptError, RuntimeError):
    """``max_in_flight`` saves are pending and ``when_busy="raise"``."""


class BudgetExceededError(AioCkptError, MemoryError):
    """What must be captured at once is larger than ``budget_bytes``."""


class PlanChangedError(AioCkptError, RuntimeError):
    """What was written is not what was asked for; nothing was committed and the plan cache was dropped."""


class SaveCancelledError(AioCkptError, RuntimeError):
    """The save was cancelled by ``ticket.cancel()`` or ``terminate()``; nothing became visible."""


class StallError(AioCkptError, TimeoutError):
    """No byte and no message of progress for ``stall_timeout_secs``, or the save's own deadline passed."""


class PeerFailedError(AioCkptError, RuntimeError):
    """Another rank failed; names its rank, the stage and the cause.

    ``cause`` is the type and the text of the error that came to ``rank``; empty where nothing was heard of one.
    """

    def __init__(self, message: str, *, rank: int, stage: str, cause: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.cause = cause


# -- input and output -----------------------------------------------------------------------------


class RootError(AioCkptError, OSError):
    """The checkpoint root cannot be used: a file, not writable, or locked by another writer."""


class WriteError(AioCkptError, OSError):
    """Writing failed. Keeps ``errno``, ``strerror`` and ``filename`` of the cause."""


class ReadError(AioCkptError, OSError):
    """Reading failed in the operating system (not a mismatch of sums: :class:`CorruptCheckpointError`)."""
