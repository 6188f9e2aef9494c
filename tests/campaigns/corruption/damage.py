"""Ways to damage a checkpoint on disk, on purpose and reproducible. Of the engine it needs the manifests only."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.format.rank_manifest import FileTable, decode_rank

__all__ = ["FILES", "IN_FILE", "WHOLE_FILE", "Region", "hurt_file", "hurt_region", "regions_of"]

FILES: Mapping[str, str] = {
    "data file": "__*_0_0.distcp",
    "frozen file": "__*_0_1.distcp",
    ".metadata": METADATA_FILE,
    "rank manifest": "aio_ckpt.*.0.bin",
    "root manifest": "aio_ckpt.*.json",
}
"""Patterns of the files of a checkpoint of one rank, by what they are."""

_MAX_SPAN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bytes of one class."""

    kind: str
    """``item header``, ``raw data``, ``item trailer``, ``object``, ``padding``, or what the file is."""
    file: str
    """Relative to the checkpoint."""
    start: int
    """First byte."""
    stop: int
    """After the last byte."""
    name: str | None
    """Tensor or object that they belong to."""


def named(checkpoint: Path, pattern: str) -> Path:
    """The one file that a pattern fits."""
    (file,) = checkpoint.glob(pattern)
    return file


def regions_of(checkpoint: Path) -> list[Region]:
    """Every byte of a sound checkpoint of one rank, by class."""
    manifest = decode_rank(named(checkpoint, FILES["rank manifest"]).read_bytes(), name="m")
    found = [region for table in manifest.data_files for region in _regions_of_data(checkpoint, table)]
    for kind in (".metadata", "rank manifest", "root manifest"):
        path = named(checkpoint, FILES[kind])
        found.append(Region(kind=kind, file=path.name, start=0, stop=path.stat().st_size, name=None))
    return [region for region in found if region.stop > region.start]


def _regions_of_data(checkpoint: Path, table: FileTable) -> list[Region]:
    file, found = table.file.name, list[Region]()
    for entry in table.tensors:
        raw_stop = entry.raw_offset + entry.raw_bytes
        for kind, start, stop in (
            ("item header", entry.item_offset, entry.raw_offset),
            ("raw data", entry.raw_offset, raw_stop),
            ("item trailer", raw_stop, entry.item_offset + entry.item_bytes),
        ):
            found.append(Region(kind=kind, file=file, start=start, stop=stop, name=entry.fqns[0]))
    for stored in table.objects:
        stop = stored.offset + stored.nbytes
        found.append(Region(kind="object", file=file, start=stored.offset, stop=stop, name=stored.fqns[0]))
    at = 0
    for region in sorted(found, key=lambda region: region.start):
        if region.start > at:
            found.append(Region(kind="padding", file=file, start=at, stop=region.start, name=None))
        at = max(at, region.stop)
    size = (checkpoint / file).stat().st_size
    return [*found, Region(kind="padding", file=file, start=at, stop=size, name=None)]


# -- inside a file --------------------------------------------------------------------------------

_Change = Callable[[bytearray, Region, random.Random], None]


def _flip(data: bytearray, region: Region, rng: random.Random) -> None:
    data[rng.randrange(region.start, region.stop)] ^= 1 << rng.randrange(8)


def _truncate(data: bytearray, region: Region, rng: random.Random) -> None:
    del data[rng.randrange(region.start, region.stop) :]


def _zero_fill(data: bytearray, region: Region, rng: random.Random) -> None:
    start, stop = _span(region, rng)
    data[start:stop] = bytes(stop - start)


def _garble(data: bytearray, region: Region, rng: random.Random) -> None:
    start, stop = _span(region, rng)
    data[start:stop] = rng.randbytes(stop - start)


def _swap(data: bytearray, region: Region, rng: random.Random) -> None:
    nbytes = rng.randint(1, max((region.stop - region.start) // 2, 1))
    first = rng.randint(region.start, max(region.stop - 2 * nbytes, region.start))
    second = rng.randint(min(first + nbytes, region.stop - nbytes), region.stop - nbytes)
    data[first : first + nbytes], data[second : second + nbytes] = (
        data[second : second + nbytes],
        data[first : first + nbytes],
    )


def _duplicate(data: bytearray, region: Region, rng: random.Random) -> None:
    start, stop = _span(region, rng)
    data[stop:stop] = data[start:stop]


def _span(region: Region, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(region.start, region.stop)
    return start, rng.randint(start + 1, min(region.stop, start + _MAX_SPAN))


IN_FILE: Mapping[str, _Change] = {
    "flip": _flip,
    "garble": _garble,
    "zero-fill": _zero_fill,
    "truncate": _truncate,
    "swap ranges": _swap,
    "duplicate a range": _duplicate,
}
"""Damage inside a region."""


def hurt_region(checkpoint: Path, region: Region, how: str, rng: random.Random) -> bool:
    """Damage a region; whether a byte changed (zeros that are filled with zeros do not)."""
    file = checkpoint / region.file
    before = file.read_bytes()
    data = bytearray(before)
    IN_FILE[how](data, region, rng)
    file.write_bytes(data)
    return data != before


# -- whole files ----------------------------------------------------------------------------------


def _pattern(file: Path) -> str:
    return next(pattern for pattern in FILES.values() if file.match(pattern))


def _drop(file: Path, _other: Path, _rng: random.Random) -> None:
    file.unlink()


def _replace(file: Path, other: Path, _rng: random.Random) -> None:
    shutil.copyfile(named(other, _pattern(file)), file)


def _append(file: Path, _other: Path, rng: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(rng.randbytes(rng.randint(1, 2 * _MAX_SPAN)))


def _double(file: Path, _other: Path, _rng: random.Random) -> None:
    file.write_bytes(file.read_bytes() * 2)


def _empty(file: Path, _other: Path, _rng: random.Random) -> None:
    file.write_bytes(b"")


def _exchange(file: Path, _other: Path, rng: random.Random) -> tuple[str, ...]:
    beside = named(file.parent, rng.choice([name for name in FILES.values() if name != _pattern(file)]))
    aside = file.with_name("aside")
    file.rename(aside)
    beside.rename(file)
    aside.rename(beside)
    return file.name, beside.name


WHOLE_FILE: Mapping[str, Callable[[Path, Path, random.Random], tuple[str, ...] | None]] = {
    "drop": _drop,
    "replaced by the file of another checkpoint": _replace,
    "append": _append,
    "doubled": _double,
    "emptied": _empty,
    "exchanged with another file": _exchange,
}
"""Damage of a whole file; the second path is another checkpoint of the same shape."""


def hurt_file(checkpoint: Path, name: str, how: str, other: Path, rng: random.Random) -> tuple[str, ...]:
    """Damage the file that the pattern ``name`` fits; the files that are no longer what they were."""
    file = named(checkpoint, name)
    return WHOLE_FILE[how](file, other, rng) or (file.name,)
