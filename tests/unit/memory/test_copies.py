"""Copies between host memories."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from tensor_bits import bits

from aio_ckpt.memory.copies import Copies, groups_by_address, pack_part


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


@examples(200)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=9))
def test_copies_within_a_device_move_every_byte_whatever_their_alignment(rows: list[tuple[int, int, int]]) -> None:
    """Each row: bytes from the last copy to the target and to the source, and bytes of the copy."""
    sources, targets = torch.randint(0, 256, (1000,), dtype=torch.uint8), torch.zeros(1000, dtype=torch.uint8)
    expected, copies, source, target = targets.clone(), list[tuple[int, int, int]](), 0, 0
    for to_target, to_source, nbytes in rows:
        target, source = target + to_target, source + to_source
        expected[target : target + nbytes] = sources[source : source + nbytes]
        copies.append((targets.data_ptr() + target, sources.data_ptr() + source, nbytes))
        target, source = target + nbytes, source + nbytes
    Copies().copy_groups(groups_by_address(torch.device("cpu"), copies))
    assert torch.equal(targets, expected)


def test_a_copy_within_a_device_takes_few_launches() -> None:
    sources, targets = torch.ones(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    rows = [(targets.data_ptr() + at, sources.data_ptr() + at, 64) for at in range(0, 4096, 64)]
    ((to, of),) = groups_by_address(torch.device("cpu"), rows)
    assert len(to) == len(of) == 64
    assert {tensor.dtype for tensor in (*to, *of)} == {torch.int64}
