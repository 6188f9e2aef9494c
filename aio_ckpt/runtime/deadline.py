"""The deadline of one save."""

from __future__ import annotations

import time
from dataclasses import dataclass

from aio_ckpt.argument_checks import check_seconds
from aio_ckpt.errors import StallError
from aio_ckpt.reports import title


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Time limit of one save, counted from the call of ``save()`` to the commit."""

    secs: float | None
    """Limit in seconds; None: no limit."""
    began: float
    """``time.monotonic`` at the call."""

    @classmethod
    def after(cls, secs: float | None) -> Deadline:
        """Return a deadline ``secs`` from now. Raises ConfigError if ``secs`` is no number above 0."""
        if secs is not None:
            check_seconds("deadline_secs", secs)
        return cls(secs=secs, began=time.monotonic())

    def left_secs(self, at_most: float) -> float:
        """Return the seconds until the deadline, at least 0 and at most ``at_most``."""
        if self.secs is None:
            return at_most
        return min(at_most, max(0.0, self.began + self.secs - time.monotonic()))

    def check(self, target: object, stage: str) -> None:
        """Raise StallError, which names ``stage``, if the deadline has passed. ``target`` is None if it is unknown."""
        if self.secs is not None and not self.left_secs(1.0):
            raise StallError(
                f"the save of {title(target)} did not end within deadline_secs={self.secs}: it was {stage}"
            )


NO_DEADLINE = Deadline(secs=None, began=0.0)
"""Deadline that never passes."""
