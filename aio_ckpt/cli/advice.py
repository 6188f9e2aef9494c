"""Advice below the list of damaged steps: what a load takes instead, and what deletes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from aio_ckpt.cli.console import printable
from aio_ckpt.format.names import StepNames
from aio_ckpt.format.root_manifest import METADATA_FILE


def advice(root: Path, names: StepNames, damaged: Sequence[Path], good: Sequence[int] | None) -> str:
    """Return one line on the steps in the directories ``damaged`` of ``root``; empty if there is nothing to advise.

    Args:
        good: steps that are not damaged; None if nobody looked.
    """
    found = {path: step for path in damaged if (step := names.step(path.name)) is not None}
    if not found:
        return ""
    committed = [names.step(name) for name in os.listdir(root) if (root / name / METADATA_FILE).exists()]
    newest = max((step for step in committed if step is not None), default=-1)
    parts = []
    if good:
        parts.append(f"load() {'falls back to' if max(found.values()) > max(good) else 'takes'} step {max(good)}")
    elif good is not None:
        parts.append("load() finds no step that is not damaged")
    steps = sorted(step for path, step in found.items() if (path / METADATA_FILE).exists())
    if steps:
        told = " ".join(map(str, steps)) + (" --allow-newest" if newest in steps else "")
        parts.append(f"'aio-ckpt rm {printable(str(root))} {told}' deletes {'it' if len(steps) == 1 else 'them'}")
    if torn := [printable(str(path)) for path in found if not (path / METADATA_FILE).exists()]:
        parts.append(f"delete by hand: {', '.join(torn)}")  # without .metadata, it is no committed step for rm
    return "; ".join(parts)
