"""Helpers of all calls: find the arguments' device and stream, open destinations, plan reductions."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from codec._c.library import lib
from codec.engines.cuda.batch_decode import DecodeStep
from codec.engines.cuda.decoding import DeviceSink, Frame
from codec.engines.cuda.devices import device_for
from codec.engines.cuda.header import DeviceHeader
from codec.engines.cuda.workspace import CallMemory
from codec.engines.native.decoding import is_bounded
from codec.engines.request import DecodeRequest
from codec.errors import EngineError
from codec.tensors.view import TensorView, device_like, empty, view, view_output, with_bits

STORE, ADD, MAX, FLOAT32 = lib.CODEC_INTO_STORE, lib.CODEC_INTO_ADD, lib.CODEC_INTO_MAX, lib.CODEC_INTO_FLOAT32
_SUMMED = 32  # maximum number of frames that one launch of native/cuda/rows/reduce.cu adds up
Named = Sequence[tuple[str, TensorView]]
NO_VIEWS: Named = ()


@contextmanager
def working(views: Named, *, waits: bool = True) -> Generator[CallMemory]:
    """Yield a :class:`CallMemory` on the arguments' device, which uses the stream of the first argument.

    On entry, this stream waits for the streams of all other arguments; on exit, they wait for this stream. `waits`:
    True if the host waits for a result, now or later.

    Raises
    ------
    EngineError
        The stream is captured in a CUDA graph, and the host would wait for it. The capture stays valid.
    """
    device = device_for(views)
    streams = [(v.stream, v.owner) for _, v in views if v.device != "cpu" and v.stream is not None]
    stream, like = streams[0] if streams else (device.stream(), None)
    others = {other for other, _ in streams} - {stream}
    with device.on(stream):
        if waits and device.capturing():
            raise EngineError(
                "a call that waits for the GPU cannot be captured in a CUDA graph: capture encode_async() only, and "
                "make other calls outside of the graph"
            )
        for other in others:
            device.wait_for(other)
        yield CallMemory(device, stream, like)
        for other in others:
            device.delay(other)


def views_of(r: DecodeRequest) -> Named:
    """Return names and views of those tensors among a request's arguments that lie on a device."""
    named = [("the frame", frame) for frame in r.frames]
    if r.out is not None and device_like(r.out) != "cpu":
        named.append(("out=", view_output(r.out)))
    elif r.out is None and r.like is not None and device_like(r.like) != "cpu":
        named.append(("like=", view(r.like)))
    if r.base is not None and device_like(r.base) != "cpu":
        named.append(("base=", view(r.base)))
    if r.bound is not None:
        named += [(f"state's {name}", view(x)) for name, x in r.bound.state.items() if device_like(x) != "cpu"]
    return named


def target(
    work: CallMemory, r: DecodeRequest, dtype: str, shape: tuple[int, ...], views: Named = NO_VIEWS
) -> tuple[Any, TensorView]:
    """Return the destination of a frame's values, as the object for the caller and as a view.

    `views` is the result of :func:`views_of`.
    """
    if r.out is not None:
        known = [v for name, v in views if name == "out="]
        return r.out, with_bits(known[0], dtype) if known else view_output(r.out, dtype)
    first = r.frames[0]
    like = r.like if r.like is not None else first.owner if first.device != "cpu" else None
    if device_like(like) == "cpu":
        return empty(dtype, shape, like)
    return work.device.empty(dtype, shape, like)


def prepare(work: CallMemory, r: DecodeRequest, header: DeviceHeader, views: Named) -> tuple[Any, TensorView, Frame]:
    """Plan a frame for its destination.

    Return the destination as the object for the caller and as a view, and the frame.

    `views` is the result of :func:`views_of`.
    """
    info = header.info
    if info.frame_nbytes != header.frame.nbytes or not (r.allows(info.tensor_nbytes) or is_bounded(info, r)):
        header.refuse_size()
    base = header.base()
    result, v = target(work, r, header.dtype, header.shape, views)
    frame = Frame(header, v, STORE, base)
    if r.out is not None:
        r.check_apart(v, frame.levels, in_place=True, base=base)
    return result, v, frame


def reduction_steps(frames: list[Frame], to: int, op: str) -> list[DecodeStep]:
    """Return the steps that reduce frames in the given order.

    If all frames are Ternary and have equal scales, their codes are added as integers, and the last step multiplies the
    sums by the scale.
    """
    first, count = frames[0], len(frames)
    codes = op != "max" and count > 1 and all(frame.adds_up_with(first) for frame in frames)
    items: list[tuple[Frame, DeviceSink]] = []
    for i, frame in enumerate(frames):
        last = i == count - 1
        if codes:
            into = lib.CODEC_INTO_SCALE_CODES if last else lib.CODEC_INTO_ADD_CODES if i else lib.CODEC_INTO_CODES
        else:
            into = FLOAT32 if i == 0 else MAX if op == "max" else ADD
        items.append((frame, DeviceSink(to, into, divide=count if op == "mean" and last and count > 1 else 0)))
    if first.summing and all(frame.is_cut_like(first) for frame in frames):
        parts = [items[i : i + _SUMMED] for i in range(0, count, _SUMMED)]
        return [DecodeStep(part, summing=len(part)) for part in parts]
    return [DecodeStep([item]) for item in items]
