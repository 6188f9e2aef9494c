"""Two values that are stored for one memory of a template: refused, or read one after the other as by stock DCP."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import aio_ckpt
from aio_ckpt.dcp import Reader
from aio_ckpt.dcp.rank_load import RankLoad
from aio_ckpt.errors import TemplateMismatchError


def save_stock(path: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def test_two_values_that_stock_stored_for_one_tensor_are_refused_before_it_is_touched(tmp_path: Path) -> None:
    path = save_stock(tmp_path / "x", {"a": torch.ones(300_000), "b": torch.full((300_000,), 2.0), "c": torch.ones(3)})
    state = {"a": (tied := torch.zeros(300_000)), "b": tied, "c": (other := torch.zeros(3))}
    with pytest.raises(TemplateMismatchError, match=r"'b' shares memory with 'a' .* holds other values") as caught:
        aio_ckpt.load(path, state)
    assert not caught.value.target_modified
    assert not tied.any()
    assert not other.any()


def test_tied_tensors_that_stock_stored_twice_are_loaded(tmp_path: Path) -> None:
    path = save_stock(tmp_path / "x", {"a": torch.arange(9.0), "b": torch.arange(9.0)})
    aio_ckpt.load(path, {"a": (tied := torch.zeros(9)), "b": tied})
    assert torch.equal(tied, torch.arange(9.0))


def test_views_of_one_storage_that_stock_stored_whole_are_two_values(tmp_path: Path) -> None:
    """The bytes and their checksum are those of the storage, from which each name takes another part."""
    matrix = torch.arange(9.0).view(3, 3)
    path = save_stock(tmp_path / "x", {"a": matrix, "b": matrix.T})
    with pytest.raises(TemplateMismatchError, match="other values"):
        aio_ckpt.load(path, {"a": (tied := torch.zeros(3, 3)), "b": tied})


def test_tied_tensors_of_stock_without_checksums_are_refused_by_what_is_lacking(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save_stock(tmp_path / "x", {"a": torch.ones(9), "b": torch.ones(9)})
    finally:
        torch.serialization.set_crc32_options(before)
    with pytest.raises(TemplateMismatchError, match=r"has no checksums that tell .*: give it memory of its own"):
        aio_ckpt.load(path, {"a": (tied := torch.zeros(9)), "b": tied})


def test_two_values_for_one_dtensor_are_refused(tmp_path: Path) -> None:
    path = save_stock(tmp_path / "x", {"a": torch.ones(4), "b": torch.full((4,), 2.0)})
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        tied = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(TemplateMismatchError, match="other values"):
            aio_ckpt.load(path, {"a": tied, "b": tied})
        same = save_stock(tmp_path / "same", {"a": torch.ones(4), "b": torch.ones(4)})
        aio_ckpt.load(same, {"a": tied, "b": tied})
        assert torch.equal(tied.to_local(), torch.ones(4))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_last_of_two_values_for_one_tensor_counts_in_dcp_load_as_with_stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their reads would run at once, and mix both."""
    path = save_stock(tmp_path / "x", {"a": torch.ones(9), "b": torch.full((9,), 2.0), "c": torch.ones(9)})
    rounds: list[float] = []
    memory = torch.zeros(27)
    fetch = RankLoad._fetch

    async def fetched(self: RankLoad, reads: Any) -> None:
        await fetch(self, reads)
        rounds.append(float(memory[0]))

    monkeypatch.setattr(RankLoad, "_fetch", fetched)
    state = {"a": memory[:9], "b": memory[:9], "c": memory[9:18]}
    dcp.load(state, storage_reader=Reader(path), no_dist=True)
    assert rounds == [1, 2]
    assert torch.equal(memory, torch.tensor([2.0] * 9 + [1.0] * 9 + [0.0] * 9))
