"""Messages of one collective that arrive at a rank, and those that the rank has asked for."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from codec import FrameError
from codec.torch.network.waits import Wait

Array = np.ndarray[Any, Any]

MOST_EARLY_NBYTES = 1 << 26  # messages of a rank that are read before this rank asks for them
MOST_AHEAD_NBYTES = 1 << 32  # limit while this rank waits for another message of the rank
MOST_INBOXES = 1 << 16  # collectives in flight, and those that other ranks have begun

_EARLY_COST = 1 << 10  # bytes of memory that an early message takes beside its body
_SCRATCH = memoryview(bytearray(1 << 16))  # gets the bytes of messages that nobody wants


class Refused(Exception):
    """Another rank has begun a part with another signature than this one, or has given the collective up.

    Parameters
    ----------
    source : int
        Rank that has sent it.
    body : bytes or None
        Body of the rank's abort; None: the signature differs.
    """

    def __init__(self, source: int, body: bytes | None) -> None:
        super().__init__(source, body)
        self.source, self.body = source, body


class Receive(Wait):
    """Message that this rank has asked for.

    Parameters
    ----------
    source : int
        Sending rank.
    part, index, signature : int
        Part of the collective, number of the message in it, and signature of the part on this rank.
    most : int
        Most bytes of the body.
    room : ndarray of uint8, optional
        Memory for the body.
    exact : bool
        The body must have `most` bytes, and must be in `room` if there is one. Else :attr:`message` may be elsewhere.
    """

    def __init__(
        self,
        source: int,
        part: int,
        index: int,
        signature: int,
        most: int,
        room: Array | None = None,
        *,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.source, self.part, self.index, self.signature = source, part, index, signature
        self.place = source, part, index
        self.most, self.room, self.exact = most, room, exact
        self.message: Array = np.empty(0, np.uint8)
        self.last_message: Callable[[], float] = lambda: 0.0  # returns the time of the rank's last message

    @property
    def progress(self) -> float:
        """Time at which the rank has last sent a message."""
        return self.last_message()

    def mismatch(self, arrival: "Arrival") -> Exception | None:
        """Return the error of a message that differs from the requested one; None if it matches."""
        if arrival.signature != self.signature:
            return Refused(arrival.source, None)
        if arrival.nbytes > self.most:
            return FrameError(
                f"rank {arrival.source} sends a message of {arrival.nbytes} bytes, but at most {self.most} are possible"
            )
        if self.exact and arrival.nbytes != self.most:
            return FrameError(
                f"rank {arrival.source} sends a message of {arrival.nbytes} bytes; {self.most} were agreed upon"
            )
        return None

    def take(self, arrival: "Arrival") -> None:
        """End the wait with a message that has arrived as a whole."""
        error = self.mismatch(arrival)
        if error is None:
            self.message = arrival.body
            if self.exact and self.room is not None and arrival.body is not self.room:
                self.room[: arrival.nbytes] = arrival.body
                self.message = self.room
        self.complete(error)


class Arrival:
    """Message that arrives from another rank.

    Parameters
    ----------
    source : int
        Sending rank.
    number, part, index, signature : int
        Collective, part, number of the message in the part, and signature.
    nbytes : int
        Bytes of the body.
    abort : bool
        The rank gives the collective up.
    """

    def __init__(
        self, source: int, number: int, part: int, index: int, signature: int, nbytes: int, *, abort: bool
    ) -> None:
        self.source, self.number, self.part, self.index = source, number, part, index
        self.signature, self.nbytes, self.abort = signature, nbytes, abort
        self.body: Array = np.empty(0, np.uint8)
        self.receive: Receive | None = None  # the rank has asked for the message
        self.dropped = False
        self._filled = 0
        self._lock = threading.Lock()  # held while bytes are read, so that drop() can wait for that

    @property
    def place(self) -> tuple[int, int, int]:
        """Sending rank, part and number."""
        return self.source, self.part, self.index

    @property
    def cost(self) -> int:
        """Bytes of memory that the message takes while nobody has asked for it."""
        return _EARLY_COST + self.nbytes

    @property
    def complete(self) -> bool:
        """True if the whole body has arrived."""
        return self._filled == self.nbytes

    def allocate(self, room: Array | None = None) -> None:
        """Choose the memory for the body: the begin of `room`, or new memory."""
        self.body = np.empty(self.nbytes, np.uint8) if room is None else room[: self.nbytes]

    def drop(self) -> None:
        """Have later bytes of the body go nowhere; when this returns, none is written any more."""
        with self._lock:
            self.dropped = True

    def hand_over(self, receive: Receive) -> None:
        """End the wait for the message, which has arrived as a whole, unless it was dropped."""
        with self._lock:
            if not self.dropped:
                receive.take(self)

    def fill(self, read: Callable[[memoryview], int]) -> int:
        """Read bytes of the body by read(memory), which returns their number; return it."""
        with self._lock:
            left = self.nbytes - self._filled
            place = _SCRATCH[: min(left, _SCRATCH.nbytes)] if self.dropped else self.body.data[self._filled :]
            n = read(place)
            self._filled += n
            return n


class Inbox:
    """Messages of one collective."""

    def __init__(self) -> None:
        self.posted: dict[tuple[int, int, int], Receive] = {}  # asked for, and not arriving
        self.arrived: dict[tuple[int, int, int], Arrival] = {}  # arrived or arriving, and not asked for
        self.arriving: set[Arrival] = set()
        self.aborts: dict[int, bytes] = {}  # bodies of aborts, by rank
        self.explained: dict[int, Wait] = {}  # waits for aborts, by rank

    def refusal(self, source: int | None) -> Refused | None:
        """Return the error for a rank that has given the collective up; None if it has not."""
        return Refused(source, self.aborts[source]) if source in self.aborts else None

    def take_waiting(self, source: int | None = None) -> list[Wait]:
        """Return the waits for data of one rank or of all, and forget them."""
        arriving = [a.receive for a in self.arriving if a.receive is not None]
        found: list[Wait] = [r for r in [*self.posted.values(), *arriving] if source in (None, r.source)]
        self.posted = {place: r for place, r in self.posted.items() if source not in (None, r.source)}
        return found

    def take_explained(self, source: int | None = None) -> list[Wait]:
        """Return the waits for aborts of one rank or of all, and forget them."""
        found = [o for o in self.explained if source in (None, o)]
        return [self.explained.pop(o) for o in found]


class Inboxes(dict[int, Inbox]):
    """Inboxes of collectives in flight and of those that other ranks have begun, by number.

    Parameters
    ----------
    ranks : iterable of int
        Other ranks.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        super().__init__()
        self.early = dict.fromkeys(ranks, 0)  # bytes of memory that early messages of each rank take
        self._next = 0  # numbers of collectives below this have begun here

    def begin(self, number: int) -> Inbox:
        """Begin a collective, and return its inbox."""
        self._next = max(self._next, number + 1)
        return self.setdefault(number, Inbox())

    def end(self, number: int) -> None:
        """End a collective: drop its messages."""
        inbox = self.pop(number, None)
        if inbox is None:
            return
        for arrival in inbox.arriving:
            arrival.drop()
        for arrival in inbox.arrived.values():
            self.early[arrival.source] -= arrival.cost
        for source, body in inbox.aborts.items():
            self.early[source] -= _EARLY_COST + len(body)

    def find(self, number: int) -> Inbox | None:
        """Return the inbox for a message of a collective, or None if the collective has ended here.

        Raises
        ------
        OSError
            There are too many inboxes.
        """
        if number not in self and number >= self._next:
            if len(self) >= MOST_INBOXES:
                raise OSError(f"it has begun {MOST_INBOXES} collectives that this rank has not")
            self[number] = Inbox()
        return self.get(number)

    def keep(self, inbox: Inbox, arrival: Arrival) -> None:
        """Keep a message that nobody has asked for, or an abort that has arrived as a whole."""
        self.early[arrival.source] += arrival.cost
        if arrival.abort:
            inbox.aborts[arrival.source] = arrival.body.tobytes()
        else:
            inbox.arrived[arrival.place] = arrival

    def take(self, inbox: Inbox, receive: Receive) -> Arrival | None:
        """Return the kept message that `receive` asks for, and keep it no more; None if there is none."""
        arrival = inbox.arrived.pop(receive.place, None)
        if arrival is not None:
            self.early[arrival.source] -= arrival.cost
        return arrival

    def must_wait(self, arrival: Arrival) -> bool:
        """Return True if a message that nobody has asked for must not be read yet.

        While this rank waits for its sender, the message is read: the awaited one may come behind.

        Raises
        ------
        OSError
            The sender has sent too many such messages.
        """
        early = self.early[arrival.source] + arrival.cost
        if early <= MOST_EARLY_NBYTES:
            return False
        if not any(r.source == arrival.source for inbox in self.values() for r in inbox.posted.values()):
            return True
        if early > MOST_AHEAD_NBYTES:
            raise OSError(f"it has sent {early} bytes of messages that this rank has not asked for")
        return False
