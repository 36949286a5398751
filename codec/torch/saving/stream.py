"""Extension of ``torch.distributed.checkpoint`` that stores the bytes of a checkpoint's items as lossless frames.

A stream is a sequence of frames. Each frame holds up to 4 MiB of the bytes as a vector; a frame without values ends the
stream. The extension sees bytes without their dtype, so it encodes a sample as each dtype and chooses the dtype with
the smallest frame. Only the size depends on this choice: frames are lossless, and name the dtype that was used.
"""

import io
from typing import IO, Any, cast

import numpy as np
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import codec
from codec import ArgumentError, CodecError, FrameError, LimitError
from codec._c.library import UNSIGNED

_CHUNK = 4 << 20  # maximum uncompressed bytes in a frame
_SAMPLE = 1 << 16  # bytes of the sample by which the dtype is chosen
_DTYPES = ("float32", "bfloat16", "float16", "float64", "uint8")  # dtypes to try
_LARGEST_FRAME = codec.bound(_CHUNK, "uint8") + 4096  # bytes; larger frames are rejected
_VERSION = "1"


def _frame(piece: memoryview, dtype: str) -> bytes:
    return codec.encode(codec.view(np.frombuffer(piece, UNSIGNED[dtype]), dtype))


def _encode(piece: memoryview) -> bytes:
    """Encode bytes as values of the dtype for which the frame of a sample of these bytes is smallest."""
    if len(piece) % 8:
        return _frame(piece, "uint8")
    begin = max(0, len(piece) - _SAMPLE) // 2 & ~7
    sample = piece[begin : begin + _SAMPLE]
    return _frame(piece, min(_DTYPES, key=lambda dtype: len(_frame(sample, dtype))))


_END = codec.encode(np.empty(0, np.uint8))  # last frame of a stream


class _Writer(io.RawIOBase):
    """Stream that encodes the bytes written to it. ``close`` writes the last frames, and leaves `output` open."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._rest = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        piece = memoryview(data).cast("B")
        taken = 0
        if self._rest:
            taken = min(_CHUNK - len(self._rest), len(piece))
            self._rest += piece[:taken]
            if len(self._rest) == _CHUNK:
                self._output.write(_encode(memoryview(self._rest)))
                self._rest = bytearray()
        while len(piece) - taken >= _CHUNK:  # encode whole chunks without copying them to `_rest`
            self._output.write(_encode(piece[taken : taken + _CHUNK]))
            taken += _CHUNK
        self._rest += piece[taken:]
        return len(piece)

    def close(self) -> None:
        if not self.closed:
            whole = len(self._rest) & ~7
            for last in (memoryview(self._rest)[:whole], memoryview(self._rest)[whole:]):
                if last:
                    self._output.write(_encode(last))
            self._output.write(_END)
            super().close()
            self._output.flush()


class _StreamReader(io.RawIOBase):
    """Stream that decodes a sequence of frames, and returns their bytes."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._piece = memoryview(b"")  # decoded bytes that were not read yet
        self._ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        if not self._piece and len(target):
            self._piece = self._next()
        n = min(len(target), len(self._piece))
        target[:n] = self._piece[:n]
        self._piece = self._piece[n:]
        return n

    def readall(self) -> bytes:
        pieces: list[Any] = [self._piece]
        while piece := self._next():
            pieces.append(piece)
        self._piece = memoryview(b"")
        return b"".join(pieces)

    def _read(self, n: int) -> bytes:
        """Read `n` bytes from the source, or fewer at its end."""
        found = b""
        while len(found) < n and (more := self._source.read(n - len(found))):
            found += more
        return found

    def _next(self) -> memoryview:
        """Return the decoded bytes of the next frame; b"" after the last frame."""
        if self._ended:
            return memoryview(b"")
        frame = self._read(len(_END))  # header of a frame that holds a vector
        info = codec.inspect(frame)
        if info.tensor_nbytes > _CHUNK or info.nbytes > _LARGEST_FRAME or len(info.shape) != 1:
            raise LimitError(
                f"a frame of a checkpoint must hold a vector of at most {_CHUNK} bytes, got shape {info.shape}"
            )
        frame += self._read(info.nbytes - len(frame))
        values: Any = np.empty(info.shape, UNSIGNED[info.dtype])
        try:
            codec.decode(frame, out=values)
        except FrameError:
            raise
        except CodecError as e:
            raise FrameError(f"not a frame of a checkpoint: {e}") from None
        self._ended = not info.n
        return memoryview(values).cast("B")


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
        return "tensor-codec"

    @staticmethod
    def from_descriptor(version: str) -> "FrameStream":
        """Return the extension for a stream version; raise ArgumentError if this library does not support it."""
        if version != _VERSION:
            raise ArgumentError(
                f"the checkpoint has streams of version {version!r}, but this library reads version {_VERSION!r}"
            )
        return FrameStream()

    def get_descriptor(self) -> str:
        """Return the name and version that are stored in a checkpoint's metadata."""
        return f"{self.registry_name()}/{_VERSION}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that writes its bytes to `output` as frames. Closing it writes the last frames."""
        return cast(IO[bytes], _Writer(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        """Return a stream of the decoded bytes of `input`. Reading it raises FrameError if a frame is damaged."""
        return cast(IO[bytes], _StreamReader(input))


def checkpoint_writer(path: Any, **how: Any) -> FileSystemWriter:
    """Return a ``FileSystemWriter`` for ``torch.distributed.checkpoint.save`` that writes lossless frames.

    Parameters
    ----------
    path : str or path
        Directory of the checkpoint.
    **how
        Further arguments of ``torch.distributed.checkpoint.FileSystemWriter``.

    Examples
    --------
    >>> import torch.distributed.checkpoint as dcp
    >>> state, loaded = {"weight": torch.randn(1000)}, {"weight": torch.empty(1000)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     metadata = dcp.save(state, storage_writer=codec.torch.checkpoint_writer(folder))
    ...     dcp.load(loaded, storage_reader=codec.torch.checkpoint_reader(folder))
    >>> torch.equal(loaded["weight"], state["weight"])
    True
    """
    return FileSystemWriter(path, _extensions=[FrameStream()], **how)


def checkpoint_reader(path: Any) -> FileSystemReader:
    """Return a ``FileSystemReader`` for ``torch.distributed.checkpoint.load``.

    It reads checkpoints of :func:`checkpoint_writer`, and checkpoints without frames. If a frame is damaged or
    incomplete, the error that ``load`` raises contains a :class:`codec.FrameError`.

    Parameters
    ----------
    path : str or path
        Directory of the checkpoint.
    """
    registry = ExtensionRegistry()
    registry.register(FrameStream)
    return FileSystemReader(path, _extension_registry=registry)
