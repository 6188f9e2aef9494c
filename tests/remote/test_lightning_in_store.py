"""Lightning's real Trainer that saves to a bucket by our plugin. Skipped without Lightning and s3fs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from aio_ckpt import SyncCheckpointEngine
from tests.remote.test_object_store import keys

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    pytest.importorskip("s3fs")
    import s3fs
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning_runs import Small, batches, trainer

    from aio_ckpt.integrations import lightning as adapter
    from aio_ckpt.integrations.lightning import AioCheckpointIO, load_from_checkpoint

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def forgetful_s3fs(bucket: str) -> None:
    """s3fs keeps its listings and its instances, which know the server of the test before."""
    s3fs.S3FileSystem.clear_instance_cache()


def fit(url: str, epochs: int, folder: Path, **options: Any) -> tuple[Small, ModelCheckpoint]:
    checkpoints = ModelCheckpoint(url, save_last=True, save_top_k=2, monitor="epoch", mode="max")
    module = Small()
    trainer(folder, epochs, AioCheckpointIO(), callbacks=[checkpoints]).fit(module, batches(), **options)
    return module, checkpoints


def test_a_run_that_saves_to_a_bucket_goes_on_from_there_with_equal_losses(bucket: str, tmp_path: Path) -> None:
    whole, _ = fit(f"{bucket}/whole", 4, tmp_path)
    fit(f"{bucket}/run", 2, tmp_path)
    resumed, checkpoints = fit(f"{bucket}/run", 4, tmp_path, ckpt_path=f"{bucket}/run/last.ckpt")
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step >= 8}
    names = {key.partition("/")[0] for key in keys(f"{bucket}/run")} - {".aio_ckpt"}
    assert names == {"epoch=2-step=12.ckpt", "epoch=3-step=16.ckpt", "last.ckpt"}  # the others were deleted
    best = load_from_checkpoint(Small, checkpoints.best_model_path)
    assert all(torch.equal(best.state_dict()[name], value) for name, value in resumed.state_dict().items())
    with SyncCheckpointEngine(f"{bucket}/other") as engine:
        assert "state_dict" in engine.read(path=checkpoints.best_model_path)


def test_an_object_of_stock_lightning_is_loaded_and_removed(bucket: str) -> None:
    stock, ours = TorchCheckpointIO(), AioCheckpointIO()
    stock.save_checkpoint({"state_dict": {"w": torch.ones(3)}}, f"{bucket}/run/old.ckpt")
    assert torch.equal(ours.load_checkpoint(f"{bucket}/run/old.ckpt")["state_dict"]["w"], torch.ones(3))
    ours.remove_checkpoint(f"{bucket}/run/old.ckpt")
    assert keys(f"{bucket}/run") == set()
    ours.teardown()


def test_without_obstore_lightning_itself_saves_and_the_warning_names_the_extra(
    bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(adapter, "has_obstore", lambda: False)
    AioCheckpointIO().save_checkpoint({"state_dict": {}}, f"{bucket}/run/a.ckpt")
    assert keys(f"{bucket}/run") == {"a.ckpt"}
    assert "pip install 'aio-ckpt[remote]'" in caplog.text
