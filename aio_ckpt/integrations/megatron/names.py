"""Names of Megatron that this integration uses. All that is private in Megatron stands here."""

from __future__ import annotations

from aio_ckpt.integrations.patch_points import PatchPoint

TRIED_CORE = ("0.16.1", "0.19.2")
"""Versions of ``megatron.core`` that the strategies and the queue were tried with."""
TRIED_TRAINING = ("0.19.2",)
"""Versions of ``megatron.training`` that ``install()`` was tried with."""

_CHECKPOINTING = "megatron.core.dist_checkpointing"
_TRAINING = "megatron.training"


class core:  # noqa: N801 - a namespace
    """Places in ``megatron.core``."""

    save_strategy = PatchPoint(module=f"{_CHECKPOINTING}.strategies.torch", name="TorchDistSaveShardedStrategy")
    load_strategy = PatchPoint(module=f"{_CHECKPOINTING}.strategies.torch", name="TorchDistLoadShardedStrategy")
    save_planner = PatchPoint(module=f"{_CHECKPOINTING}.strategies.torch", name="MCoreSavePlanner")
    by_key = PatchPoint(module=f"{_CHECKPOINTING}.strategies.torch", name="_replace_state_dict_keys_with_sharded_keys")
    """``(state, only main replicas) -> (lists of sharded values by key, ...)``."""
    to_torch = PatchPoint(module=f"{_CHECKPOINTING}.strategies.torch", name="mcore_to_pyt_state_dict")
    """``(lists by key, is loading) -> a state that DCP saves``; sets the ``data`` of what it is given."""
    reader = PatchPoint(module=f"{_CHECKPOINTING}.strategies.torch", name="_get_filesystem_reader")
    """``(path, ...) -> a storage reader``. All loads of a strategy call it."""
    common_reader = PatchPoint(module=f"{_CHECKPOINTING}.serialization", name="_get_filesystem_reader", is_needed=False)
    """The same function, by which 0.19 reads the common state."""
    request = PatchPoint(module=f"{_CHECKPOINTING}.strategies.async_utils", name="AsyncRequest")
    tensor = PatchPoint(module=f"{_CHECKPOINTING}.mapping", name="ShardedTensor")


class training:  # noqa: N801 - a namespace
    """Places in ``megatron.training``."""

    save_strategy = PatchPoint(module=f"{_TRAINING}.checkpointing", name="TorchDistSaveShardedStrategy")
    queue = PatchPoint(module=f"{_TRAINING}.async_utils", name="_async_calls_queue")
    """The one queue of async calls; None before the first use."""
    start_worker = PatchPoint(module=f"{_TRAINING}.async_utils", name="init_persistent_async_worker")
    start_worker_at_first = PatchPoint(module=f"{_TRAINING}.initialize", name="init_persistent_async_worker")
    """The same function, as ``initialize_megatron`` calls it."""
    reset_worker = PatchPoint(module=f"{_TRAINING}.async_utils", name="reset_persistent_async_worker")
    strategy_of_saves = PatchPoint(module=f"{_TRAINING}.checkpointing", name="get_async_strategy", is_needed=False)
    """``(strategy, name) -> (strategy, names of NVRx, or one of them)``; saves ``torch_dcp`` and ``fsdp_dtensor``."""
    strategy_of_calls = PatchPoint(module=f"{_TRAINING}.async_utils", name="get_async_strategy", is_needed=False)
    """The same function, by which a request for these formats is made."""
    can_save = PatchPoint(module=f"{_TRAINING}.utils", name="has_nvrx_checkpointing_async_support", is_needed=False)
    """``() -> bool``: whether the formats ``torch_dcp`` and ``fsdp_dtensor`` may be saved asynchronously."""
    reset_worker_at_restart = PatchPoint(module=f"{_TRAINING}.inprocess_restart", name="reset_persistent_async_worker")
    """The same function, as an in-process restart calls it."""
