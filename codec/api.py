"""encode, decode and what goes with them."""

import ctypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from codec import core, pool
from codec.codebook import Codebook, set_codebooks, set_segments
from codec.core import DTYPE_NAMES, DTYPES, ITEMSIZE, check, ffi, lib, local
from codec.errors import EngineError, FrameError, LimitError, SpecError, StateError
from codec.specs import Lossless, Spec, Truncate
from codec.view import TensorView, empty, view, view_bytes, view_output

_DEFAULT = Lossless()
_SMALL = 1 << 16  # bytes of tensors whose frames are built in a thread's own buffer and copied
_ROOM, _SCRATCH = core.SMALL_FRAME, core.SMALL_SCRATCH
_BLOCK = 1 << 14
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Info:
    """What a frame's header says.

    Attributes
    ----------
    spec : Spec
        What was asked for.
    dtype : str
        Name of the dtype, such as ``"bfloat16"``.
    shape : tuple of int
        Shape of the tensor.
    nbytes, tensor_nbytes : int
        Bytes of the frame and of the tensor.
    sections : dict of str to (int, int)
        Offset and size in bytes of header, side (codebooks and scale model), directory, planes (raw in every block)
        and regions. A stored frame has its values in ``regions``.
    version : int
        Of the format.
    n : int
        Number of values.
    stored : bool
        The values follow the header as they are.
    block, nblocks : int
        Values a block (0 where blocks follow rows) and number of blocks; 0 if stored.
    checksum : int
        64 bits.
    codebook_id : int or None
        Id of the codebook that decoding needs.
    nsegments : int
        Segments that have records in the frame, 0 if there are none.
    """

    spec: Spec
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tensor_nbytes: int
    sections: dict[str, tuple[int, int]]
    version: int
    n: int
    stored: bool
    block: int
    nblocks: int
    checksum: int
    codebook_id: int | None
    nsegments: int

    @property
    def ratio(self) -> float:
        """Bytes of the frame over bytes of the tensor."""
        return self.nbytes / max(1, self.tensor_nbytes)


def engines() -> tuple[str, ...]:
    """Engines that can be used here."""
    return ("native",)


def _check_engine(engine: str | None) -> None:
    if engine is not None and engine not in engines():
        raise EngineError(f"no engine {engine!r}; these can be used here: {', '.join(engines())}")


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Touching new memory 4 KiB at a time can take longer than encoding; numpy asks the same for its arrays."""
    page = 1 << 21
    begin, end = -(-address // page) * page, (address + nbytes) // page * page
    if _madvise is not None and end - begin >= page:
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 14)  # MADV_HUGEPAGE; a refusal does no harm


class _NewBytes:
    """A bytes object that is filled in before anyone sees it, then cut to size: no second copy of a frame."""

    _api = ctypes.pythonapi
    _new = _api.PyBytes_FromStringAndSize
    _new.restype = ctypes.c_void_p
    _new.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
    _resize = _api._PyBytes_Resize
    _resize.restype = ctypes.c_int
    _resize.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_ssize_t)
    _decref = _api.Py_DecRef
    _decref.argtypes = (ctypes.c_void_p,)
    _header = bytes.__basicsize__ - 1

    def __init__(self, nbytes: int) -> None:
        self._object = ctypes.c_void_p(self._new(None, nbytes))
        if not self._object.value:
            raise MemoryError(f"cannot allocate {nbytes} bytes")
        self.address = self._object.value + self._header
        _ask_for_huge_pages(self.address, nbytes)

    def finish(self, nbytes: int) -> bytes:
        if self._resize(ctypes.byref(self._object), nbytes) != 0:
            raise MemoryError(f"cannot resize to {nbytes} bytes")
        return ctypes.cast(self._object, ctypes.py_object).value

    def __del__(self) -> None:
        if self._object.value:
            self._decref(self._object)


def bound(shape: int | Iterable[int], dtype: Any, spec: Spec = _DEFAULT) -> int:
    """Size in bytes that no frame of such a tensor exceeds.

    Parameters
    ----------
    shape : int or iterable of int
        Shape of the tensor.
    dtype : str or dtype
        Its dtype, by name or as numpy, ml_dtypes or torch have it.
    spec : Spec
        What will be asked for.

    Raises
    ------
    SpecError
        The tensor cannot be encoded with this spec.
    """
    name = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SpecError(f"dtype {dtype} cannot be encoded; these can: {', '.join(DTYPES)}")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if len(sizes) > 8 or any(s < 0 for s in sizes):
        raise SpecError(f"not a shape that can be encoded: {sizes}")
    t = core.own_tensor(DTYPES[name], sizes, ffi.NULL, 0)
    size = ffi.new("size_t *")
    check(lib.codec_bound(core.spec_struct(spec), t, size))
    return size[0]


def encode(
    x: Any,
    spec: Spec = _DEFAULT,
    *,
    engine: str | None = None,
    out: Any = None,
    threads: int | None = None,
    residual: Any = None,
    codebook: Codebook | None = None,
    segments: Sequence[tuple[int, tuple[int, ...]]] | None = None,
    stream: int = 0,
    metric: Any = None,
    state: Mapping[str, Any] | None = None,
    dtype: str | None = None,
) -> bytes | memoryview:
    """Encode a tensor as a frame.

    The frame depends on the tensor, the spec, the codebook, the segments and the stream, and on nothing else: not on
    the CPU, the instruction set, the number of threads or the address.

    Parameters
    ----------
    x : array, tensor or buffer
        Anything with a buffer, ``__array_interface__`` or DLPack, in host memory: numpy and ml_dtypes arrays, torch
        CPU tensors. float32, float64, bfloat16, float16, float8, bool or integers of 1 to 8 bytes; rank 0 to 8. It is
        not changed, and copied only if it is not contiguous or not in native byte order.
    spec : Spec
        What to do; lossless if left out.
    engine : str, optional
        One of :func:`engines`.
    out : writable buffer, optional
        Where to put the frame. :func:`bound` bytes are always enough.
    threads : int, optional
        How many threads to use. Left out: as many as pay, up to ``CODEC_NUM_THREADS``, ``OMP_NUM_THREADS`` or the
        number of CPUs.
    codebook : Codebook, optional
        Use this one, which the receiver holds too, for the exponents, instead of one made for this tensor. Dtypes
        without exponents, and tensors of fewer than 512 values, do not need one and ignore it.
    residual : float32 array or tensor, optional
        Gets x less what a decoder will see; it may be x itself. Not written if the tensor cannot be encoded.
    segments : sequence of (int, tuple of int), optional
        Offsets and shapes of the parameters inside a flat bucket, ascending; in values. What they leave out is flat.
        Scales and rows of lossy codecs follow them, too, if they have at least 4,096 values.
    stream : int
        Random draws of different streams are independent: make it from rank, step and tensor. 64 bits.
    metric : Metric, Custom, list of (int, Metric or Custom) or array of uint8, optional
        What :class:`codec.Truncate` goes by (:mod:`codec.metrics`); parameter groups with the offsets where they begin;
        or the level of each value.
    state : mapping, optional
        The metric's arrays, ``theta``, ``m`` and ``v``, of as many values as x.
    dtype : str, optional
        Take the bits of x as values of this dtype, such as ``"bfloat16"`` for an array of uint16.

    Returns
    -------
    bytes, or memoryview of `out`
        The frame.

    Raises
    ------
    SpecError
        x, spec, segments, residual or `out` cannot be used as asked; x holds NaN or Inf, which lossy codecs refuse; a
        scale was given that is smaller than a value.
    EngineError
        x lies on a device, or asks for an engine, that is not available.
    """
    _check_engine(engine)
    v = view(x, dtype)
    s = core.spec_struct(spec)
    t = core.own_tensor(DTYPES[v.dtype], v.shape, v.data, v.nbytes)
    if not 0 <= stream < 1 << 64:
        raise SpecError(f"stream must have 64 bits, got {stream}")
    context = core.own_context(stream=stream)
    keep: Any = set_codebooks(context, [codebook]) if codebook else None
    if segments:
        keep = (keep, set_segments(context, segments))
    if isinstance(spec, Truncate):
        keep = (keep, _set_metric(context, spec, metric, state, v.nbytes // ITEMSIZE[v.dtype]))
    elif metric is not None or state is not None:
        raise SpecError(f"metric= and state= are for Truncate, not for {type(spec).__name__}")
    if residual is not None:
        r = _view_residual(residual, v)
        context.residual = ffi.cast("float *", r.data)
    written = local.written
    check(lib.codec_bound(s, t, written))
    limit: int = written[0]
    if out is None and v.nbytes <= _SMALL and limit <= _ROOM and threads in (None, 1):
        buffer = local.frame
        check(lib.codec_encode(s, t, buffer, _ROOM, written, ffi.NULL, context, local.small_scratch(), _SCRATCH))
        return bytes(ffi.buffer(buffer, written[0]))
    count = pool.choose_threads(threads, v.nbytes)
    if out is None:
        room = limit + _slack(v) if count > 1 else limit
        new = _NewBytes(room)
        return new.finish(_encode_at(s, t, ffi.cast("uint8_t *", new.address), room, context, count))
    o = view_output(out)
    if o.dtype not in ("uint8", "int8"):
        raise SpecError(f"out= must hold bytes, not {o.dtype}")
    n = _encode_at(s, t, o.data, o.nbytes, context, count)
    del keep
    array = o.owner.numpy() if not hasattr(o.owner, "__array_interface__") else o.owner  # type: ignore[attr-defined]
    return memoryview(array).cast("B")[:n]  # type: ignore[arg-type]


def _set_metric(context: Any, spec: Truncate | None, metric: Any, state: Mapping[str, Any] | None, n: int) -> Any:
    """Import what few need only now."""
    if metric is None and state is None:
        if spec and spec.fixed_level is None:
            raise SpecError(f"{spec} needs metric= and state=, or a level for all values")
        return None
    from codec.metrics import set_metric

    return set_metric(context, metric, state, n)


def _view_residual(residual: Any, v: TensorView) -> TensorView:
    r = view_output(residual)
    if r.dtype != "float32" or r.nbytes // 4 != v.nbytes // ITEMSIZE[v.dtype]:
        raise SpecError(f"residual= must be float32 with as many values as x, not {r.dtype} of shape {r.shape}")
    return r


def _slack(v: TensorView) -> int:
    """What regions take more than their values, at worst, while threads leave gaps between them."""
    n = v.nbytes // ITEMSIZE[v.dtype]
    return (n // _BLOCK + 1) * 1024 + 2 * n + 65536 if v.dtype == "float64" else n // 64 + 65536


def _encode_one(spec: Any, t: Any, dst: Any, capacity: int, context: Any) -> None:
    size = local.size
    check(lib.codec_scratch(spec, t, size))
    scratch = local.get_scratch(size[0])
    status = lib.codec_encode(spec, t, dst, capacity, local.written, ffi.NULL, context, scratch, size[0])
    if status == lib.CODEC_SHORT_OUTPUT:
        raise SpecError(f"out= has {capacity} bytes, which is too few; bound() says how many are enough")
    check(status, local.fault)


def _encode_at(spec: Any, t: Any, dst: Any, capacity: int, context: Any, threads: int) -> int:
    if threads > 1:
        n = _encode_threads(spec, t, dst, capacity, context, threads)
        if n is not None:
            return n
    _encode_one(spec, t, dst, capacity, context)
    return local.written[0]


def _encode_threads(spec: Any, t: Any, dst: Any, capacity: int, context: Any, threads: int) -> int | None:
    """None: it must be done by one thread, which needs less room."""
    job_size, work_size = ffi.new("size_t *"), ffi.new("size_t *")
    check(lib.codec_job_nbytes(spec, t, job_size, work_size))
    job, plan = core.new_bytes(job_size[0]), ffi.new("codec_plan *")
    status = lib.codec_encode_open(spec, t, dst, capacity, context, job, job_size[0], plan)
    if status == lib.CODEC_SHORT_OUTPUT:
        return None
    check(status)
    if plan.nscans:
        cuts = pool.ranges(plan.nscans, threads)
        for status in pool.run(lambda i: lib.codec_encode_scan(t, context, job, *cuts[i]), len(cuts), threads):
            check(status)
        status = lib.codec_encode_start(t, dst, capacity, context, job, plan)
        if status == lib.CODEC_SHORT_OUTPUT:
            return None
        check(status)
    if plan.nblocks < 2 or plan.regions_at + plan.nblocks * plan.region_bound > capacity:
        return None
    cuts = pool.ranges(plan.nblocks, threads)
    places = [plan.regions_at + first * plan.region_bound for first, _ in cuts]

    def task(i: int) -> tuple[int, int]:
        end, seal = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        first, count = cuts[i]
        work = core.new_bytes(work_size[0])
        status = lib.codec_encode_blocks(
            t, dst, capacity, context, job, first, count, places[i], end, seal, work, work_size[0]
        )
        return status, seal[0]

    results = pool.run(task, len(cuts), threads)
    for status, _ in results:
        if status in (lib.CODEC_SHORT_OUTPUT, lib.CODEC_LIMIT):
            return None
        check(status)
    seal = sum(seal for _, seal in results) % (1 << 64)
    counts = [count for _, count in cuts]
    check(lib.codec_encode_close(t, dst, capacity, context, job, counts, places, len(cuts), seal, local.written))
    return local.written[0]


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
    _check_engine(engine)
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
        return _set_metric(context, None, metric, state, info.n)
    except (SpecError, StateError):
        check(lib.codec_verify(source, nbytes))
        raise


def _decode_into(info: Any, source: Any, nbytes: int, v: TensorView, context: Any, threads: int | None) -> None:
    t = core.own_tensor(DTYPES[v.dtype], v.shape, v.data, v.nbytes)
    if v.nbytes <= _SMALL and threads in (None, 1):
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
    job_size, work_size = ffi.new("size_t *"), ffi.new("size_t *")
    check(lib.codec_job_nbytes(ffi.addressof(info.spec), _tensor_like(info), job_size, work_size))
    job, plan = core.new_bytes(job_size[0]), ffi.new("codec_plan *")
    check(lib.codec_decode_open(source, nbytes, t, context, job, job_size[0], plan), context.fault)
    cuts = pool.ranges(plan.nblocks, threads)

    def task(i: int) -> tuple[int, int, Any]:
        fault, seal = ffi.new("codec_fault *"), ffi.new("uint64_t *")
        own = core.copy_context(context, fault)
        first, count = cuts[i]
        work = core.new_bytes(work_size[0])
        status = lib.codec_decode_blocks(source, nbytes, t, own, job, first, count, seal, work, work_size[0])
        return status, seal[0], fault

    results = pool.run(task, len(cuts), threads)
    for status, _, fault in results:
        if status == lib.CODEC_OTHER_STATE:  # or a damaged frame
            check(lib.codec_verify(source, nbytes))
        check(status, fault)
    seal = sum(seal for _, seal, _ in results) % (1 << 64)
    check(lib.codec_decode_close(context, job, seal), context.fault)


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
    _check_engine(engine)
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
    _check_engine(engine)
    if op not in _OPS:
        raise SpecError(f"op must be one of {tuple(_OPS)}, got {op!r}")
    if not frames:
        raise SpecError("there are no frames to reduce")
    read = [_inspect_whole(f) for f in frames]
    first = read[0][0]
    shape = tuple(first.shape[0 : first.rank])
    for info, *_ in read:
        if tuple(info.shape[0 : info.rank]) != shape:
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
        keep = (keep, _set_metric(context, None, metric, state, first.n))
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
    jobs: list[Any] = []
    most = 0
    for info, source, nbytes, _ in read:
        job_size, work_size, plan = ffi.new("size_t *"), ffi.new("size_t *"), ffi.new("codec_plan *")
        check(lib.codec_job_nbytes(ffi.addressof(info.spec), _tensor_like(info), job_size, work_size))
        jobs.append(core.new_bytes(job_size[0]))
        own = core.copy_context(context, context.fault)
        own.into = lib.CODEC_INTO_FLOAT32
        check(lib.codec_decode_open(source, nbytes, t, own, jobs[-1], job_size[0], plan), context.fault)
        most = max(most, work_size[0])
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
        return False
    for status, _, fault in results:
        check(status, fault)
    for i, job in enumerate(jobs):
        seal = sum(seals[i] for _, seals, _ in results) % (1 << 64)
        check(lib.codec_decode_close(context, job, seal), context.fault)
    return True


def verify(frame: Any) -> None:
    """Check all of a frame but the values: header, sections, directory and every checksum.

    Parameters
    ----------
    frame : bytes or buffer
        A frame, whole.

    Raises
    ------
    FrameError
        It is not what was written.
    """
    source, nbytes, keep = view_bytes(frame)
    check(lib.codec_verify(source, nbytes))
    del keep


def inspect(frame: Any) -> Info:
    """Read a frame's header.

    Parameters
    ----------
    frame : bytes or buffer
        A frame, or its beginning: the header (at most 112 bytes) is enough, but ``codebook_id`` and ``nsegments`` are
        known only if the side section is there too.

    Raises
    ------
    FrameError
        The bytes are not the beginning of a frame.
    """
    source, nbytes, keep = view_bytes(frame)
    info = local.info
    check(lib.codec_inspect(source, nbytes, info), info.fault)
    del keep
    sections = {
        "header": (0, info.side_offset),
        "side": (info.side_offset, info.side_nbytes),
        "directory": (info.directory_offset, info.directory_nbytes),
        "planes": (info.planes_offset, info.planes_nbytes),
        "regions": (info.regions_offset, info.regions_nbytes),
    }
    return Info(
        spec=core.spec_of(info.spec),
        dtype=DTYPE_NAMES[info.dtype],
        shape=tuple(info.shape[i] for i in range(info.rank)),
        nbytes=info.frame_nbytes,
        tensor_nbytes=info.tensor_nbytes,
        sections=sections,
        version=info.version,
        n=info.n,
        stored=bool(info.stored),
        block=info.block_nvalues,
        nblocks=info.nblocks,
        checksum=info.checksum,
        codebook_id=info.codebook_id or None,
        nsegments=info.nsegments,
    )
