"""Decoding of frames to tensors."""

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from codec._c.library import MANTISSA_BITS
from codec._options import CallOptions, settings_of
from codec.arguments import shown, whole
from codec.codebook import Codebook, given_codebooks
from codec.engines import Engine, choose
from codec.engines.request import DecodeRequest, new_decode_request
from codec.engines.small import decode_small
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
        Spec bound by :meth:`Truncate.bind` to the same optimizer and state as the sender's. Required for frames of
        :class:`Truncate` with shared levels; all other frames are self-describing and ignore it.
    base : array or tensor, optional
        Tensor to which the changes in a frame of :class:`Delta` are applied. It has the frame's shape and dtype, or
        holds the same bits as unsigned integers. Other frames ignore it.
    out : array or tensor, optional
        Receives the values: contiguous, writable, of the frame's shape and dtype, and not overlapping the frame. If
        `out` is `base`, it is updated in place. `out` may also hold unsigned integers, or a dtype that cannot be
        encoded such as complex64, of the same itemsize; the values' bits are then copied to it. After an error it is
        unchanged, unless the options have ``verify_first=False``.
    like : array or tensor, optional
        Example of the result's type and device, such as a torch tensor or a JAX array. Its dtype and shape are ignored.
    codebooks : Codebook or sequence of Codebook, optional
        Codebooks among which the one named by the frame is looked up.
    max_nbytes : int, optional
        Upper bound of the size of a new tensor, in bytes. A frame that declares a larger tensor is refused before
        memory is allocated. Default: 1 GiB, or 256 times the size of the frame if that is more. The limit applies
        neither to `out` nor to the result of :class:`Delta`, which is as large as `base`.
    options : CallOptions, optional
        Engine, threads and ``verify_first``, made by :func:`options`.

    Returns
    -------
    numpy.ndarray, or `out`, or a tensor of the kind of `like`
        Tensor of the frame's shape and dtype, on the frame's GPU if the frame lies on one. bfloat16 and float8 need
        ml_dtypes, `out` or `like`.

    Raises
    ------
    FrameError
        The bytes are not a frame, are damaged (`ChecksumError`), need a later version of the library
        (`UnsupportedError`) or declare a tensor larger than `max_nbytes` (`LimitError`).
    StateError
        The frame names a codebook that is not in `codebooks`; the bound spec or the base is missing or differs from the
        sender's; or the base already equals the frame's result.
    ArgumentError
        `out` or `base` does not fit the frame, or `like` is a JAX array and JAX lacks the frame's dtype.
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
    try:
        result = None
        if (
            spec is base is codebooks is max_nbytes is settings.engine is None
            and (settings.threads or 1) == 1
            and (like is None or device_like(like) == "cpu")
        ):
            result = decode_small(v, out, like, settings.verify_first is not False)
        if result is None:
            r = decode_request((v,), spec, settings, out, like, codebooks, max_nbytes, base)
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
    return new_decode_request(
        frames,
        out,
        like,
        given_codebooks(codebooks) if codebooks is not None else (),
        None if max_nbytes is None else check_limit(max_nbytes),
        settings.threads,
        None if spec is None else check_bound(spec),
        settings.verify_first is not False,
        settings.nontemporal,
        base,
    )


def check_bound(spec: Any) -> BoundSpec:
    """Return the argument ``spec=`` of a decoding call; raise SpecError if it is not a bound spec."""
    if not isinstance(spec, BoundSpec):
        raise SpecError(
            "spec= must be a spec bound to the sender's optimizer, Truncate(...).bind(optimizer, theta=...), got "
            f'{shown(spec)}. Only frames of Truncate(level_coding="shared") need spec=: leave it out for others'
        )
    return spec


def check_values(frame: Any, out: Any, *, options: CallOptions | None = None) -> None:
    """Check that a frame can be decoded into `out`, a host tensor, and write nothing. Bound specs are not supported."""
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
    """Replace the message of an engine's error by one that names the frame's and the tensor's dtype and shape.

    Parameters
    ----------
    error : ArgumentError
        Error that an engine has raised; its arguments are replaced.
    frame : TensorView
        Bytes of the frame.
    out : array or tensor
        Tensor passed as ``out=``.
    adds : bool
        True if the frame's values are added to `out`, which must then be float32.
    """
    if adds and isinstance(inspect(frame.owner).spec, Delta):
        error.args = (
            "a frame of Delta holds differences from a base, which cannot be added up: decode the frame with base=, "
            "and add its values",
        )
    elif error.code == Status.SHAPE_MISMATCH:
        info, o = inspect(frame.owner), view_output(out)
        dtype = "float32" if adds else info.dtype
        error.args = (f"out= must be {dtype} of shape {info.shape} for this frame, got {o.dtype} of shape {o.shape}",)
    elif error.code == Status.BAD_DTYPE:
        *most, last = reversed(MANTISSA_BITS)
        error.args = (
            f"only frames of {', '.join(most)} or {last} can be added up, got one of {inspect(frame.owner).dtype}: "
            "decode it, and add its values",
        )
    elif error.code == Status.NONFINITE:
        error.args = (
            "the result holds NaN or Inf, because a frame holds them or a sum overflows float32: scale the tensors "
            "down before they are encoded",
        )


def engine_for(engine: Any, frame: TensorView, out: Any, like: Any) -> Engine:
    """Return the engine named `engine`; None: the engine for the device of `out` or `like`, else of `frame`."""
    name, device = ("out=", device_like(out)) if out is not None else ("like=", device_like(like))
    return choose(engine, name, device) if device != "cpu" else choose(engine, "the frame", frame.device)


def check_limit(max_nbytes: Any) -> int:
    """Return the argument ``max_nbytes=`` as an int; raise ArgumentError if it is not one, or negative."""
    return whole("max_nbytes", max_nbytes, 0, (1 << 64) - 1)
