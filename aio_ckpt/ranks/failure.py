"""Failures that ranks tell each other, and how they are made of errors."""

from __future__ import annotations

import asyncio

import msgspec

from aio_ckpt.errors import PeerFailedError
from aio_ckpt.runtime.error_notes import named

WORK_STAGE = "write"
"""Stage of the failures of agreed work."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Failure of a rank, as it tells the others."""

    rank: int
    """The rank that failed first."""
    stage: str
    cause: str
    """Type and text of the error."""
    is_in_doubt: bool = False
    """Whether the checkpoint of a failed save may still become visible."""

    def error(self, where: str, rank: int) -> PeerFailedError:
        """Return the failure as an error that ``rank`` raises. ``where``: the text of the topic."""
        whom = "this rank" if self.rank == rank else f"rank {self.rank}"
        text = f"{whom} failed in {where}: {self.cause}"
        error = PeerFailedError(text, rank=self.rank, stage=self.stage, cause=self.cause)
        error.in_doubt = self.is_in_doubt
        return error


def failure_of(rank: int, stage: str, error: BaseException) -> Failure:
    """Return the failure that ``error`` is. If the error names a rank and a stage itself, the failure names those."""
    is_in_doubt = bool(getattr(error, "in_doubt", False))
    if isinstance(error, PeerFailedError):  # the first rank that failed is named
        return Failure(error.rank, error.stage, error.cause or str(error), is_in_doubt)
    stage = getattr(error, "stage", "") or stage
    # The text of a cancellation by anyio is the address of a scope, which says nothing.
    text = "the call was cancelled" if isinstance(error, asyncio.CancelledError) else str(error)
    return Failure(rank, stage, f"{type(error).__name__}: {text}", is_in_doubt)


def work_failure(error: BaseException, rank: int) -> Failure:
    """Return the failure of work of ``rank`` that ended with ``error``."""
    return Failure(rank, WORK_STAGE, named(error))
