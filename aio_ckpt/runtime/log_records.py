"""Log records of one step: each carries the step and the rank, so that a handler can filter by them."""

from __future__ import annotations

import contextlib
import logging

_log = logging.getLogger("aio_ckpt")
is_logged = _log.isEnabledFor
"""Return whether the logger ``aio_ckpt`` takes records of a level."""


def log_step(level: int, step: int | None, rank: int, message: str, *args: object) -> None:
    """Log ``message % args`` with ``level``. The attributes ``step`` and ``rank`` of the record hold the two numbers.

    A save by path has no step. Pass errors as text: a handler that keeps records would keep a traceback, and so the
    caller's state. A handler that raises breaks nothing.
    """
    with contextlib.suppress(Exception):
        _log.log(level, message, *args, extra={"step": step, "rank": rank}, stacklevel=2)
