"""Damage checkpoints in every way, count what is found; exit code 1 if not all is.

Found means: ``verify`` names the file (and the tensor, where the bytes are one's), and a load either raises a typed
error or gives every value bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.checkpoint.verify import Fault, verify_checkpoint
from aio_ckpt.errors import AioCkptError
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage
from tests.campaigns.common import every_kind, keep_result, log, machine
from tests.campaigns.corruption.damage import FILES, IN_FILE, WHOLE_FILE, Region, hurt_file, hurt_region, regions_of

__all__ = ["Examined", "Range", "Row", "main"]

_STEP = 7
_NAMED = frozenset({"flip", "garble", "zero-fill", "swap ranges"})
"""Damage that leaves every other byte where it was: the tensor must be named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What became of one damaged checkpoint."""

    faults: tuple[Fault, ...]
    """By ``verify``."""
    error: str | None
    """Of the load, if it raised a typed error."""
    is_equal: bool
    """Whether the load gave every value bit for bit."""

    def misses(self, files: Collection[str], name: str | None) -> str:
        """What was not found of the damage to any of ``files`` (and to ``name``, if given), or ''."""
        if not self.faults:
            return "verify found nothing"
        if not any(file == fault.file or file in fault.message for fault in self.faults for file in files):
            return f"verify did not name {files}: {self.faults[0]}"
        if name is not None and name not in [fault.tensor for fault in self.faults]:
            return f"verify did not name {name}: {self.faults[0]}"
        return "" if self.error is not None or self.is_equal else "the load gave other values"


def _state(large_elements: int, seed: int) -> dict[str, object]:
    """A leaf of each kind, and a tensor of the frozen file."""
    frozen = torch.randn(300_000, generator=torch.Generator().manual_seed(seed))
    kinds = every_kind(large_elements=large_elements, seed=seed)
    return {**kinds, "frozen": torch.nn.Parameter(frozen, requires_grad=False)}


class Range:
    """Sound checkpoints to be damaged, and the means to look at them."""

    def __init__(self, folder: Path, *, large_elements: int = 300_000) -> None:
        self._folder = folder
        self.state = _state(large_elements, 0)
        for name, seed, step in (("sound", 0, _STEP), ("stale", 1, _STEP - 1), ("foreign", 2, _STEP)):
            with SyncCheckpointEngine(folder / name) as engine:
                engine.save(_state(large_elements, seed), step).result()
        self._name = f"step_{_STEP:09d}"
        self.sound = folder / "sound" / self._name
        self.others = (folder / "stale" / f"step_{_STEP - 1:09d}", folder / "foreign" / self._name)
        self.regions = regions_of(self.sound)

    @contextmanager
    def copy(self) -> Iterator[Path]:
        """A checkpoint to damage, the only one of its root."""
        root = Path(tempfile.mkdtemp(dir=self._folder))
        try:
            yield Path(shutil.copytree(self.sound, root / self._name))
        finally:
            shutil.rmtree(root)

    def examine(self, checkpoint: Path) -> Examined:
        """Verify and load it.

        Raises:
            Exception: anything but a typed error: a defect.
        """
        error, is_equal = None, False
        with SyncCheckpointEngine(checkpoint.parent) as engine:
            try:
                is_equal = _is_same(engine.read(), self.state)
            except AioCkptError as raised:
                error = f"{type(raised).__name__}: {raised}"
        return Examined(faults=asyncio.run(_verify(checkpoint)), error=error, is_equal=is_equal)


async def _verify(checkpoint: Path) -> tuple[Fault, ...]:
    executor = Executor("corruption", 2)
    try:
        return await verify_checkpoint(
            Storage(executor),
            checkpoint,
            step=_STEP,
            executor=executor,
            readers=2,
            on_progress=lambda _: None,
        )
    except AioCkptError as error:  # as the command line has it
        return (Fault(file=checkpoint.name, tensor=None, message=str(error)),)
    finally:
        executor.close(10)


def _is_same(got: object, wanted: object) -> bool:
    if isinstance(wanted, torch.Tensor):
        same_kind = isinstance(got, torch.Tensor) and got.dtype == wanted.dtype and got.shape == wanted.shape
        return same_kind and _raw(got) == _raw(wanted)
    if isinstance(wanted, np.ndarray):
        return (
            isinstance(got, np.ndarray)
            and (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            and (got.tobytes() == wanted.tobytes())
        )
    if isinstance(wanted, dict):
        return isinstance(got, dict) and list(got) == list(wanted) and all(_is_same(got[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list | tuple):
        if not isinstance(got, list | tuple) or (type(got), len(got)) != (type(wanted), len(wanted)):
            return False
        return all(_is_same(one, other) for one, other in zip(got, wanted, strict=True))
    return type(got) is type(wanted) and got == wanted


def _raw(tensor: object) -> bytes:
    assert isinstance(tensor, torch.Tensor)
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass(slots=True, kw_only=True)
class Row:
    """One class of bytes and one kind of damage."""

    kind: str
    """Class of bytes, or which file."""
    how: str
    """Kind of damage."""
    tried: int = 0
    """Damaged checkpoints."""
    found: int = 0
    """Of them, found and named, by ``verify``, and never loaded as other values."""
    raised_by_load: int = 0
    """Of them, those that the load refused; the others loaded bit for bit (padding, a zip's header)."""
    misses: list[str] = field(default_factory=list)
    """What was missed."""

    def add(self, examined: Examined, files: Collection[str], name: str | None) -> None:
        """Count one."""
        self.tried += 1
        miss = examined.misses(files, name)
        self.found += not miss
        self.raised_by_load += examined.error is not None
        if miss:
            self.misses.append(miss)


def _run(grounds: Range, count: int, seed: int) -> list[Row]:
    rng = random.Random(seed)
    by_kind: dict[str, list[Region]] = {}
    for region in grounds.regions:
        by_kind.setdefault(region.kind, []).append(region)
    rows = []
    for kind, regions in by_kind.items():
        for how in IN_FILE:
            rows.append(Row(kind=kind, how=how))
            for _ in range(count):
                _try_region(grounds, rng.choice(regions), how, rng, rows[-1])
        log(f"{kind}: {sum(row.found for row in rows if row.kind == kind)} found")
    for kind, file in FILES.items():
        for how in WHOLE_FILE:
            rows.append(Row(kind=kind, how=how))
            for number in range(max(count // 5, 2)):
                with grounds.copy() as checkpoint:
                    hurt = hurt_file(checkpoint, file, how, grounds.others[number % 2], rng)
                    rows[-1].add(grounds.examine(checkpoint), hurt, None)
        log(f"{kind}, whole: {sum(row.found for row in rows if row.kind == kind)} found")
    return rows


def _try_region(grounds: Range, region: Region, how: str, rng: random.Random, row: Row) -> None:
    with grounds.copy() as checkpoint:
        if hurt_region(checkpoint, region, how, rng):
            row.add(grounds.examine(checkpoint), [region.file], region.name if how in _NAMED else None)


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.corruption", description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="trials for each class of bytes and kind of damage")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--write", action="store_true", help="keep the figures in tests/campaigns/results")
    given = parser.parse_args()
    logging.getLogger("aio_ckpt").setLevel(logging.CRITICAL)  # each load says what it found
    with tempfile.TemporaryDirectory(prefix="aio_ckpt-corruption-", dir=given.dir) as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about what the damage makes it read
        grounds = Range(Path(name) / "ours")
        rows = _run(grounds, given.count, given.seed)
    total = Counter[str]()
    for row in rows:
        total.update(tried=row.tried, found=row.found, raised_by_load=row.raised_by_load)
    report = {
        "seed": given.seed,
        "machine": machine(given.dir.absolute()),
        **total,
        "rows": [asdict(row) for row in rows],
    }
    print(json.dumps(report, indent=1))
    if given.write:
        keep_result("corruption", report)
    log(f"corruptions found / tried: {total['found']} / {total['tried']}, refused by load: {total['raised_by_load']}")
    sys.exit(0 if total["found"] == total["tried"] else 1)
