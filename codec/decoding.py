"""Decoding of frames to tensors."""

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from codec._c.library import MANTISSA_BITS
from codec._options import CallOptions, settings_of
from codec.arguments import shown, whole
from codec.codebook import Codebook, given_codebooks
from codec.engines import Engine, choose
from codec.engines.request import DecodeRequest
from codec.errors import ArgumentError, SpecError, Status
from codec.inspection import inspect
from codec.specs import BoundSpec, Delta
from codec.tensors.jax_arrays import of_kind
from codec.tensors.view import Array, TensorView, device_like, mark_written, view_bytes, view_output

Tensor = TypeVar("Tensor")


@overload
def decode(
    frame: Any,
    spec: BoundSpec | None = None,
    *,
    base: Any = None,
    out: None = None,
    like: None = None,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> Array: ...
@overload
def decode(
    frame: Any,
    spec: BoundSpec | None = None,
    *,
    base: Any = None,
    out: Tensor,
    like: Any = None,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> Tensor: ...
@overload
def decode(
    frame: Any,
    spec: BoundSpec | None = None,
    *,
    base: Any = None,
    out: None = None,
    like: Tensor,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> Tensor: ...
def decode(
    frame: Any,
    spec: BoundSpec | None = None,
    *,
    base: Any = None,
    out: Any = None,
    like: Any = None,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int | None = None,
    options: CallOptions | None = None,
) -> Any:
    """Decode a frame.

    Parameters
    ----------
    frame : bytes or buffer
        Whole frame, without trailing bytes.
    spec : BoundSpec, optional
        Spec bound to the sender's optimizer and state, by :meth:`Truncate.bind`: for frames of :class:`Truncate` with
        shared levels. Other frames describe themselves and ignore it.
    base : array or tensor, optional
        Tensor that the changes in a frame of :class:`Delta` apply to, of the frame's shape and dtype, or the bits of
        one as unsigned integers. Other frames ignore it.
    out : array or tensor, optional
        Memory for the values: contiguous, writable, of the frame's shape and dtype, and apart from the frame. It may be
        `base`, which is then updated in place. It may
        also have unsigned integers, or a dtype that cannot be encoded such as complex64, of the same itemsize, and then
        gets the bits. It is unchanged after an error, unless the options have ``verify_first=False``.
    like : array or tensor, optional
        Return a tensor of the kind of this one, such as a torch tensor or an array of JAX. Its dtype and shape do not
        matter.
    codebooks : Codebook or sequence of Codebook, optional
        Codebooks that the frame may name.
    max_nbytes : int, optional
        Upper bound of the size of a new tensor, in bytes; nothing is allocated for a frame that declares more. Default:
        1 GiB, or 256 times the size of the frame if that is more. A tensor given as `out` may have any size, and so may
        the result of :class:`Delta`, which is as large as `base`.
    options : CallOptions, optional
        Engine, threads, ``verify_first`` and ``nontemporal``, made by :func:`options`.

    Returns
    -------
    numpy.ndarray, or `out`, or a tensor of the kind of `like`
        Tensor of the frame's shape and dtype; for a frame on a GPU a tensor there. bfloat16 and float8 need ml_dtypes,
        `out` or `like`.

    Raises
    ------
    FrameError
        The bytes are no frame, are damaged (`ChecksumError`), need a later version (`UnsupportedError`) or declare too
        large a tensor (`LimitError`).
    StateError
        The frame names a codebook that is not among `codebooks`, or needs a bound spec or a base that is missing or
        that is not the sender's, or the base equals the frame's result already.
    ArgumentError
        `out` or `base` does not fit the frame, or `like` is an array of JAX, which lacks the frame's dtype.
    SpecError
        `spec` is not a bound spec.
    EngineError
        An argument lies on a device that the engine cannot read, or the engine cannot be used on this machine.

    Examples
    --------
    >>> x = np.arange(10_000, dtype=np.float32)
    >>> frame = codec.encode(x)
    >>> out = np.empty_like(x)
    >>> codec.decode(frame, out=out) is out and bool((out == x).all())
    True
    >>> codec.decode(frame[:-1])
    Traceback (most recent call last):
    codec.errors.FrameError: the frame is truncated ...
    """
    settings = settings_of(options)
    v = view_bytes(frame)
    r = decode_request((v,), spec, settings, out, like, codebooks, max_nbytes, base)
    try:
        result = engine_for(settings.engine, v, out, like).decode(r)
        return result if like is None else of_kind(result, like)
    except ArgumentError as e:
        explain(e, v, out)
        raise
    finally:
        if out is not None:
            mark_written(out)


def decode_request(
    frames: Sequence[TensorView],
    spec: Any,
    settings: CallOptions,
    out: Any = None,
    like: Any = None,
    codebooks: Any = None,
    max_nbytes: Any = None,
    base: Any = None,
) -> DecodeRequest:
    """Return the checked arguments of :func:`decode` or :func:`reduce`, with the settings of the call."""
    fields = (
        frames,
        out,
        like,
        given_codebooks(codebooks) if codebooks is not None else (),
        None if max_nbytes is None else check_limit(max_nbytes),
        settings.threads,
        None if spec is None else check_bound(spec),
        settings.verify_first is not False,
        None,  # head
        settings.nontemporal is True,
        False,  # check_finite
        False,  # check_only
        base,
        None,  # arriving
        False,  # in_flight
    )
    return DecodeRequest._make(fields)  # twice as fast as a call of the class; a missing field is a TypeError, too


def check_bound(spec: Any) -> BoundSpec:
    """Return ``spec=`` of decoding if it is a bound spec."""
    if not isinstance(spec, BoundSpec):
        raise SpecError(
            "spec= of decoding is a spec bound to the sender's optimizer, Truncate(...).bind(optimizer, theta=...), "
            f"which only frames with shared levels need; got {shown(spec)}"
        )
    return spec


def check_values(frame: Any, out: Any, *, options: CallOptions | None = None) -> None:
    """Raise the errors of :func:`decode`, for a frame that needs no bound spec; `out`, on the host, is not written."""
    v = view_bytes(frame)
    settings = settings_of(options)
    try:
        engine_for(settings.engine, v, out, None).decode(
            DecodeRequest((v,), out, threads=settings.threads, check_only=True)
        )
    except ArgumentError as e:
        explain(e, v, out)
        raise


def explain(error: ArgumentError, frame: TensorView, out: Any, *, adds: bool = False) -> None:
    """Replace the message of an error for a tensor that does not fit a frame by one that names both.

    Parameters
    ----------
    error : ArgumentError
        Error that an engine has raised.
    frame : TensorView
        The frame.
    out : array or tensor
        The tensor.
    adds : bool
        True if values are added to `out`, which is float32 then.
    """
    if adds and isinstance(inspect(frame.owner).spec, Delta):
        error.args = ("a frame of Delta holds changes, which cannot be added up: decode it with base=, add its values",)
    elif error.code == Status.SHAPE_MISMATCH:
        info, o = inspect(frame.owner), view_output(out)
        dtype = "float32" if adds else info.dtype
        error.args = (f"the frame needs an out= of {dtype} and shape {info.shape}, not of {o.dtype} and {o.shape}",)
    elif error.code == Status.BAD_DTYPE:
        *most, last = reversed(MANTISSA_BITS)
        error.args = (
            f"a frame of {inspect(frame.owner).dtype} cannot be added up, only those of {', '.join(most)} or {last}: "
            "decode it, and add its values",
        )
    elif error.code == Status.NONFINITE:
        error.args = (
            "the result holds NaN or Inf: a frame does, or a sum overflows float32; scale the tensors down before they "
            "are encoded",
        )


def engine_for(engine: Any, frame: TensorView, out: Any, like: Any) -> Engine:
    """Return the engine of a name. None: return the engine for the device of the result if given, else of the frame."""
    name, device = ("out=", device_like(out)) if out is not None else ("like=", device_like(like))
    return choose(engine, name, device) if device != "cpu" else choose(engine, "the frame", frame.device)


def check_limit(max_nbytes: Any) -> int:
    """Return the value of ``max_nbytes=`` as an int."""
    return whole("max_nbytes", max_nbytes, 0, (1 << 64) - 1)
