"""Trace file: the file to which the trace of one save is written."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import anyio

from aio_ckpt.checks import shown
from aio_ckpt.errors import AioCkptError, ConfigError
from aio_ckpt.format.root_manifest import METADATA_FILE, ROOT_MANIFEST
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.runtime.trace import Recorder, SpanRecorder, render
from aio_ckpt.storage.paths import open_without_links

_log = logging.getLogger("aio_ckpt")
_WRITE_SECS = 10.0
"""Seconds that a save that has ended waits for the write of its trace."""


def _checked_path(path: object) -> Path:
    """Return the absolute path to which a trace can be written.

    Raises:
        ConfigError: ``path`` is no path, or that of a directory, a device, a pipe or a file of a checkpoint, or its
            directory is missing or not writable.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str) or not os.fspath(path):
        raise ConfigError(f"trace={shown(path)}: give the path of a file")
    found = Path(path).absolute()
    try:
        found = Path(os.path.realpath(found))  # the target of a link is replaced, and not the link
        is_taken = not stat.S_ISREG(os.stat(found).st_mode)
    except FileNotFoundError:
        is_taken = False
    except (OSError, ValueError) as error:  # the name is too long, or has a NUL, or a parent is a file
        raise ConfigError(f"trace={shown(str(found))}: no file can be there ({error})") from error
    if is_taken:
        raise ConfigError(f"trace={shown(str(found))} is a directory, a device or a pipe: give the path of a file")
    if any(os.path.lexists(found.with_name(name)) for name in (METADATA_FILE, ROOT_MANIFEST)):
        raise ConfigError(f"trace={shown(str(found))}: {found.parent} is a checkpoint, give a path outside of it")
    if not found.parent.is_dir() or not os.access(found.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"trace={shown(str(found))}: {found.parent} is no directory that can be written to")
    return found


class SaveTrace(Recorder, Protocol):
    """Recorder of one save that can store its spans when the save has ended."""

    async def keep(
        self, executor: Executor, *, origin: float, rank: int, about: Mapping[str, object], error: BaseException | None
    ) -> None:
        """Store the spans of the save, which has ended with ``error``, or well if that is None.

        Raises nothing: no save fails because of its trace.
        """


class _NoTrace:
    def span(self, name: str, lane: str, **details: object) -> AbstractContextManager[None]:
        return _NOTHING

    def add(self, name: str, lane: str, began: float, ended: float, **details: object) -> None: ...

    def stage(self, name: str | None) -> None: ...

    async def keep(
        self, executor: Executor, *, origin: float, rank: int, about: Mapping[str, object], error: BaseException | None
    ) -> None: ...


_NOTHING = contextlib.nullcontext()
NO_TRACE: SaveTrace = _NoTrace()
"""Trace of a save whose caller asked for none: it records nothing."""


class TraceFile(SpanRecorder):
    """Recorder that writes the spans of one save to a file when the save has ended."""

    def __init__(self, path: object) -> None:
        """Check ``path``.

        Raises:
            ConfigError: see :func:`_checked_path`.
        """
        super().__init__()
        self.path = _checked_path(path)

    async def keep(
        self, executor: Executor, *, origin: float, rank: int, about: Mapping[str, object], error: BaseException | None
    ) -> None:
        """Write the trace and replace the file in one rename. An error is only logged."""
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
        with open(fresh, "wb", opener=open_without_links) as file:
            file.write(data)
        fresh.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
