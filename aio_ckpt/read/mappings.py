"""Mappings: which memory of this process may be mapped a second time, here or in another process."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aio_ckpt.format.manifests import IntArray

__all__ = ["are_private", "shared_mappings"]

_MAPS = Path("/proc/self/maps")
_SHARED = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...s ", re.MULTILINE)
_END = 1 << 62
"""Behind all memory of a process."""


def shared_mappings() -> IntArray:
    """Rows (start, stop), ascending, of the memory that was mapped with MAP_SHARED; all of it if nobody can tell."""
    try:
        found = _SHARED.findall(_MAPS.read_bytes())
    except OSError:
        return np.array([[0, _END]], np.int64)
    return np.array([[int(bound, 16) for bound in bounds] for bounds in found], np.int64).reshape(-1, 2)


def are_private(addresses: IntArray, nbytes: IntArray, shared: IntArray) -> npt.NDArray[np.bool_]:
    """For ranges of memory, which of them have no byte in one of ``shared``."""
    behind = np.searchsorted(shared[:, 1], addresses, side="right")  # the first that ends behind its beginning
    return np.asarray(np.append(shared[:, 0], _END)[behind] >= addresses + nbytes, np.bool_)
