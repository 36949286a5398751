"""Match the messages of collectives that arrive at a rank with the messages that the rank has requested."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from codec import FrameError, Status
from codec.errors import ChecksumError
from codec.torch.network.version import CHUNK_NBYTES, Checksum, chunks_of
from codec.torch.network.waits import Wait

Array = np.ndarray[Any, Any]

MOST_EARLY_NBYTES = 1 << 28  # maximum bytes of early messages, not yet requested, that are read from all ranks
EARLY_SHARES = 1 << 16, 1 << 26  # minimum and maximum of each rank's share of MOST_EARLY_NBYTES, in bytes
MOST_AHEAD_NBYTES = 1 << 32  # maximum bytes of early messages from a rank while this rank waits for another one from it
MOST_INBOXES = 1 << 16  # maximum number of collectives that one other rank, but not this one, has begun

_EARLY_COST = 1 << 10  # estimated bytes of memory of an early message besides its body
_READ_NBYTES = 1 << 18  # maximum bytes that are read before they are added to the checksum, still in the cache
_SCRATCH = memoryview(bytearray(1 << 16))  # buffer into which the bytes of dropped messages are read


class Refused(Exception):
    """Raised if another rank has begun a part with another signature, or has aborted the collective.

    Parameters
    ----------
    source : int
        The other rank.
    body : bytes or None
        Body of the rank's abort; None: the signature differs.
    """

    def __init__(self, source: int, body: bytes | None) -> None:
        super().__init__(source, body)
        self.source, self.body = source, body


class Receive(Wait):
    """Request for a message, which completes when the message has arrived.

    Parameters
    ----------
    source : int
        Sending rank.
    part, index, signature : int
        Part of the collective, number of the message in the part, and signature of the part on this rank.
    most : int
        Maximum size of the body in bytes.
    room : ndarray of uint8, optional
        Buffer for the body.
    exact : bool
        True: the body must have exactly `most` bytes, and is stored in `room` if given. False: the body may be smaller,
        and :attr:`message` may be outside of `room`.
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
        self.damaged = False  # True: the message does not have the checksum that its sender has computed
        self.last_message: Callable[[], float] = lambda: 0.0  # returns the arrival time of the rank's last message

    @property
    def progress(self) -> float:
        """Time at which the last message from the rank arrived."""
        return self.last_message()

    def mismatch(self, arrival: "Arrival") -> Exception | None:
        """Return an error if a message does not match this request, None if it matches."""
        if arrival.signature != self.signature:
            return Refused(arrival.source, None)
        if arrival.nbytes > self.most:
            return FrameError(
                f"rank {arrival.source} sends a message of {arrival.nbytes} bytes; the maximum is {self.most}"
            )
        if self.exact and arrival.nbytes != self.most:
            return FrameError(
                f"rank {arrival.source} sends a message of {arrival.nbytes} bytes, but {self.most} are expected"
            )
        return None

    def take(self, arrival: "Arrival") -> None:
        """Complete the request with a message that has arrived completely."""
        error = self.mismatch(arrival)
        if error is None and arrival.damaged:
            self.damaged = True
            text = f"a message of rank {self.source} was damaged: its checksum does not match its bytes"
            error = ChecksumError(text, Status.CHECKSUM)
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
    nbytes, checksum : int
        Size of the body in bytes, and its checksum.
    abort : bool
        True: the message says that the rank has aborted the collective.
    """

    def __init__(
        self,
        source: int,
        number: int,
        part: int,
        index: int,
        signature: int,
        nbytes: int,
        checksum: int,
        *,
        abort: bool,
    ) -> None:
        self.source, self.number, self.part, self.index = source, number, part, index
        self.signature, self.nbytes, self.checksum, self.abort = signature, nbytes, checksum, abort
        self.body: Array = np.empty(0, np.uint8)
        self.receive: Receive | None = None  # request for the message; None: not yet requested
        self.dropped = False  # True: discard the rest of the body
        self._filled = 0  # bytes of the body that have arrived
        self._added = 0  # chunks of the body that are in its checksum
        self._checksum: Checksum | None = None
        self._lock = threading.Lock()  # held while bytes are read, so that drop() can wait for the read

    @property
    def place(self) -> tuple[int, int, int]:
        """Sending rank, part, and number of the message in the part."""
        return self.source, self.part, self.index

    @property
    def cost(self) -> int:
        """Estimated bytes of memory that the message needs until it is requested."""
        return _EARLY_COST + self.nbytes

    @property
    def complete(self) -> bool:
        """True if the whole body has arrived."""
        return self._filled == self.nbytes

    @property
    def damaged(self) -> bool:
        """True if the body, which has arrived completely, does not have the checksum that its sender has computed."""
        return self.checksum != (0 if self._checksum is None else self._checksum.value())

    def allocate(self, room: Array | None = None) -> None:
        """Set the buffer for the body: the beginning of `room`, or new memory."""
        self.body = np.empty(self.nbytes, np.uint8) if room is None else room[: self.nbytes]

    def drop(self) -> None:
        """Discard the rest of the body. After this returns, no byte is written to the body's buffer."""
        with self._lock:
            self.dropped = True

    def hand_over(self, receive: Receive) -> None:
        """Complete a request with this message, which has arrived completely, unless it was dropped."""
        with self._lock:
            if not self.dropped:
                receive.take(self)

    def fill(self, read: Callable[[memoryview], int]) -> int:
        """Read bytes of the body with read(memory), which returns their number; return that number."""
        with self._lock:
            left = self.nbytes - self._filled
            place = (
                _SCRATCH[: min(left, _SCRATCH.nbytes)]
                if self.dropped
                else self.body.data[self._filled : self._filled + _READ_NBYTES]
            )
            n = read(place)
            filled = self._filled + n
            if not self.dropped and n:
                self._checksum = self._checksum or Checksum(self.body)
                chunks = chunks_of(filled) if filled == self.nbytes else filled // CHUNK_NBYTES
                self._checksum.add(chunks - self._added)
                self._added = chunks
            self._filled = filled  # last, since another thread reads `complete`, then `damaged`
            return n


class Inbox:
    """Messages of one collective.

    Parameters
    ----------
    beginner : int or None
        Rank whose message was the first of a collective that this rank has not begun; None: this rank has begun it.
    """

    def __init__(self, beginner: int | None = None) -> None:
        self.beginner = beginner
        # Requests whose message has not begun to arrive, by rank and place
        self.posted: dict[int, dict[tuple[int, int, int], Receive]] = {}
        self.arrived: dict[tuple[int, int, int], Arrival] = {}  # early messages: not requested yet
        self.arriving: set[Arrival] = set()  # messages of which a part has arrived
        self.aborts: dict[int, bytes] = {}  # bodies of abort messages, by rank
        self.explained: dict[int, Wait] = {}  # waits for abort messages, by rank

    def refusal(self, source: int | None) -> Refused | None:
        """Return an error if a rank has aborted the collective, otherwise None."""
        return Refused(source, self.aborts[source]) if source in self.aborts else None

    def awaits(self, source: int) -> bool:
        """Return True if this rank waits for a message or an abort that has not begun to arrive from a rank."""
        return source in self.explained or bool(self.posted.get(source))

    def request(self, receive: Receive) -> None:
        """Store a request whose message has not begun to arrive."""
        self.posted.setdefault(receive.place[0], {})[receive.place] = receive

    def take_waiting(self, source: int | None = None) -> list[Wait]:
        """Remove and return the requests for messages from one rank, or from all ranks."""
        found: list[Wait] = [a.receive for a in self.arriving if a.receive is not None and source in (None, a.source)]
        for rank in [*self.posted] if source is None else [source]:
            found += self.posted.pop(rank, {}).values()
        return found

    def take_explained(self, source: int | None = None) -> list[Wait]:
        """Remove and return the waits for abort messages from one rank, or from all ranks."""
        found = [*self.explained] if source is None else [source]
        return [self.explained.pop(o) for o in found if o in self.explained]


class Inboxes(dict[int, Inbox]):
    """Inboxes by number of the collective, for collectives that this rank or another rank has begun.

    Parameters
    ----------
    ranks : iterable of int
        All other ranks.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        super().__init__()
        self.early = dict.fromkeys(ranks, 0)  # bytes of memory of early messages, by rank
        self.open: dict[int, Inbox] = {}  # inboxes of collectives in flight, which this rank has begun
        self._begun = dict.fromkeys(self.early, 0)  # inboxes of collectives that this rank has not begun, by beginner
        self._next = 0  # collectives with lower numbers have begun on this rank

    def begin(self, number: int) -> Inbox:
        """Begin a collective, and return its inbox."""
        self._next = max(self._next, number + 1)
        inbox = self.open[number] = self.setdefault(number, Inbox())
        self._release(inbox)
        return inbox

    def _release(self, inbox: Inbox) -> None:
        """Count the inbox no longer as one of its beginner."""
        if inbox.beginner is not None:
            self._begun[inbox.beginner] -= 1
            inbox.beginner = None

    def end(self, number: int) -> None:
        """End a collective, and drop its messages."""
        inbox = self.pop(number, None)
        self.open.pop(number, None)
        if inbox is None:
            return
        self._release(inbox)
        for arrival in inbox.arriving:
            arrival.drop()
        for arrival in inbox.arrived.values():
            self.early[arrival.source] -= arrival.cost
        for source, body in inbox.aborts.items():
            self.early[source] -= _EARLY_COST + len(body)

    def find(self, number: int, source: int) -> Inbox | None:
        """Return the inbox of a collective for a message of rank `source`; None if the collective has ended here.

        Raises
        ------
        OSError
            This rank has begun too many collectives that only other ranks know.
        """
        if number not in self and number >= self._next:
            if self._begun[source] >= MOST_INBOXES:
                raise OSError(f"it has begun {MOST_INBOXES} collectives that this rank has not begun")
            self._begun[source] += 1
            self[number] = Inbox(source)
        return self.get(number)

    def admit(self, arrival: Arrival) -> tuple[bool, Receive | None]:
        """Choose a buffer for a message whose header has arrived.

        Returns
        -------
        admitted : bool
            False: the message must not be read yet.
        unmatched : Receive or None
            Request for the message that :meth:`Receive.mismatch` refuses; the message is dropped.

        Raises
        ------
        OSError
            The sender has exceeded a limit.
        """
        source, place, unmatched = arrival.source, arrival.place, None
        inbox = self.find(arrival.number, source)
        if inbox is None:
            arrival.drop()
            return True, None
        if arrival.abort:
            if source in inbox.aborts:
                arrival.drop()
            elif inbox.beginner is not None and self.must_wait(arrival):
                return False, None
            else:
                arrival.allocate()
        elif (receive := inbox.posted.get(source, {}).pop(place, None)) is not None:
            if receive.mismatch(arrival) is None:
                arrival.receive = receive
                arrival.allocate(receive.room)
            else:
                unmatched = receive
                arrival.drop()
        elif place in inbox.arrived:
            arrival.drop()
        elif self.must_wait(arrival):
            return False, None
        else:
            arrival.allocate()
            self.keep(inbox, arrival)
        inbox.arriving.add(arrival)
        return True, unmatched

    def keep(self, inbox: Inbox, arrival: Arrival) -> None:
        """Store an early message, or an abort message that has arrived completely."""
        self.early[arrival.source] += arrival.cost
        if arrival.abort:
            inbox.aborts[arrival.source] = arrival.body.tobytes()
        else:
            inbox.arrived[arrival.place] = arrival

    def take(self, inbox: Inbox, receive: Receive) -> Arrival | None:
        """Remove and return the early message that `receive` requests; None if it has not arrived."""
        arrival = inbox.arrived.pop(receive.place, None)
        if arrival is not None:
            self.early[arrival.source] -= arrival.cost
        return arrival

    def must_wait(self, arrival: Arrival) -> bool:
        """Return True if an early message must not be read yet, because its sender's share of memory is full.

        Equal shares bound the memory of all early messages, and a rank far ahead does not use the shares of others.

        If this rank waits for a message or abort from the same sender, the early message is read nevertheless, since
        the awaited one may follow it.

        Raises
        ------
        OSError
            The sender has sent more than MOST_AHEAD_NBYTES of early messages.
        """
        early = self.early[arrival.source] + arrival.cost
        least, most = EARLY_SHARES
        if early <= max(least, min(MOST_EARLY_NBYTES // len(self.early), most)):
            return False
        if not any(inbox.awaits(arrival.source) for inbox in self.open.values()):
            return True
        if early > MOST_AHEAD_NBYTES:
            raise OSError(f"it has sent {early} bytes of messages that this rank has not requested")
        return False
