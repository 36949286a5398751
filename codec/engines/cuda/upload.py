"""Upload of a job of the C library to a device: its codec_view, and those arrays of its memory that kernels use."""

from collections.abc import Sequence
from typing import Any

from codec._c.library import ffi

VIEW_NBYTES = ffi.sizeof("codec_view")
_MULTIPLE = 16  # alignment of arrays in bytes


class Image:
    """Job for the device: only the arrays that kernels use, while the C library's job has room for all.

    Parameters
    ----------
    view, job : cdata
        A codec_view of the job, and the job.
    given : sequence of str
        Arrays of the view that kernels read.
    made : sequence of str, optional
        Arrays that kernels fill.

    Attributes
    ----------
    data : bytes
        The arrays that kernels read, one after the other.
    made_nbytes : int
        Size of the arrays that kernels fill.
    """

    def __init__(self, view: Any, job: Any, given: Sequence[str], made: Sequence[str] = ()) -> None:
        self._view, self._made = ffi.new("codec_view *", view[0]), made
        memory, data = ffi.buffer(job), bytearray()
        for name in given:
            array = getattr(self._view, name)
            size, at = array.count * array.itemsize, array.at
            array.at = len(data)
            data += memory[at : at + size].ljust(_aligned(size), b"\0")
        self.data = bytes(data)
        self.made_nbytes = 0
        for name in made:
            array = getattr(self._view, name)
            array.at = self.made_nbytes
            self.made_nbytes += _aligned(array.count * array.itemsize)

    def view(self, data: int = 0, made: int = 0) -> bytes:
        """Return the codec_view for arrays at address ``data`` and filled arrays at ``made``, the higher address."""
        view = ffi.new("codec_view *", self._view[0])
        for name in self._made:
            getattr(view, name).at += made - data
        return bytes(ffi.buffer(view))


def _aligned(nbytes: int) -> int:
    """Round up to the alignment of arrays."""
    return -(-nbytes // _MULTIPLE) * _MULTIPLE
