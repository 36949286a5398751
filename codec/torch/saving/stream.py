"""Extension of ``torch.distributed.checkpoint`` that stores the bytes of a checkpoint's items as lossless frames.

The extension sees bytes without their dtype, so it encodes a sample as each dtype and chooses the dtype with the
smallest frame. Only the size depends on this choice: frames are lossless, and name the dtype that was used.
"""

from typing import IO, cast

from torch.distributed.checkpoint._extension import StreamTransformExtension

from codec import ArgumentError
from codec.checkpoints.streams import StreamChunks, StreamReader, StreamWriter

_NAME = "tensor-codec"
_VERSION = "1"
FULL = f"{_NAME}/{_VERSION}"  # descriptor of streams without frames of changes
CHANGES = f"{_NAME}/2"  # descriptor of streams with frames of changes, which only `checkpoint_reader` reads


class FrameStream(StreamTransformExtension):
    """Extension of ``torch.distributed.checkpoint`` that writes each item of a checkpoint as lossless frames.

    :func:`checkpoint_writer` and :func:`checkpoint_reader` use this class. To use the class with another storage
    writer, pass an instance as an extension, and register the class with the extension registry of the reader.
    PyTorch's interface for extensions is experimental.

    Examples
    --------
    >>> extension = codec.torch.saving.stream.FrameStream()
    >>> extension.get_descriptor()
    'tensor-codec/1'
    """

    @staticmethod
    def registry_name() -> str:
        """Return the name of the extension in the metadata of checkpoints."""
        return _NAME

    @staticmethod
    def from_descriptor(version: str) -> "FrameStream":
        """Return the extension for a stream version; raise ArgumentError if this library does not support it."""
        if f"{_NAME}/{version}" == CHANGES:
            raise ArgumentError("the checkpoint has changes of another one: load it by codec.torch.checkpoint_reader()")
        if version != _VERSION:
            raise ArgumentError(
                f"the checkpoint has streams of version {version!r}, but this library reads version {_VERSION!r}"
            )
        return FrameStream()

    def get_descriptor(self) -> str:
        """Return the name and version that are stored in a checkpoint's metadata."""
        return FULL

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that writes its bytes to `output` as frames. Closing it writes the last frames."""
        return cast(IO[bytes], StreamWriter(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        """Return a stream of the decoded bytes of `input`. Reading it raises FrameError if a frame is damaged."""
        return cast(IO[bytes], StreamReader(StreamChunks(input)))
