"""Codebooks that both sides hold before a frame is sent."""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from codec import core
from codec.errors import SpecError
from codec.specs import Lossless, whole
from codec.view import view

_FLOATS = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Codebook:
    """Code lengths for exponent symbols, named by an id that frames carry instead of them.

    Parameters
    ----------
    lengths : bytes
        256 code lengths in bits, 0 for values to be escaped.
    escape_length : int
        Length of the escape's code in bits, 1 to 8.
    id : int
        A 64-bit digest of the lengths, not 0.

    Raises
    ------
    SpecError
        Lengths that are not a whole code: every sequence of bits must mean something.
    """

    lengths: bytes
    escape_length: int
    id: int

    def __post_init__(self) -> None:
        if type(self.lengths) is not bytes or len(self.lengths) != 256 or max(self.lengths) > 8:
            raise SpecError("lengths must be 256 bytes of 0 to 8")
        whole("escape_length", self.escape_length, 1, 8)
        whole("id", self.id, 1, (1 << 64) - 1)
        if sum(256 >> n for n in (*self.lengths, self.escape_length) if n) != 256:
            raise SpecError("code lengths must fill the tree: the sum of 1 / 2^length over values and escape must be 1")

    @classmethod
    def from_counts(cls, counts: Any, cap: int = 8) -> "Codebook":
        """Build from how often each symbol occurs.

        Parameters
        ----------
        counts : array_like of int, shape (256,)
            Counts of symbols, not negative.
        cap : int
            Longest code in bits, 2 to 8.

        Raises
        ------
        SpecError
            Counts of another shape or below 0, or a cap out of range.
        """
        Lossless(cap=cap)
        array = np.asarray(counts)
        if array.shape != (256,) or array.dtype.kind not in "iu" or (array.dtype.kind == "i" and (array < 0).any()):
            raise SpecError("counts must be 256 integers, none below 0")
        book = core.ffi.new("codec_codebook *")
        buffer = core.ffi.new("uint64_t[256]", array.astype(np.uint64).tolist())
        core.check(core.lib.codec_codebook_build(buffer, cap, book))
        return cls(bytes(book.length), book.escape_length, book.id)

    @classmethod
    def from_tensors(cls, *tensors: Any, cap: int = 8, segments: Any = None) -> "Codebook":
        """Build from a sample of tensors, taken as :func:`codec.encode` would take it.

        Parameters
        ----------
        *tensors : array or tensor
            Floating-point tensors of float32, float64, bfloat16 or float16; the dtypes may differ.
        cap : int
            Longest code in bits, 2 to 8.
        segments : sequence of (int, tuple of int), optional
            As in :func:`codec.encode`; only with a single tensor.

        Raises
        ------
        SpecError
            A tensor of another dtype.
        """
        if segments is not None and len(tensors) != 1:
            raise SpecError("segments= goes with a single tensor")
        counts = core.ffi.new("uint64_t[256]")
        spec = core.spec_struct(Lossless(cap=cap))
        array = segment_structs(segments)
        for x in tensors:
            v = view(x)
            if v.dtype not in _FLOATS:
                raise SpecError(f"codebooks are for the exponents of {', '.join(_FLOATS)}, not for {v.dtype}")
            call = core.take()
            if array is not None:
                set_segments(call.context, array)
            t = call.fill_tensor(core.DTYPES[v.dtype], v.shape, v.data, v.nbytes)
            core.check(core.lib.codec_scratch(spec, t, call.size))
            nbytes = call.size[0]
            core.check(core.lib.codec_count(spec, t, counts, call.context, call.scratch(nbytes), nbytes))
            core.give(call)
        book = core.ffi.new("codec_codebook *")
        core.check(core.lib.codec_codebook_build(counts, cap, book))
        return cls(bytes(book.length), book.escape_length, book.id)


def codebook_structs(books: Any) -> Any:
    """Codebooks as C takes them, or None."""
    if books is None:
        return None
    books = list(books) if hasattr(books, "__iter__") else [books]
    if not all(isinstance(book, Codebook) for book in books):
        raise SpecError(f"not codebooks: {books!r}")
    array = core.ffi.new("codec_codebook[]", len(books))
    for entry, book in zip(array, books, strict=True):
        entry.id = book.id
        entry.length = book.lengths
        entry.escape_length = book.escape_length
    return array


def set_codebooks(context: Any, array: Any) -> None:
    """Give codebooks to a call; the array must stay alive until it returns."""
    context.codebooks, context.ncodebooks = array, len(array)


def segment_structs(segments: Any) -> Any:
    """Segments as C takes them, or None."""
    if segments is None:
        return None
    try:
        pairs = [(offset, tuple(shape)) for offset, shape in segments]
    except (TypeError, ValueError):
        raise SpecError("segments are pairs (offset, shape)") from None
    for _, shape in pairs:
        if len(shape) > len(_NO_SHAPE):
            raise SpecError(f"segment of rank {len(shape)} is above {len(_NO_SHAPE)}")
    fields = [x for offset, shape in pairs for x in (offset, len(shape), 0, *shape, *_NO_SHAPE[len(shape) :])]
    try:
        return core.ffi.from_buffer("codec_segment[]", struct.pack(_SEGMENT * len(pairs), *fields))
    except struct.error as e:
        raise SpecError(f"segments are pairs (offset, shape) of integers, none below 0: {e}") from None


def set_segments(context: Any, array: Any) -> None:
    """Give segments to a call; the array must stay alive until it returns."""
    context.segments, context.nsegments = array, len(array)


_SEGMENT = "QII8Q"  # codec_segment: packed at once, for a gradient bucket may have hundreds
_NO_SHAPE = (0,) * 8
