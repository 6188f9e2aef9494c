"""O_DIRECT: whether a file takes it, found by a real aligned operation, and how much of one it takes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from aio_ckpt.format.constants import PAGE_BYTES

__all__ = ["NOT_SUPPORTED", "RWF_DONTCACHE", "PageCache", "Probe", "aligned_span", "probe_read", "probe_write"]
__all__ += ["refusal", "takes_direct"]

RWF_DONTCACHE = 0x80
"""Linux 6.14: through the page cache, dropped from it once written. Not in Python's ``os``."""

NOT_SUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
"""What file systems answer to an operation they lack."""

PageCache: TypeAlias = Literal["pass", "take", "fill"]
"""How a file that takes O_DIRECT is read: past the page cache; what is cached from there, and the rest past it; or all
through it, so that the disk is read once for several readers."""

Probe = Callable[[int, int], None]
"""``probe(descriptor, rwf_flags)`` raises OSError unless the file takes such an aligned operation."""


def probe_write(descriptor: int, rwf_flags: int) -> None:
    """Write one aligned page of zeros at offset 0: an O_DIRECT open that succeeds proves nothing."""
    with contextlib.closing(mmap.mmap(-1, PAGE_BYTES)) as page:
        if os.pwritev(descriptor, [page], 0, rwf_flags) != PAGE_BYTES:
            raise OSError(errno.EINVAL, "an aligned write fell short")


def probe_read(descriptor: int, rwf_flags: int) -> None:
    """Read one aligned page at offset 0."""
    with contextlib.closing(mmap.mmap(-1, PAGE_BYTES)) as page:
        os.preadv(descriptor, [page], 0, rwf_flags)


def takes_direct(path: Path, access: int, probe: Probe, *, is_required: bool) -> bool:
    """Whether ``probe`` passes on ``path``, opened with O_DIRECT and ``access`` (``os.O_RDONLY``, ``os.O_WRONLY``).

    Raises:
        OSError: what is no refusal of O_DIRECT; or, with ``is_required``, the refusal.
    """
    number = -1
    try:
        number = os.open(path, access | os.O_DIRECT | os.O_CLOEXEC)
        refused = refusal(probe, number, 0)
    except OSError as error:
        if number >= 0 or error.errno not in NOT_SUPPORTED:
            raise
        refused = error
    finally:
        if number >= 0:
            os.close(number)
    if refused is not None and is_required:
        raise OSError(refused.errno, f'{refused.strerror}; direct_io="on" refuses to fall back') from refused
    return refused is None


def refusal(probe: Probe, descriptor: int, rwf_flags: int) -> OSError | None:
    """What the file system answers to ``probe``, if that is that it cannot.

    Raises:
        OSError: another failure.
    """
    try:
        probe(descriptor, rwf_flags)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise  # no room, a broken disk: no other way of writing mends that
        return error
    return None


def aligned_span(view: memoryview, offset: int) -> int:
    """How many of the first bytes of ``view`` O_DIRECT takes in one call at ``offset`` of a file."""
    address = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    return 0 if (address | offset) % PAGE_BYTES else view.nbytes - view.nbytes % PAGE_BYTES
