"""Named kill points: every call of the storage that changes something, before, within and after."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

from aio_ckpt.commit.in_place import PENDING
from aio_ckpt.format.root_names import CLAIM_FILE, ENGINE_DIR
from aio_ckpt.storage.data_file import DataFile
from aio_ckpt.storage.local import Storage
from tests.support.forwarding_storage import Call, ForwardingDataFile, ForwardingStorage
from tests.support.saved_files import without_save_id

__all__ = ["KillPoint", "PointedStorage", "When"]

T = TypeVar("T")
When = Literal["before", "within", "after"]
_ROLES = (
    (re.compile(r"step_\d+"), "step"),
    (re.compile(r"\d+|rehearsal"), "parent"),
    (re.compile(r"best-\d+"), "checkpoint"),
    (re.compile(r"\.aio_ckpt-file-.*"), "temporary"),
)
_CLAIM = Path(CLAIM_FILE).name


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


class PointedStorage(ForwardingStorage):
    """A real storage that tells the names of its calls and kills the process at one of them.

    ``on_call`` hears of each call as it begins, with the ``When`` that can be asked for there.
    """

    def __init__(
        self, inner: Storage, point: KillPoint | None, on_call: Callable[[str, tuple[When, ...]], None] | None = None
    ) -> None:
        super().__init__(inner)
        self._point = point
        self._on_call = on_call
        self._passed = 0
        self._last_move = ""

    async def run(self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """Do ``act``; die before or after it, or after half of it, if this call is the point."""
        # A touch is a sign of life, no step of a commit. A root and what the engine has in it are made once.
        is_of_root = call.path.name == "root" or call.path.parent.name == ENGINE_DIR
        if call.name == "touch" or (call.name == "make_dirs" and is_of_root) or call.path.name == _CLAIM:
            return await act()
        name = self._name_of(call)
        result = await self.pass_point(name, act)
        if call.other is not None and call.name != "clone":
            # One name for both moves to the trash: retention's may come between a commit's own calls.
            self._last_move = "a move to the trash" if _role(call.other) == "trash" else name
        return result

    async def pass_point(
        self, name: str, act: Callable[[], Awaitable[T]], half: Callable[[], Awaitable[object]] | None = None
    ) -> T:
        """:meth:`run` of the call ``name``, of which ``half`` can be done."""
        if self._on_call is not None:
            self._on_call(name, ("before", "after") if half is None else ("before", "within", "after"))
        is_here = self._is_here(name)
        if is_here and self._point is not None and self._point.when != "after":
            if self._point.when == "within" and half is not None:
                await half()
            _die()
        result = await act()
        if is_here:
            _die()
        return result

    def _name_of(self, call: Call) -> str:
        name = f"{call.name} {_role(call.path)}"
        if call.other is not None:
            return f"{name} -> {_role(call.other)}"
        # The root is synced after a commit and after a step went to the trash, a directory after its mark, too.
        is_synced_after = call.name == "sync_dir" and self._last_move and _role(call.path) not in ("pending", "step")
        return f"{name} after {self._last_move}" if is_synced_after else name

    def _is_here(self, call: str) -> bool:
        if self._point is None or call != self._point.call:
            return False
        self._passed += 1
        return self._passed > self._point.skip

    async def create_data_file(self, path: Path, nbytes: int) -> DataFile:
        """See :class:`Storage`."""
        made = await self.run(Call("create_data_file", path), lambda: self._inner.create_data_file(path, nbytes))
        return _PointedFile(self, made)

    async def write_file(self, path: Path, *parts: bytes) -> None:
        """Within: half of the bytes, no fsync."""

        async def half() -> None:
            data = b"".join(parts)
            path.write_bytes(data[: len(data) // 2])

        if path.name == _CLAIM:
            await self._inner.write_file(path, *parts)
            return
        await self.pass_point(f"write_file {_role(path)}", lambda: self._inner.write_file(path, *parts), half)
        if path.name.startswith(PENDING):
            self._last_move = "the mark"

    async def remove_tree(self, path: Path) -> None:
        """Within: one file is gone."""

        async def half() -> None:
            for file in [file for file in sorted(path.rglob("*")) if file.is_file()][:1]:
                file.unlink()

        await self.pass_point(f"remove_tree {_role(path)}", lambda: self._inner.remove_tree(path), half)


class _PointedFile(ForwardingDataFile):
    """A data file of :class:`PointedStorage`."""

    def __init__(self, storage: PointedStorage, inner: DataFile) -> None:
        super().__init__(storage, inner)
        self._points = storage

    async def write(self, offset: int, data: memoryview) -> None:
        """Within: the first half, to a page."""
        await self._points.pass_point(
            f"write {_role(self.path)}",
            lambda: self._inner.write(offset, data),
            lambda: self._inner.write(offset, data[: len(data) // 2 // 4096 * 4096]),
        )


def _role(path: Path) -> str:
    if path.parent.parent.name == ENGINE_DIR:
        return path.parent.name
    if path.parent.name == ENGINE_DIR:
        return f"all {path.name}"
    for pattern, role in _ROLES:
        if pattern.fullmatch(path.name):
            return role
    return without_save_id(path.name).replace("*", "ID")


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process went on")
