"""Connect the ranks of a group to a mesh (docs/spec/protocol.md, section 2)."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from codec.torch.network.endpoint import endpoint_of
from codec.torch.network.mesh import Mesh
from codec.torch.network.sockets import reserve_descriptors
from codec.torch.network.tls import AnySocket

STRIPES = 1  # number of connections between two ranks
FIRST_TAG = -2  # tag of a mesh's first connections, in their hello message; further connections have lower tags
_OTHER_DESCRIPTORS = 8  # maximum open files of an endpoint and a mesh, besides the connections


def connect(group: Any, timeout: timedelta, peers: Sequence[int] | None = None) -> Mesh:
    """Connect the ranks of a group.

    Parameters
    ----------
    group : ProcessGroup
        Group of ranks. Every rank must connect at the same point of the program.
    timeout : timedelta
        Longest time until this rank is connected.
    peers : sequence of int, optional
        Ranks to connect to this rank, which have this rank among their peers. Default: all other ranks.

    Raises
    ------
    PeerError
        A rank cannot be reached in time, or uses another version of the protocol.
    """
    rank, size = group.rank(), group.size()
    others = [o for o in range(size) if o != rank] if peers is None else sorted(peers)
    sockets: dict[int, list[AnySocket]] = {}
    if others:
        end = time.monotonic() + timeout.total_seconds()
        reserve_descriptors(STRIPES * len(others) + _OTHER_DESCRIPTORS)
        endpoint = endpoint_of(group, timeout.total_seconds())

        def left() -> float:
            return max(0.001, end - time.monotonic())

        try:
            for tag in range(FIRST_TAG, FIRST_TAG - STRIPES, -1):
                for connection in endpoint.connect([o for o in others if o < rank], tag, left()):
                    sockets.setdefault(connection.peer, []).append(connection.detach())
                for o in (o for o in others if o > rank):  # these connect at the same time
                    connection = endpoint.accept(o, tag, left())
                    assert connection is not None
                    sockets.setdefault(o, []).append(connection.detach())
        except BaseException:
            for sock in (sock for each in sockets.values() for sock in each):
                sock.close()  # so that no other rank waits for this one
            raise
    return Mesh(rank, sockets)
