"""The process that strace disturbs: saves what it is told, one save a line, and says how each ended.

Its storage has a single thread, so that the n-th system call of a kind is the same call in every run.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
from concurrent.futures import wait
from pathlib import Path

from aio_ckpt import CheckpointEngine, EngineConfig
from aio_ckpt.commit.owner import pending_path
from aio_ckpt.errors import AioCkptError
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage
from tests.campaigns.faults.ground import WAIT_SECS, small_chunks, state_of

_PR_SET_PTRACER = 0x59616D61
_ANYBODY = ctypes.c_ulong(-1)


def main() -> None:
    """Orders on stdin: step, value, overwrite; answers on stdout."""
    logging.disable(logging.CRITICAL)
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _ANYBODY, 0, 0, 0)  # Yama: else only a parent may trace
    executor = Executor("faults", 1)
    config = EngineConfig(workers=2, on_failure="log", stall_timeout_secs=20)
    engine = CheckpointEngine(Path(sys.argv[1]), config, storage=Storage(executor))
    print(json.dumps({"pending": pending_path(engine.root, engine._ctx.owner, 0).name.removesuffix("-0")}), flush=True)
    with small_chunks():
        for line in sys.stdin:
            order = json.loads(line)
            print(json.dumps(_save(engine, **order)), flush=True)
    engine.close_blocking()
    executor.close(WAIT_SECS)


def _save(engine: CheckpointEngine, step: int, value: int, overwrite: bool) -> dict[str, object]:
    try:
        engine.save(state_of(value), step=step, overwrite=overwrite).result(WAIT_SECS)
        answer: dict[str, object] = {"error": ""}
    except (AioCkptError, OSError) as error:
        code = error.errno if isinstance(error, OSError) else None
        path = str(error.filename) if isinstance(error, OSError) else ""
        stage = error.stage if isinstance(error, AioCkptError) else ""
        in_doubt = isinstance(error, AioCkptError) and error.in_doubt
        answer = {"error": type(error).__name__, "code": code, "path": path, "stage": stage, "in_doubt": in_doubt}
    wait(engine._root_session.passes, WAIT_SECS)  # which remove what an overwrite could not
    files = [name for name in os.listdir("/proc/self/fd") if _is_file(name)]
    return {**answer, "files": len(files), "leases": engine.lifetime.leases}


def _is_file(number: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}").startswith("/") and int(number) > 2
    except FileNotFoundError:  # the one of the listing itself
        return False


if __name__ == "__main__":
    main()
