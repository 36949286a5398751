"""Codebooks that both sides hold before a frame is sent."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from codec import core
from codec.errors import SpecError
from codec.metrics import metric_structs, set_metric
from codec.specs import Lossless, Truncate, whole
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
        Lengths that are not a whole code (every sequence of bits must mean something), or an id that is not theirs.
    """

    lengths: bytes
    escape_length: int
    id: int
    symbols: int = 0

    def __post_init__(self) -> None:
        if type(self.lengths) is not bytes or len(self.lengths) != 256 or max(self.lengths) > 8:
            raise SpecError("lengths must be 256 bytes of 0 to 8")
        whole("escape_length", self.escape_length, 1, 8)
        whole("id", self.id, 1, (1 << 64) - 1)
        whole("symbols", self.symbols, 0, core.lib.CODEC_SYMBOLS_JOINT16)
        if sum(256 >> n for n in (*self.lengths, self.escape_length) if n) != 256:
            raise SpecError("code lengths must fill the tree: the sum of 1 / 2^length over values and escape must be 1")
        struct = core.ffi.new("codec_codebook *")
        _fill(struct, self)
        if core.lib.codec_codebook_check(struct):
            raise SpecError(f"{self.id:#018x} is not the id of these code lengths and symbols")

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
        array = segment_structs(segments)
        for x in tensors:
            v = view(x)
            if v.dtype not in _FLOATS:
                raise SpecError(f"codebooks are for the exponents of {', '.join(_FLOATS)}, not for {v.dtype}")
            s = core.spec_struct(spec)
            m = metric_structs(metric, state, v.nbytes // core.ITEMSIZE[v.dtype])
            call = core.take()
            if array is not None:
                set_segments(call.context, array)
            if m is not None:
                set_metric(call.context, m)
            t = call.fill_tensor(core.DTYPES[v.dtype], v.shape, v.data, v.nbytes)
            core.check(core.lib.codec_scratch(s, t, call.size))
            nbytes = call.size[0]
            core.check(core.lib.codec_count(s, t, counts, call.context, call.scratch(nbytes), nbytes))
            core.give(call)
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


def codebook_structs(books: Any) -> Any:
    """Codebooks as C takes them, or None."""
    if books is None:
        return None
    books = list(books) if hasattr(books, "__iter__") else [books]
    if not all(isinstance(book, Codebook) for book in books):
        raise SpecError(f"not codebooks: {books!r}")
    array = core.ffi.new("codec_codebook[]", len(books))
    for entry, book in zip(array, books, strict=True):
        _fill(entry, book)
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
