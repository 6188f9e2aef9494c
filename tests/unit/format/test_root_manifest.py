"""The root manifest: every changed byte is found, and every field is checked."""

from __future__ import annotations

import json

import pytest

from aio_ckpt.errors import CorruptCheckpointError, MismatchError
from aio_ckpt.format.checkpoint_files import METADATA_FILE, rank_manifest_name
from aio_ckpt.format.root_manifest import FileEntry, RootManifest, add_checksum, decode_root, encode_root

ROOT = RootManifest(
    format=(1, 0),
    save_id="s",
    step=100,
    world_size=2,
    metadata=FileEntry(METADATA_FILE, 1000, 7),
    ranks=(FileEntry(rank_manifest_name("s", 0), 10, 1), FileEntry(rank_manifest_name("s", 1), 11, 2)),
    written_by={"torch": "2.13", "python": "3.11", "aio_ckpt": "0.1"},
    created_unix=1.5e9,
)


def test_a_root_manifest_comes_back_as_it_was_and_is_json_with_lines():
    data = encode_root(ROOT)
    assert decode_root(data, name="r") == ROOT
    assert json.loads(data)["step"] == 100
    assert data.endswith(b"}\n")
    assert data.count(b"\n") > 5


def test_unknown_fields_of_a_root_manifest_are_ignored():
    data = changed_root({"format": [1, 7], "new": [1]})
    assert decode_root(add_checksum(data), name="r").step == 100


def changed_root(change: dict) -> bytes:
    fields = json.loads(encode_root(ROOT)) | change
    del fields["blake2b"]
    return (json.dumps(fields, indent=1) + "\n").encode()


def test_every_changed_byte_of_a_root_manifest_is_found():
    data = encode_root(ROOT)
    for at in range(len(data)):
        for changed in (data[at] ^ 1, data[at] ^ 0x80, 0, 0x20):
            if changed != data[at]:
                with pytest.raises(MismatchError, match=r"r\.json: not what was written"):
                    decode_root(data[:at] + bytes([changed]) + data[at + 1 :], name="r.json")
        for damaged in (
            data[:at],
            data[:at] + bytes(len(data) - at),
            data[:at] + data[at + 1 :],
            data + data[: at + 1],
        ):
            with pytest.raises(CorruptCheckpointError, match=r"r\.json: not what was written"):
                decode_root(damaged, name="r.json")


def test_a_root_manifest_without_its_self_checksum_is_refused():
    with pytest.raises(MismatchError, match="its own sum is missing"):
        decode_root(changed_root({}), name="r")


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": 1.5},
        {"world_size": 0},
        {"world_size": 3},
        {"ranks": []},
        {"metadata": [".metadata", -1, 0]},
        {"metadata": ["/etc/x", 1, 0]},
        {"metadata": None},
        {"ranks": [["a", 1, 0], ["b/c", 1, 0]]},
        {"ranks": [["a", 1, 0], ["b", 1, 1 << 32]]},
        {"created_unix": -1},
        {"written_by": {"torch": 2}},
        {"save_id": None},
        {"format": [0, 0]},
        {"format": None},
    ],
)
def test_every_field_of_a_root_manifest_is_checked(change):
    data = add_checksum(changed_root(change))
    with pytest.raises(CorruptCheckpointError, match=r"r\.json"):
        decode_root(data, name="r.json")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"format": [1, 0]}', b"[" * 100_000])
def test_what_is_no_root_manifest_is_corrupt(data):
    with pytest.raises(CorruptCheckpointError, match=r"r\.json"):
        decode_root(data, name="r.json")
