"""Memory for a frame whose size is not known yet."""

import ctypes
import sys

_madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Touching new memory 4 KiB at a time can take longer than encoding; numpy asks the same for its arrays."""
    page = 1 << 21
    begin, end = -(-address // page) * page, (address + nbytes) // page * page
    if _madvise is not None and end - begin >= page:
        _madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 14)  # MADV_HUGEPAGE; a refusal does no harm


class NewBytes:
    """A bytes object that is filled in before anyone sees it, then cut to size: no second copy of a frame.

    A tuple holds it from the beginning, so that nothing is lost to an interrupt; a __del__ could be interrupted, too.
    """

    _new = ctypes.pythonapi.PyBytes_FromStringAndSize
    _new.restype = ctypes.py_object
    _resize = ctypes.pythonapi._PyBytes_Resize

    def __init__(self, nbytes: int) -> None:
        self._holder: tuple[bytes] = (self._new(None, ctypes.c_ssize_t(2)),)
        self._place = ctypes.c_void_p(id(self._holder) + tuple.__basicsize__)  # where the tuple has its pointer
        self._resize(self._place, ctypes.c_ssize_t(nbytes))  # or MemoryError
        self.address = id(self._holder[0]) + bytes.__basicsize__ - 1
        _ask_for_huge_pages(self.address, nbytes)

    def finish(self, nbytes: int) -> bytes:
        """The object. Nothing may be written to it from now on."""
        self._resize(self._place, ctypes.c_ssize_t(nbytes))
        return self._holder[0]
