"""A worker's connections to parameter servers, over which it sends requests to several servers at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from codec import CodecError, PeerError
from codec.readable import Rounded, count, size
from codec.torch.network.endpoint import Endpoint
from codec.torch.network.tcp import PeerConnection
from codec.torch.parameter_server.messages import TAG, Outgoing
from codec.torch.transport.messages import Array

T = TypeVar("T")

_SMALL_NBYTES = 1 << 16  # maximum bytes of a reply without values, such as an error


@dataclass(frozen=True, repr=False)
class ClientStats(Rounded):
    """Totals of a client, which :meth:`ParameterClient.stats` returns.

    Attributes
    ----------
    requests : int
        Number of requests sent, over all servers.
    sent_nbytes, received_nbytes : int
        Bytes of all messages, including headers.
    """

    requests: int
    sent_nbytes: int
    received_nbytes: int

    def __str__(self) -> str:
        """Return one line with the number of requests and the bytes."""
        sent, received = size(self.sent_nbytes), size(self.received_nbytes)
        return f"{count(self.requests, 'request')}: {sent} sent, {received} received"


class ServerLinks:
    """Connections to servers.

    Parameters
    ----------
    endpoint : Endpoint
        Endpoint of this rank.
    servers : sequence of int
        Ranks of the servers.
    seconds : float
        Longest wait for a connection, and for sending 4 MiB. The longest wait for a reply is twice as long, because a
        server itself waits up to `seconds` for other workers.
    """

    def __init__(self, endpoint: Endpoint, servers: Sequence[int], seconds: float) -> None:
        self.closed = False
        self._seconds = seconds
        self._requests = 0
        self._connections = dict(zip(servers, endpoint.connect(servers, TAG, seconds), strict=True))

    def alive(self) -> list[int]:
        """Return the ranks of the servers whose connections are open."""
        return [server for server, connection in self._connections.items() if not connection.closed]

    def stats(self) -> ClientStats:
        """Return the requests and bytes so far."""
        connections = self._connections.values()
        sent, received = (sum(n) for n in zip(*((c.sent_nbytes, c.received_nbytes) for c in connections), strict=True))
        return ClientStats(self._requests, sent, received)

    def close(self) -> None:
        """Close all connections."""
        self.closed = True
        for connection in self._connections.values():
            connection.close()

    def round(
        self, requests: Sequence[Mapping[int, Outgoing]], limit: int, read: Callable[[Array, int, int], T]
    ) -> list[dict[int, T]]:
        """Send requests to servers, and return the results of `read` for the replies.

        Parameters
        ----------
        requests : sequence of dict
            Requests by server; each item holds at most one request per server. All requests are sent before the first
            reply is received. A server answers its requests in this order.
        limit : int
            Maximum bytes of the values in a reply.
        read : callable
            read(reply, server, count) parses a reply that must have `count` keys, and returns its contents.

        Returns
        -------
        list of dict
            For each item of `requests`: results of `read` by server.

        Raises
        ------
        CodecError
            First error that a reply reports, raised after all replies were received; PeerError if a server is lost.
        """
        lost: dict[int, PeerError] = {}
        first: CodecError | None = None
        found: list[dict[int, T]] = []
        for by_server in requests:
            for server, request in by_server.items():
                self._requests += 1
                self._try(server, lost, lambda c, r=request: c.send(r.parts, self._seconds))
        for by_server in requests:
            found.append({})
            for server, request in by_server.items():
                reply = self._try(server, lost, lambda c: c.receive(limit + _SMALL_NBYTES, 2 * self._seconds))
                try:
                    if reply is None:
                        raise PeerError(f"server {server}: {lost[server]}")
                    found[-1][server] = read(reply, server, request.replies)
                except CodecError as e:
                    first = first or e
        if first is not None:
            raise first
        return found

    def _try(self, server: int, lost: dict[int, PeerError], call: Callable[[PeerConnection], T]) -> T | None:
        """Return the result of a call. If the server is lost, close its connection, add it to `lost`, and return None.

        If the connection stayed open, a late reply could be read as the reply to another request.
        """
        if server not in lost:
            try:
                return call(self._connections[server])
            except PeerError as e:
                self._connections[server].close()
                lost[server] = e
        return None
