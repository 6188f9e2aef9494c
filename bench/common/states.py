"""The states that are saved: large tensors, many small ones, a GPT-like mix, an optimizer's hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

__all__ = ["SHAPES", "Shape", "Sizes", "flattened_optimizer", "tiny_tensors"]

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the states are; ``quick`` ones are for CI and prove nothing."""

    large_count: int = 16
    """Tensors in ``large``."""
    large_mib: int = 64
    """MiB of each."""
    small_count: int = 5_000
    """Tensors of 4 KiB in ``small``."""
    gpt_layers: int = 12
    """Blocks of the transformer in ``gpt``."""
    gpt_width: int = 768
    """Its width; vocabulary 50,257, context 1,024."""

    @classmethod
    def quick(cls) -> Sizes:
        """Some tens of MB."""
        return cls(large_count=4, large_mib=16, small_count=500, gpt_layers=2, gpt_width=64)


@dataclass(frozen=True, slots=True)
class Shape:
    """One state to bench."""

    name: str
    """On the command line and in the results."""
    make: Callable[[Sizes, str], State]
    """Builds it on a device, filled with random values."""
    limit: str
    """Name of the contender that is the limit of a save."""


def _tensor(shape: tuple[int, ...], device: str) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device).uniform_(-1, 1)


def large(sizes: Sizes, device: str) -> State:
    """``large_count`` float32 tensors of ``large_mib`` MiB."""
    return {f"layer.{i}.weight": _tensor((sizes.large_mib << 18,), device) for i in range(sizes.large_count)}


def small(sizes: Sizes, device: str) -> State:
    """``small_count`` float32 tensors of 4 KiB."""
    return {f"layer.{i}.bias": _tensor((1024,), device) for i in range(sizes.small_count)}


def gpt(sizes: Sizes, device: str) -> State:
    """Parameters of a GPT-2 and AdamW's exp_avg, exp_avg_sq and step of each, flat; 1.5 GB at the full size."""
    width = sizes.gpt_width
    block = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.qkv.weight": (3 * width, width),
        "attn.qkv.bias": (3 * width,),
        "attn.proj.weight": (width, width),
        "attn.proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.fc.weight": (4 * width, width),
        "mlp.fc.bias": (4 * width,),
        "mlp.proj.weight": (width, 4 * width),
        "mlp.proj.bias": (width,),
    }
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (50_257, width), "wpe.weight": (1_024, width)}
    for layer in range(sizes.gpt_layers):
        shapes |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    state = {f"model.{name}": _tensor(shape, device) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        state[f"optim.state.{name}.step"] = torch.tensor(100.0)
        state[f"optim.state.{name}.exp_avg"] = _tensor(shape, device)
        state[f"optim.state.{name}.exp_avg_sq"] = _tensor(shape, device)
    return state


def tiny_tensors(count: int) -> State:
    """``count`` tensors of 64 bytes: planning is all there is to them."""
    block = torch.rand(count, 16)
    return {f"model.layers.{i // 10}.part.{i % 10}.weight": block[i].clone() for i in range(count)}


def flattened_optimizer(parameters: int) -> Mapping[str, object]:
    """What ``get_optimizer_state_dict(flatten_optimizer_state_dict=True)`` gives for AdamW: per parameter three
    tensors and about ten hyperparameters. DCP's own call, so that the value types are the real ones."""
    model = torch.nn.ParameterDict({f"p{i}": torch.nn.Parameter(torch.rand(16)) for i in range(parameters)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for parameter in model.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat: Mapping[str, object] = get_optimizer_state_dict(model, optimizer, options=options)
    return flat


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("large", large, "plain O_DIRECT pwrite"),
        Shape("small", small, "one plain write + fsync"),
        Shape("gpt", gpt, "plain O_DIRECT pwrite"),
    )
}
