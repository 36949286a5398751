"""Check the arguments of collectives, and convert tensors to flat arrays and back."""

import functools
from collections.abc import Hashable
from math import prod
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist

from codec import ArgumentError, CallOptions, SpecError, Status
from codec._c.traits import needs_base
from codec.arguments import shown
from codec.encoding import bound, check_stream
from codec.explain import overflow_message
from codec.optimizers.arguments import level_source_for
from codec.presets import resolve
from codec.reducing import Op
from codec.specs import BoundSpec, Spec, SpecLike
from codec.tensors.segments import Records, unpack
from codec.tensors.view import check_storage, mark_written, view
from codec.tensors.wrapper import View
from codec.torch._compat import from_numpy
from codec.torch.reduction.device import DeviceReduction
from codec.torch.reduction.host import FLOATS, TERMS, Reduction, Values
from codec.torch.transport.messages import Array
from codec.torch.transport.streams import encodes_in_place, settle

OpLike = Op | Literal["avg"] | dist.ReduceOp | dist.ReduceOp.RedOpType  # pyright: ignore[reportPrivateImportUsage]

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
    """Return the name of a reduction operation: "sum", "mean" or "max".

    Parameters
    ----------
    op : ReduceOp or str
        ``ReduceOp.SUM``, ``AVG`` or ``MAX``, or "sum", "mean" (also "avg"), "max".

    Raises
    ------
    ArgumentError
        `op` is not a supported operation.
    """
    kind = getattr(op, "op", op)  # a ReduceOp, as its C++ type, holds the enumeration value inside
    if not isinstance(kind, Hashable) or kind not in _OPS:
        raise ArgumentError(
            f'op must be ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, "sum", "mean", "avg" or "max", got {shown(op)}'
        )
    return _OPS[kind]


def _resolved(spec: Any) -> tuple[Spec, BoundSpec | None]:
    """Return the spec of a collective, and the bound spec if it is one; refuse Delta, which needs a base."""
    plain, bound_spec = resolve(spec)
    if needs_base(plain):
        raise SpecError(
            "Delta needs a base, which collectives do not have: send frames of encode(new, Delta(), base=old)"
        )
    return plain, bound_spec


def plain_spec(spec: Any) -> Spec:
    """Return an argument, a spec or the name of a preset, as a Spec.

    Raises
    ------
    SpecError
        `spec` is neither a spec nor a preset, or needs a base.
    ArgumentError
        `spec` is bound to an optimizer, which is valid only for a single call.
    """
    plain, bound_spec = _resolved(spec)
    if bound_spec is not None:
        raise ArgumentError(
            f"spec must not be bound to an optimizer, whose state changes in each step, got {shown(bound_spec)}: pass "
            f"{shown(plain)}"
        )
    return plain


def unwrapped(tensor: Any) -> tuple[Any, Records | None]:
    """Return the torch tensor and the segments of an argument, which is a tensor or a :func:`codec.view`."""
    if not isinstance(tensor, View):
        return tensor, None
    inner: Any = tensor.tensor
    if tensor.dtype is not None and isinstance(inner, torch.Tensor):
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        if inner.element_size() != dtype.itemsize:
            raise ArgumentError(f"{inner.dtype} cannot be viewed as {tensor.dtype}, whose values have another size")
        inner = inner.view(dtype)
    return inner, tensor.segments


def reduction_of(
    tensor: torch.Tensor,
    spec: SpecLike,
    op: Any,
    stream: int = 0,
    *,
    segments: Records | None = None,
    settings: CallOptions = CallOptions(),  # noqa: B008 - immutable
) -> Reduction:
    """Check the arguments of a collective, before anything is sent, and return its reduction.

    Parameters
    ----------
    tensor : torch.Tensor
        Values of this rank: float32, bfloat16 or float16.
    spec : Spec, BoundSpec or str
        Codec.
    op : ReduceOp or str
        Operation, as for :func:`op_of`.
    stream : int
        Number of the random stream.
    segments : Records, optional
        Shapes of parameters inside the tensor.
    settings : CallOptions
        Engine and threads.

    Raises
    ------
    ArgumentError, SpecError, StateError
        An argument is invalid.
    """
    check_dense(tensor)
    dtype = NAMES.get(tensor.dtype)
    if dtype is None:
        raise ArgumentError(
            f"only float32, bfloat16 and float16 can be reduced, got {tensor.dtype}: convert the tensor, or pass it to "
            "torch.distributed or codec.torch.all_to_all_bytes"
        )
    op = op_of(op)
    if segments:
        _check_inside(segments, tensor.numel())
    plain, bound_spec = _resolved(spec)
    bound(tensor.numel(), dtype, plain)
    x, kind = values_of(tensor, settings), Reduction
    if isinstance(x, torch.Tensor):
        kind = DeviceReduction
        settle(x)
    level_source_for(plain, bound_spec, view(x, dtype))
    flat = None if bound_spec is None else _flattened(bound_spec, on_device=kind.on_device)
    return kind(x, dtype, plain, op, check_stream(stream), segments, flat, settings)


def nonfinite_error(r: Reduction, x: Values, *, summed: bool = False) -> ArgumentError | None:
    """Return the error that encoding would raise if `x` contains NaN or Inf and the codec refuses them; else None.

    It is for values that are sent uncompressed. `summed`: `x` is a sum over ranks, not this rank's values.
    """
    if not r.rejects_nonfinite or not len(x) or all(torch.isfinite(t) for t in torch.aminmax(r.tensor_of(x))):
        return None
    text = overflow_message(view(x, r.dtype), TERMS) if summed else r.nonfinite_text()
    return ArgumentError(text, Status.NONFINITE)


def check_finite(r: Reduction, x: Array) -> None:
    """Raise ArgumentError if values of this rank contain NaN or Inf, and the codec refuses them."""
    if (error := nonfinite_error(r, x)) is not None:
        raise error


def values_of(tensor: torch.Tensor, settings: CallOptions) -> Values:
    """Return the flat values of a tensor: on its GPU if the CUDA engine can encode them, otherwise in host memory."""
    if not encodes_in_place(tensor, settings):
        return as_array(tensor)
    return cast(torch.Tensor, view(tensor).owner).view(-1)


def _flattened(spec: BoundSpec, *, on_device: bool) -> BoundSpec:
    """Return a bound spec whose arrays are flat, and in host memory unless `on_device`."""

    def flat(x: Any) -> Any:
        if on_device and isinstance(x, torch.Tensor):
            return x.detach().contiguous().view(-1)
        return _flat(x)

    levels = None if spec.levels is None else flat(spec.levels)
    return BoundSpec(spec.spec, spec.optimizer, {name: flat(x) for name, x in spec.state.items()}, levels)


def check_dense(tensor: Any) -> None:
    """Raise ArgumentError unless `tensor` is a dense tensor whose memory contains its values."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"a tensor must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_neg():
        raise ArgumentError(
            f"a tensor must be dense, not on meta and not lazily negated, got layout {tensor.layout} on {tensor.device}"
        )


def check_sizes(large: torch.Tensor, times: int, small: torch.Tensor) -> None:
    """Raise ArgumentError unless `large` has `times` as many values as `small`, of the same dtype."""
    check_dense(large)
    check_dense(small)
    if large.numel() != times * small.numel() or large.dtype != small.dtype:
        raise ArgumentError(
            f"of output and tensor, one must have {times} times as many values as the other, and both the same dtype, "
            f"got {large.numel()} of {large.dtype} and {small.numel()} of {small.dtype}"
        )


def check_output(tensor: Any, dtype: torch.dtype, n: int, name: str = "output") -> None:
    """Check that the result of a collective can be stored in a tensor.

    This checks every reason for which :func:`publish` could fail. It is called before the ranks agree, since a later
    error on one rank would not be reported to the others.

    Parameters
    ----------
    tensor : torch.Tensor
        Tensor for the result. It may have any strides and device, be an inference tensor, and require a gradient.
    dtype : torch.dtype
        Dtype that the tensor must have.
    n : int
        Number of values that the tensor must have.
    name : str
        Name of the argument, for error messages.

    Raises
    ------
    ArgumentError
        The tensor is not dense, has no memory, another dtype or size, or values that share memory with each other.
    """
    check_dense(tensor)
    if tensor.dtype != dtype or tensor.numel() != n:
        raise ArgumentError(
            f"{name} must have {n} values of {dtype} for this tensor, got {tensor.numel()} of {tensor.dtype}"
        )
    check_storage(tensor)
    if n and not tensor.data_ptr():
        raise ArgumentError(
            f"{name} is a {type(tensor).__name__} without memory of its own: pass the tensor that holds its values"
        )
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
    """Return an optimizer's state as a flat array; bfloat16 stays a tensor, since numpy does not support it."""
    if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16:
        return x.detach().cpu().contiguous().view(-1)
    return as_array(x).reshape(-1)


def as_array(x: Any) -> Array:
    """Return a tensor as a flat array, bfloat16 as uint16. Contiguous tensors on the CPU are not copied."""
    t = x.detach() if isinstance(x, torch.Tensor) else torch.as_tensor(np.ascontiguousarray(x), device="cpu")
    t = cast(torch.Tensor, view(t.cpu()).owner).view(-1)  # contiguous, in host memory
    return (t.view(torch.uint16) if t.dtype == torch.bfloat16 else t).numpy()


def publish(result: Values, r: Reduction, tensor: torch.Tensor) -> None:
    """Store the result of a collective in a tensor that :func:`check_output` has accepted.

    This also works for inference tensors. Since torch's inference mode is thread-local, it is set here.

    Parameters
    ----------
    result : ndarray or torch.Tensor
        Values, as many as the tensor has; bfloat16 in an array as uint16.
    r : Reduction
        Reduction, whose dtype the values have.
    tensor : torch.Tensor
        Tensor to write to.
    """
    if isinstance(result, np.ndarray) and tensor.device.type == "cpu" and tensor.is_contiguous():
        # numpy copies faster: torch's copy reads each cache line before it overwrites the line
        np.copyto(as_array(tensor), cast(Array, result).reshape(-1))
        mark_written(tensor)
        return
    values = result if isinstance(result, torch.Tensor) else from_numpy(cast(Array, result)).view(FLOATS[r.dtype])
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(values.reshape(tensor.shape))
    settle(tensor)
