"""Tables and progress: nothing is folded or cut on a terminal, and a pipe gets all of it without colour."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from command_line import called

from aio_ckpt.cli import console
from aio_ckpt.cli.console import Screen, bytes_progress, pace_words
from aio_ckpt.cli.texts import age_text, clock_text, plural

ROWS = [("x" * 100, "a b", "10"), ("日本", "c", "9")]
TITLES = ("name", "words", "number")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A terminal of 80 columns without colour."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    return monkeypatch


def lines_of(capsys, **options) -> list[str]:
    Screen(as_json=False).table(TITLES, ROWS, numbers=("number",), **options)
    return capsys.readouterr().out.splitlines()


def test_a_document_is_json_although_it_has_numbers_that_json_lacks(capsys):
    Screen(as_json=True).json({"a": [math.inf, 1.5], "b": {"c": math.nan}})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"a": [None, 1.5], "b": {"c": None}}


def test_a_pipe_gets_every_column_at_full_width_whatever_COLUMNS_says(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    wanted = ["x" * 100 + "  a b        10", "日本" + " " * 96 + "  c           9"]
    assert lines_of(capsys, optional=("words",))[1:] == wanted


def test_on_a_terminal_the_first_column_of_a_wide_table_stands_on_lines_of_its_own(capsys, terminal):
    wanted = ["name", "  words  number", "x" * 100, "  a b        10", "日本", "  c           9"]
    assert lines_of(capsys) == wanted


def test_a_terminal_that_is_too_narrow_leaves_columns_out_and_names_them(capsys, terminal):
    terminal.setenv("COLUMNS", "110")
    assert lines_of(capsys, optional=("words", "number"))[1:] == [
        "x" * 100 + "      10",
        "日本" + " " * 96 + "       9",
        "left out at 110 columns: words",
    ]


@pytest.mark.parametrize(
    ("environment", "has_colour"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"FORCE_COLOR": ""}, False)],
)
def test_colour_is_for_terminals_that_want_it(capsys, terminal, environment, has_colour):
    terminal.delenv("NO_COLOR")
    terminal.setenv("TERM", "xterm")
    for name, value in environment.items():
        terminal.setenv(name, value)
    Screen(as_json=False).line("good", style="green")
    assert capsys.readouterr().out == ("\x1b[32mgood\x1b[0m\n" if has_colour else "good\n")


@pytest.mark.parametrize(("style", "codes"), [("bold", "\x1b[1m"), ("bold green", "\x1b[32m\x1b[1m")])
def test_a_style_is_bold_a_colour_or_both(capsys, terminal, style, codes):
    terminal.delenv("NO_COLOR")
    terminal.setenv("TERM", "xterm")
    Screen(as_json=False).line("good", style=style)
    assert capsys.readouterr().out == f"{codes}good\x1b[0m\n"


def test_one_bar_shows_the_progress_and_ends_full(root, capsys, terminal):
    code, out, _ = called(capsys, "verify", root)
    assert code == 0
    *_, last = [line for line in out.replace("\r", "\n").splitlines() if "verify" in line]
    assert "━" * 20 in last
    assert "of 4.8" in last
    assert "step_000000010: good" in out


def test_a_bar_of_nothing_ends_full(capsys, terminal):
    with bytes_progress(Screen(as_json=False), "verify") as on_progress:
        on_progress(0, 0)
    assert "━" * 20 in capsys.readouterr().out


def test_the_words_of_a_progress_tell_rate_and_remaining_time():
    assert pace_words(10**9, 3 * 10**9, 5e8) == "1 GB of 3 GB, 500 MB/s, 4 s left"
    assert pace_words(0, 3 * 10**9, 0.0) == "0 B of 3 GB, 0 B/s"
    assert [*map(clock_text, (0.2, 59, 125, 3720))] == ["0 s", "59 s", "2:05 min", "1:02 h"]


def test_the_time_before_the_first_byte_counts_for_no_rate_and_no_quiet_second(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now))
    with bytes_progress(Screen(as_json=False), "verify") as on_progress:
        now += 60  # torch is imported
        on_progress(10**6, 10**9)
        now += 2
        on_progress(4 * 10**8, 10**9)
        assert capsys.readouterr().err == ""
        now += 2
        on_progress(801 * 10**6, 10**9)
    assert capsys.readouterr().err == "verify: 801 MB of 1 GB, 200 MB/s, 1 s left\n"


def test_an_age_has_one_unit():
    assert [*map(age_text, (-5, 0, 119, 120, 7199, 7200, 172800 * 40))] == [
        "0 s",
        "0 s",
        "119 s",
        "2 min",
        "119 min",
        "2 h",
        "80 d",
    ]
    assert (plural(1, "leaf"), plural(2, "leaf"), plural(1200, "checkpoint")) == (
        "1 leaf",
        "2 leaves",
        "1,200 checkpoints",
    )
