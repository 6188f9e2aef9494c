"""Named segments: shared memory that outlives the process, one image each.

A segment is a file on a memory file system: a header page, the image from ``IMAGE_OFFSET`` on, and the snapshot record.
The header's generation counter is odd while the segment is invalid (being filled, or free) and even while it holds a
complete snapshot (a seqlock). After a kill, the file holds the stores of the process up to one point, in their order.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.errors import BudgetExceededError, ConfigError
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.constants import PAGE_BYTES

SEGMENT_PREFIX = "aio_ckpt-"
IMAGE_OFFSET = 2 << 20
"""A huge page, so that the image is aligned to them; the rest of it is a hole."""
MAX_RECORD_BYTES = 1 << 32

_MAGIC = int.from_bytes(b"aiosegm1", "little")
_MAGIC_BYTES = 8
_HEADER = struct.Struct("<5Q")
"""Magic, generation, bytes of the image's memory, bytes of the snapshot record, CRC32 of the snapshot record."""
_GENERATION, _RECORD_BYTES, _RECORD_CRC32 = 1, 3, 4


class SharedSegment:
    """Named segment of this process.

    Invariant: from :meth:`mark_valid` until :meth:`mark_invalid`, the bytes of the image do not change.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        """Make the file and reserve all its memory. Without that, a touch of a page that the system lacks is a SIGBUS.

        Raises:
            OSError: the file exists, or there is no room; no file is left.
        """
        self.path = path
        self.capacity = capacity
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            os.posix_fallocate(descriptor, IMAGE_OFFSET, capacity)
            self.memory = mmap.mmap(descriptor, capacity, flags=mmap.MAP_SHARED, offset=IMAGE_OFFSET)
            """Memory of the image."""
            header = mmap.mmap(descriptor, PAGE_BYTES, flags=mmap.MAP_SHARED)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)  # if it stayed open, a forked data loader would keep the memory
        header.madvise(mmap.MADV_DONTFORK)
        self._header = memoryview(header).cast("Q")
        self._header[:] = memoryview(_HEADER.pack(_MAGIC, 1, capacity, 0, 0).ljust(PAGE_BYTES, b"\0")).cast("Q")

    @property
    def next_generation(self) -> int:
        """Generation that the next :meth:`mark_valid` sets."""
        return self._header[_GENERATION] + 1

    @property
    def is_valid(self) -> bool:
        """Whether the segment holds a complete snapshot."""
        return self._header[_GENERATION] % 2 == 0

    def mark_valid(self, record: bytes) -> None:
        """Store the snapshot record after the complete image, and make the generation even.

        Raises:
            OSError: there is no room for the record; the segment stays invalid.
        """
        descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            offset = IMAGE_OFFSET + self.capacity
            os.posix_fallocate(descriptor, offset, len(record))
            rest = memoryview(record)
            while rest:
                written = os.pwrite(descriptor, rest, offset)
                rest, offset = rest[written:], offset + written
        finally:
            os.close(descriptor)
        self._header[_RECORD_BYTES] = len(record)
        self._header[_RECORD_CRC32] = crc32_of(record)
        self._header[_GENERATION] += 1

    def mark_invalid(self) -> None:
        """Make the generation odd: the image may be filled anew. Idempotent."""
        if self.is_valid:
            self._header[_GENERATION] += 1

    def remove(self) -> None:
        """Remove the file; its memory is freed with the last view of it. Idempotent."""
        self.mark_invalid()
        self.path.unlink(missing_ok=True)


class SegmentDirectory:
    """Directory where one engine makes its segments. :meth:`close` removes every segment that still exists."""

    def __init__(self, path: Path, prefix: str, *, make_room: Callable[[], bool]) -> None:
        """Check the directory. ``make_room()`` frees memory for a segment that finds no room. It returns False if none.

        Raises:
            ConfigError: ``path`` is no writable directory of a memory file system.
        """
        _check_directory(path)
        self.path = path
        self._prefix = prefix
        self._pid = os.getpid()
        self._number = 0
        self._make_room = make_room
        self._made: list[Path] = []

    def make(self, capacity: int) -> SharedSegment:
        """Make a segment with an image of ``capacity`` bytes.

        Raises:
            BudgetExceededError: there is no room for the segment.
        """
        self._number += 1
        path = self.path / f"{self._prefix}-{self._number}"
        self._made.append(path)  # before the file exists, so that Ctrl-C cannot lose it
        try:
            try:
                return SharedSegment(path, capacity)
            except OSError as error:
                if error.errno != errno.ENOSPC or not self._make_room():
                    raise
                return SharedSegment(path, capacity)
        except OSError as error:
            raise BudgetExceededError(
                f"shm_path={str(self.path)!r}: no {capacity} bytes of shared memory ({error.strerror}); lower "
                "budget_bytes, enlarge it, or leave shm_path away"
            ) from error

    def close(self) -> None:
        """Remove the files of all segments, unless this process is a fork: its parent owns them. Idempotent."""
        while self._made and os.getpid() == self._pid:
            self._made.pop().unlink(missing_ok=True)


def _check_directory(path: Path) -> None:
    """Raise ConfigError unless ``path`` is a writable directory of a memory file system."""
    if not path.is_dir():
        raise ConfigError(f"shm_path={str(path)!r}: no such directory; give one of a tmpfs, such as /dev/shm")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"shm_path={str(path)!r}: not writable; give a directory that is")
    kind = _file_system(path)
    if kind not in ("tmpfs", None):
        raise ConfigError(f"shm_path={str(path)!r}: {kind}, whose pages go to a disk; give a directory of a tmpfs")


def _file_system(path: Path) -> str | None:
    """Return the type of the file system; None if ``/proc`` does not tell it."""
    number = os.stat(path).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields, _, rest = line.partition(" - ")
            if fields.split()[2] == wanted:
                return rest.split()[0]
    return None


# -- segments of other processes -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSegment:
    """The content of a segment file."""

    path: Path
    generation: int = 0
    """Even if the segment is valid."""
    capacity: int = 0
    """Bytes of the image's memory."""
    record: bytes = b""
    """Encoded snapshot record; empty if there is none."""
    modified_unix: float | None = None
    """Modification time of the file, by the file system's clock; None if it cannot be read."""
    fault: str = ""
    """Why there is no record; empty if there is one."""
    is_damaged: bool = False
    """True if the file is no segment, or its record fails its checksum; False if it was never marked valid."""


def own_segments(directory: Path, prefix: str) -> list[Path]:
    """Return the segments whose names begin with ``prefix`` and that this user owns: others may write there, too."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            if entry.name.startswith(prefix) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        found.append(Path(entry.path))
    return sorted(found)


def read_segment(path: Path) -> StoredSegment:
    """Read a segment and check its snapshot record against the header. A fault is returned, and never raised."""

    modified_unix: float | None = None

    def faulty(fault: str, *, is_damaged: bool) -> StoredSegment:
        return StoredSegment(path=path, modified_unix=modified_unix, fault=fault, is_damaged=is_damaged)

    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return faulty(f"cannot be opened: {error.strerror}", is_damaged=True)
    try:
        status, data = os.fstat(descriptor), os.pread(descriptor, _HEADER.size, 0)
        modified_unix = status.st_mtime
        is_regular = stat.S_ISREG(status.st_mode)
        if is_regular and not any(data[:_MAGIC_BYTES]):
            # New memory is zero, or the file is still empty: the process was killed before it wrote the header.
            return faulty("never filled", is_damaged=False)
        if not is_regular or len(data) < _HEADER.size:
            return faulty("cut short", is_damaged=True)
        magic, generation, capacity, record_bytes, crc32 = _HEADER.unpack(data)
        if magic != _MAGIC:
            return faulty("no segment", is_damaged=True)
        if generation % 2 or not record_bytes:
            return faulty(
                "no snapshot record: its memory was free, or its writer died before the snapshot was whole",
                is_damaged=False,
            )
        end = IMAGE_OFFSET + capacity + record_bytes
        if record_bytes > MAX_RECORD_BYTES or end > status.st_size:
            return faulty("its header does not fit its length", is_damaged=True)
        record = _read(descriptor, record_bytes, IMAGE_OFFSET + capacity)
    except OSError as error:
        return faulty(f"cannot be read: {error.strerror}", is_damaged=True)
    finally:
        os.close(descriptor)
    if crc32_of(record) != crc32:
        return faulty("torn: its snapshot record does not match its sum", is_damaged=True)
    return StoredSegment(
        path=path, generation=generation, capacity=capacity, record=record, modified_unix=modified_unix
    )


def _read(descriptor: int, nbytes: int, offset: int) -> bytes:
    parts = []
    while nbytes and (part := os.pread(descriptor, nbytes, offset)):
        parts.append(part)
        nbytes, offset = nbytes - len(part), offset + len(part)
    return b"".join(parts)


def map_image(stored: StoredSegment) -> mmap.mmap:
    """Map the image of a segment. The mapping is shared, so a write into it changes the segment.

    Raises:
        OSError: the segment does not exist any more.
    """
    descriptor = os.open(stored.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, stored.capacity, flags=mmap.MAP_SHARED, offset=IMAGE_OFFSET)
    finally:
        os.close(descriptor)
