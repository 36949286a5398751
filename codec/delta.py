"""Updates of tensors by frames of Delta: parts of them, and several as one."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from codec import _call
from codec._c.library import DTYPE_NAMES, ITEMSIZE, check, ffi, lib
from codec._call import new_tensor
from codec._options import CallOptions
from codec.arguments import shown, whole
from codec.decoding import decode
from codec.encoding import encode
from codec.errors import ArgumentError, CodecError, SpecError
from codec.inspection import check_frame, inspect, read_header
from codec.reducing import views_of
from codec.specs import Delta
from codec.tensors.view import Array, TensorView, empty, fetch, mark_written, view_base, view_bytes, view_output
from codec.tensors.wrapper import view as make_view


def compose(
    frames: Sequence[Any], spec: Delta | None = None, *, base: Any, options: CallOptions | None = None
) -> bytes:
    """Return one frame that has the effect of several updates in a row.

    A receiver that is behind applies it in place of all of them. It is smaller than they are together, because values
    that change several times are sent once: 60% smaller for 16 steps of RL training.

    Parameters
    ----------
    frames : sequence of bytes or buffers
        Frames of :class:`Delta`, in the order of their application: each one's base is the result of the one before.
    spec : Delta, optional
        Spec of the new frame.
    base : array or tensor
        Base of the first frame, in host memory. Classes of values follow it, so that frames alone do not suffice.
    options : CallOptions, optional
        Engine and threads, made by :func:`options`.

    Returns
    -------
    bytes

    Raises
    ------
    ArgumentError
        There are no frames, or one has another dtype or shape.
    StateError
        A frame was not made against the result of the one before. Its ``item`` is its index, with which the message
        begins.
    FrameError, SpecError, EngineError
        As in :func:`decode` and :func:`encode`.

    Examples
    --------
    >>> a, b, c = np.zeros(1000, np.float32), np.ones(1000, np.float32), np.full(1000, 2, np.float32)
    >>> steps = [codec.encode(b, codec.Delta(), base=a), codec.encode(c, codec.Delta(), base=b)]
    >>> both = codec.compose(steps, base=a)
    >>> both == codec.encode(c, codec.Delta(), base=a)
    True
    """
    spec = Delta() if spec is None else spec
    if not isinstance(spec, Delta):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpecError(f"spec= of compose is Delta(), got {shown(spec)}")
    views = views_of(frames)
    if not views:
        raise ArgumentError("there are no frames to compose")
    info = inspect(frames[0])
    kind = np.dtype(f"u{ITEMSIZE[info.dtype]}")
    old = fetch("base=", view_base(base, info.dtype))
    bits = np.frombuffer(ffi.buffer(old.data, old.nbytes), kind).reshape(old.shape)
    result, now = np.empty_like(bits), bits
    for i, frame in enumerate(frames):
        try:
            decode(frame, base=now, out=result, options=options)
        except CodecError as e:
            e.of(i)
            raise
        now = result
    return encode(make_view(result, info.dtype), spec, base=make_view(bits, info.dtype), options=options)


def decode_blocks(frame: Any, first: int, count: int, *, base: Any, out: Any = None) -> Any:
    """Decode some blocks of a frame of :class:`Delta`, for a rank that holds a shard of the tensor.

    Block i has the values i * ``info.block`` to (i + 1) * ``info.block`` - 1 of the flat tensor, ``info`` from
    :func:`inspect`; the last one may be shorter.

    Parameters
    ----------
    frame : bytes or buffer
        Whole frame.
    first, count : int
        Blocks [first, first + count).
    base : array or tensor
        The values of these blocks, flat, in host memory, or their bits as unsigned integers. The digests of a frame are
        those of whole tensors: this function cannot find out if the values are those that the frame was made against.
    out : array or tensor, optional
        Memory for the values of these blocks. It may be `base`, and is unchanged after an error.

    Returns
    -------
    numpy.ndarray, or `out`
        Values of the blocks. bfloat16 and float8 need ml_dtypes or `out`.

    Raises
    ------
    FrameError
        The frame is damaged, or not valid with this base.
    ArgumentError
        The frame has no such blocks, or `base` or `out` does not fit them.

    Examples
    --------
    >>> old, new = np.zeros(400_000, np.float32), np.ones(400_000, np.float32)
    >>> frame = codec.encode(new, codec.Delta(), base=old)
    >>> n = codec.inspect(frame).block
    >>> shard = old[n : 3 * n].copy()
    >>> bool((codec.decode_blocks(frame, 1, 2, base=shard, out=shard) == 1).all())
    True
    """
    v = fetch("a frame", view_bytes(frame))
    check_frame(v)  # damage is reported before an argument that does not fit
    info = read_header(v)
    if info.spec.codec != lib.CODEC_DELTA:
        raise ArgumentError("decode_blocks is for frames of Delta")
    dtype = DTYPE_NAMES[info.dtype]
    nblocks, n = info.nblocks or min(info.n, 1), info.n  # a frame without blocks changes nothing: one block
    block = info.block_nvalues or n
    first, count = whole("first", first, 0, nblocks), whole("count", count, 0)
    if count > nblocks - first:
        raise ArgumentError(f"the frame has {nblocks} blocks, not {first + count}")
    size = (min((first + count) * block, n) - min(first * block, n)) * ITEMSIZE[dtype]
    part = fetch("base=", view_base(base, dtype))
    if part.dtype != dtype or part.nbytes != size:
        raise ArgumentError(f"base= must have {size // ITEMSIZE[dtype]} {dtype} values, as many as these blocks")
    result: Any = _new(part, dtype) if out is None else out
    to = view_output(result, dtype)
    if to.dtype != dtype or to.nbytes != size:
        raise ArgumentError(f"out= must have {size // ITEMSIZE[dtype]} {dtype} values, as many as these blocks")
    call = _call.take()
    check(
        lib.codec_scratch(ffi.addressof(info.spec), new_tensor(info.dtype, tuple(info.shape[0 : info.rank])), call.size)
    )
    scratch, room = call.scratch(call.size[0]), call.size[0]
    arguments = v.data, v.nbytes, first, count, part.data, to.data, size, call.context, scratch, room
    check(lib.codec_decode_part(*arguments), call.fault)
    _call.give(call)
    mark_written(result)
    return result


def _new(part: TensorView, dtype: str) -> Array:
    """Return a new array for the values of a part."""
    return empty(dtype, (part.nbytes // ITEMSIZE[dtype],), None)[0]
