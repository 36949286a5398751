"""FSDP2's own communication, with frames on the wire."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from codec.spec_structs import spec_struct
from codec.specs import Lossless, Spec
from codec.torch import arguments, collectives
from codec.torch.channel import Timeout, check_timeout
from codec.torch.handle import Handle

_STREAM = 1 << 32  # draws of one collective: more than it has frames


class _Comm:
    """What both have in common."""

    def __init__(self, spec: Spec = Lossless(), *, timeout: Timeout | None = None) -> None:  # noqa: B008
        spec_struct(spec)  # or it is not one
        self._spec, self._timeout = spec, check_timeout(timeout)
        self._calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for the values on either side."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _how(self, group: Any) -> dict[str, Any]:
        """Arguments of a collective: each draws anew, and all ranks of a group count alike."""
        self._calls += 1
        stream = self._calls * _STREAM
        return {"spec": self._spec, "group": group, "stream": stream, "timeout": self._timeout, "async_op": True}


class ReduceScatter(_Comm):
    """How FSDP2 reduces gradients: summed in the order of ranks, with frames on the wire.

    Parameters
    ----------
    spec : Spec
        How gradients are encoded; lossless if left out.
    timeout : float or timedelta, optional
        Seconds that a rank may keep others waiting; left out: as long as the group allows.

    Notes
    -----
    Every module that was sharded has its own communication. Gradients of dtypes that have no codec go as they are.

    Examples
    --------
    >>> for module in model.modules():  # doctest: +SKIP
    ...     if isinstance(module, FSDPModule):
    ...         module.set_custom_reduce_scatter(codec.torch.ReduceScatter(codec.Float8()))
    """

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Do what ``dist.reduce_scatter_single`` does; FSDP2 calls this."""
        if input_tensor.dtype not in arguments.NAMES:
            return dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)
        if getattr(op, "op", op) == dist.ReduceOp.PREMUL_SUM:
            input_tensor, op = input_tensor * op.factor, dist.ReduceOp.SUM
        pending = collectives.reduce_scatter(output_tensor, input_tensor, op=op, **self._how(group))
        return _begun(pending, output_tensor, async_op)


class AllGather(_Comm):
    """How FSDP2 gathers parameters, with frames on the wire.

    Parameters
    ----------
    spec : Spec
        How parameters are encoded; lossless if left out. What is lost is lost in the forward and the backward pass, on
        all ranks alike; the optimizer's shards stay as they are.
    timeout : float or timedelta, optional
        As for :class:`ReduceScatter`.

    Examples
    --------
    >>> model.set_custom_all_gather(codec.torch.AllGather())  # doctest: +SKIP
    """

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Do what ``dist.all_gather_single`` does; FSDP2 calls this."""
        if input_tensor.dtype not in arguments.NAMES:
            return dist.all_gather_single(output_tensor, input_tensor, group, async_op)
        pending = collectives.all_gather(output_tensor, input_tensor, **self._how(group))
        return _begun(pending, output_tensor, async_op)


def _begun(pending: Any, output: torch.Tensor, async_op: bool) -> Handle | None:
    handle = Handle(pending, [output])
    if async_op:
        return handle
    handle.wait()
    return None
