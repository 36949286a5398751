"""Streams of frames: bytes of one item of a checkpoint, in full or as changes of the bytes in an earlier checkpoint.

A stream is a sequence of frames. Each frame holds up to 4 MiB of the bytes, called a chunk, as a vector; a frame
without values ends the stream. The frame of a chunk is one of Lossless, or one of Delta against the chunk of the same
number and size in the base's stream. Only the size of a stream depends on the choice of frames and dtypes.
"""

import io
from collections.abc import Callable
from typing import IO, Any, Protocol

import numpy as np

from codec._c.library import ITEMSIZE, UNSIGNED
from codec.decoding import decode
from codec.encoding import bound, encode
from codec.errors import CodecError, FrameError, LimitError
from codec.inspection import digest, inspect
from codec.specs import Delta, Lossless
from codec.tensors.wrapper import view

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

CHUNK = 4 << 20  # maximum uncompressed bytes in a frame
_SAMPLE = 1 << 16  # bytes of the sample by which dtype and codec are chosen
_SLICES = 16  # number of pieces of the sample that compares Delta and Lossless; changes are often in few rows
_DTYPES = ("float32", "bfloat16", "float16", "float64", "uint8")  # dtypes to try
_LARGEST_FRAME = max(bound(CHUNK, "uint8", each) for each in (Lossless(), Delta())) + 4096  # bytes; others are rejected
_END = encode(np.empty(0, np.uint8))  # last frame of a stream


class Chunks(Protocol):
    """Chunks of the base, in order."""

    def next(self) -> Bytes | None:
        """Return the next chunk, or None after the last one."""
        ...


def _frame(piece: Bytes, dtype: str, base: Bytes | None = None) -> bytes:
    kind = UNSIGNED[dtype]
    if base is None:
        return encode(view(piece.view(kind), dtype), Lossless())
    return encode(view(piece.view(kind), dtype), Delta(), base=view(base.view(kind), dtype))


def _sampled(piece: Bytes) -> Bytes:
    begin = max(0, len(piece) - _SAMPLE) // 2 & ~7
    return piece[begin : begin + _SAMPLE]


def _slices(piece: Bytes) -> Bytes:
    """Return a sample of a chunk: pieces at equal distances."""
    step = len(piece) // _SLICES & ~7
    if step * _SLICES <= _SAMPLE:
        return piece
    n = _SAMPLE // _SLICES
    return np.concatenate([piece[k * step : k * step + n] for k in range(_SLICES)])


def encode_chunk(piece: Bytes, dtype: str | None = None, base: Bytes | None = None) -> bytes:
    """Encode a chunk as a frame of Delta or Lossless, whichever is smaller for a sample.

    Parameters
    ----------
    piece : array of uint8
        The chunk.
    dtype : str, optional
        Dtype of the values for Delta. Default, and for Lossless: the dtype for which the frame of a sample is smallest.
    base : array of uint8, optional
        Chunk of the base. None, or a chunk of another size: the frame is one of Lossless.
    """
    if base is not None and len(base) != len(piece):
        base = None
    sample, full = _sampled(piece), "uint8"
    if len(piece) % 8 == 0:
        full = min(_DTYPES, key=lambda each: len(_frame(sample, each)))
    changed = "uint8" if len(piece) % 8 else dtype or full
    if base is None:
        return _frame(piece, full)
    if len(piece) <= _SAMPLE:
        return min(_frame(piece, full), _frame(piece, changed, base), key=len)
    if np.array_equal(piece, base):
        return _frame(piece, changed, base)
    if len(_frame(_slices(piece), changed, _slices(base))) < len(_frame(_slices(piece), full)):
        return _frame(piece, changed, base)
    return _frame(piece, full)


class StreamWriter(io.RawIOBase):
    """Stream that encodes the bytes written to it. ``close`` writes the last frames, and leaves `output` open.

    Parameters
    ----------
    output : binary file
        Receives the frames.
    dtype : str, optional
        Dtype of most of the bytes.
    base : Chunks, optional
        Chunks of the item in the base.
    keep : callable, optional
        Called with each chunk, which must be copied if it is kept.

    Attributes
    ----------
    nbytes : int
        Number of bytes written to the stream.
    digests : list of bytes
        Digest of each chunk.
    uses_base : bool
        True if a frame is one of Delta.
    """

    def __init__(
        self,
        output: IO[bytes],
        dtype: str | None = None,
        base: Chunks | None = None,
        keep: Callable[[Bytes], object] | None = None,
    ) -> None:
        self._output, self._dtype, self._base, self._keep = output, dtype, base, keep
        self._rest = bytearray()
        self.nbytes = 0
        self.digests: list[bytes] = []
        self.uses_base = False

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any, /) -> int:
        """Encode whole chunks, and keep the rest until more bytes are written."""
        piece = memoryview(data).cast("B")
        taken = 0
        if self._rest:
            taken = min(CHUNK - len(self._rest), len(piece))
            self._rest += piece[:taken]
            if len(self._rest) == CHUNK:
                self._put(memoryview(self._rest))
                self._rest = bytearray()
        while len(piece) - taken >= CHUNK:  # encode whole chunks without copying them to `_rest`
            self._put(piece[taken : taken + CHUNK])
            taken += CHUNK
        self._rest += piece[taken:]
        return len(piece)

    def _put(self, data: memoryview) -> None:
        piece = np.frombuffer(data, np.uint8)
        base = None if self._base is None else self._base.next()
        frame = encode_chunk(piece, self._dtype, base)
        self._output.write(frame)
        self.nbytes += len(piece)
        self.digests.append(digest(piece).to_bytes(8, "little"))
        self.uses_base |= base is not None and isinstance(inspect(frame).spec, Delta)
        if self._keep is not None:
            self._keep(piece)

    def close(self) -> None:
        """Write the last frames."""
        if not self.closed:
            whole = len(self._rest) & ~7
            for last in (memoryview(self._rest)[:whole], memoryview(self._rest)[whole:]):
                if last:
                    self._put(last)
            self._output.write(_END)
            super().close()
            self._output.flush()


class StreamChunks:
    """Chunks of a stream, decoded one after the other.

    Parameters
    ----------
    source : binary file
        The stream.
    open_base : callable, optional
        Function that returns the chunks of the base. It is called for the first frame of Delta.

    Attributes
    ----------
    nbytes : int
        Number of bytes in the chunks read so far.
    digests : list of bytes
        Digest of each chunk read so far.
    """

    def __init__(self, source: IO[bytes], open_base: "Callable[[], Chunks] | None" = None) -> None:
        self._source, self._open_base = source, open_base
        self._base: Chunks | None = None
        self._ended = False
        self.nbytes = 0
        self.digests: list[bytes] = []

    def next(self) -> Bytes | None:
        """Return the next chunk, or None after the last one.

        Raises
        ------
        FrameError
            A frame is damaged, or is not one of a stream.
        StateError
            The base has other values than those against which the frame was encoded.
        """
        if self._ended:
            return None
        frame = self._read(len(_END))  # header of a frame that holds a vector
        info = inspect(frame)
        if info.tensor_nbytes > CHUNK or info.nbytes > _LARGEST_FRAME or len(info.shape) != 1:
            raise LimitError(f"a frame of a checkpoint must hold a vector of at most {CHUNK} bytes, got {info.shape}")
        frame += self._read(info.nbytes - len(frame))
        values: Any = np.empty(info.shape, UNSIGNED[info.dtype])
        if not isinstance(info.spec, Delta):
            self._decode(frame, values, None)
            if self._base is not None:
                self._base.next()
        else:
            base = self._base_chunk(len(self.digests))
            if base is None or len(base) != info.tensor_nbytes:
                raise FrameError(f"a frame of changes needs a chunk of {info.tensor_nbytes} bytes in the base")
            self._decode(frame, values, base.view(UNSIGNED[info.dtype]))
        chunk = values.view(np.uint8)
        self._ended = not info.n
        if self._ended:
            return None
        self.nbytes += len(chunk)
        self.digests.append(digest(chunk).to_bytes(8, "little"))
        return chunk

    def _base_chunk(self, k: int) -> Bytes | None:
        """Return chunk `k` of the base."""
        if self._base is None:
            if self._open_base is None:
                raise FrameError("the stream has frames of changes, but the checkpoint has no base")
            self._base = self._open_base()
            for _ in range(k):
                self._base.next()
        return self._base.next()

    def _decode(self, frame: bytes, out: Any, base: Any) -> None:
        try:
            decode(frame, out=out, base=base)
        except FrameError:
            raise
        except CodecError as e:
            if base is not None:
                raise
            raise FrameError(f"not a frame of a checkpoint: {e}") from None

    def _read(self, n: int) -> bytes:
        """Read `n` bytes from the source, or fewer at its end."""
        found = b""
        while len(found) < n and (more := self._source.read(n - len(found))):
            found += more
        return found


class StreamReader(io.RawIOBase):
    """Stream of the bytes of chunks."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = chunks
        self._piece = memoryview(b"")  # decoded bytes that were not read yet

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Copy decoded bytes to a buffer, and return their number; 0 at the end."""
        target = memoryview(buffer).cast("B")
        if not self._piece and len(target):
            self._piece = self._next()
        n = min(len(target), len(self._piece))
        target[:n] = self._piece[:n]
        self._piece = self._piece[n:]
        return n

    def readall(self) -> bytes:
        """Return all bytes that were not read yet."""
        pieces: list[Any] = [self._piece]
        while piece := self._next():
            pieces.append(piece)
        self._piece = memoryview(b"")
        return b"".join(pieces)

    def _next(self) -> memoryview:
        chunk = self._chunks.next()
        values: Any = chunk
        return memoryview(b"" if chunk is None else values)


def dtype_named(name: str) -> str | None:
    """Return the dtype of frames for values of this dtype of torch or NumPy; None if frames have no such dtype."""
    name = {"complex64": "float32", "complex128": "float64", "bool": "uint8"}.get(name, name)
    return name if name in ITEMSIZE else None
