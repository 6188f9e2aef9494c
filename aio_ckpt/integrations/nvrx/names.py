"""Names of NVRx that ``install()`` replaces. All that is known of NVRx's modules stands here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from aio_ckpt.integrations.patch_points import PatchPoint

TRIED = ("0.5.0", "0.6.0", "0.7.0")
"""Versions of ``nvidia-resiliency-ext`` whose names and parameters are served."""

_PACKAGE = "nvidia_resiliency_ext"
_ASYNC = f"{_PACKAGE}.checkpointing.async_ckpt"
_CALLED = ("__init__", "schedule_async_request", "maybe_finalize_async_calls", "close", "warmup_persistent_caller",
           "get_save_function_and_args", "clear_metadata_cache")  # fmt: skip
"""Methods whose parameters are compared."""


class replaced:  # noqa: N801 - a namespace
    """Places that ``install()`` puts ours in."""

    AsyncCallsQueue = PatchPoint(module=f"{_ASYNC}.core", name="AsyncCallsQueue")
    FileSystemWriterAsync = PatchPoint(module=f"{_ASYNC}.filesystem_async", name="FileSystemWriterAsync")
    CachedMetadataFileSystemReader = PatchPoint(
        module=f"{_ASYNC}.cached_metadata_filesystem_reader", name="CachedMetadataFileSystemReader"
    )
    save_state_dict_async_plan = PatchPoint(module=f"{_ASYNC}.state_dict_saver", name="save_state_dict_async_plan")
    save_state_dict_async_finalize = PatchPoint(
        module=f"{_ASYNC}.state_dict_saver", name="save_state_dict_async_finalize"
    )
    torch_file = PatchPoint(module=f"{_ASYNC}.torch_ckpt", name="TorchAsyncCheckpoint", is_needed=False)
    """Stays NVRx's. It is imported before the others are replaced, as it needs NVRx's queue."""


def changed(ours: Mapping[str, Any]) -> list[str]:
    """Return the parameters that the installed NVRx takes and ``ours`` does not."""
    found = []
    for name, replacement in ours.items():
        stock = getattr(replaced, name).value
        pairs = [(getattr(stock, method, None), getattr(replacement, method, None), method) for method in _CALLED]
        for of_stock, of_ours, method in [(stock, replacement, "")] if not inspect.isclass(stock) else pairs:
            if inspect.isroutine(of_stock) and of_ours is not None:
                label = f"{name}.{method}" if method else name
                found += [f"{each} of {label}()" for each in _parameters(of_stock) if each not in _parameters(of_ours)]
    return found


def holders(ours: Mapping[str, Any]) -> list[str]:
    """Return where modules hold NVRx's own objects, imported by value: ``module.name`` of each."""
    stock = {id(getattr(replaced, name).value) for name in ours}
    return [
        f"{name}.{attribute}"
        for name, module in sorted(sys.modules.items())
        if not name.startswith(_PACKAGE)
        for attribute, value in list(getattr(module, "__dict__", {}).items())
        if id(value) in stock
    ]


def _parameters(function: Any) -> list[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, each in inspect.signature(function).parameters.items() if each.kind not in kinds]
