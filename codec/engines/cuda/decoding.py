"""Frames to tensors: headers are read by the host, blocks by one kernel."""

import struct
from typing import Any

from codec import structs
from codec.core import DTYPE_NAMES, ITEMSIZE, MANTISSA_BITS, check, ffi, lib, new_bytes
from codec.engines.cuda.before import Before
from codec.engines.cuda.encoding import ALIGNMENT
from codec.engines.cuda.job import WARPS
from codec.engines.cuda.work import Work, grid_for, pointer, small, struct_of
from codec.engines.native import decoding as native
from codec.engines.request import DecodeRequest
from codec.engines.steps import tensor_like
from codec.errors import CodecError, FrameError, SpecError, StateError, Status
from codec.frame import read_header
from codec.metrics.asked import Asked, asked
from codec.structs import Call
from codec.view import TensorView

_HEAD = 4096  # bytes of a frame that come to the host at first: most have no longer side section
_FOUND = struct.Struct("<QQII")  # codec_found of native/cuda/job.cuh
_NONE = 2**64 - 1


class Frame:
    """A frame whose header was read, with its job on the device.

    Parameters
    ----------
    work : Work
    r : DecodeRequest
    frame : TensorView
        One of the request's.

    Raises
    ------
    CodecError
        All that can be said without the frame's blocks.
    """

    def __init__(self, work: Work, r: DecodeRequest, frame: TensorView) -> None:
        self.work, self.request, self.frame = work, r, frame
        self._head = _head(work, frame, r.head)
        self.info = info = read_header(self._head)
        self.shape = tuple(info.shape[0 : info.rank])
        self.dtype = DTYPE_NAMES[info.dtype]
        self._checked = False

    def on_host(self) -> TensorView:
        """All of it."""
        return self.work.fetch(self.frame)

    def refuse_size(self) -> None:
        """Raise what is wrong with a frame that is not whole, or declares too large a tensor."""
        frame_nbytes = self.info.frame_nbytes
        if self.request.head is not None and frame_nbytes != self.frame.nbytes:
            raise FrameError(f"a frame of {self.frame.nbytes} bytes, of {frame_nbytes} by head=", Status.BAD_HEADER)
        nothing = TensorView(self.dtype, self.shape, ffi.NULL, 0, None)
        call = structs.take()
        call.info.tensor_nbytes = self.info.tensor_nbytes
        native.refuse(call, self.request, self.on_host(), nothing)

    def open(self, v: TensorView, into: int) -> None:
        """Make the job for a destination like this one."""
        info, work, head = self.info, self.work, self._head
        self.metric = metric = self._asked() if self.request.metric is not None else None
        call = structs.take()
        call.context.into = into
        if self.request.codebooks:
            call.set_codebooks(self.request.codebooks)
        if metric is not None:
            call.set_metric(metric, read=False)
        size = ffi.new("size_t[2]")
        check(lib.codec_job_nbytes(ffi.addressof(info.spec), tensor_like(info), size, size + 1))
        job, view = new_bytes(size[0]), ffi.new("codec_view *")
        args = head.data, head.nbytes, self.frame.nbytes, call.context, job, size[0], ffi.NULL
        status = lib.codec_decode_plan(*args)
        if status or not self._fits(v, metric, into):
            self._refuse(call, v)
        view.struct_nbytes = ffi.sizeof("codec_view")
        check(lib.codec_job_view(job, view))
        self._call, self._job, self.view = call, job, view
        found = _FOUND.pack(_NONE, 0, 0, 0)
        self._job_at, self._found = work.put(ffi.buffer(job), found)
        self._at = work.read(self.frame, ALIGNMENT)
        before = Before(work, info.n)
        if self._shared and metric is not None:
            before.ask(metric)
        if asked_for := before.struct():
            self.work.device.launch("before", (grid_for(work.device, info.n), 1), pointer(work.put(asked_for)[0]))
        self._exponents = before.exponents
        self._choose()

    def _choose(self) -> None:
        """The kernel that decodes it, and how many blocks of threads; memory for their warps."""
        device, v = self.work.device, self.view
        family, which, numbers = _kernel(v, ITEMSIZE[self.dtype])
        self._kernel, self._scratch = f"decode_{family}{which}", 0
        device.prepare([self._kernel])
        if numbers is None:
            self._grid = grid_for(device, v.n)
            return
        self._grid = min(-(-v.nblocks // WARPS), 4 * device.processors)
        self._scratch = self.work.new(self._grid * WARPS * device.numbers(self._kernel, *numbers)[-1])

    def _asked(self) -> Asked | None:
        """What levels go by; but if that does not fit, see first that it is not the frame's fault."""
        try:
            return asked(self.request.metric, self.request.state, self.info.n)
        except (SpecError, StateError):
            self.verify()
            raise

    @property
    def _shared(self) -> bool:
        spec = self.info.spec
        return spec.codec == lib.CODEC_TRUNCATE and spec.variant == lib.CODEC_LEVELS_SHARED and self.info.nblocks > 0

    def _fits(self, v: TensorView, metric: Asked | None, into: int) -> bool:
        """Whether the destination is like the frame's tensor, and the state there."""
        dtype = self.dtype if into == lib.CODEC_INTO_STORE else "float32"
        takes = into == lib.CODEC_INTO_STORE or self.dtype in MANTISSA_BITS
        state = not self._shared or (metric is not None and metric.levels is None)
        return takes and state and (v.dtype, v.shape) == (dtype, self.shape)

    def _refuse(self, call: Call, v: TensorView) -> None:
        """Raise what the C library says of all that precedes the blocks.

        It does not get to these, unless head= is another frame's or the frame changes meanwhile: so what it would read
        then is copied for it, too.
        """
        frame, info, metric = self.on_host(), self.info, self.metric
        if metric is not None:
            state = {name: self.work.fetch(array) for name, array in metric.state.items()}
            levels = self.work.fetch(metric.levels) if metric.levels is not None else None
            call.set_metric(Asked(metric.groups, state, levels))
        check(lib.codec_scratch(ffi.addressof(info.spec), tensor_like(info), call.size))
        size = call.size[0]
        call.context.flags |= lib.CODEC_CHECK_ONLY
        t = call.fill_tensor(v)
        check(lib.codec_decode(frame.data, frame.nbytes, t, call.context, call.scratch(size), size), call.fault)
        raise FrameError("head= is not this frame's", Status.BAD_HEADER)

    def verify(self) -> None:
        """Raise FrameError if it is not what was written."""
        frame = self.on_host()
        check(lib.codec_verify(frame.data, frame.nbytes))

    def adds_up_with(self, other: "Frame") -> bool:
        """Whether both are ternary, of the same parts and scales: then their codes add up."""
        return (
            (self.view.codec, self.view.variant) == (lib.CODEC_TERNARY, other.view.variant)
            and self.view.nblocks == other.view.nblocks > 0
            and self._parts() == other._parts()
        )

    def _parts(self) -> list[tuple[int, ...]]:
        """Values, row and scale of each part of values, as bits."""
        a = self.view.row_parts
        records = struct.iter_unpack("<QQQIIII", ffi.buffer(self._job + a.at, a.count * a.itemsize))
        return [(count, row, scale) for _, count, _, _, row, scale, _ in records]

    def begin(
        self, to: int, into: int = lib.CODEC_INTO_STORE, weight: float = 1, divide: float = 0, codes: int = 0
    ) -> None:
        """Begin to decode to an address; 0: to check all of it without a destination.

        `codes`: CODEC_UNSCALED and CODEC_RESCALE, as in a context's flags.
        """
        unscaled, rescale = bool(codes & lib.CODEC_UNSCALED), bool(codes & lib.CODEC_RESCALE)
        sink = struct_of("<QIffII4x", to, into, weight, divide, unscaled, rescale)
        view = struct_of(f"{ffi.sizeof('codec_view')}s", bytes(ffi.buffer(self.view)))
        place = [pointer(at) for at in ((self._job_at, self._at, self._scratch) if self._scratch else (self._at,))]
        rest = [pointer(self._exponents)] if self._kernel == "decode_truncate" else []
        checks = small(not self._checked), pointer(self._found)
        self.work.device.launch(self._kernel, (self._grid, 1), view, *place, sink, *checks, *rest)

    def end(self) -> None:
        """Wait for what was begun.

        Raises
        ------
        FrameError, StateError
            What is wrong with the frame: of its blocks the first one's.
        """
        if self._checked:
            return
        fault, seal, _, _ = _FOUND.unpack(self.work.device.download(self._found, _FOUND.size))
        if fault != _NONE:
            try:
                check(fault & 255)
            except CodecError as e:
                if fault >> 8:
                    e.args = (f"{e.args[0]} (block {(fault >> 8) - 1})", *e.args[1:])
                raise
        check(lib.codec_decode_close(self._call.context, self._job, seal), self._call.fault)
        self._checked = True
        structs.give(self._call)


def _head(work: Work, frame: TensorView, given: TensorView | None) -> TensorView:
    """The header and the side section, in host memory."""
    if frame.device == "cpu":
        return frame
    head = work.fetch(frame.first(_HEAD) if given is None else given.first(frame.nbytes))
    info = read_header(head)
    need = min(frame.nbytes, info.side_offset + info.side_nbytes)
    return head if need <= head.nbytes else work.fetch(frame.first(need))


def _kernel(v: Any, size: int) -> tuple[str, str, tuple[str, int] | None]:
    """The family, which of its kernels, and of which numbers the last is a warp's scratch."""
    if v.layout == 0:
        return "stored", "", None
    if v.codec == lib.CODEC_LOSSLESS:
        return "lossless", f"<{size}>", ("decode_lossless_nbytes", size.bit_length())
    if v.codec == lib.CODEC_TRUNCATE:
        return "truncate", "", ("decode_truncate_nbytes", 1)
    return "rows", f"<{v.codec}>", ("decode_rows_nbytes", 1)
