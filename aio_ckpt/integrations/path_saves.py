"""Saves at paths that a framework gives: the engines of this process and their pending saves."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.shutdown import log_if_second_to
from aio_ckpt.errors import RootError
from aio_ckpt.ranks.coordinator import Coordinator
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.runtime.error_notes import named
from aio_ckpt.storage.paths import device_of
from aio_ckpt.sync import SyncCheckpointEngine
from aio_ckpt.ticket import SaveTicket

_log = logging.getLogger("aio_ckpt")
_LIVING: weakref.WeakSet[PathSaves] = weakref.WeakSet()
"""All of this process. A function that is given a path alone finds a pending save of it here."""


class PathSaves:
    """Engines of this process, one for each file system and bucket, opened by its first save; and the pending saves."""

    def __init__(
        self,
        config: EngineConfig | None,
        root: str | os.PathLike[str] | None,
        coordinator: Callable[[], Coordinator],
    ) -> None:
        self.config = config or EngineConfig(max_in_flight=2)  # one of the best, and the last
        self._root = root
        self._coordinator = coordinator
        self._engines: dict[int | str, SyncCheckpointEngine] = {}
        self._tickets: dict[Path, SaveTicket] = {}
        self._saved: set[Path] = set()
        self._pid = os.getpid()
        _LIVING.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a spawned process open its own engines."""
        return PathSaves, (self.config, self._root, self._coordinator)

    def save(self, state: dict[str, Any], path: Path, *, files: Mapping[str, bytes], waits: bool) -> None:
        """Capture a checkpoint, and commit it behind those before it. If ``waits``, return once it is durable.

        Raises:
            Exception: as ``CheckpointEngine.save``.
        """
        try:
            ticket = self._engine_for(path).save(state, path=path, overwrite=True, files=files)
        except RootError as error:
            if error.errno in (errno.EBUSY, errno.EAGAIN):
                error.add_note("If two trainers save into one directory, give each a root on that file system.")
            raise
        except Exception as error:
            if (made := getattr(error, "ticket", None)) is not None:  # an earlier save failed, and this one goes on
                self._note(path, made, waits=waits)
            raise
        self._note(path, ticket, waits=waits)

    def _note(self, path: Path, ticket: SaveTicket, *, waits: bool) -> None:
        self._saved.add(path)
        self._tickets = {place: each for place, each in self._tickets.items() if not each.done()} | {path: ticket}
        if waits:
            ticket.result()

    def remove(self, path: Path) -> None:
        """Delete the checkpoint at ``path`` once the saves that are pending now are durable."""
        self._engine_for(path).remove(path)
        self._saved.discard(path)

    def has_saved(self, path: Path) -> bool:
        """Return whether this process has saved a checkpoint at ``path``, and not removed it."""
        return path in self._saved

    def is_pending(self, path: Path) -> bool:
        return path in self._tickets and not self._tickets[path].done()

    def wait(self, path: Path) -> None:
        """Wait until a pending save of ``path`` is durable. Raises its failure."""
        if self.is_pending(path):
            self._tickets[path].result()

    def flush(self) -> None:
        """Wait until all pending saves are durable. Raises the first failure."""
        for path in list(self._tickets):
            self.wait(path)

    def remove_file(self, path: Path, remove: Callable[[], object]) -> None:
        """Call ``remove``, which deletes another program's file at ``path``, once the saves before are durable. Waits.

        If one of them failed and nobody has seen it, the file stays, as it may be the only good checkpoint, and a
        warning is logged. A later call raises the failure.
        """
        for place, ticket in list(self._tickets.items()):
            ticket.committed._wait(None)  # raises in a forked child and on the engine's thread; observes no failure
            failure = ticket.committed.peek()
            if failure is not None and not ticket.committed.observed:
                _log.warning("%s stays: the save of %s, which came before, failed: %s", path, place, named(failure))
                return
        remove()

    @contextlib.contextmanager
    def closing_if(self, is_last: bool) -> Iterator[None]:
        """Close the engines behind the block if ``is_last``: then no later call of the framework closes them."""
        try:
            yield
        finally:
            if is_last:
                self.close()

    def close(self) -> None:
        """Finish pending saves and removals, and close the engines. The next save opens them again.

        Raises:
            Exception: a failure that was not raised yet. While another error is handled, it is only logged.
        """
        engines, self._engines, self._tickets = self._engines, {}, {}
        if self._pid != os.getpid():
            return  # the engines are those of the parent
        with log_if_second_to(sys.exc_info()[1]), contextlib.ExitStack() as closing:
            for engine in engines.values():
                closing.callback(engine.close)

    def _engine_for(self, path: Path) -> SyncCheckpointEngine:
        if self._pid != os.getpid():  # an engine does not survive a fork
            self._engines, self._tickets, self._pid = {}, {}, os.getpid()
        is_remote = isinstance(path, RemotePath)
        root = path.parent if is_remote or self._root is None else Path(self._root)
        medium = root.bucket_url if isinstance(root, RemotePath) else device_of(root)
        if medium not in self._engines:
            self._engines[medium] = SyncCheckpointEngine(root, self.config, coordinator=self._coordinator())
        return self._engines[medium]


def has_pending_save(path: Path) -> bool:
    """Return whether a save of ``path`` is pending in this process, whichever engine makes it."""
    return any(saves.is_pending(path) for saves in list(_LIVING))


def wait_for_saves(path: Path) -> None:
    """Wait until the saves of ``path`` that are pending in this process are durable. Raises the first failure."""
    for saves in list(_LIVING):
        saves.wait(path)
