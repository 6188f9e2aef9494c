"""A process that holds a lock file."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from warm_python import WarmPython

HOLDER = """
    import sys
    from pathlib import Path
    from aio_ckpt.storage.root_lock import RootLock

    with RootLock(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()
"""


@contextlib.contextmanager
def locked_by_another_process(path: Path) -> Iterator[int]:
    """The pid of a process that holds the lock at ``path`` until the block ends."""
    with WarmPython(HOLDER, str(path), options=(), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield holder.pid
        finally:
            holder.kill()
            holder.wait(20.0)
