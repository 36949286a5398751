"""Scratch memory of a call: units that the warps of all its frames share, so that its size does not grow with them."""

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

    nbytes: int  # of a unit; 0: the frame needs none
    units: int = 1  # for each warp, so that all run at once
    most: int = 1  # maximum that a warp of a frame of this shape may take; then fewer run at once


class Scratch:
    """Units of scratch memory for the warps of all frames of a call.

    The memory may be released as soon as the kernels are launched, unless the stream is captured: its allocator uses
    it again in the order of the stream.

    Parameters
    ----------
    work : Work
        Device memory of the call.
    users : sequence of (str, int, Need)
        Kernel, number of thread blocks and need of each frame.

    Attributes
    ----------
    nbytes : int
        Size of the units.
    taken_nbytes : int
        Size of the bits that say which units are taken. The caller uploads zeros for them.
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
        """Return the codec_units of a frame, from the address of the bits; `used`: the frame needs units."""
        return _UNITS.pack(taken, self._memory, self._each, self._count, 0) if used else _NO_UNITS
