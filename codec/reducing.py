"""Sums, means and maxima of the tensors of several frames."""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args, overload

import numpy as np

from codec._c.library import MANTISSA_BITS
from codec._options import CallOptions, settings_of
from codec.arguments import float32, shown, truth
from codec.codebook import Codebook
from codec.decoding import decode_request, engine_for, explain
from codec.errors import ArgumentError
from codec.inspection import inspect, views_of
from codec.specs import BoundSpec
from codec.tensors.jax_arrays import of_kind
from codec.tensors.view import mark_written, view_bytes

Tensor = TypeVar("Tensor")
Float32Array = np.ndarray[Any, np.dtype[np.float32]]


def accumulate(
    frame: Any,
    out: Tensor,
    spec: BoundSpec | None = None,
    *,
    weight: float = 1.0,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    options: CallOptions | None = None,
) -> Tensor:
    """Add a frame's values to a tensor: ``out += weight * decode(frame)``, without an intermediate tensor.

    Parameters
    ----------
    frame : bytes or buffer
        Whole frame of float32, bfloat16 or float16 values.
    out : float32 array or tensor
        Contiguous tensor of the frame's shape. Product and sum are each rounded to float32; the payload of a NaN sum
        depends on the machine. After an error `out` is unchanged, unless the options have ``verify_first=False``.
    spec : BoundSpec, optional
        As in :func:`decode`.
    weight : float
        Factor by which the frame's values are multiplied, rounded to float32.
    codebooks, options
        As in :func:`decode`.

    Returns
    -------
    array or tensor
        `out`.

    Raises
    ------
    FrameError, StateError, EngineError
        As in :func:`decode`.
    ArgumentError
        `out` does not fit the frame, or `weight` is not a number that float32 can hold.
    SpecError
        `spec` is not a bound spec.

    Examples
    --------
    >>> total = np.zeros(1000, np.float32)
    >>> frame = codec.encode(np.ones(1000, np.float32), codec.Sign())
    >>> codec.accumulate(frame, total, weight=0.5)[:3]
    array([0.5, 0.5, 0.5], dtype=float32)
    """
    settings, factor = settings_of(options), _weight_of(weight)
    v = view_bytes(frame)
    r = decode_request((v,), spec, settings, out, None, codebooks)
    try:
        engine_for(settings.engine, v, out, None).accumulate(r, factor)
    except ArgumentError as e:
        explain(e, v, out, adds=True)
        raise
    finally:
        mark_written(out)
    return out


def _weight_of(weight: Any) -> float:
    try:
        number = None if isinstance(weight, str | bytes) else float(weight)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or (math.isfinite(number) and not math.isfinite(float32(number) or 0)):
        raise ArgumentError(f"weight must be a number that float32 can hold, got {shown(weight)}")
    return number


Op = Literal["mean", "sum", "max"]
_OPS = get_args(Op)


@overload
def reduce(
    frames: Sequence[Any],
    spec: BoundSpec | None = None,
    *,
    op: Op = "mean",
    out: None = None,
    like: None = None,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int | None = None,
    check_finite: bool = False,
    options: CallOptions | None = None,
) -> Float32Array: ...
@overload
def reduce(
    frames: Sequence[Any],
    spec: BoundSpec | None = None,
    *,
    op: Op = "mean",
    out: Tensor,
    like: Any = None,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int | None = None,
    check_finite: bool = False,
    options: CallOptions | None = None,
) -> Tensor: ...
@overload
def reduce(
    frames: Sequence[Any],
    spec: BoundSpec | None = None,
    *,
    op: Op = "mean",
    out: None = None,
    like: Tensor,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int | None = None,
    check_finite: bool = False,
    options: CallOptions | None = None,
) -> Tensor: ...
def reduce(
    frames: Sequence[Any],
    spec: BoundSpec | None = None,
    *,
    op: Op = "mean",
    out: Any = None,
    like: Any = None,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int | None = None,
    check_finite: bool = False,
    options: CallOptions | None = None,
) -> Any:
    """Return the sum, mean or maximum of the tensors in several frames of equal shape, in float32.

    Frames are added in the order given, and each addition is rounded to float32. The result is therefore bit-identical
    on all ranks that pass the same list; only the payload of a NaN depends on the machine. Ternary frames with one
    scale are added as integers and scaled once; :func:`sum_codes` returns the integers. If all frames have the same
    codec, they are decoded block by block, so that the result is written to memory once.

    Parameters
    ----------
    frames : sequence of bytes or buffers
        One or more frames of float32, bfloat16 or float16 values.
    spec : BoundSpec, optional
        As in :func:`decode`, for all frames.
    op : {"mean", "sum", "max"}
        The mean is the sum divided by the number of frames.
    out : float32 array or tensor, optional
        Receives the result. After an error it is unchanged, unless the options have ``verify_first=False`` or
        `check_finite` finds NaN or Inf.
    like, codebooks, options
        As in :func:`decode`.
    max_nbytes : int, optional
        Upper bound of the size of a new result, in bytes. Default: 1 GiB, or 256 times the size of the largest frame
        if that is more.
    check_finite : bool
        True: raise ArgumentError if the result contains NaN or Inf, for example because a sum overflows; `out` is then
        undefined.

    Returns
    -------
    numpy.ndarray of float32, or `out`, or a tensor of the kind of `like`

    Raises
    ------
    FrameError, StateError, EngineError
        As in :func:`decode`, for any of the frames.
    ArgumentError
        There are no frames, shapes differ, `out` does not fit them, or `check_finite` finds NaN or Inf.
    SpecError
        `spec` is not a bound spec.

    Examples
    --------
    >>> frames = [codec.encode(np.full(1000, rank, np.float32)) for rank in range(4)]
    >>> codec.reduce(frames, op="mean")[:3]
    array([1.5, 1.5, 1.5], dtype=float32)
    """
    settings = settings_of(options)
    if isinstance(spec, str) and spec in _OPS:
        raise ArgumentError(f"op must be a keyword argument: reduce(frames, op={spec!r})")
    if not isinstance(op, str) or op not in _OPS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"op must be one of {', '.join(map(repr, _OPS))}, got {shown(op)}")
    views = views_of(frames)
    if not views:
        raise ArgumentError("frames is empty: pass at least one frame")
    r = decode_request(views, spec, settings, out, like, codebooks, max_nbytes)
    if check_finite is not False:
        r = r._replace(check_finite=truth("check_finite", check_finite))
    try:
        result = engine_for(settings.engine, views[0], out, like).reduce(r, op)
        return result if like is None else of_kind(result, like)
    except ArgumentError as e:
        wrong = (v for v in views if inspect(v.owner).dtype not in MANTISSA_BITS)
        explain(e, next(wrong, views[0]), out, adds=True)
        raise
    finally:
        mark_written(out)
