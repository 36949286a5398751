"""Encoding jobs: the device addresses of a call, and the launches of its kernels."""

import itertools
import operator
from collections.abc import Sequence

from codec.engines.cuda.plan import FramePlan
from codec.engines.cuda.preprocess import Preprocessing
from codec.engines.cuda.scratch import Units, WarpScratch
from codec.engines.cuda.structs import ENCODING, PREPROCESSING, WRITTEN
from codec.engines.cuda.upload import DATA_AT, aligned
from codec.engines.cuda.workspace import CallMemory, grid_for, launch_each
from codec.engines.request import EncodeRequest

WRITTEN_NBYTES = WRITTEN.size
COUNTS_NBYTES = 1024  # bytes of the symbol counts at the beginning of a codec_choice (native/cuda/coder/sample.cuh)
_kernel = operator.itemgetter(1)


class EncodeJob:
    """Encoding of one frame: fills a codec_encoding of ``native/cuda/frame/encode.cuh``.

    Parameters
    ----------
    work : CallMemory
        Device memory of the call.
    r : EncodeRequest
        Arguments of the call.
    plan : FramePlan
        Plan of the frame.
    frame, capacity : int
        Device address of the frame, and its maximum size in bytes.
    residual : int, optional
        Device address of the residual, which kernels write. With error feedback, they first add it to the tensor.

    Attributes
    ----------
    layout : Layout
        Grids of the launches, and sizes of their buffers.
    steps : list of (Kernel, int)
        Kernels to launch before ``close_frame``, with their numbers of thread blocks.
    written, counts : int
        Device addresses of a codec_written and of a codec_choice, both zeroed before the launches. A codec_choice
        begins with the counts of the 256 symbols of plane 0 in the sample (uint32), and is followed by the offsets of
        blocks.
    """

    def __init__(
        self, work: CallMemory, r: EncodeRequest, plan: FramePlan, frame: int, capacity: int, residual: int = 0
    ) -> None:
        self.plan, self.stream = plan, r.stream
        self.layout = layout = plan.layout(work.device)
        self.steps = layout.steps[residual > 0]
        self.written = self.counts = 0
        # if residual and tensor share memory, copy the tensor: threads read it while other threads write the residual
        in_place = r.residual is not None and residual == r.x.address
        values = work.copy(r.x) if in_place else work.read(r.x)
        self.preprocessing = preprocessing = Preprocessing(work, plan.view.n)
        if r.levels is not None:
            preprocessing.ask(r.levels)
        if r.feedback:
            preprocessing.add(r.x, values, residual)
            values = preprocessing.rounded
        self._base = work.read(r.base) if r.base is not None else 0
        self._source = values, preprocessing.sums, residual, frame, capacity

    def struct(self, at: int, scratch: Units) -> bytes:
        """Return the codec_encoding; `at`: device address of the plan's upload."""
        plan, layout = self.plan, self.layout
        ends = self._base or self.preprocessing.exponents, self.preprocessing.levels
        zeros = self.counts, at + plan.head_at, self.counts + layout.choice_nbytes, self.written
        warps = plan.kernel.warps * layout.grid
        return ENCODING.pack(at, at + DATA_AT, *self._source, *scratch, *zeros, *ends, plan.nparts, warps)


def begin(work: CallMemory, jobs: Sequence[EncodeJob], *, close: bool = True) -> None:
    """Launch all kernels of all jobs, each kernel once for all jobs that use it.

    If the jobs have no memory for results yet, it is allocated and zeroed. With ``close=False``, launch only the first
    kernel of each job, which makes choices such as codebooks.
    """
    device = work.device
    if len(jobs) > 1:  # put jobs with the same kernel together, in descending order of grids
        jobs = sorted(jobs, key=lambda job: ([kernel.name for kernel, _ in job.steps], -job.layout.grid))
    if not jobs[0].written:
        _place_results(work, jobs)
    preprocessing = [some for job in jobs if (some := job.preprocessing.struct(job.written))]
    scratch = WarpScratch(work, [(job.plan.kernel, job.layout.grid, job.layout.scratch) for job in jobs])
    if device.capturing():
        work.keep(scratch)
    first = aligned(PREPROCESSING.size * len(preprocessing))
    taken = first + ENCODING.size * len(jobs)
    offset = taken + scratch.taken_nbytes
    made = offset + sum([job.plan.nbytes for job in jobs])
    address = work.new(made + sum([job.plan.made_nbytes for job in jobs]))
    encodings, uploads = bytearray(b"".join(preprocessing).ljust(first)), bytearray(scratch.taken_nbytes)
    for job in jobs:
        encodings += job.struct(address + offset, scratch.units(address + taken, used=job.layout.scratch.nbytes > 0))
        uploads += job.plan.upload(made - offset, job.stream)
        offset += job.plan.nbytes
        made += job.plan.made_nbytes
    work.send(address, encodings + uploads)
    if preprocessing:
        grid = grid_for(device, max(job.plan.view.n for job in jobs))
        launch_each(device, "preprocess", [grid] * len(preprocessing), address, PREPROCESSING.size)
    for step in range(max([len(job.steps) for job in jobs]) if close else 1):
        own = [(i, *job.steps[step]) for i, job in enumerate(jobs) if step < len(job.steps)]
        for kernel, some in itertools.groupby(own, key=_kernel) if len(own) > 1 else [(own[0][1], own)]:
            numbers, _, grids = zip(*some, strict=True)
            launch_each(device, kernel.name, grids, address + first + ENCODING.size * numbers[0], ENCODING.size)
    if close:
        grids = [job.layout.other_grid for job in jobs]
        launch_each(device, "close_frame", grids, address + first, ENCODING.size)


def _place_results(work: CallMemory, jobs: Sequence[EncodeJob]) -> None:
    """Allocate zeroed memory for the results of jobs; their codec_written structs are adjacent, in the jobs' order."""
    written = aligned(WRITTEN_NBYTES * len(jobs))
    nbytes = written + sum(job.layout.zeros_nbytes for job in jobs)
    address = work.new(nbytes)
    work.device.clear(address, nbytes)
    at = address + written
    for i, job in enumerate(jobs):
        job.written, job.counts = address + WRITTEN_NBYTES * i, at
        at += job.layout.zeros_nbytes
