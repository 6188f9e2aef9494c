"""Mounts: what kind of file system a path lies on, whether other hosts may use it, and how far its locks reach."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

_LOCAL_TYPES = frozenset({
    "apfs", "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ntfs3", "overlay",
    "ramfs", "reiserfs", "rootfs", "squashfs", "tmpfs", "ubifs", "vfat", "xfs", "zfs",
})  # fmt: skip
"""File systems that one host alone uses. Any other one may be shared."""
_LOCKS_ON_SERVER = {"nfs": "local_lock=none", "nfs4": "local_lock=none", "lustre": "flock", "ceph": "", "gpfs": ""}
"""By type, the option with which a lock excludes other hosts; empty if it always does. See nfs(5), mount.lustre(8)."""
_SHOWN_OPTIONS = (
    "vers=", "proto=", "hard", "soft", "softerr", "local_lock=", "nolock", "noac", "actimeo=", "lookupcache=", "flock",
    "localflock", "noflock", "ro",
)  # fmt: skip
"""Options, and beginnings of options, that change what the engine can rely on."""
_TESTED = frozenset({"nfs", "nfs4"})
"""Shared file systems on which ``tests/campaigns/hosts`` runs."""
_STORE = "object store"
_MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system."""

    kind: str
    """Type, as in ``/proc/filesystems``."""
    options: frozenset[str]
    """Options of the mount and of the file system."""

    @property
    def is_shared(self) -> bool:
        """Whether other hosts may use the file system."""
        return bool(self.kind) and self.kind not in _LOCAL_TYPES

    @property
    def is_store(self) -> bool:
        """Whether it is an object store. Its answers are never old, and it has no locks."""
        return self.kind == _STORE

    @property
    def locks_on_server(self) -> bool:
        """Whether a lock that is granted here excludes other hosts."""
        needed = _LOCKS_ON_SERVER.get(self.kind)
        return needed is not None and (not needed or needed in self.options)

    @property
    def is_soft(self) -> bool:
        """Whether a call fails, instead of waiting, while the server is away."""
        return bool({"soft", "softerr"} & self.options)

    @property
    def title(self) -> str:
        """Type and the options that matter, for messages."""
        if self.is_store:
            return "an object store"
        beginnings = tuple(name for name in _SHOWN_OPTIONS if name.endswith("="))
        shown = sorted(each for each in self.options if each in _SHOWN_OPTIONS or each.startswith(beginnings))
        return f"{self.kind or 'a file system of unknown type'}{f' ({chr(44).join(shown)})' if shown else ''}"

    @property
    def consequences(self) -> tuple[str, ...]:
        """What follows for checkpoints, one sentence each, as a clause without a full stop."""
        if self.is_store:
            return (
                "no locks: the claim excludes other writers, and if one dies, the next one goes on after 2 minutes",
            )
        if not self.is_shared:
            return ("a file system of this host: engines of other hosts do not see it",)
        found = [
            "locks reach the server: if a writer dies, one on another host goes on after 30 s; if its host is lost, "
            "once the server has dropped its lock, at the latest after stale_after_secs"
            if self.locks_on_server
            else "locks may stay on this host: the claim excludes writers on others, and if one dies, the next one "
            "waits for stale_after_secs"
        ]
        if self.is_soft:
            found.append("soft: writes fail while the server is away; mount it hard")
        if self.kind not in _TESTED:
            found.append("not tested: `aio-ckpt probe` tries what the engine depends on")
        return tuple(found)


OBJECT_STORE = Mount(_STORE, frozenset())
UNKNOWN = Mount("", frozenset())
"""A mount that the table does not show, as that of an overlay's layer. It counts as local."""


@functools.lru_cache(maxsize=64)
def mount_of(device: int) -> Mount:
    """Return the mount with this ``st_dev``."""
    try:
        table = _MOUNTINFO.read_text(errors="replace")
    except OSError:
        return UNKNOWN
    return find_mount(table, f"{os.major(device)}:{os.minor(device)}") or UNKNOWN


def find_mount(table: str, device: str) -> Mount | None:
    """Return the first mount of ``device`` ("major:minor") in ``table``; None if there is none.

    ``table`` is the text of ``/proc/self/mountinfo``, see proc_pid_mountinfo(5).
    """
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        fields, source = before.split(), after.split()
        if fields[2:3] == [device] and source:
            return Mount(source[0], frozenset(",".join([*fields[5:6], *source[2:3]]).split(",")))
    return None


def is_shared(device: int) -> bool:
    """Return whether other hosts may use the file system with this ``st_dev``."""
    return mount_of(device).is_shared


def mount_point(path: Path) -> Path:
    """Return the directory at which the file system of ``path``, which exists, is mounted."""
    path = path.absolute()
    while path != path.parent and path.stat().st_dev == path.parent.stat().st_dev:
        path = path.parent
    return path
