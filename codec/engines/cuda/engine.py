"""Functions of the CUDA engine, which convert requests to launches, and results to the caller's type of tensor."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from codec._c.library import check
from codec.engines.cuda.batch_decode import DecodeStep, read, read_headers
from codec.engines.cuda.calls import ADD, FLOAT32, prepare, reduction_steps, target, views_of, working
from codec.engines.cuda.decoding import DeviceSink, Frame
from codec.engines.cuda.encoding import FrameEncoding
from codec.engines.cuda.job import COUNTS_NBYTES, WRITTEN_NBYTES, EncodeJob, begin
from codec.engines.cuda.pending import PendingFrame
from codec.engines.cuda.plan import plan_of
from codec.engines.native.decoding import check_whole, is_bomb
from codec.engines.native.many import at_item, check_many_apart
from codec.engines.request import DecodeRequest, EncodeRequest
from codec.errors import ArgumentError, CodecError, EngineError, Status
from codec.tensors.view import view_output


def encode(r: EncodeRequest) -> Any:
    """Return the frame: the first bytes of `out`, or a new array on the tensor's device or in host memory."""
    with working(r.views) as work:
        encoding = FrameEncoding(work, r)
        begin(work, [encoding.job])
        frame = encoding.finish()
        if encoding.copied:
            work.wait()
        return frame


def count(r: EncodeRequest) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Return the counts of 256 symbols in the sample of a tensor; None if the tensor is too small to be sampled."""
    with working(r.views) as work:
        plan = plan_of(r)
        if not plan.view.nblocks:  # too few values: the tensor is stored uncompressed
            return None
        job = EncodeJob(work, r, plan, 0, plan.bound)
        begin(work, [job], close=False)
        return np.frombuffer(work.device.download(job.counts, COUNTS_NBYTES), np.uint32).astype(np.int64)


def encode_async(r: EncodeRequest) -> PendingFrame:
    """Enqueue the encoding of a frame into the request's `out`, and return a handle with which to wait for it."""
    with working(r.views, waits=False) as work:
        return PendingFrame(work, r)


def encode_many(requests: Sequence[EncodeRequest]) -> list[Any]:
    """Launch the encoding of all requests, then wait, and return the frames."""
    if not requests:
        return []
    with working([named for r in requests for named in r.views]) as work:
        encodings = [at_item(i, FrameEncoding, work.sibling(), r) for i, r in enumerate(requests)]
        begin(work, [encoding.job for encoding in encodings])
        first = min(encoding.job.written for encoding in encodings)
        written = bytes(work.device.download(first, WRITTEN_NBYTES * len(encodings)))  # the structs are adjacent
        at = [encoding.job.written - first for encoding in encodings]
        frames = [at_item(i, e.finish, written[at[i] : at[i] + WRITTEN_NBYTES]) for i, e in enumerate(encodings)]
        if any(encoding.copied for encoding in encodings):
            work.wait()
        return frames


def decode(r: DecodeRequest) -> Any:
    """Decode a frame; return the request's `out`, or a new tensor of the type of its `like`."""
    with working(views := views_of(r)) as work:
        [header] = read_headers([(work, r, r.frames[0])])
        result, v, frame = prepare(work, r, header, views)
        verify_first = r.verify_first if r.out is not None else not header.is_delta and is_bomb(header.info)
        read(work, [frame], [DecodeStep([(frame, DeviceSink(work.write(v)))])], verify_first=verify_first)
        work.finish()
    return result


def decode_many(requests: Sequence[DecodeRequest]) -> list[Any]:
    """Decode the frames of requests; if any has `out`, validate all frames before anything is written."""
    if not requests:
        return []
    views = [views_of(r) for r in requests]
    with working([named for some in views for named in some]) as work:
        headers = read_headers([(work, r, r.frames[0]) for r in requests], at_item)
        made = [at_item(i, prepare, work, r, headers[i], views[i]) for i, r in enumerate(requests)]
        verify_first = any(r.out is not None for r in requests)
        if verify_first:
            check_many_apart(requests, [(v, frame.levels, frame.base) for _, v, frame in made])
        step = [(frame, DeviceSink(work.write(v))) for _, v, frame in made]
        read(work, [frame for frame, _ in step], [DecodeStep(step)], verify_first=verify_first, each=at_item)
        work.finish()
    return [result for result, _, _ in made]


def accumulate(r: DecodeRequest, weight: float) -> None:
    """Add `weight` times the frame's values to the request's `out`."""
    with working(views_of(r)) as work:
        [header] = read_headers([(work, r, r.frames[0])])
        check_whole(header.info, header.frame)
        v = view_output(r.out)
        frame = Frame(header, v, ADD)
        r.check_apart(v, frame.levels, in_place=True)
        sink = DeviceSink(work.write(v, read=True), ADD, weight)
        read(work, [frame], [DecodeStep([(frame, sink)])], verify_first=r.verify_first)
        work.finish()


def reduce(r: DecodeRequest, op: str) -> Any:
    """Reduce frames to float32; return the request's `out`, or a new tensor of the type of its `like`."""
    with working(views_of(r)) as work:
        headers = read_headers([(work, r, frame) for frame in r.frames])
        for header in headers:
            check_whole(header.info, header.frame)
        shape, n = headers[0].shape, headers[0].info.n
        for header in headers:
            if header.shape != shape:
                for each in headers:  # the shape may differ because a header is damaged: report that first
                    each.verify()
                raise ArgumentError(f"frames to reduce must have the same shape, got {shape} and {header.shape}")
        r.check_limit(4 * n)
        result, v = target(work, r, "float32", shape)
        frames: list[Frame] = []
        for header in headers:
            try:
                frames.append(Frame(header, v, FLOAT32))
            except CodecError:
                read(work, frames, [], verify_first=True)  # if an earlier frame is invalid, raises its error
                raise
        if r.out is not None:
            r.check_apart(v, frames[0].levels, in_place=len(frames) == 1)
        verify_first = r.out is not None and r.verify_first
        to = work.write(v)
        read(work, frames, reduction_steps(frames, to, op), verify_first=verify_first)
        if r.check_finite and not work.finite(to, n):
            check(int(Status.NONFINITE))
        work.finish()
    return result


def sum_codes(r: DecodeRequest) -> tuple[Any, float]:
    """Raise EngineError: no kernel stores sums of codes as integers."""
    raise EngineError(
        "the cuda engine does not support sum_codes(): copy the frames to host memory, and use the native engine"
    )
