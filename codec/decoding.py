"""Frames to tensors, and to sums of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from codec import core, pool
from codec.codebook import Codebook, codebook_structs, set_codebooks
from codec.core import DTYPE_NAMES, DTYPES, Call, check, ffi, lib
from codec.errors import CodecError, FrameError, LimitError, SpecError, StateError
from codec.frame import check_engine
from codec.metrics import MetricStructs, metric_structs, set_metric
from codec.specs import float32, shown, whole
from codec.view import TensorView, check_apart, empty, mark_written, view_bytes, view_output

_SCRATCH = core.SMALL_SCRATCH
# A frame that holds many times its own size is checked before its tensor is touched: that costs little there, and one
# that turns out bad at its end must not have filled the memory first.
_BOMB, _SMALL = 4, 1 << 20


def decode(
    frame: Any,
    *,
    out: Any = None,
    like: Any = None,
    engine: str | None = None,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int = 1 << 30,
    threads: int | None = None,
    metric: Any = None,
    state: Mapping[str, Any] | None = None,
) -> Any:
    """Decode a frame.

    Parameters
    ----------
    frame : bytes or buffer
        A frame, whole, with nothing behind it.
    out : array or tensor, optional
        Where to put the values: contiguous, writable, of the frame's shape and dtype (or unsigned integers of the same
        size, for the bits), apart from the frame. All of the frame is checked before the first byte is written, so that
        after any error `out` is as it was.
    like : array or tensor, optional
        Return a tensor of this one's kind; a torch tensor, for example.
    engine : str, optional
        One of :func:`engines`.
    codebooks : Codebook or sequence of Codebook, optional
        Those that the frame may name.
    max_nbytes : int
        Largest tensor to accept, in bytes. Nothing is allocated for a frame that declares more.
    threads : int, optional
        As in :func:`encode`.
    metric, state : optional
        What the sender had, for frames of :class:`codec.Truncate` with shared levels.

    Returns
    -------
    numpy.ndarray, or the kind of `like` or `out`
        The tensor. bfloat16 and float8 need ml_dtypes, or `out` or `like`.

    Raises
    ------
    FrameError
        The bytes are not a frame, are damaged (`ChecksumError`), need a later version (`UnsupportedError`) or declare
        too large a tensor (`LimitError`).
    StateError
        The frame names a codebook that is not among `codebooks`, or needs a metric and state that are missing or not
        the sender's.
    SpecError
        `out` does not fit the frame.
    """
    check_engine(engine)
    threads = None if threads is None else pool.check_threads(threads)
    most = max_nbytes if type(max_nbytes) is int and 0 <= max_nbytes < 1 << 64 else _check_limit(max_nbytes)
    source, nbytes, keep = view_bytes(frame)
    call = core.take()
    info = call.info
    check(lib.codec_inspect(source, nbytes, info), info.fault)
    name = DTYPE_NAMES[info.dtype]
    shape = tuple(info.shape[0 : info.rank])
    if info.frame_nbytes != nbytes or info.tensor_nbytes > most:
        # refused before anything is allocated
        if most or not info.tensor_nbytes:  # to C, 0 is no limit
            call.context.max_nbytes = most
            t = call.fill_tensor(info.dtype, shape, ffi.NULL, 0)
            check(lib.codec_decode(source, nbytes, t, call.context, ffi.NULL, 0), call.fault)
        raise LimitError(f"the tensor has {info.tensor_nbytes} bytes, more than max_nbytes", lib.CODEC_LIMIT)
    books = codebook_structs(codebooks) if codebooks is not None else None
    m = _metric_of(info, metric, state, source, nbytes) if metric is not None else None
    if out is None:
        result, v = empty(name, shape, like)
        verify = v.nbytes > _BOMB * nbytes + _SMALL
    else:
        result, v = out, _view_out(out, name, [(source, nbytes, keep)], m)
        verify = True
    call.context.flags = lib.CODEC_VERIFY_FIRST if verify else 0
    call.keep = keep, v, books, m
    if books is not None:
        set_codebooks(call.context, books)
    if m is not None:
        set_metric(call.context, m)
    try:
        _decode_into(call, info, source, nbytes, v, threads)
    finally:
        if out is not None:
            mark_written(out)
    core.give(call)
    return result


def _check_limit(max_nbytes: Any) -> int:
    return whole("max_nbytes", max_nbytes, 0, (1 << 64) - 1)


def _metric_of(info: Any, metric: Any, state: Any, source: Any, nbytes: int) -> MetricStructs | None:
    """What a frame needs; but if that does not fit, see first that it is not the frame's fault."""
    try:
        return metric_structs(metric, state, info.n)
    except (SpecError, StateError):
        check(lib.codec_verify(source, nbytes))
        raise


def _view_out(
    out: Any, dtype: str | None, frames: list[Any], m: MetricStructs | None, in_place: bool = True
) -> TensorView:
    v = view_output(out, dtype)
    others: list[tuple[str, TensorView, bool]] = []
    for source, nbytes, keep in frames:
        if type(keep) is not bytes:  # which cannot be written to
            others.append(("a frame", TensorView("uint8", (nbytes,), source, nbytes, keep), False))
    if m is not None:
        others += [(name, s, in_place) for name, s in m.views.items()]
    if others:
        check_apart("out=", v, others)
    return v


def _decode_into(call: Call, info: Any, source: Any, nbytes: int, v: TensorView, threads: int | None) -> None:
    t, context = call.fill_tensor(DTYPES[v.dtype], v.shape, v.data, v.nbytes), call.context
    if v.nbytes <= core.SMALL_TENSOR and (threads or 1) == 1:
        check(lib.codec_decode(source, nbytes, t, context, call.small_scratch(), _SCRATCH), call.fault)
        return
    count = pool.choose_threads(threads, v.nbytes)
    if count > 1 and info.nblocks > 1:
        _decode_threads(call, info, source, nbytes, count)
        return
    like = t if info.dtype == t.dtype else _tensor_like(info)
    check(lib.codec_scratch(ffi.addressof(info.spec), like, call.size))
    size = call.size[0]
    check(lib.codec_decode(source, nbytes, t, context, call.scratch(size), size), call.fault)


def _tensor_like(info: Any) -> Any:
    """The frame's tensor, without data."""
    return core.new_tensor(info.dtype, tuple(info.shape[0 : info.rank]))


def _decode_threads(call: Call, info: Any, source: Any, nbytes: int, threads: int) -> None:
    context = call.context
    verify = context.flags & lib.CODEC_VERIFY_FIRST
    context.flags &= ~lib.CODEC_VERIFY_FIRST  # in steps, that is a pass of its own
    job, work_nbytes = _open_job(call, context, info, source, nbytes)
    if verify:
        _pass_over_blocks(call, None, info, source, nbytes, job, work_nbytes, threads)
        context.flags |= lib.CODEC_NO_CHECKSUM
    _pass_over_blocks(call, call.tensor, info, source, nbytes, job, work_nbytes, threads)


def _open_job(call: Call, context: Any, info: Any, source: Any, nbytes: int) -> tuple[Any, int]:
    """A job for decoding, and the bytes of one thread's buffer."""
    job_size, work_size = ffi.new("size_t *"), ffi.new("size_t *")
    check(lib.codec_job_nbytes(ffi.addressof(info.spec), _tensor_like(info), job_size, work_size))
    job = core.new_bytes(job_size[0])
    check(lib.codec_decode_open(source, nbytes, call.tensor, context, job, job_size[0], ffi.NULL), call.fault)
    return job, work_size[0]


def _pass_over_blocks(
    call: Call, t: Any, info: Any, source: Any, nbytes: int, job: Any, work_nbytes: int, threads: int
) -> None:
    """Decode all blocks of a job into t, or check them if t is None; the error is that of the lowest block."""
    cuts = pool.ranges(info.nblocks, threads)
    faults, seals = ffi.new("codec_fault[]", len(cuts)), ffi.new("uint64_t[]", len(cuts))
    contexts = core.copy_contexts(call.context, faults, len(cuts))
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


def _inspect_whole(frame: Any) -> tuple[Any, Any, int, object]:
    """The header of a frame, which must be all of `frame`; pointer, size, and what keeps it alive."""
    source, nbytes, keep = view_bytes(frame)
    info = core.new_info()
    check(lib.codec_inspect(source, nbytes, info), info.fault)
    if info.frame_nbytes != nbytes:
        raise FrameError(f"the frame has {info.frame_nbytes} bytes, {nbytes} were given", lib.CODEC_TRUNCATED)
    return info, source, nbytes, keep


def accumulate(
    frame: Any,
    out: Any,
    weight: float = 1.0,
    *,
    engine: str | None = None,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    threads: int | None = None,
    metric: Any = None,
    state: Mapping[str, Any] | None = None,
) -> Any:
    """Add a frame's values to a tensor: ``out += weight * decode(frame)``, without the tensor in between.

    Parameters
    ----------
    frame : bytes or buffer
        A frame of float32, bfloat16 or float16 values, whole.
    out : float32 array or tensor
        Of the frame's shape, contiguous. Product and sum are rounded to float32. All of the frame is checked before the
        first value is changed, so that after any error `out` is as it was.
    weight : float
        As float32.
    engine, codebooks, threads, metric, state
        As in :func:`decode`.

    Returns
    -------
    array or tensor
        `out`.

    Raises
    ------
    FrameError, StateError
        As in :func:`decode`.
    SpecError
        `out` does not fit the frame.
    """
    check_engine(engine)
    threads = None if threads is None else pool.check_threads(threads)
    factor = _weight_of(weight)
    info, source, nbytes, keep = _inspect_whole(frame)
    books = codebook_structs(codebooks) if codebooks is not None else None
    m = _metric_of(info, metric, state, source, nbytes) if metric is not None else None
    v = _view_out(out, None, [(source, nbytes, keep)], m)
    call = core.take()
    context = call.context
    context.flags, context.into, context.weight = lib.CODEC_VERIFY_FIRST, lib.CODEC_INTO_ADD, factor
    call.keep = keep, v, books, m
    if books is not None:
        set_codebooks(context, books)
    if m is not None:
        set_metric(context, m)
    try:
        _decode_into(call, info, source, nbytes, v, threads)
    finally:
        mark_written(out)
    core.give(call)
    return out


def _weight_of(weight: Any) -> float:
    try:
        number = None if isinstance(weight, str | bytes) else float(weight)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or (math.isfinite(number) and not math.isfinite(float32(number) or 0)):
        raise SpecError(f"weight must be a number that float32 can hold, got {shown(weight)}")
    return number


_OPS = {"sum": lib.CODEC_REDUCE_SUM, "mean": lib.CODEC_REDUCE_MEAN, "max": lib.CODEC_REDUCE_MAX}
_OPS["decode_average"] = _OPS["mean"]


def reduce(
    frames: Sequence[Any],
    op: str = "mean",
    *,
    out: Any = None,
    like: Any = None,
    engine: str | None = None,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int = 1 << 30,
    threads: int | None = None,
    metric: Any = None,
    state: Mapping[str, Any] | None = None,
) -> Any:
    """Decode frames of one shape to their sum, mean or maximum, in float32.

    Frames are added in the order given, each addition rounded to float32, so that ranks with the same list get the same
    bits. Codes of ternary frames with one scale are added as integers and scaled once. Frames of one codec are
    decoded block by block, so that the result is written to memory once.

    Parameters
    ----------
    frames : sequence of bytes or buffers
        One or more frames of float32, bfloat16 or float16 values.
    op : {"mean", "decode_average", "sum", "max"}
        The mean is the sum divided by the number of frames; "decode_average" is another name for it.
    out : float32 array or tensor, optional
        Where to put the result. All frames are checked first, so that after any error it is as it was.
    like, engine, codebooks, max_nbytes, threads, metric, state
        As in :func:`decode`; `max_nbytes` is that of the result.

    Returns
    -------
    numpy.ndarray of float32, or the kind of `like` or `out`

    Raises
    ------
    FrameError, StateError
        As in :func:`decode`, for any of the frames.
    SpecError
        No frames, shapes that differ, or an `out` that does not fit them.
    """
    check_engine(engine)
    threads = None if threads is None else pool.check_threads(threads)
    most = _check_limit(max_nbytes)
    if not isinstance(op, str) or op not in _OPS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(f"op must be one of {tuple(_OPS)}, got {op!r}")
    read = [_inspect_whole(f) for f in frames]
    if not read:
        raise SpecError("there are no frames to reduce")
    first = read[0][0]
    shape = tuple(first.shape[0 : first.rank])
    for info, *_ in read:
        if tuple(info.shape[0 : info.rank]) != shape:
            for _, source, nbytes, _ in read:  # or one is damaged
                check(lib.codec_verify(source, nbytes))
            raise SpecError(f"frames of shapes {shape} and {tuple(info.shape[0 : info.rank])} cannot be reduced")
    if 4 * first.n > most:
        raise LimitError(f"the result has {4 * first.n} bytes, more than max_nbytes", lib.CODEC_LIMIT)
    books = codebook_structs(codebooks) if codebooks is not None else None
    m = metric_structs(metric, state, first.n) if metric is not None else None
    if out is None:
        result, v = empty("float32", shape, like)
    else:
        result, v = out, _view_out(out, None, [frame[1:] for frame in read], m, in_place=len(read) == 1)
    call = core.take()
    call.context.flags = lib.CODEC_VERIFY_FIRST if out is not None else 0
    call.keep = read, v, books, m
    if books is not None:
        set_codebooks(call.context, books)
    if m is not None:
        set_metric(call.context, m)
    call.fill_tensor(DTYPES[v.dtype], v.shape, v.data, v.nbytes)
    try:
        _reduce_into(call, read, _OPS[op], pool.choose_threads(threads, v.nbytes * len(read)))
    finally:
        mark_written(out)
    core.give(call)
    return result


def _reduce_into(call: Call, read: list[tuple[Any, Any, int, object]], op: int, threads: int) -> None:
    pointers = ffi.new("void *[]", [source for _, source, _, _ in read])
    sizes = ffi.new("size_t[]", [nbytes for _, _, nbytes, _ in read])
    nblocks = read[0][0].nblocks
    if threads > 1 and all(info.nblocks == nblocks > 1 for info, *_ in read):
        done = _reduce_threads(call, read, pointers, sizes, op, threads)
        if done:
            return
    check(lib.codec_reduce_scratch(pointers, sizes, len(read), call.size))
    size = call.size[0]
    scratch = call.scratch(size)
    check(lib.codec_reduce(pointers, sizes, len(read), op, call.tensor, call.context, scratch, size), call.fault)


def _reduce_threads(
    call: Call, read: list[tuple[Any, Any, int, object]], pointers: Any, sizes: Any, op: int, threads: int
) -> bool:
    """False: the frames' blocks do not match, so that this must be done frame by frame."""
    context = call.context
    verify = context.flags & lib.CODEC_VERIFY_FIRST
    context.flags &= ~lib.CODEC_VERIFY_FIRST  # in steps, that is a pass of its own
    own = core.copy_contexts(context, call.fault, 1)
    own[0].into = lib.CODEC_INTO_FLOAT32
    opened: list[tuple[Any, int]] = []

    def check_all() -> None:
        for (info, source, nbytes, _), (job, work_nbytes) in zip(read, opened, strict=False):
            _pass_over_blocks(call, None, info, source, nbytes, job, work_nbytes, threads)

    try:
        for info, source, nbytes, _ in read:
            opened.append(_open_job(call, own, info, source, nbytes))
    except CodecError:
        check_all()  # of several faults, the first frame's is reported
        raise
    jobs, size = [job for job, _ in opened], max(work_nbytes for _, work_nbytes in opened)
    if verify:
        check_all()
        context.flags |= lib.CODEC_NO_CHECKSUM
    cuts = pool.ranges(read[0][0].nblocks, threads)
    handles = ffi.new("void *[]", jobs)
    faults, seals = ffi.new("codec_fault[]", len(cuts)), ffi.new("uint64_t[]", len(cuts) * len(read))
    contexts = core.copy_contexts(call.context, faults, len(cuts))
    works = [core.new_bytes(size) for _ in range(min(threads, len(cuts)))]

    def task(i: int, w: int) -> int:
        # `call` and `jobs` keep alive what is pointed to
        seal = seals + i * len(jobs)
        return lib.codec_reduce_blocks(
            pointers, sizes, len(jobs), op, call.tensor, contexts + i, handles, *cuts[i], seal, works[w], size
        )

    done = pool.run(task, len(cuts), threads)
    if lib.CODEC_BAD_ARGUMENT in done:
        context.flags = verify
        return False
    if any(done):
        check_all()
    for i, status in enumerate(done):
        check(status, faults[i])
    for j, job in enumerate(jobs):
        if not context.flags & lib.CODEC_NO_CHECKSUM:
            seal = sum(seals[k] for k in range(j, len(seals), len(jobs)))
            check(lib.codec_decode_close(context, job, seal % (1 << 64)), call.fault)
    return True
