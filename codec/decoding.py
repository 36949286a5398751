"""Frames to tensors, and to sums of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from codec._c import pool
from codec._c.library import MANTISSA_BITS
from codec.arguments import float32, shown, truth, whole
from codec.codebook import Codebook, given_codebooks
from codec.engines import Engine, choose
from codec.engines.request import DecodeRequest
from codec.errors import ArgumentError, Status
from codec.inspection import inspect
from codec.tensors.view import TensorView, device_like, kind_of, mark_written, new, view_bytes, view_output


def decode(
    frame: Any,
    *,
    out: Any = None,
    like: Any = None,
    engine: str | None = None,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int | None = None,
    threads: int | None = None,
    metric: Any = None,
    state: Mapping[str, Any] | None = None,
    check_first: bool = True,
    head: Any = None,
    nontemporal: bool = False,
) -> Any:
    """Decode a frame.

    Parameters
    ----------
    frame : bytes or buffer
        A frame, whole, with nothing behind it.
    out : array or tensor, optional
        Where to put the values: contiguous, writable, of the frame's shape and dtype, apart from the frame. For the
        bits alone it may also be of unsigned integers, or of a dtype that cannot be encoded, such as complex64, if its
        items are as large. All of the frame is checked before the first byte is written, so that after any error `out`
        is as it was.
    like : array or tensor, optional
        Return a tensor of this one's kind; a torch tensor, for example.
    engine : str, optional
        One of :func:`engines`. Left out: the one for the GPU on which `out`, `like` or the frame lies, if one does.
    codebooks : Codebook or sequence of Codebook, optional
        Those that the frame may name.
    max_nbytes : int, optional
        Largest tensor to make, in bytes; nothing is allocated for a frame that declares more. Left out: 1 GiB, or 256
        times the frame's own bytes if that is more, which only frames of nearly constant tensors could exceed. A
        tensor that is given as `out` may have any size.
    threads : int, optional
        As in :func:`encode`.
    metric, state : optional
        What the sender had, for frames of :class:`codec.Truncate` with shared levels.
    check_first : bool
        False: write to `out` while the frame is checked. That saves a pass, and after an error `out` holds anything.
    head : bytes or buffer, optional
        The first bytes of a frame on a GPU, if they are at hand: 4,096 are mostly enough. Then they need not be copied
        from there, which is waited for. Elsewhere it is ignored.
    nontemporal : bool
        True: the values will not be read soon, `out` being part of something larger than the caches, say; they are
        written past them, as those of tensors of 8 MiB or more are. The values are the same.

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
    ArgumentError
        `out` does not fit the frame.
    EngineError
        An argument lies on a device that the engine cannot read, or the engine cannot be used here.

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
    v = view_bytes(frame)
    fields = (
        (v,),
        out,
        like,
        given_codebooks(codebooks) if codebooks is not None else (),
        None if max_nbytes is None else check_limit(max_nbytes),
        None if threads is None else pool.check_threads(threads),
        metric,
        state,
        truth("check_first", check_first),
        None if head is None else view_bytes(head),
        truth("nontemporal", nontemporal),
        False,
        False,
    )
    r: DecodeRequest = new(DecodeRequest, fields)
    try:
        return engine_for(engine, v, out, like).decode(r)
    except ArgumentError as e:
        explain(e, v, out)
        raise
    finally:
        if out is not None:
            mark_written(out)


def check_values(frame: Any, out: Any, *, threads: int | None = None) -> None:
    """Raise what :func:`decode` of a frame that needs no state would; `out`, in host memory, is not written."""
    v = view_bytes(frame)
    try:
        engine_for(None, v, out, None).decode(DecodeRequest((v,), out, threads=threads, check_only=True))
    except ArgumentError as e:
        explain(e, v, out)
        raise


def explain(error: ArgumentError, frame: TensorView, out: Any, *, adds: bool = False) -> None:
    """Have an error say of a tensor that does not go with a frame what both are. `adds`: to float32."""
    if error.code == Status.SHAPE_MISMATCH:
        info, o = inspect(frame.owner), view_output(out)
        dtype = "float32" if adds else info.dtype
        error.args = (f"the frame needs an out= of {dtype} and shape {info.shape}, not of {o.dtype} and {o.shape}",)
    elif error.code == Status.BAD_DTYPE:
        floats = ", ".join(MANTISSA_BITS)
        error.args = (f"a frame of {inspect(frame.owner).dtype} cannot be added up, only those of {floats}",)
    elif error.code == Status.NONFINITE:
        error.args = ("the result holds NaN or Inf",)


def engine_for(engine: Any, frame: TensorView, out: Any, like: Any) -> Engine:
    """The engine asked for, or the one for where the result is to be; if that is the host, where the frame is."""
    name, device = ("out=", device_like(out)) if out is not None else ("like=", device_like(like))
    return choose(engine, name, device) if device != "cpu" else choose(engine, "the frame", frame.device)


def check_limit(max_nbytes: Any) -> int:
    """The argument as an int."""
    return whole("max_nbytes", max_nbytes, 0, (1 << 64) - 1)


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
    check_first: bool = True,
    head: Any = None,
) -> Any:
    """Add a frame's values to a tensor: ``out += weight * decode(frame)``, without the tensor in between.

    Parameters
    ----------
    frame : bytes or buffer
        A frame of float32, bfloat16 or float16 values, whole.
    out : float32 array or tensor
        Of the frame's shape, contiguous. Product and sum are rounded to float32; of a sum that is NaN, which one is up
        to the machine. All of the frame is checked before the first value is changed, so that after any error `out` is
        as it was.
    weight : float
        As float32.
    engine, codebooks, threads, metric, state, check_first, head
        As in :func:`decode`.

    Returns
    -------
    array or tensor
        `out`.

    Raises
    ------
    FrameError, StateError
        As in :func:`decode`.
    ArgumentError
        `out` does not fit the frame.

    Examples
    --------
    >>> total = np.zeros(1000, np.float32)
    >>> frame = codec.encode(np.ones(1000, np.float32), codec.Sign())
    >>> codec.accumulate(frame, total, weight=0.5)[:3]
    array([0.5, 0.5, 0.5], dtype=float32)
    """
    if threads is not None:
        threads = pool.check_threads(threads)
    factor = _weight_of(weight)
    v = view_bytes(frame)
    books = given_codebooks(codebooks) if codebooks is not None else ()
    first = None if head is None else view_bytes(head)
    check_first = truth("check_first", check_first)
    r = DecodeRequest((v,), out, None, books, None, threads, metric, state, check_first, first)
    try:
        engine_for(engine, v, out, None).accumulate(r, factor)
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


def _views_of(frames: Any) -> list[TensorView]:
    one = getattr(frames, "ndim", 2) < 2 or type(frames) in (str, bytes, bytearray) or hasattr(frames, "keys")
    if one or not hasattr(frames, "__iter__"):
        raise ArgumentError(f"frames must be a sequence of frames, not {kind_of(frames)}")
    return [view_bytes(frame) for frame in frames]


_OPS = {"mean": "mean", "decode_average": "mean", "sum": "sum", "max": "max"}


def reduce(
    frames: Sequence[Any],
    op: str = "mean",
    *,
    out: Any = None,
    like: Any = None,
    engine: str | None = None,
    codebooks: Codebook | Sequence[Codebook] | None = None,
    max_nbytes: int | None = None,
    threads: int | None = None,
    metric: Any = None,
    state: Mapping[str, Any] | None = None,
    check_first: bool = True,
    nontemporal: bool = False,
    check_finite: bool = False,
) -> Any:
    """Decode frames of one shape to their sum, mean or maximum, in float32.

    Frames are added in the order given, each addition rounded to float32, so that ranks with the same list get the same
    bits; only of a sum or mean that is NaN, which one is up to the machine: GPUs and CPUs differ. Codes of ternary
    frames with one scale are added as integers and scaled once. Frames of one codec are decoded block by block, so that
    the result is written to memory once.

    Parameters
    ----------
    frames : sequence of bytes or buffers
        One or more frames of float32, bfloat16 or float16 values.
    op : {"mean", "decode_average", "sum", "max"}
        The mean is the sum divided by the number of frames; "decode_average" is another name for it.
    out : float32 array or tensor, optional
        Where to put the result. All frames are checked first, so that after any error it is as it was.
    like, engine, codebooks, max_nbytes, threads, metric, state, check_first, nontemporal
        As in :func:`decode`; `max_nbytes` is that of the result, by default 1 GiB or 256 times the largest frame.
    check_finite : bool
        Whether NaN and Inf in the result, such as a sum that overflows, are an error. It is found as the result is
        made: `out` then holds anything.

    Returns
    -------
    numpy.ndarray of float32, or the kind of `like` or `out`

    Raises
    ------
    FrameError, StateError
        As in :func:`decode`, for any of the frames.
    ArgumentError
        No frames, shapes that differ, an `out` that does not fit them; or by `check_finite`.

    Examples
    --------
    >>> frames = [codec.encode(np.full(1000, rank, np.float32)) for rank in range(4)]
    >>> codec.reduce(frames, "mean")[:3]
    array([1.5, 1.5, 1.5], dtype=float32)
    """
    if threads is not None:
        threads = pool.check_threads(threads)
    most = None if max_nbytes is None else check_limit(max_nbytes)
    if not isinstance(op, str) or op not in _OPS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"op must be one of {tuple(_OPS)}, got {shown(op)}")
    views = _views_of(frames)
    if not views:
        raise ArgumentError("there are no frames to reduce")
    books = given_codebooks(codebooks) if codebooks is not None else ()
    given = (views, out, like, books, most, threads, metric, state, truth("check_first", check_first))
    nontemporal, check_finite = truth("nontemporal", nontemporal), truth("check_finite", check_finite)
    r = DecodeRequest(*given, nontemporal=nontemporal, check_finite=check_finite)
    try:
        return engine_for(engine, views[0], out, like).reduce(r, _OPS[op])
    except ArgumentError as e:
        wrong = (v for v in views if inspect(v.owner).dtype not in MANTISSA_BITS)
        explain(e, next(wrong, views[0]), out, adds=True)
        raise
    finally:
        mark_written(out)
