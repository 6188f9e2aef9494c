"""Folders of checkpoints that a framework names by steps: durable, summed, and visible by one rename.

A folder is written as a draft beside its place. ``checksums.sfv`` in it holds the CRC32 of each file, in the common SFV
format: ``name crc32``, one file a line. ``cksfv`` and ``rhash -c`` read it, too. Its last line is a comment that holds
the number of the files, and the CRC32 of all lines before. So an emptied or shortened list does not pass.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from aio_ckpt.checkpoint.torch_file import check_torch_file, is_zip
from aio_ckpt.engine.file_pipeline import TEMPORARY
from aio_ckpt.errors import CorruptCheckpointError, ReadError, RootError, UnsupportedLeafError, WriteError
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.safetensors_file import LENGTH_BYTES, MAX_HEADER_BYTES, SUFFIX, parse_header
from aio_ckpt.storage.durability import sync_dir, sync_file
from aio_ckpt.storage.local import exchange_directories
from aio_ckpt.storage.os_errors import translate_errors

SUMS_FILE = "checksums.sfv"
_REPLACED = "-replaced"
"""End of the name that a replaced checkpoint has for a moment, beside the draft."""
_BLOCK_BYTES = 4 << 20
_ZIPPED = (".pt", ".pth", ".bin")
"""Ends of the names of files that ``torch.save`` writes."""
_ON_PURPOSE = f"if you changed the checkpoint on purpose, delete its {SUMS_FILE}"
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
_log = logging.getLogger("aio_ckpt")


def sync_files(folder: Path, *, but: frozenset[Path] = frozenset()) -> None:
    """Make the files below ``folder`` durable. Leaves out those in ``but``, and those that vanish meanwhile.

    Raises:
        WriteError: the disk failed.
    """
    for path in _files(folder):
        if path not in but:
            sync_path(path)


def write_checksums(folder: Path, known: Mapping[Path, int]) -> None:
    """Write the checksums of all files below ``folder``, and make them and all directories durable.

    Args:
        folder: the draft. Its files are durable.
        known: CRC32s that need not be computed, by path.

    Raises:
        ReadError, WriteError: the disk failed.
    """
    lines = [
        f"{path.relative_to(folder)} {known[path] if path in known else _crc32(path):08x}\n"
        for path in sorted(_files(folder))
        if path.name != SUMS_FILE
    ]
    text = "".join(lines).encode("utf-8", "surrogateescape")
    sums = folder / SUMS_FILE
    with translate_errors(WriteError, sums):
        sums.write_bytes(text + f"; {len(lines)} files, {crc32_of(text):08x}\n".encode())
    sync_path(sums)
    for place, _, _ in os.walk(folder, topdown=False):
        sync_path(Path(place))


def files_of_framework(folder: Path, marker: str, patterns: Collection[str]) -> Callable[[Path], bool] | None:
    """Return which paths below ``folder`` are files of the framework; None if all are.

    The checksums there name them; all others are the user's. All count as the framework's if the checksums are damaged,
    or if a checkpoint, which has a file ``marker``, has none. ``patterns`` match names at the top of the folder that
    are always the framework's, because a killed save leaves them.

    Raises:
        ReadError: the disk failed.
    """
    known = {SUMS_FILE}
    with translate_errors(ReadError, folder):
        if (folder / SUMS_FILE).is_file():
            try:
                known.update(str(path.relative_to(folder)) for path, _ in _sums(folder))
            except CorruptCheckpointError:
                return None
        elif (folder / marker).is_file():
            return None

    def is_of_framework(path: Path) -> bool:
        is_at_top = path.parent == Path()
        return str(path) in known or (is_at_top and any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns))

    return is_of_framework


def link_missing(source: Path, target: Path, *, but: Callable[[Path], bool], below: Path = Path()) -> None:
    """Link the files of ``source`` to the same names in ``target`` that are free, durably, except for those in ``but``.

    On a file system without hard links they are copied. ``below`` is the directory in both that is linked now.

    Raises:
        OSError: the disk failed.
    """
    for name in _names(source / below):
        path, place = source / below / name, target / below / name
        if but(below / name):
            continue
        if path.is_dir() and not path.is_symlink():
            if not place.exists():
                place.mkdir()
                shutil.copystat(path, place)
            link_missing(source, target, but=but, below=below / name)
        elif not os.path.lexists(place):
            try:
                _link(path, place)
            except FileExistsError:
                pass  # somebody has made it since
            except FileNotFoundError:
                if os.path.lexists(path):  # else its owner has removed or renamed it
                    raise
    sync_path(target / below)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:  # its owner has removed it
        return []


def _link(path: Path, place: Path) -> None:
    try:
        os.link(path, place, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(path, place, follow_symlinks=False)
        sync_path(place)


def publish(draft: Path, final: Path, marker: str, patterns: Collection[str]) -> None:
    """Rename a durable draft to ``final``, and make the rename durable. What was there is deleted afterwards.

    The user's own files there stay, unless the draft has one of the name: see :func:`files_of_framework`. No checksum
    covers them. If this ends between two renames, :func:`restore_replaced` brings back what was there.

    Raises:
        WriteError: the disk failed.
    """
    replaced = draft.with_name(f"{draft.name}{_REPLACED}")
    but = files_of_framework(final, marker, patterns) if final.exists() else None
    with translate_errors(WriteError, final):
        if but is not None:
            link_missing(final, draft, but=but)
        if final.exists():
            try:
                exchange_directories(draft, final)
                replaced = draft
            except RootError:  # NFS: the older checkpoint is hidden for a moment
                final.rename(replaced)
                draft.rename(final)
        else:
            draft.rename(final)
        if but is not None:
            link_missing(replaced, final, but=but)  # what was made in the meantime
    sync_path(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced(drafts: Path, folder: Path) -> None:
    """Bring back each checkpoint of ``folder`` that is gone because :func:`publish` ended between two renames.

    Raises:
        WriteError: the disk failed.
    """
    for path in drafts.glob(f"*{_REPLACED}"):
        final = folder / path.name.removesuffix(_REPLACED)
        if not final.exists():
            with translate_errors(WriteError, final):
                path.rename(final)
            sync_path(folder)


def newest_verified(folder: Path, prefix: str, marker: str) -> Path | None:
    """Return the newest checkpoint that verifies, and warn of newer ones; None if there is no checkpoint.

    Args:
        folder: directory of the checkpoints.
        prefix: begin of their names, before ``-`` and the step.
        marker: name of a JSON file without which a checkpoint is incomplete.

    Raises:
        CorruptCheckpointError: there are checkpoints, and none verifies.
        ReadError: the disk failed, which tells nothing of the checkpoint that was read.
    """
    pattern = re.compile(rf"{re.escape(prefix)}-(\d+)")
    names = os.listdir(folder) if folder.is_dir() else []
    steps = {int(found[1]): folder / name for name in names if (found := pattern.fullmatch(name))}
    failed = []
    for step in sorted(steps, reverse=True):
        try:
            check(steps[step], marker)
        except CorruptCheckpointError as error:
            _log.warning("%s is passed over: %s", steps[step], error)
            failed.append(f"{steps[step].name}: {error}")
        else:
            return steps[step]
    if failed:
        raise CorruptCheckpointError(f"no checkpoint in {folder} verifies: {'; '.join(failed)}")
    return None


def check(folder: Path, marker: str) -> None:
    """Check a checkpoint: each file against its checksum. Without checksums, what its files themselves tell.

    Without ``checksums.sfv``, torch.save files hold checksums of their own. Of a safetensors file, only the length is
    known.

    Raises:
        CorruptCheckpointError: a file is missing or damaged; the message names it.
        ReadError: the disk failed.
    """
    with translate_errors(ReadError, folder):
        try:
            json.loads((folder / marker).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise CorruptCheckpointError(f"{folder} is incomplete: it has no {marker}") from None
        except ValueError as error:
            raise CorruptCheckpointError(f"{folder / marker} is damaged: {error}") from error
        if (folder / SUMS_FILE).is_file():
            for path, crc32 in _sums(folder):
                _check_sum(path, crc32)
        else:
            for path in _files(folder):
                _check_by_itself(path)


def _sums(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield path and CRC32 of each file that the checksums name. Files that they do not name are the user's."""
    sums = folder / SUMS_FILE
    found = re.fullmatch(rb"(.*)(?<![^\n]); (\d+) files, ([0-9a-f]{8})\n", sums.read_bytes(), re.DOTALL)
    lines = found[1].decode("utf-8", "surrogateescape").split("\n")[:-1] if found else []
    if found is None or int(found[2]) != len(lines) or int(found[3], 16) != crc32_of(found[1]):
        raise CorruptCheckpointError(f"{sums} is damaged: it does not end in the count and the CRC32 of its own lines")
    for line in lines:
        name, _, crc32 = line.rpartition(" ")
        yield folder / name, int(crc32, 16)


def _check_sum(path: Path, crc32: int) -> None:
    if not path.is_file():
        raise CorruptCheckpointError(f"{path} is missing; {_ON_PURPOSE}")
    if (found := _crc32(path)) != crc32:
        damage = f"its CRC32 is {found:08x}, {crc32:08x} was written"
        raise CorruptCheckpointError(f"{path} is damaged: {damage}; {_ON_PURPOSE}")


def _check_by_itself(path: Path) -> None:
    if path.suffix == SUFFIX:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = file.read(min(length, MAX_HEADER_BYTES))
        try:
            parse_header(header, path.stat().st_size)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{path} is damaged: {error}") from error
    elif path.suffix in _ZIPPED and (path.name != "training_args.bin" or is_zip(path)):
        with contextlib.suppress(UnsupportedLeafError):  # a zip of another program, such as torch.jit.save
            check_torch_file(path)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below ``folder``, without those that an engine has not committed."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(TEMPORARY)]
        yield from (Path(place, name) for name in names)


def _crc32(path: Path) -> int:
    crc32 = 0
    with translate_errors(ReadError, path), path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            crc32 = crc32_of(block, crc32)
    return int(crc32)


def sync_path(path: Path) -> None:
    """Make a file, or the names in a directory, durable. If it has vanished, do nothing.

    Raises:
        WriteError: the disk failed.
    """
    try:
        with translate_errors(WriteError, path):
            if path.is_dir():
                sync_dir(path)
                return
            with path.open("rb", buffering=0) as file:
                sync_file(file.fileno())
    except WriteError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
