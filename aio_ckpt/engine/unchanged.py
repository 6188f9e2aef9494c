"""What did not change from save to save: the frozen leaves, and the file that the next save may clone."""

from __future__ import annotations

from dataclasses import dataclass

from aio_ckpt.plan.frozen import FrozenLeaves
from aio_ckpt.plan.layout import ImageLayout
from aio_ckpt.plan.local_plan import Plan
from aio_ckpt.write.frozen import FrozenFile
from aio_ckpt.write.result import WriteResult


@dataclass(slots=True, kw_only=True)
class UnchangedLeaves:
    """What the newest committed save of one engine tells the next ones. It is used on the loop."""

    leaves: FrozenLeaves | None
    """Frozen leaves; None if each save writes all."""
    relink_limit: int
    """Most checkpoints that share the bytes of a frozen file."""
    _file: FrozenFile | None = None
    _layout: ImageLayout | None = None

    def to_clone(self, layout: ImageLayout) -> FrozenFile | None:
        """Return the frozen file that a save of ``layout`` may clone; None if it has to write its own."""
        file = self._file
        if file is None or layout is not self._layout or file.clones + 2 > self.relink_limit:
            return None
        return file

    def committed(self, plan: Plan, main: WriteResult, frozen: FrozenFile | None) -> None:
        """Learn from the files of a committed save."""
        if self.leaves is None:
            return
        self._file, self._layout = frozen, plan.layout
        sums = main.sums if frozen is None else frozen.result.sums + main.sums
        self.leaves.learn(plan.layout, sums, plan.frozen)
