"""Named kill points: every call of the storage that changes something, before, within and after."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

from aio_ckpt.commit.directory import PENDING
from aio_ckpt.format.names import ENGINE_DIR
from aio_ckpt.reports import WriteMode
from aio_ckpt.storage.local import DataFile, FileStatus, ReadFile, RootLock, Storage

__all__ = ["KillPoint", "PointedStorage", "When"]

T = TypeVar("T")
When = Literal["before", "within", "after"]
_ROLES = (
    (re.compile(r"step_\d+"), "step"),
    (re.compile(r"\d+|rehearsal"), "parent"),
)
_SAVE_ID = re.compile(r"s\d+x\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class KillPoint:
    """Where a process kills itself."""

    call: str
    """Call and the roles of its paths, as ``rename pending -> step``."""
    when: When
    """Before it, with half of its effect, or after it returned."""
    skip: int = 0
    """Such calls that pass before."""

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.when} {self.call}"


class PointedStorage:
    """A real storage that tells the names of its calls and kills the process at one of them.

    ``on_call`` hears of each call as it begins, with the ``When`` that can be asked for there.
    """

    def __init__(
        self, inner: Storage, point: KillPoint | None, on_call: Callable[[str, tuple[When, ...]], None] | None = None
    ) -> None:
        self._inner = inner
        self._point = point
        self._on_call = on_call
        self._passed = 0
        self._last_move = ""

    async def run(
        self, call: str, act: Callable[[], Awaitable[T]], half: Callable[[], Awaitable[object]] | None = None
    ) -> T:
        """Do ``act``; die before or after it, or after ``half`` of it, if this call is the point."""
        if self._on_call is not None:
            self._on_call(call, ("before", "after") if half is None else ("before", "within", "after"))
        is_here = self._is_here(call)
        if is_here and self._point is not None and self._point.when != "after":
            if self._point.when == "within" and half is not None:
                await half()
            _die()
        result = await act()
        if is_here:
            _die()
        return result

    def _is_here(self, call: str) -> bool:
        if self._point is None or call != self._point.call:
            return False
        self._passed += 1
        return self._passed > self._point.skip

    async def create_data_file(self, path: Path, nbytes: int, *, writers: int) -> DataFile:
        """See :class:`Storage`."""
        made = await self.run(
            f"create_data_file {_role(path)}", lambda: self._inner.create_data_file(path, nbytes, writers=writers)
        )
        return _PointedFile(self, made)

    async def open_data_file(self, path: Path, *, readers: int, shared: bool = False) -> ReadFile:
        """See :class:`Storage`."""
        return await self._inner.open_data_file(path, readers=readers, shared=shared)

    async def write_file(self, path: Path, *parts: bytes) -> None:
        """Within: half of the bytes, no fsync."""

        async def half() -> None:
            data = b"".join(parts)
            path.write_bytes(data[: len(data) // 2])

        await self.run(f"write_file {_role(path)}", lambda: self._inner.write_file(path, *parts), half)
        if path.name.startswith(PENDING):
            self._last_move = "the mark"

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        """See :class:`Storage`."""
        return await self._inner.read_file(path, max_bytes=max_bytes)

    async def make_dir(self, path: Path, *, parents: bool = False) -> None:
        """See :class:`Storage`. The engine's own directories are made once in a root: no point of a save."""
        if path.parent.name == ENGINE_DIR:
            await self._inner.make_dir(path, parents=parents)
            return
        await self.run(f"make_dir {_role(path)}", lambda: self._inner.make_dir(path, parents=parents))

    async def sync_dir(self, path: Path) -> None:
        """The root is synced after a commit and after a step went to the trash, a directory after its mark, too."""
        why = f" after {self._last_move}" if self._last_move and _role(path) not in ("pending", "step") else ""
        await self.run(f"sync_dir {_role(path)}{why}", lambda: self._inner.sync_dir(path))

    async def list_dir(self, path: Path) -> list[str]:
        """See :class:`Storage`."""
        return await self._inner.list_dir(path)

    async def exists(self, path: Path) -> bool:
        """See :class:`Storage`."""
        return await self._inner.exists(path)

    async def status(self, path: Path) -> FileStatus | None:
        """See :class:`Storage`."""
        return await self._inner.status(path)

    async def touch(self, path: Path) -> None:
        """See :class:`Storage`. A sign of life, no step of a commit: no point."""
        await self._inner.touch(path)

    async def rename(self, src: Path, dst: Path) -> None:
        """See :class:`Storage`."""
        await self._move("rename", src, dst, lambda: self._inner.rename(src, dst))

    async def exchange(self, a: Path, b: Path) -> None:
        """See :class:`Storage`."""
        await self._move("exchange", a, b, lambda: self._inner.exchange(a, b))

    async def replace(self, src: Path, dst: Path) -> None:
        """See :class:`Storage`."""
        await self._move("replace", src, dst, lambda: self._inner.replace(src, dst))

    async def _move(self, name: str, src: Path, dst: Path, act: Callable[[], Awaitable[None]]) -> None:
        call = f"{name} {_role(src)} -> {_role(dst)}"
        await self.run(call, act)
        # One name for both moves to the trash: retention's may come between a commit's own calls.
        self._last_move = "a move to the trash" if _role(dst) == "trash" else call

    async def remove_file(self, path: Path) -> None:
        """See :class:`Storage`."""
        await self.run(f"remove_file {_role(path)}", lambda: self._inner.remove_file(path))

    async def remove_tree(self, path: Path) -> None:
        """Within: one file is gone."""

        async def half() -> None:
            for file in [file for file in sorted(path.rglob("*")) if file.is_file()][:1]:
                file.unlink()

        await self.run(f"remove_tree {_role(path)}", lambda: self._inner.remove_tree(path), half)

    def lock(self, path: Path) -> RootLock:
        """See :class:`Storage`."""
        return self._inner.lock(path)


class _PointedFile:
    """A data file of :class:`PointedStorage`."""

    def __init__(self, storage: PointedStorage, inner: DataFile) -> None:
        self._storage = storage
        self._inner = inner

    @property
    def path(self) -> Path:
        return self._inner.path

    @property
    def mode(self) -> WriteMode:
        return self._inner.mode

    async def write(self, offset: int, data: memoryview) -> None:
        """Within: the first half, to a page."""
        await self._storage.run(
            f"write {_role(self.path)}",
            lambda: self._inner.write(offset, data),
            lambda: self._inner.write(offset, data[: len(data) // 2 // 4096 * 4096]),
        )

    async def sync(self) -> None:
        await self._storage.run(f"sync {_role(self.path)}", self._inner.sync)

    async def close(self) -> None:
        await self._inner.close()


def _role(path: Path) -> str:
    if path.parent.parent.name == ENGINE_DIR:
        return path.parent.name
    if path.parent.name == ENGINE_DIR:
        return f"all {path.name}"
    for pattern, role in _ROLES:
        if pattern.fullmatch(path.name):
            return role
    return _SAVE_ID.sub("ID", path.name)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process went on")
