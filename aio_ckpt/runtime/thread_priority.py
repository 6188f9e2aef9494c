"""Priority of the engine's I/O threads: lower than the trainer's, for cores and for the disk.

Borrowed facts: Linux keeps niceness and I/O priority for each thread (setpriority(2), ioprio_set(2)). The I/O priority
counts only if the disk's scheduler uses it (BFQ; mq-deadline between classes). Without one, it follows the niceness.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform

_log = logging.getLogger("aio_ckpt")
_LIBC = ctypes.CDLL(None, use_errno=True)
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_WHO_PROCESS = 1
_CLASS_BEST_EFFORT = 2 << 13


def lower_priority(nice: int, ioprio: int | None) -> None:
    """Lower the niceness and the I/O priority of the calling thread. A refusal of the system is logged and ignored.

    Args:
        nice: the niceness. If the thread's own is higher, it stays.
        ioprio: the best-effort I/O priority, 0 to 7, 7 being the lowest; None: leave it.
    """
    try:
        # 0 is this thread. A higher niceness stays, because the user may have set it on purpose.
        if nice > os.getpriority(os.PRIO_PROCESS, 0):
            os.setpriority(os.PRIO_PROCESS, 0, nice)
    except OSError as error:
        _log.debug("niceness %d for an I/O thread: %s", nice, error)
    number = _IOPRIO_SET.get(platform.machine())
    if ioprio is None or number is None:
        return
    if _LIBC.syscall(number, _WHO_PROCESS, 0, _CLASS_BEST_EFFORT | ioprio):
        _log.debug("I/O priority %d for an I/O thread: %s", ioprio, os.strerror(ctypes.get_errno()))
