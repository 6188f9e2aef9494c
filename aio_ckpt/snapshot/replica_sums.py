"""Sums of the contents of tensors. The ranks compare them to check that their replicas are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from aio_ckpt.format.checksum import crc32_of

_COLUMNS = 4096
"""Words of a row."""
_PIECE_BYTES = 16 << 20
"""Scratch memory on the device. A tensor is summed in pieces of this length, a multiple of ``8 * _COLUMNS``."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2**64 divided by the golden ratio: neighbouring multiples of it differ in most bits."""


def content_sums(tensors: Sequence[torch.Tensor | None]) -> bytes:
    """Return one sum for each tensor, int64, little-endian, in the order of ``tensors``; 0 for None.

    Equal contents on devices of one type have equal sums, whatever the strides. If a value changes, or stands in
    another place, the sum differs, but for a chance of about 2**-32. Each tensor is read once, on its own device and
    on the current stream.
    """
    sums = np.zeros(len(tensors), "<i8")
    by_device: dict[torch.device, dict[int, torch.Tensor]] = {}
    for number, tensor in enumerate(tensors):
        if tensor is not None:
            by_device.setdefault(tensor.device, {})[number] = tensor.detach()
    with torch.no_grad():
        for device, summed in by_device.items():
            if device.type == "cpu":
                sums[[*summed]] = [_crc_of(tensor) for tensor in summed.values()]
                continue
            weights = _weights(device)
            found = torch.stack([_sum_of(tensor, weights) for tensor in summed.values()])
            sums[[*summed]] = found.cpu().numpy()
    return sums.tobytes()


def _weights(device: torch.device) -> torch.Tensor:
    """Return an odd weight for each word of a row."""
    return _mixed(torch.arange(1, _COLUMNS + 1, device=device) * _ODD) | 1


def _crc_of(tensor: torch.Tensor) -> int:
    """Return the CRC32 of the bytes: four times as fast on a CPU as a sum that depends on the place."""
    crc = 0
    for piece in _pieces(tensor):
        crc = crc32_of(piece.numpy(), crc)
    return crc


def _sum_of(tensor: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the sum of all rows, each mixed with its number, and of the words after them."""
    row_bytes, rows, total, rest = 8 * len(weights), 0, None, None
    for piece in _pieces(tensor):
        unread = piece if rest is None else torch.cat([rest, piece])
        count = unread.numel() // row_bytes
        if count:
            found = _sums_of_rows(unread[: count * row_bytes], weights)
            found = _mixed(found + torch.arange(rows + 1, rows + count + 1, device=found.device) * _ODD).sum()
            total = found if total is None else total + found
            rows += count
        rest = unread[count * row_bytes :] if unread.numel() > count * row_bytes else None
    if rest is not None:
        if rest.numel() % 8:
            rest = torch.cat([rest, rest.new_zeros(-rest.numel() % 8)])
        found = _sums_of_rows(rest, weights[: rest.numel() // 8])[0]
        total = found if total is None else total + found
    return weights.new_zeros(()) if total is None else total


def _sums_of_rows(data: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the words of each row.

    Numbers like 1.0 have many zeros in their low bits, where a product depends on the low bits of the weight alone. So
    the high half of a word goes into the low half, too.
    """
    words = data.view(torch.int64).view(-1, len(weights))
    return (words >> 32).bitwise_xor_(words).mul_(weights).sum(dim=1)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return ``numbers`` with each of their bits in most bits of the result, which is not linear in them."""
    for shift in (30, 27):
        numbers = ((numbers >> shift) ^ numbers) * _ODD
    return (numbers >> 31) ^ numbers


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of ``tensor`` in the order of its indices, as vectors of uint8 whose words of 8 are aligned."""
    is_lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.is_contiguous() and not is_lazy:
        flat, is_aligned = tensor.reshape(-1), tensor.storage_offset() * tensor.element_size() % 8 == 0
        count = _PIECE_BYTES // tensor.element_size()
        for start in range(0, flat.numel(), count):
            part = flat[start : start + count]
            yield (part if is_aligned else part.clone()).view(torch.uint8)
    elif tensor.nbytes <= _PIECE_BYTES:
        piece = tensor.resolve_conj().resolve_neg()
        yield piece.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    else:
        parts = -(-tensor.nbytes // _PIECE_BYTES)
        for part in tensor.chunk(parts) if len(tensor) > 1 else tensor.unbind():
            yield from _pieces(part)
