"""Limits of the operating system on threads and open files, as errors name them."""

from __future__ import annotations

import errno
import os
import resource

from aio_ckpt.errors import SystemLimitError


def files_limit() -> int:
    """Return how many files this process may have open at once."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def files_remedy() -> str:
    """Return the limit on open files and how to raise it."""
    return f"this process may have {files_limit()} files open, sockets and pipes included: raise the limit (ulimit -n)"


def threads_remedy() -> str:
    """Return the limit on threads and how to raise it."""
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    processes = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    memory = resource.getrlimit(resource.RLIMIT_AS)[0]
    stacks = "" if memory == resource.RLIM_INFINITY else f", or on memory (ulimit -v, here {memory // 1024})"
    return (
        f"raise the limit on processes (ulimit -u, here {processes}) or on those of the container (pids.max of its "
        f"cgroup){stacks}, or let the process start fewer threads, such as those of data loaders"
    )


def thread_refusal(name: str, cause: RuntimeError) -> SystemLimitError:
    """Return the error for a thread of ``name`` that the system refused."""
    return SystemLimitError(errno.EAGAIN, f"the system refuses a thread ({cause}): {threads_remedy()}", name)


def opening_refusal(name: str, cause: OSError) -> OSError:
    """Return the error for a ``cause`` that kept the threads of ``name`` from opening their pipes."""
    if cause.errno not in (errno.EMFILE, errno.ENFILE):
        return cause
    return SystemLimitError(cause.errno, f"{cause.strerror or os.strerror(cause.errno)}: {files_remedy()}", name)
