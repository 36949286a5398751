"""What is decided before a frame's first block: by shapes here, by values in a kernel."""

from typing import Any, NamedTuple

from codec import structs
from codec.core import DTYPES, ITEMSIZE, check, ffi, lib, new_bytes
from codec.engines.cuda.before import Before
from codec.engines.cuda.work import Work, number, pointer, small, struct_of
from codec.engines.request import EncodeRequest
from codec.spec_structs import spec_struct
from codec.structs import Call, new_tensor

WARPS = 4  # of a block of threads that does blocks of values
WRITTEN_NBYTES = 48  # a codec_written of native/cuda/written.cuh
COUNTS_NBYTES = 1024  # of plane 0's symbols, with which a codec_choice of native/cuda/sample.cuh begins
_MAX_HEADER = 112


class Plan(NamedTuple):
    """What is known of a frame without its values: the C library's codec_view, its job and the header."""

    view: Any
    job: Any
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
    call = _call(r)
    size, plan = ffi.new("size_t[2]"), ffi.new("codec_plan *")
    check(lib.codec_job_nbytes(spec, like, size, size + 1))
    job, view, head = new_bytes(size[0]), ffi.new("codec_view *"), new_bytes(_MAX_HEADER)
    check(lib.codec_encode_plan(spec, like, call.context, job, size[0], plan))
    check(lib.codec_encode_head(job, head, _MAX_HEADER, size + 1))
    structs.give(call)
    view.struct_nbytes = ffi.sizeof("codec_view")
    check(lib.codec_job_view(job, view))
    most = -(-plan.region_bound // 64) * 64
    return Plan(view, job, head, bound_of(r), most)


def _call(r: EncodeRequest) -> Call:
    """What is asked for besides a spec."""
    call = structs.take()
    call.context.stream = r.stream
    if r.codebook is not None:
        call.set_codebooks((r.codebook,))
    if r.segments is not None:
        call.set_segments(r.segments)
    if r.metric is not None:
        call.set_metric(r.metric, read=False)
    if r.residual is not None:
        call.context.residual = ffi.cast("float *", r.residual.data)
    return call


class Job:
    """A plan on the device, with memory for what is decided there.

    Parameters
    ----------
    work : Work
    r : EncodeRequest
    plan : Plan
    residual : int, optional
        Address of what is left, and is added first if that is asked for.
    written : int, optional
        Address of :data:`WRITTEN_NBYTES` in which status and size will be.

    Attributes
    ----------
    family, kernel : str
        The kernel for blocks, and whose it is.
    grid, teams : int
        Blocks of threads: that do blocks of values, and that do all else.
    source, x : ctypes values
        A codec_source, and what kernels for blocks take.
    counts : int
        Address of 256 uint32: how often each symbol of plane 0 occurs in the sample.
    """

    def __init__(self, work: Work, r: EncodeRequest, plan: Plan, residual: int = 0, written: int = 0) -> None:
        device, v = work.device, plan.view
        self._work, self.plan = work, plan
        self.family, self.kernel, numbers = _kernels(v, ITEMSIZE[r.x.dtype])
        device.prepare([f"choose_{self.family}", self.kernel, "close_frame"] if v.nblocks else ["close_frame"])
        # a tensor is read at any time while what is left of it is written, by other threads
        in_place = r.residual is not None and residual == r.x.address
        values = work.copy(r.x) if in_place else work.read(r.x)
        self._before = before = Before(work, v.n)
        if r.metric is not None:
            before.ask(r.metric)
        if r.feedback:
            before.add(r.x, values, residual)
            values = before.rounded
        self.source = struct_of("<3Q", values, before.sums, residual)
        self.x = pointer(values) if self.family == "lossless" else self.source
        self.cuts = [struct_of("<2Q", before.exponents, before.levels)] if self.family == "truncate" else []
        self.view, self.job, self.head = map(pointer, work.put(*map(ffi.buffer, (v, plan.job, plan.head))))
        each, each_part = device.numbers("close_frame", "choose_nbytes", 2)
        sizes = each + max(v.model_parts.count, 1) * each_part, 8 * v.nblocks, WRITTEN_NBYTES
        self.counts, places, own = work.zeros(*sizes)
        self.written = written or own
        if written:
            device.clear(written, WRITTEN_NBYTES)
        self.choice, self.places = pointer(self.counts), pointer(places)
        self.grid = max(1, min(-(-v.nblocks // WARPS), 4 * device.processors))
        self.teams = min(WARPS * self.grid, 2 * device.processors)
        each = device.numbers(self.kernel, *numbers)[-1] + plan.region if v.nblocks else 0
        self.scratch = pointer(work.new(WARPS * self.grid * each)), number(each)

    def choose(self, room: int) -> None:
        """Begin to decide what depends on values, for a frame of at most so many bytes."""
        self._before.begin(self.written)
        if not self.plan.view.nblocks:
            return
        written = pointer(self.written)
        if self.family == "rows":
            rest = [self.choice, *self.scratch, written]
        else:
            parts = small(self.plan.view.model_parts.count)
            rest = [parts, self.choice, number(room), *self.cuts, *([written] if self.cuts else [])]
        self._work.device.launch(f"choose_{self.family}", self.teams, self.view, self.job, self.x, *rest)


def _kernels(v: Any, size: int) -> tuple[str, str, tuple[str, int]]:
    """The family, its kernel for blocks, and of which numbers the last is a warp's scratch."""
    if v.codec == lib.CODEC_LOSSLESS:
        return "lossless", f"encode_lossless<{size}>", ("encode_lossless_nbytes", size.bit_length())
    family = "truncate" if v.codec == lib.CODEC_TRUNCATE else "rows"
    return family, f"encode_{family}", (f"encode_{family}_nbytes", 1)
