"""Statistics of a TCP connection from the Linux kernel (struct tcp_info)."""

import socket
from typing import NamedTuple

_RTT, _ACKED, _BUSY = 68, 120, 168  # offsets of tcpi_rtt (u32), tcpi_bytes_acked and tcpi_busy_time (u64)
_NBYTES = _BUSY + 8


class ConnectionInfo(NamedTuple):
    """Statistics of a connection; 0 for values that the kernel does not provide."""

    rtt: float = 0.0  # round-trip time in seconds, a running mean
    acked_nbytes: int = 0  # bytes that the peer has acknowledged
    busy: float = 0.0  # seconds in which sent bytes were not yet acknowledged


def connection_info(sock: socket.socket) -> ConnectionInfo:
    """Return the statistics of a connected socket."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _NBYTES)
    except OSError:
        return ConnectionInfo()

    def field(offset: int, nbytes: int) -> int:
        return int.from_bytes(info[offset : offset + nbytes], "little") if len(info) >= offset + nbytes else 0

    return ConnectionInfo(field(_RTT, 4) * 1e-6, field(_ACKED, 8), field(_BUSY, 8) * 1e-6)
