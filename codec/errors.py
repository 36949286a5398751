"""Everything that this library raises."""


class CodecError(Exception):
    """Base of all errors of this library."""


class SpecError(CodecError, ValueError):
    """A spec, tensor or argument that cannot be encoded as asked."""


class FrameError(CodecError, ValueError):
    """Bytes that are not a valid frame.

    Attributes
    ----------
    code : int
        The C status, see ``codec_status`` in ``codec/codec.h``.
    offset : int
        Byte of the frame at which it stopped making sense.
    found, expected : int
        The value there, and the value or bound that it disagrees with.
    """

    def __init__(self, message: str, code: int = 0, offset: int = 0, found: int = 0, expected: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.offset = offset
        self.found = found
        self.expected = expected

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.code, self.offset, self.found, self.expected)


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
