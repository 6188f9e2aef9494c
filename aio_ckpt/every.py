"""When to save: every so many steps or minutes, and once before the process is to end."""

from __future__ import annotations

from aio_ckpt.argument_checks import MAX_SECS, check_flag
from aio_ckpt.commit.step_numbers import check_step_number, whole_number
from aio_ckpt.engine.engine import BaseEngine
from aio_ckpt.errors import ConfigError
from aio_ckpt.message_texts import shown

__all__ = ["Every"]


class Every:
    """Schedule of the saves of an engine, alike on all of its ranks.

    If there are several ranks, every rank makes its schedules in the same order and calls :meth:`due` equally often.
    The steps decide without communication. The clock of rank 0 decides about ``minutes``.

    Args:
        engine: the engine that saves, of either kind.
        steps: a save is due at each step that is a multiple of this, or at the first one after it.
        minutes: a save is due this many minutes after the last one was. The first :meth:`due` starts the clock.
        on_preemption: a save is due once :attr:`CheckpointEngine.preempted` turns True, once. ``on_preemption()`` of
            the engine must have been called.

    Raises:
        ConfigError: an argument is invalid, or neither ``steps`` nor ``minutes`` is given.
    """

    def __init__(
        self,
        engine: BaseEngine,
        *,
        steps: int | None = None,
        minutes: float | None = None,
        on_preemption: bool = True,
    ) -> None:
        if not isinstance(engine, BaseEngine):
            raise ConfigError(f"engine={shown(engine)}: give the engine that saves")
        self._steps = whole_number(steps)
        if steps is not None and (type(self._steps) is not int or self._steps < 1):
            raise ConfigError(f"steps={shown(steps)}: give a whole number of at least 1")
        check_flag("on_preemption", on_preemption)
        if steps is None and minutes is None:
            raise ConfigError("steps=None, minutes=None: give at least one of them")
        self._engine = engine
        self._timer = None if minutes is None else engine._make_timer(_secs(minutes))
        self._heeds_preemption = on_preemption
        self._last: int | None = None
        self._is_preempted = False

    @property
    def preempted(self) -> bool:
        """Whether the last :meth:`due` found that the process is to end: end the loop behind the save that was due.

        Reading this is no poll, so that no signal comes between the save and the end of the loop.
        """
        return self._is_preempted

    def due(self, step: int) -> bool:
        """Return whether to save now, at ``step``. Each rank gets the same answer to its n-th call.

        If ``minutes`` is over or a signal came, and there are several ranks, this waits until the ranks have agreed:
        up to a fifth of a second.

        Raises:
            StepOrderError: ``step`` is no whole number of at least 0.
            PeerFailedError, StallError: the ranks could not agree, because one failed or does not answer.
        """
        step = check_step_number(step)
        is_due = self._steps is not None and passes_multiple(self._last, step, self._steps)
        self._last = step
        if self._timer is not None:
            is_due |= self._timer.poll()
        if self._heeds_preemption and not self._is_preempted:
            self._is_preempted = self._engine.preempted
            is_due |= self._is_preempted
        if is_due and self._timer is not None:
            self._timer.restart()
        return is_due


def passes_multiple(last: int | None, step: int, every: int) -> bool:
    """Return whether a multiple of ``every`` lies after the step ``last`` and not after ``step``.

    Without a last step, or if steps began anew, the step before ``step`` counts as the last. 0 is no multiple here.
    """
    before = step - 1 if last is None or last >= step else last
    return step // every > max(before, 0) // every


def _secs(minutes: float) -> float:
    # The value is only compared, as in check_seconds().
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not 0 < minutes <= MAX_SECS / 60:
        raise ConfigError(f"minutes={shown(minutes)}: give a finite number of minutes above 0")
    return 60.0 * minutes
