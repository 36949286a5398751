"""Frames to decode on a device: the host plans their jobs, and computes the arguments of their kernels."""

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from codec import _call
from codec._c.library import ITEMSIZE, check, ffi, lib, new_bytes
from codec.engines.cuda.encoding import ALIGNMENT
from codec.engines.cuda.header import DeviceHeader
from codec.engines.cuda.kernels import BY_NUMBER, Kernel
from codec.engines.cuda.plan import launch_of
from codec.engines.cuda.preprocess import Preprocessing
from codec.engines.cuda.scratch import NOTHING, Need, Units, need_of
from codec.engines.cuda.structs import DECODING, FOUND, LISTS
from codec.engines.cuda.upload import DATA_AT, Image
from codec.engines.cuda.workspace import grid_for
from codec.errors import CodecError, FrameError, Status
from codec.optimizers.arguments import set_levels
from codec.tensors.view import TensorView

_NONE = 2**64 - 1
FOUND_NBYTES, DECODING_NBYTES = FOUND.size, DECODING.size
NOTHING_FOUND = FOUND.pack(_NONE, *[0] * 6)
# LISTED_SHARE of native/cuda/delta/decode.cuh, and the maximum number of changes that one byte of a frame can code.
_LISTED_SHARE, _CHANGES = 8, 4


class DeviceSink(NamedTuple):
    """Destination of decoded values, and the operation that combines them with the destination's contents.

    Attributes
    ----------
    to : int
        Device address of the destination; 0: frames are only validated.
    into, weight, divide
        As the fields of the same names in the C struct ``codec_context``.
    """

    to: int
    into: int = lib.CODEC_INTO_STORE
    weight: float = 1
    divide: float = 0

    def fields(self) -> tuple[Any, ...]:
        """Return the fields of the kernels' codec_sink: Ternary's codes are values without their scale."""
        if self.into < lib.CODEC_INTO_CODES:
            return *self, False, False
        into = lib.CODEC_INTO_FLOAT32 if self.into == lib.CODEC_INTO_CODES else lib.CODEC_INTO_ADD
        return self.to, into, 1.0, self.divide, True, self.into == lib.CODEC_INTO_SCALE_CODES


class Frame:
    """Frame whose decoding job is planned.

    Parameters
    ----------
    header : DeviceHeader
        Header of the frame. Its head must be complete.
    v : TensorView
        Destination, of which only dtype, shape and alignment are used.
    into : int
        Operation CODEC_INTO_* that combines the values with the destination's.
    base : TensorView, optional
        Base of a frame of Delta.

    Attributes
    ----------
    kernel, grid
        Kernel that decodes the frame, and its number of thread blocks.
    summing : Kernel or None
        Kernel that decodes and adds several such frames at once.
    image : Image
        Decoding job of the frame, to be copied to the device.
    levels : LevelSource or None
        Optimizer state that the receiver computes levels from.
    lists : int
        Device address of the codec_lists of a frame of Delta, after :meth:`take_lists`; 0: blocks are decoded twice,
        for validation and for output.

    Raises
    ------
    CodecError
        The side section is invalid, or the destination does not match the frame.
    """

    def __init__(self, header: DeviceHeader, v: TensorView, into: int, base: TensorView | None = None) -> None:
        self.header, self.base, self.levels, self.lists = header, base, header.levels(), 0
        info, work, request, levels = header.info, header.work, header.request, self.levels
        call = _call.take()
        call.context.into = into
        if request.codebooks:
            call.set_codebooks(request.codebooks)
        if levels is not None:
            set_levels(call, levels, read=False)
        nothing = call.fill_tensor(TensorView(header.dtype, header.shape, ffi.NULL, 0, None))
        size = ffi.new("size_t[2]")
        check(lib.codec_job_nbytes(ffi.addressof(info.spec), nothing, size, size + 1))
        job, view = new_bytes(size[0]), ffi.new("codec_view *")
        self._call, self._job, self._job_nbytes, self.view = call, job, size[0], view
        status = self._plan(header.head)
        if status or not header.fits(v, levels, into):
            if request.in_flight:
                check(status, call.fault)
            else:
                header.refuse(call, v, levels, base)
            raise FrameError("head= belongs to another frame: pass the head of this frame", Status.BAD_HEADER)
        view.struct_nbytes = ffi.sizeof("codec_view")
        check(lib.codec_job_view(job, view))
        view.tables.count = view.coded.bit_length()  # only coded planes have tables
        self.image = Image(view, job, ["tables", "model_parts", "offsets", "row_parts"])
        self._at = header.at or work.read(header.frame, ALIGNMENT)
        self._base_at = work.read(base) if base is not None else 0
        self.preprocessing = preprocessing = Preprocessing(work, info.n)
        if levels is not None and header.is_shared:
            preprocessing.ask(levels)
        device, launch = work.device, launch_of(job)
        is_aligned = v.device == "cpu" or v.address % (4 * ITEMSIZE[header.dtype]) == 0
        is_fast = launch.decode_fast and into == lib.CODEC_INTO_STORE and is_aligned
        self.kernel: Kernel = BY_NUMBER[launch.decode_fast if is_fast else launch.decode]
        self.summing: Kernel | None = BY_NUMBER.get(launch.reduce)
        self._launch = None if is_fast else launch
        blocks = self.kernel.grid(device.processors, view.nblocks)
        self.grid = blocks if view.nblocks else grid_for(device, view.n)

    def _plan(self, head: TensorView) -> int:
        """Plan the job, and return the status."""
        args = head.data, head.nbytes, self.header.frame.nbytes, self._call.context, self._job, self._job_nbytes
        return lib.codec_decode_plan(*args, ffi.NULL)

    @property
    def list_nbytes(self) -> int:
        """Size in bytes of a list with an entry for each change that the blocks can contain."""
        if not self.header.is_delta or not self.header.info.nblocks:
            return 0
        most = min(self.header.info.n // _LISTED_SHARE, _CHANGES * self.header.frame.nbytes)
        return most * (12 if ITEMSIZE[self.header.dtype] == 8 else 8)

    def take_lists(self, nbytes: int) -> None:
        """Allocate the frame's list of changes, with `nbytes` bytes of entries."""
        zeros = LISTS.size + 8 * self.header.info.nblocks
        self.lists = self.header.work.new(zeros + nbytes)
        self.header.work.device.clear(self.lists, zeros)
        entry = 12 if ITEMSIZE[self.header.dtype] == 8 else 8
        self.header.work.send(self.lists, LISTS.pack(0, nbytes // entry))

    def adds_up_with(self, other: "Frame") -> bool:
        """Return True if the codes of both frames add up as integers: same codec, parts and scales."""
        return (
            self.view.traits & lib.CODEC_TRAIT_SUMS != 0
            and (self.view.codec, self.view.variant) == (other.view.codec, other.view.variant)
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
        return NOTHING if launch is None else need_of(self.header.work.device, self.kernel, launch.decode_scratch)

    def decoding(self, at: int, found: int, scratch: Units, sink: DeviceSink, *, checks: bool) -> bytes:
        """Return the frame's codec_decoding, the struct with a kernel's arguments.

        Parameters
        ----------
        at, found : int
            Device addresses of the frame's image and of its codec_found.
        scratch : tuple of int
            Fields of a codec_units, the scratch memory of the kernel.
        sink : DeviceSink
            Destination of the values.
        checks : bool
            True: also compute the digests of base and result.
        """
        addresses = self._base_at or self.preprocessing.exponents, found
        warps = self.kernel.warps * self.grid
        return DECODING.pack(
            at, at + DATA_AT, self._at, *scratch, *addresses, *sink.fields(), 0, checks, warps, self.lists, 0
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
        if self.header.request.arriving is not None:
            # plan again with the received head, which may differ from the expected head only in the checksum
            check(self._plan(self.header.request.arriving), self._call.fault)
        fault, checksum, _, _, *digests, _ = FOUND.unpack(found)
        status = fault & 255
        if status == Status.OTHER_BASE:  # the changes do not fit the base: the base is wrong, or the frame is invalid
            if digests[0] != self.header.info.base_digest:
                self.header.verify()
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
        if self.header.is_delta:
            self._check_digests(digests)
        _call.give(self._call)

    def _check_digests(self, digests: Sequence[int]) -> None:
        """Compare the computed digests of base and result with those in the frame, as the C library does."""
        fault, expected = self._call.fault, (self.header.info.base_digest, self.header.info.result_digest)
        applied = digests[0] == self.header.info.result_digest
        for i, status in enumerate((Status.ALREADY_APPLIED if applied else Status.OTHER_BASE, Status.CHECKSUM)):
            if digests[i] != expected[i]:
                fault.offset, fault.found, fault.expected = self.view.side_offset + 8 * i, expected[i], digests[i]
                check(int(status), fault)
