"""Tensors to frames, by one thread or by several."""

from typing import Any

import numpy as np

from codec import core, pool, structs
from codec.core import check, ffi, lib
from codec.engines.native.memory import NewBytes
from codec.engines.request import EncodeRequest
from codec.errors import SpecError, Status
from codec.spec_structs import spec_struct
from codec.structs import Call
from codec.view import TensorView, on_host

_ROOM, _SCRATCH, _SMALL_TENSOR = structs.SMALL_FRAME, structs.SMALL_SCRATCH, structs.SMALL_TENSOR
_SHORT_OUTPUT, _BAD_ARGUMENT = int(Status.SHORT_OUTPUT), int(Status.BAD_ARGUMENT)
_NULL = ffi.NULL
ME = "the native engine"


def encode(r: EncodeRequest) -> bytes | memoryview:
    """A frame: bytes, or the part of the request's `out` that it takes."""
    x, spec, out, residual, codebook, segments, stream, metric, threads, feedback = r
    here = x.device == "cpu" and (out is None or out.device == "cpu")
    if not here or residual is not None or metric is not None:
        check_host(r)
    s = spec_struct(spec)
    call = structs.take()
    call.keep = r
    if stream:
        call.context.stream = stream
    if codebook is not None:
        call.set_codebooks((codebook,))
    if segments is not None:
        call.set_segments(segments)
    if metric is not None:
        call.set_metric(metric)
    if residual is not None:
        call.context.residual = ffi.cast("float *", residual.data)
        if feedback:
            call.context.flags = lib.CODEC_FEEDBACK
    frame = encode_filled(call, s, r, threads)
    structs.give(call)
    return frame


def check_host(r: EncodeRequest) -> None:
    """Raise EngineError for what lies on a device."""
    for name, v in r.views:
        if v.device != "cpu":
            on_host(name, v, ME)


def encode_filled(call: Call, s: Any, r: EncodeRequest, threads: int | None) -> bytes | memoryview:
    """The frame of a request whose context is filled in."""
    x, out = r.x, r.out
    t = call.fill_tensor(x)
    try:
        if x.nbytes > _SMALL_TENSOR or (threads is not None and threads > 1):
            return _encode_large(call, s, r, pool.choose_threads(threads, x.nbytes))
        dst, room = (call.frame, _ROOM) if out is None else (out.data, out.nbytes)
        status = lib.codec_encode(s, t, dst, room, call.size, _NULL, call.context, call.small_scratch, _SCRATCH)
        if status == 0:
            n = call.size[0]
            return call.frame_bytes[:n] if out is None else _frame_in(out, n)
        if status != _SHORT_OUTPUT:  # rows of one value may make a frame larger than the tensor
            check(status)
        return _encode_large(call, s, r, 1)
    except SpecError as e:
        if e.code == _BAD_ARGUMENT:
            r.check_apart()
        raise


def _frame_in(out: TensorView, n: int) -> memoryview:
    """The first n bytes, read-only as bytes objects are: what is returned can be used alike."""
    owner: Any = out.owner
    array: Any = owner if type(owner) is np.ndarray else np.asarray(owner)
    memory = memoryview(array)  # pyright: ignore[reportArgumentType] - a cast would be a call
    if memory.ndim != 1 or memory.format != "B":
        memory = memory.cast("B")
    return memory[:n].toreadonly()


def _encode_large(call: Call, s: Any, r: EncodeRequest, threads: int) -> bytes | memoryview:
    """Into memory that has to be made, by more than one thread, or with more scratch."""
    if r.out is not None:
        return _frame_in(r.out, _encode_at(call, s, r.out.data, r.out.nbytes, threads))
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
        raise SpecError(f"out= has {capacity} bytes, which is too few; bound() says how many are enough", status)
    check(status, call.fault)


def _encode_at(call: Call, spec: Any, dst: Any, capacity: int, threads: int) -> int:
    if threads > 1:
        n = _encode_threads(call, spec, dst, capacity, threads)
        if n is not None:
            return n
    _encode_one(call, spec, dst, capacity)
    return call.size[0]


def _encode_threads(call: Call, spec: Any, dst: Any, capacity: int, threads: int) -> int | None:
    """None: it must be done by one thread, which needs less room."""
    t, context = call.tensor, call.context  # which `call` keeps alive, for tasks too
    job_size, work_size = ffi.new("size_t *"), ffi.new("size_t *")
    check(lib.codec_job_nbytes(spec, t, job_size, work_size))
    job, plan = core.new_bytes(job_size[0]), ffi.new("codec_plan *")
    status = lib.codec_encode_open(spec, t, dst, capacity, context, job, job_size[0], plan)
    if status == _SHORT_OUTPUT:
        return None
    check(status)
    if plan.nscans:
        cuts = pool.ranges(plan.nscans, threads)

        def scan(i: int, _: int) -> int:
            return lib.codec_encode_scan(call.tensor, call.context, job, *cuts[i])

        for status in pool.run(scan, len(cuts), threads):
            check(status)
        status = lib.codec_encode_start(t, dst, capacity, context, job, plan)
        if status == _SHORT_OUTPUT:
            return None
        check(status)
    if plan.nblocks < 2 or not plan.room:
        return None
    room: int = plan.room
    cuts = pool.ranges(plan.nblocks, threads)
    places = [plan.regions_at + first * room for first, _ in cuts]
    limits = [min(plan.regions_at + (first + count) * room, capacity) for first, count in cuts]
    seals, end = ffi.new("uint64_t[]", len(cuts)), ffi.new("uint64_t[]", len(cuts))
    nbytes = work_size[0]
    works = [core.new_bytes(nbytes) for _ in range(min(threads, len(cuts)))]
    done = [False] * len(cuts)
    turn = [(0, plan.regions_at)]  # which range is to be moved next, and where to, while no thread moves one

    def task(i: int, w: int) -> int:
        status: int = lib.codec_encode_blocks(
            call.tensor, dst, limits[i], call.context, job, *cuts[i], places[i], end + i, seals + i, works[w], nbytes
        )
        done[i] = status == 0
        move()
        return status

    def move() -> None:
        """Move ranges together as they get done, by whichever thread comes: it would take long in the end."""
        try:
            i, to = turn.pop()
        except IndexError:
            return
        while i < len(cuts) and done[i]:
            check(lib.codec_encode_move(job, dst, limits[i], *cuts[i], places[i], to, end + i))
            places[i], to, i = to, end[i], i + 1
        turn.append((i, to))

    for status in pool.run(task, len(cuts), threads):
        if status in (_SHORT_OUTPUT, Status.LIMIT):
            return None
        check(status)
    seal = sum(seals) % (1 << 64)
    counts = [count for _, count in cuts]
    check(lib.codec_encode_close(t, dst, capacity, context, job, counts, places, len(cuts), seal, call.size))
    return call.size[0]
