"""Heads of frames (header and side section), which ranks exchange before NCCL sends the frames between GPUs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from codec import FrameError
from codec._c.traits import has_fixed_rate
from codec.inspection import read_header
from codec.tensors.view import view_bytes
from codec.torch.reduction.device import DeviceReduction, keep
from codec.torch.reduction.partition import Piece
from codec.torch.transport.messages import Array, numbers_nbytes, pack_numbers, unpack_numbers

_FIELDS = 3  # integers of a frame in a message: bytes of the frame, bytes of its head, 1 if the head is complete
_USUAL = 4096  # size in bytes that most heads do not exceed
_SPARE = 256  # bytes by which a head is expected to exceed the previous one, since codebooks depend on values

_CHECKSUM = slice(24, 32)  # bytes of the checksum in a header


class Announced(NamedTuple):
    """Size and head of a frame, which a rank sends before the frame.

    Attributes
    ----------
    nbytes : int
        Bytes of the frame.
    head : ndarray of uint8
        Header and side section.
    complete : bool
        False: the sender has computed the head from the shape, before encoding. The checksum in the head is then
        meaningless, and encoding may still fail.
    """

    nbytes: int
    head: Array
    complete: bool


def pack(largest: int, row: Sequence[Announced]) -> list[Array]:
    """Build the message that announces a row of frames; `largest` is the size of this rank's largest frame."""
    fields = [n for each in row for n in (each.nbytes, len(each.head), int(each.complete))]
    return [pack_numbers([largest, *fields]), *(each.head for each in row)]


def most_nbytes(bounds: Sequence[int]) -> int:
    """Return the maximum size in bytes of a message that announces frames of at most `bounds` bytes."""
    return numbers_nbytes(1 + _FIELDS * len(bounds)) + sum(bounds)


def unpack(body: Array, count: int, rank: int) -> tuple[int, list[Announced]]:
    """Parse the message in which `rank` announces `count` frames. Return its largest frame size, and the row.

    Raises
    ------
    FrameError
        The message does not have as many bytes as its integers say.
    """
    begin = numbers_nbytes(1 + _FIELDS * count)
    if len(body) < begin:
        raise FrameError(f"rank {rank} announces {count} frames in {len(body)} bytes, but at least {begin} are needed")
    largest, *fields = unpack_numbers(body[:begin])
    row: list[Announced] = []
    for i in range(0, len(fields), _FIELDS):
        nbytes, head_nbytes, complete = fields[i : i + _FIELDS]
        if not 0 <= head_nbytes <= min(nbytes, len(body) - begin):
            raise FrameError(f"rank {rank} announces a head of {head_nbytes} bytes for a frame of {nbytes} bytes")
        row.append(Announced(nbytes, body[begin : begin + head_nbytes], complete=complete == 1))
        begin += head_nbytes
    if begin != len(body):
        raise FrameError(f"rank {rank} announces {count} frames in {len(body)} bytes, but {begin} are needed")
    return largest, row


def head_nbytes(frame: Array) -> int:
    """Return the size of a frame's head in bytes; `frame` must contain at least the header."""
    info = read_header(view_bytes(frame))
    return int(info.side_offset + info.side_nbytes)


def is_like(head: Array, expected: Array) -> bool:
    """Return True if a frame begins with the expected head; checksums may differ."""
    same = head[: len(expected)] == expected
    same[_CHECKSUM] = True
    return bool(same.all())


_constant: dict[tuple[Any, ...], Array] = {}  # heads that depend only on the shape; their checksum is meaningless
_lengths: dict[tuple[Any, ...], int] = {}  # expected size of heads in bytes


def _key(r: DeviceReduction, piece: Piece) -> tuple[Any, ...]:
    return r.spec, r.dtype, piece.n, piece.segments


def constant(r: DeviceReduction, piece: Piece) -> Array | None:
    """Return the head that all frames of a piece share, except its checksum; None if there is none or it is unknown."""
    return _constant.get(_key(r, piece))


def usual_nbytes(r: DeviceReduction, pieces: Sequence[Piece]) -> int:
    """Return the number of bytes to read for the heads of some pieces, estimated from previous heads."""
    return max(_USUAL, *(_lengths.get(_key(r, piece), 0) for piece in pieces))


def note(r: DeviceReduction, piece: Piece, head: Array) -> None:
    """Store the size of a head for later estimates, and the head itself if it depends only on the shape."""
    key = _key(r, piece)
    keep(_lengths, key, len(head) + _SPARE)
    if has_fixed_rate(r.spec) and not _depends_on_values(head):
        keep(_constant, key, head.copy())


def _depends_on_values(head: Array) -> bool:
    """Return False if the frame has blocks, and its side section holds only their parts (docs/spec/format.md, 8.3)."""
    info = read_header(view_bytes(head))
    begin = info.side_offset
    parts = int(head[begin : begin + 4].view("<u4")[0]) if info.side_nbytes else 0
    records = -(-(4 + 16 * parts) // 8) * 8 if parts else 0
    return not info.nblocks or info.side_nbytes != records
