"""Messages about the steps that an earlier run left in the root."""

from __future__ import annotations

import logging
from pathlib import Path

__all__ = ["EarlierSteps"]

_log = logging.getLogger("aio_ckpt")


class EarlierSteps:
    """Tells a run that its root holds steps: once when the engine is opened, and once if the run does not go on there.

    A run goes on from the steps of its root if it has loaded, read or rolled back.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._goes_on = False
        self._has_saved = False

    @property
    def may_be_mixed(self) -> bool:
        """Whether the next save could be the first of a run that does not go on from the steps of its root."""
        return not (self._goes_on or self._has_saved)

    def go_on(self) -> None:
        """Note that this run has loaded, read or rolled back a step of the root."""
        self._goes_on = True

    def tell_opened(self, newest: int | None) -> None:
        """Log, when the engine is opened, that the root holds steps up to ``newest``; nothing if that is None."""
        if newest is not None:
            _log.info(
                "%s holds steps up to %d: load() resumes, and a save must exceed step %d", self._root, newest, newest
            )

    def tell_first_save(self, newest: int | None) -> None:
        """Warn, at the first save that names no step, that the steps of two runs are about to be mixed."""
        if self.may_be_mixed and newest is not None:
            _log.warning(
                "%s holds steps up to %d, and this run has loaded none of them: its next save is step %d, after those "
                "of another run. load() resumes, rollback(step) goes back, another root keeps the runs apart, and "
                "step= says that this is meant. Told once",
                self._root,
                newest,
                newest + 1,
            )
        self._has_saved = True

    def pass_first_save(self) -> None:
        """Note that the first save named its step."""
        self._has_saved = True
