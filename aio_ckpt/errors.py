"""Exceptions of this package.

Every error of this package is an :class:`AioCkptError` and also the builtin that it refines, so that
``except OSError`` or ``except FileNotFoundError`` in a trainer keeps working. None is a bare
``BaseException``. A message names the thing that is wrong and, after a colon or a dash, how to mend it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aio_ckpt.ticket import SaveTicket

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
    "SystemLimitError",
    "TemplateMismatchError",
    "ThreadDiedError",
    "UnexpectedNameError",
    "UnsafeObjectError",
    "UnsupportedLeafError",
    "WriteError",
    "WrongThreadError",
]


class AioCkptError(Exception):
    """Base of all errors of this package."""

    target_modified: bool = False
    """Whether a load had begun to fill the caller's tensors. If so, the template may hold old and new values."""
    stage: str = ""
    """Stage in which a save failed: ``open`` (the root's lock, committed steps, leftovers), ``capture``, ``write``,
    ``agree`` or ``commit``; empty for other errors."""
    in_doubt: bool = False
    """Whether a save failed during its last rename: its step may still become visible, whole. Of a file: whether it
    failed behind its last rename, so that the new file is in its place, and the old one may be there, too."""
    ticket: SaveTicket | None = None
    """Ticket of the save that a call of ``save()`` made all the same before it raised the failure of an earlier save.
    None for an error that is raised in another way. An error of another type has the attribute only if ``save()``
    raised it so: ``getattr(error, "ticket", None)``."""


class ConfigError(AioCkptError, ValueError):
    """A setting or an argument has the wrong type or is out of range; names it, its value and the allowed values."""


# -- the state that was given ---------------------------------------------------------------------


class EmptyStateError(AioCkptError, ValueError):
    """The state holds no leaf."""


class DuplicateNameError(AioCkptError, ValueError):
    """Two values of a state have one name, or two ranks give one to values of different kind, dtype or shape, or to
    different parameters."""


class UnsupportedLeafError(AioCkptError, TypeError):
    """A leaf, key or container that no checkpoint can hold (compressed sparse, quantized, nested, meta)."""


class UnsafeObjectError(AioCkptError, TypeError):
    """An object that only running code could read back, or that pickle cannot store; names the leaf and its type."""


class SourceChangedError(AioCkptError, RuntimeError):
    """Another thread freed or resized a tensor's memory, or changed a mapping, before the capture ended."""


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
    """There is no committed checkpoint, or not the one that the call names."""


class CheckpointExistsError(AioCkptError, FileExistsError, RuntimeError):
    """The directory holds a checkpoint, and nobody said that it may be replaced: by a copy, or by
    ``dcp.Writer(overwrite=False)``, where stock raises a RuntimeError.
    """


class CorruptCheckpointError(AioCkptError, ValueError):
    """Bytes on disk do not match their checksums or sizes; names the file and, if it is known, the tensor."""


class MismatchError(CorruptCheckpointError):
    """Proven damage: a checksum or a length differs from the written one, or a file that a manifest names is missing.

    Only this error lets a writer quarantine a checkpoint. After any other, another machine may read it.
    """


class FormatVersionError(AioCkptError, ValueError):
    """A newer aio_ckpt or torch wrote the checkpoint; names the part that is unknown. The checkpoint is not damaged."""


# -- the engine -----------------------------------------------------------------------------------


class EngineClosedError(AioCkptError, RuntimeError):
    """The engine was closed or terminated."""

    def __init__(self, text: str = "the engine was closed: open a new one") -> None:
        super().__init__(text)


class EngineForkedError(EngineClosedError):
    """The engine was opened by the parent process. A forked child has to open one of its own.

    A forked child of a process that has used object stores can use none: start it with ``spawn`` or ``forkserver``.
    """


class WrongThreadError(AioCkptError, RuntimeError):
    """A blocking wait was called on the engine's own thread, where it would never end."""


class ThreadDiedError(AioCkptError, RuntimeError):
    """A call in an I/O thread ended with ``SystemExit`` or the like, which is the cause. The engine goes on."""


class BusyError(AioCkptError, RuntimeError):
    """``max_in_flight`` saves are pending and ``when_busy="raise"``."""


class BudgetExceededError(AioCkptError, MemoryError):
    """Bytes that must be captured at once do not fit ``budget_bytes``."""


class PlanChangedError(AioCkptError, RuntimeError):
    """The written items are not the requested ones. Nothing was committed, and the plan cache was dropped."""


class SaveCancelledError(AioCkptError, RuntimeError):
    """The save was cancelled, and nothing became visible: by ``ticket.cancel()``, by ``terminate()``, or by Ctrl-C in
    its call. A load that was given up ends with it, too.
    """


class StallError(AioCkptError, TimeoutError):
    """No byte and no message of progress for ``stall_timeout_secs``, or the save's own deadline passed.

    ``result(timeout)`` raises it, too, once its own time is over; the work goes on then.
    """


class PeerFailedError(AioCkptError, RuntimeError):
    """Another rank failed; names its rank, the stage and the cause.

    ``cause`` is the type and the text of the error of ``rank``; empty if the rank did not tell one.
    """

    def __init__(self, message: str, *, rank: int, stage: str, cause: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.stage = stage
        self.cause = cause

    def __reduce__(self) -> tuple[object, ...]:
        make = functools.partial(type(self), rank=self.rank, stage=self.stage, cause=self.cause)
        return make, self.args, self.__dict__


class SystemLimitError(AioCkptError, OSError, RuntimeError):
    """The system gives this process no more threads, open files or memory to read; names how to raise the limit.

    ``errno`` is EAGAIN for threads, EMFILE or ENFILE for files, ENOMEM for memory.
    """


# -- input and output -----------------------------------------------------------------------------


class RootError(AioCkptError, OSError):
    """The checkpoint root cannot be used: a file, not writable, or locked by another writer."""


class WriteError(AioCkptError, OSError):
    """Writing failed. Keeps ``errno`` and ``filename`` of the cause, and ``strerror``, to which a save that found the
    disk full adds what it needs and what is free."""


class ReadError(AioCkptError, OSError):
    """Reading failed in the operating system. A mismatch of checksums is a :class:`CorruptCheckpointError`."""
