"""Operators ``torch.ops.codec.encode`` and ``decode``, which ``torch.compile`` and ``torch.export`` keep in graphs."""

from collections.abc import Sequence
from typing import Any

import torch

import codec
from codec import ArgumentError, SpecError
from codec.spec_config import self_contained
from codec.spec_text import spec_of
from codec.specs import SpecLike

__all__ = ["decode", "encode"]

_torch: Any = torch  # Any, since torch's stubs leave these functions untyped


def encode(x: torch.Tensor, spec: SpecLike = "lossless") -> torch.Tensor:
    """Encode a tensor with the operator ``torch.ops.codec.encode``. The frame is that of :func:`codec.encode`.

    ``torch.compile`` and ``torch.export`` keep the call in the graph. The result has no gradient.

    Parameters
    ----------
    x : tensor
        Tensor of rank 0 to 8.
    spec : Spec or name of a preset
        Codec and its parameters; default :class:`codec.Lossless`. Construct a spec outside of the compiled function.

    Returns
    -------
    tensor of uint8
        Frame, on the device of x. In a graph its size is unknown until the graph runs.

    Raises
    ------
    ArgumentError
        The codec does not support the dtype of x, or x contains NaN or Inf, which the codec refuses.
    SpecError
        `spec` is not a spec, or needs an optimizer or a base.

    Examples
    --------
    >>> x = torch.randn(1000)
    >>> frame = codec.torch.ops.encode(x, "balanced")
    >>> codec.torch.ops.decode(frame, x.shape, x.dtype).shape
    torch.Size([1000])
    """
    return _encode(x, _constant(spec))


def decode(frame: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Decode a frame with the operator ``torch.ops.codec.decode``.

    Parameters
    ----------
    frame : tensor of uint8
        Whole frame.
    shape : sequence of int
        Shape of the encoded tensor. ``torch.compile`` needs it to trace the graph.
    dtype : torch.dtype
        Dtype of the encoded tensor.

    Returns
    -------
    tensor
        Tensor on the device of `frame`.

    Raises
    ------
    FrameError
        The bytes are not a valid frame.
    ArgumentError
        The frame contains a tensor of another shape or dtype.

    Examples
    --------
    >>> codec.torch.ops.decode(codec.torch.ops.encode(torch.arange(3)), (3,), torch.int64)
    tensor([0, 1, 2])
    """
    return _decode(frame, shape, dtype)


def _written(spec: SpecLike) -> str:
    """Return a spec as a string, since operators cannot take Spec objects."""
    try:
        return repr(self_contained(spec))
    except AttributeError:  # torch.compile has traced the spec's constructor without setting the fields
        raise SpecError(
            "a spec cannot be created inside of a compiled function: create it outside, or pass the name of a preset"
        ) from None


_constant: Any = _written
# Set the attribute that torch.compiler.assume_constant_result sets. Calling that function would import the compiler.
_constant._dynamo_marked_constant = True


@torch.library.custom_op("codec::encode", mutates_args=())
def _encode(x: torch.Tensor, spec: str) -> torch.Tensor:
    frame: Any = codec.encode(x.detach(), self_contained(spec_of(spec)))
    return torch.frombuffer(bytearray(frame), dtype=torch.uint8) if isinstance(frame, bytes) else frame


def _fake_frame(x: torch.Tensor, spec: str) -> torch.Tensor:
    size = _torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(size, dtype=torch.uint8)


@torch.library.custom_op("codec::decode", mutates_args=())
def _decode(frame: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    if any(n < 0 for n in shape):
        raise ArgumentError(f"shape must have no negative dimension, got {tuple(shape)}")
    info = codec.inspect(frame)
    if info.shape != tuple(shape) or info.dtype != str(dtype).removeprefix("torch."):
        raise ArgumentError(
            f"the frame must hold {dtype} of shape {tuple(shape)}, got {info.dtype} of shape {info.shape}"
        )
    return codec.decode(frame, out=torch.empty(tuple(shape), dtype=dtype, device=frame.device))


def _fake_values(frame: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return frame.new_empty(tuple(shape), dtype=dtype)


_torch.library.register_fake("codec::encode", _fake_frame)
_torch.library.register_fake("codec::decode", _fake_values)
