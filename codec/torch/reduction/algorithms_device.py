"""Algorithms whose frames stay on GPUs: NCCL carries them (docs/protocol.md, section 18).

Values, frames and random streams are those of :mod:`codec.torch.reduction.algorithms`, so results are, too. All frames
of a phase travel in one message for each two ranks, in slots of one size.
"""

import struct
from collections.abc import Callable, Sequence

import torch

from codec import FrameError, PeerError
from codec._c.library import lib
from codec.torch.reduction.algorithms import store_sum
from codec.torch.reduction.device import DeviceReduction, Term
from codec.torch.reduction.host import Values
from codec.torch.reduction.partition import Piece
from codec.torch.transport.collective import Part

FRAME_LENGTH = struct.Struct("<Q")  # before each frame

_ALIGN = 16  # bytes: slots begin at multiples of this
_BEFORE = FRAME_LENGTH.size  # bytes of a slot before the frame
_HEAD = _BEFORE + lib.CODEC_HEADER_NBYTES  # bytes that hold the length and the header of a frame

Frames = list[list[torch.Tensor]]  # by rank and chunk


class Slots:
    """Frames of a collective, in memory of the GPU: a row of slots for each rank, a slot for each chunk.

    A slot has a frame behind its length (docs/protocol.md, section 18).

    Parameters
    ----------
    part : Part
        Part of the collective, whose channel connects GPUs.
    r : DeviceReduction
        Values of this rank.
    pieces : sequence of sequences of Piece
        All pieces of the collective, in rows of as many chunks each.
    """

    def __init__(self, part: Part, r: DeviceReduction, pieces: Sequence[Sequence[Piece]]) -> None:
        self._part, self._r, self._pieces = part, r, pieces
        self._most = max(r.frame_bound(piece) for row in pieces for piece in row)

    async def scatter(self) -> Frames:
        """Send frames of row i to rank i, which has as many rows as there are ranks.

        Returns
        -------
        list of list of tensor
            Frames of this rank's row, by rank and chunk.
        """
        me, size, chunks = self._part.rank, self._part.size, len(self._pieces[0])
        terms = [
            self._r.term(piece, (me * size + o) * chunks + c)
            for o, row in enumerate(self._pieces)
            for c, piece in enumerate(row)
        ]
        device = self._part.device
        received = await self._exchange(size, terms, lambda slots: device.all_to_all(slots, self._part.counters))
        return self._frames_in(received, [self._pieces[me]] * size)

    async def gather(self, terms: Sequence[Term], pieces: Sequence[Sequence[Piece]]) -> Frames:
        """Send a row of frames to all ranks.

        Parameters
        ----------
        terms : sequence of Term
            Terms of this rank's row, by chunk.
        pieces : sequence of sequences of Piece
            Pieces of each rank's row.

        Returns
        -------
        list of list of tensor
            Frames by rank and chunk.
        """
        device = self._part.device
        received = await self._exchange(1, terms, lambda slots: device.all_gather(slots[0], self._part.counters))
        return self._frames_in(received, pieces)

    async def _exchange(
        self, rows: int, terms: Sequence[Term], send: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Encode terms, and return the slots that send(rows of slots) receives, once all ranks have encoded theirs.

        NCCL's messages could not be ended if a rank had failed. So all ranks first report the size of their largest
        frame.
        """
        r, part = self._r, self._part
        slots = r.empty_bytes((rows, len(self._pieces[0]), _slot_nbytes(self._most)))
        with part.clock.during("encode_s"):
            lengths = r.encode_all(terms, [slot[_BEFORE:] for row in slots for slot in row])
        largest = max(theirs for [theirs] in await part.gather([max(lengths)]))
        if largest > self._most:
            raise PeerError(f"a rank reports a frame of {largest} bytes, but at most {self._most} are possible")
        part.counters.round_trips += 1
        with part.device.phase():
            slots = slots[:, :, : _slot_nbytes(largest)].contiguous()
            slots.view(torch.int64)[:, :, 0] = (
                torch.tensor(lengths, dtype=torch.int64, device="cpu").view(rows, -1).to(slots.device)
            )
            return send(slots)

    def _frames_in(self, slots: torch.Tensor, pieces: Sequence[Sequence[Piece]]) -> Frames:
        """Return the frames in slots of all ranks, after checks of their lengths and headers.

        Raises
        ------
        PeerError
            A rank had no frame to send.
        FrameError
            A length or a header is not as agreed.
        """
        heads = slots[:, :, :_HEAD].contiguous().cpu().numpy()
        most = slots.shape[2] - _BEFORE
        frames: Frames = []
        for rank, row in enumerate(pieces):
            frames.append([])
            for c, piece in enumerate(row):
                (nbytes,) = FRAME_LENGTH.unpack_from(heads[rank, c])
                _check_nbytes(rank, nbytes, most)
                self._r.check_frame(heads[rank, c, _BEFORE:], piece)
                frames[rank].append(slots[rank, c, _BEFORE : _BEFORE + nbytes])
        return frames


def _check_nbytes(rank: int, nbytes: int, most: int) -> None:
    """Raise the error for a frame's length that a rank has sent, unless it is 1 to `most` bytes."""
    if not nbytes:
        raise PeerError(f"rank {rank} sent no frame, because of an error")
    if nbytes > most:
        raise FrameError(f"rank {rank} sends a frame of {nbytes} bytes, but at most {most} are possible")


def _slot_nbytes(nbytes: int) -> int:
    """Return the bytes of a slot for frames of at most `nbytes` bytes."""
    return -(-max(_HEAD, _BEFORE + nbytes) // _ALIGN) * _ALIGN


async def two_shot(part: Part, r: DeviceReduction) -> Values:
    """Run a two-shot all-reduce: each rank sums a slice and sends the sum to all."""
    slices, me = r.slices(part.size), part.rank
    slots = Slots(part, r, slices)
    received = await slots.scatter()
    first = (part.size**2 + me) * len(slices[me])
    sums: list[Term] = []
    for c, piece in enumerate(slices[me]):
        total = r.sum_buffer(part, piece.n)
        r.sum([row[c] for row in received], piece, total)
        sums.append(r.sum_term(total, piece, first + c))
    frames = await slots.gather(sums, slices)
    result = r.result(part, r.n)
    _decode(part, r, frames, slices, [result] * part.size)
    return result


async def all_gather(part: Part, r: DeviceReduction) -> Values:
    """Run an all-gather: each rank sends its frames to all, and sums all of them."""
    pieces = [piece for row in r.slices(1) for piece in row]
    frames = await _gathered(part, r, pieces)
    result = r.result(part, r.n)
    for c, piece in enumerate(pieces):
        _store_sum(part, r, frames, c, piece, result[piece.begin :])
    return result


async def gather(part: Part, r: DeviceReduction) -> Values:
    """Gather the values of all ranks, in their order."""
    size, n = part.size, r.n
    pieces = [piece for row in r.slices(1) for piece in row]
    frames = await _gathered(part, r, pieces)
    result = r.result(part, size * n)
    _decode(part, r, frames, [pieces] * size, [result[i * n : (i + 1) * n] for i in range(size)])
    return result


async def _gathered(part: Part, r: DeviceReduction, pieces: Sequence[Piece]) -> Frames:
    """Send this rank's terms to all ranks, and return those of all."""
    first = part.rank * len(pieces)
    terms = [r.term(piece, first + c) for c, piece in enumerate(pieces)]
    return await Slots(part, r, [pieces]).gather(terms, [pieces] * part.size)


async def reduce_scatter(part: Part, r: DeviceReduction) -> Values:
    """Run a reduce-scatter: each rank sums a slice. Slices have one size."""
    slices = r.even_slices(part.size)
    frames = await Slots(part, r, slices).scatter()
    mine = slices[part.rank]
    result = r.result(part, r.n // part.size)
    for c, piece in enumerate(mine):
        _store_sum(part, r, frames, c, piece, result[piece.begin - mine[0].begin :])
    return result


async def all_to_all(part: Part, r: DeviceReduction) -> Values:
    """Run an all-to-all: slice i of each rank goes to rank i. Slices have one size."""
    slices = r.even_slices(part.size)
    frames = await Slots(part, r, slices).scatter()
    result = r.result(part, r.n)
    _decode(part, r, frames, slices, [result] * part.size)
    return result


def _store_sum(part: Part, r: DeviceReduction, frames: Frames, c: int, piece: Piece, place: Values) -> None:
    """Store the sum of chunk `c`, a piece, of all ranks."""
    with part.clock.during("decode_s"):
        store_sum(part, r, piece, [row[c] for row in frames], place, check=True)


def _decode(
    part: Part, r: DeviceReduction, frames: Frames, pieces: Sequence[Sequence[Piece]], results: Sequence[Values]
) -> None:
    """Decode the frames of each rank to the pieces of its result."""
    with part.clock.during("decode_s"):
        r.decode_all(
            [
                (frame, piece, result)
                for row, places, result in zip(frames, pieces, results, strict=True)
                for frame, piece in zip(row, places, strict=True)
            ]
        )
