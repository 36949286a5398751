"""Collectives that torch 2.13 renamed, under their new names with any torch from 2.9.

Functions of ``torch.distributed`` keep their names here; methods of ``ProcessGroup`` begin with ``group_``.
"""

from typing import Any

import torch.distributed as dist


def _first(owner: Any, *names: str) -> Any:
    """Return the first attribute of `owner` that exists; the new name comes first, as old ones are deprecated."""
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


reduce_scatter_single = _first(dist, "reduce_scatter_single", "reduce_scatter_tensor")
all_gather_single = _first(dist, "all_gather_single", "all_gather_into_tensor")

_group = dist.ProcessGroup
group_reduce_scatter_single = _first(_group, "reduce_scatter_single", "_reduce_scatter_base")
group_all_gather_single = _first(_group, "all_gather_single", "_allgather_base")
group_reduce_scatter_single_coalesced = _first(
    _group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
)
group_all_gather_single_coalesced = _first(_group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
