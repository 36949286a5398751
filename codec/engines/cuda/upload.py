"""Upload of a job of the C library to a device: its codec_view, and the arrays that kernels use."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from codec._c.library import ffi, lib

VIEW_NBYTES = ffi.sizeof("codec_view")
_ALIGNMENT = 16  # alignment of arrays in bytes
DATA_AT = -(-VIEW_NBYTES // _ALIGNMENT) * _ALIGNMENT  # offset of the arrays in an upload
# by dtype: patterns in an octave, unit of offsets in patterns (octave_of and grain_of of model.cuh); others: 128, 16
_OCTAVES = {
    lib.CODEC_FLOAT16: (1024, 128),
    lib.CODEC_FLOAT64: (16, 2),
    **dict.fromkeys((lib.CODEC_FLOAT8_E4M3FN, lib.CODEC_FLOAT8_E4M3FNUZ), (2048, 256)),
    **dict.fromkeys((lib.CODEC_FLOAT8_E5M2, lib.CODEC_FLOAT8_E5M2FNUZ), (1024, 256)),
}
_AT = struct.Struct("<Q")  # the first field of a codec_array, `at`


class Image:
    """Compact copy of a job for the device, with only the arrays that kernels use.

    In the copy, items of the array ``offsets`` are uint16, as in ``native/cuda/coder/model.cuh``.

    Parameters
    ----------
    view, job : cdata
        A codec_view of the job, and the job.
    given : sequence of str
        Names of the view's arrays that kernels read.
    made : sequence of str, optional
        Names of the view's arrays that kernels fill.

    Attributes
    ----------
    upload : bytes
        The codec_view, and at :data:`DATA_AT` the arrays `given`. Offsets in the view count from :data:`DATA_AT`.
        Offsets of the arrays `made` count from the beginning of the memory of these arrays, until :meth:`place_made` is
        called.
    made_nbytes : int
        Size in bytes of the arrays that kernels fill.
    """

    def __init__(self, view: Any, job: Any, given: Sequence[str], made: Sequence[str] = ()) -> None:
        placed, memory, data = ffi.new("codec_view *", view[0]), ffi.buffer(job), bytearray()
        placed.offsets.itemsize = 2
        for name in given:
            array = getattr(view, name)
            items = memory[array.at : array.at + array.count * array.itemsize]
            if name == "offsets" and items:
                items = _patterns(view, items)
            getattr(placed, name).at = len(data)
            data += items.ljust(aligned(len(items)), b"\0")
        self.made_nbytes = 0
        self._made: list[tuple[int, int]] = []  # by array: offset of its field `at` in the view, and value
        for name in made:
            array = getattr(placed, name)
            array.at = self.made_nbytes
            self._made.append((ffi.offsetof("codec_view", name), self.made_nbytes))
            self.made_nbytes += aligned(array.count * array.itemsize)
        self.upload = ffi.buffer(placed)[:].ljust(DATA_AT, b"\0") + data

    def place_made(self, upload: bytearray, distance: int) -> None:
        """Set the offsets of the arrays `made` in a copy of the upload.

        `distance` is the number of bytes from the beginning of the upload on the device to the memory of these arrays.
        """
        for field, at in self._made:
            _AT.pack_into(upload, field, at + distance - DATA_AT)


def _patterns(view: Any, offsets: bytes) -> bytes:
    """Convert offsets of the scale model from int8 in units of the frame to uint16 in patterns, on the circle."""
    octave, grain = _OCTAVES.get(view.dtype, (128, 16))
    whole = view.codec == lib.CODEC_TRUNCATE or grain == 256
    circle = 32768 - (octave if whole else min(octave, 128))
    patterns = np.frombuffer(offsets, np.int8).astype(np.int16) * np.int16(grain)
    patterns += patterns >> 15 & np.int16(circle)
    return patterns.tobytes()


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to the alignment of arrays."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
