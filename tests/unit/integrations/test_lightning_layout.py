"""What of a checkpoint of Lightning goes through the engine, and what does not. Needs no Lightning."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch

from aio_ckpt.integrations.lightning_layout import as_bytes, join, moved, split


def trainers_checkpoint() -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "epoch": 1,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {
            "ModelCheckpoint": {"best_model_score": torch.tensor(1.0), "best_k_models": {"a": torch.ones(1)}}
        },
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hyper_parameters": {"width": 2},
    }


def test_model_and_optimizers_go_through_the_engine_and_nothing_else_of_a_trainer() -> None:
    entries, rest = split(given := trainers_checkpoint())
    assert entries.keys() == {"state_dict", "optimizer_0"}
    assert entries["state_dict"].keys() == {"weight", "bias"}
    assert rest.keys() == given.keys() - {"state_dict", "optimizer_states"}
    assert given.keys() == trainers_checkpoint().keys()


def test_join_undoes_split() -> None:
    given = trainers_checkpoint()
    found = join(*split(given))
    assert found.keys() == given.keys()
    assert {name: str(value) for name, value in found.items()} == {name: str(value) for name, value in given.items()}
    assert found["state_dict"]._metadata == given["state_dict"]._metadata


def test_the_names_of_fsdp_strategy_are_those_of_a_trainer_when_read() -> None:
    found = join({"model": {"w": 1}, "optimizer_0": {"a": 1}, "optimizer_1": {}}, {"pytorch-lightning_version": "2"})
    assert found == {"state_dict": {"w": 1}, "optimizer_states": [{"a": 1}, {}], "pytorch-lightning_version": "2"}


@pytest.mark.parametrize("name", ["optimizer_states", "state_dict"])
def test_a_checkpoint_without_weights_or_optimizers_stays_without(name: str) -> None:
    given = trainers_checkpoint()
    del given[name]
    assert join(*split(given)).keys() == given.keys()
    given[name] = type(trainers_checkpoint()[name])()
    assert join(*split(given))[name] == given[name]


def test_a_dict_of_fabric_keeps_its_names() -> None:
    given = {
        "model": {"w": torch.ones(2)},
        "optimizer": {"state": {0: {"step": torch.ones(1)}}},
        "step": 3,
        "one": torch.ones(1),
    }
    entries, rest = split(given)
    assert entries.keys() == {"model", "optimizer", "one"}
    assert rest == {"step": 3}
    assert join(entries, rest) == given


class Custom:
    """A value of the user."""


@pytest.mark.parametrize("value", [Custom(), {"a": Custom()}, (Custom(),), {(1, 2): 3}, torch.float16, {1}])
def test_a_users_object_beside_the_weights_leaves_the_weights_to_the_engine(value: object) -> None:
    state = OrderedDict(w=torch.ones(2), extra=value)
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    entries, rest = split({"model": state})
    assert entries == {"model": {"w": state["w"]}}
    assert entries["model"]._metadata == state._metadata  # type: ignore[attr-defined]
    assert "extra" in state
    assert join(entries, rest)["model"].keys() == {"w", "extra"}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_an_entry_that_the_engine_cannot_take_is_of_the_rest() -> None:
    given = {
        "list": [torch.ones(1), Custom()],
        "nested": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged),
        "compressed": torch.eye(2).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "meta": torch.ones(2, device="meta"),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    entries, rest = split(given)
    assert not entries
    assert rest.keys() == given.keys()


def test_a_sparse_tensor_goes_through_the_engine() -> None:
    assert split({"model": {"coo": torch.eye(2).to_sparse_coo()}})[0].keys() == {"model"}


@pytest.mark.parametrize(
    ("map_location", "device"),
    [
        ("meta", "meta"),
        (torch.device("meta"), "meta"),
        ({"cpu": "meta"}, "meta"),
        ({"cuda:0": "meta"}, "cpu"),
        (lambda storage, where: torch.UntypedStorage(1, device="meta") if where == "cpu" else None, "meta"),
        (lambda storage, where: None, "cpu"),
        (lambda storage, where: storage, "cpu"),
    ],
)
def test_map_location_moves_every_tensor(map_location: Any, device: str) -> None:
    found = moved({"a": [torch.ones(1), (torch.ones(1), 1)], "b": OrderedDict(c=torch.ones(1))}, map_location)
    assert {t.device.type for t in (found["a"][0], found["a"][1][0], found["b"]["c"])} == {device}
    assert found["a"][1][1] == 1


def test_the_rest_is_read_by_torch_load() -> None:
    assert torch.load(io.BytesIO(as_bytes({"a": [1, torch.ones(1)]})), weights_only=True)["a"][0] == 1
