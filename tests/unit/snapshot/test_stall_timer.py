"""The stall timer of a save whose process was suspended."""

from __future__ import annotations

import time

from aio_ckpt.snapshot.stall_timer import StallTimer


async def test_suspended_time_is_forgiven_once_and_never_in_advance() -> None:
    timer = StallTimer()
    timer.last = time.monotonic() - 100
    timer.forgive(70)
    assert 29 < timer.idle_secs < 40
    timer.touch()  # the save moved as the process went on, before the late wait ended
    timer.forgive(70)
    assert timer.idle_secs >= 0
