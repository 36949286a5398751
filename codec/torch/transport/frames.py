"""Frames and uncompressed values on their way between ranks, in host memory (docs/protocol.md, section 3)."""

from functools import partial
from typing import Any

import numpy as np

from codec.torch.transport.arena import Arena
from codec.torch.transport.connections import Connections
from codec.torch.transport.messages import FRAME_BEGIN, FRAME_LENGTH, Array, IncomingFrame, IncomingValues, new_mark


class FrameTransfer:
    """Data of a collective. All receives of a phase should be posted before anything is sent.

    Every method that posts or waits raises PeerError if a connection is lost or closed; then all connections are
    closed. What other ranks have sent is not trusted: :class:`IncomingFrame` and :class:`IncomingValues` check it, and
    their errors leave the connections open.

    Parameters
    ----------
    connections : Connections
        Carry the messages.
    arena : Arena
        Gives memory for the frames to receive.
    """

    def __init__(self, connections: Connections, arena: Arena) -> None:
        self._connections, self._arena, self._counters = connections, arena, connections.counters
        self._mark = new_mark()
        self._sends: list[tuple[Any, int]] = []
        connections.attach(self)

    def renew_mark(self) -> None:
        """Choose the mark of incoming values anew, as each collective must."""
        self._mark = new_mark()

    def receive(self, nbytes: int, source: int) -> IncomingFrame:
        """Post the receive of a frame of at most `nbytes` bytes."""
        buffer = self._arena.allocate(nbytes)
        buffer[:FRAME_BEGIN] = 0  # else a message that is too short would end in a frame of an earlier collective
        work = self._connections.post("recv", buffer, source)
        return IncomingFrame(buffer, source, partial(self._connections.wait, work, source), self._counters)

    def receive_values(self, buffer: Array, source: int) -> IncomingValues:
        """Post the receive of as many uncompressed values as `buffer` has."""
        incoming = IncomingValues(buffer, source, self._mark)
        self._counters.received_nbytes += buffer.nbytes
        work = self._connections.post("recv", buffer.view(np.uint8), source)
        return incoming.posted(partial(self._connections.wait, work, source))

    def send(self, message: Array | None, to: int) -> None:
        """Send a message of :meth:`Arena.finish_message`, which must not change until :meth:`wait_for_sends`.

        Parameters
        ----------
        message : ndarray of uint8 or None
            None tells the receiver that there is no frame.
        to : int
            Receiving rank.
        """
        if message is None:
            message = np.zeros(FRAME_LENGTH.size, np.uint8)
        self.send_values(message, to)

    def send_values(self, values: Array, to: int) -> None:
        """Send uncompressed values, which must not change until :meth:`wait_for_sends`."""
        self._counters.sent_nbytes += values.nbytes
        self._sends.append((self._connections.post("send", values.view(np.uint8), to), to))

    def wait_for_sends(self) -> None:
        """Wait until all data is sent."""
        for work, to in self._sends:
            self._connections.wait(work, to)
        self._sends.clear()

    def release(self) -> None:
        """Forget the messages in flight."""
        self._sends.clear()
