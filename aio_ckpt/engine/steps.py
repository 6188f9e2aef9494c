"""Steps: which one a save may have, and which it has if its caller gave none, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from aio_ckpt.commit import publish as commit
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.runtime.portal import Lock

__all__ = ["KnownSteps"]


class KnownSteps:
    """What one rank knows of the committed steps, and of the calls of ``save()`` that may yet become some.

    Invariant: what a call without a step gets is made of nothing but what every rank knows at that call: the steps
    committed by calls so long ago that all have seen them end, and the steps of all calls since, however they ended
    here: refused, failed, or not at all yet.
    """

    def __init__(self, quarantine: Quarantine, *, max_in_flight: int, are_several: bool) -> None:
        self._quarantine = quarantine
        self._window = max_in_flight - 1 if are_several else 0
        self._lock = Lock()
        self._claims: dict[int, int] = {}  # step of each call of which another rank may not know how it ended
        self._newest: int | None = None
        self._newest_since_read: int | None = None
        self._are_read = False
        self._times_condemned = 0
        self.may_lack_newest = False
        """A save failed here, maybe not on the leader: the disk may hold a step of which this rank never heard."""

    # -- committed ------------------------------------------------------------------------------------

    @property
    def are_known(self) -> bool:
        """Whether the committed steps were read from the disk, and no load found one damaged since."""
        return self._are_read and self._times_condemned == self._quarantine.times_condemned

    def forget(self) -> None:
        """The steps on the disk are about to change: the next save reads them anew."""
        self._are_read = False

    def learn(self, read_steps: Callable[[], Iterable[int]]) -> None:
        """Take over the newest step on the disk, or what is committed while the disk is read."""
        try:
            with self._lock:
                self._newest_since_read = None
                self._are_read = True
                self._times_condemned = self._quarantine.times_condemned
            found = max(read_steps(), default=None)
        except BaseException:
            self._are_read = False
            raise
        with self._lock:
            self._newest = _later(self._newest_since_read, found)

    def settle(self, step: int, *, is_committed: bool) -> None:
        """The save of ``step`` has ended."""
        with self._lock:
            self.may_lack_newest = not is_committed
            if is_committed:
                self._newest = _later(self._newest, step)
                self._newest_since_read = _later(self._newest_since_read, step)
            else:
                self._are_read = False  # a commit that stalled may have become visible: look again

    # -- the next one ---------------------------------------------------------------------------------

    def newest(self, pending: Iterable[int]) -> int | None:
        """Newest step committed or ``pending`` here."""
        return _later(self._newest, max(pending, default=None))

    def claim(self, number: int, step: object, pending: Iterable[int]) -> int:
        """The step that call ``number``, neither skipped nor refused for want of room, is to have on every rank.

        Claimed by every such call, one that is refused here, too: another rank may not know of that at its next call.
        A ``step`` that is none (it is refused) counts as not given.
        """
        with self._lock:
            if number in self._claims:
                return self._claims[number]
            recent = [claimed for call, claimed in self._claims.items() if number - self._window <= call < number]
            if type(step) is not int or step < 0:
                newest = _later(self.newest(pending), max(recent, default=None))
                step = commit.check_step(None, newest=newest, committed=(), pending=(), overwrite=False)
            if self._window:
                kept = {call: claimed for call, claimed in self._claims.items() if call > number - self._window}
                self._claims = {**kept, number: step}
            return step

    def check(self, step: int, pending: Iterable[int], *, overwrite: bool, read: Callable[[], Collection[int]]) -> int:
        """A step that the caller gave. Only the newest is remembered: an older one is looked up on the disk.

        Raises:
            StepOrderError: see :func:`aio_ckpt.commit.publish.check_step`.
        """
        pending = list(pending)
        newest = self.newest(pending)
        committed = read() if newest is not None and step <= newest else ()
        return commit.check_step(step, newest=newest, committed=committed, pending=pending, overwrite=overwrite)


def _later(a: int | None, b: int | None) -> int | None:
    return b if a is None or (b is not None and b > a) else a
