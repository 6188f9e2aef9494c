"""What did not change from save to save: the frozen leaves, and the file that the next save may clone."""

from __future__ import annotations

from dataclasses import dataclass

from aio_ckpt.plan.frozen import FrozenLeaves
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

    def take(self) -> FrozenFile | None:
        """Return the frozen file that a save may clone, and count it as a sharer; None if it has to write its own.

        Saves in flight take the same file. One that writes its own after all still counts.
        """
        file = self._file
        if file is None or file.sharers.count >= self.relink_limit:
            return None
        file.sharers.count += 1
        return file

    def committed(self, plan: Plan, main: WriteResult, frozen: FrozenFile | None) -> None:
        """Learn from the files of a committed save."""
        if self.leaves is None:
            return
        self._file = frozen
        sums = main.sums if frozen is None else frozen.result.sums + main.sums
        self.leaves.learn(plan.layout, sums, plan.frozen)
