"""Argument ``out=`` of an all-reduce: checks, and the memory in which the result is computed."""

import torch

from codec import ArgumentError, CallOptions
from codec.tensors.view import mark_written
from codec.torch.reduction.arguments import check_output, publish, values_of
from codec.torch.reduction.host import Reduction, Values


def prepare_output(r: Reduction, tensor: torch.Tensor, out: torch.Tensor | None, settings: CallOptions) -> None:
    """Check the output of an all-reduce, and choose the memory in which the result is computed."""
    if out is not None:
        r.out = _output_values(out, tensor, r, settings)
        return
    check_output(tensor, tensor.dtype, tensor.numel(), "the tensor")
    if r.can_defer and r.x.ctypes.data == tensor.data_ptr():
        r.deferred = []


def store_output(result: Values, r: Reduction, tensor: torch.Tensor, out: torch.Tensor | None) -> None:
    """Store the result of an all-reduce in `out`, or in the tensor itself if `out` is None."""
    if r.deferred is not None:
        for decode in r.deferred:
            decode()
        mark_written(tensor)
    elif out is None:
        publish(result, r, tensor)
    elif r.out is None:
        publish(result, r, out)


def _output_values(out: torch.Tensor, tensor: torch.Tensor, r: Reduction, settings: CallOptions) -> Values | None:
    """Check ``out=`` and return its memory; None if the result is computed elsewhere."""
    check_output(out, tensor.dtype, tensor.numel(), "out=")
    if out.device.type not in ("cpu", tensor.device.type) or not out.is_contiguous():
        raise ArgumentError(
            f"out= must be contiguous, and in host memory or on the device of the tensor, got strides {out.stride()} "
            f"on {out.device}"
        )
    if out.device == tensor.device and _share_memory(out, tensor):
        raise ArgumentError("out= shares memory with the tensor: pass memory of its own")
    if out.device.type != "cpu" and not r.on_device:  # the tensor is copied to the host
        return None
    if r.on_device and out.device != tensor.device:
        return None
    return values_of(out, settings)


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors may share memory; `a` must be contiguous."""
    if not b.is_contiguous():
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
