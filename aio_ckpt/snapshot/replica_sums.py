"""Sums of the contents of tensors. The ranks compare them to check that their replicas are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

__all__ = ["content_sums"]

_COLUMNS = 4096
_PIECE_BYTES = 8 << 20
"""Most scratch memory. A tensor whose words are not contiguous and aligned is copied in pieces of this length, which is
a multiple of ``8 * _COLUMNS``."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 divided by the golden ratio: neighbouring multiples of it differ in most bits."""


def content_sums(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return one sum for each tensor, int64, little-endian, in the order of ``tensors``.

    Equal contents have equal sums if both tensors are contiguous, or have equal strides. A sum depends on the place of
    nearly every value, so that a permutation has another one. Each tensor is read once, on its own device and on the
    current stream.
    """
    sums = np.zeros(len(tensors), "<i8")
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    with torch.no_grad():
        for device, numbers in by_device.items():
            weights = (2 * torch.arange(_COLUMNS, device=device) + 1) * _ODD
            found = torch.stack([_sum_of(tensors[number].detach(), weights) for number in numbers])
            sums[numbers] = found.cpu().numpy()
    return sums.tobytes()


def _sum_of(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    sums = [part for pieces in _runs(tensor) for part in _sums_of_run(pieces, weights)]
    total = sums[0] if sums else weights.new_zeros(())
    for part in sums[1:]:
        total = total * _ODD + part
    return total


def _sums_of_run(pieces: Iterator[torch.Tensor], weights: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the sums of a run: of its rows, of the words after them, and of the bytes after those. All but the last of
    its pieces consist of whole rows."""
    columns, of_rows, rest = len(weights), [], weights.new_empty(0, dtype=torch.uint8)
    for piece in pieces:
        nbytes = piece.numel() // (8 * columns) * 8 * columns
        if nbytes:
            of_rows.append((piece[:nbytes].view(torch.int64).view(-1, columns).sum(dim=0) * weights).sum())
        rest = piece[nbytes:]
    if of_rows:
        yield sum(of_rows[1:], of_rows[0])
    words = rest.numel() // 8
    if words:
        yield (rest[: 8 * words].view(torch.int64) * weights[:words]).sum()
    if rest.numel() > 8 * words:
        yield (rest[8 * words :] * weights[: rest.numel() - 8 * words]).sum()


def _runs(tensor: torch.Tensor) -> Iterator[Iterator[torch.Tensor]]:
    """Yield the bytes of ``tensor`` as runs. Pieces of one are vectors of uint8 whose words of 8 bytes are aligned."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.is_contiguous() and not is_lazy:
        flat = tensor.reshape(-1)
        if tensor.storage_offset() * tensor.element_size() % 8 == 0:
            yield iter([flat.view(torch.uint8)])
        else:
            count = _PIECE_BYTES // tensor.element_size()
            yield (flat[at : at + count].clone().view(torch.uint8) for at in range(0, flat.numel(), count))
    elif tensor.nbytes <= _PIECE_BYTES:
        piece = tensor.resolve_conj().resolve_neg()
        yield iter([piece.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)])
    else:
        for half in tensor.chunk(2, dim=max(range(tensor.ndim), key=tensor.size)):
            yield from _runs(half)
