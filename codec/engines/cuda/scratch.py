"""Scratch memory of a call: a pool of buffers (units) for the warps of all frames. Its size has a fixed limit."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from codec.engines.cuda.kernels import MAX_SCRATCH, resident_blocks, warps_of
from codec.engines.cuda.upload import aligned
from codec.engines.cuda.workspace import Work

_UNITS = struct.Struct("<3Q2I")  # codec_units of native/cuda/common/scratch.cuh
_NO_UNITS = bytes(_UNITS.size)
UNITS_NBYTES = _UNITS.size


class Need(NamedTuple):
    """Scratch memory that a frame needs."""

    nbytes: int  # bytes per unit; 0: the frame needs no scratch memory
    units: int = 1  # units per warp that let all warps run at once
    most: int = 1  # maximum units that a warp may take; with more than `units`, fewer warps run at once


class Scratch:
    """Units of scratch memory for the warps of all frames of a call.

    The memory may be released as soon as the kernels are launched, because the allocator is stream-ordered: later users
    of the memory run after the kernels. If the stream is captured, the memory must live as long as the graph.

    Parameters
    ----------
    work : Work
        Device memory of the call.
    users : sequence of (str, int, Need)
        Kernel, number of thread blocks and scratch need of each frame.

    Attributes
    ----------
    nbytes : int
        Size of all units in bytes.
    taken_nbytes : int
        Size in bytes of the bit mask of units in use. The caller uploads the mask as zeros.
    """

    def __init__(self, work: Work, users: Sequence[tuple[str, int, Need]]) -> None:
        some = [user for user in users if user[2][0]]
        self._count = self._each = self._memory = self.nbytes = self.taken_nbytes = 0
        self._owner: object = None
        if not some:
            return
        most = max([need.units for _, _, need in some])
        resident = max([warps_of(kernel) * resident_blocks(kernel, work.device.processors) for kernel, _, _ in some])
        wanted = min(sum([warps_of(kernel) * grid * need.units for kernel, grid, need in some]), resident * most)
        self._each = aligned(max([need.nbytes for _, _, need in some]))
        self._count = max(min(wanted, MAX_SCRATCH // self._each), *[max(need.units, need.most) for _, _, need in some])
        self.nbytes = self._count * self._each
        self._memory, self._owner = work.allocate(self.nbytes)
        self.taken_nbytes = aligned(4 * -(-self._count // 32))

    def struct(self, taken: int, *, used: bool) -> bytes:
        """Return the codec_units of a frame. `taken`: device address of the mask; `used`: False if it needs none."""
        return _UNITS.pack(taken, self._memory, self._each, self._count, 0) if used else _NO_UNITS
