"""Replacement in place as a contender: its functions are driven as ``dcp.Writer`` does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from aio_ckpt.commit.in_place import begin_save, commit_save, remove_leftovers
from aio_ckpt.format.checkpoint_files import (
    METADATA_FILE,
    TRAILER_BYTES,
    new_metadata_name,
    root_manifest_name,
    trailer,
)
from aio_ckpt.format.rank_manifest import encode_rank, encode_static
from aio_ckpt.format.root_manifest import FileEntry, RootManifest, encode_root
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage
from tests.campaigns.crash.contenders import TIMEOUT_SECS, BrokenError, Contender, OnCall
from tests.campaigns.crash.contents import tensors_of
from tests.campaigns.crash.points import KillPoint, PointedStorage

__all__ = ["DIRECTORY"]

_FOREIGN = "notes.txt"


def _files_of(number: int, save_id: str) -> dict[str, bytes]:
    """All files of a save by name: data, rank manifest, root manifest, ``.metadata``."""
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors_of(number).values())
    data = data.ljust(-(-len(data) // 4096) * 4096, b"\0")
    rank = encode_rank(
        save_id=save_id,
        step=number,
        rank=0,
        world_size=1,
        file=FileEntry(f"__{save_id}_0_0.distcp", len(data), 0),
        tensors=encode_static([]),
        sums=b"",
        objects=[],
        skeleton=b"",
    )
    metadata = f"{number} {save_id}".encode() + trailer(save_id)
    root = RootManifest(
        format=(1, 0),
        save_id=save_id,
        step=number,
        world_size=1,
        metadata=FileEntry(METADATA_FILE, len(metadata), number),
        ranks=(FileEntry(f"aio_ckpt.{save_id}.0.bin", len(rank), number),),
        written_by={},
        created_unix=1.0,
    )
    return {
        f"__{save_id}_0_0.distcp": data,
        f"aio_ckpt.{save_id}.0.bin": rank,
        root_manifest_name(save_id): encode_root(root),
        METADATA_FILE: metadata,
    }


async def _save(storage: Storage, directory: Path, number: int) -> None:
    save_id = f"s{number}x{os.getpid()}"  # never that of an earlier try
    files = _files_of(number, save_id)
    metadata = files.pop(METADATA_FILE)
    await begin_save(storage, directory, save_id)
    (data_name, data), (rank_name, rank), (root_name, root) = files.items()
    file = await storage.create_data_file(directory / data_name, len(data))
    try:
        half = len(data) // 2 // 4096 * 4096
        await file.write(0, memoryview(data)[:half])
        await file.write(half, memoryview(data)[half:])
        await file.sync()
    finally:
        await file.close()
    await storage.write_file(directory / rank_name, rank)
    await storage.write_file(directory / root_name, root)
    await storage.write_file(directory / new_metadata_name(save_id), metadata)
    await commit_save(storage, directory, save_id)


@contextmanager
def _storage(point: KillPoint | None, on_call: OnCall | None) -> Iterator[Storage]:
    executor = Executor("crash", 4)
    try:
        yield PointedStorage(Storage(executor), point, on_call)
    finally:
        executor.close(TIMEOUT_SECS)


@contextmanager
def _saving(root: Path, point: KillPoint | None, on_call: OnCall | None) -> Iterator[Callable[[int], None]]:
    """One directory, every save into it; a file of somebody else's lies in it, too."""
    root.mkdir(exist_ok=True)
    if not (root / _FOREIGN).exists():
        (root / _FOREIGN).write_bytes(b"mine")
    with _storage(None, None) as storage:
        asyncio.run(remove_leftovers(storage, root))
    with _storage(point, on_call) as storage:
        yield lambda number: asyncio.run(_save(storage, root, number))


def _newest(root: Path) -> int | None:
    """After recovery the directory holds one checkpoint, all of it, and nothing else of ours."""
    with _storage(None, None) as storage:
        asyncio.run(remove_leftovers(storage, root))
    if not (root / METADATA_FILE).exists():
        return None
    text, _, save_id = (root / METADATA_FILE).read_bytes()[:-TRAILER_BYTES].decode().partition(" ")
    number = int(text)
    expected = _files_of(number, save_id)
    for name, data in expected.items():
        if (root / name).read_bytes() != data:
            raise BrokenError(f"{name} is not what save {number} wrote")
    left = sorted({path.name for path in root.iterdir()} - {*expected, _FOREIGN})
    if left:
        raise BrokenError(f"leftovers stay: {left}")
    return number


def _saves_on(root: Path, number: int) -> None:
    with _saving(root, None, None) as save:
        save(number)
    if _newest(root) != number:
        raise BrokenError(f"save {number} is not there after it was saved")


DIRECTORY = Contender(name="aio_ckpt, directory mode", saving=_saving, newest=_newest, saves_on=_saves_on)
