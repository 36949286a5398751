"""Deferred calls: the host launches many calls, and later waits once and checks the results of all of them."""

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from codec._c.library import check
from codec.engines.cuda.batch_decode import BatchDecode, DecodeStep, read_headers, side_by_side
from codec.engines.cuda.calls import FLOAT32, prepare, reduction_steps, views_of, working
from codec.engines.cuda.decoding import DeviceSink, Frame
from codec.engines.cuda.encoding import FrameEncoding
from codec.engines.cuda.job import WRITTEN_NBYTES, begin
from codec.engines.cuda.workspace import CallMemory, grid_for, pointer, wide
from codec.engines.native.decoding import check_whole
from codec.engines.native.many import at_item
from codec.engines.request import DecodeRequest, EncodeRequest
from codec.errors import CodecError, Status
from codec.tensors.view import TensorView, is_torch, view, view_output

_SIZE_AT = 24  # offset of the frame's size in a codec_written of native/cuda/frame/encode.cuh
_FLAG_NBYTES = 4


Explain = Callable[[CodecError], None]  # called with an error, whose message it may change


class _Verdict(NamedTuple):
    """Verdict of a call: device memory in which its kernels report errors, and the function that evaluates it."""

    work: CallMemory  # owner of the call's memory
    at: int
    nbytes: int
    close: Callable[[bytes], None]
    explain: Explain | None = None

    def read(self, words: bytes) -> None:
        """Raise the error of the call, if `words`, a copy of the verdict's memory, reports one."""
        try:
            self.close(words)
        except CodecError as e:
            if self.explain is not None:
                self.explain(e)
            raise


class FrameSum(NamedTuple):
    """Frames to be reduced to their sum, mean or maximum.

    Attributes
    ----------
    frames : sequence of DecodeRequest
        At least one, of equal shape; the first one has `out`.
    op : {"sum", "mean", "max"}
    explain : callable, optional
        Called with the error for NaN or Inf in the result, whose message it may change.
    """

    frames: Sequence[DecodeRequest]
    op: str
    explain: Explain | None = None


class EncodedSizes:
    """Result of :meth:`DeferredCalls.encode_many`: sizes of the frames.

    Attributes
    ----------
    sizes : array or tensor of int64
        Size of each frame in bytes, on the device, valid in stream order; 0 for a tensor that cannot be encoded.
    lengths : list of int
        Size of each frame in bytes, after :meth:`DeferredCalls.conclude`; empty before.
    """

    def __init__(self, sizes: Any) -> None:
        self.sizes = sizes
        self.lengths: list[int] = []


class DeferredCalls:
    """Calls on tensors of one device, in the order of one stream, for which the host does not wait.

    Results can be used in stream order; if a call has failed, all results are undefined. All calls need `out=` on the
    device, and write it while they validate. :meth:`conclude` raises the error of the first call that has failed.
    Arguments and results stay alive until then, scratch memory until the kernels are launched.

    Parameters
    ----------
    on_memory : callable, optional
        Called as on_memory(kept, most) after each launch of a call, with the bytes of device memory that the call
        keeps, and the maximum that it has used. Called with minus the sum of all kept bytes, and 0, when they are
        released.
    """

    _kept_nbytes = 0  # for __del__, if __init__ was interrupted

    def __init__(self, on_memory: Callable[[int, int], Any] = lambda kept, most: None) -> None:
        self._on_memory, self._kept_nbytes = on_memory, 0
        self._verdicts: list[_Verdict] = []
        self._requested: list[tuple[_Verdict, int]] = []
        self._answer: Any = None
        self._copies: list[tuple[CallMemory, TensorView]] = []  # tensors whose copies to the host are in flight

    def __bool__(self) -> bool:
        """Return True if there is a call or a copy for which the host has not waited yet."""
        return bool(self._verdicts or self._requested or self._copies)

    def encode_many(self, requests: Sequence[EncodeRequest], explain: Explain | None = None) -> EncodedSizes:
        """Encode tensors. Each `out` must have room for the upper bound of the frame, at a multiple of 8 bytes.

        An error's `item` is the index of its request. `explain` is called with an error before it is raised.
        """
        with working([named for r in requests for named in r.views]) as work:
            encodings = [at_item(i, FrameEncoding, work.sibling(), r) for i, r in enumerate(requests)]
            jobs = [encoding.job for encoding in encodings]
            written = WRITTEN_NBYTES * len(jobs)
            sizes = [job.layout.zeros_nbytes for job in jobs]
            total = written + sum(sizes)
            memory, address = work.device.new_bytes(total, requests[0].x.owner)
            work.device.clear(address, total)
            at = address + written
            for i, (job, nbytes) in enumerate(zip(jobs, sizes, strict=True)):
                job.written, job.counts = address + WRITTEN_NBYTES * i, at
                at += nbytes
            begin(work, jobs)
            words = memory[:written].view(sys.modules["torch"].int64 if is_torch(memory) else "int64")
            encoded = EncodedSizes(words.reshape(len(jobs), -1)[:, _SIZE_AT // 8])
            work.keep((memory, encodings))
            self._launched(work, *[encoding.work for encoding in encodings], more=total)

        def close(data: bytes) -> None:
            frames = [
                at_item(i, e.finish, data[WRITTEN_NBYTES * i : WRITTEN_NBYTES * (i + 1)])
                for i, e in enumerate(encodings)
            ]
            encoded.lengths = [view(frame).nbytes for frame in frames]

        self._verdicts.append(_Verdict(work, address, written, close, explain))
        return encoded

    def decode_many(self, requests: Sequence[DecodeRequest]) -> None:
        """Decode frames. Requests of frames on the device need `head`, the bytes before the frame's blocks."""
        views = [views_of(r) for r in requests]
        with working([named for some in views for named in some]) as work:
            headers = read_headers([(work, r, r.frames[0]) for r in requests], at_item)
            made = [at_item(i, prepare, work, r, headers[i], views[i]) for i, r in enumerate(requests)]
            step = [(frame, DeviceSink(work.write(v))) for _, v, frame in made]
            self._launch(work, [frame for frame, _ in step], [DecodeStep(step)])

    def accumulate_many(self, requests: Sequence[DecodeRequest], into: int) -> None:
        """Decode each frame into its float32 `out`. `into` (CODEC_INTO_*): store, add, or store the maximum."""
        with working([named for r in requests for named in views_of(r)]) as work:
            headers = read_headers([(work, r, r.frames[0]) for r in requests])
            items: list[tuple[Frame, DeviceSink]] = []
            for r, header in zip(requests, headers, strict=True):
                check_whole(header.info, header.frame)
                v = view_output(r.out)
                items.append((Frame(header, v, into), DeviceSink(work.write(v), into)))
            self._launch(work, [frame for frame, _ in items], [DecodeStep(items)])

    def reduce_many(self, sums: Sequence[FrameSum]) -> None:
        """Reduce the frames of each :class:`FrameSum`, and store the float32 result in the `out` of its first request.

        If that request has ``check_finite``, NaN or Inf in the result is an error.
        """
        requests = [r for each in sums for r in each.frames]
        with working([named for r in requests for named in views_of(r)]) as work:
            rest = iter(read_headers([(work, r, r.frames[0]) for r in requests]))
            frames, steps, results = list[Frame](), list[list[DecodeStep]](), list[tuple[int, int]]()
            for each in sums:
                own: list[Frame] = []
                v = view_output(each.frames[0].out)
                for header in itertools.islice(rest, len(each.frames)):
                    check_whole(header.info, header.frame)
                    own.append(Frame(header, v, FLOAT32))
                to = work.write(v)
                results.append((to, own[0].view.n))
                steps.append(reduction_steps(own, to, each.op))
                frames += own
            self._launch(work, frames, side_by_side(steps))
            for each, (to, n) in zip(sums, results, strict=True):
                if each.frames[0].check_finite:
                    self._check_finite(work, to, n, each.explain)

    def _launch(self, work: CallMemory, frames: Sequence[Frame], steps: Sequence[DecodeStep]) -> None:
        """Launch all steps that decode these frames, and register a verdict for them."""
        batch = BatchDecode(work, frames, steps)
        for i in range(len(steps)):
            batch.begin(i)
        work.finish()
        self._launched(work)
        self._verdicts.append(_Verdict(work, batch.found, batch.found_nbytes, batch.conclude))

    def _launched(self, *works: CallMemory, more: int = 0) -> None:
        """Release temporary memory of launched `works`; report the bytes that they keep plus `more`, kept elsewhere."""
        kept = more + sum([work.kept_nbytes for work in works])
        self._kept_nbytes += kept
        self._on_memory(kept, more + sum([work.allocated_nbytes for work in works]))
        for work in works:
            work.launched()

    def _release(self) -> None:
        """Report all memory that calls kept as released."""
        nbytes, self._kept_nbytes = self._kept_nbytes, 0
        if nbytes:  # do not call on_memory from a garbage collection if there is nothing to report
            self._on_memory(-nbytes, 0)

    def __del__(self) -> None:
        self._release()

    def _check_finite(self, work: CallMemory, address: int, n: int, explain: Explain | None) -> None:
        found = work.zeros(_FLAG_NBYTES)
        work.device.launch("check_finite", (grid_for(work.device, n), 1), pointer(address), wide(n), pointer(found))
        self._verdicts.append(_Verdict(work, found, _FLAG_NBYTES, _refuse_nonfinite, explain))

    def refuse(self, flag: TensorView, explain: Explain) -> None:
        """Register a flag on the device. If the flag is not 0, :meth:`conclude` raises the error for NaN or Inf."""
        with working([("a flag", flag)]) as work:
            work.keep(flag)
            self._verdicts.append(_Verdict(work, flag.address, flag.nbytes, _refuse_nonfinite, explain))

    def check(self, check: Callable[[], Any]) -> None:
        """Register a check of bytes from :meth:`read_back`; :meth:`conclude` calls checks in order of registration."""

        def close(_: bytes) -> None:
            check()

        self._verdicts.append(_Verdict(self._copies[-1][0], 0, 0, close))

    def read_back(self, v: TensorView, into: Any = None) -> Any:
        """Copy a tensor to page-locked host memory, and return that memory; it is valid after :meth:`conclude`.

        `into`: page-locked memory of the caller; None: allocate it.
        """
        with working([("a tensor", v)]) as work:
            self._copies.append((work, v))
            return work.device.read_back(v.address, v.nbytes, into)

    def wait(self) -> None:
        """Wait for all copies to the host, including those of verdicts, without evaluating verdicts."""
        works = [work for work, _ in self._copies] + [verdict.work for verdict, _ in self._requested]
        self._copies.clear()
        if works:
            with works[0].resume():
                works[0].device.wait()

    def request(self) -> None:
        """Enqueue the copy of the verdicts of all calls so far to the host, for :meth:`conclude`."""
        if self._requested or not self._verdicts:
            return
        verdicts, self._verdicts = self._verdicts, []
        work = verdicts[0].work
        with work.resume():
            at, places = work.gather([(verdict.at, verdict.nbytes) for verdict in verdicts])
            nbytes = places[-1] + verdicts[-1].nbytes
            self._answer = work.device.read_back(at, nbytes)
        self._requested = list(zip(verdicts, places, strict=True))

    def conclude(self) -> None:
        """Wait for the stream, and raise the error of the first call that has failed."""
        self.request()
        if not self:
            return
        self._release()
        (requested, self._requested), (copies, self._copies) = (self._requested, []), (self._copies, [])
        work = requested[0][0].work if requested else copies[0][0]
        with work.resume():
            work.device.wait()
            for verdict, place in requested:
                verdict.read(bytes(self._answer[place : place + verdict.nbytes]))
        self._answer = None


def _refuse_nonfinite(found: bytes) -> None:
    """Raise ArgumentError if the bytes of the kernel's flag are not all 0: a result contains NaN or Inf."""
    if any(found):
        check(int(Status.NONFINITE))
