"""Frames to tensors, and to sums of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from codec import core, pool
from codec.codebook import Codebook, set_codebooks
from codec.core import DTYPE_NAMES, DTYPES, check, ffi, lib, local
from codec.errors import FrameError, LimitError, SpecError, StateError
from codec.frame import check_engine
from codec.metrics import set_metric
from codec.view import TensorView, empty, view_bytes, view_output

_SCRATCH = core.SMALL_SCRATCH


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
        size, for the bits). The frame's checksum is verified before the first byte is written, so that a damaged frame
        leaves `out` as it was.
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
    source, nbytes, keep = view_bytes(frame)
    fault, info = local.fault, local.info
    check(lib.codec_inspect(source, nbytes, info), info.fault)
    name = DTYPE_NAMES[info.dtype]
    shape = tuple(info.shape[0 : info.rank])
    context = core.own_context(max_nbytes=max_nbytes)
    if info.frame_nbytes != nbytes or info.tensor_nbytes > max_nbytes:
        # refused before anything is allocated
        t = core.own_tensor(info.dtype, shape, ffi.NULL, 0)
        check(lib.codec_decode(source, nbytes, t, context, ffi.NULL, 0), fault)
    if out is None:
        result, v = empty(name, shape, like)
    else:
        result, v = out, view_output(out, name)
        context.flags = lib.CODEC_VERIFY_FIRST
    if codebooks:
        keep = (keep, set_codebooks(context, [codebooks] if isinstance(codebooks, Codebook) else codebooks))
    if metric is not None:
        keep = (keep, _set_metric_of(info, context, metric, state, source, nbytes))
    _decode_into(info, source, nbytes, v, context, threads)
    del keep
    return result


def _set_metric_of(info: Any, context: Any, metric: Any, state: Any, source: Any, nbytes: int) -> Any:
    """Set what a frame needs, but first see that it is the frame's fault if that does not fit."""
    try:
        return set_metric(context, metric, state, info.n)
    except (SpecError, StateError):
        check(lib.codec_verify(source, nbytes))
        raise


def _decode_into(info: Any, source: Any, nbytes: int, v: TensorView, context: Any, threads: int | None) -> None:
    t = core.own_tensor(DTYPES[v.dtype], v.shape, v.data, v.nbytes)
    if v.nbytes <= core.SMALL_TENSOR and threads in (None, 1):
        check(lib.codec_decode(source, nbytes, t, context, local.small_scratch(), _SCRATCH), context.fault)
        return
    count = pool.choose_threads(threads, v.nbytes)
    if count > 1 and info.nblocks > 1:
        _decode_threads(info, source, nbytes, t, context, count)
        return
    size = local.size
    like = t if info.dtype == t.dtype else _tensor_like(info)
    check(lib.codec_scratch(ffi.addressof(info.spec), like, size))
    scratch = local.get_scratch(size[0])
    check(lib.codec_decode(source, nbytes, t, context, scratch, size[0]), context.fault)


def _tensor_like(info: Any) -> Any:
    """The frame's tensor, without data."""
    t = ffi.new("codec_tensor *")
    t.struct_nbytes = ffi.sizeof("codec_tensor")
    t.dtype, t.rank, t.shape = info.dtype, info.rank, info.shape
    return t


def _decode_threads(info: Any, source: Any, nbytes: int, t: Any, context: Any, threads: int) -> None:
    verify = context.flags & lib.CODEC_VERIFY_FIRST
    context.flags &= ~lib.CODEC_VERIFY_FIRST  # in steps, that is a pass of its own
    job, work_nbytes = _open_job(info, source, nbytes, t, context)
    if verify:
        _pass_over_blocks(info.nblocks, source, nbytes, None, context, job, work_nbytes, threads)
        context.flags |= lib.CODEC_NO_CHECKSUM
    _pass_over_blocks(info.nblocks, source, nbytes, t, context, job, work_nbytes, threads)


def _open_job(info: Any, source: Any, nbytes: int, t: Any, context: Any) -> tuple[Any, int]:
    """A job for decoding, and the bytes of one thread's buffer."""
    job_size, work_size = ffi.new("size_t *"), ffi.new("size_t *")
    check(lib.codec_job_nbytes(ffi.addressof(info.spec), _tensor_like(info), job_size, work_size))
    job = core.new_bytes(job_size[0])
    check(lib.codec_decode_open(source, nbytes, t, context, job, job_size[0], ffi.NULL), context.fault)
    return job, work_size[0]


def _pass_over_blocks(
    nblocks: int, source: Any, nbytes: int, t: Any, context: Any, job: Any, work_nbytes: int, threads: int
) -> None:
    """Decode all blocks of a job into t, or check them if t is None; the error is that of the lowest block."""
    cuts = pool.ranges(nblocks, threads)

    def task(i: int) -> tuple[int, int, Any]:
        fault, seal = ffi.new("codec_fault *"), ffi.new("uint64_t *")
        own = core.copy_context(context, fault)
        work = core.new_bytes(work_nbytes)
        if t is None:
            status = lib.codec_decode_check(source, nbytes, own, job, *cuts[i], seal, work, work_nbytes)
        else:
            status = lib.codec_decode_blocks(source, nbytes, t, own, job, *cuts[i], seal, work, work_nbytes)
        return status, seal[0], fault

    results = pool.run(task, len(cuts), threads)
    for status, _, fault in results:
        check(status, fault)
    if not context.flags & lib.CODEC_NO_CHECKSUM:
        check(lib.codec_decode_close(context, job, sum(seal for _, seal, _ in results) % (1 << 64)), context.fault)


def _inspect_whole(frame: Any) -> tuple[Any, Any, int, object]:
    """The header of a frame, which must be all of `frame`; pointer, size, and what keeps it alive."""
    source, nbytes, keep = view_bytes(frame)
    info = ffi.new("codec_info *")
    info.struct_nbytes = ffi.sizeof("codec_info")
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
        Of the frame's shape, contiguous. Product and sum are rounded to float32. The frame's checksum is verified
        before the first value is changed.
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
        As in :func:`decode`; bytes that are not what was written leave `out` as it was.
    SpecError
        `out` does not fit the frame.
    """
    check_engine(engine)
    info, source, nbytes, keep = _inspect_whole(frame)
    v = view_output(out)
    context = core.own_context(lib.CODEC_VERIFY_FIRST, into=lib.CODEC_INTO_ADD, weight=weight)
    if codebooks:
        keep = (keep, set_codebooks(context, [codebooks] if isinstance(codebooks, Codebook) else codebooks))
    if metric is not None:
        keep = (keep, _set_metric_of(info, context, metric, state, source, nbytes))
    _decode_into(info, source, nbytes, v, context, threads)
    del keep
    return out


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
        Where to put the result. Checksums are then verified first.
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
    if op not in _OPS:
        raise SpecError(f"op must be one of {tuple(_OPS)}, got {op!r}")
    if not frames:
        raise SpecError("there are no frames to reduce")
    read = [_inspect_whole(f) for f in frames]
    first = read[0][0]
    shape = tuple(first.shape[0 : first.rank])
    for info, *_ in read:
        if tuple(info.shape[0 : info.rank]) != shape:
            for _, source, nbytes, _ in read:  # or one is damaged
                check(lib.codec_verify(source, nbytes))
            raise SpecError(f"frames of shapes {shape} and {tuple(info.shape[0 : info.rank])} cannot be reduced")
    if 4 * first.n > max_nbytes:
        raise LimitError(f"the result has {4 * first.n} bytes, more than max_nbytes", lib.CODEC_LIMIT)
    context = core.own_context()
    if out is None:
        result, v = empty("float32", shape, like)
    else:
        result, v = out, view_output(out)
        context.flags = lib.CODEC_VERIFY_FIRST
    keep: Any = (
        set_codebooks(context, [codebooks] if isinstance(codebooks, Codebook) else codebooks) if codebooks else 0
    )
    if metric is not None:
        keep = (keep, set_metric(context, metric, state, first.n))
    t = core.own_tensor(DTYPES[v.dtype], v.shape, v.data, v.nbytes)
    pointers = ffi.new("void *[]", [source for _, source, _, _ in read])
    sizes = ffi.new("size_t[]", [nbytes for _, _, nbytes, _ in read])
    count = pool.choose_threads(threads, v.nbytes * len(read))
    if count > 1 and all(info.nblocks == first.nblocks > 1 for info, *_ in read):
        done = _reduce_threads(read, pointers, sizes, _OPS[op], t, context, count)
        if done:
            return result
    size = ffi.new("size_t *")
    check(lib.codec_reduce_scratch(pointers, sizes, len(read), size))
    scratch = core.new_bytes(size[0])
    check(lib.codec_reduce(pointers, sizes, len(read), _OPS[op], t, context, scratch, size[0]), context.fault)
    del keep
    return result


def _reduce_threads(
    read: list[tuple[Any, Any, int, object]], pointers: Any, sizes: Any, op: int, t: Any, context: Any, threads: int
) -> bool:
    """False: the frames' blocks do not match, so that this must be done frame by frame."""
    verify = context.flags & lib.CODEC_VERIFY_FIRST
    context.flags &= ~lib.CODEC_VERIFY_FIRST
    own = core.copy_context(context, context.fault)
    own.into = lib.CODEC_INTO_FLOAT32
    opened = [_open_job(info, source, nbytes, t, own) for info, source, nbytes, _ in read]
    jobs, most = [job for job, _ in opened], max(work_nbytes for _, work_nbytes in opened)

    def check_all() -> None:
        for (info, source, nbytes, _), (job, work_nbytes) in zip(read, opened, strict=True):
            _pass_over_blocks(info.nblocks, source, nbytes, None, context, job, work_nbytes, threads)

    if verify:
        check_all()
        context.flags |= lib.CODEC_NO_CHECKSUM
    cuts = pool.ranges(read[0][0].nblocks, threads)
    handles = ffi.new("void *[]", jobs)

    def task(i: int) -> tuple[int, list[int], Any]:
        fault, seals = ffi.new("codec_fault *"), ffi.new("uint64_t[]", len(read))
        own = core.copy_context(context, fault)
        work = core.new_bytes(most)
        status = lib.codec_reduce_blocks(pointers, sizes, len(read), op, t, own, handles, *cuts[i], seals, work, most)
        return status, list(seals), fault

    results = pool.run(task, len(cuts), threads)
    if any(status == lib.CODEC_BAD_ARGUMENT for status, _, _ in results):
        context.flags = verify
        return False
    if any(status for status, _, _ in results):
        check_all()  # of several faults, the first frame's are reported
    for status, _, fault in results:
        check(status, fault)
    for i, job in enumerate(jobs):
        if not context.flags & lib.CODEC_NO_CHECKSUM:
            seal = sum(seals[i] for _, seals, _ in results) % (1 << 64)
            check(lib.codec_decode_close(context, job, seal), context.fault)
    return True
