"""Exit status of a process whose last save failed and was reported to nobody."""

from __future__ import annotations

import ctypes

_FAILED = 1


def fail_at_exit() -> None:
    """Let this process end with status 1, after everything that Python does at exit.

    Python offers no way to change the status that late: an error of an ``atexit`` function is printed, and the status
    stays. So the C library is told to end the process when it begins its own work at exit. Functions that C code had
    registered there before do not run.
    """
    libc = ctypes.CDLL(None)
    end = ctypes.cast(libc._exit, ctypes.c_void_p)
    libc.__cxa_atexit(end, ctypes.c_void_p(_FAILED), None)
