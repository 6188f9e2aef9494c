"""What a run is told of the steps that an earlier run has left in its root."""

from __future__ import annotations

import logging

from aio_ckpt.engine.context import EngineContext
from aio_ckpt.message_texts import command_line

_log = logging.getLogger("aio_ckpt")


class EarlierRun:
    """Tells a run that its root holds steps: once when the engine is opened, and once if the run does not go on there.

    A run goes on from the steps of its root if it has loaded, read or rolled back.
    """

    def __init__(self, ctx: EngineContext) -> None:
        self._root, self._names = ctx.root, ctx.names
        self._goes_on = False
        self._has_saved = False

    def go_on(self) -> None:
        """Note that this run has loaded, read or rolled back a step of the root."""
        self._goes_on = True

    def log_opened(self, newest: int | None, torn: int) -> None:
        """Log, when the engine is opened, that the root holds steps up to ``newest``, or, if that is None, none.

        ``torn``: number of steps that have lost their ``.metadata``, if there is no other.
        """
        if newest is None and torn:
            _log.warning(
                "%s holds no committed step, but %d that have lost .metadata: were they copied without hidden files? "
                "A run that begins anew here fails once it saves a step of that number; %s lists them",
                self._root,
                torn,
                command_line("ls", self._root, *self._names.option),
            )
        elif newest is None:
            _log.info("%s holds no committed step (saves by path do not count)", self._root)
        else:
            _log.info(
                "%s holds steps up to %d: load() resumes, and a save must exceed step %d", self._root, newest, newest
            )

    def note_save(self, newest: int | None) -> None:
        """Warn, at the first save, that it would mix the steps of two runs: it follows ``newest``.

        ``newest`` is None if the root holds no step, or the save names its own.
        """
        if newest is not None and not (self._goes_on or self._has_saved):
            _log.warning(
                "%s holds steps up to %d, and this run has loaded none of them: its next save is step %d, after those "
                "of another run. load() resumes, rollback(step) goes back, another root keeps the runs apart, and "
                "step= says that this is meant. Logged once",
                self._root,
                newest,
                newest + 1,
            )
        self._has_saved = True
