"""Encode and decode a part: as a lossless frame, or with a general-purpose compressor if its values repeat.

``docs/spec/container.md`` specifies how each coding is decoded. The writer is free to choose the coding of a part.
"""

import importlib
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np

from codec._c.library import ITEMSIZE, UNSIGNED
from codec._options import options
from codec.decoding import decode
from codec.encoding import bound, encode
from codec.errors import EngineError
from codec.files.index import damaged
from codec.inspection import digest_of, inspect
from codec.specs import Lossless
from codec.tensors.floats import widen
from codec.tensors.view import view as as_tensor
from codec.tensors.wrapper import view

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Segments = Sequence[tuple[int, tuple[int, ...]]]

FRAME = "frame"
NARROW = {"frame-bfloat16": "bfloat16", "frame-float16": "float16"}  # by coding: narrower dtype of the frame
ZSTD, ZSTD_PLANES, DEFLATE, DEFLATE_PLANES = "zstd", "zstd-planes", "deflate", "deflate-planes"
CODINGS = (FRAME, *NARROW, ZSTD, ZSTD_PLANES, DEFLATE, DEFLATE_PLANES)

_ONE = options(threads=1)
_SMALL = 1 << 20  # bytes; parts up to this size are compressed with higher levels
_WINDOW, _WINDOWS = 1 << 13, 4  # bytes per window, and number of windows, that the test for repetition compresses
_PICKED, _TWICE = 4096, 0.03  # number of sampled values; if a larger fraction of them is equal, the compressor is tried
_PAYS = 0.98  # a compressor's output replaces the frame if it has less than this fraction of the frame's bytes
_LEVELS = (3, 9, 19), (6, 9, 9)  # compression levels of zstd and of zlib, from fast to small
_MAX_WINDOW = 1 << 23  # bytes; zstd data with a larger window is refused


class EncodedPart(NamedTuple):
    """Encoded part: its coding, its bytes, and the digest of the uncompressed bytes."""

    coding: str
    data: Any  # encoded bytes, an object with a buffer
    digest: int


@cache
def _zstandard() -> Any:
    """Return the module zstandard; None if the package is not installed."""
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        return None


@cache
def room_for(nbytes: int) -> int:
    """Return the maximum size in bytes of the frame of a part of `nbytes` bytes, for any dtype."""
    return max(bound(nbytes // ITEMSIZE[d], d) for d in ("uint8", "bfloat16", "float32", "float64"))


def encode_part(
    values: Bytes, dtype: str, shape: tuple[int, ...], out: Bytes, segments: Segments | None = None
) -> EncodedPart:
    """Encode the bytes of a part with the smallest coding. A cheap test decides which codings are tried.

    Parameters
    ----------
    values : array of uint8
        Bytes of a tensor, of some of its rows, or of several tensors; at most PART_NBYTES.
    dtype : str
        Dtype of the values.
    shape : tuple of int
        Shape of the values.
    out : array of uint8
        Buffer of :func:`room_for` bytes, to which the result may refer.
    segments : sequence of (int, tuple of int), optional
        If the part has several tensors: the offset (in values) and the shape of each tensor.

    Returns
    -------
    EncodedPart
    """
    total = digest_of(as_tensor(values), threads=1)
    narrow = _narrowed(values) if dtype == "float32" else None
    if narrow is None:
        coding, bits = FRAME, values.view(UNSIGNED[dtype])
    else:
        coding, dtype, bits = narrow
    tensor = view(bits.reshape(shape), dtype) if segments is None else view(bits, dtype, segments)
    frame = encode(tensor, out=out, options=_ONE)
    if not _may_repeat(bits, len(frame) / bits.nbytes):
        return EncodedPart(coding, frame, total)
    data, name = _compressed(values, ITEMSIZE[dtype] if narrow is None else 4)
    return EncodedPart(name, data, total) if len(data) < _PAYS * len(frame) else EncodedPart(coding, frame, total)


def _compressed(values: Bytes, itemsize: int) -> tuple[bytes, str]:
    """Compress a part as it is and as byte planes; return the smaller output, and its coding."""
    plain, planes = (ZSTD, ZSTD_PLANES) if _zstandard() is not None else (DEFLATE, DEFLATE_PLANES)
    split = _planes(values, itemsize)
    tried = min((_compress(values, 0), plain), (_compress(split, 0), planes), key=lambda each: len(each[0]))
    if len(values) > _SMALL:
        return tried
    # recompress with a higher level: the highest, but a medium one for planes, for which the highest saves little more
    return (_compress(values, 2), plain) if tried[1] == plain else (_compress(split, 1), planes)


def repeats(values: Bytes, itemsize: int) -> bool:
    """Return True if a small tensor compresses better in a group with other tensors that have repeated values."""
    if itemsize not in (2, 4, 8) or not len(values):
        return True
    return len(_compress(_planes(values, itemsize))) < (0.6 if itemsize == 2 else 0.78) * len(values)


def decode_part(coding: str, data: Bytes, out: Bytes, dtype: str, total: int) -> None:
    """Decode a part.

    Parameters
    ----------
    coding : str
        One of CODINGS.
    data : array of uint8
        Stored bytes of the part.
    out : array of uint8
        Buffer of exactly the part's uncompressed size. After an error its contents are undefined.
    dtype : str
        Dtype of the tensors.
    total : int
        Expected digest of the decoded bytes.

    Raises
    ------
    FrameError
        The part is damaged.
    EngineError
        The part needs the package zstandard, which is not installed.
    """
    if coding == FRAME:
        _decode_frame(data, out, dtype)
    elif coding in NARROW and dtype == "float32":
        narrow = np.empty(len(out) // 2, np.uint8)
        _decode_frame(data, narrow, NARROW[coding])
        widen(narrow.view(np.uint16), NARROW[coding], out.view(np.float32))
    elif coding in (ZSTD, ZSTD_PLANES, DEFLATE, DEFLATE_PLANES):
        inflate = _unzstd if coding in (ZSTD, ZSTD_PLANES) else _inflate
        plain = np.frombuffer(inflate(data, len(out)), np.uint8)
        size = ITEMSIZE[dtype] if coding in (ZSTD_PLANES, DEFLATE_PLANES) else 1
        out.reshape(-1, size)[:] = plain.reshape(size, -1).T
    else:
        raise damaged(f"a part of {dtype} has the unknown coding {coding!r}")
    if digest_of(as_tensor(out), threads=1) != total:
        raise damaged("a part does not have the digest that the index names")


def _decode_frame(data: Bytes, out: Bytes, dtype: str) -> None:
    info = inspect(data)
    if type(info.spec) is not Lossless or info.dtype != dtype or info.tensor_nbytes != len(out):
        raise damaged(
            f"a frame holds {info.tensor_nbytes} bytes of {info.dtype}, but the index names {len(out)} of {dtype}"
        )
    decode(data, out=out.view(UNSIGNED[dtype]).reshape(info.shape), options=_ONE)


def _narrowed(values: Bytes) -> tuple[str, str, Any] | None:
    """Convert float32 values to a 2-byte dtype. Return coding, dtype and bits; None if a bit would be lost."""
    for coding, cut in (("frame-bfloat16", _brain), ("frame-float16", _half)):
        # most tensors that cannot be converted fail in the first 4,096 bytes, so test these first
        if cut(values[:4096]) is not None and (bits := cut(values)) is not None:
            return coding, NARROW[coding], bits
    return None


def _brain(values: Bytes) -> Any:
    """Convert float32 values to bits of bfloat16; None if bits would be lost."""
    halves = values.view(np.uint16)
    return None if halves[::2].any() else np.ascontiguousarray(halves[1::2])


def _half(values: Bytes) -> Any:
    """Convert float32 values to bits of float16; None if bits would be lost, or a value is NaN."""
    bits = values.view(np.uint32)
    if (bits & 0x1FFF).any():
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        half = bits.view(np.float32).astype(np.float16)
        same = not np.isnan(half).any() and (half.astype(np.float32).view(np.uint32) == bits).all()
    return half.view(np.uint16) if same else None


def _may_repeat(values: Any, ratio: float) -> bool:
    """Return True if a part seems to have repeated values, so that a general-purpose compressor may beat the frame.

    For values of 4 or 8 bytes, equal values in a sample show repetition. Values of 1 or 2 bytes are often equal by
    chance. So the sample is compressed, and its compression ratio is compared with `ratio`, the frame's bytes per byte
    of values. The test takes about 0.1 ms.
    """
    if values.itemsize >= 4:
        some = np.sort(values[:: max(1, len(values) // _PICKED)])
        return bool((some[1:] == some[:-1]).sum() > _TWICE * len(some))
    sample = _planes(_sample(values.view(np.uint8)), values.itemsize)
    return len(_compress(sample)) < ratio * len(sample)


def _sample(values: Bytes) -> Bytes:
    """Return all bytes of a small part, or 4 windows of a large one that begin at multiples of 8 bytes."""
    if len(values) <= _WINDOW * _WINDOWS:
        return values
    step = (len(values) - _WINDOW) // (_WINDOWS - 1) // 8 * 8
    return np.concatenate([values[i * step : i * step + _WINDOW] for i in range(_WINDOWS)])


def _planes(values: Bytes, itemsize: int) -> Bytes:
    """Return byte planes: the first byte of every value, then the second byte of every value, and so on."""
    return values if itemsize == 1 else np.ascontiguousarray(values.reshape(-1, itemsize).T).reshape(-1)


def _compress(values: Bytes, level: int | None = None) -> bytes:
    """Compress bytes with zstd (zlib if zstandard is not installed). `level`: index in _LEVELS; None: fastest level."""
    zstandard = _zstandard()
    if zstandard is None:
        return zlib.compress(memoryview(cast(Any, values)), 1 if level is None else _LEVELS[1][level])
    return zstandard.ZstdCompressor(level=1 if level is None else _LEVELS[0][level]).compress(values)


def _unzstd(data: Bytes, nbytes: int) -> bytes:
    """Decompress zstd data; raise FrameError unless the result has exactly `nbytes` bytes."""
    zstandard = _zstandard()
    if zstandard is None:
        raise EngineError("the packed file needs zstandard, which is not installed: pip install zstandard")
    try:
        found = zstandard.get_frame_parameters(data)
        if found.content_size != nbytes or found.window_size > _MAX_WINDOW:
            raise damaged(f"a part has {found.content_size} bytes, but the index names {nbytes}")
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=nbytes, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise damaged(f"a part cannot be decompressed: {e}") from None


def _inflate(data: Bytes, nbytes: int) -> bytes:
    """Decompress zlib data; raise FrameError unless the result has exactly `nbytes` bytes."""
    inflate = zlib.decompressobj()
    try:
        plain = inflate.decompress(memoryview(cast(Any, data)), nbytes + 1)
    except zlib.error as e:
        raise damaged(f"a part cannot be decompressed: {e}") from None
    if len(plain) != nbytes or not inflate.eof or inflate.unused_data:
        raise damaged(f"a part does not have the {nbytes} bytes that the index names")
    return plain
