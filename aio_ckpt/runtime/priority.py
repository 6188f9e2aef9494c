"""Priority of the engine's I/O threads: behind the trainer's where both want a core or the same disk.

Borrowed facts: Linux keeps niceness and I/O priority for each thread (setpriority(2), ioprio_set(2)); the latter counts
where the disk's scheduler looks at it (BFQ; mq-deadline between classes), and without one follows the niceness.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform

__all__ = ["lower_priority"]

_log = logging.getLogger("aio_ckpt")
_LIBC = ctypes.CDLL(None, use_errno=True)
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS = 1
_CLASS_BEST_EFFORT = 2 << 13


def lower_priority(nice: int, ioprio: int | None) -> None:
    """Give the calling thread niceness ``nice`` and the best-effort I/O priority ``ioprio`` (7: the last; None: as is).

    Where that is not permitted the thread stays as it is.
    """
    try:
        # 0 is this thread. Never up: the process may have been niced on purpose.
        if nice > os.getpriority(os.PRIO_PROCESS, 0):
            os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError as error:
        _log.debug("niceness %d for an I/O thread: %s", nice, error)
    number = _IOPRIO_SET.get(platform.machine())
    if ioprio is None or number is None:
        return
    if _LIBC.syscall(number, _WHO_PROCESS, 0, _CLASS_BEST_EFFORT | ioprio):
        _log.debug("I/O priority %d for an I/O thread: %s", ioprio, os.strerror(ctypes.get_errno()))
