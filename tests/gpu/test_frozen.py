"""What does not change on a device is cloned, whatever way its copies take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import aio_ckpt
from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.cli.commands import run

pytestmark = [pytest.mark.gpu(0), pytest.mark.slow]  # the host's part is proven in tests/engine/saving
MIB = 1 << 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATHERED = 200
SLEEP_CYCLES = 200_000_000
"""A tenth of a second of a GPU, as of training that is queued when ``save()`` is called."""
SETTINGS: list[dict[str, Any]] = [{}, {"staging": "pageable"}]
if DEVICE == "cuda":  # without a device these change nothing
    SETTINGS += [{"device_copy_bytes": 0}, {"gather_bytes": 0}]


def state(value: float) -> dict[str, Any]:
    """:func:`base_state`, and what changes."""
    return base_state() | trained(value)


def trained(value: float) -> dict[str, Any]:
    """Many small tensors, which the device computes once work is done that was queued before."""
    if DEVICE == "cuda":
        torch.cuda._sleep(SLEEP_CYCLES)
    return {"trained": {f"{at}": torch.full((1000 + at,), value, device=DEVICE) for at in range(GATHERED)}}


def base_state() -> dict[str, Any]:
    """Large and small tensors of a base, in a dtype that is copied as it is, and one that needs a conversion."""
    return {
        "base": {f"large {at}": torch.full((3 * MIB // 4 + at,), 1.0 + at, device=DEVICE) for at in range(4)},
        "small": {f"{at}": torch.full((100 + at,), at, dtype=torch.bfloat16, device=DEVICE) for at in range(GATHERED)},
        "strided": torch.arange(MIB, device=DEVICE).reshape(1024, 1024)[:, ::2],
        "host": torch.arange(MIB),
    }


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_stays_on_a_device_is_cloned_and_what_changes_is_written(tmp_path: Path, settings: dict[str, Any]) -> None:
    with SyncCheckpointEngine(tmp_path / "root", EngineConfig(keep_last=2, **settings)) as engine:
        for step in range(1, 10):
            given = state(step)
            if step == 6:
                given["small"]["7"][-1] = -1
            report = engine.save(given, step=step).result()
            assert (report.cloned_bytes > 12 * MIB) is (step in (5, 8, 9)), step
        found = aio_ckpt.read(tmp_path / "root" / "step_000000009")
    for group, value in state(9).items():
        for name, tensor in value.items() if isinstance(value, dict) else [("", value)]:
            stored = found[group][name] if name else found[group]
            assert torch.equal(stored, tensor.cpu()), (group, name)
    assert run(["verify", str(tmp_path / "root")]) == 0


def frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_is_trusted_stays_on_the_device_until_it_changes(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Work that is still queued on the stream when ``save()`` is called belongs to the state."""
    base = base_state()
    base["strided"] = base["strided"].contiguous()
    base["small"] = {name: base["small"][name] for name in ("5", "6", "7")}  # the sample looks at each block
    base = {
        group: {name: frozen(tensor) for name, tensor in value.items()} if isinstance(value, dict) else frozen(value)
        for group, value in base.items()
    }
    first, second = base["base"]["large 1"], base["base"]["large 2"]
    with SyncCheckpointEngine(tmp_path / "root", EngineConfig(frozen="trusted", relink_limit=3, **settings)) as engine:
        for step in range(1, 16):
            if step in (7, 8):
                first.add_(1)
            if step == 13:
                second.data.add_(1)  # another counter than that of ``second``
            report = engine.save(base | trained(step), step=step).result()
            assert (report.cloned_bytes > 0) is (step in (2, 3, 5, 6, 9, 10, 12, 15)), step
            found = aio_ckpt.read(tmp_path / "root" / f"step_{step:09d}")
            assert torch.equal(found["base"]["large 1"], first.cpu()), step
            assert torch.equal(found["base"]["large 2"], second.cpu()), step
    assert caplog.text.count("does not count in its _version") == 1
    for group, value in (base | trained(15)).items():
        for name, tensor in value.items() if isinstance(value, dict) else [("", value)]:
            stored = found[group][name] if name else found[group]
            assert torch.equal(stored, tensor.cpu()), (group, name)
    assert run(["verify", str(tmp_path / "root")]) == 0
