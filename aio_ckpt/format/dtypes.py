"""Dtypes by the names under which checkpoints store them."""

from __future__ import annotations

import torch

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""Every dtype of this torch by its name without ``torch.``."""
