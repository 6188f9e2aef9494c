"""The filters of ``inspect``."""

from __future__ import annotations

import pytest
from command_line import called, document


def names(capsys, root, *options) -> list[str]:
    return [leaf["name"] for leaf in document(capsys, "inspect", root, *options)[1]["leaves"]]


def test_only_takes_leaves_branches_and_patterns(root, capsys):
    assert names(capsys, root, "--only", "model") == ["model.bias", "model.embed", "model.head"]
    assert names(capsys, root, "--only", "model.bias", "--only", "lr") == ["lr", "model.bias"]
    assert names(capsys, root, "--only", "*.b*") == ["model.bias"]
    assert "2 leaves of 5 leaves" in called(capsys, "inspect", root, "--only", "lr", "--only", "model.bias")[1]


def test_only_that_selects_nothing_fails_by_name(root, capsys):
    code, out, err = called(capsys, "inspect", root, "--only", "modle")
    assert (code, out) == (1, "")
    assert "'modle' is no leaf and no branch" in err
    assert "did you mean 'model'?" in err


def test_sort_and_largest_order_by_bytes(root, capsys):
    by_bytes = names(capsys, root, "--sort", "bytes")
    assert set(by_bytes[:2]) == {"model.embed", "model.head"}
    assert by_bytes[-1] == "model.bias"
    assert names(capsys, root, "--largest", "1") == ["model.embed"]
    assert names(capsys, root, "--sort", "dtype")[0] == "lr"


def test_depth_sums_branches_and_counts_a_tied_weight_once(root, capsys):
    found = document(capsys, "inspect", root, "--depth", "1", "--only", "model", "--only", "rng")[1]
    assert found["branches"] == [
        {"name": "model", "leaves": 3, "nbytes": 2_400_014},
        {"name": "rng", "leaves": 1, "nbytes": 16},
    ]
    assert "leaves" in called(capsys, "inspect", root, "--depth", "1")[1]
    assert called(capsys, "inspect", root, "--depth", "1", "--sort", "dtype")[0] == 2


@pytest.mark.parametrize("columns", [80, 130])
def test_no_name_and_no_number_folds(root, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = called(capsys, "inspect", root)[1].splitlines()
    table = lines[lines.index("") + 1 :]
    assert max(map(len, table)) <= columns
    assert any("2,400,000" in line for line in table)
