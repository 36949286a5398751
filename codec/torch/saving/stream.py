"""Frames in the files of ``torch.distributed.checkpoint``: an extension that encodes streams of bytes.

A stream is a sequence of frames. Each holds up to 4 MiB of the bytes as a vector, and the last one, with no values,
ends the stream. Streams do not name the dtype of their tensor, so it is guessed by the size of a sample. Only sizes
depend on the guess: a frame tells how its bytes were read, and is lossless.
"""

import io
from typing import IO, Any, cast

import numpy as np
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import codec
from codec import ArgumentError, CodecError, FrameError, LimitError

_CHUNK = 4 << 20  # maximum bytes in a frame
_SAMPLE = 1 << 16  # bytes from which the dtype is guessed
# Dtypes to try, and unsigned integers of the same size.
_UNITS = {"float32": "u4", "bfloat16": "u2", "float16": "u2", "float64": "u8", "uint8": "u1"}
_LARGEST_FRAME = codec.bound(_CHUNK, "uint8") + 4096  # bytes
_VERSION = "1"


def _frame(piece: memoryview, dtype: str) -> bytes:
    return codec.encode(codec.view(np.frombuffer(piece, _UNITS[dtype]), dtype))


def _encode(piece: memoryview) -> bytes:
    """Return the frame of some bytes, read as the dtype in which a sample of them is the smallest."""
    if len(piece) % 8:
        return _frame(piece, "uint8")
    begin = max(0, len(piece) - _SAMPLE) // 2 & ~7
    sample = piece[begin : begin + _SAMPLE]
    return _frame(piece, min(_UNITS, key=lambda dtype: len(_frame(sample, dtype))))


_END = codec.encode(np.empty(0, np.uint8))  # last frame of a stream


class _Writer(io.RawIOBase):
    """Stream that encodes what is written to it. ``close`` writes the last frames, and leaves the output open."""

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
        while len(piece) - taken >= _CHUNK:  # without a copy
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


class _Reader(io.RawIOBase):
    """Stream of the bytes in a sequence of frames."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self._piece = memoryview(b"")  # bytes decoded and not yet read
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
        """Read `n` bytes, or fewer at the end of the source."""
        found = b""
        while len(found) < n and (more := self._source.read(n - len(found))):
            found += more
        return found

    def _next(self) -> memoryview:
        """Return the bytes in the next frame; none after the last frame."""
        if self._ended:
            return memoryview(b"")
        frame = self._read(len(_END))  # the header of a vector's frame
        info = codec.inspect(frame)
        if info.tensor_nbytes > _CHUNK or info.nbytes > _LARGEST_FRAME or len(info.shape) != 1:
            raise LimitError(f"a frame of a checkpoint holds at most {_CHUNK} bytes as a vector; it has {info.shape}")
        frame += self._read(info.nbytes - len(frame))
        values: Any = np.empty(info.shape, f"u{info.tensor_nbytes // info.n}" if info.n else "u1")
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

    :func:`checkpoint_writer` and :func:`checkpoint_reader` use it. Pass it to other storage writers that take
    extensions, and register it with the registry of their readers. The extension interface of PyTorch is experimental.

    Examples
    --------
    >>> extension = codec.torch.FrameStream()
    >>> extension.get_descriptor()
    'tensor-codec/1'
    """

    @staticmethod
    def registry_name() -> str:
        """Return the name by which checkpoints refer to the extension."""
        return "tensor-codec"

    @staticmethod
    def from_descriptor(version: str) -> "FrameStream":
        """Return the extension for a version of the stream; raise ArgumentError if this library does not know it."""
        if version != _VERSION:
            raise ArgumentError(f"the checkpoint has streams of version {version!r}, this library reads {_VERSION!r}")
        return FrameStream()

    def get_descriptor(self) -> str:
        """Return the name and version that a checkpoint's metadata keeps."""
        return f"{self.registry_name()}/{_VERSION}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream whose bytes are written to `output` as frames, the last ones when it is closed."""
        return cast(IO[bytes], _Writer(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        """Return a stream of the bytes in the frames of `input`. Reading raises FrameError for damaged frames."""
        return cast(IO[bytes], _Reader(input))


def checkpoint_writer(path: Any, **how: Any) -> FileSystemWriter:
    """Return a ``FileSystemWriter`` for ``torch.distributed.checkpoint.save`` that writes lossless frames.

    Parameters
    ----------
    path : str or path
        Folder of the checkpoint.
    **how
        Arguments of ``torch.distributed.checkpoint.FileSystemWriter``.

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
    """Return a ``FileSystemReader`` for ``torch.distributed.checkpoint.load``, for frames and other checkpoints.

    Reading raises :class:`codec.FrameError`, within the error of ``load``, for frames that are damaged or incomplete.

    Parameters
    ----------
    path : str or path
        Folder of the checkpoint.
    """
    registry = ExtensionRegistry()
    registry.register(FrameStream)
    return FileSystemReader(path, _extension_registry=registry)
