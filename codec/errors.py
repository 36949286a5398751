"""Exceptions, all derived from :class:`CodecError`, and status codes of the C library."""

from enum import IntEnum
from typing import Any

from codec._c import _cffi

_numbers: dict[str, int] = {name: number for number, name in _cffi.ffi.typeof("codec_status").elements.items()}


class Status(IntEnum):
    """Status codes of the C library, ``codec_status`` in ``codec/codec.h``, in ranges by cause.

    10 to 19: wrong argument. 20 to 29: output or scratch memory too small. 30 to 39: the frame violates the format. 40
    to 49: the frame is damaged. 50 to 59: the frame is valid, but needs a later version of this library or exceeds the
    caller's limit. 60 to 69: a codebook, state or base is missing or different. The numbers are stable across versions.
    """

    OK = _numbers["CODEC_OK"]
    BAD_ARGUMENT = _numbers["CODEC_BAD_ARGUMENT"]
    BAD_SPEC = _numbers["CODEC_BAD_SPEC"]
    BAD_DTYPE = _numbers["CODEC_BAD_DTYPE"]
    BAD_SHAPE = _numbers["CODEC_BAD_SHAPE"]
    BAD_SEGMENTS = _numbers["CODEC_BAD_SEGMENTS"]
    BAD_CODEBOOK = _numbers["CODEC_BAD_CODEBOOK"]
    SHAPE_MISMATCH = _numbers["CODEC_SHAPE_MISMATCH"]
    NONFINITE = _numbers["CODEC_NONFINITE"]
    BAD_SCALE = _numbers["CODEC_BAD_SCALE"]
    ROUNDED_SCALE = _numbers["CODEC_ROUNDED_SCALE"]
    SHORT_OUTPUT = _numbers["CODEC_SHORT_OUTPUT"]
    SHORT_SCRATCH = _numbers["CODEC_SHORT_SCRATCH"]
    TRUNCATED = _numbers["CODEC_TRUNCATED"]
    TRAILING = _numbers["CODEC_TRAILING"]
    BAD_MAGIC = _numbers["CODEC_BAD_MAGIC"]
    BAD_HEADER = _numbers["CODEC_BAD_HEADER"]
    BAD_SIDE = _numbers["CODEC_BAD_SIDE"]
    BAD_DIRECTORY = _numbers["CODEC_BAD_DIRECTORY"]
    BAD_REGION = _numbers["CODEC_BAD_REGION"]
    CHECKSUM = _numbers["CODEC_CHECKSUM"]
    UNSUPPORTED = _numbers["CODEC_UNSUPPORTED"]
    LIMIT = _numbers["CODEC_LIMIT"]
    UNKNOWN_CODEBOOK = _numbers["CODEC_UNKNOWN_CODEBOOK"]
    MISSING_STATE = _numbers["CODEC_MISSING_STATE"]
    OTHER_STATE = _numbers["CODEC_OTHER_STATE"]
    MISSING_BASE = _numbers["CODEC_MISSING_BASE"]
    OTHER_BASE = _numbers["CODEC_OTHER_BASE"]
    ALREADY_APPLIED = _numbers["CODEC_ALREADY_APPLIED"]


class CodecError(Exception):
    """Base class of all errors of this library.

    Errors can be pickled with all attributes.

    Attributes
    ----------
    code : Status or None
        Status returned by the C library; None if Python code found the error.
    item : object
        Index or key of the tensor or frame at fault, in calls for several tensors or frames; otherwise None.

    Examples
    --------
    >>> frame = codec.encode(np.arange(5))
    >>> try:
    ...     codec.decode(frame[:-1])
    ... except codec.CodecError as e:
    ...     print(type(e).__name__, e.code.name, e.expected - e.found)
    FrameError TRUNCATED 1
    """

    item: object = None

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = None if code is None else Status(code)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.code), self.__dict__

    def of(self, item: object) -> None:
        """Record the index or key of the tensor or frame at fault as ``item``, and prefix the message with it."""
        self.item = item
        self.args = (f"{item!r}: {self.args[0]}", *self.args[1:])


class ArgumentError(CodecError, ValueError):
    """Wrong argument or tensor: its type, range, dtype, shape or memory, or a value that the codec does not accept.

    Examples
    --------
    >>> codec.encode(np.ones(3, np.float32), options=codec.options(threads=0))
    Traceback (most recent call last):
    codec.errors.ArgumentError: threads must be an int of at least 1, got 0
    """


class SpecError(CodecError, ValueError):
    """Wrong spec: a field is out of range, or the call cannot use this spec.

    Examples
    --------
    >>> codec.encode(np.ones(3, np.float32), codec.Ternary(scale=0.5))
    Traceback (most recent call last):
    codec.errors.SpecError: scale=0.5 is smaller than the largest magnitude in x: use a larger scale=, or None
    """


class FrameError(CodecError, ValueError):
    """Bytes that are not a valid frame.

    Attributes
    ----------
    offset : int
        Offset in bytes of the field or section at fault.
    found, expected : int
        Value at `offset`, and the value or bound that the format requires there. If `code` is ``Status.TRUNCATED``:
        number of bytes given, and number needed.
    """

    def __init__(
        self, message: str, code: int | None = None, offset: int = 0, found: int = 0, expected: int = 0
    ) -> None:
        super().__init__(message, code)
        self.offset = offset
        self.found = found
        self.expected = expected


class ChecksumError(FrameError):
    """Damaged frame: a checksum does not match its bytes."""


class UnsupportedError(FrameError):
    """Valid frame that needs a later version of this library."""


class LimitError(FrameError):
    """Tensor larger than ``max_nbytes``, or than the format can hold."""


class EngineError(CodecError, RuntimeError):
    """Engine, instruction set or optional package that is not available here."""


class StateError(CodecError, LookupError):
    """Missing or different state: a codebook, an optimizer's state, a base, a checkpoint of another rank or model."""


class PeerError(CodecError, RuntimeError):
    """Failure of a collective because another rank failed, was lost, or passed other arguments."""
