"""The root manifest to and from bytes, and what all manifests have in common. Pure, and without torch and numpy.

The root manifest is one JSON file a checkpoint: length and CRC32 of ``.metadata`` and of each rank's manifest, and
a self-checksum. Every number that comes from disk is checked before it is returned.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from aio_ckpt.errors import CorruptCheckpointError, FormatVersionError, MismatchError
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.constants import MAX_BYTES, Size

FORMAT_MAJOR = 1
FORMAT_MINOR = 0
FROZEN_FORMAT = (2, 0)
"""Version of a checkpoint with a frozen file, of which a reader of 1.0 knows nothing. The newest that is known here."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
Crc: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
_FileName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^(?!\.{1,2}\Z)[^/\x00]+\Z", max_length=255)]


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """Name, length and checksum that a file of the checkpoint must have."""

    name: _FileName
    """One component of a path."""
    nbytes: Size
    crc32: Crc
    """CRC32 of the whole file."""

    def vouches_for(self, data: bytes) -> bool:
        """Return whether ``data`` is the whole file as it was written, by its length and CRC32."""
        return len(data) == self.nbytes and crc32_of(data) == self.crc32


# -- manifests of any kind --------------------------------------------------------------------------


class FormatHead(msgspec.Struct, frozen=True, kw_only=True):
    """First field of every manifest."""

    format: tuple[Size, Size]
    """(major, minor) of the writer."""


S = TypeVar("S", bound=FormatHead)
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors of decoders for bytes that are no manifest."""


def decode_checked(
    data: bytes, decode: Callable[[bytes], S], decode_head: Callable[[bytes], FormatHead], *, name: str
) -> S:
    """Return a decoded manifest. ``name`` is the file, for messages.

    Raises:
        FormatVersionError: written by a newer major version of the format.
        CorruptCheckpointError: no manifest of this format.
    """
    try:
        found = decode(data)
    except UNREADABLE as exc:
        head = FormatHead(format=(FORMAT_MAJOR, FORMAT_MINOR))
        with contextlib.suppress(*UNREADABLE):
            head = decode_head(data)
        _check_format(head.format, name)  # first: a newer major version may have changed every other field
        raise CorruptCheckpointError(f"{name}: no manifest of format {FORMAT_MAJOR}: {exc}") from exc
    _check_format(found.format, name)
    return found


def _check_format(found: tuple[int, int], name: str) -> None:
    text = f"{found[0]}.{found[1]}"
    if found[0] > FROZEN_FORMAT[0]:
        known = f"{FROZEN_FORMAT[0]}.{FROZEN_FORMAT[1]}"
        raise FormatVersionError(f"{name}: format {text}, known here is {known}: read it with a newer aio_ckpt")
    if found[0] < FORMAT_MAJOR:
        raise CorruptCheckpointError(f"{name}: format {text} never existed")


class _FrozenFile(msgspec.Struct, frozen=True):
    file: FileEntry


class _DataFiles(FormatHead, frozen=True, kw_only=True):
    file: FileEntry | None
    frozen: _FrozenFile | None = None


_DATA_FILES = msgspec.msgpack.Decoder(_DataFiles).decode
RANK_HEADS = msgspec.msgpack.Decoder(FormatHead).decode


def data_files_of(data: bytes, *, name: str) -> list[FileEntry]:
    """Return the data files that a rank's manifest names; none if the rank stored nothing. Decodes no tensor.

    Raises:
        FormatVersionError, CorruptCheckpointError: see :func:`decode_checked`.
    """
    found = decode_checked(data, _DATA_FILES, RANK_HEADS, name=name)
    files = [] if found.file is None else [found.file]
    return files if found.frozen is None else [*files, found.frozen.file]


# -- the root manifest ------------------------------------------------------------------------------


class RootManifest(FormatHead, frozen=True, kw_only=True, omit_defaults=True):
    """The root manifest: length and checksum of ``.metadata`` and of each rank's manifest."""

    save_id: str
    """The same in every file of one save."""
    step: Size
    """0 also if the checkpoint was saved at a path, which tells no step."""
    world_size: Count
    """Number of ranks that wrote it; the length of ``ranks``."""
    metadata: FileEntry
    ranks: tuple[FileEntry, ...]
    """Each rank's manifest, by rank."""
    written_by: dict[str, str]
    """Versions of the writer, by ``aio_ckpt``, ``torch`` and ``python``."""
    created_unix: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds since 1970 by the leader's clock."""
    metrics: dict[str, float | None] = {}
    """Metrics given to ``save()``; None stands for a value that is not finite. Absent if empty."""
    extra: dict[str, Any] = {}
    """JSON values given to ``save(extra=)``. Absent if empty."""
    files: tuple[_FileName, ...] = ()
    """Names of the files given to ``save(files=)``. Absent if empty."""

    def is_of_step(self, step: int | None) -> bool:
        """Return whether the checkpoint may stand in a directory that is named for ``step``; None: for no step."""
        return step is None or self.step in (0, step)


_ROOTS = msgspec.json.Decoder(RootManifest).decode
_ROOT_HEADS = msgspec.json.Decoder(FormatHead).decode


def encode_root(manifest: RootManifest) -> bytes:
    """Return the bytes of the root manifest: indented JSON that ends in its self-checksum and a newline."""
    return add_checksum(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def decode_root(data: bytes, *, name: str) -> RootManifest:
    """Read the root manifest. ``name`` is the file, for messages.

    Raises:
        FormatVersionError: written by a newer major version of the format.
        MismatchError: its self-checksum does not match, or is missing.
        CorruptCheckpointError: any other fault; the message names the file.
    """
    found = _CHECKSUM.search(data, max(len(data) - 128, 0))
    is_whole = _is_json(data) if found is None else found[1] == _digest(data[: found.start()])
    if not is_whole:
        raise MismatchError(f"{name}: not what was written: its own sum does not match, or it is cut short")
    manifest = decode_checked(data, _ROOTS, _ROOT_HEADS, name=name)
    if found is None:
        raise MismatchError(f"{name}: not what was written: its own sum is missing")
    if len(manifest.ranks) != manifest.world_size:
        raise CorruptCheckpointError(f"{name}: {len(manifest.ranks)} ranks for a world of {manifest.world_size}")
    return manifest


# The self-checksum of the root manifest: a last member that holds the digest of all bytes before it.
_END = b"\n}\n"
_CHECKSUM = re.compile(rb',\n "blake2b": "([0-9a-f]{64})"\n\}\n\Z')


def add_checksum(document: bytes) -> bytes:
    """Return ``document`` with its self-checksum. It is a JSON object, indented by 1 by :func:`msgspec.json.format`."""
    body = document.removesuffix(_END)
    return b'%b,\n "blake2b": "%b"%b' % (body, _digest(body), _END)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).hexdigest().encode()


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return True
