"""Calls for a small tensor in host memory with few arguments, for which a request would take longer than the C library.

:func:`encode_small` and :func:`decode_small` return None for all other tensors, and after an error. The caller then
makes a request, whose checks raise the error with its cause.
"""

import struct
from math import prod
from typing import Any

import numpy as np

from codec import _call
from codec._c.library import DTYPE_NAMES, ITEMSIZE, ffi, lib
from codec._c.spec_structs import spec_struct
from codec.errors import ArgumentError, EngineError
from codec.specs import Spec
from codec.tensors.view import TensorView, empty, view, view_output

_ROOM, _SCRATCH = _call.SMALL_FRAME, _call.SMALL_SCRATCH
_LARGEST = _call.SMALL_TENSOR
_NULL, _VERIFY_FIRST = ffi.NULL, lib.CODEC_VERIFY_FIRST
_take, _give, _buffer = _call.take, _call.give, ffi.buffer
_encode, _decode = lib.codec_encode, lib.codec_decode

# Offsets in a frame. The C library checks all bytes of the header; dtype and shape must be those of the destination.
_DTYPE, _RANK, _SHAPE = 6, 7, 48
_DTYPES = {number: (name, ITEMSIZE[name]) for number, name in DTYPE_NAMES.items()}
_SHAPES: list[Any] = [struct.Struct(f"<{rank}Q") for rank in range(lib.CODEC_MAX_RANK + 1)]


def encode_small(x: Any, spec: Spec, stream: int) -> bytes | None:
    """Return the frame of x, an array or a torch tensor; None if it is not small, or cannot be encoded."""
    if (x.size if type(x) is np.ndarray else x.numel()) > _LARGEST:
        return None
    v = view(x)
    if v.nbytes > _LARGEST or v.device != "cpu":
        return None
    s = spec_struct(spec)
    call = _take()
    if stream:
        call.context.stream = stream
    t, size = call.fill_tensor(v), call.size
    frame = None
    if not _encode(s, t, call.frame, _ROOM, size, _NULL, call.context, call.small_scratch, _SCRATCH):
        frame = call.frame_bytes[: size[0]]
    _give(call)
    return frame


def decode_small(frame: TensorView, out: Any, like: Any, verify_first: bool) -> Any:
    """Return `out`, or a new tensor of the type of `like`; None if the tensor is not small, or cannot be decoded.

    `like` is an array or tensor in host memory, or None.
    """
    _, _, data, nbytes, owner, device, _ = frame
    kind = None if device != "cpu" else _kind_of(owner if type(owner) is bytes else _buffer(data, nbytes), nbytes)
    if kind is None:
        return None
    try:
        result, v = empty(*kind, like) if out is None else (out, view_output(out, kind[0]))
    except (ArgumentError, EngineError):
        return None
    if v.device != "cpu":
        return None
    call = _take()
    if out is not None and verify_first:
        call.context.flags = _VERIFY_FIRST
    status = _decode(data, nbytes, call.fill_tensor(v), call.context, call.small_scratch, _SCRATCH)
    _give(call)
    return None if status else result


def _kind_of(frame: Any, nbytes: int) -> tuple[str, tuple[int, ...]] | None:
    """Return the dtype and shape of a small tensor, read from the bytes of its frame; None for other bytes."""
    if nbytes < _SHAPE:
        return None
    dtype, rank = frame[_DTYPE], frame[_RANK]
    if type(dtype) is not int:
        dtype, rank = dtype[0], rank[0]
    known = _DTYPES.get(dtype)
    if known is None or rank >= len(_SHAPES) or nbytes < _SHAPE + 8 * rank:
        return None
    shape: tuple[int, ...] = _SHAPES[rank].unpack_from(frame, _SHAPE)
    return (known[0], shape) if 0 < prod(shape) * known[1] <= _LARGEST else None  # 0: other sizes may be too large
