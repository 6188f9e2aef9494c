"""Copies between host memories."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from tensor_bits import bits

from aio_ckpt.memory.copies import pack_part


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of up to four dimensions in any order, with gaps, repeated rows, and conj bits."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    steps = [draw(st.integers(1, 3)) for _ in shape]
    dtype = draw(st.sampled_from([torch.float32, torch.bool, torch.complex64]))
    base = torch.arange(1, 1 + torch.Size([n * step for n, step in zip(shape, steps, strict=True)]).numel())
    tensor = base.to(dtype).reshape([n * step for n, step in zip(shape, steps, strict=True)])
    for dim, step in enumerate(steps):
        tensor = tensor.unfold(dim, 1, step).squeeze(-1)
    tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor.conj() if draw(st.booleans()) else tensor


@examples(300)
@given(views(), st.data())
def test_any_part_of_a_tensor_of_any_layout_is_packed_in_the_order_of_its_indices(
    tensor: torch.Tensor, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, tensor.numel() - 1))
    last = data.draw(st.integers(first + 1, tensor.numel()))
    target = torch.zeros(last - first, dtype=tensor.dtype)
    pack_part(target, tensor, first)
    wanted = bits(tensor)[first * tensor.itemsize : last * tensor.itemsize]
    assert bits(target) == wanted
