"""Directories of checkpoints in an object store: begun, moved, replaced and removed without copying their data.

A store has no directories, and cannot rename. But ``.metadata`` alone makes a directory a checkpoint, and the names of
all other files hold the id of their save. So a directory is moved by its ``.metadata``: it gets the new name, with a
*record* of the place where the files of the save stay. A save that is being written is such a record, too, without
``.metadata``. All that is ever deleted are files of the saves in a record, and never those of the committed save.

Every function blocks, in a thread of the engine. Only the holder of the root's claim calls them.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec

from aio_ckpt.errors import CorruptCheckpointError, FormatVersionError
from aio_ckpt.format.checkpoint_files import METADATA_FILE, root_manifest_name, save_of_file, save_of_metadata
from aio_ckpt.format.root_manifest import decode_root
from aio_ckpt.format.root_names import ABANDONED_DIR, CORRUPT_DIR, ENGINE_DIR
from aio_ckpt.storage.object_errors import DoubtfulError, code_of, text_of

RECORD_FILE = ".metadata.files"
"""Name of a record in the directory whose files lie elsewhere. No file of a caller has such a name."""
_log = logging.getLogger("aio_ckpt")
_CERTAIN = frozenset({errno.EEXIST, errno.ENOENT, errno.EACCES, errno.ESTALE})
"""Codes of errors after which it is certain that nothing was put."""


class DirectoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Files that belong to a directory and lie in another one."""

    place: str
    """Key of the directory in which they lie."""
    saves: tuple[str, ...] | None
    """Ids of their saves; None: all files in ``place``, as a checkpoint of another program has no ids."""
    files: tuple[str, ...] = ()
    """Names of the files of the caller, which hold no id."""


_RECORDS = msgspec.json.Decoder(DirectoryRecord)


class Bucket:
    """Blocking calls of a store, by keys. They raise errors of obstore and of the system."""

    def __init__(self, store: Any) -> None:
        """``store`` is any store of obstore."""
        self._store = store

    def get(self, key: str) -> bytes | None:
        """Return an object; None if it does not exist."""
        data, _ = self.get_version(key)
        return data

    def get_version(self, key: str) -> tuple[bytes | None, Any]:
        """Return an object and its version, for :meth:`put`; None and None if it does not exist."""
        import obstore

        try:
            found = obstore.get(self._store, key)
            version = {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name] is not None}
            return bytes(found.bytes()), version
        except FileNotFoundError:
            return None, None

    def create(self, key: str, data: bytes) -> None:
        """Put an object that does not exist. One that holds ``data`` is that of a call whose answer was lost.

        Empty ones tell nothing.

        Raises:
            FileExistsError: another object has this key.
        """
        try:
            self.create_new(key, data)
        except FileExistsError:
            if not data or self.get(key) != data:
                raise

    def create_new(self, key: str, data: bytes) -> None:
        """Put an object that does not exist. Of several callers with the same ``data``, one gets it.

        Raises:
            FileExistsError: an object has this key, perhaps that of this very call, whose answer was lost.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            obstore.put(self._store, key, data, mode="create")
        except AlreadyExistsError:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None

    def put(self, key: str, data: bytes, version: Any = None) -> None:
        """Put an object, in the place of another one; if a version is given, of that one.

        Raises:
            PreconditionError: the object has another version by now.
        """
        import obstore

        obstore.put(self._store, key, data, mode=version or "overwrite")

    def delete(self, *keys: str) -> None:
        """Delete objects. Those that do not exist are passed by: some stores raise an error then, and stop there."""
        import obstore

        try:
            if keys:
                obstore.delete(self._store, keys)
        except FileNotFoundError:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._store, key)

    def lengths(self, place: str) -> dict[str, int]:
        """Return the length in bytes of each object below ``place``, at whatever depth, by its name below it."""
        import obstore

        listed = (each for batch in obstore.list(self._store, place) for each in batch)
        return {each["path"].removeprefix(f"{place}/"): each["size"] for each in listed}


def begin(bucket: Bucket, pending: str, place: str, save_id: str) -> None:
    """Record that the files of a save, which is called ``pending`` until its commit, are put into ``place``."""
    bucket.create(f"{pending}/{RECORD_FILE}", msgspec.json.encode(DirectoryRecord(place=place, saves=(save_id,))))


def name_files(bucket: Bucket, pending: str, files: Sequence[str]) -> None:
    """Record the names of the caller's files of a save, before they are put."""
    record = _record(bucket, pending)
    assert record is not None, pending
    _put_record(bucket, pending, msgspec.structs.replace(record, files=tuple(files)))


def move(bucket: Bucket, source: str, target: str) -> None:
    """Move a directory, or a single object. ``.metadata`` of the target is put in one step, and last.

    Raises:
        FileExistsError, FileNotFoundError: the target exists, or the source does not.
        DoubtfulError: the target may have become a checkpoint, because the answer was lost.
    """
    record, metadata = _record(bucket, source), bucket.get(f"{source}/{METADATA_FILE}")
    if record is not None and record.place == target:
        if metadata is None:
            raise FileNotFoundError(errno.ENOENT, f"{METADATA_FILE} of the directory is gone")
        _put_surely(bucket.create, bucket, f"{target}/{METADATA_FILE}", metadata)
        with _forgiving(source):
            bucket.delete(f"{source}/{METADATA_FILE}")
            bucket.delete(f"{source}/{RECORD_FILE}")
    elif record is not None or metadata is not None:
        bucket.create(f"{target}/{RECORD_FILE}", msgspec.json.encode(record or _owned(bucket, source, metadata or b"")))
        if metadata is not None:
            bucket.create(f"{target}/{METADATA_FILE}", metadata)
        bucket.delete(f"{source}/{METADATA_FILE}")
        bucket.delete(f"{source}/{RECORD_FILE}")
    else:
        data = bucket.get(source)
        if data is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        bucket.create_new(target, data)
        bucket.delete(source)


@contextlib.contextmanager
def _forgiving(source: str) -> Iterator[None]:
    """Log an error of the block: the checkpoint is committed, and the next writer deletes what is left."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the save has succeeded
        _log.warning("%s stays, and the next writer deletes it: %s", source, text_of(error))


def supersede(bucket: Bucket, pending: str, place: str) -> None:
    """Make the save that is called ``pending`` the checkpoint of ``place``, which is a checkpoint already, in one step.

    Afterwards, :func:`remove_tree` of ``pending`` removes the files of the old checkpoint.

    Raises:
        FileNotFoundError: the save has no ``.metadata``.
        PreconditionError: another writer has replaced the checkpoint meanwhile.
        DoubtfulError: the new checkpoint may be in place, because the answer was lost.
    """
    record, metadata = _record(bucket, pending), bucket.get(f"{pending}/{METADATA_FILE}")
    old, version = bucket.get_version(f"{place}/{METADATA_FILE}")
    if record is None or metadata is None:
        raise FileNotFoundError(errno.ENOENT, f"{METADATA_FILE} of the save is gone")
    if old is not None and old != metadata:
        replaced = _owned(bucket, place, old)
        saves = (*(record.saves or ()), *(replaced.saves or ()))
        _put_record(bucket, pending, DirectoryRecord(place=place, saves=saves, files=(*record.files, *replaced.files)))
    put = bucket.create if old is None else functools.partial(bucket.put, version=version)
    _put_surely(put, bucket, f"{place}/{METADATA_FILE}", metadata)


def replace(bucket: Bucket, source: str, target: str) -> None:
    """Move one object, in the place of another one if there is one, in one step.

    Raises:
        FileNotFoundError: there is no such object.
        DoubtfulError: the target may hold the new content, because the answer was lost.
    """
    data = bucket.get(source)
    if data is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    _put_surely(bucket.put, bucket, target, data)
    bucket.delete(source)


def remove_tree(bucket: Bucket, directory: str) -> None:
    """Remove all objects below ``directory``, and those of its record; or the object of this key, if there is one.

    A checkpoint stops being one first, and a record goes last, so that the next call goes on after a crash.
    """
    record, names = _record(bucket, directory), bucket.lengths(directory)
    if METADATA_FILE in names:
        bucket.delete(f"{directory}/{METADATA_FILE}")
    if record is not None:
        aside = _saves_aside(bucket, directory, record.place)
        bucket.delete(*(f"{record.place}/{name}" for name in _removable(bucket, record, aside)))
    bucket.delete(*(f"{directory}/{name}" for name in names if name not in (METADATA_FILE, RECORD_FILE)))
    if RECORD_FILE in names:
        bucket.delete(f"{directory}/{RECORD_FILE}")
    if not names:
        bucket.delete(directory)


def _removable(bucket: Bucket, record: DirectoryRecord, aside: Collection[str]) -> Iterator[str]:
    """Return the names of the files of a record that nothing else needs. ``aside``: saves of what was set aside."""
    names = bucket.lengths(record.place)
    metadata = bucket.get(f"{record.place}/{METADATA_FILE}")
    if record.saves is None:  # the checkpoint of another program, whose files hold no id
        yield from (name for name in names if metadata is None and save_of_file(name) is None)
        return
    committed = None if metadata is None else save_of_metadata(metadata)
    kept = () if metadata is None else _files_of_caller(bucket, record.place, committed)
    for name in names:
        save_id = save_of_file(name)
        if (save_id in record.saves and save_id not in (committed, *aside)) or (
            name in record.files and name not in kept
        ):
            yield name


def _saves_aside(bucket: Bucket, directory: str, place: str) -> set[str]:
    """Return the ids of the saves whose files in ``place`` belong to what the engine of ``directory`` has set aside."""
    root, found = directory.partition(f"/{ENGINE_DIR}/")[0], set[str]()
    for name in bucket.lengths(f"{root}/{ENGINE_DIR}"):
        holder, _, last = f"{ENGINE_DIR}/{name}".rpartition("/")
        if last == RECORD_FILE and holder.startswith((ABANDONED_DIR, CORRUPT_DIR)):
            record = _record(bucket, f"{root}/{holder}")
            if record is not None and record.place == place:
                found.update(record.saves or ())
    return found


def _owned(bucket: Bucket, directory: str, metadata: bytes) -> DirectoryRecord:
    """Return the record of a checkpoint that is moved away from ``directory``."""
    try:
        save_id = save_of_metadata(metadata)
    except CorruptCheckpointError:  # its end is damaged: nothing tells its files, and they stay
        return DirectoryRecord(place=directory, saves=())
    if save_id is None:
        return DirectoryRecord(place=directory, saves=None)
    return DirectoryRecord(place=directory, saves=(save_id,), files=_files_of_caller(bucket, directory, save_id))


def _files_of_caller(bucket: Bucket, directory: str, save_id: str | None) -> tuple[str, ...]:
    """Return the names of the caller's files of a checkpoint; none if its manifest is missing or damaged."""
    if save_id is None:
        return ()
    name = root_manifest_name(save_id)
    try:
        data = bucket.get(f"{directory}/{name}")
        return () if data is None else tuple(decode_root(data, name=name).files)
    except (CorruptCheckpointError, FormatVersionError):
        return ()


def _put_surely(put: Callable[[str, bytes], None], bucket: Bucket, key: str, data: bytes) -> None:
    """Put an object by ``put``. If that fails, reading it tells whether it is there in spite of the error.

    Raises:
        DoubtfulError: it is not there, or cannot be read, and the store may still do what it was asked.
    """
    try:
        put(key, data)
    except Exception as error:
        with contextlib.suppress(Exception):
            if bucket.get(key) == data:
                return
        code = code_of(error)
        if code in _CERTAIN:
            raise
        text = f"{text_of(error)}. The store may still do it: what was saved may become visible, whole"
        raise DoubtfulError(code or errno.EIO, text) from error


def _record(bucket: Bucket, directory: str) -> DirectoryRecord | None:
    data = bucket.get(f"{directory}/{RECORD_FILE}")
    try:
        return None if data is None else _RECORDS.decode(data)
    except msgspec.DecodeError:
        return None


def _put_record(bucket: Bucket, directory: str, record: DirectoryRecord) -> None:
    bucket.put(f"{directory}/{RECORD_FILE}", msgspec.json.encode(record))
