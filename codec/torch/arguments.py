"""Tensors and what is asked of them, looked through; as flat arrays, and back."""

import functools
from collections.abc import Hashable, Mapping
from math import prod
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist

from codec import ArgumentError
from codec.arguments import shown
from codec.encoding import bound, check_stream
from codec.optimizers import Custom, Optimizer
from codec.optimizers.arguments import level_source_for
from codec.specs import BoundSpec, Spec, Truncate
from codec.tensors.segments import Records, pack, unpack
from codec.tensors.view import _check_storage, mark_written, view
from codec.torch.messages import Array
from codec.torch.reduction import Reduction

Op = Literal["mean", "sum", "max"]

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_OPS: dict[Any, Op] = {
    "sum": "sum",
    "mean": "mean",
    "avg": "mean",
    "max": "max",
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "max",
}


def op_of(op: Any) -> Op:
    """Return the name of a reduction.

    Parameters
    ----------
    op : ReduceOp or str
        ``ReduceOp.SUM``, ``AVG`` or ``MAX``, or "sum", "mean" (also "avg"), "max".

    Raises
    ------
    ArgumentError
        `op` is another operation, or no operation.
    """
    kind = getattr(op, "op", op)  # a ReduceOp, as its C++ type, holds the enumeration value inside
    if not isinstance(kind, Hashable) or kind not in _OPS:
        raise ArgumentError(
            f'op must be ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, "sum", "mean", "avg" or "max", got {shown(op)}'
        )
    return _OPS[kind]


def reduction_of(
    tensor: torch.Tensor,
    spec: Spec,
    op: Any,
    segments: Any,
    metric: Any,
    state: Mapping[str, Any] | None,
    stream: int,
) -> Reduction:
    """Arguments that were looked through: what is wrong with them is known before anything is sent."""
    check_dense(tensor)
    dtype = NAMES.get(tensor.dtype)
    if dtype is None:
        raise ArgumentError(f"only float32, bfloat16 and float16 can be reduced, not {tensor.dtype}")
    op = op_of(op)
    inside = None if segments is None else pack(segments)
    if inside:
        _check_inside(inside, tensor.numel())
    bound(tensor.numel(), dtype, spec)
    x = as_array(tensor)
    level_source_for(spec, bound_spec(spec, metric, state), view(x, dtype))
    flat = None if state is None else {name: _flat(x) for name, x in state.items() if x is not None}
    return Reduction(x, dtype, spec, op, check_stream(stream), inside, metric, flat)


def bound_spec(spec: Spec, metric: Any, state: Mapping[str, Any] | None) -> BoundSpec | None:
    """Return the spec bound to an optimizer, or to levels, and state; None if there are none."""
    if metric is None and state is None:
        return None
    if not isinstance(spec, Truncate):
        raise ArgumentError(f"metric= and state= are for Truncate, not for {type(spec).__name__}")
    if state is not None and (not isinstance(state, Mapping) or set(state) - {"theta", "m", "v"}):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError("state= must be a mapping of theta, m and v to arrays or tensors")
    if metric is None or isinstance(metric, Optimizer | Custom | list | tuple):
        return spec.bind(metric, **(state or {}))
    return spec.bind(levels=metric)


def check_dense(tensor: Any) -> None:
    """Raise ArgumentError unless it is a tensor whose memory holds its values."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"not a torch tensor: {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_neg():
        raise ArgumentError("only dense tensors that hold values can be used, no sparse, meta or negated ones")


def check_sizes(large: torch.Tensor, times: int, small: torch.Tensor) -> None:
    """Raise ArgumentError unless `large` has `times` as many values as `small`, of the same dtype."""
    check_dense(large)
    check_dense(small)
    have, want, dtype, other = large.numel(), times * small.numel(), large.dtype, small.dtype
    if have != want or dtype != other:
        raise ArgumentError(f"output and tensor do not go together: {have} values for {want}, {dtype} and {other}")


def check_output(tensor: Any, dtype: torch.dtype, n: int, name: str = "output") -> None:
    """Check that the result of a collective can be stored in a tensor.

    All that :func:`publish` could fail at is checked here, before ranks agree to begin: afterwards an error on one
    rank would not be an error on the others.

    Parameters
    ----------
    tensor : torch.Tensor
        Where the result is to be stored. Any strides, any device; an inference tensor or one that requires a gradient.
    dtype : torch.dtype
        The dtype that it must have.
    n : int
        The number of values that it must have.
    name : str
        The argument's name, for the message.

    Raises
    ------
    ArgumentError
        The tensor is not dense, has no memory, another dtype or size, or values that share memory with each other.
    """
    check_dense(tensor)
    if tensor.dtype != dtype or tensor.numel() != n:
        raise ArgumentError(
            f"{name} must have {n} values of {dtype}, to go with the tensor; it has {tensor.numel()} of {tensor.dtype}"
        )
    _check_storage(tensor, tensor.device.type)
    if n and not tensor.data_ptr():
        raise ArgumentError(f"{name} is a {type(tensor).__name__} without memory: pass what holds its values")
    if _overlaps(tensor):
        raise ArgumentError(
            f"{name} has strides {tensor.stride()} for shape {tuple(tensor.shape)}, so that values may share memory: "
            "pass a contiguous tensor"
        )


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return True if values of a tensor may share memory with each other."""
    end = 0  # offset of the last value in the dimensions of smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= end:
                return True
            end += stride * (size - 1)
    return False


@functools.lru_cache(256)
def _check_inside(segments: Records, n: int) -> None:
    end = 0
    for offset, shape in unpack(segments):
        if offset < end or offset + prod(shape) > n:
            raise ArgumentError(f"segment {shape} at {offset} overlaps with the one before it or ends after value {n}")
        end = offset + prod(shape)


def _flat(x: Any) -> Any:
    """Values of an optimizer's state, which tell their dtype: numpy has no bfloat16."""
    if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16:
        return x.detach().cpu().contiguous().view(-1)
    return as_array(x).reshape(-1)


def as_array(x: Any) -> Array:
    """A flat array of a tensor's values; bfloat16 as uint16. It shares memory where it can."""
    t = x.detach() if isinstance(x, torch.Tensor) else torch.as_tensor(np.ascontiguousarray(x))
    t = cast(torch.Tensor, view(t.cpu()).owner).view(-1)  # contiguous, and with memory of its own
    return (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy()


def publish(result: Array, r: Reduction, tensor: torch.Tensor) -> None:
    """Store the result of a collective in a tensor, which :func:`check_output` has accepted.

    Works for inference tensors in any thread: torch's inference mode belongs to the caller's thread.

    Parameters
    ----------
    result : ndarray
        As many values as the tensor has; bfloat16 as uint16.
    r : Reduction
        Says the dtype.
    tensor : torch.Tensor
        Gets the values.
    """
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        np.copyto(as_array(tensor), result.reshape(-1))  # torch's copy reads each line before it overwrites it
        mark_written(tensor)
        return
    values = torch.from_numpy(result)
    if r.dtype == "bfloat16":
        values = values.view(torch.bfloat16)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(values.reshape(tensor.shape))
