"""Tensors to frames: three kernels, one after the other, that nothing waits for."""

import struct
from typing import Any, NamedTuple

from codec import structs
from codec.core import DTYPES, ITEMSIZE, check, ffi, lib, new_bytes
from codec.engines.cuda.before import Before
from codec.engines.cuda.work import Work, number, pointer, small, struct_of
from codec.engines.native.encoding import frame_in
from codec.engines.request import EncodeRequest
from codec.errors import SpecError, Status
from codec.spec_structs import spec_struct
from codec.structs import Call, new_tensor
from codec.view import TensorView

ALIGNMENT = 8  # of a frame's sections
WARPS = 4  # of a block of threads
_MAX_HEADER = 112
_WRITTEN = struct.Struct("<4Q4I")  # codec_written of native/cuda/written.cuh
WRITTEN_NBYTES = _WRITTEN.size
_SHORT_OUTPUT = int(Status.SHORT_OUTPUT)


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


def _plan(r: EncodeRequest) -> Plan:
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


class Encoding:
    """A frame on its way. All that it takes is in `work`'s memory, and nothing was waited for.

    Attributes
    ----------
    frame : int
        Address of the frame.

    Parameters
    ----------
    work : Work
    r : EncodeRequest
    written : int, optional
        Address of memory for a codec_written of ``native/cuda/written.cuh``: size and status will be there.
    """

    def __init__(self, work: Work, r: EncodeRequest, written: int = 0) -> None:
        r.check_apart()
        self.work, self.request = work, r
        self._plan = plan = _plan(r)
        self._written = written
        short = r.out is not None and r.out.nbytes < plan.bound
        self._new: TensorView | None = None
        if r.out is None and r.x.device != "cpu":
            self._new = work.device.empty("uint8", (plan.bound,), r.x.owner)[1]
            self.frame, self._capacity = self._new.address, plan.bound
        elif r.out is None or r.out.device == "cpu" or r.out.address % ALIGNMENT or (short and r.residual is not None):
            self.frame, self._capacity = work.new(plan.bound), plan.bound
        else:
            self.frame, self._capacity = r.out.address, r.out.nbytes
        # a tensor is read at any time while what is left of it is written, by other threads
        in_place = r.residual is not None and r.residual.address == r.x.address and r.x.device != "cpu"
        values = work.copy(r.x) if in_place else work.read(r.x)
        residual = work.write(r.residual, read=r.feedback, apart=short) if r.residual is not None else 0
        before = Before(work, plan.view.n)
        if r.metric is not None:
            before.ask(r.metric)
        if r.feedback:
            before.add(r.x, values, residual)
            values = before.rounded
        self._launch(before, values, struct_of("<3Q", values, before.sums, residual))

    def _launch(self, before: Before, values: int, source: Any) -> None:
        """Begin the kernels. `source`: a codec_source."""
        work, device = self.work, self.work.device
        v, job, head, _, region = self._plan
        family, block_kernel, numbers = _kernels(v, ITEMSIZE[self.request.x.dtype])
        device.prepare([f"choose_{family}", block_kernel, "close_frame"] if v.nblocks else ["close_frame"])
        view_at, job_at, head_at = map(pointer, work.put(*map(ffi.buffer, (v, job, head))))
        each, each_part = device.numbers("close_frame", "choose_nbytes", 2)
        nparts = v.model_parts.count
        sizes = each + max(nparts, 1) * each_part, 8 * v.nblocks, WRITTEN_NBYTES
        choice, places, own = work.zeros(*sizes)
        if self._written:
            device.clear(self._written, WRITTEN_NBYTES)
        else:
            self._written = own
        frame, room = pointer(self.frame), number(self._capacity)
        grid = max(1, min(-(-v.nblocks // WARPS), 4 * device.processors))
        teams = min(WARPS * grid, 2 * device.processors)
        before.begin(self._written)
        if v.nblocks:
            scratch_each = device.numbers(block_kernel, *numbers)[-1] + region
            scratch = pointer(work.new(WARPS * grid * scratch_each)), number(scratch_each)
            cuts = [struct_of("<2Q", before.exponents, before.levels)] if family == "truncate" else []
            x = pointer(values) if family == "lossless" else source
            if family == "rows":
                rest = [pointer(choice), *scratch, pointer(self._written)]
            else:
                rest = [small(nparts), pointer(choice), room, *cuts, *([pointer(self._written)] if cuts else [])]
            device.launch(f"choose_{family}", teams, view_at, job_at, x, *rest)
            shared = pointer(places), pointer(self._written)
            device.launch(block_kernel, grid, view_at, job_at, x, frame, room, *scratch, *shared, *cuts)
        rest = [frame, room, pointer(choice), head_at, pointer(self._written)]
        device.launch("close_frame", teams, view_at, job_at, source, *rest)

    def finish(self) -> Any:
        """Wait, and return the frame.

        Raises
        ------
        CodecError
            The tensor cannot be encoded.
        """
        said = _WRITTEN.unpack(self.work.device.download(self._written, WRITTEN_NBYTES))
        nbytes, fault, out = said[3], said[6], self.request.out
        if fault == _SHORT_OUTPUT or (out is not None and nbytes > out.nbytes):
            raise SpecError(
                f"out= has {self._capacity if out is None else out.nbytes} bytes, which is too few; "
                "bound() says how many are enough",
                _SHORT_OUTPUT,
            )
        check(fault)
        self.work.finish()
        if out is not None:
            self.work.deliver(out, self.frame, nbytes)
            return frame_in(out, nbytes) if out.device == "cpu" else self.work.device.bytes_of(out, nbytes)
        if self._new is not None:
            return self.work.device.bytes_of(self._new, nbytes)
        return bytes(self.work.device.download(self.frame, nbytes))


def _kernels(v: Any, size: int) -> tuple[str, str, tuple[str, int]]:
    """The family, its kernel for blocks, and of which numbers the last is a warp's scratch."""
    if v.codec == lib.CODEC_LOSSLESS:
        return "lossless", f"encode_lossless<{size}>", ("encode_lossless_nbytes", size.bit_length())
    family = "truncate" if v.codec == lib.CODEC_TRUNCATE else "rows"
    return family, f"encode_{family}", (f"encode_{family}_nbytes", 1)
