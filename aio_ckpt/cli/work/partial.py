"""Tensors that a conversion has read, kept beside its result until that is there.

If the process is killed, the same command takes them from there, so that a large checkpoint is not read twice.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from isal import isal_zlib

from aio_ckpt.errors import ConfigError, WriteError
from aio_ckpt.format.constants import RAW_ALIGN_BYTES, align_up
from aio_ckpt.reports import amount
from aio_ckpt.storage.lock import RootLock
from aio_ckpt.storage.paths import LINKED, open_without_links

_LOCK, _TENSORS, _JOURNAL = ".lock", "tensors", "journal"
_SUM_CHARS = 9
"""Length of the checksum that a line of the journal begins with."""


def partial_path(out: Path) -> Path:
    """Return the directory that holds what a conversion to ``out`` has read."""
    return out.with_name(f"{out.name}.partial")


def remove_emptied(out: Path) -> None:
    """Remove the directory of an ended conversion to ``out``, if it is still there and empty.

    On NFS and on some file systems of FUSE, a removed file keeps an entry there as long as a tensor is mapped from it.
    """
    path = partial_path(out)
    if path.is_dir():
        gc.collect()
        with contextlib.suppress(OSError):  # not empty: it is of another conversion, or somebody put a file there
            path.rmdir()


class PartialTensors:
    """The directory ``OUT.partial``: a mapped file of tensors, and a journal with a line for each group in it.

    A group is a number of tensors that are read together, in a place of the file that the sizes of all groups tell.
    Its line holds the checksum of its bytes. If they do not match it, as after a power loss, the group is read again.
    So it is if the line itself does not match the checksum that it begins with.
    Invariant: one process holds the directory, from construction to the end of the block.
    """

    def __init__(self, out: Path) -> None:
        """Take the directory.

        Raises:
            ConfigError: something else has the name of the directory, or a symbolic link lies there.
            RootError: another process converts to ``out``, or the directory cannot be made.
        """
        self.path = partial_path(out)
        _check_ours(self.path)
        self._lock = RootLock(self.path / _LOCK)
        self._memory: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._starts: list[int] = []
        self._kept: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the directory. It stays if Ctrl-C ended the block, as it does if the process is killed."""
        if kind is not None and not issubclass(kind, Exception):
            self._lock.release()
            return
        for name in (_JOURNAL, _TENSORS):
            (self.path / name).unlink(missing_ok=True)
        self._lock.discard()
        with contextlib.suppress(OSError):  # somebody put a file there, or see remove_emptied
            self.path.rmdir()

    def open(self, source: str, sizes: list[int]) -> None:
        """Map the file for groups of ``sizes`` bytes. What is there counts if it was read from the same ``source``.

        Raises:
            WriteError: the disk has no room.
        """
        self._starts = list(itertools.accumulate(sizes, initial=0))
        total = self._starts[-1]
        header, *lines = self._journal()
        is_same = header == {"source": source, "sizes": sizes}
        self._kept = {line["group"]: line for line in lines} if is_same else {}
        if not is_same:  # the file is not cut: tensors of a source that was deleted meanwhile may be mapped from it
            for name in (_JOURNAL, _TENSORS):
                (self.path / name).unlink(missing_ok=True)
        if not total:
            return
        with open(open_without_links(self.path / _TENSORS, os.O_RDWR | os.O_CREAT), "r+b") as file:
            self._reserve(file.fileno(), total)
            self._memory = mmap.mmap(file.fileno(), total)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        if not is_same:
            self._append({"source": source, "sizes": sizes})

    def kept(self, group: int) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a group by name; None if it must be read."""
        line = self._kept.get(group)
        if line is None or line["crc32"] != self._crc32(group):
            return None
        tensors = [(names, self._tensor(**stored)) for stored, names in line["tensors"]]  # tied names share one
        return {name: tensor for names, tensor in tensors for name in names}

    def memory(self, group: int) -> Callable[[int], torch.Tensor]:
        """Return the function that gives the memory of the tensors of a group, one behind the other."""
        at = self._starts[group]

        def take(nbytes: int) -> torch.Tensor:
            nonlocal at
            start, at = at, at + align_up(nbytes, RAW_ALIGN_BYTES)
            assert at <= self._starts[group + 1], "a group needs the bytes that its size tells"
            return self._take(start, nbytes)

        return take

    def keep(self, group: int, values: Mapping[str, object]) -> None:
        """Note that a group was read and verified. Tensors elsewhere, as empty ones, are not kept."""
        base = self._bytes.data_ptr()
        stored: dict[int, tuple[dict[str, Any], list[str]]] = {}
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and 0 <= (at := value.data_ptr() - base) < len(self._bytes):
                dtype = str(value.dtype).removeprefix("torch.")
                tensor = {"at": at, "dtype": dtype, "shape": list(value.shape), "stride": list(value.stride())}
                stored.setdefault(at, (tensor, []))[1].append(name)
        self._append({"group": group, "crc32": self._crc32(group), "tensors": list(stored.values())})

    def _tensor(self, *, at: int, dtype: str, shape: list[int], stride: list[int]) -> torch.Tensor:
        kind = getattr(torch, dtype)
        nbytes = kind.itemsize * torch.Size(shape).numel()
        return torch.as_strided(self._take(at, nbytes).view(kind), shape, stride)

    def _take(self, start: int, nbytes: int) -> torch.Tensor:
        """Return bytes of the file as a tensor with a storage of its own."""
        return torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=nbytes)

    def _crc32(self, group: int) -> int:
        start, end = self._starts[group : group + 2]
        return isal_zlib.crc32(memoryview(self._memory or b"")[start:end])

    def _journal(self) -> list[Any]:
        """Return the lines of the journal, less those that a kill cut off; None stands for a missing first one."""
        lines: list[Any] = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.path / _JOURNAL).read_bytes().split(b"\n"):
                text = line[_SUM_CHARS:]
                if line and line[:_SUM_CHARS] == _sum(text):
                    lines.append(json.loads(text))
        return lines or [None]

    def _append(self, line: object) -> None:
        text = json.dumps(line).encode()
        with open(self.path / _JOURNAL, "ab", opener=open_without_links) as file:
            file.write(b"\n" + _sum(text) + text)  # ahead of it may stand a line that was cut off

    def _reserve(self, descriptor: int, nbytes: int) -> None:
        try:
            os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            message = (
                f"{error.strerror}: a conversion needs room for its tensors, {amount(nbytes)}, and as much for its "
                "result: free space, or give a place on another disk"
            )
            raise WriteError(error.errno, message, str(self.path)) from error


def _sum(text: bytes) -> bytes:
    return b"%08x " % isal_zlib.crc32(text)


def _check_ours(path: Path) -> None:
    if not os.path.lexists(path):
        return
    names = set(os.listdir(path)) if path.is_dir() else {path.name}
    for place in (path, *(path / name for name in names)):
        if place.is_symlink():
            raise ConfigError(f"{place}: {LINKED}")
    if foreign := sorted(names - {_LOCK, _TENSORS, _JOURNAL}):
        raise ConfigError(f"{path}: holds {foreign[0]!r}, and a conversion keeps its tensors there: rename it")
