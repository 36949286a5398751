"""Jobs of frames to encode: decisions from shapes, made here, and launches of the kernels that decide from values."""

import itertools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from codec import _call
from codec._c.library import DTYPES, ITEMSIZE, check, ffi, lib, new_bytes
from codec._c.spec_structs import spec_struct
from codec._call import Call, new_tensor
from codec.engines.cuda.devices import Device
from codec.engines.cuda.kernels import blocks_for
from codec.engines.cuda.preprocess import PREPROCESSING_NBYTES, Preprocessing
from codec.engines.cuda.upload import VIEW_NBYTES, Image
from codec.engines.cuda.workspace import Work, grid_for, launch_each
from codec.engines.request import EncodeRequest

WARPS = 4  # warps of a thread block that encodes or decodes blocks of values
WRITTEN_NBYTES = 48  # bytes of a codec_written of native/cuda/frame/encode.cuh
ENCODING_NBYTES = 128  # bytes of a codec_encoding of native/cuda/frame/encode.cuh
COUNTS_NBYTES = 1024  # bytes of the symbol counts at the beginning of a codec_choice (native/cuda/coder/sample.cuh)


class Plan(NamedTuple):
    """Properties of a frame that do not depend on values: C library's codec_view, job for kernels, and header."""

    view: Any
    image: Image
    head: Any
    bound: int  # maximum bytes of the frame
    region: int  # maximum bytes of a region


def bound_of(r: EncodeRequest) -> int:
    """Return the maximum bytes of the frame."""
    size = ffi.new("size_t *")
    check(lib.codec_bound(spec_struct(r.spec), new_tensor(DTYPES[r.x.dtype], r.x.shape), size))
    return size[0]


def plan_of(r: EncodeRequest) -> Plan:
    """Return the plan of a request's frame."""
    spec, x = spec_struct(r.spec), r.x
    like = new_tensor(DTYPES[x.dtype], x.shape, ffi.NULL, x.nbytes)
    call = _new_call(r)
    size, plan = ffi.new("size_t[2]"), ffi.new("codec_plan *")
    check(lib.codec_job_nbytes(spec, like, size, size + 1))
    job, view, head = new_bytes(size[0]), ffi.new("codec_view *"), new_bytes(lib.CODEC_HEADER_NBYTES)
    check(lib.codec_encode_plan(spec, like, call.context, job, size[0], plan))
    check(lib.codec_encode_head(job, head, lib.CODEC_HEADER_NBYTES, size + 1))
    _call.give(call)
    view.struct_nbytes = ffi.sizeof("codec_view")
    check(lib.codec_job_view(job, view))
    most = -(-plan.region_bound // 64) * 64
    planned, books = ["model_parts", "row_parts"], ["lengths", "tables"]
    found = ["offsets", "row_sums"]
    image = Image(view, job, planned + books, found) if view.codebook_id else Image(view, job, planned, found + books)
    return Plan(view, image, head, bound_of(r), most)


def _new_call(r: EncodeRequest) -> Call:
    """Return a call whose context has the arguments of a request."""
    call = _call.take()
    call.context.stream = r.stream
    if r.codebook is not None:
        call.set_codebooks((r.codebook,))
    if r.segments is not None:
        call.set_segments(r.segments)
    if r.levels is not None:
        call.set_levels(r.levels, read=False)
    if r.residual is not None:
        call.context.residual = ffi.cast("float *", r.residual.data)
        call.context.flags = 0 if r.verify_first else lib.CODEC_NO_VERIFY_FIRST
    return call


class Job:
    """Encoding of one frame: fills a codec_encoding of ``native/cuda/frame/encode.cuh``.

    Parameters
    ----------
    work : Work
        Device memory of the call.
    r : EncodeRequest
    plan : Plan
    frame, capacity : int
        Address of the frame, and the maximum of its bytes.
    residual : int, optional
        Address of the residual, which kernels write, and add to the tensor first if the request asks for feedback.
    written : int, optional
        Address of :data:`WRITTEN_NBYTES` bytes that receive status and size.

    Attributes
    ----------
    kernel : str
        Kernel that encodes blocks.
    grid, teams : int
        Number of thread blocks of that kernel, and of all other kernels.
    counts, places, written : int
        Addresses of a codec_choice, which begins with 256 uint32 counts of plane 0's symbols in the sample; of the
        offsets of blocks; of a codec_written.
    """

    def __init__(
        self, work: Work, r: EncodeRequest, plan: Plan, frame: int, capacity: int, residual: int = 0, written: int = 0
    ) -> None:
        device, v = work.device, plan.view
        self.plan, self.written = plan, written
        self.counts = self.places = 0
        self.family, self.kernel, constant = _kernels(v, ITEMSIZE[r.x.dtype])
        # threads read the tensor while others write the residual: copy the tensor if both share memory
        in_place = r.residual is not None and residual == r.x.address
        values = work.copy(r.x) if in_place else work.read(r.x)
        self.preprocessing = preprocessing = Preprocessing(work, v.n)
        if r.levels is not None:
            preprocessing.ask(r.levels)
        if r.feedback:
            preprocessing.add(r.x, values, residual)
            values = preprocessing.rounded
        self.grid = blocks_for(self.kernel, device.processors, v.nblocks)
        self.other_grid = min(WARPS * self.grid, 2 * device.processors)
        each = device.constant(self.kernel, *constant)[-1] + plan.region if v.nblocks else 0
        self._source = values, preprocessing.sums, residual, frame, capacity, work.new(WARPS * self.grid * each), each

    @property
    def steps(self) -> list[tuple[str, int]]:
        """Kernels to launch before ``close_frame``, with their numbers of thread blocks."""
        v, residual = self.plan.view, self._source[2]
        if not v.nblocks:
            return []
        steps = [(f"choose_{self.family}", self.other_grid), (self.kernel, self.grid)]
        scaled_last = v.codec == lib.CODEC_SIGN and v.row_sums.count and not residual  # as in rows/encode.cuh
        return [*steps, ("scale_rows", self.other_grid)] if scaled_last else steps

    def zeros(self, device: Device) -> tuple[int, int]:
        """Return the bytes of two zeroed buffers: the decisions about the tensor, and the offsets of blocks."""
        each, each_part = device.constant("close_frame", "choose_nbytes", 2)
        v = self.plan.view
        return each + max(v.model_parts.count, 1) * each_part, 8 * v.nblocks

    def struct(self, view: int, job: int, head: int) -> bytes:
        """Return the codec_encoding, from the addresses of the uploads."""
        zeros, ends = (head, self.places, self.written), (self.preprocessing.exponents, self.preprocessing.levels)
        nparts = self.plan.view.model_parts.count
        warps = WARPS * self.grid
        return struct.pack("<15Q2I", view, job, *self._source, self.counts, *zeros, *ends, nparts, warps)


def begin(work: Work, jobs: Sequence[Job], *, close: bool = True) -> None:
    """Launch all kernels of all jobs, each kernel once for all jobs that use it.

    With ``close=False``, launch only the kernels that make decisions.
    """
    device = work.device
    # sort, so that jobs with the same kernel become adjacent
    jobs = sorted(jobs, key=lambda job: [kernel for kernel, _ in job.steps])
    device.prepare({"close_frame", *(kernel for job in jobs for kernel, _ in job.steps)})
    sizes = [size for job in jobs for size in job.zeros(device)]
    zeros = work.zeros(*[0 if job.written else WRITTEN_NBYTES for job in jobs], *sizes)
    for i, job in enumerate(jobs):
        if job.written:
            device.clear(job.written, WRITTEN_NBYTES)
        job.written = job.written or zeros[i]
        job.counts, job.places = zeros[len(jobs) + 2 * i : len(jobs) + 2 * i + 2]
    preprocessing = [some for job in jobs if (some := job.preprocessing.struct(job.written))]
    plans = [job.plan for job in jobs]
    parts = [size for p in plans for size in (VIEW_NBYTES, len(p.image.data), len(p.head))]
    sizes = [sum(map(len, preprocessing)), ENCODING_NBYTES * len(jobs), *parts]
    places = work.reserve(*sizes, *[p.image.made_nbytes for p in plans])
    (first, all_at, *parts), made = places[: len(sizes)], places[len(sizes) :]
    images: list[Any] = []
    encodings = b""
    for i, job in enumerate(jobs):
        view, data, head = parts[3 * i : 3 * i + 3]
        images += [job.plan.image.view(data, made[i]), job.plan.image.data, ffi.buffer(job.plan.head)]
        encodings += job.struct(view, data, head)
    work.send(places[: len(sizes)], b"".join(preprocessing), encodings, *images)
    if preprocessing:
        grid = grid_for(device, max(job.plan.view.n for job in jobs))
        launch_each(device, "preprocess", [grid] * len(preprocessing), first, PREPROCESSING_NBYTES)
    for step in range(max(len(job.steps) for job in jobs) if close else 1):
        own = [(i, *job.steps[step]) for i, job in enumerate(jobs) if step < len(job.steps)]
        for kernel, some in itertools.groupby(own, key=lambda item: item[1]):
            numbers, _, grids = zip(*some, strict=True)
            launch_each(device, kernel, grids, all_at + ENCODING_NBYTES * numbers[0], ENCODING_NBYTES)
    if close:
        launch_each(device, "close_frame", [job.other_grid for job in jobs], all_at, ENCODING_NBYTES)


def _kernels(v: Any, size: int) -> tuple[str, str, tuple[str, int]]:
    """Return the family, its encoding kernel, and the constant whose last number is a warp's scratch in bytes."""
    if v.codec == lib.CODEC_LOSSLESS:
        return "lossless", f"encode_lossless<{size}>", ("encode_lossless_nbytes", size.bit_length())
    if v.codec == lib.CODEC_TRUNCATE:
        return "truncate", "encode_truncate", ("encode_truncate_nbytes", 1)
    return "rows", f"encode_rows<{v.codec}>", ("encode_rows_nbytes", 1)
