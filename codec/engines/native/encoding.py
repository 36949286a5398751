"""Encoder of the native engine, for one thread or several."""

from collections.abc import Callable
from typing import Any

import numpy as np

from codec import _call
from codec._c import pool
from codec._c.library import check, ffi, lib
from codec._c.spec_structs import spec_struct
from codec._call import Call
from codec.engines import blockwise
from codec.engines.native.memory import NewBytes
from codec.engines.request import EncodeRequest
from codec.errors import ArgumentError, Status
from codec.optimizers.arguments import set_levels
from codec.tensors.view import TensorView, on_host

_ROOM, _SCRATCH, _SMALL_TENSOR = _call.SMALL_FRAME, _call.SMALL_SCRATCH, _call.SMALL_TENSOR
_SHORT_OUTPUT, _BAD_ARGUMENT = int(Status.SHORT_OUTPUT), int(Status.BAD_ARGUMENT)
_NULL = ffi.NULL
ME = "the native engine"

EncodeFilled = Callable[[Call, Any, EncodeRequest, int | None], bytes | memoryview]


def encode(r: EncodeRequest, make: EncodeFilled | None = None) -> bytes | memoryview:
    """Return a frame as new bytes, or as a memoryview of the first bytes of the request's `out`.

    `make` is another engine's function that encodes the values; None: use the C library.
    """
    x, out = r.x, r.out
    here = x.device == "cpu" and (out is None or out.device == "cpu")
    if not here or r.residual is not None or r.levels is not None or r.base is not None:
        check_host(r)
    s = spec_struct(r.spec)
    call = _call.take()
    fill_context(call, r)
    frame = (make or encode_filled)(call, s, r, r.threads)
    _call.give(call)
    return frame


def fill_context(call: Call, r: EncodeRequest) -> None:
    """Copy the options of a request into the call's context, which must have been reset."""
    _, _, _, residual, codebook, segments, stream, levels, _, feedback, verify_first, delta, base = r
    call.keep = r
    if stream:
        call.context.stream = stream
    if codebook is not None:
        call.set_codebooks((codebook,))
    if segments is not None:
        call.set_segments(segments)
    if levels is not None:
        set_levels(call, levels)
    if base is not None:
        call.set_base(base)
    if residual is not None:
        call.context.residual = ffi.cast("float *", residual.data)
        reads = lib.CODEC_DIFFERENCE if delta else lib.CODEC_FEEDBACK if feedback else 0
        call.context.flags = reads | (lib.CODEC_VERIFY_FIRST if verify_first else 0)


def check_host(r: EncodeRequest) -> None:
    """Raise EngineError if a tensor of the request is on a device."""
    for name, v in r.views:
        if v.device != "cpu":
            on_host(name, v, ME)


def encode_filled(call: Call, s: Any, r: EncodeRequest, threads: int | None) -> bytes | memoryview:
    """Return the frame of a request. The call's context must have been filled in."""
    x, out = r.x, r.out
    t = call.fill_tensor(x)
    try:
        if x.nbytes > _SMALL_TENSOR or (threads is not None and threads > 1):
            return _encode_large(call, s, r, pool.choose_threads(threads, x.nbytes))
        dst, room = (call.frame, _ROOM) if out is None else (out.data, out.nbytes)
        status = lib.codec_encode(s, t, dst, room, call.size, _NULL, call.context, call.small_scratch, _SCRATCH)
        if status == 0:
            n = call.size[0]
            return call.frame_bytes[:n] if out is None else frame_in(out, n)
        if status != _SHORT_OUTPUT:  # with rows of one value, a frame may be larger than its tensor and the buffer
            check(status)
        return _encode_large(call, s, r, 1)
    except ArgumentError as e:
        if e.code == _BAD_ARGUMENT:
            r.check_apart()
        raise


def frame_in(out: TensorView, n: int) -> memoryview:
    """Return the first n bytes of `out` as a read-only, one-dimensional memoryview of bytes."""
    owner: Any = out.owner
    array: Any = owner if type(owner) is np.ndarray else np.asarray(owner)
    memory = memoryview(array)  # pyright: ignore[reportArgumentType] - a cast would be a call
    if memory.ndim != 1 or memory.format != "B":
        memory = memory.cast("B")
    return memory[:n].toreadonly()


def _encode_large(call: Call, s: Any, r: EncodeRequest, threads: int) -> bytes | memoryview:
    """Encode a tensor that needs newly allocated memory, several threads or a large scratch buffer."""
    if r.out is not None:
        return frame_in(r.out, _encode_at(call, s, r.out.data, r.out.nbytes, threads))
    check((lib.codec_encode_room if threads > 1 else lib.codec_bound)(s, call.tensor, call.size))
    room: int = call.size[0]
    new = NewBytes(room)
    call.keep = call.keep, new
    return new.finish(_encode_at(call, s, ffi.cast("uint8_t *", new.address), room, threads))


def _encode_one(call: Call, spec: Any, dst: Any, capacity: int) -> None:
    check(lib.codec_scratch(spec, call.tensor, call.size))
    nbytes = call.size[0]
    scratch = call.scratch(nbytes)
    status = lib.codec_encode(spec, call.tensor, dst, capacity, call.size, _NULL, call.context, scratch, nbytes)
    if status == _SHORT_OUTPUT:
        raise ArgumentError(
            f"out= has {capacity} bytes, too few for this frame: allocate as many as bound() returns", status
        )
    check(status)


def _encode_at(call: Call, spec: Any, dst: Any, capacity: int, threads: int) -> int:
    if threads > 1:
        n = blockwise.encode(lib, call, spec, dst, capacity, threads)
        if n is not None:
            return n
    _encode_one(call, spec, dst, capacity)
    return call.size[0]
