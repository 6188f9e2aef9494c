"""Waits for what another thread or process does, and of which no event tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WAIT_SECS = 30.0


def until(holds: Callable[[], object]) -> None:
    """Look until ``holds()`` is true."""
    deadline = time.monotonic() + WAIT_SECS
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        threading.Event().wait(0.005)
