"""A storage over the local file system that counts its calls and lets one of them fail."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from aio_ckpt.errors import ReadError, RootError, WriteError
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.root_lock import RootLock
from tests.support import forwarding_storage as forwarding
from tests.support.forwarding_storage import ForwardingStorage

__all__ = ["CALLS", "ERRORS", "SYNCS", "Call", "Fault", "FaultStorage"]

T = TypeVar("T")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR)
"""What a disk answers when it is full, broken, used up, or disturbed."""
READS = frozenset({"open_data_file", "read_file", "list_dir", "exists", "status", "read_into", "close_read"})
CALLS = READS | {"lock", "create_data_file", "write", "sync", "close", "write_file", "make_dir", "sync_dir"}
CALLS |= {"make_dirs", "rename", "exchange", "replace", "remove_file", "remove_tree", "touch"}
"""Every call."""
SYNCS = frozenset({"sync", "sync_dir", "write_file"})
"""Calls that end with an fsync."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the storage or of one of its files."""

    name: str
    """Of the method; ``close_read`` is the end of a file that was read."""
    path: Path
    """What its error names."""
    source: Path | None = None
    """What is renamed or exchanged."""

    @classmethod
    def of(cls, call: forwarding.Call) -> Call:
        """The error of a rename or an exchange names the second path."""
        return cls(call.name, call.path) if call.other is None else cls(call.name, call.other, call.path)

    def error(self, code: int) -> OSError:
        """What the local storage raises when the system answers ``code``."""
        kind: type[ReadError | WriteError | RootError]
        kind = RootError if self.name == "lock" else ReadError if self.name in READS else WriteError
        failure = kind(code, os.strerror(code), str(self.path))
        failure.__cause__ = OSError(code, os.strerror(code), str(self.path))
        return failure

    def __str__(self) -> str:
        return f"{self.name}({self.path.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to the call that it is armed for."""

    name: str
    """Of the class in the report."""
    code: int = 0
    """errno of the error that is raised; 0: none."""
    counts: frozenset[str] | None = None
    """Calls that are counted; None: all."""
    is_late: bool = False
    """The call does its work, then it fails."""
    is_lasting: bool = False
    """Every later call fails as well."""
    is_slow: bool = False
    """The call does not end until it is given up."""


class FaultStorage(ForwardingStorage):
    """Counts and logs every call; lets the n-th fail."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._fault: Fault | None = None
        self._left = 0
        self._on_hit: Callable[[], object] = _nothing
        self.hit: Call | None = None
        """The call that failed."""
        self.struck: list[Call] = []
        """All that failed: more than one where a fault lasts."""
        self.done_at_hit = 0
        """How many of ``done`` had ended by then."""
        self.begun: list[Call] = []
        """Calls since it was armed, as they began."""
        self.done: list[Call] = []
        """Those that ended well, as they ended."""

    def arm(self, fault: Fault, number: int, on_hit: Callable[[], object] | None = None) -> None:
        """Let the call ``number`` (from 1) fail; ``on_hit`` is called just before."""
        self.begun, self.done = [], []
        self.hit, self.struck, self.done_at_hit = None, [], 0
        self._fault, self._left, self._on_hit = fault, number, on_hit or _nothing

    def disarm(self) -> Call | None:
        """Fail no more; the first call that failed."""
        self._fault = None
        return self.hit

    def _strikes(self, call: Call) -> Fault | None:
        fault = self._fault
        self.begun.append(call)
        if fault is None or (fault.counts is not None and call.name not in fault.counts):
            return None
        self._left -= 1
        if self._left and not (fault.is_lasting and self._left < 0):
            return None
        self.struck.append(call)
        if self.hit is None:
            self.hit, self.done_at_hit = call, len(self.done)
            self._on_hit()
        return fault

    async def run(self, call: forwarding.Call, act: Callable[[], Awaitable[T]]) -> T:
        """``act()``, unless this is the call that fails."""
        counted = Call.of(call)
        fault = self._strikes(counted)
        if fault is not None and fault.is_slow:
            await asyncio.Event().wait()
        if fault is not None and fault.code and not fault.is_late:
            raise counted.error(fault.code)
        result = await act()
        if fault is not None and fault.code:
            raise counted.error(fault.code)
        self.done.append(counted)
        return result

    async def run_read(self, call: forwarding.Call, act: Callable[[], Awaitable[T]]) -> T:
        """Counted like any other."""
        return await self.run(call, act)

    async def run_close(self, call: forwarding.Call, close: Callable[[], Awaitable[None]]) -> None:
        """Counted; what fails here has closed, as in the system."""
        await close()
        await self.run(call, _return)

    def lock(self, path: Path) -> RootLock:
        """Counted; it blocks nobody, so it is never slow."""
        fault = self._strikes(Call("lock", path))
        if fault is not None and fault.code:
            raise Call("lock", path).error(fault.code)
        return self._inner.lock(path)


async def _return() -> None:
    return None


def _nothing() -> None:
    return None
