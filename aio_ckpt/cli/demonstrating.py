"""``demo``: the engine at work."""

from __future__ import annotations

from pathlib import Path

import click

from aio_ckpt.cli.arguments import json_option
from aio_ckpt.cli.console import Screen

_MIN_STEPS = 20
"""With fewer steps, no save is certainly durable before the kill."""


@click.command("demo", epilog="Example: aio-ckpt demo --out /tmp/demo --steps 60")
@click.option("--out", type=click.Path(path_type=Path), default=Path("demo-out"), show_default=True, help="Directory.")
@click.option("--steps", type=click.IntRange(_MIN_STEPS), default=100, show_default=True, help="Of training.")
@click.option(
    "--seed", type=click.IntRange(0, (1 << 31) - 2), help="Of everything random; drawn and shown if not given."
)
@json_option
def demo_command(out: Path, steps: int, seed: int | None, *, as_json: bool) -> int:
    """Train a small GPT, kill it, resume it, compare every loss."""
    from aio_ckpt.demo.run import run_demo

    screen = Screen(as_json=as_json)
    report = run_demo(out, screen, steps=steps, seed=seed)
    if as_json:
        screen.json(report)
    return 0 if report.is_identical else 1
