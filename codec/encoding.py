"""Tensors to frames."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from codec import _call
from codec._c import pool
from codec._c.library import DTYPES, ITEMSIZE, check, ffi, lib
from codec._c.spec_structs import spec_struct
from codec.arguments import shown, truth, whole
from codec.codebook import Codebook, given_codebooks
from codec.engines import choose
from codec.engines.request import EncodeRequest
from codec.errors import ArgumentError, EngineError, SpecError
from codec.optimizers.arguments import Asked, asked
from codec.specs import Lossless, Spec, Truncate
from codec.tensors.segments import pack
from codec.tensors.view import TensorView, dtype_name, mark_written, new, view, view_output

DEFAULT = Lossless()


def bound(shape: int | Iterable[int], dtype: Any, spec: Spec = DEFAULT) -> int:
    """Size in bytes that no frame of such a tensor exceeds.

    Parameters
    ----------
    shape : int or iterable of int
        Shape of the tensor.
    dtype : str, type or dtype
        Its dtype: whatever numpy takes for one, or one of ml_dtypes' or torch's.
    spec : Spec
        What will be asked for.

    Raises
    ------
    ArgumentError, SpecError
        The tensor cannot be encoded with this spec.

    Examples
    --------
    >>> out = np.empty(codec.bound((64, 1000), "f4"), np.uint8)
    >>> len(codec.encode(np.ones((64, 1000), np.float32), out=out)) <= len(out)
    True
    """
    name = dtype_name(dtype)
    try:
        sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        sizes = tuple(whole("a dimension", s, 0, (1 << 60) - 1) for s in sizes)
    except TypeError:
        raise ArgumentError(f"not a shape: {shown(shape)}") from None
    if len(sizes) > lib.CODEC_MAX_RANK:
        raise ArgumentError(f"rank {len(sizes)} is above {lib.CODEC_MAX_RANK}")
    size = ffi.new("size_t *")
    check(lib.codec_bound(spec_struct(spec), _call.new_tensor(DTYPES[name], sizes), size))
    return size[0]


def encode(
    x: Any,
    spec: Spec = DEFAULT,
    *,
    engine: str | None = None,
    out: Any = None,
    threads: int | None = None,
    residual: Any = None,
    feedback: bool = False,
    check_first: bool = True,
    codebook: Codebook | None = None,
    segments: Sequence[tuple[int, tuple[int, ...]]] | None = None,
    stream: int = 0,
    metric: Any = None,
    state: Mapping[str, Any] | None = None,
    dtype: Any = None,
) -> bytes | memoryview:
    """Encode a tensor as a frame.

    The frame depends on the tensor, the spec, the codebook, the segments and the stream, and on nothing else: not on
    the CPU, the instruction set, the number of threads or the address.

    Parameters
    ----------
    x : array, tensor or buffer
        Anything with a buffer, ``__array_interface__`` or DLPack: numpy and ml_dtypes arrays, torch tensors. float32,
        float64, bfloat16, float16, float8, bool or integers of 1 to 8 bytes; rank 0 to 8. It is not changed, and copied
        only if it is not contiguous or not in native byte order.
    spec : Spec
        What to do; lossless if left out.
    engine : str, optional
        One of :func:`engines`. Left out: the one for where x lies.
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
        cannot be encoded, but see `check_first`.
    feedback : bool
        Error feedback in one pass: encode x + `residual`, which is what earlier frames lost, and then it gets what this
        one loses. Each sum is rounded to float32. Not with :class:`Lossless`, which loses nothing, and `residual` must
        not be x then. x is not changed. Residuals stay bounded for contractions (``spec.contraction``).
    check_first : bool
        Look for what cannot be encoded before `residual` is written. With False it may hold anything after an error,
        which saves a pass where values share scales by rows, groups or blocks.
    segments : sequence of (int, tuple of int), optional
        Offsets and shapes of the parameters inside a flat bucket, ascending; in values: :func:`segments` makes them.
        What they leave out is flat.
        Scales and rows of lossy codecs follow them, too, if they have at least 4,096 values.
    stream : int
        Random draws of different streams are independent: make it from rank, step and tensor. 64 bits.
    metric : Metric, Custom, list of (int, Metric or Custom) or array of uint8, optional
        Optimizer (:mod:`codec.optimizers`) for :class:`codec.Truncate`; groups with the offsets where they begin;
        or the level of each value.
    state : mapping, optional
        The metric's arrays, ``theta``, ``m`` and ``v``, of as many values as x.
    dtype : str, type or dtype, optional
        Take the bits of x as values of this dtype, such as ``"bfloat16"`` for an array of uint16, or ``"uint64"`` for
        one of complex64. Of x's own dtype only the size of an item counts, which must be that of `dtype`.

    Returns
    -------
    bytes, or memoryview of `out`; for a tensor on a GPU an array or tensor of uint8 there
        The frame. The first two are read-only and used alike: length, index, slice, comparison, ``join``, files and
        sockets, :func:`decode`. But a frame in `out` is gone when something else is written there, so it cannot be
        hashed or pickled; ``bytes(frame)`` can.

    Raises
    ------
    ArgumentError, SpecError
        x, spec, segments, residual or `out` cannot be used as asked; x holds NaN or Inf, which lossy codecs refuse; a
        scale was given that is smaller than a value, or 0 or Inf in x's dtype.
    EngineError
        x or another argument lies on a device that the engine cannot read, or the engine cannot be used here.

    Examples
    --------
    >>> grad = np.random.default_rng(0).standard_normal((64, 1000)).astype(np.float32)
    >>> bool((codec.decode(codec.encode(grad)) == grad).all())
    True
    >>> error = np.zeros_like(grad)
    >>> for step in range(3):  # what is lost is sent with the next one
    ...     frame = codec.encode(grad, codec.Sign(), residual=error, feedback=True, stream=step)
    """
    if threads is not None:
        threads = pool.check_threads(threads)
    v = view(x, dtype)
    o = view_output(out) if out is not None else None
    if o is not None and o.dtype not in ("uint8", "int8"):
        raise ArgumentError(f"out= must hold bytes, not {o.dtype}")
    levels = metric is not None or state is not None or type(spec) is Truncate
    fields = (
        v,
        spec,
        o,
        _view_residual(residual, v) if residual is not None else None,
        one_codebook(codebook, spec) if codebook is not None else None,
        pack(segments) if segments is not None else None,
        stream if type(stream) is int and 0 <= stream < 1 << 64 else check_stream(stream),
        asked_of(spec, metric, state, v) if levels else None,
        threads,
        feedback if feedback is False else _check_feedback(feedback, residual, spec),
        truth("check_first", check_first),
    )
    r: EncodeRequest = new(EncodeRequest, fields)
    if levels and r.residual is not None and r.metric is not None:
        r.check_apart()  # to C, a residual may be an array of the state; to us that is a mistake
    try:
        return choose(engine, "x", v.device).encode(r)
    finally:
        if residual is not None:
            mark_written(residual)
        if out is not None:
            mark_written(out)


def encode_async(
    x: Any,
    spec: Spec = DEFAULT,
    *,
    out: Any,
    residual: Any = None,
    feedback: bool = False,
    codebook: Codebook | None = None,
    segments: Sequence[tuple[int, tuple[int, ...]]] | None = None,
    stream: int = 0,
    metric: Any = None,
    state: Mapping[str, Any] | None = None,
    dtype: Any = None,
) -> Any:
    """Encode a tensor on a GPU, without waiting for it at all: not for the frame, nor for what the tensor waits for.

    That can be captured in a graph, in any mode, after the same was done once on any stream: then kernels are compiled
    and loaded. Whenever it runs, a graph uses the memory of all arguments and of what is returned: keep that as long.
    Random draws are the same each time.

    Parameters
    ----------
    x : array or tensor on a GPU
    out : writable array or tensor on the same GPU
        Where to put the frame, at a multiple of 8 bytes. :func:`bound` bytes are always enough, and needed if there is
        a residual.
    spec, residual, feedback, codebook, segments, stream, metric, state, dtype
        As in :func:`encode`, all on the same GPU.

    Returns
    -------
    Pending
        With the frame's size, ``nbytes``, and ``status`` on the GPU, and ``wait()`` that returns the frame.

    Raises
    ------
    ArgumentError, SpecError
        As in :func:`encode`, if it can be said without x's values.
    EngineError
        x or something else lies in host memory; there is no GPU that can be used.

    Examples
    --------
    >>> codec.encode_async(np.ones(1000), out=np.empty(10_000, np.uint8))
    Traceback (most recent call last):
    codec.errors.EngineError: encode_async is for tensors on a GPU...
    """
    v = view(x, dtype)
    chosen = choose(None, "x", v.device)
    begin = getattr(chosen, "encode_async", None)
    if begin is None:
        raise EngineError("encode_async is for tensors on a GPU: what encode returns for others is there already")
    r = EncodeRequest(
        v,
        spec,
        view_output(out),
        _view_residual(residual, v) if residual is not None else None,
        one_codebook(codebook, spec) if codebook is not None else None,
        pack(segments) if segments is not None else None,
        check_stream(stream),
        asked_of(spec, metric, state, v),
        None,
        feedback if feedback is False else _check_feedback(feedback, residual, spec),
    )
    mark_written(out)
    mark_written(residual)
    return begin(r)


def check_stream(stream: Any) -> int:
    """The argument as an int."""
    return whole("stream", stream, 0, (1 << 64) - 1)


def one_codebook(codebook: Any, spec: Spec) -> Codebook:
    """The argument, if it is one and goes with the spec."""
    if isinstance(spec, Spec) and not isinstance(spec, Lossless | Truncate):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"codebook= is for Lossless and Truncate, not for {type(spec).__name__}")
    return given_codebooks([codebook])[0]


def asked_of(spec: Spec, metric: Any, state: Mapping[str, Any] | None, v: TensorView) -> Asked | None:
    """What levels of a tensor go by, if the spec has any."""
    if not isinstance(spec, Truncate):
        if metric is not None or state is not None:
            raise ArgumentError(f"metric= and state= are for Truncate, not for {type(spec).__name__}")
        return None
    if metric is None and spec.fixed_level is None:
        raise SpecError(f"{spec} needs metric= and state=, or a level for all values")
    return asked(metric, state, v.nbytes // ITEMSIZE[v.dtype])


def _check_feedback(feedback: Any, residual: Any, spec: Spec) -> bool:
    """The argument, which is not False, if the others go with it."""
    if feedback is not True:
        raise ArgumentError(f"feedback must be True or False, got {shown(feedback)}")
    if residual is None:
        raise ArgumentError("feedback= needs residual=, which holds what earlier frames lost: zeros at first")
    if isinstance(spec, Lossless):
        raise SpecError("Lossless loses nothing that could be fed back")
    return True


def _view_residual(residual: Any, v: TensorView) -> TensorView:
    r = view_output(residual, name="residual=")
    if r.dtype != "float32" or r.nbytes // 4 != v.nbytes // ITEMSIZE[v.dtype]:
        raise ArgumentError(f"residual= must be float32 with as many values as x, not {r.dtype} of shape {r.shape}")
    return r
