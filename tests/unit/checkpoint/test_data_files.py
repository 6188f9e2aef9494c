"""Data files of a checkpoint: a bounded number is open, and descriptors that run out are taken from idle ones."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aio_ckpt.checkpoint import data_files
from aio_ckpt.checkpoint.data_files import Files, files_to_keep
from aio_ckpt.errors import MismatchError, ReadError
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.data_file import ReadFile
from aio_ckpt.storage.direct_io import PageCache
from aio_ckpt.storage.local import Storage

NAMES = [f"{number}.distcp" for number in range(6)]


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    made = Executor("test", 2)
    yield made
    made.close(10)


class Descriptors(Storage):
    """Gives ``most`` open files and refuses a further one, as the system does; ``opens`` counts them by name."""

    def __init__(self, executor: Executor, most: int) -> None:
        super().__init__(executor, "off")
        self.most = most
        self.opens: list[str] = []
        self.files: list[ReadFile] = []

    @property
    def open_files(self) -> int:
        return sum(not file._files._is_closed for file in self.files)  # type: ignore[attr-defined]

    async def open_data_file(self, path: Path, *, page_cache: PageCache = "pass") -> ReadFile:
        if self.open_files >= self.most:
            raise ReadError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        file = await super().open_data_file(path, page_cache=page_cache)
        self.opens.append(path.name)
        self.files.append(file)
        return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


async def content(files: Files, name: str) -> bytes:
    buffer = bytearray(len(name))
    async with files.use(name) as file:
        await file.read_into(0, memoryview(buffer))
    return bytes(buffer)


@pytest.mark.parametrize(("limit", "kept"), [(1 << 20, 64), (1024, 64), (256, 32), (128, 16), (7, 0)])
def test_the_kept_files_leave_most_descriptors_to_the_process(limit: int, kept: int) -> None:
    assert files_to_keep(limit) == kept


async def test_a_kept_file_is_opened_once_and_others_for_each_use(
    executor: Executor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "files_to_keep", lambda _: 2)
    storage = Descriptors(executor, 100)
    async with Files(storage, folder, page_cache="pass") as files:
        for _ in range(2):
            for name in NAMES[:3]:
                assert await content(files, name) == name.encode()
        assert storage.opens == [*NAMES[:3], NAMES[2]]
        assert storage.open_files == 2
    assert storage.open_files == 0


async def test_descriptors_that_run_out_are_taken_from_files_that_no_task_uses(
    executor: Executor, folder: Path
) -> None:
    storage = Descriptors(executor, 3)
    async with Files(storage, folder, page_cache="pass") as files:
        async with files.use(NAMES[0]) as used:
            for name in NAMES:
                assert await content(files, name) == name.encode()
            assert await used.read_into(0, memoryview(bytearray(4))) == 4, "a file in use stays open"
        assert storage.open_files <= 3
    assert storage.open_files == 0


async def test_tasks_that_open_one_file_at_a_time_leave_one_of_it_open(executor: Executor, folder: Path) -> None:
    storage = Descriptors(executor, 100)
    async with Files(storage, folder, page_cache="pass") as files:
        found = await asyncio.gather(*(content(files, NAMES[0]) for _ in range(3)))
        assert found == [NAMES[0].encode()] * 3
        assert len(storage.opens) > 1
        assert storage.open_files == 1
    assert storage.open_files == 0


async def test_descriptors_that_are_all_in_use_are_an_error_and_no_damage(executor: Executor, folder: Path) -> None:
    storage = Descriptors(executor, 1)
    async with Files(storage, folder, page_cache="pass") as files, files.use(NAMES[0]):
        with pytest.raises(ReadError) as caught:
            await content(files, NAMES[1])
        assert not isinstance(caught.value, MismatchError)
    assert storage.open_files == 0
