"""Everything that this library raises."""

from enum import IntEnum
from typing import Any

from codec._c import _cffi

_numbers: dict[str, int] = {name: number for number, name in _cffi.ffi.typeof("codec_status").elements.items()}


class Status(IntEnum):
    """Why a call of the C library failed: ``codec_status`` in ``codec/codec.h``, in decades by cause.

    10 to 19 the caller's arguments; 20 to 29 room; 30 to 39 the frame is not what the format allows; 40 to 49 it was
    damaged; 50 to 59 valid, but not for this library; 60 to 69 something that must be supplied is missing.
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


class CodecError(Exception):
    """Base of all errors of this library.

    Attributes
    ----------
    code : Status or None
        What the C library said; None if it was not asked.
    item : object
        Index or key of the tensor or frame at fault, of calls that are given many.
    """

    item: object = None

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = None if code is None else Status(code)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.code), self.__dict__

    def of(self, item: object) -> None:
        """Say which of many tensors or frames it was."""
        self.item = item
        self.args = (f"{item!r}: {self.args[0]}", *self.args[1:])


class ArgumentError(CodecError, ValueError):
    """Wrong argument or tensor: type, range, dtype, shape, memory, or values that the codec does not take."""


class SpecError(CodecError, ValueError):
    """Wrong spec: a field out of range, or a spec that does not go with this call."""


class FrameError(CodecError, ValueError):
    """Bytes that are not a valid frame.

    Attributes
    ----------
    offset : int
        Byte of the frame at which it stopped making sense.
    found, expected : int
        The value there, and the value or bound that it disagrees with.
    """

    def __init__(
        self, message: str, code: int | None = None, offset: int = 0, found: int = 0, expected: int = 0
    ) -> None:
        super().__init__(message, code)
        self.offset = offset
        self.found = found
        self.expected = expected


class ChecksumError(FrameError):
    """The bytes are not those that were written."""


class UnsupportedError(FrameError):
    """A valid frame that needs a later version of this library."""


class LimitError(FrameError):
    """A tensor larger than ``max_nbytes``, or than the format can hold."""


class EngineError(CodecError, RuntimeError):
    """An engine, instruction set or optional package that is not available here."""


class StateError(CodecError, LookupError):
    """State that a frame needs, such as a codebook, was not supplied."""


class PeerError(CodecError, RuntimeError):
    """Another rank failed or disagrees."""
