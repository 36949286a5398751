"""Messages that one side of an edge has sent and received: their numbers, order and counts."""

import os
from dataclasses import replace

from codec.errors import StateError
from codec.stateful.activation.change import ActivationStats
from codec.stateful.activation.message import Head, Kind

_MAX_RETIRED = 1 << 12  # sessions of a peer that are remembered, so that their messages are refused


class Traffic:
    """Numbers of sent messages, order of received ones, and counts of both.

    Numbers of a peer's messages ascend, and may have gaps: messages that were lost or not sent. A peer that is
    restarted has a new session.

    Parameters
    ----------
    edge : int
        Number of the edge.
    entries : str
        Dtype of the store's entries.
    """

    def __init__(self, edge: int, entries: str) -> None:
        self.edge, self.entries = edge, entries
        self.counts = ActivationStats()
        self.restart()

    def restart(self) -> None:
        """Begin a new session, and forget the peer's."""
        self._session, self._sent = int.from_bytes(os.urandom(8), "little"), 0
        self._peer: int | None = None
        self._last = 0  # number of the peer's last message
        self._retired: dict[int, None] = {}

    def next_head(self, dtype: str) -> Head:
        """Return the head of the next message, whose kind the caller replaces."""
        return Head(Kind.RAW, dtype, self.entries, self.edge, self._session, self._sent + 1)

    def sent(self, nbytes: int, raw: int = 0, deltas: int = 0) -> None:
        """Record that the next message was made, with so many samples sent raw and as deltas."""
        self._sent += 1
        self._count(nbytes, raw, deltas)

    def check(self, head: Head) -> None:
        """Raise StateError for a message of another edge or number of entries, and for a repeated or reordered one."""
        if (head.edge, head.entries) != (self.edge, self.entries):
            raise StateError(
                f"this side has edge {self.edge} and entries of {self.entries}, the message edge {head.edge} and "
                f"entries of {head.entries}"
            )
        if head.session == self._peer and head.number <= self._last:
            last = f"the last one was number {self._last}"
            raise StateError(f"message {head.number} of edge {head.edge} is repeated or late: {last}")
        if head.session in self._retired:
            raise StateError(f"message {head.number} of edge {head.edge} is late: its sender has been restarted")

    def received(self, head: Head, nbytes: int, raw: int = 0, deltas: int = 0) -> None:
        """Record a message that was decoded."""
        if self._peer is not None and head.session != self._peer:
            self._retired[self._peer] = None
            if len(self._retired) > _MAX_RETIRED:
                del self._retired[next(iter(self._retired))]
        self._peer, self._last = head.session, head.number
        self._count(nbytes, raw, deltas)

    def _count(self, nbytes: int, raw: int, deltas: int) -> None:
        c = self.counts
        self.counts = replace(
            c,
            messages=c.messages + 1,
            nbytes=c.nbytes + nbytes,
            raw_samples=c.raw_samples + raw,
            delta_samples=c.delta_samples + deltas,
        )
