"""Phases of algorithms: messages with frames, sent to the owners of slices or to all ranks."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from codec.torch.network.inbox import Receive
from codec.torch.reduction.host import Reduction
from codec.torch.reduction.partition import Piece
from codec.torch.transport.collective import Part
from codec.torch.transport.messages import Array


def encode_message(part: Part, bound: int, encode: Callable[[Array], int]) -> Array:
    """Return a frame in memory of the collective.

    Parameters
    ----------
    part : Part
        Gives the memory.
    bound : int
        Largest number of bytes of the frame.
    encode : callable
        Writes the frame into an array, and returns its number of bytes.
    """
    room = part.arena.allocate(bound)
    with part.clock.during("encode_s"):
        nbytes = encode(room)
    return part.arena.shrink(room, nbytes)


def copied(part: Part, frame: Array) -> Array:
    """Return a copy of a frame in memory of the collective."""

    def copy(room: Array) -> int:
        room[: frame.nbytes] = frame
        return frame.nbytes

    return encode_message(part, frame.nbytes, copy)


def _encode_term(part: Part, r: Reduction, piece: Piece, bound: int, number: int) -> Array:
    return encode_message(part, bound, lambda room: r.encode(piece, room, number))


async def _in_rank_order(part: Part, incoming: Mapping[int, Receive], own: Array | None) -> list[Array | None]:
    """Return the frames of all ranks in their order; `own` is that of this rank, None its own values."""
    found: dict[int, Array | None] = {part.rank: own}
    for o, receive in incoming.items():
        found[o] = await part.frame(receive)
    return [found[rank] for rank in range(part.size)]


class ScatterPhase:
    """First phase of most algorithms: each rank gets the terms of its slice from all ranks.

    Parameters
    ----------
    part : Part
        Part of the collective.
    r : Reduction
        Values of this rank.
    slices : sequence of sequences of Piece
        Pieces of each rank's slice.
    nbytes : int
        Bytes of the arena that the algorithm needs besides.
    """

    def __init__(self, part: Part, r: Reduction, slices: Sequence[Sequence[Piece]], nbytes: int = 0) -> None:
        self._part, self._r, self._slices = part, r, slices
        self._bounds = [[r.frame_bound(piece) for piece in pieces] for pieces in slices]
        self._own: list[Array | None] = []
        mine = self._bounds[part.rank]
        needed = [b for bounds in self._bounds for b in bounds] + mine * (part.size - 1)
        part.arena.reserve(nbytes + part.arena.nbytes_of(needed), pinned=r.on_device)
        self._incoming = [{o: part.receive(b, o) for o in part.others} for b in mine]

    async def send(self) -> None:
        """Encode and send all terms: first chunks of all slices first, and those of other ranks before this rank's."""
        part = self._part
        for c in range(max(map(len, self._slices))):
            for o in [*part.others, part.rank]:
                if c >= len(self._slices[o]):
                    continue
                if o == part.rank:
                    self._own.append(None if self._r.own_term_is_exact else self._encode(c, o))
                else:
                    part.send_frame(self._encode(c, o), o)
            await part.breathe()
        part.counters.round_trips += 0.5

    def _encode(self, c: int, o: int) -> Array:
        """Return the frame of chunk `c` of the slice of rank `o`."""
        me, size, most = self._part.rank, self._part.size, max(map(len, self._slices))
        return _encode_term(self._part, self._r, self._slices[o][c], self._bounds[o][c], (me * size + o) * most + c)

    async def terms(self, c: int) -> list[Array | None]:
        """Return chunk `c` of this rank's slice from all ranks, in their order, as :meth:`Reduction.sum` takes them."""
        return await _in_rank_order(self._part, self._incoming[c], self._own[c])


class BroadcastPhase:
    """Only phase of other algorithms: each rank sends its frames to all ranks.

    Parameters
    ----------
    part : Part
        Part of the collective.
    r : Reduction
        Values of this rank.
    """

    def __init__(self, part: Part, r: Reduction) -> None:
        self._part, self._r = part, r
        self._pieces = [piece for pieces in r.slices(1) for piece in pieces]
        self._bounds = [r.frame_bound(piece) for piece in self._pieces]
        part.arena.reserve(part.arena.nbytes_of(self._bounds * part.size), pinned=r.on_device)
        self._incoming = [{o: part.receive(b, o) for o in part.others} for b in self._bounds]

    async def terms(self) -> AsyncIterator[tuple[Piece, list[Array | None]]]:
        """Send this rank's frames, and yield each piece with its frames from all ranks, in their order."""
        part, r = self._part, self._r
        own: list[Array | None] = []
        for c, (piece, bound) in enumerate(zip(self._pieces, self._bounds, strict=True)):
            frame = _encode_term(part, r, piece, bound, part.rank * len(self._pieces) + c)
            for o in part.others:
                part.send_frame(frame, o)
            own.append(None if r.own_term_is_exact else frame)
            await part.breathe()
        part.counters.round_trips += 0.5
        for c, piece in enumerate(self._pieces):
            yield piece, await _in_rank_order(part, self._incoming[c], own[c])
        await part.sent()
