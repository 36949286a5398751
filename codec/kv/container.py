"""Container of the frames of one page of a KV cache: a header with the end offset of each frame, then the frames."""

import struct
from itertools import pairwise
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from codec.errors import ArgumentError, ChecksumError, FrameError, Status
from codec.tensors.view import on_host, view_bytes

MAGIC, VERSION = b"CKVP", 1
_HEAD = struct.Struct("<4sBBH")  # magic, version, flags, number of frames
_SUM = struct.Struct("<I")  # CRC-32 of the bytes before this field and of the table of frame ends after it
_TRANSPOSED = 1  # flag: frames of keys have the shape (channels, tokens)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class PageLayout(NamedTuple):
    """Order of the frames of a page: for each layer, the keys, then the values."""

    layers: int
    sides: int  # 2: keys and values; 1: values only
    transposed: bool  # True: frames of keys have the shape (channels, tokens) instead of (tokens, channels)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the frames of each layer, in order."""
        return ("key", "value")[2 - self.sides :]

    @property
    def frames(self) -> int:
        """Number of frames in a page."""
        return self.layers * self.sides


def head_nbytes(frames: int) -> int:
    """Return the size in bytes of the header of a page with this number of frames."""
    return _HEAD.size + _SUM.size + 4 * frames


def pack(layout: PageLayout, frames: list[bytes]) -> bytes:
    """Concatenate the header of a page and its frames.

    Raises
    ------
    ArgumentError
        There are more than 65,535 frames, or they take 4 GiB or more.
    """
    ends = np.cumsum([head_nbytes(len(frames)), *map(len, frames)])[1:]
    if len(frames) > 0xFFFF or ends[-1] > 0xFFFFFFFF:
        raise ArgumentError(
            f"the page has {len(frames)} frames and {ends[-1]} bytes; the maximum is 65535 frames and 4 GiB: split the "
            "page"
        )
    head = _HEAD.pack(MAGIC, VERSION, layout.transposed, len(frames))
    table = ends.astype("<u4").tobytes()
    return b"".join([head, _SUM.pack(crc32(table, crc32(head))), table, *frames])


def page_nbytes(data: Any) -> int:
    """Return the size of an encoded page that is followed by other bytes, such as padding of a storage slot.

    Parameters
    ----------
    data : bytes or buffer
        Bytes that begin with an encoded page.

    Returns
    -------
    int
        Size of the page in bytes, at most that of `data`.

    Raises
    ------
    FrameError
        The bytes do not begin with a complete encoded page.

    Examples
    --------
    >>> pages = codec.kv.PageCodec((2, 2, 64, 192), "float32")
    >>> data = pages.encode(np.zeros(pages.shape, np.float32))
    >>> pages.page_nbytes(data + bytes(100)) == len(data)
    True
    """
    return int(_read(as_bytes(data))[1][-1])


def unpack(data: Any, layers: int, sides: int) -> tuple[PageLayout, list[Bytes]]:
    """Return the layout and the frames of a page. Frames share the memory of `data`.

    Raises
    ------
    FrameError
        The bytes are not exactly one encoded page with this number of layers and sides.
    """
    raw = as_bytes(data)
    flags, ends = _read(raw)
    layout = PageLayout(layers, sides, flags == _TRANSPOSED)
    if flags > _TRANSPOSED or len(ends) != layout.frames:
        raise FrameError(f"the page has {len(ends)} frames, which does not fit {layers} layers with {sides} sides")
    if ends[-1] != len(raw):
        raise FrameError(f"the page has {ends[-1]} bytes, but {len(raw)} were given")
    bounds = [head_nbytes(len(ends)), *ends]
    return layout, [raw[begin:end] for begin, end in pairwise(bounds)]


def as_bytes(data: Any) -> Bytes:
    """Return an array of bytes that shares the memory of a buffer; raise EngineError if it is not in host memory."""
    return on_host("the page", view_bytes(data)).array()


def _read(raw: Bytes) -> tuple[int, list[int]]:
    """Check a page's header; return its flags, and the offset of the end of each frame in bytes."""
    if len(raw) < head_nbytes(0):
        raise FrameError(f"the page is truncated ({len(raw)} bytes, its header needs {head_nbytes(0)})")
    head = raw[: _HEAD.size].tobytes()
    magic, version, flags, frames = _HEAD.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise FrameError("not an encoded page of a KV cache, or one of another version")
    begin = head_nbytes(frames)
    table = raw[head_nbytes(0) : begin].tobytes()
    if not frames or len(table) < 4 * frames:
        raise FrameError(f"the page is truncated ({len(raw)} bytes), or has no frames")
    if _SUM.unpack(raw[_HEAD.size : head_nbytes(0)].tobytes())[0] != crc32(table, crc32(head)):
        raise ChecksumError("the header of the page is damaged", Status.CHECKSUM)
    ends = np.frombuffer(table, "<u4").astype(np.int64)
    if (np.diff(ends, prepend=begin) < 0).any() or ends[-1] > len(raw):
        raise FrameError(f"the page is truncated ({len(raw)} bytes), or its table of frames is not valid")
    return flags, ends.tolist()
