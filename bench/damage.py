"""``python -m bench.damage``: what the loaders of others make of damaged files.

Each file is damaged as by ``python -m tests.campaigns.corruption``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from bench.common.results import kept_in
from tests.campaigns.common import keep_result, log, machine
from tests.campaigns.corruption.damage import IN_FILE, Region, hurt_region

__all__ = ["RIVALS", "Tally", "main", "try_rival"]

State = dict[str, torch.Tensor]


@dataclass(slots=True, kw_only=True)
class Tally:
    """One kind of damage."""

    tried: int = 0
    """Damaged files."""
    found: int = 0
    """An exception, of any kind."""
    silent: int = 0
    """Loaded without a word, with other values."""
    unharmed: int = 0
    """Loaded bit for bit: the damage hit bytes that nothing reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rival:
    file: str
    save: Callable[[State, Path], object]
    load: Callable[[Path, State], State]


def _load_dcp(folder: Path, like: State) -> State:
    target = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    dcp_load(target, checkpoint_id=folder, no_dist=True)
    return target


RIVALS: Mapping[str, _Rival] = {
    "torch.load of torch.save": _Rival(
        file="state.pt",
        save=lambda state, folder: torch.save(state, folder / "state.pt"),
        load=lambda folder, _: torch.load(folder / "state.pt", weights_only=True),
    ),
    "safetensors": _Rival(
        file="state.safetensors",
        save=lambda state, folder: safetensors.torch.save_file(state, folder / "state.safetensors"),
        load=lambda folder, _: safetensors.torch.load_file(folder / "state.safetensors"),
    ),
    "dcp.load of dcp.save": _Rival(
        file="__0_0.distcp",
        save=lambda state, folder: dcp_save(state, checkpoint_id=folder, no_dist=True),
        load=_load_dcp,
    ),
}


def try_rival(name: str, folder: Path, *, count: int, seed: int) -> Mapping[str, Tally]:
    """Damage the data file of one rival ``count`` times in each way."""
    rival, rng = RIVALS[name], random.Random(seed)
    state = {"large": torch.randn(300_000), "small": torch.randn(50), "bias": torch.randn(33).bfloat16()}
    sound, hurt = folder / "sound", folder / "hurt"
    sound.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(action="ignore"):
        rival.save(state, sound)
    size = (sound / rival.file).stat().st_size
    region = Region(kind="file", file=rival.file, start=0, stop=size, name=None)
    tallies = {how: Tally() for how in IN_FILE}
    for how, tally in tallies.items():
        for _ in range(count):
            shutil.copytree(sound, hurt)
            if hurt_region(hurt, region, how, rng):
                tally.tried += 1
                outcome = _outcome(rival, hurt, state)
                setattr(tally, outcome, getattr(tally, outcome) + 1)
            shutil.rmtree(hurt)
    shutil.rmtree(folder)
    return tallies


def _outcome(rival: _Rival, folder: Path, state: State) -> str:
    try:
        with warnings.catch_warnings(action="ignore"):  # of torch about what the damage makes it read
            got = rival.load(folder, state)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return "found"
    same = got.keys() == state.keys() and all(
        got[name].dtype == tensor.dtype
        and got[name].shape == tensor.shape
        and torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8))
        for name, tensor in state.items()
    )
    return "unharmed" if same else "silent"


def main() -> None:
    """Damage the files of each rival and count what is found."""
    parser = argparse.ArgumentParser(prog="python -m bench.damage", description="Damaged files, found or not.")
    parser.add_argument("--count", type=int, default=160, help="files for each kind of damage")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--write", action="store_true", help="keep the JSON in bench/results, by machine")
    given = parser.parse_args()
    folder = given.dir.absolute()
    report: dict[str, object] = {"seed": given.seed, "machine": machine(folder)}
    with tempfile.TemporaryDirectory(prefix="aio_ckpt-damage-", dir=folder) as name:
        for rival in RIVALS:
            found = try_rival(rival, Path(name) / "rival", count=given.count, seed=given.seed)
            report[rival] = {how: asdict(tally) for how, tally in found.items()}
            log(f"{rival}: {found}")
    print(json.dumps(report, indent=1))
    if given.write:
        keep_result("damage", report, kept_in(folder))


if __name__ == "__main__":
    main()
