"""A disk that records: one file served through FUSE, for a loop device to stand on. Every write and flush is logged.

The kernel's protocol is spoken by hand: libfuse is rarely installed where this runs, and a disk needs ten requests.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tests.campaigns.crash.block_log import FLUSH, MARK, WRITE, pack
from tests.campaigns.crash.disks import run
from tests.campaigns.crash.forks import Tell, fork

__all__ = ["DISK", "MARKS", "recording_disk", "why_no_fuse"]

DISK, MARKS = "disk", "marks"
"""The files: the disk, and one where each write is a remark for the log."""
_ROOT_NODE, _DISK_NODE, _MARKS_NODE = 1, 2, 3
_NODES = {DISK.encode(): _DISK_NODE, MARKS.encode(): _MARKS_NODE}
_MAX_WRITE = 128 << 10
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_DIRECT_IO = 1
_VALID_SECS = 3600
_MS_NOSUID_NODEV = 2 | 4
_LIBC = ctypes.CDLL(None, use_errno=True)

_LOOKUP, _FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _STATFS = 1, 2, 3, 4, 14, 15, 16, 17
_RELEASE, _FSYNC, _FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR = 18, 20, 25, 26, 27, 28, 29
_INTERRUPT, _DESTROY, _BATCH_FORGET = 36, 38, 42


class _Server:
    """Answers requests one after another. Owns the disk's bytes and the log until the file system is unmounted."""

    def __init__(self, device: int, nbytes: int, log: BinaryIO) -> None:
        self._device = device
        self._disk = bytearray(nbytes)
        self._log = log
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            _INIT: lambda _, body: self._init(),
            _LOOKUP: lambda _, body: self._lookup(body),
            _GETATTR: lambda node, _: struct.pack("<QII", _VALID_SECS, 0, 0) + self._attributes(node),
            _SETATTR: lambda node, _: struct.pack("<QII", _VALID_SECS, 0, 0) + self._attributes(node),
            _OPEN: lambda node, _: struct.pack("<QII", node, _DIRECT_IO, 0),
            _OPENDIR: lambda node, _: struct.pack("<QII", node, 0, 0),
            _READ: lambda _, body: self._read(body),
            _WRITE: self._write,
            _FSYNC: lambda node, _: self._flush(node),
            _STATFS: lambda _, body: bytes(80),
            **dict.fromkeys((_RELEASE, _FLUSH, _READDIR, _RELEASEDIR), lambda _, body: b""),
        }

    def serve(self) -> None:
        """Until the file system is unmounted."""
        while True:
            try:
                request = os.read(self._device, _MAX_WRITE + (64 << 10))
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):  # ENOENT: the request was interrupted meanwhile
                    continue
                raise
            _, code, unique, node = struct.unpack_from("<IIQQ", request)
            if code in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                continue
            try:
                answer, failed = self._answers[code](node, request[40:]), 0
            except KeyError:  # the kernel does without, or falls back
                answer, failed = b"", -errno.ENOSYS
            except FileNotFoundError:
                answer, failed = b"", -errno.ENOENT
            os.write(self._device, struct.pack("<IiQ", 16 + len(answer), failed, unique) + answer)
            if code == _DESTROY:
                return

    def _init(self) -> bytes:
        flags = _BIG_WRITES | _MAX_PAGES  # no write-back cache: a write is here before the loop device says so
        head = struct.pack("<IIIIHHIIHH", 7, 31, 128 << 10, flags, 16, 12, _MAX_WRITE, 1, _MAX_WRITE >> 12, 0)
        return head.ljust(64, b"\0")

    def _lookup(self, body: bytes) -> bytes:
        node = _NODES.get(body.rstrip(b"\0"))
        if node is None:
            raise FileNotFoundError
        return struct.pack("<QQQQII", node, 0, _VALID_SECS, _VALID_SECS, 0, 0) + self._attributes(node)

    def _attributes(self, node: int) -> bytes:
        mode = stat.S_IFDIR | 0o700 if node == _ROOT_NODE else stat.S_IFREG | 0o600
        nbytes = len(self._disk) if node == _DISK_NODE else 0
        return struct.pack("<QQQQQQIIIIIIIIII", node, nbytes, nbytes >> 9, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def _read(self, body: bytes) -> bytes:
        _, offset, nbytes = struct.unpack_from("<QQI", body)
        return bytes(self._disk[offset : offset + nbytes])

    def _write(self, node: int, body: bytes) -> bytes:
        _, offset, nbytes = struct.unpack_from("<QQI", body)
        data = body[40 : 40 + nbytes]
        if node == _MARKS_NODE:
            self._log.write(pack(MARK, 0, data))
        else:
            self._disk[offset : offset + nbytes] = data
            self._log.write(pack(WRITE, offset, data))
        return struct.pack("<II", nbytes, 0)

    def _flush(self, node: int) -> bytes:
        if node == _DISK_NODE:
            self._log.write(pack(FLUSH, 0, b""))
        return b""


def why_no_fuse(folder: Path) -> str | None:
    """Why a recording disk cannot be had here; None if one was."""
    try:
        with recording_disk(folder / "probe-disk", 1 << 20, folder / "probe.log") as disk:
            disk.joinpath(DISK).stat()
    except OSError as error:
        return f"FUSE cannot be mounted here: {error}"
    finally:
        (folder / "probe.log").unlink(missing_ok=True)
    return None


@contextmanager
def recording_disk(folder: Path, nbytes: int, log: Path) -> Iterator[Path]:
    """A folder with the files ``DISK`` (``nbytes`` of zeros) and ``MARKS``; the log is whole when this ends.

    Raises:
        OSError: there is no /dev/fuse, or it may not be used.
    """
    folder.mkdir(exist_ok=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if _LIBC.mount(b"aio_ckpt-disk", os.fsencode(folder), b"fuse", _MS_NOSUID_NODEV, options):
        os.close(device)
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))

    def serve(_: Tell) -> None:
        with log.open("wb") as file:
            _Server(device, nbytes, file).serve()

    try:
        child = fork(serve)
        os.close(device)  # the server's alone: should it die, the kernel fails what is asked of it instead of waiting
        try:
            yield folder
        finally:
            run("umount", str(folder))
            if child.wait() != 0:
                raise OSError(f"the recording disk failed: {child.lines[-1:]}")
    finally:
        if os.path.ismount(folder):
            run("umount", "--lazy", str(folder))
