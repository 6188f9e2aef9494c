"""File systems that a test may pull the power from: an image under a loop device, mounted where only we see it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "EXT4",
    "FILE_SYSTEMS",
    "FileSystem",
    "make",
    "mounted",
    "private_mounts",
    "run",
    "shut_down",
    "unmount_below",
    "why_no_disks",
]

_GOING_DOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: _IOR('X', 125, __u32)."""
_CLONE_NEWNS = 0x00020000
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSystem:
    """A kind of file system."""

    name: str
    """As ``mount`` calls it."""
    mkfs: tuple[str, ...]
    """Makes one; the image comes last."""
    nbytes: int
    """Of the image, which is sparse: the smallest that mkfs takes, or a little more."""


EXT4 = FileSystem(
    name="ext4", mkfs=("mkfs.ext4", "-q", "-F", "-b", "4096", "-J", "size=4", "-E", "nodiscard"), nbytes=32 << 20
)
XFS = FileSystem(name="xfs", mkfs=("mkfs.xfs", "-q", "-f", "-K"), nbytes=320 << 20)
FILE_SYSTEMS = (EXT4, XFS)


def why_no_disks(kind: FileSystem, folder: Path) -> str | None:
    """Why a file system cannot be made and mounted here; None if one was."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in (kind.mkfs[0], "losetup", "mount", "umount") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    image = folder / "probe.img"
    try:
        make(kind, image)
        with mounted(kind, image, folder / "probe"):
            pass
    except (OSError, subprocess.CalledProcessError) as error:
        text = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        return f"{kind.name} cannot be mounted from a file here: {text}"
    finally:
        image.unlink(missing_ok=True)
    return None


def private_mounts() -> None:
    """From here on this process and its children see mounts of their own: what they mount ends with the last of them,
    however it ends, and its loop devices with it.

    Raises:
        OSError: not permitted.
    """
    if _LIBC.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNS): " + os.strerror(ctypes.get_errno()))
    run("mount", "--make-rprivate", "/")


def make(kind: FileSystem, image: Path) -> None:
    """A new, empty file system in a new file (or in what stands at ``image`` for a disk)."""
    if not image.exists():
        with image.open("xb") as file:
            file.truncate(kind.nbytes)
    run(*kind.mkfs, str(image))


@contextmanager
def mounted(kind: FileSystem, image: Path, folder: Path) -> Iterator[Path]:
    """Mount an image; unmounting frees its loop device. Recovery runs here, if it is needed."""
    folder.mkdir(exist_ok=True)
    run("mount", "-t", kind.name, "-o", "loop", str(image), str(folder))
    try:
        yield folder
    finally:
        run("umount", str(folder))


def unmount_below(folder: Path) -> None:
    """What a process that was killed has left mounted."""
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in reversed(points):
        if Path(point).is_relative_to(folder):
            run("umount", "--lazy", point)


def shut_down(folder: Path, flags: int) -> None:
    """As a power cut is for what the file system has not handed down yet; only unmounting works from here on.

    Flags: 0 hands everything down first, 1 only the journal, 2 nothing.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _GOING_DOWN, struct.pack("I", flags))
    finally:
        os.close(descriptor)


def run(*command: str) -> None:
    """Run a tool.

    Raises:
        subprocess.CalledProcessError: with what it said.
    """
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
