"""Frames to tensors, by one thread or by several."""

from typing import Any

from codec import core, pool, structs
from codec.core import DTYPE_NAMES, check, ffi, lib
from codec.engines.native.encoding import ME
from codec.engines.request import DecodeRequest
from codec.errors import FrameError, SpecError, StateError, Status
from codec.frame import read_header
from codec.metrics.asked import Asked, asked
from codec.structs import Call
from codec.view import TensorView, empty, on_host, view_output

_SCRATCH, _SMALL_TENSOR = structs.SMALL_SCRATCH, structs.SMALL_TENSOR
_BAD_ARGUMENT = int(Status.BAD_ARGUMENT)
_NULL, _VERIFY_FIRST = ffi.NULL, lib.CODEC_VERIFY_FIRST
_MAX_HEADER = 112  # bytes, all that is read of a frame before there is a tensor

# A frame that holds many times its own size is checked before its tensor is touched: that costs little there, and one
# that turns out bad at its end must not have filled the memory first.
_BOMB, _SMALL = 4, 1 << 20


# of a frame whose header was read: where its values go, as seen and as the caller has it; what it needs beside its
# bytes; whether it is checked before anything is written
Prepared = tuple[TensorView, Any, Asked | None, bool]


def decode(r: DecodeRequest) -> Any:
    """The frame's tensor: the request's `out`, or a new one of the kind of its `like`."""
    call = structs.take()
    v, result, metric, verify = prepare(call, r)
    if verify:
        call.context.flags = _VERIFY_FIRST
    if r.codebooks:
        call.set_codebooks(r.codebooks)
    decode_prepared(call, r, v, metric, r.threads)
    structs.give(call)
    return result


def prepare(call: Call, r: DecodeRequest) -> Prepared:
    """Read the header, look whether all that is needed is there, make the tensor if there is none."""
    frame = r.frames[0]
    nbytes, info = frame.nbytes, call.info
    if frame.device != "cpu":
        on_host("the frame", frame, ME)
    status = lib.codec_inspect(frame.data, nbytes if nbytes < _MAX_HEADER else _MAX_HEADER, info)
    if status:
        check(status, info.fault)
    dtype = DTYPE_NAMES[info.dtype]
    shape = tuple(info.shape[0 : info.rank])
    tensor_nbytes: int = info.tensor_nbytes
    if info.frame_nbytes != nbytes or not r.allows(tensor_nbytes):
        _refuse(call, r, frame, TensorView(dtype, shape, _NULL, 0, None))
    m = _asked(info, r, frame) if r.metric is not None else None
    if r.out is None:
        result, v = empty(dtype, shape, r.like)
        return v, result, m, tensor_nbytes > _BOMB * nbytes + _SMALL
    return on_host("out=", view_output(r.out, dtype), ME), r.out, m, r.check_first


def _refuse(call: Call, r: DecodeRequest, frame: TensorView, like: TensorView) -> None:
    """A frame that is not whole, or says that it holds too much: before anything is allocated."""
    tensor_nbytes: int = call.info.tensor_nbytes
    call.context.max_nbytes = most = 0 if r.out is not None else r.limit()
    if most or r.out is not None:  # to C, 0 is no limit
        t = call.fill_tensor(like)
        check(lib.codec_decode(frame.data, frame.nbytes, t, call.context, _NULL, 0), call.fault)
    r.check_limit(tensor_nbytes)


def _asked(info: Any, r: DecodeRequest, frame: TensorView) -> Asked | None:
    """What a frame needs; but if that does not fit, see first that it is not the frame's fault."""
    try:
        m = asked(r.metric, r.state, info.n)
    except (SpecError, StateError):
        check(lib.codec_verify(frame.data, frame.nbytes))
        raise
    for name, v in m.read if m else ():
        on_host(name, v, ME)
    return m


def decode_prepared(call: Call, r: DecodeRequest, v: TensorView, metric: Asked | None, threads: int | None) -> None:
    """Do with a frame's values what the context says."""
    frame = r.frames[0]
    call.keep = call.keep, r, v
    if metric is not None:
        call.set_metric(metric)
    t = call.fill_tensor(v)
    try:
        if v.nbytes > _SMALL_TENSOR or (threads is not None and threads > 1):
            _decode_large(call, frame, pool.choose_threads(threads, v.nbytes))
            return
        status = lib.codec_decode(frame.data, frame.nbytes, t, call.context, call.small_scratch, _SCRATCH)
        if status:
            check(status, call.fault)
    except SpecError as e:
        if e.code == _BAD_ARGUMENT:
            r.check_apart(v, metric, in_place=True)
        raise


def _decode_large(call: Call, frame: TensorView, threads: int) -> None:
    info, source, nbytes = read_header(frame), frame.data, frame.nbytes
    if threads > 1 and info.nblocks > 1:
        _decode_threads(call, info, source, nbytes, threads)
        return
    check(lib.codec_scratch(ffi.addressof(info.spec), _tensor_like(info), call.size))
    size = call.size[0]
    check(lib.codec_decode(source, nbytes, call.tensor, call.context, call.scratch(size), size), call.fault)


def _tensor_like(info: Any) -> Any:
    """The frame's tensor, without data."""
    return structs.new_tensor(info.dtype, tuple(info.shape[0 : info.rank]))


def _decode_threads(call: Call, info: Any, source: Any, nbytes: int, threads: int) -> None:
    context = call.context
    flags = context.flags
    context.flags &= ~(lib.CODEC_VERIFY_FIRST | lib.CODEC_CHECK_ONLY)  # in steps, that is a pass of its own
    job, work_nbytes = open_job(call, context, info, source, nbytes)
    if flags & (lib.CODEC_VERIFY_FIRST | lib.CODEC_CHECK_ONLY):
        pass_over_blocks(call, None, info, source, nbytes, job, work_nbytes, threads)
        context.flags |= lib.CODEC_NO_CHECKSUM
    if not flags & lib.CODEC_CHECK_ONLY:
        pass_over_blocks(call, call.tensor, info, source, nbytes, job, work_nbytes, threads)
    context.flags = flags


def open_job(call: Call, context: Any, info: Any, source: Any, nbytes: int) -> tuple[Any, int]:
    """A job for decoding, and the bytes of one thread's buffer."""
    job_size, work_size = ffi.new("size_t *"), ffi.new("size_t *")
    check(lib.codec_job_nbytes(ffi.addressof(info.spec), _tensor_like(info), job_size, work_size))
    job = core.new_bytes(job_size[0])
    check(lib.codec_decode_open(source, nbytes, call.tensor, context, job, job_size[0], _NULL), call.fault)
    return job, work_size[0]


def pass_over_blocks(
    call: Call, t: Any, info: Any, source: Any, nbytes: int, job: Any, work_nbytes: int, threads: int
) -> None:
    """Decode all blocks of a job into t, or check them if t is None; the error is that of the lowest block."""
    cuts = pool.ranges(info.nblocks, threads)
    faults, seals = ffi.new("codec_fault[]", len(cuts)), ffi.new("uint64_t[]", len(cuts))
    contexts = structs.copy_contexts(call.context, faults, len(cuts))
    works = [core.new_bytes(work_nbytes) for _ in range(min(threads, len(cuts)))]

    def task(i: int, w: int) -> int:
        # `call` keeps alive what is pointed to
        rest = contexts + i, job, *cuts[i], seals + i, works[w], work_nbytes
        if t is None:
            return lib.codec_decode_check(source, nbytes, *rest)
        return lib.codec_decode_blocks(source, nbytes, call.tensor, *rest)

    for i, status in enumerate(pool.run(task, len(cuts), threads)):
        check(status, faults[i])
    if not call.context.flags & lib.CODEC_NO_CHECKSUM:
        check(lib.codec_decode_close(call.context, job, sum(seals) % (1 << 64)), call.fault)


def read_whole(frame: TensorView) -> Any:
    """The header of a frame, which must be all of the bytes."""
    info = read_header(on_host("a frame", frame, ME))
    if info.frame_nbytes != frame.nbytes:
        raise FrameError(f"the frame has {info.frame_nbytes} bytes, {frame.nbytes} were given", Status.TRUNCATED)
    return info


def accumulate(r: DecodeRequest, weight: float) -> None:
    """The request's `out` += weight * the frame's values."""
    frame = r.frames[0]
    info = read_whole(frame)
    m = _asked(info, r, frame) if r.metric is not None else None
    v = on_host("out=", view_output(r.out), ME)
    call = structs.take()
    context = call.context
    context.flags = _VERIFY_FIRST if r.check_first else 0
    context.into, context.weight = lib.CODEC_INTO_ADD, weight
    if r.codebooks:
        call.set_codebooks(r.codebooks)
    decode_prepared(call, r, v, m, r.threads)
    structs.give(call)
