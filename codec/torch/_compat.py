"""Access to names of torch that differ between versions, are private, or have no types.

This module supports torch 2.9 and later. Functions of ``torch.distributed`` have their names of torch 2.13; methods of
``ProcessGroup`` have the prefix ``group_``.
"""

import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import codec
from codec import EngineError
from codec.arguments import LONGEST_TIMEOUT, SHORTEST_TIMEOUT


def _first(owner: Any, *names: str) -> Any:
    """Return the first of the named attributes that `owner` has. Pass the new name first: old names are deprecated."""
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

_MAX_RANK = 8  # maximum number of dimensions of a frame

_torch: Any = torch  # untyped: torch's stubs lack private names and the type of from_numpy's argument
from_numpy: Callable[[np.ndarray[Any, Any]], torch.Tensor] = _torch.from_numpy


def begin_sequence(backend: Any) -> None:
    """Let ranks agree on the number of a backend's first collective, which is always 0 in torch 2.14 and later."""
    if _torch.__version__ < "2.14":  # compares numbers, not text
        backend._set_sequence_number_for_group()


def is_plain(x: torch.Tensor) -> bool:
    """Return True if :func:`codec.encode` can read `x` in place: `x` is dense and not of a subclass of Tensor."""
    known = type(x) is torch.Tensor and x.layout is torch.strided and not (x.is_quantized or x.is_meta or x.is_neg())
    return known and x.dim() <= _MAX_RANK and _is_encodable(x.dtype)


def local(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, without a copy; return other tensors unchanged."""
    return getattr(x, "_local_tensor", x)


def uncompiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function from tracing by torch.compile. Return it unchanged if torch.compile is not imported."""
    return _torch.compiler.disable(call) if "torch._dynamo" in sys.modules else call


@functools.cache
def _is_encodable(dtype: torch.dtype) -> bool:
    try:
        return bool(codec.bound((), dtype))
    except codec.ArgumentError:
        return False


def backward_pass() -> int | None:
    """Return autograd's id of the backward pass that runs in this thread; None if no pass runs."""
    task: int = _torch._C._current_graph_task_id()
    return None if task == -1 else task


def call_after_backward(call: Callable[[], None]) -> None:
    """Make autograd call a function at the end of this backward pass. If the pass fails, the function is not called.

    Autograd runs callbacks in the order of queueing. DistributedDataParallel queues a callback after its last bucket,
    which stores the gradients. To run after DistributedDataParallel's callback, the callback queued here queues `call`
    only when it runs itself.
    """
    engine = _torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(call))


class BackwardEnd:
    """Callback for the end of a backward pass; cancels the step if it is deleted without having been called.

    Autograd deletes it uncalled if an exception ends the pass. KeyboardInterrupt, for example, is raised when autograd
    next calls Python, before the first line of the hook. Reentrant checkpoints run backward passes within a pass, so a
    step may have several passes; the pass with the last bucket ends the step.

    Parameters
    ----------
    end : callable or None
        Function that ends the step. None: the last bucket is not in this pass.
    cancel : callable
        Function that cancels the step.
    """

    _called = True  # until __init__ has set all attributes, __del__ must not cancel

    def __init__(self, end: Callable[[], None] | None, cancel: Callable[[], None]) -> None:
        self._end, self._cancel, self._called = end, cancel, False

    def __call__(self) -> None:
        """End the step if its last bucket is in this pass."""
        try:
            if self._end is not None:
                self._end()
        except BaseException:
            self._cancel()
            raise
        self._called = True

    def __del__(self) -> None:
        if not self._called:
            self._cancel()


def finalizes_manually(model: object) -> bool:
    """Return True if the caller ends the backward passes of a DistributedDataParallel (torch 2.15 and later)."""
    return bool(getattr(model, "require_manual_backward_finalization", False))


# By model: id of a backward pass, and the buckets of this pass that have arrived with index 0. A bucket is the id() of
# its first parameter, and its number of parameters.
_delayed: "weakref.WeakKeyDictionary[DistributedDataParallel, tuple[int | None, dict[int, int]]]" = (
    weakref.WeakKeyDictionary()
)


def place_of(model: DistributedDataParallel, bucket: Any, n_parameters: int) -> tuple[int, bool]:
    """Return the index of a bucket in its step, and True if it is the last one.

    At the end of the first backward pass with ``static_graph=True``, DistributedDataParallel passes all buckets to the
    hook, each with index 0 and, if there are several, none as the last. The last bucket then completes the
    `n_parameters` of :func:`count_parameters`.
    """
    ddp: Any = model
    if not ddp.static_graph or bucket.index() or bucket.is_last():
        return bucket.index(), bucket.is_last()
    now, parameters = backward_pass(), bucket.parameters()
    key = id(parameters[0])
    of, seen = _delayed.get(model, (None, {}))
    if of is None or of != now:
        _delayed[model] = now, (seen := {})
    seen.setdefault(key, len(parameters))
    index = [*seen].index(key)
    return index, index == len(seen) - 1 and sum(seen.values()) == n_parameters


def count_parameters(model: DistributedDataParallel) -> int:
    """Return the number of parameters in a model's buckets.

    DistributedDataParallel locks this number during a backward pass. Then the parameters that require gradients are
    counted, which are fewer if parameters were frozen after the model was wrapped.
    """
    ddp: Any = model
    if backward_pass() is None:
        return ddp._get_ddp_logging_data()["num_parameter_tensors"]
    return sum(p.requires_grad for p in ddp._module_parameters)


def comm_hooks(model: DistributedDataParallel) -> list[tuple[object, object]]:
    """Return the communication hooks of a model, as pairs (hook, state with which it was registered)."""
    ddp: Any = model
    return ddp._comm_hooks


def messages_of(model: DistributedDataParallel) -> str:
    """Return why a model itself sends messages over its process group, besides those of its hook; "" if it does not."""
    ddp: Any = model
    reasons = {
        "broadcasts its buffers (pass broadcast_buffers=False)": ddp.will_sync_module_buffers(),
        "searches for unused parameters": ddp.find_unused_parameters and not ddp.static_graph,
        "delays all-reduces": len(getattr(ddp, "_delay_all_reduce_params", ())) > 0,
        "sends the order of its buckets at the begin of its second step": not ddp._has_rebuilt_buckets,
    }
    return next((reason for reason, sends in reasons.items() if sends), "")


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dict of a module's direct buffers, including None entries; changing the dict changes the module."""
    owner: Any = module
    return owner._buffers


def divides_by_ranks_with_inputs(model: torch.nn.Module) -> bool:
    """Return True within ``join(divide_by_initial_world_size=False)`` of a DistributedDataParallel."""
    ddp: Any = model
    return (
        isinstance(model, DistributedDataParallel) and ddp._join_config.enable and not ddp._divide_by_initial_world_size
    )


def joins(model: DistributedDataParallel) -> bool:
    """Return True within ``join()``, where ranks that have no inputs left take part in the others' collectives."""
    ddp: Any = model
    config = ddp._join_config
    return config.enable and not config.throw_on_early_termination


def fsdp_shards(module: Any) -> list[tuple[tuple[int, ...], bool]]:
    """Return, for each parameter of an FSDP2 module, the padded shape of a rank's shard, and whether it is trained.

    Parameters are in the order in which FSDP2 concatenates them for collectives. The list is empty if `module` is
    None, or if this version of torch lacks the private names.
    """
    groups = _fsdp_groups(module)
    if len(groups) != 1:
        return []
    parameters = getattr(groups[0], "fsdp_params", [])
    try:
        return [(tuple(p.padded_sharded_param_size), p.sharded_param.requires_grad) for p in parameters]
    except AttributeError:
        return []


def _fsdp_groups(module: Any) -> list[Any]:
    """Return the groups of parameters of an FSDP2 module; if `module` is None, a list of None."""
    state = module._get_fsdp_state() if module is not None else None
    groups = getattr(state, "_fsdp_param_groups", None)
    return [getattr(state, "_fsdp_param_group", None)] if groups is None else groups  # None: older torch


def leave_replicas_to_hook(module: Any) -> bool:
    """Make an HSDP module skip its own all-reduce between replicas, which its all-reduce hook then does.

    Parameters keep their mesh of two dimensions. Return False, and change nothing, if the module is not one of HSDP, or
    if this version of torch lacks the private names.
    """
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
    except ImportError:
        return False
    for group in filter(None, _fsdp_groups(module)):
        info: Any = getattr(group, "mesh_info", None)
        if not isinstance(info, HSDPMeshInfo):
            if info is None or info.mesh.ndim == 1:  # with two dimensions, an earlier call has changed the module
                return False
            continue
        given: dict[str, Any] = {each.name: getattr(info, each.name) for each in dataclasses.fields(info) if each.init}
        given["replicate_mesh_dim"] = None
        alone: Any = FSDPMeshInfo(**given)
        if hasattr(info, "reduce_scatter_process_group"):  # torch 2.13
            alone.reduce_scatter_process_group = info.reduce_scatter_process_group
        if group.post_forward_mesh_info is info:
            group.post_forward_mesh_info = alone
        group.mesh_info = alone
    return True


_PIPELINING_TESTED = "2.13 to 2.15"  # versions of torch with which codec.torch.pipelining is tested
# Methods of PipelineStage that CompressedStage overrides, with the names of their leading parameters.
STAGE_METHODS = {
    "forward_one_chunk": ("fwd_chunk_id", "args", "kwargs"),
    "backward_one_chunk": ("bwd_chunk_id",),
    "get_fwd_send_ops": ("fwd_chunk_id",),
    "get_fwd_recv_ops": ("fwd_chunk_id",),
    "get_bwd_send_ops": ("bwd_chunk_id",),
    "get_bwd_recv_ops": ("bwd_chunk_id",),
    "set_local_bwd_input": ("next_stage_bwd_outputs", "mb_index"),
    "clear_runtime_states": (),
    # Private method. In the first step it runs the module to find the shapes of its outputs.
    "_prepare_forward_infra": ("num_microbatches", "args", "kwargs"),
}
STAGE_ATTRIBUTES = (  # instance attributes of PipelineStage that CompressedStage uses
    "has_backward",
    "group",
    "group_rank",
    "stage_index_to_group_rank",
    "submod",
    "args_recv_info",
    "grad_recv_info",
    "bwd_cache",
)


def check_stage_class(stage_class: type) -> None:
    """Raise EngineError if torch's PipelineStage lacks a method of STAGE_METHODS, or its parameters differ."""
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


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of a group, limited to the range of the option ``timeout=``."""
    timeout = dist.distributed_c10d.default_pg_timeout
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            timeout = options._timeout
            break
    return min(max(timeout, SHORTEST_TIMEOUT), LONGEST_TIMEOUT)


def group_identity(group: Any) -> str:
    """Return the name and the global ranks of a group as text, which is equal on all of its ranks.

    torch uses the name as prefix of the group's keys in the store, so it differs between groups of a job. A group that
    was made without torch.distributed has no name.
    """
    try:
        name, ranks = group.group_name, dist.get_process_group_ranks(group)
    except (RuntimeError, KeyError, ValueError):
        name, ranks = "", list(range(group.size()))
    return repr((str(name), ranks))
