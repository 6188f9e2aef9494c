"""Discovery of steps by a host whose answers are old."""

from __future__ import annotations

from pathlib import Path

from single_looks import SingleLooks

from aio_ckpt.commit.discovery import discover_all
from aio_ckpt.format.checkpoint_files import METADATA_FILE, root_manifest_name
from aio_ckpt.format.root_names import TRASH_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import FileStatus


class OldDirectory(SingleLooks):
    """A host that has listed a root before another one renamed ``step_1`` to trash and committed ``step_2``.

    It looks into the renamed directory by its old name, as a client of NFS does for a minute.
    """

    def __init__(self, executor: Executor, root: Path) -> None:
        super().__init__(executor)
        self._root = root
        self._lists = 0

    def _seen(self, path: Path) -> Path:
        old = self._root / "step_1"
        return self._root / TRASH_DIR / path.relative_to(self._root) if path.is_relative_to(old) else path

    async def list_dir(self, path: Path) -> list[str]:
        if path != self._root:
            return await super().list_dir(self._seen(path))
        self._lists += 1
        return ["step_1"] if self._lists == 1 else await super().list_dir(path)

    async def status(self, path: Path) -> FileStatus | None:
        return await super().status(self._seen(path))


async def test_a_step_that_another_host_has_renamed_to_trash_is_no_step_and_hides_no_newer_one(tmp_path: Path) -> None:
    trash = tmp_path / TRASH_DIR / "step_1"
    trash.mkdir(parents=True)
    (trash / root_manifest_name("s")).touch()  # its .metadata is removed first
    (tmp_path / "step_2").mkdir()
    (tmp_path / "step_2" / METADATA_FILE).touch()
    executor = Executor("test", 1)
    storage = OldDirectory(executor, tmp_path)
    committed, torn, _ = await discover_all(storage, tmp_path, StepNames("step_{step}"))
    assert ([found.step for found in committed], torn) == ([2], [])
    assert executor.close(10.0)
