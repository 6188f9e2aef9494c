"""Memory that this process may still take, within the limit of each cgroup above it; and a rank's default budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_SELF = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """Names by which a version of cgroups tells its figures."""

    limits: tuple[str, ...]
    used: str
    """Charged bytes, page cache included."""
    reclaimable: str
    """Entry of ``memory.stat``: page cache that the kernel drops before it kills a process."""


_V2 = _Files(limits=("memory.max", "memory.high"), used="memory.current", reclaimable="inactive_file")
_V1 = _Files(limits=("memory.limit_in_bytes",), used="memory.usage_in_bytes", reclaimable="total_inactive_file")
_V1_ANCESTORS = "hierarchical_memory_limit"
"""Entry of ``memory.stat`` in v1: the least limit of the group and of its ancestors, which a container may not see."""
_MIN_BUDGET_BYTES = 16 << 20
"""Budget on a machine without free memory, because every save needs some."""


def default_budget_bytes(*, ranks_on_host: int, held_bytes: int = 0) -> int:
    """Return this rank's share of half of the available memory.

    It is half also in a cgroup: the trainer goes on to take memory there, and a cgroup's limit kills the process.

    The ``held_bytes`` that this rank already has for images count as available. Each other rank is taken to hold as
    many.
    """
    available = available_bytes() + held_bytes * ranks_on_host
    return max(available // 2 // ranks_on_host, _MIN_BUDGET_BYTES)


def available_bytes() -> int:
    """Return the bytes that this process may still take without swapping or being killed."""
    available: int = psutil.virtual_memory().available
    headroom = headroom_bytes(Path.read_text)
    return available if headroom is None else min(available, headroom)


def headroom_bytes(read: Callable[[Path], str]) -> int | None:
    """Return the least that a memory limit leaves, of the cgroup of this process and its ancestors; None: no limit.

    ``read`` returns the text of a file of the kernel and raises OSError if there is none.
    """
    headrooms = [_headroom(group, files, read) for group, files in _groups(read)]
    return min((headroom for headroom in headrooms if headroom is not None), default=None)


def _groups(read: Callable[[Path], str]) -> Iterator[tuple[Path, _Files]]:
    """Yield the directories of the process's memory cgroup and of its ancestors, up to the mount itself.

    In a container, the path in ``/proc/self/cgroup`` may be that of the host. Only the mount itself exists then, and it
    is the container's group.
    """
    for line in (_text(_SELF, read) or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            mount, files = _MOUNT, _V2
        elif "memory" in controllers.split(","):
            mount, files = _MOUNT / "memory", _V1
        else:
            continue
        group = mount / path.strip().lstrip("/")
        yield from ((place, files) for place in (group, *group.parents) if place.is_relative_to(mount))


def _headroom(group: Path, files: _Files, read: Callable[[Path], str]) -> int | None:
    used = _number(_text(group / files.used, read))
    if used is None:
        return None
    lines = (_text(group / "memory.stat", read) or "").splitlines()
    stat = dict(line.split(" ", 1) for line in lines if " " in line)
    texts = [*(_text(group / name, read) for name in files.limits), stat.get(_V1_ANCESTORS)]
    limits = [limit for limit in map(_number, texts) if limit is not None]
    reclaimable = _number(stat.get(files.reclaimable)) or 0
    return max(0, min(limits) - (used - reclaimable)) if limits else None


def _text(path: Path, read: Callable[[Path], str]) -> str | None:
    try:
        return read(path)
    except (OSError, ValueError):  # the kernel, or the container, does not show this file
        return None


def _number(text: str | None) -> int | None:
    """Return the number; None if there is none, as in ``max``, which means no limit."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None
