"""What did not change from save to save: the frozen leaves, and the file that the next save may clone."""

from __future__ import annotations

from dataclasses import dataclass

from aio_ckpt.plan.frozen_leaves import FrozenLeaves
from aio_ckpt.plan.layout import ImageLayout
from aio_ckpt.plan.save_plan import Plan
from aio_ckpt.plan.trusted_plan import Versions
from aio_ckpt.write.frozen_file import FrozenFile
from aio_ckpt.write.result import WriteResult


@dataclass(frozen=True, slots=True, kw_only=True)
class _Newest:
    """Frozen file that was committed last."""

    file: FrozenFile
    layout: ImageLayout
    versions: Versions | None
    """Versions of the frozen leaves when they were captured; None if nobody asked for them."""


@dataclass(slots=True, kw_only=True)
class NewestFrozenFile:
    """What the newest committed save of one engine tells the next ones. The loop uses it, except where it says so."""

    leaves: FrozenLeaves | None
    """Frozen leaves; None if each save writes all."""
    relink_limit: int
    """Most checkpoints that share the bytes of a frozen file."""
    _newest: _Newest | None = None
    _ignores_limit: bool = False

    def lift_relink_limit(self) -> FrozenFile | None:
        """Ignore the limit from now on: the disk has no room for another file.

        Returns the file that saves go on to share; None if a save has written its own for another reason.
        """
        file = self.newest
        if self._ignores_limit or file is None or file.sharers.count < self.relink_limit:
            return None
        self._ignores_limit = True
        return file

    def take(self) -> FrozenFile | None:
        """Return the frozen file that a save may clone, and count it as a sharer; None if it has to write its own.

        Saves in flight take the same file. One that writes its own after all still counts.
        """
        file = self.newest
        if file is None or (file.sharers.count >= self.relink_limit and not self._ignores_limit):
            return None
        file.sharers.count += 1
        return file

    @property
    def newest(self) -> FrozenFile | None:
        """The frozen file that was committed last; None if there is none."""
        return None if self._newest is None else self._newest.file

    def holding(self, layout: ImageLayout, versions: Versions) -> FrozenFile | None:
        """Return the newest frozen file if it holds the leaves of ``layout`` with these ``versions``. On any thread."""
        newest = self._newest
        if newest is None or newest.versions is None:
            return None
        is_held = newest.versions.are(versions) and newest.layout.has_frozen_file_of(layout)
        return newest.file if is_held else None

    def forget(self) -> None:
        """Let the next save capture and write its frozen file."""
        self._newest = None

    def committed(self, plan: Plan, main: WriteResult, frozen: FrozenFile | None, versions: Versions | None) -> None:
        """Learn from the files of a committed save."""
        if self.leaves is None:
            return
        if frozen is not None:  # else a save of another state, as of the adapters alone, came between
            self._newest = _Newest(file=frozen, layout=plan.layout, versions=versions)
        sums = main.sums if frozen is None else frozen.result.sums + main.sums
        self.leaves.learn(plan.layout, sums, plan.frozen)
