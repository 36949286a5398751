"""Encoding plans: all decisions that depend only on spec, dtype and shape. Plans are cached for later calls."""

import struct
from typing import Any, NamedTuple

from codec import _call
from codec._c.library import DTYPES, check, ffi, lib, new_bytes
from codec._c.spec_structs import spec_struct
from codec._call import Call, new_tensor
from codec.engines.cuda.devices import Device
from codec.engines.cuda.kernels import BY_NUMBER, Kernel
from codec.engines.cuda.scratch import Need, need_of
from codec.engines.cuda.upload import VIEW_NBYTES, Image, aligned
from codec.engines.request import EncodeRequest
from codec.optimizers.arguments import set_levels

_KEPT, _KEPT_NBYTES = 256, 1 << 16  # maximum number of cached plans, and maximum bytes of a cached plan's upload
_STREAM, _STREAM_AT = struct.Struct("<Q"), ffi.offsetof("codec_view", "stream")


class PlanLayout(NamedTuple):
    """Launches of a plan on a device, and the sizes of their buffers in bytes."""

    grid: int  # number of thread blocks of the kernel that encodes blocks
    other_grid: int  # number of thread blocks of each other kernel
    scratch: Need  # scratch memory of the encoding kernel
    choice_nbytes: int  # size of the codec_choice, zeroed memory that begins with symbol counts
    zeros_nbytes: int  # size of the codec_choice and of the block offsets that follow it
    # kernels to launch before ``close_frame``, with their numbers of thread blocks: without a residual, and with one
    steps: tuple[list[tuple[Kernel, int]], list[tuple[Kernel, int]]]


class FramePlan:
    """Properties of a frame and contents of its kernels' structs that do not depend on the values.

    Attributes
    ----------
    view : cdata
        codec_view of the planned job.
    bound : int
        Maximum size of the frame in bytes.
    kernel : Kernel
        Kernel that encodes blocks.
    nparts : int
        Number of parts of the scale model.
    head_at, nbytes : int
        Offset of the frame's header in an upload of the plan, and the upload's size, in bytes.
    made_nbytes : int
        Size in bytes of the arrays that kernels fill.
    """

    def __init__(self, r: EncodeRequest) -> None:
        spec, x = spec_struct(r.spec), r.x
        like = new_tensor(DTYPES[x.dtype], x.shape, ffi.NULL, x.nbytes)
        call = _new_call(r)
        size, plan = ffi.new("size_t[2]"), ffi.new("codec_plan *")
        check(lib.codec_job_nbytes(spec, like, size, size + 1))
        job, view, head = new_bytes(size[0]), ffi.new("codec_view *"), new_bytes(lib.CODEC_HEADER_NBYTES)
        check(lib.codec_encode_plan(spec, like, call.context, job, size[0], plan))
        check(lib.codec_encode_head(job, head, lib.CODEC_HEADER_NBYTES, size + 1))
        head_nbytes = size[1]
        view.struct_nbytes = VIEW_NBYTES
        check(lib.codec_job_view(job, view))
        self._launch = launch_of(job)
        self.kernel = BY_NUMBER[self._launch.encode]
        check(lib.codec_bound_segments(spec, like, call.context.segments, call.context.nsegments, size))
        _call.give(call)
        self.view, self.bound = view, size[0]
        self.nparts = view.model_parts.count
        planned, books = ["model_parts", "row_parts"], ["lengths", "tables"]
        found = ["offsets", "row_sums"]
        known = bool(view.codebook_id)
        self._image = image = Image(view, job, planned + books * known, found + books * (not known))
        self.head_at = len(image.upload)
        self._upload = bytearray(image.upload + ffi.buffer(head, head_nbytes)[:].ljust(aligned(head_nbytes), b"\0"))
        self.nbytes, self.made_nbytes = len(self._upload), image.made_nbytes
        self._layouts: dict[str, PlanLayout] = {}

    def upload(self, made: int, stream: int) -> bytearray:
        """Return the bytes to copy to the device: the codec_view, arrays that kernels read, and the header.

        Parameters
        ----------
        made : int
            Distance in bytes from the upload on the device to the memory of the arrays that kernels fill.
        stream : int
            Number of the stream of random bits.
        """
        upload = self._upload.copy()
        self._image.place_made(upload, made)
        _STREAM.pack_into(upload, _STREAM_AT, stream)
        return upload

    def layout(self, device: Device) -> PlanLayout:
        """Return the grids of the launches on a device, and the sizes of their buffers."""
        found = self._layouts.get(device.name)
        if found is None:
            v = self.view
            kernel, processors = self.kernel, device.processors
            grid = kernel.grid(processors, v.nblocks)
            other_grid = min(kernel.warps * grid, lib.OTHER_BLOCKS * processors)
            steps = self._steps(grid, other_grid, residual=False), self._steps(grid, other_grid, residual=True)
            device.prepare({"close_frame", *(step.name for each in steps for step, _ in each)})
            choice, part = device.constant("close_frame", "choose_nbytes", 2)
            choice = aligned(choice + max(self.nparts, 1) * part)
            scratch = need_of(device, kernel, self._launch.encode_scratch)
            zeros = choice + aligned(8 * v.nblocks)
            self._layouts[device.name] = found = PlanLayout(grid, other_grid, scratch, choice, zeros, steps)
        return found

    def _steps(self, grid: int, other_grid: int, *, residual: bool) -> list[tuple[Kernel, int]]:
        """Return the kernels to launch before ``close_frame``, with their numbers of thread blocks."""
        if not self.view.nblocks:
            return []
        launch = self._launch
        before, after = launch.choose, 0 if residual else launch.finish
        steps = [(before, other_grid), (launch.encode, grid), (after, other_grid)]
        return [(BY_NUMBER[number], blocks) for number, blocks in steps if number]


def launch_of(job: Any) -> Any:
    """Return the codec_launch of a job: the kernels that encode the tensor or decode the frame."""
    launch = ffi.new("codec_launch *")
    launch.struct_nbytes = ffi.sizeof("codec_launch")
    check(lib.codec_job_launch(job, launch))
    return launch


_plans: dict[tuple[Any, ...], FramePlan] = {}  # cache of plans, for requests without levels


def plan_of(r: EncodeRequest) -> FramePlan:
    """Return the plan of a request's frame."""
    if r.levels is not None:  # not cached: a plan with levels depends on the optimizer
        return FramePlan(r)
    with_residual = None if r.residual is None else r.verify_first
    key = r.spec, r.x.dtype, r.x.shape, r.segments, r.codebook, with_residual
    plan = _plans.get(key)
    if plan is None:
        plan = FramePlan(r)
        if plan.nbytes <= _KEPT_NBYTES:
            if len(_plans) >= _KEPT:
                _plans.clear()
            _plans[key] = plan
    return plan


def _new_call(r: EncodeRequest) -> Call:
    """Return a call whose context has the arguments of a request, except for the stream of random bits."""
    call = _call.take()
    if r.codebook is not None:
        call.set_codebooks((r.codebook,))
    if r.segments is not None:
        call.set_segments(r.segments)
    if r.levels is not None:
        set_levels(call, r.levels, read=False)
    if r.residual is not None:
        call.context.residual = ffi.cast("float *", r.residual.data)
        call.context.flags = lib.CODEC_VERIFY_FIRST if r.verify_first else 0
    return call
