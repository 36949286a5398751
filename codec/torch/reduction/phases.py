"""Phases of algorithms: messages with frames, sent to the owners of slices or to all ranks."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from codec import CodecError
from codec.torch.reduction.host import Reduction
from codec.torch.reduction.partition import Piece
from codec.torch.transport.channel import Channel
from codec.torch.transport.messages import Array, IncomingFrame


class FirstError:
    """Runs the steps of a collective until one of them fails, and keeps the error.

    The collective goes on after an error, and sends messages without frames, so that no rank waits for a message that
    never comes.

    Parameters
    ----------
    channel : Channel
        Channel of the collective.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.error: Exception | None = None

    def __call__(self, step: Callable[..., Any], *args: Any) -> Any:
        """Return step(*args), or None after an error of this or an earlier step.

        Raises
        ------
        CodecError
            The channel is closed, so that the collective cannot go on.
        """
        try:
            return self.at_once(step, *args)
        finally:  # no connection is locked now, so Gloo's thread need not spin if it gets this core
            os.sched_yield()

    def at_once(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run an urgent step: as a call does, but without yielding the core to other threads."""
        return None if self.error is not None else self._try(step, *args)

    def frame(self, incoming: IncomingFrame) -> Array | None:
        """Wait for a frame, also after an error; return None if there is none."""
        return self._try(incoming.frame)

    def _try(self, step: Callable[..., Any], *args: Any) -> Any:
        try:
            with self._channel.clock.during("decode_s"):  # a step that encodes or waits interrupts this phase
                return step(*args)
        except CodecError as e:
            if self._channel.closed:
                raise
            if self.error is None:
                self.error = e
            return None


def encode_message(channel: Channel, bound: int, encode: Callable[[Array], int]) -> Array:
    """Return a message with a frame.

    Parameters
    ----------
    channel : Channel
        Gives the memory.
    bound : int
        Largest number of bytes of the frame.
    encode : callable
        Writes the frame into an array, and returns its number of bytes.
    """
    message = channel.arena.allocate(bound)
    with channel.clock.during("encode_s"):
        nbytes = encode(channel.arena.frame_buffer(message))
    return channel.arena.finish_message(message, nbytes)


def copy_to_message(channel: Channel, frame: Array) -> Array:
    """Return a message with a copy of a frame."""

    def copy(buffer: Array) -> int:
        buffer[: frame.nbytes] = frame
        return frame.nbytes

    return encode_message(channel, frame.nbytes, copy)


def _encode_term(channel: Channel, r: Reduction, piece: Piece, bound: int, number: int) -> Array:
    return encode_message(channel, bound, lambda buffer: r.encode(piece, buffer, number))


def _in_rank_order(
    channel: Channel, r: Reduction, first_error: FirstError, incoming: Mapping[int, IncomingFrame], own: Array | None
) -> list[Array | None] | None:
    """Return the frames of all ranks in their order, or None if one is missing.

    This rank's entry is the frame of the message `own`; None stands for its own values.
    """
    found: dict[int, Array | None] = {o: first_error.frame(each) for o, each in incoming.items()}
    found[channel.rank] = None if own is None else channel.arena.frame_buffer(own)
    missing = [rank for rank, frame in found.items() if frame is None]
    if missing and not (r.own_term_is_exact and missing == [channel.rank]):
        return None
    return [found[rank] for rank in range(channel.size)]


class ScatterPhase:
    """First phase of most algorithms: each rank gets the terms of its slice from all ranks.

    Parameters
    ----------
    channel : Channel
        Channel of the collective.
    r : Reduction
        Values of this rank.
    slices : sequence of sequences of Piece
        Pieces of each rank's slice.
    first_error : FirstError
        Runs the steps.
    """

    def __init__(
        self, channel: Channel, r: Reduction, slices: Sequence[Sequence[Piece]], first_error: FirstError
    ) -> None:
        self._channel, self._r, self._slices, self._first_error = channel, r, slices, first_error
        self._bounds = [[r.bound(piece.n) for piece in pieces] for pieces in slices]
        self._incoming: list[dict[int, IncomingFrame]] = []
        self._own: list[Array | None] = []
        # first chunks of all slices come first, and those of other ranks before this rank's own
        ranks = [*channel.others, channel.rank]
        self._order = [(c, o) for c in range(max(map(len, slices))) for o in ranks if c < len(slices[o])]
        self._first: Array | None = None

    def begin(self, nbytes: int = 0) -> None:
        """Begin the collective and send one frame, which is encoded while the requests of other ranks arrive.

        Parameters
        ----------
        nbytes : int
            Bytes of the arena that the algorithm needs besides.
        """
        sent = [b for bounds in self._bounds for b in bounds]
        mine = self._bounds[self._channel.rank]
        received = mine * (self._channel.size - 1)
        nbytes += self._channel.arena.nbytes_of(sent + received)
        self._channel.begin(nbytes, self._encode_first, pinned=self._r.on_device)
        self._incoming = [{o: self._channel.frames.receive(b, o) for o in self._channel.others} for b in mine]
        self._send_or_keep(self._order[0][1], self._first)
        os.sched_yield()  # all ranks wait for the slowest rank's first frame; that rank may wait for this core

    def send(self) -> None:
        """Encode and send all other terms."""
        for c, o in self._order[1:]:
            self._send_or_keep(o, self._encode(c, o, self._first_error))

    def _encode_first(self) -> None:
        self._first = self._encode(*self._order[0], self._first_error.at_once)

    def _encode(self, c: int, o: int, run: Callable[..., Any]) -> Array | None:
        """Return the message with chunk `c` of the slice of rank `o`; None for exact terms of this rank itself."""
        me, size, most = self._channel.rank, self._channel.size, max(map(len, self._slices))
        if o == me and self._r.own_term_is_exact:
            return None
        piece, bound = self._slices[o][c], self._bounds[o][c]
        return run(_encode_term, self._channel, self._r, piece, bound, (me * size + o) * most + c)

    def _send_or_keep(self, o: int, message: Array | None) -> None:
        if o == self._channel.rank:
            self._own.append(message)
        else:
            self._channel.frames.send(message, o)

    def terms(self, c: int) -> list[Array | None] | None:
        """Return chunk `c` of this rank's slice from all ranks, in their order, as :meth:`Reduction.sum` takes them."""
        own = None if self._r.own_term_is_exact else self._own[c]
        return _in_rank_order(self._channel, self._r, self._first_error, self._incoming[c], own)


class BroadcastPhase:
    """Only phase of other algorithms: each rank sends its frames to all ranks.

    Parameters
    ----------
    channel : Channel
        Channel of the collective.
    r : Reduction
        Values of this rank.
    first_error : FirstError
        Runs the steps.
    """

    def __init__(self, channel: Channel, r: Reduction, first_error: FirstError) -> None:
        self._channel, self._r, self._first_error = channel, r, first_error
        self._pieces = [piece for pieces in r.slices(1) for piece in pieces]
        bounds = [r.bound(piece.n) for piece in self._pieces]
        channel.begin(channel.arena.nbytes_of(bounds * channel.size), pinned=r.on_device)
        self._incoming = [{o: channel.frames.receive(b, o) for o in channel.others} for b in bounds]
        self._own: list[Array | None] = []
        for c, piece in enumerate(self._pieces):
            number = channel.rank * len(self._pieces) + c
            self._own.append(first_error(_encode_term, channel, r, piece, bounds[c], number))
            for o in channel.others:
                channel.frames.send(self._own[c], o)

    def terms(self) -> Iterator[tuple[Piece, list[Array | None] | None]]:
        """Yield each piece, and its frames from all ranks in their order, or None if one is missing."""
        for c, piece in enumerate(self._pieces):
            own = None if self._r.own_term_is_exact else self._own[c]
            yield piece, _in_rank_order(self._channel, self._r, self._first_error, self._incoming[c], own)
        self._channel.frames.wait_for_sends()
