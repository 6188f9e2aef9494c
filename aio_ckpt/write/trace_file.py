"""Tracing: the calls of a storage as spans, and the file that a trace ends in."""

from __future__ import annotations

import contextlib
import functools
import heapq
import inspect
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast

import anyio

from aio_ckpt.errors import AioCkptError, ConfigError, shown
from aio_ckpt.format.manifests import METADATA_FILE, ROOT_MANIFEST
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.runtime.trace import Recorder, SpanRecorder, render
from aio_ckpt.storage.local import Storage

__all__ = ["NO_TRACE", "SaveTrace", "TraceFile"]

_log = logging.getLogger("aio_ckpt")
_WRITE_SECS = 10.0
"""How long a save that has ended waits for its trace."""


def _checked(path: object) -> Path:
    """Where a trace can be written.

    Raises:
        ConfigError: no path, a directory, a device or pipe, a file of a checkpoint, or its directory is missing or not
            writable.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise ConfigError(f"trace={shown(path)}: give the path of a file")
    found = Path(path).absolute()
    try:
        found = Path(os.path.realpath(found))  # the file behind a link is replaced, not the link
        is_taken = not stat.S_ISREG(os.stat(found).st_mode)
    except FileNotFoundError:
        is_taken = False
    except (OSError, ValueError) as error:  # a name that is too long, a NUL, a file in the place of a directory
        raise ConfigError(f"trace={shown(str(found))}: no file can be there ({error})") from error
    if is_taken:
        raise ConfigError(f"trace={shown(str(found))} is a directory, a device or a pipe: give the path of a file")
    if any(os.path.lexists(found.with_name(name)) for name in (METADATA_FILE, ROOT_MANIFEST)):
        raise ConfigError(f"trace={shown(str(found))}: {found.parent} is a checkpoint, give a path outside of it")
    if not found.parent.is_dir() or not os.access(found.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"trace={shown(str(found))}: {found.parent} is no directory that can be written to")
    return found


class SaveTrace(Recorder, Protocol):
    """Where the time of one save goes, and what becomes of that in the end."""

    def storage(self, storage: Storage) -> Storage:
        """``storage``, whose awaited calls are spans too; for this save alone, on the loop's thread."""

    async def keep(
        self, executor: Executor, *, origin: float, rank: int, about: Mapping[str, object], error: BaseException | None
    ) -> None:
        """The save has ended, with ``error`` or well. Raises nothing: no save fails because of its trace."""


class _NoTrace:
    def span(self, name: str, lane: str, **details: object) -> AbstractContextManager[None]:
        return _NOTHING

    def add(self, name: str, lane: str, began: float, ended: float, **details: object) -> None: ...

    def stage(self, name: str | None) -> None: ...

    def storage(self, storage: Storage) -> Storage:
        return storage

    async def keep(
        self, executor: Executor, *, origin: float, rank: int, about: Mapping[str, object], error: BaseException | None
    ) -> None: ...


_NOTHING = contextlib.nullcontext()
NO_TRACE: SaveTrace = _NoTrace()
"""Keeps nothing."""


class TraceFile(SpanRecorder):
    """The spans of one save, written to a file when it has ended.

    Raises:
        ConfigError: see :func:`_checked`.
    """

    def __init__(self, path: object) -> None:
        super().__init__()
        self.path = _checked(path)

    def storage(self, storage: Storage) -> Storage:
        """See :class:`SaveTrace`."""
        return cast("Storage", _TracedStorage(storage, self))

    async def keep(
        self, executor: Executor, *, origin: float, rank: int, about: Mapping[str, object], error: BaseException | None
    ) -> None:
        """Put the trace in place of the file at once; what goes wrong is logged."""
        failure = None if error is None else f"{type(error).__name__}: {error}"
        try:
            data = render(self.spans(), origin=origin, rank=rank, about=about, error=failure)
            with anyio.move_on_after(_WRITE_SECS, shield=True) as scope:
                await run_blocking(executor, _replace, self.path, data)
            if scope.cancelled_caught:
                _log.warning("the trace %s was not written within %s s", self.path, _WRITE_SECS)
        except (OSError, ValueError, RuntimeError, AioCkptError) as problem:
            _log.warning("the trace %s was not written: %s", self.path, problem)


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fresh.write_bytes(data)
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


class _TracedStorage:
    """Each call that is awaited is a span named by it and its path.

    Invariant: calls at the same time have lanes of their own; the lowest free one is taken.
    """

    def __init__(self, storage: Storage, recorder: Recorder) -> None:
        self._storage = storage
        self._recorder = recorder
        self._free: list[int] = []
        self._lanes = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._storage, name)
        return functools.partial(self._record, call) if inspect.iscoroutinefunction(call) else call

    async def _record(self, call: Any, path: Path, *args: object, **kwargs: object) -> Any:
        with self._lane() as lane, self._recorder.span(f"{call.__name__} {path.name}", lane):
            return await call(path, *args, **kwargs)

    @contextlib.contextmanager
    def _lane(self) -> Iterator[str]:
        if not self._free:
            self._lanes += 1
            heapq.heappush(self._free, self._lanes)
        number = heapq.heappop(self._free)
        try:
            yield f"files {number}"
        finally:
            heapq.heappush(self._free, number)
