"""Messages of a few integers between all ranks, for requests, verdicts and sizes (docs/protocol.md, section 3)."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np

from codec import PeerError
from codec.torch.transport.connections import Connections
from codec.torch.transport.messages import NUMBERS_TAG, NUMBERS_WORDS, Array, numbers_message

_PREFETCHED = 2  # receives of numbers posted for each rank before they are needed: a request and a verdict


class Numbers:
    """Integers that ranks send each other.

    Every method raises PeerError, and closes all connections, if a connection is lost, a rank does not answer in time,
    or a rank sends another number of integers: it is at another point of the program. So does every method that sends
    after :meth:`Connections.cancel`.

    Parameters
    ----------
    connections : Connections
        Carry the messages.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._sends: list[tuple[Any, int, Array]] = []  # with the message, which must live until it is sent
        self._receives: dict[int, deque[tuple[Array, Any]]] = {o: deque() for o in connections.others}
        connections.attach(self)

    def check_same(self, what: str, numbers: Sequence[int]) -> None:
        """Raise PeerError unless all ranks pass the same numbers; `what` describes them."""
        for rank, theirs in enumerate(self.gather(numbers)):
            if theirs != list(numbers):
                raise PeerError(f"rank {rank} has another {what} than rank {self._connections.rank}")

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank.

        Each rank sends a message to each other one. Gloo's own all-gather passes messages on from rank to rank, so that
        all ranks wait for the sum of all delays.

        Parameters
        ----------
        numbers : sequence of int
            At most 7 integers of 64 bits, as many on all ranks.
        """
        self.send_to_all(numbers)
        return self.receive_from_all(numbers)

    def scatter(self, numbers: Sequence[int]) -> list[int]:
        """Send number i of this rank to rank i; return the number that each rank has sent to this one."""
        me, others = self._connections.rank, self._connections.others
        self.send({o: [numbers[o]] for o in others})
        found = {me: [numbers[me]]} | self.receive(others, 1)
        return [found[rank][0] for rank in range(self._connections.size)]

    def send_to_all(self, numbers: Sequence[int]) -> None:
        """Begin to send numbers to all other ranks; :meth:`receive_from_all` waits until they are sent."""
        self.send(dict.fromkeys(self._connections.others, numbers))

    def receive_from_all(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank, `mine` of this rank; all have as many."""
        found = {self._connections.rank: list(mine)} | self.receive(self._connections.others, len(mine))
        return [found[rank] for rank in range(self._connections.size)]

    def send(self, numbers: Mapping[int, Sequence[int]]) -> None:
        """Begin to send numbers to some ranks; :meth:`receive` waits until they are sent."""
        self._connections.check_open()
        messages = {o: numbers_message(each) for o, each in numbers.items()}
        self._sends = [
            (self._connections.post("send", message, o, NUMBERS_TAG), o, message) for o, message in messages.items()
        ]

    def receive(self, sources: Sequence[int], n: int, timeouts: int = 1) -> dict[int, list[int]]:
        """Receive `n` numbers of each of some ranks, and wait until this rank's own are sent.

        Parameters
        ----------
        sources : sequence of int
            Ranks that send.
        n : int
            Numbers in each message.
        timeouts : int
            Longest wait for all messages together, in timeouts of the connections.
        """
        found: dict[int, list[int]] = {}
        end = time.monotonic() + timeouts * self._connections.timeout.total_seconds()
        for o in sources:
            self._post_receives(o, 1)
            buffer, work = self._receives[o].popleft()
            self._wait_until(end, work, o)
            found[o] = buffer.tolist()
        for work, o, _ in self._sends:
            self._wait_until(end, work, o)
        self._sends.clear()
        for o, theirs in found.items():
            if theirs[0] != n:
                self._connections.close()
                raise PeerError(
                    f"rank {o} is at another point of the program than rank {self._connections.rank}: all ranks must "
                    "begin the same collectives in the same order; make a new group"
                )
        return {o: theirs[1 : 1 + n] for o, theirs in found.items()}

    def prefetch(self) -> None:
        """Post the receives of the next collective, which reports a rank that is lost here."""
        with suppress(PeerError):
            for o in self._connections.others:
                if not self._connections.closed:
                    self._post_receives(o, _PREFETCHED)

    def release(self) -> None:
        """Forget the messages in flight."""
        self._sends.clear()
        for receives in self._receives.values():
            receives.clear()

    def _wait_until(self, end: float, work: Any, rank: int) -> None:
        left = max(0.001, end - time.monotonic())  # torch takes 0 for its own timeout
        self._connections.wait(work, rank, timedelta(seconds=left))

    def _post_receives(self, source: int, count: int) -> None:
        """Post receives of numbers of a rank, until `count` of them are in flight.

        A message whose receive is not posted is only announced, and sent when the receiver has asked for it: one more
        round trip, which ends when Gloo's thread of the sender gets a core.
        """
        receives = self._receives[source]
        while len(receives) < count:
            buffer = np.zeros(NUMBERS_WORDS, np.int64)
            receives.append((buffer, self._connections.post("recv", buffer.view(np.uint8), source, NUMBERS_TAG)))
