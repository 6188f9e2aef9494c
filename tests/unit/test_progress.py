"""Progress bars, by the real libraries, on a terminal that is a string."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TIMEOUT, broken, weights
from gated_storage import gated_engine
from rich.cells import cell_len
from rich.console import Console

import aio_ckpt
from aio_ckpt import Progress, SyncCheckpointEngine, progress
from aio_ckpt.errors import MissingNameError, WriteError
from aio_ckpt.progress import ProgressBar

MB = 1_000_000
WIDTH = 80


def at(stage: Any, done: int, total: int = 8500 * MB) -> Progress:
    return Progress(stage=stage, bytes_done=done, bytes_total=total)


def rich_bar(out: io.StringIO, label: str = "") -> ProgressBar:
    terminal = Console(file=out, force_terminal=True, width=WIDTH, no_color=True, legacy_windows=False, _environ={})
    return progress.rich(label, console=terminal)


def tqdm_bar(out: io.StringIO, label: str = "") -> ProgressBar:
    return progress.tqdm(label, file=out, ncols=WIDTH)


NewBar = Callable[..., ProgressBar]
BARS = pytest.mark.parametrize("new_bar", [rich_bar, tqdm_bar])


def frames(out: io.StringIO) -> Iterator[str]:
    """What the line showed, one after the other, without control sequences."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    return (frame for frame in (part.strip() for part in re.split(r"[\r\n]+", text)) if frame)


@BARS
def test_a_bar_shows_each_stage_and_the_bytes_and_ends_full(new_bar: NewBar) -> None:
    out = io.StringIO()
    bar = new_bar(out, "resume")
    for now in (at("read", 0), at("read", 3200 * MB), at("apply", 8500 * MB), at("done", 8500 * MB)):
        bar(now)
    shown = list(frames(out))
    assert shown[0].startswith("resume read")
    last = shown[-1]
    assert last.startswith("resume done")
    if new_bar is rich_bar:
        assert "━" * 30 in last
        assert "8.5/8.5 GB" in last
    else:
        assert "100%" in last
        assert "8.50G/8.50G" in last


@BARS
def test_a_bar_fits_into_80_columns(new_bar: NewBar) -> None:
    out = io.StringIO()
    bar = new_bar(out, "step 100000")
    for stage, done in (("capture", 0), ("write", 850_999 * MB), ("commit", 999_999 * MB), ("done", 999_999 * MB)):
        bar(at(stage, done, 999_999 * MB))
    for frame in frames(out):
        assert cell_len(frame) <= WIDTH
    assert "…" not in out.getvalue()


@BARS
def test_if_another_checkpoint_is_read_the_bar_goes_back(new_bar: NewBar) -> None:
    out = io.StringIO()
    bar = new_bar(out)
    for now in (at("read", 0), at("read", 8000 * MB), at("read", 0, 4 * MB), at("done", 4 * MB, 4 * MB)):
        bar(now)
    last = list(frames(out))[-1]
    assert ("4.0/4.0 MB" if new_bar is rich_bar else "4.00M/4.00M") in last


@BARS
def test_a_bar_shows_a_load_and_then_a_save(root: Path, new_bar: NewBar) -> None:
    out = io.StringIO()
    bar = new_bar(out)
    with SyncCheckpointEngine(root) as engine:
        report = bar.wait(engine.save(weights(1), step=5))
        assert report is not None
        assert report.step == 5
        assert list(frames(out))[-1].startswith("done")
        out.truncate(out.seek(0))
        engine.load(weights(0), progress=bar)
    assert list(frames(out))[-1].startswith("done")


@BARS
def test_a_failure_is_raised_and_shown_and_gives_the_terminal_back(root: Path, new_bar: NewBar) -> None:
    out = io.StringIO()
    bar = new_bar(out)
    with gated_engine(root) as (engine, storage):
        storage.fail("sync", "*.distcp", broken())
        with pytest.raises(WriteError):
            bar.wait(engine.save(weights(1)))
        assert list(frames(out))[-1].startswith("failed")
        if new_bar is rich_bar:
            assert out.getvalue().count("\x1b[?25h") == out.getvalue().count("\x1b[?25l") == 1, "the cursor is hidden"


def test_an_interrupted_wait_gives_the_terminal_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(timeout: float) -> None:
        raise KeyboardInterrupt

    out = io.StringIO()
    with gated_engine(root) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        ticket = engine.save(weights(1))
        gate.wait_reached()
        monkeypatch.setattr(ticket, "exception", interrupt)
        with pytest.raises(KeyboardInterrupt):
            rich_bar(out).wait(ticket)
        assert out.getvalue().count("\x1b[?25h") == out.getvalue().count("\x1b[?25l") == 1, "the cursor is hidden"


def test_a_wait_for_a_save_of_long_ago_shows_it_and_a_skipped_save_shows_nothing(root: Path) -> None:
    with gated_engine(root, when_busy="skip") as (engine, storage):
        ticket = engine.save(weights(1))
        ticket.result(TIMEOUT)
        out = io.StringIO()
        assert rich_bar(out).wait(ticket) is ticket.result()
        assert list(frames(out))[-1].startswith("done")
        gate = storage.hold("rename")
        engine.save(weights(2))
        gate.wait_reached()
        out = io.StringIO()
        assert rich_bar(out).wait(engine.save(weights(3))) is None
        assert out.getvalue() == ""


def test_a_load_that_reads_nothing_shows_no_bar(root: Path) -> None:
    out = io.StringIO()
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1)).result(TIMEOUT)
        with pytest.raises(MissingNameError):
            engine.load({"other": torch.ones(1)}, progress=rich_bar(out))
    assert out.getvalue() == ""


def test_in_a_file_rich_writes_one_line_at_the_end() -> None:
    out = io.StringIO()
    bar = progress.rich(console=Console(file=out, width=WIDTH, _environ={}))
    for now in (at("read", 0), at("read", 3200 * MB), at("done", 8500 * MB)):
        bar(now)
    (line,) = out.getvalue().splitlines()
    assert line.startswith("done ━━━")


def test_without_tqdm_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"pip install tqdm, or use rich\(\)"):
        progress.tqdm()


def test_the_libraries_are_imported_when_a_bar_is_made() -> None:
    assert progress.__file__ is not None
    source = Path(progress.__file__).read_text()
    assert re.findall(r"^(?:from|import) (?:rich|tqdm)\b", source, re.MULTILINE) == []


def test_the_module_is_reached_by_the_package() -> None:
    assert aio_ckpt.progress is progress
