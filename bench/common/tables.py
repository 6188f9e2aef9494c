"""A results document, as it stands in JSON, as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["about_run", "ms", "render", "table", "target_table"]

Line = Mapping[str, Any]
MOST_COLUMNS = 8
"""Groups of figures side by side in one table."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; numbers stand to the right of the first column."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (head, rule, *rows)]


def ms(secs: float) -> str:
    """Return ``secs`` in milliseconds, with three digits at most below 100 ms."""
    return f"{secs * 1e3:.2f}" if secs < 0.01 else f"{secs * 1e3:.1f}" if secs < 0.1 else f"{secs * 1e3:.0f}"


def about_run(document: Line) -> str:
    """Return when, on what machine and with what options the run was made."""
    machine, settings = document["machine"], document["settings"]
    devices = machine["devices"]
    parts = [
        document["date"],
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB",
        *([f"{len(devices)} x {devices[0]}"] if devices else []),
        f"{machine['file_system']}, Linux {machine['kernel']}, torch {machine['torch']}, Python {machine['python']}",
        ", ".join(f"{key}={value}" for key, value in settings.items() if value != [] and value is not False),
    ]
    return "Run of " + "; ".join(parts) + "."


def render(document: Line) -> str:
    """Return the tables of a run of any bench but ``bench.gpu``, whose rows are of another kind."""
    lines = [about_run(document)]
    if document["bench"] == "uring":
        return "\n".join([*lines, "", *(f"- {said}." for said in document["verdict"])]) + "\n"
    for title, rows in document["shapes"].items():
        lines += ["", f"**{title}**", "", *_shape_table(rows), *_beside_table(rows)]
    # A figure of the memory bench names state and size, then what was measured.
    lines += _figure_tables(document["figures"], splits_last=document["bench"] == "memory")
    lines += target_table(document["goals"])
    return "\n".join(lines) + "\n"


def target_table(goals: Sequence[Line]) -> list[str]:
    """Return a table of what was measured against its target; nothing without targets."""
    cells = [
        [
            goal["text"],
            _figure(goal["figure"], goal["unit"]),
            f"{'>=' if goal['is_floor'] else '<='} {_figure(goal['bound'], goal['unit'])}",
            "kept" if goal["is_met"] else "**not kept**",
        ]
        for goal in goals
    ]
    return ["", *table(["target", "measured", "bound", ""], cells)] if cells else []


def _shape_table(rows: Sequence[Line]) -> list[str]:
    head = ["", "median ms", "min .. max", "x limit", "GB/s", "blocked ms", "CPU-s/GB", "first ms"]
    cells = [
        [
            row["name"],
            ms(row["total"]["median"]),
            f"{ms(row['total']['low'])} .. {ms(row['total']['high'])}",
            f"{row['ratio']:.2f}",
            f"{row['gb_per_sec']:.2f}",
            ms(row["blocked"]["median"]),
            f"{row['cpu_secs_per_gb']:.2f}",
            ms(row["first_secs"]),
        ]
        for row in rows
    ]
    durable = "; ".join(f"{row['name']}: {row['durability']}" for row in rows if row["durability"] != "-")
    return [*table(head, cells), *(["", f"On disk when done: {durable}."] if durable else [])]


def _beside_table(rows: Sequence[Line]) -> list[str]:
    felt = [(row["name"], row["beside"]) for row in rows if row["beside"] is not None]
    head = [
        "beside it",
        "ticker idle p99 / max ms",
        "p99 / max ms, whole",
        "p99 / max ms, after the call",
        "Python loop keeps",
        "done ms, Python loop beside",
    ]
    cells = [
        [
            name,
            *(
                f"{ms(beside[f'{which}_p99{part}_secs'])} / {ms(beside[f'{which}_max{part}_secs'])}"
                for which, part in (("idle_lag", ""), ("lag", ""), ("lag", "_after_call"))
            ),
            "{median:.0%} ({low:.0%} .. {high:.0%})".format_map(beside["python_rate"]),
            ms(beside["python_total_secs"]["median"]),
        ]
        for name, beside in felt
    ]
    return ["", *table(head, cells)] if cells else []


def _figure_tables(figures: Sequence[Line], *, splits_last: bool) -> list[str]:
    """One table for each kind of group: groups of the same figures are columns side by side."""
    groups: dict[str, dict[str, Line]] = {}
    for row in figures:
        named = str(row["text"])
        group, colon, text = named.rpartition(": ") if splits_last else named.partition(": ")
        groups.setdefault(group if colon else "", {})[text if colon else named] = row
    alike: dict[tuple[str, ...], list[str]] = {}
    for group, rows in groups.items():
        alike.setdefault(tuple(rows), []).append(group)
    lines: list[str] = []
    for texts, names in alike.items():
        for at in range(0, len(names), MOST_COLUMNS):
            columns = names[at : at + MOST_COLUMNS]
            if len(columns) == 1:
                cells = [[text, *_single(groups[columns[0]][text])] for text in texts]
                lines += ["", *table([columns[0], "median", "min .. max"], cells)]
                continue
            cells = [[text, *(_median(groups[name][text]) for name in columns)] for text in texts]
            lines += ["", *table(["median", *columns], cells)]
    return lines


def _single(row: Line) -> list[str]:
    values = row["values"]
    return [_median(row), f"{values['low']:.3f} .. {values['high']:.3f}"]


def _median(row: Line) -> str:
    return _figure(row["values"]["median"], row["unit"])


def _figure(value: float, unit: str) -> str:
    digits = 0 if abs(value) >= 1000 or value == int(value) else 1 if abs(value) >= 100 else 3
    return f"{value:.{digits}f} {unit}".strip()
