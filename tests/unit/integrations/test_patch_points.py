"""Private names of another library: those that moved, and those that hold something of ours."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest

from aio_ckpt import EngineConfig
from aio_ckpt.dcp.install_handle import Installed
from aio_ckpt.integrations.patch_points import Expected, PatchPoint, moved_names, replaced


class Saver:
    """Of the library."""

    def save(self, state: object, path: str) -> None:
        def write() -> None:
            print(state, path)

        write()


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("a_library")
    module.__dict__.update(Saver=Saver, NAME="meta.pt")
    monkeypatch.setitem(sys.modules, "a_library", module)
    return module


@pytest.mark.parametrize(
    ("name", "expected", "has_moved"),
    [
        ("Saver.save", ("state", "path"), False),
        ("Saver.save", ("state",), True),
        ("Saver.save", frozenset({"print"}), False),  # used by a function inside
        ("Saver.save", frozenset({"open"}), True),
        ("Saver", frozenset[str](), True),  # no function
        ("NAME", "meta.pt", False),
        ("NAME", "meta.bin", True),
        ("NAME", None, False),
        ("Loader", None, True),
    ],
)
def test_a_name_has_moved_if_it_is_missing_or_not_as_expected(name: str, expected: Expected, has_moved: bool) -> None:
    assert moved_names({f"a_library:{name}": expected}) == ([f"a_library.{name}"] if has_moved else [])


def test_without_the_library_every_name_has_moved_in_order() -> None:
    assert moved_names({"no_library:b": None, "no_library:a": ()}) == ["no_library.a", "no_library.b"]


def test_what_stood_in_a_place_comes_back_unless_another_has_put_something_there(
    library: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    name, saver = (PatchPoint(module="a_library", name=each) for each in ("NAME", "Saver"))
    with caplog.at_level(logging.WARNING, "aio_ckpt"), Installed(EngineConfig()) as installed:
        installed._put(name, "ours")
        installed._put(saver, "ours, too")
        library.Saver = "another's"
    assert (name.value, saver.value) == ("meta.pt", "another's")
    assert 'a_library.Saver is "another\'s" by now, which stays' in caplog.text


def test_a_place_is_replaced_for_a_block(library: ModuleType) -> None:
    with pytest.raises(RuntimeError), replaced(PatchPoint(module="a_library", name="NAME"), "ours"):
        assert library.NAME == "ours"
        raise RuntimeError
    assert library.NAME == "meta.pt"
