"""Tensors to frames."""

import ctypes
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from codec import core, pool
from codec.codebook import Codebook, codebook_structs, segment_structs, set_codebooks, set_segments
from codec.core import DTYPES, ITEMSIZE, Call, check, ffi, lib
from codec.errors import SpecError
from codec.frame import check_engine
from codec.metrics import MetricStructs, metric_structs, set_metric
from codec.specs import Lossless, Spec, Ternary, Truncate, whole
from codec.view import TensorView, check_apart, mark_written, view, view_output

_DEFAULT = Lossless()
_ROOM, _SCRATCH = core.SMALL_FRAME, core.SMALL_SCRATCH
_SHORT_OUTPUT: int = lib.CODEC_SHORT_OUTPUT
_BLOCK = 1 << 14
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Touching new memory 4 KiB at a time can take longer than encoding; numpy asks the same for its arrays."""
    page = 1 << 21
    begin, end = -(-address // page) * page, (address + nbytes) // page * page
    if _madvise is not None and end - begin >= page:
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 14)  # MADV_HUGEPAGE; a refusal does no harm


class _NewBytes:
    """A bytes object that is filled in before anyone sees it, then cut to size: no second copy of a frame.

    A tuple holds it from the beginning, so that nothing is lost to an interrupt; a __del__ could be interrupted, too.
    """

    _new = ctypes.pythonapi.PyBytes_FromStringAndSize
    _new.restype = ctypes.py_object
    _resize = ctypes.pythonapi._PyBytes_Resize

    def __init__(self, nbytes: int) -> None:
        self._holder = (self._new(None, ctypes.c_ssize_t(2)),)
        self._place = ctypes.c_void_p(id(self._holder) + tuple.__basicsize__)  # where the tuple has its pointer
        self._resize(self._place, ctypes.c_ssize_t(nbytes))  # or MemoryError
        self.address = id(self._holder[0]) + bytes.__basicsize__ - 1
        _ask_for_huge_pages(self.address, nbytes)

    def finish(self, nbytes: int) -> bytes:
        """The object. Nothing may be written to it from now on."""
        self._resize(self._place, ctypes.c_ssize_t(nbytes))
        return self._holder[0]


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
    try:
        sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        sizes = tuple(whole("a dimension", s, 0, (1 << 60) - 1) for s in sizes)
    except TypeError:
        raise SpecError(f"not a shape: {shape!r}") from None
    if len(sizes) > 8:
        raise SpecError(f"rank {len(sizes)} is above 8")
    size = ffi.new("size_t *")
    check(lib.codec_bound(core.spec_struct(spec), core.new_tensor(DTYPES[name], sizes), size))
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
        Where to put the frame, apart from all other arguments. :func:`bound` bytes are always enough.
    threads : int, optional
        How many threads to use. Left out: as many as pay, up to ``CODEC_NUM_THREADS``, ``OMP_NUM_THREADS`` or the
        number of CPUs.
    codebook : Codebook, optional
        Use this one, which the receiver holds too, for the exponents, instead of one made for this tensor. Dtypes
        without exponents, and tensors of fewer than 512 values, do not need one and ignore it.
    residual : float32 array or tensor, optional
        Gets x less what a decoder will see; it may be x itself, but not a part of it or more. Not written if the tensor
        cannot be encoded.
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
    check_engine(engine)
    threads = None if threads is None else pool.check_threads(threads)
    # all that may run other code of the caller's comes before a struct is filled in
    v = view(x, dtype)
    s = core.spec_struct(spec)
    if type(stream) is not int or not 0 <= stream < 1 << 64:
        stream = whole("stream", stream, 0, (1 << 64) - 1)
    books = codebook_structs([codebook]) if codebook is not None else None
    parts = segment_structs(segments) if segments is not None else None
    m = _metric_of(spec, metric, state, v)
    if isinstance(spec, Ternary) and spec.scale is not None:
        _check_scale(spec.scale, v.dtype)
    r = _view_residual(residual, v, m) if residual is not None else None
    o = _view_out(out, v, r, m) if out is not None else None

    call = core.take()
    context = call.context
    context.stream = stream
    call.keep = v, books, parts, m, r, o
    if books is not None:
        set_codebooks(context, books)
    if parts is not None:
        set_segments(context, parts)
    if m is not None:
        set_metric(context, m)
    t = call.fill_tensor(DTYPES[v.dtype], v.shape, v.data, v.nbytes)
    if v.nbytes <= core.SMALL_TENSOR and out is None and r is None and (threads is None or threads == 1):
        scratch = call.small_scratch()
        status = lib.codec_encode(s, t, call.frame, _ROOM, call.size, ffi.NULL, context, scratch, _SCRATCH)
        if status != _SHORT_OUTPUT:  # rows of one value may make a frame larger than the tensor
            check(status)
            frame = bytes(ffi.buffer(call.frame, call.size[0]))
            core.give(call)
            return frame
    if r is not None:
        context.residual = ffi.cast("float *", r.data)
    check(lib.codec_bound(s, t, call.size))
    limit: int = call.size[0]
    count = pool.choose_threads(threads, v.nbytes)
    try:
        if o is None:
            room = limit + _slack(v) if count > 1 else limit
            new = _NewBytes(room)
            call.keep = call.keep, new
            result = new.finish(_encode_at(call, s, ffi.cast("uint8_t *", new.address), room, count))
        else:
            result = _memory_of(o)[: _encode_at(call, s, o.data, o.nbytes, count)]
    finally:
        mark_written(residual)
        mark_written(out)
    core.give(call)
    return result


def _metric_of(spec: Spec, metric: Any, state: Mapping[str, Any] | None, v: TensorView) -> MetricStructs | None:
    if not isinstance(spec, Truncate):
        if metric is not None or state is not None:
            raise SpecError(f"metric= and state= are for Truncate, not for {type(spec).__name__}")
        return None
    if metric is None and spec.fixed_level is None:
        raise SpecError(f"{spec} needs metric= and state=, or a level for all values")
    return metric_structs(metric, state, v.nbytes // ITEMSIZE[v.dtype])


def _check_scale(scale: float, dtype: str) -> None:
    """A scale becomes a number of the tensor's dtype, which may have none as small or as large."""
    if dtype == "float16":
        with np.errstate(all="ignore"):
            rounded = float(np.float16(np.float32(scale)))
    elif dtype == "bfloat16":
        bits = int(np.float32(scale).view(np.uint32))
        rounded = float(np.uint32(bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).view(np.float32))
    else:
        return
    if not 0 < rounded < math.inf:
        raise SpecError(f"scale {scale!r} is {rounded} in {dtype}, the tensor's dtype")


def _view_out(out: Any, v: TensorView, r: TensorView | None, m: MetricStructs | None) -> TensorView:
    o = view_output(out)
    if o.dtype not in ("uint8", "int8"):
        raise SpecError(f"out= must hold bytes, not {o.dtype}")
    others = [("x", v, False), *_state(m)] if r is None else [("x", v, False), ("residual=", r, False), *_state(m)]
    check_apart("out=", o, others)
    return o


def _memory_of(o: TensorView) -> memoryview:
    array: Any = np.asarray(o.owner)
    return memoryview(array.reshape(-1).view(np.uint8))


def _state(m: MetricStructs | None) -> list[tuple[str, TensorView, bool]]:
    return [(name, v, False) for name, v in m.views.items()] if m is not None else []


def _view_residual(residual: Any, v: TensorView, m: MetricStructs | None) -> TensorView:
    r = view_output(residual)
    if r.dtype != "float32" or r.nbytes // 4 != v.nbytes // ITEMSIZE[v.dtype]:
        raise SpecError(f"residual= must be float32 with as many values as x, not {r.dtype} of shape {r.shape}")
    check_apart("residual=", r, [("x", v, True), *_state(m)])
    return r


def _slack(v: TensorView) -> int:
    """What regions take more than their values, at worst, while threads leave gaps between them."""
    n = v.nbytes // ITEMSIZE[v.dtype]
    return (n // _BLOCK + 1) * 1024 + 2 * n + 65536 if v.dtype == "float64" else n // 64 + 65536


def _encode_one(call: Call, spec: Any, dst: Any, capacity: int) -> None:
    check(lib.codec_scratch(spec, call.tensor, call.size))
    nbytes = call.size[0]
    scratch = call.scratch(nbytes)
    status = lib.codec_encode(spec, call.tensor, dst, capacity, call.size, ffi.NULL, call.context, scratch, nbytes)
    if status == lib.CODEC_SHORT_OUTPUT:
        raise SpecError(f"out= has {capacity} bytes, which is too few; bound() says how many are enough")
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
    if status == lib.CODEC_SHORT_OUTPUT:
        return None
    check(status)
    if plan.nscans:
        cuts = pool.ranges(plan.nscans, threads)

        def scan(i: int, _: int) -> int:
            return lib.codec_encode_scan(call.tensor, call.context, job, *cuts[i])

        for status in pool.run(scan, len(cuts), threads):
            check(status)
        status = lib.codec_encode_start(t, dst, capacity, context, job, plan)
        if status == lib.CODEC_SHORT_OUTPUT:
            return None
        check(status)
    if plan.nblocks < 2:
        return None
    room, space = plan.region_bound, capacity - plan.regions_at
    if plan.nblocks * room > space:
        if context.residual != ffi.NULL and spec.codec not in (lib.CODEC_LOSSLESS, lib.CODEC_TRUNCATE):
            return None  # it is written with the blocks, and may be x: there would be no second try
        if (plan.nblocks - 1) * room >= space:
            # regions may be larger than their values at worst, but a frame of such regions would be stored
            room = space // plan.nblocks // 8 * 8
            if 8 * room < 7 * (t.nbytes // plan.nblocks):
                return None
    cuts = pool.ranges(plan.nblocks, threads)
    places = [plan.regions_at + first * room for first, _ in cuts]
    limits = [min(plan.regions_at + (first + count) * room, capacity) for first, count in cuts]
    seals, end = ffi.new("uint64_t[]", len(cuts)), ffi.new("uint64_t[]", len(cuts))
    nbytes = work_size[0]
    works = [core.new_bytes(nbytes) for _ in range(min(threads, len(cuts)))]

    def task(i: int, w: int) -> int:
        return lib.codec_encode_blocks(
            call.tensor, dst, limits[i], call.context, job, *cuts[i], places[i], end + i, seals + i, works[w], nbytes
        )

    for status in pool.run(task, len(cuts), threads):
        if status in (lib.CODEC_SHORT_OUTPUT, lib.CODEC_LIMIT):
            return None
        check(status)
    seal = sum(seals) % (1 << 64)
    counts = [count for _, count in cuts]
    check(lib.codec_encode_close(t, dst, capacity, context, job, counts, places, len(cuts), seal, call.size))
    return call.size[0]
