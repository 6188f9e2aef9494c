"""O_DIRECT: whether a file takes it, which a real aligned operation proves, and which part of a buffer it takes."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

from aio_ckpt.format.constants import PAGE_BYTES

RWF_DONTCACHE = 0x80
"""Flag of Linux 6.14: a write goes through the page cache and is dropped from it once written. ``os`` lacks it."""

NOT_SUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
"""Error numbers with which file systems refuse an operation that they lack."""

PageCache: TypeAlias = Literal["pass", "take", "fill"]
"""How a file that takes O_DIRECT is read.

- ``pass``: all bytes bypass the page cache.
- ``take``: cached bytes come from the page cache, and the others bypass it.
- ``fill``: all bytes go through the page cache, so that the disk is read once for several readers.
"""

Probe = Callable[[int, int], None]
"""Function ``probe(descriptor, rwf_flags)`` that raises OSError if the file refuses an aligned operation."""


def probe_write(descriptor: int, rwf_flags: int) -> None:
    """Write one aligned page of zeros at offset 0. A successful open with O_DIRECT alone would prove nothing."""
    with contextlib.closing(mmap.mmap(-1, PAGE_BYTES)) as page:
        if os.pwritev(descriptor, [page], 0, rwf_flags) != PAGE_BYTES:
            raise OSError(errno.EINVAL, "an aligned write fell short")


def probe_read(descriptor: int, rwf_flags: int) -> None:
    """Read one aligned page at offset 0."""
    with contextlib.closing(mmap.mmap(-1, PAGE_BYTES)) as page:
        os.preadv(descriptor, [page], 0, rwf_flags)


def supports_direct_io(path: Path, access: int, probe: Probe, *, is_required: bool) -> bool:
    """Return whether ``probe`` succeeds on ``path``, opened with O_DIRECT and ``access``.

    ``access`` is ``os.O_RDONLY`` or ``os.O_WRONLY``.

    Raises:
        OSError: a failure other than a probe_refusal of O_DIRECT; if ``is_required``, also the probe_refusal.
    """
    number = -1
    try:
        number = os.open(path, access | os.O_DIRECT | os.O_CLOEXEC)
        refused = probe_refusal(probe, number, 0)
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


def probe_refusal(probe: Probe, descriptor: int, rwf_flags: int) -> OSError | None:
    """Return the error with which the file system refuses ``probe``, or None if it takes it.

    Raises:
        OSError: a failure that is no probe_refusal.
    """
    try:
        probe(descriptor, rwf_flags)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise  # a full or broken disk would fail in every mode
        return error
    return None


def aligned_span(view: memoryview, offset: int) -> int:
    """Return the number of first bytes of ``view`` that O_DIRECT takes in one call at ``offset`` of a file."""
    import numpy as np  # here: files are listed and read without it, see aio_ckpt.cli

    address = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    return 0 if (address | offset) % PAGE_BYTES else view.nbytes - view.nbytes % PAGE_BYTES
