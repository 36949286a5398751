"""Copies of state dicts in host memory, which is used again once a save has ended."""

import importlib
import weakref
from typing import Any, cast

import torch

_states: Any = importlib.import_module("torch.distributed._state_dict_utils")  # private: torch 2.9 to 2.15 have it


class _StagedState(dict[Any, Any]):
    """Copy of a state dict. A save holds a reference to it until the save has ended or failed."""


class StagingMemory:
    """Host memory for copies of one state dict.

    New memory costs more time than the copy, so memory of ended saves is used again if names, dtypes and shapes are
    equal. While a save still reads its copy, the next copy gets new memory. Memory is pinned if there are GPUs.
    """

    def __init__(self) -> None:
        self._free: tuple[Any, Any] | None = None  # layout of a state dict, and memory for it

    def copy(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state dict in host memory."""
        layout = _layout(state_dict)
        free, self._free = self._free, None
        if free is not None and free[0] == layout:
            memory = free[1]
        else:
            memory = _states._create_cpu_state_dict(state_dict, pin_memory=torch.cuda.is_available())
        staged = _StagedState(_states._copy_state_dict(state_dict, memory, type_check=False))
        weakref.finalize(staged, self._give_back, layout, memory).atexit = False
        return staged

    def _give_back(self, layout: Any, memory: Any) -> None:
        self._free = layout, memory


def _layout(x: Any) -> Any:
    """Return a value that is equal for state dicts of equal structure, dtypes and shapes."""
    if isinstance(x, torch.Tensor):
        local = getattr(x, "_local_tensor", x)
        if not isinstance(local, torch.Tensor):
            return object()  # unequal to all others
        return (type(x), x.dtype, x.shape, local.shape, getattr(x, "placements", None), getattr(x, "device_mesh", None))
    if isinstance(x, dict):
        return {key: _layout(value) for key, value in cast(dict[Any, Any], x).items()}
    if isinstance(x, (list, tuple)):
        return type(cast(Any, x)), [_layout(value) for value in cast(list[Any], x)]
    return cast(Any, type(x))
