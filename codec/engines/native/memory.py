"""Allocation of a bytes object for a frame before its exact size is known."""

import ctypes

from codec._c.library import ask_for_huge_pages


class NewBytes:
    """A bytes object that is written in place and then shrunk to the size of the frame, which avoids a copy.

    A tuple owns the bytes object from the beginning. So no memory leaks if a signal handler raises an exception at any
    point, as it could even in a ``__del__`` method.
    """

    _new = ctypes.pythonapi.PyBytes_FromStringAndSize
    _new.restype = ctypes.py_object
    _resize = ctypes.pythonapi._PyBytes_Resize

    def __init__(self, nbytes: int) -> None:
        self._holder: tuple[bytes] = (self._new(None, ctypes.c_ssize_t(2)),)
        self._place = ctypes.c_void_p(id(self._holder) + tuple.__basicsize__)  # address of the tuple's first item
        self._resize(self._place, ctypes.c_ssize_t(nbytes))  # raises MemoryError on failure
        self.address = id(self._holder[0]) + bytes.__basicsize__ - 1
        ask_for_huge_pages(self.address, nbytes)

    def finish(self, nbytes: int) -> bytes:
        """Shrink the object to `nbytes` bytes and return it. Afterwards the memory must not be written."""
        self._resize(self._place, ctypes.c_ssize_t(nbytes))
        return self._holder[0]
