"""Number sent messages, check the order of received messages, and count both, for one side of a pipeline edge."""

import os
from dataclasses import replace

from codec.errors import StateError
from codec.stateful.activation.change import ActivationStats
from codec.stateful.activation.message import ContentKind, MessageHead

_MAX_RETIRED = 1 << 12  # maximum number of a peer's old sessions that are stored, to refuse their late messages


class ActivationTraffic:
    """Numbering of sent messages, order check of received messages, and statistics of both.

    The numbers of a peer's messages ascend; a gap means that messages were lost or not sent. A peer that is restarted
    begins a new session.

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
        """Begin a new session, and forget all sessions of the peer."""
        self._session, self._sent = int.from_bytes(os.urandom(8), "little"), 0
        self._peer: int | None = None
        self._last = 0  # number of the last message received from the peer
        self._retired: dict[int, None] = {}

    def next_head(self, dtype: str) -> MessageHead:
        """Return the head of the next message; the caller must replace `kind`."""
        return MessageHead(ContentKind.RAW, dtype, self.entries, self.edge, self._session, self._sent + 1)

    def sent(self, nbytes: int, raw: int = 0, deltas: int = 0) -> None:
        """Count a sent message of `nbytes` bytes, with `raw` samples sent raw and `deltas` samples sent as deltas."""
        self._sent += 1
        self._count(nbytes, raw, deltas)

    def check(self, head: MessageHead) -> None:
        """Raise StateError if a message has another edge or dtype of entries, is repeated, or is out of order."""
        if (head.edge, head.entries) != (self.edge, self.entries):
            raise StateError(
                f"the message is of edge {head.edge} with dtype={head.entries!r}, but this side has edge {self.edge} "
                f"with dtype={self.entries!r}: pass equal edge= and dtype= on both sides"
            )
        if head.session == self._peer and head.number <= self._last:
            last = f"the last message was number {self._last}"
            raise StateError(f"message {head.number} of edge {head.edge} is repeated or out of order: {last}")
        if head.session in self._retired:
            raise StateError(
                f"message {head.number} of edge {head.edge} is out of order: its sender has been restarted since"
            )

    def received(self, head: MessageHead, nbytes: int, raw: int = 0, deltas: int = 0) -> None:
        """Count a decoded message, and store its session and number for :meth:`check`."""
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
