"""Calls of the Numba engine: the C library opens and closes jobs, and this engine's loops process the blocks."""

from typing import Any

import numpy as np

from codec import _call
from codec._c import pool
from codec._c.library import DTYPE_NAMES, check, ffi, lib
from codec._call import Call
from codec.engines import blockwise
from codec.engines.native import decoding, encoding
from codec.engines.native.memory import NewBytes
from codec.engines.numba import loops
from codec.engines.request import DecodeRequest, EncodeRequest
from codec.errors import ArgumentError, Status
from codec.inspection import read_header
from codec.optimizers.arguments import LevelSource, set_levels
from codec.tensors.view import TensorView, empty

_BAD_ARGUMENT, _SHORT_OUTPUT = int(Status.BAD_ARGUMENT), int(Status.SHORT_OUTPUT)


def encode_filled(call: Call, s: Any, r: EncodeRequest, threads: int | None) -> bytes | memoryview:
    """Encode the tensor of a request; the call's context must have been filled in."""
    t, out = call.fill_tensor(r.x), r.out
    count = pool.choose_threads(threads, r.x.nbytes)
    try:
        if out is not None:
            check(lib.codec_bound_segments(s, t, call.context.segments, call.context.nsegments, call.size))
            if out.nbytes >= call.size[0]:
                n = blockwise.encode(loops, call, s, out.data, out.nbytes, count)
                if n is not None:
                    return encoding.frame_in(out, n)
            return _encode_apart(call, s, r, out, count)
        check(lib.codec_encode_room(s, t, call.size))
        return _encode_new(call, s, r, call.size[0], count)
    except ArgumentError as e:
        if e.code == _BAD_ARGUMENT:
            r.check_apart()
        raise


def _encode_new(call: Call, s: Any, r: EncodeRequest, room: int, threads: int) -> bytes | memoryview:
    """Encode into new memory, and return the frame.

    If the encoded blocks exceed `room` bytes, encoding is repeated with two, then four times as much memory. The result
    is then a stored (uncompressed) frame.
    """
    for times in (1, 2, 4):
        new = NewBytes(times * room)
        call.keep = call.keep, new
        n = blockwise.encode(loops, call, s, ffi.cast("uint8_t *", new.address), times * room, threads)
        if n is not None:
            return new.finish(n)
    return encoding.encode_filled(call, s, r, threads)  # over 32 GiB: the C library stores the tensor


def _encode_apart(call: Call, s: Any, r: EncodeRequest, out: TensorView, threads: int) -> bytes | memoryview:
    """Encode into temporary memory, because `out` may be large enough for the frame but not for intermediate blocks.

    `out` and the residual are written only after the frame is complete.
    """
    residual: Any = None
    if r.residual is not None:
        residual = r.residual.array().copy()
        call.context.residual = ffi.cast("float *", ffi.from_buffer(residual))
    check(lib.codec_encode_room(s, call.tensor, call.size))
    frame = _encode_new(call, s, r, call.size[0], threads)
    if len(frame) > out.nbytes:
        raise ArgumentError(
            f"out= has {out.nbytes} bytes, too few for this frame: allocate as many as bound() returns", _SHORT_OUTPUT
        )
    ffi.memmove(out.data, frame, len(frame))
    if r.residual is not None:
        ffi.memmove(r.residual.data, residual, r.residual.nbytes)
    return encoding.frame_in(out, len(frame))


def decode_prepared(
    call: Call, r: DecodeRequest, v: TensorView, levels: LevelSource | None, threads: int | None
) -> None:
    """Decode a frame into `v`. The call's context decides if values are stored, added or only validated."""
    frame = r.frames[0]
    info = read_header(frame)
    if not info.nblocks:
        decoding.decode_prepared(call, r, v, levels, threads)
        return
    call.keep = call.keep, r, v
    if levels is not None:
        set_levels(call, levels)
    base = None if r.base is None else decoding.base_of(r, v.dtype)
    if base is not None:
        call.set_base(base)
    call.fill_tensor(v)
    try:
        blockwise.decode(loops, call, info, frame.data, frame.nbytes, pool.choose_threads(threads, v.nbytes))
    except ArgumentError as e:
        if e.code == _BAD_ARGUMENT:
            r.check_apart(v, levels, in_place=True, base=base)
        raise


def reduce_into(call: Call, read: list[tuple[Any, TensorView]], op: int, threads: int) -> None:
    """Reduce frames into the call's tensor; with CODEC_FINITE, check the result for NaN and Inf."""
    nblocks = read[0][0].nblocks
    aligned = all(info.nblocks == nblocks > 0 for info, _ in read)
    if not (aligned and blockwise.reduce(loops, call, read, op, threads)):
        _reduce_one_by_one(call, read, op, threads)
    result = loops.memory_of(call.tensor.data, call.tensor.nbytes).view(np.float32)
    if call.context.flags & lib.CODEC_FINITE and not np.isfinite(result).all():
        check(int(Status.NONFINITE))


def sum_codes_into(call: Call, read: list[tuple[Any, TensorView]], op: int, threads: int) -> None:
    """Add the codes of Ternary frames in float32, which is exact for up to 2^24 frames, and store them as integers."""
    context, target = call.context, loops.memory_of(call.tensor.data, call.tensor.nbytes)
    sums, v = empty("float32", tuple(call.tensor.shape[0 : call.tensor.rank]))
    call.keep = call.keep, v
    integers = target.view(DTYPE_NAMES[call.tensor.dtype])
    call.fill_tensor(v)
    context.flags = 0
    for i, (info, frame) in enumerate(read):
        context.into = loops.into(i, op)
        _decode_one(call, info, frame, threads)
    integers[:] = sums.reshape(-1)


def _reduce_one_by_one(call: Call, read: list[tuple[Any, TensorView]], op: int, threads: int) -> None:
    """Reduce frames with no or different blocks: decode one frame after the other into the result."""
    context, flags = call.context, call.context.flags
    if flags & lib.CODEC_VERIFY_FIRST:
        context.flags = lib.CODEC_CHECK_ONLY
        context.into = lib.CODEC_INTO_FLOAT32  # the result is float32 even if frames have another dtype
        for info, frame in read:
            _decode_one(call, info, frame, threads)
        context.flags = lib.CODEC_NO_CHECKSUM
    for i, (info, frame) in enumerate(read):
        context.into = loops.into(i, op)
        context.divide = len(read) if op == lib.CODEC_REDUCE_MEAN and 1 < len(read) == i + 1 else 0
        _decode_one(call, info, frame, threads)
    context.flags = flags


def _decode_one(call: Call, info: Any, frame: TensorView, threads: int) -> None:
    """Decode a frame into the call's tensor; a frame without blocks is decoded by the C library."""
    if info.nblocks:
        blockwise.decode(loops, call, info, frame.data, frame.nbytes, threads)
        return
    status = lib.codec_decode(
        frame.data, frame.nbytes, call.tensor, call.context, call.small_scratch, _call.SMALL_SCRATCH
    )
    check(status, call.fault)
