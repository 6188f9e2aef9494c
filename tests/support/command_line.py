"""Commands of ``aio-ckpt`` in tests, and checkpoints for them."""

from __future__ import annotations

import json
import os
import warnings
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from aio_ckpt.checkpoint.catalog import Item
from aio_ckpt.checkpoint.open import open_checkpoint
from aio_ckpt.cli import commands as cli
from aio_ckpt.leaves.values import PerRank
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage


def state() -> dict[str, object]:
    embed = torch.arange(600_000, dtype=torch.float32).reshape(600, 1000)
    return {
        "model": OrderedDict(embed=embed, head=embed, bias=torch.ones(7, dtype=torch.bfloat16)),
        "lr": 1e-3,
        "rng": PerRank(torch.zeros(16, dtype=torch.uint8)),
    }


def called(capsys, *arguments: object) -> tuple[int, str, str]:
    code = cli.run([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def document(capsys, *arguments: object) -> tuple[int, dict]:
    code, out, _ = called(capsys, *arguments, "--json")
    return code, json.loads(out)


def save_by_dcp(values: dict[str, object], path: Path, writer: dcp.StorageWriter | None = None) -> None:
    """Save by ``dcp.save``, with stock's writer unless another one is given."""
    with warnings.catch_warnings(action="ignore"):  # of one process being alone
        dcp.save(values, checkpoint_id=path, storage_writer=writer, no_dist=True)


async def stored(checkpoint: Path, name: str) -> Item:
    """Where the bytes of a tensor are."""
    executor = Executor("test", 1)
    try:
        opened = await open_checkpoint(Storage(executor), checkpoint, executor=executor)
        item = opened.catalog.shards[name][0]
    finally:
        executor.close(5.0)
    assert isinstance(item, Item)
    return item


async def flip(checkpoint: Path, name: str) -> Item:
    """Flip one bit in the middle of a tensor."""
    item = await stored(checkpoint, name)
    with (checkpoint / item.file).open("r+b") as file:
        file.seek(item.raw_offset + item.raw_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    return item
