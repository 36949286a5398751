"""Frames to decode on a device: the host reads a frame's header, and computes the arguments of its kernels."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from codec import _call
from codec._c.library import DTYPE_NAMES, ITEMSIZE, MANTISSA_BITS, check, ffi, lib, new_bytes
from codec._call import Call
from codec.engines.blockwise import tensor_like
from codec.engines.cuda.encoding import ALIGNMENT
from codec.engines.cuda.kernels import BY_NUMBER, Kernel
from codec.engines.cuda.plan import launch_of
from codec.engines.cuda.preprocess import Preprocessing
from codec.engines.cuda.scratch import NOTHING, Need, Units, need_of
from codec.engines.cuda.structs import DECODING, FOUND, LISTS
from codec.engines.cuda.upload import DATA_AT, Image
from codec.engines.cuda.workspace import Work, grid_for
from codec.engines.native import decoding as native
from codec.engines.request import DecodeRequest
from codec.errors import ArgumentError, CodecError, FrameError, StateError, Status
from codec.inspection import read_header
from codec.optimizers.arguments import LevelSource, level_source
from codec.specs import BoundSpec
from codec.tensors.view import TensorView, view_base

_NONE = 2**64 - 1
FOUND_NBYTES, DECODING_NBYTES = FOUND.size, DECODING.size
NOTHING_FOUND = FOUND.pack(_NONE, *[0] * 6)
# LISTED_SHARE of native/cuda/delta/decode.cuh, and the maximum number of changes that one byte of a frame can code.
_LISTED_SHARE, _CHANGES = 8, 4


class Sink(NamedTuple):
    """Destination of decoded values, and the operation that combines them with the destination's contents.

    Attributes
    ----------
    to : int
        Device address of the destination; 0: frames are only validated.
    into, weight, divide
        As the fields of the same names in the C struct ``codec_context``.
    codes : int
        Flags CODEC_UNSCALED and CODEC_RESCALE, as in a codec_context.
    """

    to: int
    into: int = lib.CODEC_INTO_STORE
    weight: float = 1
    divide: float = 0
    codes: int = 0


class Frame:
    """Frame on a device whose header has been read.

    Parameters
    ----------
    work : Work
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
    kernel, grid
        Kernel that decodes the frame, and its number of thread blocks.
    summing : Kernel or None
        Kernel that decodes and adds several such frames at once.
    image : Image
        Decoding job of the frame, to be copied to the device.
    base : TensorView or None
        Base of a frame of Delta, after :meth:`open_base`.
    at : int
        Address of the frame on the device; 0: not yet copied there.
    lists : int
        Device address of the codec_lists of a frame of Delta, after :meth:`take_lists`; 0: blocks are decoded twice,
        for validation and for output.

    Raises
    ------
    CodecError
        The header is invalid.
    """

    def __init__(self, work: Work, r: DecodeRequest, frame: TensorView, head: TensorView) -> None:
        self.work, self.request, self.frame, self.head = work, r, frame, head
        self.info = info = read_header(head)
        self.head_nbytes = min(frame.nbytes, info.side_offset + info.side_nbytes)
        self.shape = tuple(info.shape[0 : info.rank])
        self.dtype = DTYPE_NAMES[info.dtype]
        self.base: TensorView | None = None
        self.at = self._base_at = self.lists = 0

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

    def open(self, v: TensorView, into: int) -> None:
        """Create the job for decoding to a destination of the dtype and shape of ``v``, with the operation ``into``."""
        info, work, head = self.info, self.work, self.head
        self.levels = levels = self._level_source(self.request.bound) if self.request.bound is not None else None
        call = _call.take()
        call.context.into = into
        if self.request.codebooks:
            call.set_codebooks(self.request.codebooks)
        if levels is not None:
            call.set_levels(levels, read=False)
        nothing = call.fill_tensor(TensorView(self.dtype, self.shape, ffi.NULL, 0, None))
        size = ffi.new("size_t[2]")
        check(lib.codec_job_nbytes(ffi.addressof(info.spec), nothing, size, size + 1))
        job, view = new_bytes(size[0]), ffi.new("codec_view *")
        args = head.data, head.nbytes, self.frame.nbytes, call.context, job, size[0], ffi.NULL
        status = lib.codec_decode_plan(*args)
        if status or not self._fits(v, levels, into):
            if self.request.in_flight:
                check(status, call.fault)
            else:
                self._refuse(call, v)
            raise FrameError("head= belongs to another frame: pass the head of this frame", Status.BAD_HEADER)
        view.struct_nbytes = ffi.sizeof("codec_view")
        check(lib.codec_job_view(job, view))
        self._call, self._job, self._job_nbytes, self.view = call, job, size[0], view
        view.tables.count = view.coded.bit_length()  # only coded planes have tables
        self.image = Image(view, job, ["tables", "model_parts", "offsets", "row_parts"])
        self.at = self.at or work.read(self.frame, ALIGNMENT)
        self._base_at = work.read(self.base) if self.base is not None else 0
        self.preprocessing = preprocessing = Preprocessing(work, info.n)
        if levels is not None and self._shared:
            preprocessing.ask(levels)
        device, launch = work.device, launch_of(job)
        is_aligned = v.device == "cpu" or v.address % (4 * ITEMSIZE[self.dtype]) == 0
        is_fast = launch.decode_fast and into == lib.CODEC_INTO_STORE and is_aligned
        self.kernel: Kernel = BY_NUMBER[launch.decode_fast if is_fast else launch.decode]
        self.summing: Kernel | None = BY_NUMBER.get(launch.reduce)
        self._launch = None if is_fast else launch
        blocks = self.kernel.grid(device.processors, view.nblocks)
        self.grid = blocks if view.nblocks else grid_for(device, view.n)

    def open_base(self) -> None:
        """Set :attr:`base` to the view of the request's base.

        If the base is missing, or has another dtype or shape, raise an error: FrameError if the frame is damaged,
        otherwise the error about the base.
        """
        r, kind = self.request, (self.dtype, self.shape)
        base = None if r.base is None else view_base(r.base, self.dtype)
        if base is None or base[:2] != kind:
            native.check_base(r, self.on_host(), *kind)
        self.base = base

    @property
    def list_nbytes(self) -> int:
        """Size in bytes of a list with an entry for each change that the blocks can contain."""
        if not self.is_delta or not self.info.nblocks:
            return 0
        most = min(self.info.n // _LISTED_SHARE, _CHANGES * self.frame.nbytes)
        return most * (12 if ITEMSIZE[self.dtype] == 8 else 8)

    def take_lists(self, nbytes: int) -> None:
        """Allocate the frame's list of changes, with `nbytes` bytes of entries."""
        zeros = LISTS.size + 8 * self.info.nblocks
        self.lists = self.work.new(zeros + nbytes)
        self.work.device.clear(self.lists, zeros)
        entry = 12 if ITEMSIZE[self.dtype] == 8 else 8
        self.work.send(self.lists, LISTS.pack(0, nbytes // entry))

    def _level_source(self, bound: BoundSpec) -> LevelSource:
        """Return the source of levels. If the state does not fit, report a damaged frame before the state."""
        try:
            return level_source(bound, self.info.n)
        except (ArgumentError, StateError):
            self.verify()
            raise

    @property
    def _shared(self) -> bool:
        """True if the receiver computes levels from its own copy of the optimizer state."""
        spec = self.info.spec
        return (
            spec.codec == lib.CODEC_TRUNCATE and spec.variant == lib.CODEC_LEVEL_CODING_SHARED and self.info.nblocks > 0
        )

    def _fits(self, v: TensorView, source: LevelSource | None, into: int) -> bool:
        """Return True if the destination matches the frame's tensor, and the required optimizer state is given."""
        dtype = self.dtype if into == lib.CODEC_INTO_STORE else "float32"
        takes = into == lib.CODEC_INTO_STORE or (self.dtype in MANTISSA_BITS and not self.is_delta)
        state = (source is not None and source.levels is None) or not self._shared
        return takes and state and (v.dtype, v.shape) == (dtype, self.shape)

    def _refuse(self, call: Call, v: TensorView) -> None:
        """Raise the error that the C library finds in the header, side section or directory.

        If the C library finds no error in them, it also decodes the blocks, and so needs the optimizer state. That
        happens if head= belongs to another frame, or if the frame has changed since its head was read.
        """
        frame, info, source = self.on_host(), self.info, self.levels
        if source is not None:
            state = {name: self.work.fetch(array) for name, array in source.state.items()}
            levels = self.work.fetch(source.levels) if source.levels is not None else None
            call.set_levels(LevelSource(source.groups, state, levels))
        if self.base is not None:
            call.set_base(self.work.fetch(self.base))
        check(lib.codec_scratch(ffi.addressof(info.spec), tensor_like(info), call.size))
        size = call.size[0]
        call.context.flags |= lib.CODEC_CHECK_ONLY
        t = call.fill_tensor(v)
        check(lib.codec_decode(frame.data, frame.nbytes, t, call.context, call.scratch(size), size), call.fault)

    def verify(self) -> None:
        """Copy the frame to host memory, and raise FrameError if it is invalid."""
        frame = self.on_host()
        check(lib.codec_verify(frame.data, frame.nbytes))

    def adds_up_with(self, other: "Frame") -> bool:
        """Return True if the codes of both frames add up as integers: Ternary frames with equal parts and scales."""
        return (
            (self.view.codec, self.view.variant) == (lib.CODEC_TERNARY, other.view.variant)
            and self.view.nblocks == other.view.nblocks > 0
            and self._parts() == other._parts()
        )

    def is_cut_like(self, other: "Frame") -> bool:
        """Return True if one launch of :attr:`summing` can decode both frames: same codec, blocks and groups."""
        a, b = self.view, other.view
        same = all(getattr(a, name) == getattr(b, name) for name in ("codec", "variant", "options", "bits", "dtype"))
        return same and a.nblocks == b.nblocks and [p[:2] for p in self._parts()] == [p[:2] for p in other._parts()]

    def _parts(self) -> list[tuple[int, ...]]:
        """Return, for each part of the scale model, its number of values, its group size and its scale's bits."""
        a = self.view.row_parts
        records = struct.iter_unpack("<QQQIIII", ffi.buffer(self._job + a.at, a.count * a.itemsize))
        return [(count, row, scale) for _, count, _, _, row, scale, _ in records]

    @property
    def scratch(self) -> Need:
        """Return the scratch memory that :attr:`kernel` needs. The kernel must have been loaded."""
        launch = self._launch
        return NOTHING if launch is None else need_of(self.work.device, self.kernel, launch.decode_scratch)

    def decoding(self, at: int, found: int, scratch: Units, sink: Sink, *, checks: bool) -> bytes:
        """Return the frame's codec_decoding, the struct with a kernel's arguments.

        Parameters
        ----------
        at, found : int
            Device addresses of the frame's image and of its codec_found.
        scratch : tuple of int
            Fields of a codec_units, the scratch memory of the kernel.
        sink : Sink
            Destination of the values.
        checks : bool
            True: also compute the digests of base and result.
        """
        codes = bool(sink.codes & lib.CODEC_UNSCALED), bool(sink.codes & lib.CODEC_RESCALE)
        addresses = self._base_at or self.preprocessing.exponents, found
        warps = self.kernel.warps * self.grid
        return DECODING.pack(
            at, at + DATA_AT, self.at, *scratch, *addresses, *sink[:4], *codes, 0, checks, warps, self.lists, 0
        )

    def close(self, found: bytes) -> None:
        """Raise the error that the kernels have reported, if any.

        Parameters
        ----------
        found : bytes
            Copy of the frame's codec_found after all checks.

        Raises
        ------
        FrameError, StateError
            A block is invalid (the first one is reported), or a checksum or digest does not match.
        """
        if self.request.arriving is not None:
            self._plan_again(self.request.arriving)
        fault, checksum, _, _, *digests, _ = FOUND.unpack(found)
        status = fault & 255
        if status == Status.OTHER_BASE:  # the changes do not fit the base: the base is wrong, or the frame is invalid
            if digests[0] != self.info.base_digest:
                self.verify()
                self._check_digests(digests)
            status = int(Status.BAD_REGION)
        if fault != _NONE:
            try:
                check(status)
            except CodecError as e:
                if fault >> 8:
                    e.args = (f"{e.args[0]} (block {(fault >> 8) - 1})", *e.args[1:])
                raise
        check(lib.codec_decode_close(self._call.context, self._job, checksum), self._call.fault)
        if self.is_delta:
            self._check_digests(digests)
        _call.give(self._call)

    def _plan_again(self, head: TensorView) -> None:
        """Plan the job again with the received head, which may differ from the expected head only in the checksum."""
        args = head.data, head.nbytes, self.frame.nbytes, self._call.context, self._job, self._job_nbytes, ffi.NULL
        check(lib.codec_decode_plan(*args), self._call.fault)

    def _check_digests(self, digests: Sequence[int]) -> None:
        """Compare the computed digests of base and result with those in the frame, as the C library does."""
        fault, expected = self._call.fault, (self.info.base_digest, self.info.result_digest)
        applied = digests[0] == self.info.result_digest
        for i, status in enumerate((Status.ALREADY_APPLIED if applied else Status.OTHER_BASE, Status.CHECKSUM)):
            if digests[i] != expected[i]:
                fault.offset, fault.found, fault.expected = self.view.side_offset + 8 * i, expected[i], digests[i]
                check(int(status), fault)
