"""Algorithms whose frames stay on GPUs: NCCL carries them (docs/protocol.md, section 18).

Values, frames and random streams are those of :mod:`codec.torch.reduction.algorithms`, so results are, too. All frames
of a phase travel in one message for each two ranks, in slots of one size: no rank asks another for sizes if the codec
has a fixed rate.
"""

from collections.abc import Callable, Sequence

import torch

from codec import PeerError
from codec._c.library import lib
from codec.torch.reduction.algorithms import store_sum
from codec.torch.reduction.device import DeviceReduction, Term
from codec.torch.reduction.host import Result, Values
from codec.torch.reduction.partition import Piece
from codec.torch.reduction.phases import FirstError
from codec.torch.transport.channel import Channel
from codec.torch.transport.messages import FRAME_LENGTH, check_frame_nbytes

_ALIGN = 16  # bytes: slots begin at multiples of this
_BEFORE = FRAME_LENGTH.size  # bytes of a slot before the frame
_HEAD = _BEFORE + lib.CODEC_HEADER_NBYTES  # bytes that hold the length and the header of a frame

Frames = list[list[torch.Tensor]]  # by rank and chunk


class Slots:
    """Frames of a collective, in memory of the GPU: a row of slots for each rank, a slot for each chunk.

    A slot has a frame behind its length, as a message has (docs/protocol.md, section 3.2). After an error this rank
    goes on and sends slots without frames, so that no rank waits for a message that never comes.

    Parameters
    ----------
    channel : Channel
        Channel of the collective, which connects GPUs.
    r : DeviceReduction
        Values of this rank.
    pieces : sequence of sequences of Piece
        All pieces of the collective, in rows of as many chunks each.
    """

    def __init__(self, channel: Channel, r: DeviceReduction, pieces: Sequence[Sequence[Piece]]) -> None:
        self._channel, self._r, self._pieces = channel, r, pieces
        self._most = max(r.frame_bound(piece) for row in pieces for piece in row)
        self.first_error = FirstError(channel)

    def scatter(self) -> Frames | None:
        """Send frames of row i to rank i, which has as many rows as there are ranks.

        Returns
        -------
        list of list of tensor, or None
            Frames of this rank's row by rank and chunk; None if one is missing.
        """
        me, size, chunks = self._channel.rank, self._channel.size, len(self._pieces[0])
        terms = [
            self._r.term(piece, (me * size + o) * chunks + c)
            for o, row in enumerate(self._pieces)
            for c, piece in enumerate(row)
        ]
        slots = self._encoded(size, lambda: terms)
        return self.first_error(self._frames_in, self._channel.device.all_to_all(slots), [self._pieces[me]] * size)

    def gather(self, terms: Callable[[], list[Term]], pieces: Sequence[Sequence[Piece]]) -> Frames | None:
        """Send a row of frames to all ranks.

        Parameters
        ----------
        terms : callable
            Returns the terms of this rank's row, by chunk; not called after an error.
        pieces : sequence of sequences of Piece
            Pieces of each rank's row.

        Returns
        -------
        list of list of tensor, or None
            Frames by rank and chunk; None if one is missing.
        """
        [row] = self._encoded(1, terms)
        return self.first_error(self._frames_in, self._channel.device.all_gather(row), pieces)

    def _encoded(self, rows: int, terms: Callable[[], list[Term]]) -> torch.Tensor:
        """Return slots with frames of this rank, the first ones encoded while requests of other ranks arrive."""
        r, channel = self._r, self._channel
        slots = r.empty_bytes((rows, len(self._pieces[0]), _slot_nbytes(self._most)))
        lengths: list[int] = [0] * (rows * slots.shape[1])  # without frames

        def encode() -> None:
            made = terms()
            with channel.clock.during("encode_s"):
                lengths[:] = r.encode_all(made, [slot[_BEFORE:] for row in slots for slot in row])

        channel.begin(0, lambda: self.first_error.at_once(encode))
        if not r.has_fixed_rate:
            slots = slots[:, :, : _slot_nbytes(self._agreed(max(lengths)))].contiguous()
        slots.view(torch.int64)[:, :, 0] = (
            torch.tensor(lengths, dtype=torch.int64, device="cpu").view(rows, -1).to(slots.device)
        )
        return slots

    def _agreed(self, nbytes: int) -> int:
        """Return the size of the largest frame of any rank, from that of this rank."""
        largest = max(theirs for [theirs] in self._channel.numbers.gather([nbytes]))
        if largest > self._most:
            self._channel.close()
            raise PeerError(f"a rank reports a frame of {largest} bytes, but at most {self._most} are possible")
        return largest

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
                check_frame_nbytes(rank, nbytes, most)
                self._r.check_frame(heads[rank, c, _BEFORE:], piece)
                frames[rank].append(slots[rank, c, _BEFORE : _BEFORE + nbytes])
        return frames


def _slot_nbytes(nbytes: int) -> int:
    """Return the bytes of a slot for frames of at most `nbytes` bytes."""
    return -(-max(_HEAD, _BEFORE + nbytes) // _ALIGN) * _ALIGN


def two_shot(channel: Channel, r: DeviceReduction) -> Result:
    """Run a two-shot all-reduce: each rank sums a slice and sends the sum to all."""
    slices, me = r.slices(channel.size), channel.rank
    slots = Slots(channel, r, slices)
    received = slots.scatter()

    def sums() -> list[Term]:
        first = (channel.size**2 + me) * len(slices[me])
        terms: list[Term] = []
        for c, piece in enumerate(slices[me]):
            total = r.sum_buffer(channel, piece.n)
            r.sum([row[c] for row in received or ()], piece, total)
            terms.append(r.sum_term(total, piece, first + c))
        return terms

    frames = slots.gather(sums, slices)
    result = r.result(channel, r.n)
    slots.first_error(_decode, r, frames, slices, [result] * channel.size)
    return result, slots.first_error.error


def all_gather(channel: Channel, r: DeviceReduction) -> Result:
    """Run an all-gather: each rank sends its frames to all, and sums all of them."""
    pieces = [piece for row in r.slices(1) for piece in row]
    slots = Slots(channel, r, [pieces])
    frames = _gathered(slots, channel, r, pieces)
    result = r.result(channel, r.n)
    for c, piece in enumerate(pieces):
        slots.first_error(_store_sum, channel, r, frames, c, piece, result[piece.begin :])
    return result, slots.first_error.error


def gather(channel: Channel, r: DeviceReduction) -> Result:
    """Gather the values of all ranks, in their order."""
    size, n = channel.size, r.n
    pieces = [piece for row in r.slices(1) for piece in row]
    slots = Slots(channel, r, [pieces])
    frames = _gathered(slots, channel, r, pieces)
    result = r.result(channel, size * n)
    slots.first_error(_decode, r, frames, [pieces] * size, [result[i * n : (i + 1) * n] for i in range(size)])
    return result, slots.first_error.error


def _gathered(slots: Slots, channel: Channel, r: DeviceReduction, pieces: Sequence[Piece]) -> Frames | None:
    """Send this rank's terms to all ranks."""
    first = channel.rank * len(pieces)
    terms = [r.term(piece, first + c) for c, piece in enumerate(pieces)]
    return slots.gather(lambda: terms, [pieces] * channel.size)


def reduce_scatter(channel: Channel, r: DeviceReduction) -> Result:
    """Run a reduce-scatter: each rank sums a slice. Slices have one size."""
    slices = r.even_slices(channel.size)
    slots = Slots(channel, r, slices)
    frames, mine = slots.scatter(), slices[channel.rank]
    result = r.result(channel, r.n // channel.size)
    for c, piece in enumerate(mine):
        slots.first_error(_store_sum, channel, r, frames, c, piece, result[piece.begin - mine[0].begin :])
    return result, slots.first_error.error


def all_to_all(channel: Channel, r: DeviceReduction) -> Result:
    """Run an all-to-all: slice i of each rank goes to rank i. Slices have one size."""
    slices = r.even_slices(channel.size)
    slots = Slots(channel, r, slices)
    frames = slots.scatter()
    result = r.result(channel, r.n)
    slots.first_error(_decode, r, frames, slices, [result] * channel.size)
    return result, slots.first_error.error


def _store_sum(channel: Channel, r: DeviceReduction, frames: Frames, c: int, piece: Piece, place: Values) -> None:
    """Store the sum of chunk `c`, a piece, of all ranks."""
    store_sum(channel, r, piece, [row[c] for row in frames], place, check=True)


def _decode(r: DeviceReduction, frames: Frames, pieces: Sequence[Sequence[Piece]], results: Sequence[Values]) -> None:
    """Decode the frames of each rank to the pieces of its result."""
    r.decode_all(
        [
            (frame, piece, result)
            for row, places, result in zip(frames, pieces, results, strict=True)
            for frame, piece in zip(row, places, strict=True)
        ]
    )
