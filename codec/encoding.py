"""Tensors to frames."""

import ctypes
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from codec import core, pool
from codec.codebook import Codebook, set_codebooks, set_segments
from codec.core import DTYPES, ITEMSIZE, check, ffi, lib, local
from codec.errors import SpecError
from codec.frame import check_engine
from codec.metrics import set_metric
from codec.specs import Lossless, Spec, Truncate
from codec.view import TensorView, view, view_output

_DEFAULT = Lossless()
_ROOM, _SCRATCH = core.SMALL_FRAME, core.SMALL_SCRATCH
_BLOCK = 1 << 14
_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


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
    check_engine(engine)
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
        if metric is None and spec.fixed_level is None:
            raise SpecError(f"{spec} needs metric= and state=, or a level for all values")
        keep = (keep, set_metric(context, metric, state, v.nbytes // ITEMSIZE[v.dtype]))
    elif metric is not None or state is not None:
        raise SpecError(f"metric= and state= are for Truncate, not for {type(spec).__name__}")
    if residual is not None:
        r = _view_residual(residual, v)
        context.residual = ffi.cast("float *", r.data)
    written = local.written
    check(lib.codec_bound(s, t, written))
    limit: int = written[0]
    if out is None and v.nbytes <= core.SMALL_TENSOR and limit <= _ROOM and threads in (None, 1):
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

    def task(i: int) -> tuple[int, int]:
        end, seal = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        first, count = cuts[i]
        work = core.new_bytes(work_size[0])
        limit = min(plan.regions_at + (first + count) * room, capacity)
        status = lib.codec_encode_blocks(
            t, dst, limit, context, job, first, count, places[i], end, seal, work, work_size[0]
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
