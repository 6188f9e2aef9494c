"""Directory mode: what is written in which order, what a crash leaves, and how it is mended."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from gated_storage import TIMEOUT, Call, GatedStorage
from power_loss import Disk, Generation, NotDurableError, check_directory_mode, dropped

from aio_ckpt.commit.directory_mode import (
    begin_directory,
    commit_directory,
    recover_directory,
    recoverable_names,
    retire_directory,
)
from aio_ckpt.errors import ReadError, WriteError
from aio_ckpt.format.rank_manifest import encode_rank, encode_static
from aio_ckpt.format.root_manifest import FileEntry, RootManifest, encode_root
from aio_ckpt.runtime.portal import Executor

T = TypeVar("T")
META, ROOT = ".metadata", "aio_ckpt.json"
DURABILITY = ("sync", "write_file", "sync_dir", "rename", "exchange", "replace")


class Crashed(Exception):
    """Stands for the end of the process."""


class DyingStorage(GatedStorage):
    """Ends at the call before which no life is left."""

    lives: int | None = None

    async def run(self, call: Call, act: Callable[[], Awaitable[T]]) -> T | None:
        if self.lives == 0:
            raise Crashed
        if self.lives is not None:
            self.lives -= 1
        return await super().run(call, act)


@pytest.fixture
async def storage() -> AsyncIterator[DyingStorage]:
    executor = Executor("test", 2)
    yield DyingStorage(executor)
    assert executor.close(TIMEOUT)


def shown(calls: Sequence[Call]) -> list[str]:
    """The calls as text."""
    return [f"{call.name} {' -> '.join(part.name for part in (call.path, call.other) if part)}" for call in calls]


def rank_manifest(number: int) -> bytes:
    return encode_rank(
        save_id=f"s{number}",
        step=number,
        rank=0,
        world_size=1,
        file=FileEntry(f"__s{number}_0_0.distcp", 3, 0),
        tensors=encode_static([]),
        sums=b"",
        objects=[],
        skeleton=b"",
    )


def generation(number: int) -> Generation:
    metadata = b"metadata of save %d" % number
    manifest = RootManifest(
        format=(1, 0),
        save_id=f"s{number}",
        step=number,
        world_size=1,
        metadata=FileEntry(META, len(metadata), number),
        metadata_blake2b=hashlib.blake2b(metadata, digest_size=32).hexdigest(),
        ranks=(FileEntry(f"aio_ckpt.s{number}.0.bin", len(rank_manifest(number)), number),),
        written_by={},
        created_unix=1.0,
    )
    files = frozenset({f"__s{number}_0_0.distcp", f"aio_ckpt.s{number}.0.bin"})
    return Generation(metadata=metadata, root_manifest=encode_root(manifest), files=files)


async def save_into_directory(storage: GatedStorage, directory: Path, number: int) -> None:
    """What a face of directory mode does around the two calls of ``commit``."""
    made = generation(number)
    await begin_directory(storage, directory, save_id=f"s{number}")
    for name in sorted(made.files):
        await storage.write_file(directory / name, rank_manifest(number) if name.endswith(".bin") else b"abc")
    retired = await retire_directory(storage, directory, save_id=f"s{number}")
    await commit_directory(
        storage,
        directory,
        metadata=made.metadata,
        root_manifest=made.root_manifest,
        save_id=f"s{number}",
        retired=retired,
    )


async def log_of_directory_mode(storage: GatedStorage, directory: Path) -> list[Call]:
    await storage.make_dir(directory)
    for number in (1, 2):
        await save_into_directory(storage, directory, number)
    return list(storage.calls)


DIRECTORY_MODE = [
    "write_file aio_ckpt.pending-s2",
    "sync_dir mine",
    "write_file __s2_0_0.distcp",
    "write_file aio_ckpt.s2.0.bin",
    f"rename {META} -> {META}.replaced-s2",
    "sync_dir mine",
    f"rename {ROOT} -> {ROOT}.replaced-s2",
    "sync_dir mine",
    f"write_file {ROOT}.tmp-s2",
    f"replace {ROOT}.tmp-s2 -> {ROOT}",
    "sync_dir mine",
    f"write_file {META}.tmp-s2",
    f"replace {META}.tmp-s2 -> {META}",
    "sync_dir mine",
    "sync_dir top",
    "remove_file __s1_0_0.distcp",
    "remove_file aio_ckpt.s1.0.bin",
    f"remove_file {META}.replaced-s2",
    f"remove_file {ROOT}.replaced-s2",
    "remove_file aio_ckpt.pending-s2",
]
RETIRED = DIRECTORY_MODE.index(f"rename {META} -> {META}.replaced-s2")
ASIDE = DIRECTORY_MODE[RETIRED : RETIRED + 4]
"""What recovery rests on."""
MARK = (0, 1)
"""What tells the files of a save that died from foreign ones; no checkpoint rests on it."""


async def test_a_save_into_a_directory_puts_the_old_metadata_aside_before_anything_gets_its_name_and_its_own_last(
    storage: GatedStorage, tmp_path: Path
) -> None:
    directory = tmp_path / "top" / "mine"
    directory.parent.mkdir()
    calls = await log_of_directory_mode(storage, directory)
    assert shown(calls)[-len(DIRECTORY_MODE) :] == DIRECTORY_MODE
    check_directory_mode(calls, top=tmp_path, directory=directory, generations=[generation(1), generation(2)])


@pytest.mark.parametrize(
    "position",
    [
        n
        for n, line in enumerate(DIRECTORY_MODE)
        if line.startswith(DURABILITY) and n not in (*MARK, RETIRED + 2, RETIRED + 3)
    ],
)
async def test_without_any_one_fsync_or_rename_a_power_loss_breaks_a_directory(
    storage: GatedStorage, tmp_path: Path, position: int
) -> None:
    directory = tmp_path / "top" / "mine"
    directory.parent.mkdir()
    calls = await log_of_directory_mode(storage, directory)
    if DIRECTORY_MODE[position] == "sync_dir top":
        # Of the first save: only there is the directory itself new.
        index = shown(calls).index("sync_dir top")
    else:
        index = len(calls) - len(DIRECTORY_MODE) + position
    calls = [call for n, call in enumerate(calls) if n == index or shown([call]) != ["sync_dir top"] or n < index]
    with pytest.raises(NotDurableError):
        check_directory_mode(
            dropped(calls, index),
            top=tmp_path,
            directory=directory,
            generations=[generation(1), generation(2)],
        )


@pytest.mark.parametrize("name", [ROOT, "aio_ckpt.s1.0.bin"])
async def test_a_save_that_cannot_read_the_old_manifest_fails_and_the_next_one_leaves_no_old_file(
    tmp_path: Path, name: str
) -> None:
    class Failing(GatedStorage):
        is_failing = True

        async def run_read(self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
            if self.is_failing and call.matches("read_file", name):
                raise ReadError(errno.EIO, "the disk failed", name)
            return await super().run_read(call, act)

    directory, executor = tmp_path / "mine", Executor("test", 2)
    storage = Failing(executor)
    try:
        directory.mkdir()
        await save_into_directory(storage, directory, 1)
        with pytest.raises(ReadError, match="the disk failed"):
            await save_into_directory(storage, directory, 2)
        assert (directory / META).read_bytes() == generation(1).metadata
        storage.is_failing = False
        await recover_directory(storage, directory)
        await save_into_directory(storage, directory, 3)
    finally:
        assert executor.close(TIMEOUT)
    assert {path.name for path in directory.iterdir()} == {META, ROOT, *generation(3).files}


async def test_foreign_files_stay_in_a_callers_directory(storage: GatedStorage, tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    foreign = {"notes.txt": b"mine", "__9_0.distcp": b"somebody's", "aio_ckpt.notes": b"too"}
    for name, data in foreign.items():
        (directory / name).write_bytes(data)
    for number in (1, 2):
        await save_into_directory(storage, directory, number)
    assert {name: (directory / name).read_bytes() for name in foreign} == foreign
    made = generation(2)
    assert {path.name for path in directory.iterdir()} == {META, ROOT, *made.files, *foreign}
    assert (directory / META).read_bytes() == made.metadata


async def test_a_directory_whose_save_fails_halfway_is_no_checkpoint(storage: GatedStorage, tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    await save_into_directory(storage, directory, 1)
    storage.fail("write_file", f"{META}.tmp-*", WriteError(errno.ENOSPC, "full", "x"))
    with pytest.raises(WriteError, match="full"):
        await save_into_directory(storage, directory, 2)
    assert not (directory / META).exists()
    assert (directory / f"{META}.replaced-s2").read_bytes() == generation(1).metadata


# -- recovery -------------------------------------------------------------------------------------


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def check_whole(directory: Path, number: int) -> None:
    """The directory holds this save and nothing else."""
    made = generation(number)
    assert names_in(directory) == {META, ROOT, *made.files}
    assert (directory / META).read_bytes() == made.metadata
    assert (directory / ROOT).read_bytes() == made.root_manifest


@pytest.mark.parametrize("left_out", range(-1, len(ASIDE)))
async def test_before_the_old_manifest_is_replaced_a_power_loss_finds_both_parts_of_the_old_checkpoint_aside(
    storage: DyingStorage, tmp_path: Path, left_out: int
) -> None:
    directory = tmp_path / "top" / "mine"
    directory.parent.mkdir()
    calls = await log_of_directory_mode(storage, directory)
    start = len(calls) - len(DIRECTORY_MODE)
    first = start + RETIRED
    until = start + DIRECTORY_MODE.index(f"replace {ROOT}.tmp-s2 -> {ROOT}")
    disk = Disk(tmp_path)
    for call in calls[:until] if left_out < 0 else dropped(calls, first + left_out)[: until - 1]:
        disk.apply(call)
    held = disk.directory(directory)
    is_recoverable = all(held.is_certain(f"{name}.replaced-s2") for name in (META, ROOT))
    assert is_recoverable is (left_out not in (0, 2, 3))  # either fsync after the first rename covers it


@pytest.mark.parametrize("position", range(len(DIRECTORY_MODE)))
async def test_a_save_that_dies_before_any_of_its_calls_leaves_the_old_or_the_new_checkpoint(
    storage: DyingStorage, tmp_path: Path, position: int
) -> None:
    directory = tmp_path / "top" / "mine"
    directory.parent.mkdir()
    await storage.make_dir(directory)
    await save_into_directory(storage, directory, 1)
    storage.lives = position
    with pytest.raises(Crashed):
        await save_into_directory(storage, directory, 2)
    storage.lives = None
    committed = position > DIRECTORY_MODE.index(f"replace {META}.tmp-s2 -> {META}")
    assert await recover_directory(storage, directory) is (position > RETIRED and not committed)
    check_whole(directory, 2 if committed else 1)
    await save_into_directory(storage, directory, 3)
    check_whole(directory, 3)


@pytest.mark.parametrize("position", range(7))
async def test_a_recovery_that_dies_is_finished_by_the_next(
    storage: DyingStorage, tmp_path: Path, position: int
) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    await save_into_directory(storage, directory, 1)
    storage.lives = DIRECTORY_MODE.index(f"replace {META}.tmp-s2 -> {META}")
    with pytest.raises(Crashed):
        await save_into_directory(storage, directory, 2)
    storage.lives = None
    storage.lives = position
    with pytest.raises(Crashed):
        await recover_directory(storage, directory)
    storage.lives = None
    await recover_directory(storage, directory)
    check_whole(directory, 1)


@pytest.mark.parametrize("position", range(1, 12))
async def test_a_first_save_that_dies_leaves_nothing_but_foreign_files(
    storage: DyingStorage, tmp_path: Path, position: int
) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "__s10_0_0.distcp").touch()
    storage.lives = position
    with pytest.raises(Crashed):
        await save_into_directory(storage, tmp_path, 1)
    storage.lives = None
    is_committed = (tmp_path / META).exists()
    assert not await recover_directory(storage, tmp_path)
    own = {META, ROOT, *generation(1).files} if is_committed else set()
    assert names_in(tmp_path) == {"notes.txt", "__s10_0_0.distcp", *own}


@pytest.mark.parametrize("position", range(len(DIRECTORY_MODE)))
async def test_what_stands_is_found_without_a_recovery(storage: DyingStorage, tmp_path: Path, position: int) -> None:
    await save_into_directory(storage, tmp_path, 1)
    storage.lives = position
    with pytest.raises(Crashed):
        await save_into_directory(storage, tmp_path, 2)
    storage.lives = None
    before = names_in(tmp_path)
    metadata, manifest = await recoverable_names(storage, tmp_path)
    found = (tmp_path / metadata).read_bytes(), (tmp_path / manifest).read_bytes()
    assert names_in(tmp_path) == before
    assert found in [(made.metadata, made.root_manifest) for made in (generation(1), generation(2))]
    await recover_directory(storage, tmp_path)
    assert found == ((tmp_path / META).read_bytes(), (tmp_path / ROOT).read_bytes())


async def test_what_plain_dcp_wrote_comes_back_without_our_manifest(storage: DyingStorage, tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / META).write_bytes(b"of dcp")
    (directory / "__0_0.distcp").write_bytes(b"of dcp, too")
    storage.lives = DIRECTORY_MODE.index(f"replace {META}.tmp-s2 -> {META}") - 2
    with pytest.raises(Crashed):
        await save_into_directory(storage, directory, 2)
    storage.lives = None
    assert (directory / ROOT).exists()
    assert await recover_directory(storage, directory)
    assert names_in(directory) == {META, "__0_0.distcp"}
    assert (directory / META).read_bytes() == b"of dcp"


async def test_an_unreadable_old_manifest_comes_back_as_it_was_and_foreign_files_stay(
    storage: DyingStorage, tmp_path: Path
) -> None:
    directory = tmp_path / "mine"
    directory.mkdir()
    before = {META: b"old", ROOT: json.dumps({"not": "ours"}).encode(), "notes.tmp": b"mine", "__s1_0_0.distcp": b"?"}
    for name, data in before.items():
        (directory / name).write_bytes(data)
    storage.fail("write_file", f"{META}.tmp-*", WriteError(errno.ENOSPC, "full", "x"))
    with pytest.raises(WriteError, match="full"):
        await save_into_directory(storage, directory, 2)
    assert await recover_directory(storage, directory)
    assert {name: (directory / name).read_bytes() for name in names_in(directory)} == before


async def test_a_directory_that_is_not_there_or_holds_no_checkpoint_needs_no_recovery(
    storage: DyingStorage, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").touch()
    assert not await recover_directory(storage, tmp_path / "nowhere")
    assert not await recover_directory(storage, tmp_path)
    assert storage.calls == []
