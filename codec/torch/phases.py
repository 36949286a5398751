"""What algorithms are made of: messages with frames, sent to the owners of slices or to all."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from codec import CodecError
from codec.torch.channel import Channel
from codec.torch.messages import Array, IncomingFrame
from codec.torch.partition import Piece
from codec.torch.reduction import Reduction


class FirstError:
    """A collective goes on after an error, without frames, so that no rank waits for what never comes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.error: Exception | None = None

    def __call__(self, step: Callable[..., Any], *args: Any) -> Any:
        """step(*args), or None after an error; but where no connection is left there is nothing to go on with."""
        try:
            return self.at_once(step, *args)
        finally:  # Gloo's thread goes next, if it waits for this core: no connection is locked now, so it need not spin
            os.sched_yield()

    def at_once(self, step: Callable[..., Any], *args: Any) -> Any:
        """The same for what is urgent: others who wait for this core do not get it first."""
        return None if self.error is not None else self._tried(step, *args)

    def frame(self, incoming: IncomingFrame) -> Array | None:
        """The frame of a message, waited for whatever has happened."""
        return self._tried(incoming.frame)

    def _tried(self, step: Callable[..., Any], *args: Any) -> Any:
        try:
            with self._channel.clock.during("decode_s"):  # where a step encodes or waits, that interrupts this phase
                return step(*args)
        except CodecError as e:
            if self._channel.closed:
                raise
            if self.error is None:
                self.error = e
            return None


def encode_message(channel: Channel, nbytes: int, encode: Callable[[Array], int]) -> Array:
    """A message with a frame of so many bytes at most, which encode(room) makes; how many it takes."""
    message = channel.allocate(nbytes)
    with channel.clock.during("encode_s"):
        nbytes = encode(channel.frame_buffer(message))
    return channel.finish_message(message, nbytes)


def copied(channel: Channel, frame: Array) -> Array:
    """The message with a frame that there is already."""

    def copy(room: Array) -> int:
        room[: frame.nbytes] = frame
        return frame.nbytes

    return encode_message(channel, frame.nbytes, copy)


def _encoded(channel: Channel, r: Reduction, piece: Piece, bound: int, number: int) -> Array:
    return encode_message(channel, bound, lambda room: r.encode(piece, room, number))


def _ordered(
    channel: Channel, r: Reduction, attempt: FirstError, incoming: Mapping[int, IncomingFrame], own: Array | None
) -> list[Array | None] | None:
    """Frames of all ranks, in their order; of this one what it sends, or None for its values; no list if one lacks."""
    found: dict[int, Array | None] = {o: attempt.frame(there) for o, there in incoming.items()}
    found[channel.rank] = None if own is None else channel.frame_buffer(own)
    lacks = [rank for rank, frame in found.items() if frame is None]
    if lacks and not (r.own_term_is_exact and lacks == [channel.rank]):
        return None
    return [found[rank] for rank in range(channel.size)]


class ScatterPhase:
    """The first phase of most algorithms: each rank gets the frames of its slice from all."""

    def __init__(self, channel: Channel, r: Reduction, slices: Sequence[Sequence[Piece]], attempt: FirstError) -> None:
        self._channel, self._r, self._slices, self._attempt = channel, r, slices, attempt
        self._bounds = [[r.bound(piece.n) for piece in pieces] for pieces in slices]
        self._incoming: list[dict[int, IncomingFrame]] = []
        self._own: list[Array | None] = []
        # the first chunks of all slices are sent first, and this rank's own are made after those of others
        ranks = [*channel.others, channel.rank]
        self._order = [(c, o) for c in range(max(map(len, slices))) for o in ranks if c < len(slices[o])]
        self._first: Array | None = None

    def begin(self, room: int = 0) -> None:
        """Begin the collective, which takes so much room beside, and send a frame, made before all agreed to begin."""
        sent = [b for bounds in self._bounds for b in bounds]
        mine = self._bounds[self._channel.rank]
        received = mine * (self._channel.size - 1)
        self._channel.begin(Channel.arena_nbytes(sent + received) + room, self._encode_first)
        self._incoming = [{o: self._channel.receive(b, o) for o in self._channel.others} for b in mine]
        self._send_or_keep(self._order[0][1], self._first)
        os.sched_yield()  # what all wait for is the slowest rank's first frame: it may be one that waits for this core

    def send(self) -> None:
        """Send all other slices' chunks."""
        for c, o in self._order[1:]:
            self._send_or_keep(o, self._encoded(c, o, self._attempt))

    def _encode_first(self) -> None:
        self._first = self._encoded(*self._order[0], self._attempt.at_once)

    def _encoded(self, c: int, o: int, attempt: Callable[..., Any]) -> Array | None:
        """The message with chunk c of the slice of rank o."""
        me, size, most = self._channel.rank, self._channel.size, max(map(len, self._slices))
        if o == me and self._r.own_term_is_exact:
            return None
        piece, bound = self._slices[o][c], self._bounds[o][c]
        return attempt(_encoded, self._channel, self._r, piece, bound, (me * size + o) * most + c)

    def _send_or_keep(self, o: int, message: Array | None) -> None:
        if o == self._channel.rank:
            self._own.append(message)
        else:
            self._channel.send(message, o)

    def parts(self, c: int) -> list[Array | None] | None:
        """Chunk c of this rank's slice from all ranks, in their order, as :meth:`Reduction.sum` takes them."""
        own = None if self._r.own_term_is_exact else self._own[c]
        return _ordered(self._channel, self._r, self._attempt, self._incoming[c], own)


class BroadcastPhase:
    """The only phase of others: this rank's frames are sent to all."""

    def __init__(self, channel: Channel, r: Reduction, attempt: FirstError) -> None:
        self._channel, self._r, self._attempt = channel, r, attempt
        self._pieces = [piece for pieces in r.slices(1) for piece in pieces]
        bounds = [r.bound(piece.n) for piece in self._pieces]
        channel.begin(Channel.arena_nbytes(bounds * channel.size))
        self._incoming = [{o: channel.receive(b, o) for o in channel.others} for b in bounds]
        self._own: list[Array | None] = []
        for c, piece in enumerate(self._pieces):
            number = channel.rank * len(self._pieces) + c
            self._own.append(attempt(_encoded, channel, r, piece, bounds[c], number))
            for o in channel.others:
                channel.send(self._own[c], o)

    def parts(self) -> Iterator[tuple[Piece, list[Array | None] | None]]:
        """The pieces, and what there is of all ranks."""
        for c, piece in enumerate(self._pieces):
            own = None if self._r.own_term_is_exact else self._own[c]
            yield piece, _ordered(self._channel, self._r, self._attempt, self._incoming[c], own)
        self._channel.wait_for_sends()
