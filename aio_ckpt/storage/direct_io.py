"""O_DIRECT: whether a file takes it, and which part of a buffer it takes."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from aio_ckpt.format.constants import PAGE_BYTES
from aio_ckpt.storage.mounts import mount_point
from aio_ckpt.storage.os_errors import NOT_SUPPORTED

if TYPE_CHECKING:
    from aio_ckpt.config import DirectIO

_log = logging.getLogger("aio_ckpt")

_WARNERS: dict[Path, object] = {}
"""By mount, who has warned that it refuses O_DIRECT. The warning belongs to the machine, and not to an engine."""

RWF_DONTCACHE = 0x80
"""Flag of Linux 6.14: a write goes through the page cache and is dropped from it once written. ``os`` lacks it."""


REFUSALS = NOT_SUPPORTED | {errno.EFAULT}
"""Error numbers with which file systems refuse O_DIRECT, or RWF_DONTCACHE, for one operation."""

PageCache: TypeAlias = Literal["pass", "take", "fill"]
"""How a file that takes O_DIRECT is read.

- ``pass``: all bytes bypass the page cache.
- ``take``: cached bytes come from the page cache, and the others bypass it.
- ``fill``: all bytes go through the page cache, so that the disk is read once for several readers.
"""


def open_direct(path: Path, direct_io: DirectIO) -> int | None:
    """Open ``path``, which exists, for reading with O_DIRECT; None if ``direct_io`` or the file system is without.

    That it can be opened proves little: a file system may still refuse single operations, see :func:`check_fallback`.

    Raises:
        OSError: a failure other than a refusal of O_DIRECT; if ``direct_io="on"``, also the refusal.
    """
    return _unless_refused(direct_io, os.open, path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)


def create_direct(path: Path, direct_io: DirectIO) -> int | None:
    """Create ``path``, which must not exist, for writing with O_DIRECT. Otherwise as :func:`open_direct`."""
    return _unless_refused(direct_io, create_exclusively, path, os.O_DIRECT)


def create_exclusively(path: Path, flags: int) -> int:
    """Create ``path``, which must not exist, for writing, and return its descriptor. If that fails, leave no file."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o666)
    except OSError as error:
        if error.errno in NOT_SUPPORTED:  # open(2), BUGS: the file may have been created
            path.unlink(missing_ok=True)
        raise


def _unless_refused(direct_io: DirectIO, opening: Callable[[Path, int], int], path: Path, flags: int) -> int | None:
    if direct_io == "off":
        return None
    try:
        return opening(path, flags)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        _check_may_fall_back(direct_io, error)
        return None


def check_fallback(path: Path, direct_io: DirectIO, refused: OSError) -> None:
    """Raise OSError if ``direct_io="on"``; else log, once for each mount, that the page cache is used instead.

    Lustre refuses O_DIRECT from pinned memory with EFAULT or EINVAL, and some FUSE file systems refuse it once the file
    is open.

    ``refused`` is the error of an aligned operation on the file ``path``.
    """
    _check_may_fall_back(direct_io, refused)
    mount, warner = mount_point(path), object()
    if _WARNERS.setdefault(mount, warner) is warner:  # atomic: of several threads, the first one warns
        _log.warning(
            "%s: the file system there opens files with O_DIRECT and refuses to write or read with it (%s): the page "
            'cache is used instead, which is slower. direct_io="off" does so without a try. Logged once',
            mount,
            refused.strerror or "",
        )


def _check_may_fall_back(direct_io: DirectIO, refused: OSError) -> None:
    if direct_io == "on":
        raise OSError(refused.errno, f'{refused.strerror}; direct_io="on" refuses to fall back') from refused


def aligned_span(view: memoryview, offset: int) -> int:
    """Return the number of first bytes of ``view`` that O_DIRECT takes in one call at ``offset`` of a file."""
    import numpy as np  # here: files are listed and read without it, see aio_ckpt.cli

    address = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
    return 0 if (address | offset) % PAGE_BYTES else view.nbytes - view.nbytes % PAGE_BYTES
