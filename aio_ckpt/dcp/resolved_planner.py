"""``ResolvedPlanner``: planner of a save whose items were resolved before, so that the state may change meanwhile."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem


class ResolvedPlanner(SavePlanner):
    """Planner for ``dcp.save`` in another thread. The planner of the caller plans and resolves before that.

    It plans on the state itself, and not on a copy: attributes of a tensor, such as ``__create_write_items__``, decide
    what is planned, and a copy lacks them.

    Args:
        planner: of the caller; None for DCP's own.
    """

    def __init__(self, planner: SavePlanner | None) -> None:
        self._planner: SavePlanner = planner or DefaultSavePlanner()
        self._plan: SavePlan | None = None
        self._error: Exception | None = None
        self._data: dict[MetadataIndex, Any] = {}

    def resolve(self, state: dict[str, Any], *, is_coordinator: bool) -> None:
        """Plan what this rank saves of ``state``, and resolve each item. A quantized tensor is dequantized, if it can.

        Raises:
            Exception: any error of the planner.
        """
        planner = self._planner
        takes_meta = "storage_meta" in inspect.signature(planner.set_up_planner).parameters
        meta: dict[str, Any] = {"storage_meta": None} if takes_meta else {}
        planner.set_up_planner(state, is_coordinator=is_coordinator, **meta)
        self._plan = planner.create_local_plan()
        self._data = {item.index: _plain(planner.resolve_data(item)) for item in self._plan.items}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Resolved tensors, which are those of the state until :meth:`replace_tensors` is called."""
        return [value for value in self._data.values() if isinstance(value, torch.Tensor)]

    def replace_tensors(self, copies: Sequence[torch.Tensor]) -> None:
        """Let the save write ``copies`` in the place of :attr:`tensors`."""
        of = iter(copies)
        self._data = {
            index: next(of) if isinstance(value, torch.Tensor) else value for index, value in self._data.items()
        }

    def fail(self, error: Exception) -> None:
        """Let the save of all ranks fail by ``error``, as DCP's own planning would."""
        self._error, self._data = error, {}

    # -- called by DCP, in this order -------------------------------------------------------------

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the planner of the caller was set up with the state."""

    def create_local_plan(self) -> SavePlan:
        """Return the plan. Raise the error of :meth:`fail`."""
        if self._error is not None:
            raise self._error
        assert self._plan is not None, "resolve() comes first"
        return self._plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return self._planner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self._planner.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return what :meth:`resolve` or :meth:`replace_tensors` has set."""
        return self._data[write_item.index]


def _plain(data: Any) -> Any:
    if not isinstance(data, torch.Tensor):
        return data
    data = data.detach()
    return data.dequantize() if "dequantize" in vars(type(data)) and type(data) is not torch.Tensor else data
