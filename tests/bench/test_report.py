"""The pages of docs/benchmarks are what ``python -m bench.report`` renders from bench/results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.common.results import RESULTS, machine_name
from bench.report import FOLDER, PAGES, main, render_page


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_results_render(name: str) -> None:
    assert (FOLDER / f"{name}.md").read_text() == render_page(PAGES[name]), "run: python -m bench.report"


def test_every_page_is_written_where_it_is_read(tmp_path: Path) -> None:
    main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.md" for name in PAGES}


def test_results_have_no_date_in_their_names_and_lie_by_machine() -> None:
    paths = [path.relative_to(RESULTS) for path in RESULTS.rglob("*") if path.is_file()]
    assert paths
    for path in paths:
        assert len(path.parts) == 2
        assert not re.search(r"\d{4}-\d\d-\d\d", path.name)


@pytest.mark.parametrize(("devices", "ranks", "name"), [([], 1, "2-cores"), (["NVIDIA H200"] * 4, 2, "2x-nvidia-h200")])
def test_a_machine_is_named_by_its_cores_or_by_the_gpus_of_the_run(devices: list[str], ranks: int, name: str) -> None:
    assert machine_name({"devices": devices, "cores": 2}, ranks) == name
