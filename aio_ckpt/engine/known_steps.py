"""The steps of the root as one engine knows them: the default step of ``save()``, and which steps are free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from aio_ckpt.commit import step_numbers
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.errors import StepOrderError
from aio_ckpt.runtime.ctrl_c import Lock


class KnownSteps:
    """Committed steps as this rank knows them, and the default step of ``save()``.

    Invariant: the default step is computed only from information that every rank has at that call. If there are several
    ranks, that is the newest step when all met, loaded or rolled back, and the steps of all later calls that were not
    skipped. Failed calls count, because another rank may not know of the failure yet. If there is one rank, only
    committed and pending steps count, so the step of a failed save is free again.
    """

    def __init__(self, quarantine: Quarantine, *, counts_calls: bool, mirror: Path | None = None) -> None:
        """``counts_calls``: whether there are several ranks. ``mirror``: named in messages."""
        self._quarantine = quarantine
        self._mirror = mirror
        self._counts_calls = counts_calls
        self._lock = Lock()
        self._last_call: tuple[int, int] | None = None
        """Number and step of the last call that took its step."""
        self._highest: int | None = None
        """Highest step of the calls since a rollback."""
        self._newest: int | None = None
        self._newest_since_read: int | None = None
        self._are_read = False
        self._quarantine_additions = 0

    # -- committed ------------------------------------------------------------------------------------

    @property
    def are_known(self) -> bool:
        """Whether the committed steps were read from the disk, and no load found one damaged since."""
        return self._are_read and self._quarantine_additions == self._quarantine.additions

    def forget(self) -> None:
        """Note that the steps on the disk are about to change: the next save reads them anew."""
        self._are_read = False

    def learn(self, read_steps: Callable[[], Iterable[int]]) -> None:
        """Take over the newest step on the disk, or one that is committed while the disk is read."""
        try:
            with self._lock:
                self._newest_since_read = None
                self._are_read = True
                self._quarantine_additions = self._quarantine.additions
            found = max(read_steps(), default=None)
        except BaseException:
            self._are_read = False
            raise
        with self._lock:
            self._newest = _later(self._newest_since_read, found)

    def finish(self, step: int, *, is_committed: bool) -> None:
        """Note that the save of ``step`` has ended."""
        with self._lock:
            if is_committed:
                self._newest = _later(self._newest, step)
                self._newest_since_read = _later(self._newest_since_read, step)
            else:
                self._are_read = False  # a stalled commit may have become visible: read again

    # -- the next one ---------------------------------------------------------------------------------

    def newest(self, pending: Iterable[int]) -> int | None:
        """Return the newest step that is committed, or in ``pending``."""
        return _later(self._newest, max(pending, default=None))

    def claim(self, number: int, step: object, pending: Iterable[int], *, agreed: int | None) -> int:
        """Take and return the step of call ``number``: ``step``, or the next one if ``step`` is no valid step.

        ``agreed`` is the newest step that all ranks know.
        """
        with self._lock:
            if self._last_call is not None and self._last_call[0] == number:
                return self._last_call[1]
            try:
                step = step_numbers.check_step_number(step)
            except StepOrderError:
                newest = _later(agreed, self._highest) if self._counts_calls else self.newest(pending)
                step = step_numbers.step_after(newest)
            self._last_call, self._highest = (number, step), _later(self._highest, step)
            return step

    def change(self, newest: int | None) -> None:
        """Note that the committed steps were changed for all ranks, and end with ``newest`` now."""
        with self._lock:
            self._are_read = False
            self._highest = self._newest = newest

    def check(self, step: int, pending: Iterable[int], *, overwrite: bool, read: Callable[[], Collection[int]]) -> None:
        """Check a step that the caller gave. Steps up to the newest are looked up on the disk.

        Raises:
            StepOrderError: see :func:`check_step_is_free`.
        """
        pending = list(pending)
        newest = self.newest(pending)
        committed = read() if newest is not None and step <= newest else ()
        check_step_is_free(
            step, newest=newest, committed=committed, pending=pending, overwrite=overwrite, mirror=self._mirror
        )


def _later(a: int | None, b: int | None) -> int | None:
    return b if a is None or (b is not None and b > a) else a


def check_step_is_free(
    step: object,
    *,
    newest: int | None,
    committed: Collection[int],
    pending: Collection[int],
    overwrite: bool,
    mirror: Path | None = None,
) -> int:
    """Return the step of a save that its caller gave, as an int.

    ``newest`` may be a step of the ``mirror`` alone.

    Raises:
        StepOrderError: ``step`` is no whole number from 0, or it does not exceed ``newest`` and is not overwritten.
    """
    step = step_numbers.check_step_number(step)
    if newest is None or step > newest or (overwrite and step in committed):
        return step
    known = f"the newest committed or pending step {newest}"
    earlier, anew = "an earlier one", "another root begins anew"
    if mirror is not None and newest not in committed and newest not in pending:
        known += f", which may be in the mirror {mirror} alone"
        earlier += f", also if load() passes step {newest} by as damaged"
        anew = "another root with another mirror begins anew"
    remedy = f"load() resumes after step {newest}, rollback(step) goes back to {earlier}, {anew}"
    if mirror is None and newest not in committed and newest not in pending:
        known += ", which this engine has committed and whose directory is gone"
        remedy = f"give step {newest + 1} or a later one, or open a new engine, which counts the steps that are there"
    elif step in pending:
        remedy = (
            "its save is pending: await its ticket (or engine.ready(), if one save is in flight) before overwrite=True"
        )
    elif step in committed:
        remedy += f", save(overwrite=True) replaces step {step}"
    raise StepOrderError(f"step={step} does not exceed {known}: {remedy}")
