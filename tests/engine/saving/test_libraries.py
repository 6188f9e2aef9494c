"""Containers and whole states of libraries that people use; a test whose library cannot be imported is skipped.

``pip install -e '.[dev,libraries]'`` installs the libraries.
"""

from __future__ import annotations

import argparse
import importlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gated_storage import TIMEOUT

from aio_ckpt import EngineConfig, SyncCheckpointEngine, UnsafeObjectError


def library(name: str) -> Any:
    """The module, or a skip: also where it is built for another torch than this one."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever an import of somebody else's raises
        pytest.skip(f"{name} cannot be imported: {error}")


# -- containers -------------------------------------------------------------------------------------


def easy_dict(number: float) -> Any:
    return library("easydict").EasyDict({"lr": number, "deep": {"w": torch.full((2,), float(number))}})


def omega(number: float) -> Any:
    return library("omegaconf").OmegaConf.create(
        {"lr": number, "deep": {"layers": [1, {"x": number}], "sizes": [2, 3]}}
    )


def config_dict(number: float) -> Any:
    return library("ml_collections").ConfigDict({"lr": number, "deep": {"x": number}})


MAKERS = {"EasyDict": easy_dict, "DictConfig": omega, "ConfigDict": config_dict}


@pytest.mark.parametrize("case", MAKERS)
def test_a_mapping_of_a_library_is_loaded_into_its_own_object_and_read(root: Path, case: str) -> None:
    make = MAKERS[case]
    with SyncCheckpointEngine(root) as engine:
        engine.save({"cfg": make(2), "w": torch.ones(1)}).result(TIMEOUT)
        target = make(1)
        state = {"cfg": target, "w": torch.zeros(1)}
        engine.load(state)
        assert state["cfg"] is target
        assert str(target) == str(make(2))
        plain, report = engine.read(with_report=True)
        assert type(plain["cfg"]) is dict
        assert plain["cfg"]["lr"] == 2
        assert any(case in line for line in report.plain)
    with SyncCheckpointEngine(root, EngineConfig(trusted_objects=True)) as engine:
        whole = engine.read()["cfg"]
    assert type(whole) is type(target)
    assert str(whole) == str(make(2))


def test_a_config_keeps_its_interpolations_and_what_is_missing(root: Path) -> None:
    omegaconf = library("omegaconf")

    def make(rate: float) -> Any:
        held = {"lr": rate, "opt": {"lr": "${lr}", "name": "???"}, "all": ["${opt.lr}", "???", [rate], "${opt}"]}
        return omegaconf.OmegaConf.create({**held, "other": "${opt}", "none": None})

    def shown(config: Any) -> Any:
        return omegaconf.OmegaConf.to_container(config, resolve=False)

    with SyncCheckpointEngine(root, EngineConfig(trusted_objects=True)) as engine:
        engine.save({"cfg": make(0.1), "list": make(0.2).all, "w": torch.ones(1)}).result(TIMEOUT)
        state = {"cfg": make(1), "list": make(2).all, "w": torch.zeros(1)}
        engine.load(state)
        read = engine.read()
    for back in (state, read):
        assert shown(back["cfg"]) == shown(make(0.1))
        assert shown(back["list"]) == shown(make(0.2).all)
        assert type(back["list"]) is type(make(1).all)
        back["cfg"].lr = 0.5
        assert (back["cfg"].opt.lr, back["cfg"].other.lr, back["cfg"]["all"][0]) == (0.5, 0.5, 0.5)


# -- optimizers of torchao ----------------------------------------------------------------------------


@pytest.mark.slow  # torchao takes seconds to import, and compiles its step
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_a_low_bit_optimizer_goes_on_as_if_it_had_never_stopped(root: Path, name: str) -> None:
    kind = getattr(library("torchao.optim"), name)

    def trained(steps: int, seed: int) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(128, 64, bias=False)
        optimizer = kind(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 128)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    def moments(optimizer: Any) -> list[torch.Tensor]:
        return [value.dequantize() for value in optimizer.state_dict()["state"][0].values() if hasattr(value, "codes")]

    model, optimizer = trained(3, seed=1)
    with SyncCheckpointEngine(root) as engine:
        engine.save({"model": model, "optimizer": optimizer}).result(TIMEOUT)
        for steps in (0, 1):
            other, fresh = trained(steps, seed=2)
            engine.load({"model": other, "optimizer": fresh})
            assert len(moments(fresh)) == 2
            assert all(map(torch.equal, moments(fresh), moments(optimizer)))
        template = trained(1, seed=3)[1].state_dict()
        engine.load({"optimizer": template})
        assert torch.equal(template["state"][0]["exp_avg"].codes, optimizer.state_dict()["state"][0]["exp_avg"].codes)
        read = engine.read()["optimizer"]["state"][0]["exp_avg"]
    assert type(read) is type(template["state"][0]["exp_avg"])
    assert torch.equal(read.dequantize(), moments(optimizer)[0])


# -- what trainers save -----------------------------------------------------------------------------


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *inputs: torch.Tensor) -> None:
    model(*inputs).sum().backward()
    optimizer.step()


def of_timm(folder: Path) -> Any:
    """What its CheckpointSaver writes."""
    timm = library("timm")
    library("timm.optim")
    library("timm.utils")
    model = timm.create_model("test_vit")
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3)
    stepped(model, optimizer, torch.randn(2, 3, 160, 160))
    args = argparse.Namespace(model="test_vit", lr=1e-3, opt="adamw", betas=(0.9, 0.95))
    saver = timm.utils.CheckpointSaver(model, optimizer, args=args, checkpoint_dir=str(folder))
    saver._save(str(folder / "timm.pt"), 3, 0.5)
    return torch.load(folder / "timm.pt", weights_only=False)


def of_torchvision(folder: Path) -> Any:
    """What its reference scripts save."""
    model = library("torchvision").models.mobilenet_v3_small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped(model, optimizer, torch.randn(2, 3, 64, 64))
    schedulers = torch.optim.lr_scheduler
    first, second = schedulers.LinearLR(optimizer), schedulers.CosineAnnealingLR(optimizer, 10)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr_scheduler": schedulers.SequentialLR(optimizer, [first, second], [3]).state_dict(),
        "epoch": 3,
        "args": argparse.Namespace(lr=0.1, device="cpu"),
        "model_ema": torch.optim.swa_utils.AveragedModel(model).state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    }


def of_lightning(folder: Path) -> Any:
    """What its Trainer dumps, with hyperparameters of hydra."""
    lightning, settings = library("lightning"), library("omegaconf").OmegaConf.create({"dim": 4, "layers": [1, 2]})

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, cfg: Any) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters())
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=str(folder), **quiet)
    trainer.fit(Module(settings), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
    return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)


def of_mmengine(folder: Path) -> Any:
    """What its Runner writes; the message hub holds objects of its own."""
    runner, base = library("mmengine.runner"), library("mmengine.model").BaseModel

    class Model(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, inputs: Any, data_samples: Any = None, mode: str = "tensor") -> Any:
            return {"loss": self.layer(inputs).sum()}

    made = runner.Runner(
        Model(),
        work_dir=str(folder / "mm"),
        train_dataloader=torch.utils.data.DataLoader([{"inputs": torch.randn(2)} for _ in range(4)], batch_size=2),
        train_cfg={"by_epoch": True, "max_epochs": 1},
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}},
        param_scheduler={"type": "MultiStepLR", "milestones": [1]},
        default_scope="mmengine",
        experiment_name=uuid.uuid4().hex,  # two of one second would share their message hub
        log_level="ERROR",
    )
    made.train()
    return torch.load(next((folder / "mm").glob("*.pth")), weights_only=False)


def of_fastai(folder: Path) -> Any:
    """What ``Learner.save`` writes."""
    basics, loaders = library("fastai.basics"), library("fastai.data.core").DataLoaders
    loader = library("fastai.data.load").DataLoader
    rows = [(torch.randn(4), torch.randn(1)) for _ in range(16)]
    data = loaders(loader(rows, bs=4), loader(rows, bs=4))
    model = torch.nn.Sequential(torch.nn.Linear(4, 1))
    learner = basics.Learner(data, model, loss_func=torch.nn.functional.mse_loss, path=folder)
    learner.remove_cbs(learner.cbs[1:])
    learner.fit(1)
    return torch.load(learner.save("learner", with_opt=True), weights_only=False)


def of_fabric(folder: Path) -> Any:
    """What people give to ``Fabric.save``."""
    attribute_dict = library("lightning.fabric.utilities.data").AttributeDict
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer, torch.randn(1, 3))
    nested = attribute_dict(x=torch.ones(2), name="a")
    return attribute_dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=5, nested=nested)


def of_torchopt(folder: Path) -> Any:
    """Its optimizer states are namedtuples in one another."""
    parameters = {"w": torch.randn(3, requires_grad=True), "b": torch.zeros(1, requires_grad=True)}
    return {"opt": library("torchopt").adam(1e-3).init(parameters)}


def of_transformers(folder: Path) -> Any:
    """A model with tied weights, its configuration, and the state of the Trainer."""
    transformers = library("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))
    state = library("transformers.trainer_callback").TrainerState(epoch=1.0, global_step=3)
    return {"model": model.state_dict(), "config": model.config, "state": state}


STATES: Mapping[str, Callable[[Path], Any]] = {
    "timm": of_timm,
    "torchvision": of_torchvision,
    "lightning": of_lightning,
    "mmengine": of_mmengine,
    "fastai": of_fastai,
    "fabric": of_fabric,
    "torchopt": of_torchopt,
    "transformers": of_transformers,
}
NEED_TRUST = {"mmengine"}


def parts(value: Any) -> Mapping[Any, Any] | None:
    """What a container holds, by key; None for a value."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return dict(enumerate(value))
    if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | type):
        held = {"type": type(value), **vars(value)}
        held.pop("statistics_methods", None)  # which a buffer of mmengine sets when it is pickled
        return held
    return None


def differences(mine: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two states are not equal bit for bit."""
    if isinstance(mine, torch.Tensor):
        is_equal = isinstance(theirs, torch.Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        return [] if is_equal else [path]
    held, other = parts(mine), parts(theirs)
    if held is None or other is None:
        return [] if type(mine) is type(theirs) and bool((mine == theirs) is not False) else [path]
    if [*map(repr, held)] != [*map(repr, other)]:
        return [f"{path}: {list(held)} and {list(other)}"]
    return [line for key in held for line in differences(held[key], other[key], f"{path}.{key}")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", STATES)
def test_what_a_trainer_saves_is_loaded_and_read_bit_for_bit(root: Path, tmp_path: Path, case: str) -> None:
    saved, target = STATES[case](tmp_path), STATES[case](tmp_path)
    with SyncCheckpointEngine(root) as engine:
        engine.save(saved).result(TIMEOUT)
        if case in NEED_TRUST:
            with pytest.raises(UnsafeObjectError, match="trusted_objects=True"):
                engine.load(target)
        else:
            engine.load(target)
            assert differences(saved, target) == []
    with SyncCheckpointEngine(root, EngineConfig(trusted_objects=True)) as engine:
        engine.load(target)
        assert differences(saved, target) == []
        assert differences(saved, engine.read()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_a_quantized_model_of_torchao_is_restored(root: Path, name: str) -> None:
    quantization = library("torchao.quantization")

    def quantized(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(256, 128))
        quantization.quantize_(model, getattr(quantization, name)())
        return model

    saved, model, template = quantized(1), quantized(2), dict(quantized(3).state_dict())
    with SyncCheckpointEngine(root) as engine:
        engine.save({"m": saved}).result(TIMEOUT)
        engine.load({"m": model})
        engine.load({"m": template})
        read = engine.read()["m"]
    weight: Any = saved[0].weight  # type: ignore[index]
    for found in (model[0].weight, template["0.weight"], read["0.weight"]):  # type: ignore[index]
        assert type(found) is type(weight)
        assert torch.equal(found.dequantize(), weight.dequantize())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_nf4_tensor_is_restored(root: Path) -> None:
    nf4 = library("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    saved, target = (
        {"w": nf4.to_nf4(torch.randn(512, 512, generator=torch.Generator().manual_seed(n)))} for n in (1, 2)
    )
    with SyncCheckpointEngine(root) as engine:
        engine.save(saved).result(TIMEOUT)
        engine.load(target)
    assert torch.equal(target["w"].get_original_weight(), saved["w"].get_original_weight())
    with SyncCheckpointEngine(root, EngineConfig(trusted_objects=True)) as engine:
        read: Any = engine.read()["w"]
    assert torch.equal(read.get_original_weight(), saved["w"].get_original_weight())


@pytest.mark.slow  # torchao takes seconds to import
def test_a_model_whose_weights_fsdp2_gathers_in_float8_is_filled_in_place(root: Path) -> None:
    float8, fsdp = library("torchao.float8"), library("torch.distributed.fsdp")
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def made(value: float) -> torch.nn.Module:
            model = torch.nn.Sequential(torch.nn.Linear(16, 32, bias=False))
            torch.nn.init.constant_(model[0].weight, value)
            config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
            float8.convert_to_float8_training(model, config=config)
            fsdp.fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
            return model

        model, other = made(2), made(1)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other)]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizers[0].step()
        kept = other[0].weight.to_local()._tensor
        assert type(other[0].weight.to_local()).__name__ == "WeightWithDynamicFloat8CastTensor"
        with SyncCheckpointEngine(root) as engine:
            engine.guard(optimizers[0])
            engine.save({"model": model, "optimizer": optimizers[0]}).result(TIMEOUT)
            engine.load({"model": other, "optimizer": optimizers[1]})
            read = engine.read()["model"]["0.weight"]
        assert other[0].weight.to_local()._tensor.data_ptr() == kept.data_ptr()
        assert torch.equal(kept, model[0].weight.to_local()._tensor)
        assert torch.equal(read, kept)
        (mine,), (theirs,) = (list(each.state.values()) for each in optimizers)
        assert mine.keys() == theirs.keys()
    finally:
        dist.destroy_process_group()
