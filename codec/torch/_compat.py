"""Names that depend on the version of torch: renamed collectives, private and untyped functions, pipeline methods.

Functions of ``torch.distributed`` keep the names of torch 2.13 here, with any torch from 2.9; methods of
``ProcessGroup`` begin with ``group_``.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import codec
from codec import EngineError


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

_c10d: Any = dist.distributed_c10d
rank_not_in_group: Callable[[Any], bool] = _c10d._rank_not_in_group
warn_not_in_group: Callable[[str], None] = _c10d._warn_not_in_group

_MAX_RANK = 8  # dimensions of a frame

_torch: Any = torch  # without its stubs, which have no private names, and no type for the argument of from_numpy
from_numpy: Callable[[np.ndarray[Any, Any]], torch.Tensor] = _torch.from_numpy


def is_plain(x: torch.Tensor) -> bool:
    """Return True if :func:`codec.encode` can read ``x`` in place: a dense ``torch.Tensor``, of no subclass."""
    known = type(x) is torch.Tensor and x.layout is torch.strided and not (x.is_quantized or x.is_meta or x.is_neg())
    return known and x.dim() <= _MAX_RANK and _is_encodable(x.dtype)


def local(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, which shares its memory; return other tensors unchanged."""
    return getattr(x, "_local_tensor", x)


def uncompiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch.compile does not trace: the same one in processes without torch.compile."""
    return _torch.compiler.disable(call) if "torch._dynamo" in sys.modules else call


@functools.cache
def _is_encodable(dtype: torch.dtype) -> bool:
    try:
        return bool(codec.bound((), dtype))
    except codec.ArgumentError:
        return False


def backward_pass() -> int | None:
    """Return autograd's id of the backward pass that runs in this thread; None: no pass runs."""
    task: int = _torch._C._current_graph_task_id()
    return None if task == -1 else task


def call_after_backward(call: Callable[[], None]) -> None:
    """Have autograd call a function at the end of this pass, after callbacks of torch; never if the pass fails.

    Callbacks run in order, also those that a callback queues. DistributedDataParallel queues its own after its last
    bucket, and stores gradients there.
    """
    engine = _torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(call))


class BackwardEnd:
    """Callback for the end of a backward pass. If it is deleted uncalled, an exception has ended the pass and the step.

    Ctrl-C during a backward pass is raised when Python is called the next time, before the first line of the hook.
    Reentrant checkpoints run passes within the pass, so that a step may have several; the pass of the last bucket ends
    the step.

    Parameters
    ----------
    end : callable or None
        Ends the step. None: the pass does not have the last bucket.
    cancel : callable
        Cancels the step.
    """

    def __init__(self, end: Callable[[], None] | None, cancel: Callable[[], None]) -> None:
        self._end, self._cancel, self._called = end, cancel, False

    def __call__(self) -> None:
        """End the step if the pass has its last bucket."""
        self._called = True
        if self._end is not None:
            self._end()

    def __del__(self) -> None:
        if not self._called:
            self._cancel()


def comm_hooks(model: DistributedDataParallel) -> list[tuple[object, object]]:
    """Return the communication hooks of a model, and the state with which each was registered."""
    ddp: Any = model
    return ddp._comm_hooks


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the table of a module's own buffers, with those that are None. Changes of the table change the module."""
    owner: Any = module
    return owner._buffers


def divides_by_ranks_with_inputs(model: torch.nn.Module) -> bool:
    """Return True within ``join(divide_by_initial_world_size=False)`` of a DistributedDataParallel."""
    ddp: Any = model
    return (
        isinstance(model, DistributedDataParallel) and ddp._join_config.enable and not ddp._divide_by_initial_world_size
    )


def joins(model: DistributedDataParallel) -> bool:
    """Return True if a pass runs within join(), where ranks without inputs left repeat the collectives of others."""
    ddp: Any = model
    config = ddp._join_config
    return config.enable and not config.throw_on_early_termination


def fsdp_shards(module: Any) -> list[tuple[tuple[int, ...], bool]]:
    """Return the padded shape of a rank's shard of each parameter of an FSDP2 module, and whether it is trained.

    The order is that of the flat tensors which FSDP2 passes to collectives. Empty if `module` is None, or if this torch
    lacks the private names.
    """
    state = module._get_fsdp_state() if module is not None else None
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # older torch
        groups = [getattr(state, "_fsdp_param_group", None)]
    if len(groups) != 1:
        return []
    parameters = getattr(groups[0], "fsdp_params", [])
    try:
        return [(tuple(p.padded_sharded_param_size), p.sharded_param.requires_grad) for p in parameters]
    except AttributeError:
        return []


_PIPELINING_TESTED = "2.13"  # versions of torch
# Methods of PipelineStage that CompressedStage overrides, with the parameters that are used by position.
STAGE_METHODS = {
    "forward_one_chunk": ("fwd_chunk_id", "args", "kwargs"),
    "backward_one_chunk": ("bwd_chunk_id",),
    "get_fwd_send_ops": ("fwd_chunk_id",),
    "get_fwd_recv_ops": ("fwd_chunk_id",),
    "get_bwd_send_ops": ("bwd_chunk_id",),
    "get_bwd_recv_ops": ("bwd_chunk_id",),
    "clear_runtime_states": (),
    # Private. The first step passes keywords of schedule.step() to the module, to learn the shapes of its outputs.
    "_prepare_forward_infra": ("num_microbatches", "args", "kwargs"),
}
STAGE_ATTRIBUTES = (  # attributes of an instance
    "has_backward",
    "group",
    "group_rank",
    "stage_index_to_group_rank",
    "submod",
    "args_recv_info",
    "grad_recv_info",
    "fwd_cache",
    "bwd_cache",
)


def check_stage_class(stage_class: type) -> None:
    """Raise EngineError if torch's PipelineStage lacks a method of STAGE_METHODS, or has other parameters there."""
    for name, parameters in STAGE_METHODS.items():
        method = getattr(stage_class, name, None)
        found = () if method is None else tuple(inspect.signature(method).parameters)[1:]
        if method is None or found[: len(parameters)] != parameters:
            raise EngineError(_no_stage_name(f"{name}({', '.join(parameters)})"))


def check_stage(stage: Any) -> None:
    """Raise EngineError if an instance of torch's PipelineStage lacks an attribute of STAGE_ATTRIBUTES."""
    for name in STAGE_ATTRIBUTES:
        if not hasattr(stage, name):
            raise EngineError(_no_stage_name(name))


def _no_stage_name(name: str) -> str:
    return (
        f"torch {torch.__version__} has no PipelineStage.{name}: codec.torch.pipelining is tested with torch "
        f"{_PIPELINING_TESTED}"
    )
