"""What is decided before a frame's first block: by shapes here, by values in a kernel."""

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
from codec.engines.cuda.preprocess import BEFORE_NBYTES, Before
from codec.engines.cuda.upload import VIEW_NBYTES, Image
from codec.engines.cuda.workspace import Work, grid_for, launch_each
from codec.engines.request import EncodeRequest

WARPS = 4  # of a block of threads that does blocks of values
WRITTEN_NBYTES = 48  # a codec_written of native/cuda/frame/encode.cuh
ENCODING_NBYTES = 128  # a codec_encoding of native/cuda/frame/encode.cuh
COUNTS_NBYTES = 1024  # of plane 0's symbols, with which a codec_choice of native/cuda/coder/sample.cuh begins


class Plan(NamedTuple):
    """What is known of a frame without its values: the C library's codec_view, its job for kernels and the header."""

    view: Any
    image: Image
    head: Any
    bound: int  # bytes of the frame
    region: int  # and of its largest region


def bound_of(r: EncodeRequest) -> int:
    """Bytes that the frame does not exceed."""
    size = ffi.new("size_t *")
    check(lib.codec_bound(spec_struct(r.spec), new_tensor(DTYPES[r.x.dtype], r.x.shape), size))
    return size[0]


def plan_of(r: EncodeRequest) -> Plan:
    """All that shapes decide."""
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
    """What is asked for besides a spec."""
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
        call.context.flags = 0 if r.verify_first else lib.CODEC_ONE_PASS
    return call


class Job:
    """What one frame's kernels are given: a codec_encoding of ``native/cuda/frame/encode.cuh``.

    Parameters
    ----------
    work : Work
    r : EncodeRequest
    plan : Plan
    frame, capacity : int
        Where the frame is to be, and the most bytes that it may take.
    residual : int, optional
        Address of what is left, and is added first if that is asked for.
    written : int, optional
        Address of :data:`WRITTEN_NBYTES` in which status and size will be.

    Attributes
    ----------
    kernel : str
        The kernel for its blocks.
    grid, teams : int
        Blocks of threads: that do blocks of values, and that do all else.
    counts, places, written : int
        Addresses of a codec_choice, which begins with 256 uint32: how often each symbol of plane 0 occurs in the
        sample; of where blocks go; of a codec_written.
    """

    def __init__(
        self, work: Work, r: EncodeRequest, plan: Plan, frame: int, capacity: int, residual: int = 0, written: int = 0
    ) -> None:
        device, v = work.device, plan.view
        self.plan, self.written = plan, written
        self.counts = self.places = 0
        self.family, self.kernel, numbers = _kernels(v, ITEMSIZE[r.x.dtype])
        # a tensor is read at any time while what is left of it is written, by other threads
        in_place = r.residual is not None and residual == r.x.address
        values = work.copy(r.x) if in_place else work.read(r.x)
        self.before = before = Before(work, v.n)
        if r.levels is not None:
            before.ask(r.levels)
        if r.feedback:
            before.add(r.x, values, residual)
            values = before.rounded
        self.grid = blocks_for(self.kernel, device.processors, v.nblocks)
        self.teams = min(WARPS * self.grid, 2 * device.processors)
        each = device.constant(self.kernel, *numbers)[-1] + plan.region if v.nblocks else 0
        self._source = values, before.sums, residual, frame, capacity, work.new(WARPS * self.grid * each), each

    @property
    def steps(self) -> list[tuple[str, int]]:
        """Kernels that it goes through until its frame is closed, and blocks of threads for each."""
        v, residual = self.plan.view, self._source[2]
        if not v.nblocks:
            return []
        steps = [(f"choose_{self.family}", self.teams), (self.kernel, self.grid)]
        scaled_last = v.codec == lib.CODEC_SIGN and v.row_sums.count and not residual  # as rows/encode.cuh
        return [*steps, ("scale_rows", self.teams)] if scaled_last else steps

    def zeros(self, device: Device) -> tuple[int, int]:
        """Bytes that are to be zeros: of what is found out about the tensor, and of where blocks go."""
        each, each_part = device.constant("close_frame", "choose_nbytes", 2)
        v = self.plan.view
        return each + max(v.model_parts.count, 1) * each_part, 8 * v.nblocks

    def struct(self, view: int, job: int, head: int) -> bytes:
        """The codec_encoding, from the addresses of what is uploaded."""
        zeros, ends = (head, self.places, self.written), (self.before.exponents, self.before.levels)
        nparts = self.plan.view.model_parts.count
        warps = WARPS * self.grid
        return struct.pack("<15Q2I", view, job, *self._source, self.counts, *zeros, *ends, nparts, warps)


def begin(work: Work, jobs: Sequence[Job], *, close: bool = True) -> None:
    """Begin all kernels of all jobs, each once for those that take it; not `close`: only what decides."""
    device = work.device
    jobs = sorted(jobs, key=lambda job: [kernel for kernel, _ in job.steps])  # those of one kernel follow each other
    device.prepare({"close_frame", *(kernel for job in jobs for kernel, _ in job.steps)})
    sizes = [size for job in jobs for size in job.zeros(device)]
    zeros = work.zeros(*[0 if job.written else WRITTEN_NBYTES for job in jobs], *sizes)
    for i, job in enumerate(jobs):
        if job.written:
            device.clear(job.written, WRITTEN_NBYTES)
        job.written = job.written or zeros[i]
        job.counts, job.places = zeros[len(jobs) + 2 * i : len(jobs) + 2 * i + 2]
    before = [some for job in jobs if (some := job.before.struct(job.written))]
    plans = [job.plan for job in jobs]
    parts = [size for p in plans for size in (VIEW_NBYTES, len(p.image.data), len(p.head))]
    sizes = [sum(map(len, before)), ENCODING_NBYTES * len(jobs), *parts]
    places = work.reserve(*sizes, *[p.image.made_nbytes for p in plans])
    (first, all_at, *parts), made = places[: len(sizes)], places[len(sizes) :]
    images: list[Any] = []
    encodings = b""
    for i, job in enumerate(jobs):
        view, data, head = parts[3 * i : 3 * i + 3]
        images += [job.plan.image.view(data, made[i]), job.plan.image.data, ffi.buffer(job.plan.head)]
        encodings += job.struct(view, data, head)
    work.send(places[: len(sizes)], b"".join(before), encodings, *images)
    if before:
        grid = grid_for(device, max(job.plan.view.n for job in jobs))
        launch_each(device, "preprocess", [grid] * len(before), first, BEFORE_NBYTES)
    for step in range(max(len(job.steps) for job in jobs) if close else 1):
        own = [(i, *job.steps[step]) for i, job in enumerate(jobs) if step < len(job.steps)]
        for kernel, some in itertools.groupby(own, key=lambda item: item[1]):
            numbers, _, grids = zip(*some, strict=True)
            launch_each(device, kernel, grids, all_at + ENCODING_NBYTES * numbers[0], ENCODING_NBYTES)
    if close:
        launch_each(device, "close_frame", [job.teams for job in jobs], all_at, ENCODING_NBYTES)


def _kernels(v: Any, size: int) -> tuple[str, str, tuple[str, int]]:
    """The family, its kernel for blocks, and of which numbers the last is a warp's scratch."""
    if v.codec == lib.CODEC_LOSSLESS:
        return "lossless", f"encode_lossless<{size}>", ("encode_lossless_nbytes", size.bit_length())
    if v.codec == lib.CODEC_TRUNCATE:
        return "truncate", "encode_truncate", ("encode_truncate_nbytes", 1)
    return "rows", f"encode_rows<{v.codec}>", ("encode_rows_nbytes", 1)
