"""Names of a checkpoint's files, and the trailer of ``.metadata``."""

from __future__ import annotations

import pickle

import pytest

from aio_ckpt.errors import MismatchError
from aio_ckpt.format.checkpoint_files import (
    TRAILER_BYTES,
    data_file_name,
    new_metadata_name,
    rank_manifest_name,
    root_manifest_name,
    save_of_file,
    save_of_metadata,
    save_of_root_manifest,
    trailer,
)

SAVE = "0123456789ab-12"
PICKLE = pickle.dumps({"w": 1})


def test_every_name_of_a_save_tells_its_save() -> None:
    names = [data_file_name(SAVE, 3), rank_manifest_name(SAVE, 3), root_manifest_name(SAVE), new_metadata_name(SAVE)]
    assert names == [f"__{SAVE}_3_0.distcp", f"aio_ckpt.{SAVE}.3.bin", f"aio_ckpt.{SAVE}.json", f".metadata.tmp-{SAVE}"]
    assert [save_of_file(name) for name in names] == [SAVE] * 4
    assert [save_of_root_manifest(name) for name in names] == [None, None, SAVE, None]


@pytest.mark.parametrize(
    "name",
    [
        ".metadata",
        "__0_0.distcp",
        "aio_ckpt.json",
        "aio_ckpt.notes.txt",
        "aio_ckpt.lock",
        "notes.json",
        "__a_b_0.distcp",
    ],
)
def test_files_of_others_and_those_of_stock_dcp_belong_to_no_save(name: str) -> None:
    assert save_of_file(name) is None


def test_the_trailer_tells_the_save_and_stock_unpickles_what_is_before_it() -> None:
    data = PICKLE + trailer(SAVE)
    assert len(data) == len(PICKLE) + TRAILER_BYTES
    assert save_of_metadata(data) == save_of_metadata(data[-TRAILER_BYTES:]) == SAVE
    assert pickle.loads(data) == {"w": 1}


@pytest.mark.parametrize("data", [b"", PICKLE, bytes(200)])
def test_what_stock_dcp_wrote_has_no_trailer(data: bytes) -> None:
    assert save_of_metadata(data) is None


def refusal_of(data: bytes) -> str:
    try:
        save_of_metadata(data)
    except MismatchError as error:
        return str(error)
    return ""


def test_a_flipped_bit_of_the_trailer_is_found() -> None:
    whole = trailer(SAVE)
    for bit in range(8 * TRAILER_BYTES):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        assert "its last" in refusal_of(bytes(data)), bit
