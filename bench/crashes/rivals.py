"""What a user would pick instead of aio_ckpt, each as its documentation says, as contenders that can be crashed."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.campaigns.crash.contenders import KEEP_LAST, BrokenError, Contender, OnCall, check_same
from tests.campaigns.crash.contents import tensors_of
from tests.campaigns.crash.points import KillPoint

__all__ = ["RIVALS"]


def _plain(save: Callable[[Path, int], None]) -> Callable[..., AbstractContextManager[Callable[[int], None]]]:
    @contextmanager
    def saving(root: Path, point: KillPoint | None, on_call: OnCall | None) -> Iterator[Callable[[int], None]]:
        del point, on_call
        root.mkdir(exist_ok=True)
        yield lambda number: save(root, number)

    return saving


def _whole(tensors: dict[str, torch.Tensor]) -> int:
    number = int(tensors["number"].item())
    check_same(tensors, {name: tensors_of(number)[name] for name in tensors})
    if tensors.keys() != tensors_of(number).keys():
        raise BrokenError("names are missing")
    return number


def _torch_save(root: Path, number: int) -> None:
    torch.save(tensors_of(number), root / "latest.pt")


def _torch_replace(root: Path, number: int) -> None:
    torch.save(tensors_of(number), root / "latest.pt.tmp")
    os.replace(root / "latest.pt.tmp", root / "latest.pt")


def _torch_newest(root: Path) -> int | None:
    if not (root / "latest.pt").exists():
        return None
    return _whole(torch.load(root / "latest.pt", weights_only=True))


def _safetensors_save(root: Path, number: int) -> None:
    safetensors.torch.save_file(tensors_of(number), root / "latest.safetensors")


def _safetensors_newest(root: Path) -> int | None:
    if not (root / "latest.safetensors").exists():
        return None
    return _whole(safetensors.torch.load_file(root / "latest.safetensors"))


def _dcp_write(folder: Path, number: int) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp_save(tensors_of(number), storage_writer=FileSystemWriter(folder), no_dist=True)


def _dcp_read(folder: Path) -> int:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(0).items()}
    with warnings.catch_warnings(action="ignore"):
        dcp_load(tensors, checkpoint_id=folder, no_dist=True)
    return _whole(tensors)


def _dcp_save(root: Path, number: int) -> None:
    """A new directory for each; all but the two newest are removed, as a trainer would."""
    _dcp_write(root / f"step_{number:09d}", number)
    for old in sorted(root.glob("step_*"))[:-KEEP_LAST]:
        shutil.rmtree(old)


def _dcp_newest(root: Path) -> int | None:
    found = sorted(path.parent for path in root.glob("step_*/.metadata")) if root.exists() else []
    return _dcp_read(found[-1]) if found else None


def _dcp_overwrite(root: Path, number: int) -> None:
    _dcp_write(root / "latest", number)


def _dcp_overwritten(root: Path) -> int | None:
    return _dcp_read(root / "latest") if (root / "latest" / ".metadata").exists() else None


RIVALS = (
    Contender(name="torch.save", saving=_plain(_torch_save), newest=_torch_newest),
    Contender(name="torch.save + os.replace", saving=_plain(_torch_replace), newest=_torch_newest),
    Contender(name="safetensors", saving=_plain(_safetensors_save), newest=_safetensors_newest),
    Contender(name="dcp.save, a new directory each", saving=_plain(_dcp_save), newest=_dcp_newest),
    Contender(name="dcp.save, overwriting", saving=_plain(_dcp_overwrite), newest=_dcp_overwritten),
)
