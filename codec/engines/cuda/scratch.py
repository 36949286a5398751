"""Scratch memory of a call: a pool of buffers (units) for the warps of all frames. Its size has a fixed limit."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from codec._c.library import lib
from codec.engines.cuda.devices import Device
from codec.engines.cuda.kernels import Kernel
from codec.engines.cuda.upload import aligned
from codec.engines.cuda.workspace import CallMemory

MAX_SCRATCH = int(lib.MAX_SCRATCH)  # tests lower it
Units = tuple[int, int, int, int, int]  # fields of a codec_units of native/cuda/common/scratch.cuh


class Need(NamedTuple):
    """Scratch memory that a frame needs."""

    nbytes: int  # bytes per unit; 0: the frame needs no scratch memory
    units: int = 1  # units per warp that let all warps run at once
    most: int = 1  # maximum units that a warp may take; with more than `units`, fewer warps run at once


NOTHING = Need(0)


def need_of(device: Device, kernel: Kernel, scratch: Any) -> Need:
    """Return the scratch memory that a kernel needs. `scratch`: the codec_scratch_units of a codec_launch."""
    index, nbytes = int(scratch.index), int(scratch.more)
    if times := int(scratch.times):
        nbytes += times * device.constant(kernel.name, kernel.sizes, index + 1)[index]
    return Need(nbytes, scratch.units, scratch.most) if nbytes else NOTHING


class WarpScratch:
    """Units of scratch memory for the warps of all frames of a call.

    The memory may be released as soon as the kernels are launched, because the allocator is stream-ordered: later users
    of the memory run after the kernels. If the stream is captured, the memory must live as long as the graph.

    Parameters
    ----------
    work : CallMemory
        Device memory of the call.
    users : sequence of (Kernel, int, Need)
        Kernel, number of thread blocks and scratch need of each frame.

    Attributes
    ----------
    nbytes : int
        Size of all units in bytes.
    taken_nbytes : int
        Size in bytes of the bit mask of units in use. The caller uploads the mask as zeros.
    """

    def __init__(self, work: CallMemory, users: Sequence[tuple[Kernel, int, Need]]) -> None:
        some = [user for user in users if user[2][0]]
        self._count = self._each = self._memory = self.nbytes = self.taken_nbytes = 0
        self._owner: object = None
        if not some:
            return
        most = max([need.units for _, _, need in some])
        resident = max([kernel.warps * kernel.resident_on(work.device.processors) for kernel, _, _ in some])
        wanted = min(sum([kernel.warps * grid * need.units for kernel, grid, need in some]), resident * most)
        self._each = aligned(max([need.nbytes for _, _, need in some]))
        self._count = max(min(wanted, MAX_SCRATCH // self._each), *[max(need.units, need.most) for _, _, need in some])
        self.nbytes = self._count * self._each
        self._memory, self._owner = work.allocate(self.nbytes)
        self.taken_nbytes = aligned(4 * -(-self._count // 32))

    def units(self, taken: int, *, used: bool) -> Units:
        """Return the fields of a frame's codec_units.

        `taken`: device address of the mask; `used`: False if the frame needs no scratch memory.
        """
        return (taken, self._memory, self._each, self._count, 0) if used else (0, 0, 0, 0, 0)
