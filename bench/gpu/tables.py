"""A results document as Markdown: tables by state, goals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.common.results import Goal
from bench.common.tables import about_run, table, target_table

__all__ = ["goals", "of_state", "render"]

Line = Mapping[str, Any]
NONE = "-"
GOAL_GB = 8.0
"""Of the state that the goals are stated for."""


def render(document: Mapping[str, Any]) -> str:
    """Tables of all states in the order in which they were measured."""
    ranks = document["ranks"]
    lines = [f"{about_run(document)} {ranks} rank{'s' * (ranks > 1)}."]
    rows: Sequence[Line] = document["rows"]
    for shape, gb in dict.fromkeys((row["shape"], row["gb"]) for row in rows):
        chosen = of_state(rows, shape, gb)
        sized = max(chosen, key=lambda row: int(row["nbytes"]))
        lines += ["", f"**{shape}: {sized['tensors']} tensors, {sized['nbytes'] / 1e9:.2f} GB a rank**", ""]
        lines += _loads(chosen) if document["settings"]["mode"] == "load" else _saves(chosen)
        lines += _tokens(chosen) + _missing(chosen)
    lines += target_table([asdict(goal) | {"is_met": goal.is_met} for goal in goals(document)])
    return "\n".join(lines) + "\n"


def of_state(rows: Sequence[Line], shape: str, gb: float) -> list[Line]:
    """Rows of one state; those of one library beside each other, which ran in the order of their interest."""
    chosen = [row for row in rows if (row["shape"], row["gb"]) == (shape, gb)]
    titles = list(dict.fromkeys(row["title"] for row in chosen))
    return sorted(chosen, key=lambda row: titles.index(row["title"]))


def _name(row: Line) -> str:
    return f"{row['title']}: {row['setting']}"


def _cell(row: Line, name: str, scale: float = 1.0, digits: int = 3) -> str:
    value = row["figures"].get(name)
    if value is None:
        return NONE
    scaled = value * scale
    return f"{scaled:.0f}" if abs(scaled) >= 10 ** (digits - 1) else f"{scaled:.{digits}g}"


def _saves(rows: Sequence[Line]) -> list[str]:
    """Two tables, so that each fits on a page: what a trainer feels first, then where the time goes."""
    done = [row for row in rows if "first_blocked_secs" in row["figures"]]
    if not done:
        return _limits(rows)
    felt = ["first blocks ms", "blocks ms", "staged ms", "durable s", "lost a save ms", "host GB", "device GB"]
    parts = ["done s", "commit ms", "worst step ms", "steps of the drain", "CPU-s/GB", "of the disk", "of the link"]
    return [
        *_limits(rows),
        *table(["", *felt], [_felt(row) for row in done]),
        "",
        *table(["", *parts], [_parts(row) for row in done]),
        "",
        "On disk when done: " + "; ".join(_durabilities(done)) + ".",
    ]


def _felt(row: Line) -> list[str]:
    mark = "" if row["status"] == "ok" else f" **{row['status']}**"
    return [
        _name(row) + mark,
        *(_cell(row, f"{name}_secs", 1e3) for name in ("first_blocked", "blocked", "staged")),
        _cell(row, "durable_secs"),
        _cell(row, "lost_secs", 1e3),
        f"{_cell(row, 'system_bytes', 1e-9)} / {_cell(row, 'tree_bytes', 1e-9)}",
        _cell(row, "device_bytes", 1e-9),
    ]


def _parts(row: Line) -> list[str]:
    return [
        _name(row),
        _cell(row, "done_secs"),
        _commit(row),
        _cell(row, "worst_step_secs", 1e3),
        *(_cell(row, name) for name in ("drain_step_ratio", "cpu_secs_per_gb", "disk_share", "link_share")),
    ]


def _durabilities(rows: Sequence[Line]) -> list[str]:
    """What each library has made durable when it says that it is done."""
    return list(dict.fromkeys(f"{row['title']}: {row['durability']}" for row in rows))


def _commit(row: Line) -> str:
    """From the slowest rank's data being durable until the checkpoint is visible."""
    figures = row["figures"]
    return f"{1e3 * (figures['done_secs'] - figures['synced_secs']):.0f}" if "synced_secs" in figures else NONE


def _limits(rows: Sequence[Line]) -> list[str]:
    """What the machine gave in this run."""
    raws = [row for row in rows if row["contender"] == "raw" and row["figures"]]
    if not raws:
        return []
    said = []
    for name, title, digits in (("disk_secs", "disk by O_DIRECT", 2), ("copy_secs", "one pinned copy to the host", 1)):
        rates = [row["nbytes"] / 1e9 / row["figures"][name] for row in raws if name in row["figures"]]
        if rates:
            said.append(f"{title} {' and '.join(f'{rate:.{digits}f}' for rate in rates)} GB/s a rank")
    steps = [row["figures"]["step_secs"] for row in rows if "step_secs" in row["figures"]]
    if steps:
        said.append(f"training step {min(steps) * 1e3:.1f} to {max(steps) * 1e3:.1f} ms")
    return ["Limits in this run: " + ", ".join(said) + ".", ""]


def _loads(rows: Sequence[Line]) -> list[str]:
    head = ["", "first s", "load s", "GB/s", "of the disk", "CPU-s/GB", "host GB", "device GB"]
    lines = []
    for row in rows:
        if row["contender"] == "raw" or "load_secs" not in row["figures"]:
            continue
        rate = f"{row['nbytes'] / 1e9 / row['figures']['load_secs']:.2f}"
        host = f"{_cell(row, 'system_bytes', 1e-9)} / {_cell(row, 'tree_bytes', 1e-9)}"
        cells = [_cell(row, "load_first_secs"), _cell(row, "load_secs"), rate]
        cells += [_cell(row, "disk_share"), _cell(row, "cpu_secs_per_gb"), host]
        lines.append([_name(row), *cells, _cell(row, "device_bytes", 1e-9)])
    return [*_limits(rows), *(table(head, lines) if lines else [])]


def _tokens(rows: Sequence[Line]) -> list[str]:
    counted = [row for row in rows if row["every"]]
    if not counted:
        return []
    steps = sorted({int(item["every"]) for row in counted for item in row["every"]})
    head = ["tokens/s, share of no saves", *(f"every {count} step{'s' * (count > 1)}" for count in steps)]
    lines = []
    for row in counted:
        by_steps = {int(item["every"]): item for item in row["every"]}
        lines.append([_name(row), *(_rate(by_steps.get(count)) for count in steps)])
    return ["", *table(head, lines)]


def _rate(item: Mapping[str, float] | None) -> str:
    if item is None:
        return NONE
    return f"{item['tokens_per_sec']:.0f} ({item['tokens_per_sec'] / item['bare_tokens_per_sec']:.1%})"


def _missing(rows: Sequence[Line]) -> list[str]:
    """A contender that could not run, or not to its end, is a line, too."""
    bad = [row for row in rows if row["status"] != "ok"]
    if not bad:
        return []
    return ["", *table(["did not run to its end", "", "why"], [[_name(r), r["status"], r["error"]] for r in bad])]


def goals(document: Mapping[str, Any]) -> list[Goal]:
    """What was promised for 8.5 GB on one GPU, from the rows of this run."""
    if not document["machine"]["devices"] or document["ranks"] != 1:
        return []
    rows = {(row["shape"], row["gb"], row["contender"]): row["figures"] for row in document["rows"]}
    if document["settings"]["mode"] == "load":
        return _load_goals(rows)
    found: list[Goal] = []
    default = rows.get(("blocks", GOAL_GB, "aio-default"), {})
    half = rows.get(("blocks", GOAL_GB, "aio-half"), {})
    fenced = rows.get(("blocks", GOAL_GB, "aio-fenced"), {})

    def add(
        text: str, figures: Mapping[str, float], name: str, bound: float, unit: str, *, floor: bool = False
    ) -> None:
        if name in figures:
            scale = 1e3 if unit == "ms" else 1.0
            found.append(Goal(text=text, figure=figures[name] * scale, bound=bound, unit=unit, is_floor=floor))

    add("8.5 GB: save() blocks, later saves", default, "blocked_secs", 3, "ms")
    add("8.5 GB: first save blocks", default, "first_blocked_secs", 1, "s")
    add("8.5 GB: training lost a save", default, "lost_secs", 10, "ms")
    if "lost_secs" in half and "lost_secs" in fenced:
        share = half["lost_secs"] / fenced["lost_secs"]
        found.append(Goal(text="8.5 GB: lost with room for half of the state / for none", figure=share, bound=0.5))
    rivals = [
        figures["lost_secs"]
        for (shape, gb, key), figures in rows.items()
        if (shape, gb) == ("blocks", GOAL_GB) and not key.startswith("aio") and figures.get("lost_secs", 0) > 0
    ]
    if rivals and "lost_secs" in default:
        share = default["lost_secs"] / min(rivals)
        found.append(Goal(text="8.5 GB: training lost a save / best rival", figure=share, bound=0.1))
    add("8.5 GB: durable, share of raw O_DIRECT", default, "disk_share", 0.95, "x", floor=True)
    add("8.5 GB: staged, share of one pinned copy", default, "link_share", 0.95, "x", floor=True)
    add("8.5 GB: CPU", default, "cpu_secs_per_gb", 0.1, "CPU-s/GB")
    add("8.5 GB: median step of the drain / without", default, "drain_step_ratio", 1.02, "x")
    for (shape, _, key), figures in rows.items():
        if (shape, key) == ("small", "aio-default"):
            add("10,000 x 64 KiB: save() blocks", figures, "blocked_secs", 20, "ms")
    return found


def _load_goals(rows: Mapping[tuple[str, float, str], Mapping[str, float]]) -> list[Goal]:
    ours = rows.get(("blocks", GOAL_GB, "aio"), {})
    theirs = rows.get(("blocks", GOAL_GB, "dcp-load"), {})
    found: list[Goal] = []
    if "disk_share" in ours:
        text = "8.5 GB: load to the device, share of raw O_DIRECT read"
        found.append(Goal(text=text, figure=ours["disk_share"], bound=0.9, is_floor=True))
    if "load_secs" in ours and "load_secs" in theirs:
        faster = theirs["load_secs"] / ours["load_secs"]
        found.append(Goal(text="8.5 GB: times faster than dcp.load", figure=faster, bound=4, is_floor=True))
    return found
