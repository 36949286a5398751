"""Structs of the C library that one call needs; they are pooled and reused by later calls."""

from collections.abc import Sequence
from typing import Any, Protocol

from codec._c import library
from codec._c.library import DTYPES, ffi
from codec.tensors.view import TensorView

SMALL_TENSOR = 1 << 16  # bytes; frames of tensors up to this size are built in the call's pooled buffer and copied
SMALL_FRAME = (1 << 16) + 256  # size of the pooled frame buffer in bytes
SMALL_SCRATCH = 1 << 20  # size of the pooled scratch buffer in bytes


def new_tensor(dtype: int, shape: tuple[int, ...], data: Any = ffi.NULL, nbytes: int = 0) -> Any:
    """Return a new C struct ``codec_tensor`` with these fields."""
    t = ffi.new("codec_tensor *")
    t.struct_nbytes = ffi.sizeof("codec_tensor")
    t.dtype, t.rank, t.data, t.nbytes = dtype, len(shape), data, nbytes
    t.shape[0 : len(shape)] = shape
    return t


class CodeLengths(Protocol):
    """Fields of a :class:`codec.Codebook`, which this module must not import: it is in a layer above the engines."""

    @property
    def lengths(self) -> bytes: ...
    @property
    def escape_length(self) -> int: ...
    @property
    def id(self) -> int: ...
    @property
    def symbols(self) -> int: ...


_INFO, _INFO_NBYTES = ffi.typeof("codec_info *"), ffi.sizeof("codec_info")


def new_info() -> Any:
    """Return a new C struct ``codec_info``, empty except for its size."""
    info = ffi.new(_INFO)
    info.struct_nbytes = _INFO_NBYTES
    return info


class Call:
    """Structs and buffers of one call of a public function, from :func:`take` to :func:`give`.

    Objects are pooled, because allocating the structs would take most of the time of a call with a small tensor. A call
    owns its object exclusively: if user code that runs during a call (a finalizer, a signal handler, ``__dlpack__``)
    makes a call itself, the nested call uses another object.
    """

    __slots__ = (
        "_blank",
        "_dtype",
        "_isa",
        "_nothing",
        "_shape",
        "context",
        "fault",
        "frame",
        "frame_bytes",
        "info",
        "keep",
        "size",
        "small_scratch",
        "tensor",
    )

    def __init__(self) -> None:
        self.fault = ffi.new("codec_fault *")
        blank = ffi.new("codec_context *")
        blank.struct_nbytes = ffi.sizeof("codec_context")
        blank.fault = self.fault
        blank.weight = 1
        self._blank = blank
        self._nothing = blank[0]
        self._isa: int | None = -1
        self.context = ffi.new("codec_context *")
        self.tensor = new_tensor(0, ())
        self._dtype = ""
        self._shape: tuple[int, ...] = ()
        self.size = ffi.new("size_t *")
        self.info = new_info()
        self.frame = library.new_bytes(SMALL_FRAME)
        self.frame_bytes = ffi.buffer(self.frame)
        self.small_scratch = library.new_bytes(SMALL_SCRATCH)  # enough for tensors of SMALL_TENSOR bytes
        self.keep: Any = None  # owners of the memory to which the structs point

    def reset(self) -> None:
        """Reset the call's C struct ``codec_context`` to its defaults."""
        if self._isa != library.chosen_isa:
            self._isa = self._blank.isa = library.current_isa()
        self.context[0] = self._nothing

    def fill_tensor(self, v: TensorView) -> Any:
        """Fill in the struct ``codec_tensor`` for a tensor's view, and return the struct."""
        t = self.tensor
        dtype, shape, t.data, t.nbytes, _, _, _ = v
        if shape != self._shape or dtype != self._dtype:  # both are often unchanged since the previous call
            rank = len(shape)
            t.dtype = DTYPES[dtype]
            t.rank = rank
            t.shape[0:rank] = shape
            self._dtype, self._shape = dtype, shape
        return t

    def scratch(self, nbytes: int) -> Any:
        """Return a scratch buffer of at least `nbytes` bytes."""
        return self.small_scratch if nbytes <= SMALL_SCRATCH else library.new_bytes(nbytes)

    def set_codebooks(self, books: Sequence[CodeLengths]) -> None:
        """Set the codebook to encode with, or the codebooks that frames to decode may refer to."""
        array = ffi.new("codec_codebook[]", len(books))
        for struct, book in zip(array, books, strict=True):
            fill_codebook(struct, book)
        self.context.codebooks, self.context.ncodebooks = array, len(books)
        self.keep = self.keep, array

    def set_segments(self, packed: bytes) -> None:
        """Set the segments, as :func:`codec.tensors.segments.pack` returns them."""
        array = ffi.from_buffer("codec_segment[]", packed)
        self.context.segments, self.context.nsegments = array, len(array)
        self.keep = self.keep, array

    def set_base(self, v: TensorView) -> None:
        """Set the base with which Delta encodes or decodes."""
        t = new_tensor(DTYPES[v.dtype], v.shape, v.data, v.nbytes)
        self.context.base = t
        self.keep = self.keep, v, t

    def forget_levels(self) -> None:
        """Unset the levels of Truncate, and the optimizer from which levels are computed."""
        self.context.levels = self.context.metric = ffi.NULL


_KEPT = 32
_free: list[Call] = []  # shared by all threads: pop and append are atomic


def take() -> Call:
    """Return structs for one call, with the default context.

    If the call succeeds, pass the structs to :func:`give`. After an exception, drop them instead.
    """
    try:
        call = _free.pop()
    except IndexError:
        call = Call()
    call.reset()
    return call


def give(call: Call) -> None:
    """Return the structs of a call that has succeeded to the pool."""
    call.keep = None
    if len(_free) < _KEPT:
        _free.append(call)


def fill_codebook(struct: Any, book: CodeLengths) -> None:
    """Fill in a C struct ``codec_codebook``."""
    struct.id = book.id
    struct.length = book.lengths
    struct.escape_length = book.escape_length
    struct.symbols = book.symbols


def copy_contexts(context: Any, faults: Any, count: int) -> Any:
    """Return `count` copies of a context, one per thread; copy i reports errors to ``faults[i]``."""
    copies = ffi.new("codec_context[]", count)
    for i in range(count):
        copies[i] = context[0]
        copies[i].fault = faults + i
    return copies
