"""Sum, mean and maximum of frames, by the native engine."""

from collections.abc import Callable
from typing import Any

from codec import _call
from codec._c import pool
from codec._c.library import check, ffi, lib
from codec._call import Call
from codec.engines import blockwise
from codec.engines.native.decoding import read_whole
from codec.engines.native.encoding import ME
from codec.engines.request import DecodeRequest
from codec.errors import ArgumentError, Status
from codec.inspection import check_frame
from codec.optimizers.arguments import level_source, set_levels
from codec.tensors.view import TensorView, empty, on_host, view_output

_BAD_ARGUMENT = int(Status.BAD_ARGUMENT)

ReduceInto = Callable[[Call, list[tuple[Any, TensorView]], int, int], None]
_OPS = {"sum": lib.CODEC_REDUCE_SUM, "mean": lib.CODEC_REDUCE_MEAN, "max": lib.CODEC_REDUCE_MAX}


def reduce(r: DecodeRequest, op: str, make: ReduceInto | None = None) -> Any:
    """Reduce frames to float32; return the request's `out`, or a new tensor of the type of its `like`.

    `make` is another engine's function that reduces the values; None: use the C library.
    """
    read = [(read_whole(frame), frame) for frame in r.frames]
    first = read[0][0]
    shape = tuple(first.shape[0 : first.rank])
    for info, _ in read:
        if tuple(info.shape[0 : info.rank]) != shape:
            for frame in r.frames:  # a damaged header can have a wrong shape: report the damage first
                check_frame(frame)
            other = tuple(info.shape[0 : info.rank])
            raise ArgumentError(f"frames to reduce must have the same shape, got {shape} and {other}")
    r.check_limit(4 * first.n)
    levels = level_source(r.bound, first.n) if r.bound is not None else None
    for name, array in levels.read if levels else ():
        on_host(name, array, ME)
    if r.out is None:
        result, v = empty("float32", shape, r.like)
    else:
        result, v = r.out, on_host("out=", view_output(r.out), ME)
    call = _call.take()
    call.context.flags = (
        (lib.CODEC_VERIFY_FIRST if r.out is not None and r.verify_first else 0)
        | (lib.CODEC_NONTEMPORAL if r.nontemporal else 0)
        | (lib.CODEC_FINITE if r.check_finite else 0)
    )
    call.keep = r, v
    if r.codebooks:
        call.set_codebooks(r.codebooks)
    if levels is not None:
        set_levels(call, levels)
    call.fill_tensor(v)
    try:
        (make or reduce_into)(call, read, _OPS[op], pool.choose_threads(r.threads, v.nbytes * len(read)))
    except ArgumentError as e:
        if e.code == _BAD_ARGUMENT:
            r.check_apart(v, levels, in_place=len(read) == 1)
        raise
    _call.give(call)
    return result


def reduce_into(call: Call, read: list[tuple[Any, TensorView]], op: int, threads: int) -> None:
    """Reduce frames into the call's tensor with the C library."""
    nblocks = read[0][0].nblocks
    match = threads > 1 and all(info.nblocks == nblocks > 1 for info, _ in read)
    if match and blockwise.reduce(lib, call, read, op, threads):
        return
    pointers = ffi.new("void *[]", [frame.data for _, frame in read])
    sizes = ffi.new("size_t[]", [frame.nbytes for _, frame in read])
    check(lib.codec_reduce_scratch(pointers, sizes, len(read), call.size))
    size = call.size[0]
    scratch = call.scratch(size)
    check(lib.codec_reduce(pointers, sizes, len(read), op, call.tensor, call.context, scratch, size), call.fault)
