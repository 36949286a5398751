"""Codebooks that both sides hold before a frame is sent."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from codec import core
from codec.errors import SpecError
from codec.metrics import set_metric
from codec.specs import Lossless, Truncate
from codec.view import view

_DEFAULT = Lossless()
_FLOATS = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Codebook:
    """Code lengths for the symbols of plane 0, named by an id that frames carry instead of them.

    Parameters
    ----------
    lengths : bytes
        256 code lengths in bits, 0 for values to be escaped.
    escape_length : int
        Length of the escape's code in bits, 1 to 8.
    id : int
        A 64-bit digest of all the rest.
    symbols : int
        What the symbols are (``CODEC_SYMBOLS_*`` in ``codec/codec.h``): frames of :class:`codec.Lossless` and of each
        way in which :class:`codec.Truncate` sends levels have their own.

    Raises
    ------
    SpecError
        These are not code lengths, or the id is not theirs.
    """

    lengths: bytes
    escape_length: int
    id: int
    symbols: int = 0

    def __post_init__(self) -> None:
        if len(self.lengths) != 256:
            raise SpecError(f"a codebook has 256 code lengths, not {len(self.lengths)}")
        for name, value, bits in (
            ("escape_length", self.escape_length, 8),
            ("id", self.id, 64),
            ("symbols", self.symbols, 8),
        ):
            if type(value) is not int or not 0 <= value < 1 << bits:
                raise SpecError(f"{name} must be an int of {bits} bits, got {value!r}")
        struct = core.ffi.new("codec_codebook *")
        _fill(struct, self)
        core.check(core.lib.codec_codebook_check(struct))

    @classmethod
    def from_counts(cls, counts: Any, spec: Lossless | Truncate = _DEFAULT, dtype: str = "float32") -> "Codebook":
        """Build from how often each symbol occurs.

        Parameters
        ----------
        counts : array_like of int, shape (256,)
            Counts of symbols, not negative.
        spec : Lossless or Truncate
            Of the frames that it is for; its cap is the longest code in bits.
        dtype : str
            Of the tensors, such as ``"float16"``: Truncate's symbols depend on it.

        Raises
        ------
        SpecError
            Counts of another shape or below 0, or a spec or dtype without exponents.
        """
        _check_spec(spec)
        array = np.asarray(counts)
        if array.shape != (256,) or array.dtype.kind not in "iu" or (array.dtype.kind == "i" and (array < 0).any()):
            raise SpecError("counts must be 256 integers, none below 0")
        return cls._build(spec, dtype, core.ffi.new("uint64_t[256]", array.astype(np.uint64).tolist()))

    @classmethod
    def from_tensors(
        cls,
        *tensors: Any,
        spec: Lossless | Truncate = _DEFAULT,
        segments: Any = None,
        metric: Any = None,
        state: Mapping[str, Any] | None = None,
    ) -> "Codebook":
        """Build from a sample of tensors, taken as :func:`codec.encode` would take it.

        Parameters
        ----------
        *tensors : array or tensor
            Floating-point tensors of float32, float64, bfloat16 or float16; for :class:`codec.Lossless` the dtypes may
            differ.
        spec : Lossless or Truncate
            Of the frames that it is for; its cap is the longest code in bits.
        segments, metric, state : optional
            As in :func:`codec.encode`; only with a single tensor.

        Raises
        ------
        SpecError
            A tensor of another dtype, tensors whose symbols differ, or a spec without exponents.
        """
        _check_spec(spec)
        if len(tensors) != 1 and not (segments is None and metric is None and state is None):
            raise SpecError("segments=, metric= and state= go with a single tensor")
        counts = core.ffi.new("uint64_t[256]")
        symbols: set[int] = set()
        for x in tensors:
            v = view(x)
            if v.dtype not in _FLOATS:
                raise SpecError(f"codebooks are for the exponents of {', '.join(_FLOATS)}, not for {v.dtype}")
            s = core.spec_struct(spec)
            t = core.own_tensor(core.DTYPES[v.dtype], v.shape, v.data, v.nbytes)
            size = core.local.size
            core.check(core.lib.codec_scratch(s, t, size))
            context = core.own_context()
            keep = (
                set_segments(context, segments),
                set_metric(context, metric, state, v.nbytes // core.ITEMSIZE[v.dtype]),
            )
            scratch = core.new_bytes(size[0])
            core.check(core.lib.codec_count(s, t, counts, context, scratch, size[0]))
            del keep
            symbols.add(cls._build(spec, v.dtype, counts).symbols)
        if len(symbols) > 1:
            raise SpecError(f"tensors of these dtypes have no symbols in common under {spec}")
        return cls._build(spec, view(tensors[0]).dtype if tensors else "float32", counts)

    @classmethod
    def _build(cls, spec: Lossless | Truncate, dtype: str, counts: Any) -> "Codebook":
        book = core.ffi.new("codec_codebook *")
        core.check(core.lib.codec_codebook_build(core.spec_struct(spec), core.DTYPES.get(dtype, 0), counts, book))
        return cls(bytes(book.length), book.escape_length, book.id, book.symbols)


def _check_spec(spec: object) -> None:
    if not isinstance(spec, Lossless | Truncate):
        raise SpecError(f"{spec!r} has no exponents that a codebook could be for")


def _fill(struct: Any, book: Codebook) -> None:
    struct.id = book.id
    struct.length = book.lengths
    struct.escape_length = book.escape_length
    struct.symbols = book.symbols


def set_codebooks(context: Any, books: Sequence[Codebook]) -> object:
    """Give codebooks to a call; the result must stay alive until it returns."""
    if not books:
        return None
    array = core.ffi.new("codec_codebook[]", len(books))
    for entry, book in zip(array, books, strict=True):
        _fill(entry, book)
    context.codebooks = array
    context.ncodebooks = len(books)
    return array


def set_segments(context: Any, segments: Any) -> object:
    """Give segments to a call; the result must stay alive until it returns."""
    if not segments:
        return None
    try:
        fields = [x for offset, shape in segments for x in (offset, len(shape), 0, *shape, *_NO_SHAPE[len(shape) :])]
        array = core.ffi.from_buffer("codec_segment[]", struct.pack(_SEGMENT * len(segments), *fields))
    except struct.error as e:
        for offset, shape in segments:
            if len(shape) > len(_NO_SHAPE):
                raise SpecError(f"segment of rank {len(shape)} is above {len(_NO_SHAPE)}") from None
            if offset < 0 or any(s < 0 for s in shape):
                raise SpecError(f"negative segment: {offset}, {tuple(shape)}") from None
        raise SpecError(f"segments are pairs (offset, shape) of integers: {e}") from None
    context.segments = array
    context.nsegments = len(segments)
    return array


_SEGMENT = "QII8Q"  # codec_segment: packed at once, for a gradient bucket may have hundreds
_NO_SHAPE = (0,) * 8
