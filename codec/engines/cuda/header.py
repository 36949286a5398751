"""Headers of frames on a device, in host memory: checks that precede the arguments of kernels."""

from codec import _call
from codec._c.library import DTYPE_NAMES, MANTISSA_BITS, check, ffi, lib
from codec._call import Call
from codec.engines.blockwise import tensor_like
from codec.engines.cuda.workspace import CallMemory
from codec.engines.native import decoding as native
from codec.engines.request import DecodeRequest
from codec.errors import ArgumentError, FrameError, StateError, Status
from codec.inspection import read_header
from codec.optimizers.arguments import LevelSource, level_source, set_levels
from codec.tensors.view import TensorView, view_base


class DeviceHeader:
    """Header of a frame on a device.

    Parameters
    ----------
    work : CallMemory
        Device memory of the call.
    r : DecodeRequest
        Arguments of the call.
    frame : TensorView
        Bytes of this frame, one of ``r.frames``.
    head : TensorView
        First bytes of the frame, in host memory.

    Attributes
    ----------
    head : TensorView
        First bytes of the frame. If they are fewer than :attr:`head_nbytes`, the caller replaces them by a longer head.
    at : int
        Address of the frame on the device; 0: not yet copied there.

    Raises
    ------
    CodecError
        The header is invalid.
    """

    def __init__(self, work: CallMemory, r: DecodeRequest, frame: TensorView, head: TensorView) -> None:
        self.work, self.request, self.frame, self.head = work, r, frame, head
        self.info = info = read_header(head)
        self.head_nbytes = min(frame.nbytes, info.side_offset + info.side_nbytes)
        self.shape = tuple(info.shape[0 : info.rank])
        self.dtype = DTYPE_NAMES[info.dtype]
        self.at = 0

    @property
    def is_delta(self) -> bool:
        """True if the frame is encoded by Delta, that is, contains changes of a base."""
        return self.info.spec.codec == lib.CODEC_DELTA

    def on_host(self) -> TensorView:
        """Return the whole frame in host memory."""
        return self.work.fetch(self.frame)

    def refuse_size(self) -> None:
        """Raise the error of a frame whose header declares a wrong size, or a tensor larger than ``max_nbytes``."""
        frame_nbytes = self.info.frame_nbytes
        if self.request.head is not None and frame_nbytes != self.frame.nbytes:
            raise FrameError(
                f"the frame has {self.frame.nbytes} bytes, but head= is that of a frame of {frame_nbytes}: pass the "
                "head of this frame",
                Status.BAD_HEADER,
            )
        nothing = TensorView(self.dtype, self.shape, ffi.NULL, 0, None)
        call = _call.take()
        call.info.tensor_nbytes = self.info.tensor_nbytes
        native.refuse(call, self.request, self.on_host(), nothing)

    def base(self) -> TensorView | None:
        """Return the view of the request's base; None if the frame needs none.

        If the base is missing, or has another dtype or shape, raise an error: FrameError if the frame is damaged,
        otherwise the error about the base.
        """
        if not self.is_delta:
            return None
        r, kind = self.request, (self.dtype, self.shape)
        base = None if r.base is None else view_base(r.base, self.dtype)
        if base is None or base[:2] != kind:
            native.check_base(r, self.on_host(), *kind)
        return base

    def levels(self) -> LevelSource | None:
        """Return the source of levels, if any. If the state does not fit, report a damaged frame before the state."""
        bound = self.request.bound
        try:
            return None if bound is None else level_source(bound, self.info.n)
        except (ArgumentError, StateError):
            self.verify()
            raise

    @property
    def is_shared(self) -> bool:
        """True if the receiver computes levels from its own copy of the optimizer state."""
        spec = self.info.spec
        return (
            spec.codec == lib.CODEC_TRUNCATE and spec.variant == lib.CODEC_LEVEL_CODING_SHARED and self.info.nblocks > 0
        )

    def fits(self, v: TensorView, source: LevelSource | None, into: int) -> bool:
        """Return True if the destination matches the frame's tensor, and the required optimizer state is given."""
        dtype = self.dtype if into == lib.CODEC_INTO_STORE else "float32"
        takes = into == lib.CODEC_INTO_STORE or (self.dtype in MANTISSA_BITS and not self.is_delta)
        state = (source is not None and source.levels is None) or not self.is_shared
        return takes and state and (v.dtype, v.shape) == (dtype, self.shape)

    def refuse(self, call: Call, v: TensorView, source: LevelSource | None, base: TensorView | None) -> None:
        """Raise the error that the C library finds in the header, side section or directory.

        If the C library finds no error in them, it also decodes the blocks, and so needs the optimizer state. That
        happens if head= belongs to another frame, or if the frame has changed since its head was read.
        """
        frame, info = self.on_host(), self.info
        if source is not None:
            state = {name: self.work.fetch(array) for name, array in source.state.items()}
            levels = self.work.fetch(source.levels) if source.levels is not None else None
            set_levels(call, LevelSource(source.groups, state, levels))
        if base is not None:
            call.set_base(self.work.fetch(base))
        check(lib.codec_scratch(ffi.addressof(info.spec), tensor_like(info), call.size))
        size = call.size[0]
        call.context.flags |= lib.CODEC_CHECK_ONLY
        t = call.fill_tensor(v)
        check(lib.codec_decode(frame.data, frame.nbytes, t, call.context, call.scratch(size), size), call.fault)

    def verify(self) -> None:
        """Copy the frame to host memory, and raise FrameError if it is invalid."""
        frame = self.on_host()
        check(lib.codec_verify(frame.data, frame.nbytes))
