"""Inspection and verification of frames in files."""

import mmap
import os
from collections.abc import Callable

from codec._c.library import lib
from codec.files.opening import opened, standard_input
from codec.inspection import Info, inspect, verify

_HEADER: int = lib.CODEC_HEADER_NBYTES
_MAX_SIDE = 16 << 20  # bytes; inspect_file does not read larger side sections
_CHUNK = 1 << 20  # bytes read from standard input at once

Read = Callable[[int], bytes]  # read(n) returns the next bytes of the input, at most n


def inspect_file(path: str) -> Info:
    """Return the header of a frame as :func:`codec.inspect` does, reading only the header and the side section.

    Parameters
    ----------
    path : str
        Path of a regular file that begins with a frame; "-" for standard input.

    Returns
    -------
    Info

    Raises
    ------
    ArgumentError
        The file cannot be read.
    FrameError
        The header or the side section is invalid, as in :func:`codec.inspect`.
    """
    if path == "-":
        return _inspect_by(standard_input().read)
    with opened(path) as fd:
        return _inspect_by(lambda nbytes: os.read(fd, nbytes))


def _inspect_by(read: Read) -> Info:
    """Inspect a frame; `read` returns its next bytes."""
    head = read(_HEADER)
    begin, nbytes = inspect(head).sections["side"]
    if nbytes <= _MAX_SIDE:
        head += read(max(0, begin + nbytes - len(head)))
    return inspect(head)


def verify_file(path: str) -> None:
    """Verify a frame without decoding its values. A regular file is mapped, not copied to memory.

    Parameters
    ----------
    path : str
        Path of a regular file that is a frame. "-": standard input; at most one byte beyond the frame is read.

    Raises
    ------
    ArgumentError
        The file cannot be read.
    FrameError
        The frame is invalid, as in :func:`codec.verify`.
    """
    if path == "-":
        verify(_frame_from(standard_input().read))
        return
    with opened(path) as fd:
        size = os.fstat(fd).st_size
        # files of size 0 cannot be mapped; files in /proc report size 0 but have contents
        verify(mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else os.read(fd, _HEADER))


def _frame_from(read: Read) -> bytearray:
    """Read a frame, and one byte more if there is one, so that trailing bytes are noticed."""
    frame = bytearray(read(_HEADER))
    most = inspect(frame).nbytes + 1
    while more := read(min(_CHUNK, most - len(frame))):
        frame += more
    return frame
