"""A reader of formats 1.0 and 2.0, written from docs/format.md alone: the standard library, nothing of aio_ckpt."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Leaf", "StoredTensor", "read_checkpoint"]

_END = re.compile(rb',\n "blake2b": "([0-9a-f]{64})"\n\}\n\Z')
_MAPPINGS, _SEQUENCES, _PER_RANK, _REFERENCE, _COMPOUND = (16, 17, 18, 23), (19, 20), 21, 24, 25


class DamagedError(Exception):
    """A checksum or a number does not match."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor item."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offsets: tuple[int, ...]
    raw: bytes


@dataclass(frozen=True)
class Leaf:
    """A leaf of the state: its code and its name."""

    code: int
    name: str


def check(holds: bool, what: str) -> None:
    if not holds:
        raise DamagedError(what)


def read_checkpoint(path: Path) -> tuple[dict[str, StoredTensor | bytes], list[Any]]:
    """Everything that is stored by name, objects as bytes, and of each rank the state with a Leaf in each place."""
    save_id = _save_of((path / ".metadata").read_bytes())
    root = _root_manifest((path / f"aio_ckpt.{save_id}.json").read_bytes())
    check(root["save_id"] == save_id, "of another save")
    _file(path, root["metadata"])
    check(len(root["ranks"]) == root["world_size"], "world_size")
    values: dict[str, StoredTensor | bytes] = {}
    states = []
    for rank, entry in enumerate(root["ranks"]):
        manifest = unpacked(_file(path, entry))
        _check_version(manifest["format"])
        check(manifest["rank"] == rank, "rank")
        check(all(manifest[key] == root[key] for key in ("save_id", "step", "world_size")), "of another save")
        block_bytes, frozen = manifest["block_bytes"], manifest.get("frozen")
        values |= _stored(manifest, b"" if manifest["file"] is None else _file(path, manifest["file"]), block_bytes)
        if frozen is not None:
            check(root["format"][0] == manifest["format"][0] == 2, "a frozen file in format 1")
            values |= _stored(frozen, _file(path, frozen["file"]), block_bytes)
        states.append(_state(unpacked(manifest["skeleton"]), "", rank, _Traversal()))
    return values, states


def _save_of(metadata: bytes) -> str:
    mark, save_id, crc32 = struct.unpack("<14s40sI", metadata[-58:])
    check(mark == b"\naio_ckpt\0save", "no trailer")
    check(zlib.crc32(metadata[-58:-4]) == crc32, "CRC32 of the trailer")
    return str(save_id.rstrip(b"\0").decode())


def _root_manifest(data: bytes) -> dict[str, Any]:
    end = _END.search(data)
    check(end is not None, "no self-checksum")
    assert end is not None
    check(hashlib.blake2b(data[: end.start()], digest_size=32).hexdigest().encode() == end[1], "self-checksum")
    check(len(data) - end.start() == 83, "length of the self-checksum")
    root: dict[str, Any] = json.loads(data)
    _check_version(root["format"])
    return root


def _check_version(version: list[int]) -> None:
    if version[0] not in (1, 2):
        raise NotImplementedError(f"format {version[0]}.{version[1]}")


def _file(path: Path, entry: list[Any]) -> bytes:
    name, nbytes, crc32 = entry[:3]
    data = (path / name).read_bytes()
    check((len(data), zlib.crc32(data)) == (nbytes, crc32), name)
    return data


def _stored(manifest: dict[str, Any], data: bytes, block_bytes: int) -> dict[str, StoredTensor | bytes]:
    found: dict[str, StoredTensor | bytes] = {}
    names, ties, numbers, signatures, shards, *places = manifest["columns"][:8]
    rows = len(names)
    numbers = struct.unpack(f"<{rows}I", numbers)
    item_offsets, item_bytes, raw_offsets = (struct.unpack(f"<{rows}q", column) for column in places)
    sums, at = manifest["sums"], 0
    for row, name in enumerate(names):
        dtype, shape, stride, dimensions, nbytes = signatures[numbers[row]]
        begin, end = item_offsets[row], item_offsets[row] + item_bytes[row]
        start = raw_offsets[row]
        check(0 <= begin <= start and start + nbytes <= end <= len(data), f"places of {name}")
        raw = data[start : start + nbytes]
        for block in range(0, nbytes, block_bytes):
            (wanted,) = struct.unpack_from("<I", sums, at)
            check(zlib.crc32(raw[block : block + block_bytes]) == wanted, f"a block of {name}")
            at += 4
        offsets = shards.get(row, [0] * dimensions)
        tensor = StoredTensor(dtype, tuple(shape), tuple(stride), tuple(offsets), raw)
        found |= dict.fromkeys([name, *ties.get(row, [])], tensor)
    check(at == len(sums), "sums")
    for names_of_one, offset, nbytes, crc32 in (entry[:4] for entry in manifest.get("objects", ())):
        value = data[offset : offset + nbytes]
        check((len(value), zlib.crc32(value)) == (nbytes, crc32), f"object {names_of_one[0]}")
        found |= dict.fromkeys(names_of_one, value)
    return found


@dataclass
class _Traversal:
    """What a walk over a skeleton has met."""

    made: list[Any] = field(default_factory=list)
    """Containers, by their number."""


def _state(node: Any, prefix: str, rank: int, walk: _Traversal) -> Any:
    if isinstance(node, int):
        return Leaf(node, prefix[:-1])
    code, keys, children, *rest = node
    notes = dict(rest[0]) if rest else {}
    if code == _COMPOUND:
        return {key: _state(child, f"{prefix}{key}.", rank, walk) for key, child in zip(keys, children, strict=True)}
    number = len(walk.made)
    walk.made.append(None)
    if code == _REFERENCE:
        return walk.made[notes["same"]]
    made: Any
    if code in _MAPPINGS:
        made = walk.made[number] = {}
        for key, child in zip(keys, children, strict=True):
            made[_key(key)] = _state(child, f"{prefix}{_text(key)}.", rank, walk)
    elif code == _PER_RANK:
        made = _state(children[0], f"{prefix}rank{rank}.", rank, walk)
    else:
        check(code in _SEQUENCES, f"container {code}")
        made = walk.made[number] = []
        made += [_state(child, f"{prefix}{index}.", rank, walk) for index, child in enumerate(children)]
        made = made if code == 19 else tuple(made)
    if "same" in notes:
        made = walk.made[notes["same"]]
    walk.made[number] = made
    return made


def _text(key: Any) -> str:
    return key[1][0] if isinstance(key, list) and key[0] == "o" else str(_key(key))


def _key(key: Any) -> Any:
    if isinstance(key, str):
        return key
    tag, text = key
    if tag == "t":
        return tuple(map(_key, text))
    if tag == "o":
        return text[0]  # of its object, the text is enough here
    if tag == "c":
        return complex(*map(float.fromhex, text))
    readers: dict[str, Any] = {"i": int, "b": lambda text: text == "1", "f": float.fromhex, "n": lambda _: None}
    return (readers | {"y": bytes.fromhex})[tag](text)


# -- msgpack ----------------------------------------------------------------------------------------

_NUMBERS = {
    **{0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"},
    **{0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"},
}
_LENGTHS = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I"}
_LENGTHS |= {0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}


def unpacked(data: bytes) -> Any:
    """The value of a msgpack document (https://github.com/msgpack/msgpack/blob/master/spec.md)."""
    value, end = _value(data, 0)
    check(end == len(data), "bytes behind a msgpack document")
    return value


def _value(data: bytes, at: int) -> tuple[Any, int]:
    code, at = data[at], at + 1
    if code < 0x80 or code >= 0xE0:
        return code - 256 * (code >= 0xE0), at
    if code in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[code], at
    if code in _NUMBERS:
        return struct.unpack_from(_NUMBERS[code], data, at)[0], at + struct.calcsize(_NUMBERS[code])
    if code < 0xC0:
        kind, length = (0xDE, code & 15) if code < 0x90 else (0xDC, code & 15) if code < 0xA0 else (0xD9, code & 31)
    else:
        check(code in _LENGTHS, f"msgpack code {code:#x}")
        kind, (length,) = code, struct.unpack_from(_LENGTHS[code], data, at)
        at += struct.calcsize(_LENGTHS[code])
    if kind <= 0xC6:
        return data[at : at + length], at + length
    if kind <= 0xDB:
        return data[at : at + length].decode(errors="surrogatepass"), at + length
    items: list[Any] = []
    for _ in range(length * (2 if kind >= 0xDE else 1)):
        item, at = _value(data, at)
        items.append(item)
    return (dict(zip(items[::2], items[1::2], strict=True)) if kind >= 0xDE else items), at
