"""Dtypes, and the names under which the formats store them: the table that a new dtype of torch joins."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""Every dtype of this torch by its name without ``torch.``."""
V2_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}
"""Classes of storages in ``torch.save``, by dtype. Its pickles name a dtype by them."""
V3_NAMES = (
    *("complex32", "bcomplex32", "uint16", "uint32", "uint64", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
"""Dtypes that came later and have no such class: the pickles hold the dtype itself."""
UNPLANNED = frozenset(dtype for name, dtype in DTYPES.items() if re.fullmatch(r"u?int[1-7]|bits\w+", name))
"""Opaque dtypes, of less than a byte or of no number. DCP's planner fails on them, so no state may hold them."""
SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}
"""Names in safetensors, by dtype."""


def known_dtypes(names: Iterable[str]) -> dict[str, torch.dtype]:
    """Return the dtypes of ``names`` that the running torch has."""
    return {name: DTYPES[name] for name in names if name in DTYPES}
