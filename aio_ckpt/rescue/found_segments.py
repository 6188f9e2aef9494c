"""Orphan segments, which dead trainers left in shared memory: where they are."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from aio_ckpt.argument_checks import is_path
from aio_ckpt.commit.owner import Owner, is_abandoned, owner_by_name
from aio_ckpt.errors import AioCkptError
from aio_ckpt.format.root_names import SEGMENTS_FILE
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.rescue.segment import SEGMENT_PREFIX, StoredSegment, own_segments, read_segment
from aio_ckpt.rescue.snapshot_record import SnapshotRecord, decode_record

_DIRECTORIES = msgspec.json.Decoder(list[str])


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSegment:
    """A segment that another process made."""

    owner_is_dead: bool
    """Whether this host proves that the owner is dead, or the owner has shown no sign of life for long."""
    stored: StoredSegment
    """Its content. A record that cannot be decoded is a fault of it, too."""
    record: SnapshotRecord | None
    """None if the segment has no snapshot record, or a damaged one."""


def segment_prefix(root: Path) -> str:
    """Return the prefix of the file names of all segments for ``root``."""
    real = str(root) if isinstance(root, RemotePath) else os.path.realpath(root)
    return f"{SEGMENT_PREFIX}{hashlib.blake2b(os.fsencode(real), digest_size=8).hexdigest()}-"


def segment_directories(root: Path) -> list[Path]:
    """Return the directories that writers of ``root`` recorded; empty if none did, or each writer has ended well."""
    if isinstance(root, RemotePath):  # no snapshot is staged for it
        return []
    try:
        found = _DIRECTORIES.decode((root / SEGMENTS_FILE).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return []
    return [Path(text) for text in found if is_path(text)]  # other texts name no directory


def remove_segment(orphan: FoundSegment) -> None:
    """Remove the file, and with it the memory."""
    orphan.stored.path.unlink(missing_ok=True)


def find_segments(
    directories: Sequence[Path], root: Path, here: Owner, *, stale_after_secs: float
) -> list[FoundSegment]:
    """Return the segments for ``root`` that other processes made, whether the processes live or not.

    The death of an owner in another container cannot be proven. Such an owner counts as dead if it has marked no
    segment valid for ``stale_after_secs``. Only the holder of the root's lock may act on that, because a living writer
    would hold the lock.
    """
    prefix, found = segment_prefix(root), []
    for directory in dict.fromkeys(directories):
        for path in own_segments(directory, prefix):
            owner = owner_by_name(path.name, here)
            if owner is not None and (owner.pid, owner.started_ticks) == (here.pid, here.started_ticks):
                continue
            stored, record = read_segment(path), None
            if not stored.fault:
                try:
                    record = decode_record(stored)
                except AioCkptError as error:
                    stored = replace(stored, fault=str(error), is_damaged=True)
            idle_secs = None if stored.modified_unix is None else time.time() - stored.modified_unix
            is_dead = is_abandoned(owner, here, idle_secs=idle_secs, stale_after_secs=stale_after_secs)
            found.append(FoundSegment(owner_is_dead=is_dead, stored=stored, record=record))
    return found
