"""PNG of a results document: ``python -m bench.gpu --plot FILE``. Needs matplotlib."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.tables import of_state

__all__ = ["draw"]

OURS, THEIRS = "#1f77b4", "#b0b0b0"
SAVE_PANELS = (
    ("blocked_secs", "save() blocks, later saves (ms, log)", 1e3),
    ("lost_secs", "training lost a save, drain included (ms, log)", 1e3),
    ("durable_secs", "durable, fsync added where missing (s, log)", 1.0),
)
LOAD_PANELS = (("load_secs", "load to the device, cold (s)", 1.0),)
LEAST = 1e-4
"""Of a second; what is less, or negative by noise, is drawn as this and labelled as it is."""


def draw(path: Path) -> list[Path]:
    """One PNG a state beside the JSON, and one for tokens/s if they were measured."""
    import matplotlib as mpl

    mpl.use("Agg")
    document = json.loads(path.read_text())
    drawn: list[Path] = []
    states = list(dict.fromkeys((row["shape"], row["gb"]) for row in document["rows"]))
    for shape, gb in states:
        rows = of_state(document["rows"], shape, gb)
        stem = path.with_name(f"{path.stem}-{shape}-{gb:g}.png")
        panels = LOAD_PANELS if document["settings"]["mode"] == "load" else SAVE_PANELS
        if _bars(rows, panels, stem, document):
            drawn.append(stem)
        if counted := [row for row in rows if row["every"]]:
            drawn.append(_lines(counted, stem.with_name(f"{stem.stem}-tokens.png"), document))
    return drawn


def _title(row: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    devices = document["machine"]["devices"]
    where = f"{document['ranks']} x {devices[0]}" if devices else "a machine without a GPU: a dry run"
    return f"{row['shape']}, {row['nbytes'] / 1e9:.1f} GB in {row['tensors']} tensors a rank, {where}"


def _bars(
    rows: Sequence[Mapping[str, Any]], panels: Sequence[tuple[str, str, float]], path: Path, document: Mapping[str, Any]
) -> bool:
    from matplotlib import pyplot as plt

    shown = [row for row in rows if any(name in row["figures"] for name, _, _ in panels)]
    if not shown:
        return False
    size = (5.5 * len(panels) + 3, 1.2 + 0.34 * len(shown))
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    names = [f"{row['title']}: {row['setting']}" for row in shown]
    colours = [OURS if row["title"] == "aio_ckpt" else THEIRS for row in shown]
    for axis, (name, title, scale) in zip(axes[0], panels, strict=True):
        values = [row["figures"].get(name) for row in shown]
        lengths = [0.0 if value is None else max(value, LEAST) * scale for value in values]
        bars = axis.barh(names, lengths, color=colours)
        labels = ["" if value is None else f"{value * scale:.3g}" for value in values]
        axis.bar_label(bars, labels, padding=2, fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.margins(x=0.18)
        if len(panels) > 1:
            axis.set_xscale("log")
    axes[0][0].invert_yaxis()
    figure.suptitle(_title(shown[0], document), fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _lines(rows: Sequence[Mapping[str, Any]], path: Path, document: Mapping[str, Any]) -> Path:
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for row in rows:
        steps = [item["every"] for item in row["every"]]
        shares = [100 * item["tokens_per_sec"] / item["bare_tokens_per_sec"] for item in row["every"]]
        is_ours = row["title"] == "aio_ckpt"
        style = "-o" if is_ours else "--."
        axis.plot(steps, shares, style, label=f"{row['title']}: {row['setting']}", linewidth=2 if is_ours else 1)
    axis.set_xscale("log")
    axis.set_xlabel("steps from save to save")
    axis.set_ylabel("tokens/s, % of training without saves")
    axis.legend(fontsize=7)
    axis.set_title(_title(rows[0], document), fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path
