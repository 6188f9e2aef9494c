"""Storage of this host that looks at each file of a listing by a call of its own, for tests that change ``status``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aio_ckpt.errors import ReadError
from aio_ckpt.storage.local import FileStatus, Storage, each_status


class SingleLooks(Storage):
    """Storage whose ``statuses`` calls ``status`` once for each name."""

    async def statuses(self, directory: Path, names: Sequence[str]) -> list[FileStatus | ReadError | None]:
        return await each_status(self, directory, names)
