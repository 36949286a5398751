"""Frames to tensors, many at once: what all of them need goes to the device together, and comes back together."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from codec.engines.cuda.decoding import DECODING_NBYTES, FOUND_NBYTES, NOTHING_FOUND, Frame, Sink
from codec.engines.cuda.image import VIEW_NBYTES
from codec.engines.cuda.work import Work, grid_for, pointer
from codec.engines.request import DecodeRequest
from codec.view import TensorView

_HEAD = 4096  # bytes of a frame that come to the host at first: most have no longer side section
_NOWHERE = Sink(0)

Step = Sequence[tuple[Frame, Sink]]
Each = Callable[..., Any]  # (i, call, *arguments): what the call about frame i returns


def alone(_: int, call: Callable[..., Any], *args: Any) -> Any:
    """An :data:`Each` for frames that their caller does not count."""
    return call(*args)


def open_frames(asked: Sequence[tuple[Work, DecodeRequest, TensorView]], each: Each = alone) -> list[Frame]:
    """Frames whose headers and side sections are in host memory."""
    if not asked:
        return []
    work = asked[0][0]
    heads = work.fetch_all([frame.first(_HEAD) for _, r, frame in asked if r.head is None])
    given = [None if r.head is None else work.fetch(r.head.first(frame.nbytes)) for _, r, frame in asked]
    found = iter(heads)
    frames = [
        each(i, Frame, own, r, frame, next(found) if head is None else head)
        for i, ((own, r, frame), head) in enumerate(zip(asked, given, strict=True))
    ]
    short = [frame for frame in frames if frame.head.nbytes < frame.head_nbytes]
    longer = work.fetch_all([frame.frame.first(frame.head_nbytes) for frame in short])
    for frame, head in zip(short, longer, strict=True):
        frame.head = head
    return frames


def read(
    work: Work, frames: Sequence[Frame], steps: Sequence[Step], *, check_first: bool = False, each: Each = alone
) -> None:
    """Decode frames that are open: steps follow each other, what belongs to one is begun at once.

    Parameters
    ----------
    work : Work
    frames : sequence of Frame
    steps : sequence of sequence of (Frame, Sink)
        All frames are among them.
    check_first : bool
        Whether all frames are to be right before anything is written.
    each : callable, optional
        What is called to raise what is wrong with a frame.

    Raises
    ------
    FrameError, StateError
        What is wrong with the first one that something is wrong with.
    """
    if not frames:
        return
    device = work.device
    device.prepare({frame.kernel for frame in frames} | {"before" for frame in frames if frame.before.struct()})
    if check_first:
        steps = [[(frame, _NOWHERE) for frame in frames], *steps]
    steps = [sorted(step, key=lambda item: item[0].kernel) for step in steps]  # those of one kernel follow each other
    before = [(frame, some) for frame in frames if (some := frame.before.struct())]
    parts = [size for frame in frames for size in (VIEW_NBYTES, len(frame.image.data))]
    nsinks = sum(map(len, steps))
    first, at, found, *parts = places = work.reserve(
        sum(len(some) for _, some in before), DECODING_NBYTES * nsinks, FOUND_NBYTES * len(frames), *parts
    )
    index = {id(frame): i for i, frame in enumerate(frames)}
    images = [part for i, f in enumerate(frames) for part in (f.image.view(parts[2 * i + 1]), f.image.data)]
    decodings, seen = b"", set[int]()
    for frame, sink in itertools.chain(*steps):
        i = index[id(frame)]
        where = parts[2 * i], parts[2 * i + 1], found + FOUND_NBYTES * i
        decodings += frame.decoding(*where, sink, checks=i not in seen)
        seen.add(i)
    work.send(places, b"".join(some for _, some in before), decodings, NOTHING_FOUND * len(frames), *images)
    if before:
        device.launch("before", (grid_for(device, max(f.info.n for f, _ in before)), len(before)), pointer(first))
    for i, step in enumerate(steps):
        for kernel, some in itertools.groupby(step, key=lambda item: item[0].kernel):
            own = list(some)
            device.launch(kernel, (max(frame.grid for frame, _ in own), len(own)), pointer(at))
            at += DECODING_NBYTES * len(own)
        if i == (0 if check_first else len(steps) - 1):
            _close(work, frames, found, each)


def _close(work: Work, frames: Sequence[Frame], found: int, each: Each) -> None:
    """Wait, and raise what is wrong."""
    said = bytes(work.device.download(found, FOUND_NBYTES * len(frames)))
    for i, frame in enumerate(frames):
        each(i, frame.close, said[FOUND_NBYTES * i : FOUND_NBYTES * (i + 1)])
