"""``diff``: names, shapes, dtypes and values of two checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import called, document, save_by_dcp

from aio_ckpt.checkpoint.catalog import StoredObject
from aio_ckpt.cli.access import call
from aio_ckpt.cli.comparing import distance, object_change
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.sync import SyncCheckpointEngine


def saved(path, **state):
    with SyncCheckpointEngine(path) as engine:
        engine.save(state, step=1).result()
    return path


def test_equal_checkpoints_are_alike(root, capsys):
    code, out, _ = called(capsys, "diff", root / "step_000000010", root, "--values")
    assert code == 0
    assert out.splitlines()[-1] == "5 leaves alike, 0 not (names, shapes, dtypes and values)"


def test_without_values_diff_says_that_it_compared_none(tmp_path, capsys):
    a, b = saved(tmp_path / "a", step=1), saved(tmp_path / "b", step=2)
    code, out, _ = called(capsys, "diff", a, b)
    told = "1 leaf alike, 0 not (names, shapes and dtypes; give --values to compare what they hold)"
    assert (code, out.splitlines()[-1]) == (0, told)
    assert called(capsys, "diff", a, b, "--values")[0] == 1


def test_a_damaged_one_is_named(root, capsys):
    (root / "step_000000020/.metadata").unlink()
    code, _, err = called(capsys, "diff", root / "step_000000010", root)
    assert (code, f"{root}/step_000000020: .metadata: missing" in err) == (1, True), err


@pytest.mark.parametrize("roots", [("good", "bad"), ("bad", "good"), ("bad", "bad")])
def test_of_two_roots_the_hint_is_about_the_damaged_one_once(tmp_path, capsys, roots):
    for name in ("good", "bad"):
        saved(tmp_path / name, a=torch.ones(3))
    (tmp_path / "bad/step_000000001/.metadata").write_bytes(b"cut")
    code, _, err = called(capsys, "diff", *(tmp_path / name for name in roots))
    assert (code, err.count("aio-ckpt verify")) == (1, 1), err
    assert f"`aio-ckpt verify {tmp_path / 'bad'}`" in err


def test_diff_names_what_one_lacks_and_what_has_another_shape_or_dtype(tmp_path, capsys):
    a = saved(tmp_path / "a", w=torch.ones(2, 3), v=torch.ones(2), n=1, only_a=2, same=torch.ones(4))
    b = saved(tmp_path / "b", w=torch.ones(3, 2), v=torch.ones(2).half(), n=torch.ones(1), same=torch.ones(4), z=1)
    code, told = document(capsys, "diff", a, b)
    assert code == 1
    assert (told["only_in_a"], told["only_in_b"]) == (["only_a"], ["z"])
    assert {change["name"]: (change["a"], change["b"]) for change in told["kinds"]} == {
        "w": ("float32 (2, 3)", "float32 (3, 2)"),
        "v": ("float32 (2)", "float16 (2)"),
        "n": ("object", "float32 (1)"),
    }
    assert (told["values"], told["alike"]) == (None, 1)
    out = called(capsys, "diff", a, b)[1]
    assert "only in A: only_a\n" in out
    assert "only in B: z\n" in out
    assert "float32 (3, 2)" in out


def dcp_object(directory: Path, file: str, offset: int, nbytes: int) -> SimpleNamespace:
    catalog = SimpleNamespace(objects={"o": StoredObject("o", file, offset, nbytes, None, False)}, files={file: None})
    return SimpleNamespace(path=directory, catalog=catalog)


def changed(*opened: Any) -> bool:
    return call(lambda storage, executor: object_change(storage, executor, "o", opened)) is not None


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1 << 62), (0, 100_000), (1 << 64, 5), (2900, 101)])
def test_a_forged_place_of_an_object_of_dcp_is_damage(tmp_path, offset, nbytes):
    """Nothing checks the place of an object of plain DCP before its bytes are compared."""
    (tmp_path / "f").write_bytes(bytes(3000))
    forged = dcp_object(tmp_path, "f", offset, nbytes)
    with pytest.raises(CorruptCheckpointError, match=f"f: 'o' at bytes {offset} to .* is not inside the file"):
        changed(forged, forged)


def test_objects_of_dcp_that_differ_in_their_last_byte_differ(tmp_path):
    nbytes = 3 << 20
    for name, last in (("a", b"x"), ("b", b"y"), ("c", b"x")):
        (tmp_path / name).write_bytes(bytes(nbytes - 1) + last)
    a, b, c = (dcp_object(tmp_path, name, 0, nbytes) for name in "abc")
    assert changed(a, b)
    assert not changed(a, c)


def test_diff_tells_how_far_values_are_apart(tmp_path, capsys):
    a = saved(tmp_path / "a", w=torch.tensor([1.0, 4.0, 2.0]), same=torch.ones(4), lr=0.1, name="x")
    b = saved(tmp_path / "b", w=torch.tensor([1.0, 4.5, 1.0]), same=torch.ones(4), lr=0.2, name="x")
    assert called(capsys, "diff", a, b)[0] == 0
    code, told = document(capsys, "diff", a, b, "--values")
    assert code == 1
    assert told["values"] == [
        {"name": "w", "differing": 2, "elements": 3, "largest": 1.0, "relative": 0.25},
        {"name": "lr", "differing": 1, "elements": 1, "largest": None, "relative": None},
    ]
    assert told["alike"] == 2
    assert "2 of 3" in called(capsys, "diff", a, b, "--values")[1]


def test_diff_compares_with_what_stock_dcp_wrote(tmp_path, capsys):
    a = saved(tmp_path / "a", w=torch.ones(3), n=5)
    save_by_dcp({"w": torch.ones(3), "n": 5}, tmp_path / "b")
    save_by_dcp({"w": torch.ones(3), "n": 6}, tmp_path / "c")
    assert document(capsys, "diff", a, tmp_path / "b")[0] == 0
    told = document(capsys, "diff", tmp_path / "b", tmp_path / "c", "--values")[1]
    assert [change["name"] for change in told["values"]] == ["n"]


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (torch.tensor([1, 2**60 + 1]), torch.tensor([1, 2**60]), (1, 1.0)),
        (torch.tensor([True, False]), torch.tensor([True, True]), (1, 1.0)),
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), (0, 0.0)),
        (torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0]), (1, math.inf)),
        (torch.tensor([math.inf]), torch.tensor([math.inf]), (0, 0.0)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 4j]), (1, 2.0)),
        (torch.tensor([1 + 2j, 1j]), torch.tensor([2 + 4j, 1j]), (1, 2.0)),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn), (2, 1.0)),
        (torch.ones(2, dtype=torch.uint32), torch.zeros(2, dtype=torch.uint32), (2, 1.0)),
        (torch.ones(0), torch.ones(0), (0, 0.0)),
        *(
            (torch.tensor([1, 2], dtype=bits).view(dtype), torch.tensor([1, 5], dtype=bits).view(dtype), (1, 3.0))
            for dtype, bits in [
                (getattr(torch, "float4_e2m1fn_x2", torch.uint4), torch.uint8),  # of torch 2.8
                (torch.uint4, torch.uint8),
                (torch.bits8, torch.uint8),
                (torch.bits16, torch.int16),
            ]
        ),
        (torch.ones(2, 2, dtype=torch.bfloat16).t(), torch.ones(2, 2, dtype=torch.bfloat16), (0, 0.0)),
    ],
)
def test_the_distance_of_tensors_of_every_kind(a, b, wanted):
    assert distance(a, b)[:2] == wanted


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
)  # what fits no signed number of the dtype wraps
def test_the_distance_of_the_least_and_the_largest_integer_of_each_dtype(dtype):
    kind = getattr(torch, dtype)
    ends = torch.iinfo(kind)
    a, b = torch.tensor([5, ends.max], dtype=kind), torch.tensor([5, ends.min], dtype=kind)
    apart = float(ends.max - ends.min)
    assert distance(a, b) == (1, apart, apart / ends.max)
    assert distance(b, a)[:2] == (1, apart)
    assert distance(torch.tensor([3], dtype=kind), torch.tensor([5], dtype=kind)) == (1, 2.0, 2 / 3)
