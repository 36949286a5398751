"""What kernels are given of a job that the C library made: its codec_view, and of its memory the arrays alone."""

from collections.abc import Sequence
from typing import Any

from codec._c.library import ffi

VIEW_NBYTES = ffi.sizeof("codec_view")
_MULTIPLE = 16  # at which arrays begin


class Image:
    """A job for the device, smaller than the C library's, which has room for all that may be.

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
        The arrays that are given, one behind the other.
    made_nbytes : int
        What the others take.
    """

    def __init__(self, view: Any, job: Any, given: Sequence[str], made: Sequence[str] = ()) -> None:
        self._view, self._made = ffi.new("codec_view *", view[0]), made
        memory, data = ffi.buffer(job), bytearray()
        for name in given:
            array = getattr(self._view, name)
            size, at = array.count * array.itemsize, array.at
            array.at = len(data)
            data += memory[at : at + size].ljust(_whole(size), b"\0")
        self.data = bytes(data)
        self.made_nbytes = 0
        for name in made:
            array = getattr(self._view, name)
            array.at = self.made_nbytes
            self.made_nbytes += _whole(array.count * array.itemsize)

    def view(self, data: int = 0, made: int = 0) -> bytes:
        """The codec_view, of arrays at these addresses, the second one the higher."""
        view = ffi.new("codec_view *", self._view[0])
        for name in self._made:
            getattr(view, name).at += made - data
        return bytes(ffi.buffer(view))


def _whole(nbytes: int) -> int:
    return -(-nbytes // _MULTIPLE) * _MULTIPLE
