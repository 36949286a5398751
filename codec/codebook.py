"""Codebooks that encoder and decoder agree on in advance, so that frames need not contain one."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from codec import _call
from codec._c import library
from codec._c.library import ITEMSIZE, check, ffi, lib
from codec._c.spec_structs import spec_struct
from codec.arguments import shown, whole
from codec.engines import device_engine
from codec.engines.request import EncodeRequest
from codec.errors import ArgumentError, SpecError
from codec.optimizers.arguments import level_source, set_levels
from codec.presets import resolve
from codec.specs import Lossless, Spec, SpecLike, Truncate
from codec.tensors.view import dtype_name, fetch, on_host, view, view_bytes
from codec.tensors.wrapper import View

_DEFAULT = Lossless()
# Dtypes whose exponents Lossless and Truncate entropy-code, so that frames of these dtypes can refer to a codebook.
_OF_LOSSLESS, _OF_TRUNCATE = ("float32", "float64", "bfloat16", "float16"), ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Codebook:
    """Code lengths of a Huffman code for exponents; a frame refers to its codebook by an id.

    A frame with such an id does not contain a codebook, which makes frames of small tensors smaller. Build a codebook
    with :meth:`from_tensors` or :meth:`from_counts`, and pass it to all decoders. :class:`codec.Lossless` and
    :class:`codec.Truncate` can use it.

    Parameters
    ----------
    lengths : bytes
        Code length in bits of each of 256 symbols, 1 to 8, or 0 for a symbol that is coded as an escape.
    escape_length : int
        Length of the escape code in bits, 1 to 8.
    id : int
        Digest of all other fields, 64 bits, not 0.
    symbols : int, default 0
        Kind of symbols, one of ``CODEC_SYMBOLS_*`` in ``codec/codec.h``. It depends on the codec, and for Truncate also
        on `level_coding` and the dtype.

    Raises
    ------
    ArgumentError
        A field has another type or value, the code is not complete (the sum of 1 / 2^length must be 1), or the id is
        not the digest of the other fields.

    Examples
    --------
    >>> sample, grad = np.random.default_rng(0).standard_normal((2, 100_000), np.float32)
    >>> book = codec.Codebook.from_tensors(sample)
    >>> frame = codec.encode(grad, codebook=book)
    >>> there = codec.Codebook.from_bytes(book.to_bytes())  # sent once to each decoder
    >>> bool((codec.decode(frame, codebooks=there) == grad).all())
    True
    """

    lengths: bytes
    escape_length: int
    id: int
    symbols: int = 0

    def __post_init__(self) -> None:
        if type(self.lengths) is not bytes or len(self.lengths) != 256 or max(self.lengths) > 8:
            raise ArgumentError(f"lengths must be bytes with 256 values from 0 to 8, got {shown(self.lengths)}")
        whole("escape_length", self.escape_length, 1, 8)
        whole("id", self.id, 1, (1 << 64) - 1)
        whole("symbols", self.symbols, 0, library.lib.CODEC_SYMBOLS_JOINT16)
        if sum(256 >> n for n in (*self.lengths, self.escape_length) if n) != 256:
            raise ArgumentError(
                "lengths and escape_length must form a complete code: the sum of 1 / 2^length, without lengths of 0, "
                "must be 1"
            )
        if lib.codec_codebook_check(self._struct()):
            raise ArgumentError(
                f"id={self.id:#018x} is not the id of a codebook with these lengths, escape_length and symbols"
            )

    def _struct(self) -> Any:
        struct = ffi.new("codec_codebook *")
        _call.fill_codebook(struct, self)
        return struct

    def to_bytes(self) -> bytes:
        """Serialize the codebook. Equal codebooks give equal bytes.

        Returns
        -------
        bytes
            12 to 140 bytes.
        """
        room, size = library.new_bytes(lib.CODEC_CODEBOOK_NBYTES), ffi.new("size_t *")
        check(lib.codec_codebook_pack(self._struct(), room, len(room), size))
        return bytes(ffi.buffer(room, size[0]))

    @classmethod
    def from_bytes(cls, data: Any) -> "Codebook":
        """Return the codebook that :meth:`to_bytes` has serialized.

        Parameters
        ----------
        data : bytes or buffer
            Serialized codebook, without trailing bytes. Bytes from untrusted sources are safe: they give a valid
            codebook or an error. The id detects accidental damage; it does not authenticate.

        Returns
        -------
        Codebook

        Raises
        ------
        ArgumentError
            The bytes are not a serialized codebook.
        """
        v, book = on_host("data", view_bytes(data)), ffi.new("codec_codebook *")
        check(lib.codec_codebook_unpack(v.data, v.nbytes, book))
        return cls._of(book)

    @classmethod
    def from_counts(cls, counts: Any, spec: SpecLike = _DEFAULT, dtype: Any = "float32") -> "Codebook":
        """Build a codebook from counts of symbols.

        Parameters
        ----------
        counts : array_like of int, shape (256,)
            Number of occurrences of each symbol, not negative.
        spec : Lossless, Truncate or name of a preset, default Lossless()
            Spec of the frames that the codebook is for. Its `max_code_length` limits the code lengths.
        dtype : str, type or dtype, default "float32"
            Dtype of the tensors; the symbols of Truncate depend on it.

        Returns
        -------
        Codebook

        Raises
        ------
        ArgumentError
            Counts have another shape or dtype or are negative, or the dtype has no exponents.
        SpecError
            The spec is neither Lossless nor Truncate.

        Examples
        --------
        >>> counts = np.bincount([127] * 90 + [126] * 10, minlength=256)
        >>> book = codec.Codebook.from_counts(counts)
        >>> book.lengths[127], book.lengths[126], book.escape_length
        (1, 2, 2)
        """
        kind = _with_exponents(resolve(spec)[0])
        try:
            array = np.asarray(counts)
        except (TypeError, ValueError, RuntimeError) as e:
            raise ArgumentError(f"counts must be 256 integers, not {shown(counts)}: {e}") from None
        if array.shape != (256,) or array.dtype.kind not in "iu" or (array.dtype.kind == "i" and (array < 0).any()):
            raise ArgumentError(f"counts must be 256 integers, none below 0, got {array.dtype} of shape {array.shape}")
        name, book = dtype_name(dtype), ffi.new("codec_codebook *")
        _check_dtype(kind, name)
        numbers = ffi.from_buffer("uint64_t[]", array.astype(np.uint64))
        check(lib.codec_codebook_build(spec_struct(kind), library.DTYPES[name], numbers, book))
        return cls._of(book)

    @classmethod
    def from_tensors(
        cls,
        *tensors: Any,
        spec: SpecLike = _DEFAULT,
    ) -> "Codebook":
        """Build a codebook from samples of tensors, as :func:`codec.encode` takes them.

        Parameters
        ----------
        *tensors : array, tensor or View
            Tensors of float32, float64, bfloat16 or float16; for :class:`codec.Lossless` the dtypes may differ.
        spec : Lossless, Truncate, bound spec or name of a preset
            Spec of the frames that the codebook is for. A spec that is bound to an optimizer requires a single tensor.

        Returns
        -------
        Codebook

        Raises
        ------
        ArgumentError
            There are no tensors, a tensor has a dtype that cannot use a codebook, or the tensors have different kinds
            of symbols.
        SpecError
            The spec is neither Lossless nor Truncate.
        """
        if not tensors:
            raise ArgumentError("from_tensors() needs at least one tensor, got none")
        kind, bound = resolve(spec)
        if len(tensors) != 1 and bound is not None:
            raise ArgumentError(
                f"from_tensors() takes a single tensor with a spec that is bound to an optimizer, got {len(tensors)} "
                "tensors"
            )
        kind = _with_exponents(kind)
        counts = np.zeros(256, np.int64)
        symbols: set[int] = set()
        first = ""
        for x in tensors:
            dtype, _, own = count_symbols(x, spec)
            counts += own
            symbols.add(cls.from_counts(own, kind, dtype).symbols)
            first = first or dtype
        if len(symbols) > 1:
            raise ArgumentError(
                f"the symbols of {kind} differ between the dtypes of these tensors: build one codebook for each dtype"
            )
        return cls.from_counts(counts, kind, first)

    @classmethod
    def _of(cls, struct: Any) -> "Codebook":
        return cls(bytes(struct.length), struct.escape_length, struct.id, struct.symbols)


Counts = np.ndarray[Any, np.dtype[np.int64]]


def count_symbols(x: Any, spec: SpecLike) -> tuple[str, int, Counts]:
    """Count the symbols of a tensor, in the sample of values from which encoding builds a codebook.

    Returns
    -------
    str, int, numpy.ndarray of int64, shape (256,)
        The tensor's dtype, its number of values, and the count of each symbol.

    Raises
    ------
    ArgumentError, SpecError
        As in :meth:`Codebook.from_tensors`.
    """
    dtype = packed = None
    if type(x) is View:
        x, dtype, packed = x.tensor, x.dtype, x.segments
    spec, bound = resolve(spec)
    spec = _with_exponents(spec)
    v = view(x, dtype)
    _check_dtype(spec, v.dtype)
    s = spec_struct(spec)
    n = v.nbytes // ITEMSIZE[v.dtype]
    m = None if bound is None else level_source(bound, n)
    if v.device != "cpu":
        counts = device_engine("a tensor", v.device).count(EncodeRequest(v, spec, segments=packed, levels=m))
        if counts is not None:
            return v.dtype, n, counts
        v = fetch("a tensor", v)._replace(dtype=v.dtype, shape=v.shape)
    on_host("a tensor", v)
    call = _call.take()
    if packed is not None:
        call.set_segments(packed)
    if m is not None:
        for name, array in m.read:
            on_host(name, array)
        set_levels(call, m)
    t = call.fill_tensor(v)
    check(lib.codec_scratch(s, t, call.size))
    nbytes = call.size[0]
    counts = np.zeros(256, np.int64)
    into = ffi.from_buffer("uint64_t[]", counts, True)
    check(lib.codec_count(s, t, into, call.context, call.scratch(nbytes), nbytes))
    _call.give(call)
    return v.dtype, n, counts


def _with_exponents(spec: Spec) -> Lossless | Truncate:
    """Return the spec; raise SpecError if its frames do not code exponents, and so cannot use a codebook."""
    if not isinstance(spec, Lossless | Truncate):
        raise SpecError(f"spec must be Lossless or Truncate, whose exponents a codebook encodes, got {shown(spec)}")
    return spec


def _check_dtype(spec: Lossless | Truncate, dtype: str) -> None:
    """Raise ArgumentError if the spec does not entropy-code exponents of this dtype."""
    accepted = _OF_LOSSLESS if isinstance(spec, Lossless) else _OF_TRUNCATE
    if dtype not in accepted:
        floats = ", ".join(accepted)
        raise ArgumentError(f"a codebook of {type(spec).__name__} encodes exponents of {floats}, got {dtype}")


def given_codebooks(books: Any) -> "tuple[Codebook, ...]":
    """Return the argument `codebooks` as a tuple; raise ArgumentError if an item is not a Codebook."""
    found: tuple[Any, ...] = tuple(books) if hasattr(books, "__iter__") else (books,)
    if not all(isinstance(book, Codebook) for book in found):
        raise ArgumentError(f"codebooks must be a Codebook or a sequence of them, got {shown(books)}")
    return found
