"""Encoding of tensors as frames."""

from collections.abc import Iterable
from typing import Any, overload

import numpy as np

from codec import _call
from codec._c.library import DTYPES, ITEMSIZE, check, ffi, lib
from codec._c.spec_structs import spec_struct
from codec._c.traits import has_fixed_rate, is_lossless
from codec._options import CallOptions, settings_of
from codec.arguments import shown, truth, whole
from codec.codebook import Codebook, given_codebooks
from codec.engines import choose, device_engine
from codec.engines.request import EncodeRequest, new_encode_request
from codec.engines.small import encode_small
from codec.errors import ArgumentError, EngineError, SpecError
from codec.explain import explain, explain_dtype
from codec.optimizers.arguments import level_source_for
from codec.presets import resolve
from codec.specs import Delta, Lossless, Spec, SpecLike, Truncate
from codec.tensors.view import TensorView, dtype_name, is_torch, mark_written, view, view_base, view_output
from codec.tensors.wrapper import View
from codec.tensors.wrapper import view as make_view

DEFAULT = Lossless()
_LARGEST = 8 * ((1 << 32) - 1)  # maximum size of a frame in bytes


def bound(
    shape: int | Iterable[int], dtype: Any, spec: SpecLike = DEFAULT, *, segments: Any = None, exact: bool = False
) -> int:
    """Return the upper bound of the size of a tensor's frame, or its exact size for codecs of fixed rate.

    Each segment can add a record, and scales for its rows, to the frame. If the segments are given, the bound is
    smaller: for 1,024 values with :class:`Float8` it is 1,096 bytes without segments, and 4,864 bytes for any segments.

    Parameters
    ----------
    shape : int or iterable of int
        Shape of the tensor.
    dtype : str, type or dtype
        Dtype of the tensor: any that numpy accepts, or one of ml_dtypes or torch.
    spec : Spec, bound spec or name of a preset
        Spec of the frame; :class:`Lossless` by default.
    segments : mapping, torch.nn.Module, or iterable of (int, tuple of int), optional
        Parameters inside a flat bucket, as in :func:`view`; ``()`` for a tensor without segments. Default: the bound
        holds for any segments.
    exact : bool
        True: return the size of the frame of any tensor of this shape and dtype, without segments by default. The codec
        must have a fixed rate: :class:`Sign`, :class:`Quantize`, :class:`Float4`, :class:`Float8` without ``entropy``,
        or :class:`Ternary` with the packing "2bit" or "base3".

    Returns
    -------
    int
        Bytes.

    Raises
    ------
    SpecError
        The tensor cannot be encoded with this spec; or with `exact`, the size depends on the values.
    ArgumentError
        The tensor cannot be encoded with this spec, or `segments` do not lie inside it.
    LimitError
        With `exact`: the frame would be larger than 32 GiB.

    Examples
    --------
    >>> out = np.empty(codec.bound((64, 1000), "f4"), np.uint8)
    >>> len(codec.encode(np.ones((64, 1000), np.float32), out=out)) <= len(out)
    True
    >>> codec.bound(1024, "f4", codec.Float8(), segments=()), codec.bound(1024, "f4", codec.Float8())
    (1096, 4864)
    >>> codec.bound((64, 1000), "f4", codec.Quantize(4), exact=True)
    36096
    """
    kind, name = resolve(spec)[0], dtype_name(dtype)
    like = _call.new_tensor(DTYPES[name], checked_shape(shape))
    size = ffi.new("size_t *")
    if truth("exact", exact):
        if not has_fixed_rate(kind):
            raise SpecError(f"exact=True: the size of a frame of {kind} depends on the values; leave exact= out")
        segments = () if segments is None else segments
    records = None if segments is None else make_view(None, segments=segments).segments
    try:
        if records is None:
            check(lib.codec_bound(spec_struct(kind), like, size))
        else:
            array = ffi.from_buffer("codec_segment[]", records)
            check(lib.codec_bound_segments(spec_struct(kind), like, array, len(array), size))
    except ArgumentError as e:
        explain_dtype(e, kind, name, "the tensor")
        raise
    if exact and size[0] > _LARGEST:
        check(lib.CODEC_LIMIT)
    return size[0]


def checked_shape(shape: int | Iterable[int]) -> tuple[int, ...]:
    """Return `shape` as a tuple; raise ArgumentError if it is not a shape, or has too many dimensions."""
    try:
        sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        sizes = tuple(whole("a dimension", s, 0, (1 << 60) - 1) for s in sizes)
    except TypeError:
        raise ArgumentError(f"shape must be an int or a sequence of ints, got {shown(shape)}") from None
    if len(sizes) > lib.CODEC_MAX_RANK:
        raise ArgumentError(
            f"shape has {len(sizes)} dimensions; the maximum is {lib.CODEC_MAX_RANK}: reshape the tensor"
        )
    return sizes


@overload
def encode(
    x: Any,
    spec: SpecLike = DEFAULT,
    *,
    base: Any = None,
    out: None = None,
    residual: Any = None,
    feedback: bool = False,
    codebook: Codebook | None = None,
    stream: int = 0,
    options: CallOptions | None = None,
) -> bytes: ...
@overload
def encode(
    x: Any,
    spec: SpecLike = DEFAULT,
    *,
    base: Any = None,
    out: Any,
    residual: Any = None,
    feedback: bool = False,
    codebook: Codebook | None = None,
    stream: int = 0,
    options: CallOptions | None = None,
) -> memoryview: ...
def encode(
    x: Any,
    spec: SpecLike = DEFAULT,
    *,
    base: Any = None,
    out: Any = None,
    residual: Any = None,
    feedback: bool = False,
    codebook: Codebook | None = None,
    stream: int = 0,
    options: CallOptions | None = None,
) -> bytes | memoryview:
    """Encode a tensor as a frame.

    The frame is a function of the values, the spec, the codebook, the segments and the stream. It is bit-identical for
    all CPUs, instruction sets, engines, numbers of threads and memory addresses.

    Parameters
    ----------
    x : array, tensor, buffer or View
        Tensor of rank 0 to 8 that supports the buffer protocol, ``__array_interface__``, DLPack or
        ``__cuda_array_interface__``, such as those of numpy, torch, ml_dtypes and CuPy. Dtypes: float32, float64,
        bfloat16, float16, float8, bool, and integers of 1 to 8 bytes. A tensor is copied only if it is not contiguous
        or not in native byte order. Use :func:`view` to encode a tensor as another dtype, or as a bucket of parameters.
    spec : Spec, bound spec or name of a preset
        Codec and its parameters; :class:`Lossless` by default. :class:`Truncate` must be bound to the optimizer with
        :meth:`Truncate.bind`, unless it has a fixed level. For names of presets see :func:`preset`.
    base : array or tensor, optional
        Required by :class:`Delta`, refused otherwise: tensor of x's shape and dtype that all decoders have.
    out : writable buffer, optional
        Buffer for the frame, which must not overlap another argument. :func:`bound` bytes are always enough.
    residual : float32 array or tensor, optional
        Receives the residual x - decode(frame); it has as many values as x, and may be x itself. After an error it is
        unchanged, unless the options have ``verify_first=False``.
    feedback : bool
        Error feedback: encode x + `residual`, each sum rounded to float32, and write the new residual to `residual`,
        which must not be x. Pass zeros as the first residual. The residual stays bounded if ``spec.contraction`` is
        True. :class:`Lossless` and :class:`Delta` have no residual.
    codebook : Codebook, optional
        Codebook for the exponents. The frame contains only its id, so the decoder must be given the same codebook.
        Tensors without exponents or with fewer than 512 values ignore it. Default: a codebook made for this tensor, and
        sent in the frame.
    stream : int
        Number of the stream of random bits, 0 to 2^64 - 1, for specs with stochastic rounding. Different streams are
        independent: compute the number from the rank, the step and the tensor.
    options : CallOptions, optional
        Engine, threads and ``verify_first``, made by :func:`options`.

    Returns
    -------
    bytes, or memoryview of `out`; for a tensor on a GPU an array or tensor of uint8 on that GPU
        The frame. The memoryview is read-only, and valid until `out` is written again.

    Raises
    ------
    ArgumentError
        An argument has a wrong type, dtype, size or device; x contains NaN or Inf, which lossy codecs refuse; or the
        spec has a scale that is smaller than a value, or that is 0 or Inf in x's dtype.
    SpecError
        `spec` is not a spec, lacks an optimizer, or cannot be used with `feedback`.
    StateError
        The spec is bound to an optimizer whose formula needs an array that was not passed to :meth:`Truncate.bind`.
    EngineError
        An argument lies on a device that the engine cannot read, or the engine cannot be used on this machine.

    Examples
    --------
    >>> grad = np.random.default_rng(0).standard_normal((64, 1000)).astype(np.float32)
    >>> bool((codec.decode(codec.encode(grad)) == grad).all())
    True
    >>> residual = np.zeros_like(grad)
    >>> for step in range(3):  # error feedback
    ...     frame = codec.encode(grad, codec.Sign(), residual=residual, feedback=True, stream=step)
    """
    settings = settings_of(options)
    if (
        out is residual is codebook is base is settings.engine is None
        and (type(x) is np.ndarray or is_torch(x))
        and isinstance(spec, Spec)
        and (settings.threads or 1) == 1
        and type(stream) is int
        and 0 <= stream < 1 << 64
        and feedback is False
        and (frame := encode_small(x, spec, stream)) is not None
    ):
        return frame
    r = encode_request(x, spec, settings, out, residual, feedback, codebook, stream, base)
    if residual is not None and r.levels is not None:
        r.check_apart()  # the C library does not refuse a residual that is also an array of the optimizer's state
    try:
        return choose(settings.engine, "x", r.x.device).encode(r)
    except (ArgumentError, SpecError) as e:
        explain(e, r)
        raise
    finally:
        if residual is not None:
            mark_written(residual)
        if out is not None:
            mark_written(out)


def encode_async(
    x: Any,
    spec: SpecLike = DEFAULT,
    *,
    out: Any,
    residual: Any = None,
    feedback: bool = False,
    codebook: Codebook | None = None,
    stream: int = 0,
    base: Any = None,
) -> Any:
    """Encode a tensor on a GPU asynchronously: enqueue the kernels, and do not wait for them.

    The call can be captured in a CUDA graph, in any capture mode, if an earlier call outside the capture has compiled
    and loaded the kernels. Each replay of the graph reads and writes the memory of all arguments and of the result, so
    keep them alive as long as the graph. All replays use the same random bits. Calls that wait for the GPU, such as
    :func:`encode` and :func:`decode`, raise EngineError on a stream that is being captured.

    Parameters
    ----------
    x : array, tensor or View
        Tensor on a GPU.
    spec : Spec, bound spec or name of a preset
        As in :func:`encode`, but not bound to a :class:`codec.optimizers.Custom`.
    out : writable array or tensor
        Buffer for the frame on the same GPU, at an address that is a multiple of 8. :func:`bound` bytes are always
        enough, and are required with `residual`.
    residual, feedback, codebook, stream
        As in :func:`encode`; `residual` on the same GPU.
    base : array or tensor, optional
        For :class:`Delta`: tensor of x's shape and dtype on the same GPU.

    Returns
    -------
    Pending
        ``nbytes`` and ``status`` are the frame's size and status, both in GPU memory. ``wait()`` waits for the kernels
        and returns the frame.

    Raises
    ------
    ArgumentError, SpecError
        As in :func:`encode`, for errors that do not depend on the values of x; ``wait()`` raises those that do.
    EngineError
        An argument lies in host memory, or there is no usable GPU.

    Examples
    --------
    >>> codec.encode_async(np.ones(1000), out=np.empty(10_000, np.uint8))
    Traceback (most recent call last):
    codec.errors.EngineError: encode_async takes tensors on a GPU...
    """
    r = encode_request(x, spec, settings_of(None), out, residual, feedback, codebook, stream, base)
    if r.x.device == "cpu":
        raise EngineError("encode_async takes tensors on a GPU, but x is in host memory: use encode")
    engine = device_engine("x", r.x.device)
    mark_written(out)
    mark_written(residual)
    try:
        return engine.encode_async(r)
    except (ArgumentError, SpecError) as e:
        explain(e, r)
        raise


def encode_request(
    x: Any,
    spec: SpecLike,
    settings: CallOptions,
    out: Any = None,
    residual: Any = None,
    feedback: Any = False,
    codebook: Any = None,
    stream: Any = 0,
    base: Any = None,
) -> EncodeRequest:
    """Return the checked arguments of :func:`encode`, with the settings of the call."""
    dtype = segments = bound = None
    if type(x) is View:
        x, dtype, segments = x.tensor, x.dtype, x.segments
    if not isinstance(spec, Spec):
        spec, bound = resolve(spec)
    v = view(x, dtype)
    return new_encode_request(
        v,
        spec,
        _view_frame(out) if out is not None else None,
        _view_residual(residual, v) if residual is not None else None,
        one_codebook(codebook, spec) if codebook is not None else None,
        segments,
        stream if type(stream) is int and 0 <= stream < 1 << 64 else check_stream(stream),
        level_source_for(spec, bound, v) if bound is not None or type(spec) is Truncate else None,
        settings.threads,
        feedback if feedback is False else _check_feedback(feedback, residual, spec),
        settings.verify_first is not False,
        _view_base(base, spec, v) if base is not None or type(spec) is Delta else None,
    )


def _view_base(base: Any, spec: Spec, v: TensorView) -> TensorView:
    """Return the view of ``base=``; raise ArgumentError if Delta lacks it, or another spec has it."""
    if not isinstance(spec, Delta):
        raise ArgumentError(f"base= is for Delta, not for {type(spec).__name__}: leave it out")
    if base is None:
        raise ArgumentError("Delta() needs base=, the tensor that decoders have: pass encode(x, Delta(), base=...)")
    b = view_base(base.tensor, base.dtype or v.dtype) if type(base) is View else view_base(base, v.dtype)
    if b[:2] != v[:2]:
        raise ArgumentError(f"base= must be {v.dtype} of shape {v.shape}, as x, got {b.dtype} of shape {b.shape}")
    return b


def check_stream(stream: Any) -> int:
    """Return the argument ``stream=`` as an int; raise ArgumentError unless it is from 0 to 2^64 - 1."""
    return whole("stream", stream, 0, (1 << 64) - 1)


def one_codebook(codebook: Any, spec: Spec) -> Codebook:
    """Return `codebook`; raise ArgumentError if it is not a codebook, or if the spec cannot use one."""
    if not isinstance(spec, Lossless | Truncate):
        raise ArgumentError(f"codebook= is for Lossless and Truncate, not for {type(spec).__name__}: leave it out")
    return given_codebooks([codebook])[0]


def _view_frame(out: Any) -> TensorView:
    v = view_output(out)
    if v.dtype not in ("uint8", "int8"):
        raise ArgumentError(f"out= must be a buffer of bytes, uint8 or int8, got {v.dtype}")
    return v


def _check_feedback(feedback: Any, residual: Any, spec: Spec) -> bool:
    """Check an argument ``feedback=`` that is not False: it must be True, with a residual and a lossy spec."""
    if feedback is not True:
        raise ArgumentError(f"feedback must be True or False, got {shown(feedback)}")
    if residual is None:
        raise ArgumentError(
            "feedback=True needs residual=, a float32 tensor of as many values as x, all 0 before the first frame"
        )
    if is_lossless(spec):
        raise SpecError(f"feedback=True is for lossy specs: {type(spec).__name__} has no residual")
    return True


def _view_residual(residual: Any, v: TensorView) -> TensorView:
    r = view_output(residual, name="residual=")
    n = v.nbytes // ITEMSIZE[v.dtype]
    if r.dtype != "float32" or r.nbytes // 4 != n:
        given = f"{r.nbytes // ITEMSIZE[r.dtype]} values of {r.dtype}"
        raise ArgumentError(f"residual= must be float32 with as many values as x ({n}), got {given}")
    return r
