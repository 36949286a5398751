"""Options of TCP connections between ranks, and their statistics from the Linux kernel (struct tcp_info)."""

import functools
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, probes
_FAR = 0.005  # seconds of a round trip from which a connection uses bbr

_RTT, _ACKED, _BUSY = 68, 120, 168  # offsets of tcpi_rtt (u32), tcpi_bytes_acked and tcpi_busy_time (u64)
_NBYTES = _BUSY + 8


@functools.cache
def _congestion_controls() -> list[str]:
    """Return the names of the congestion controls that the kernel has loaded."""
    with suppress(OSError):
        return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return []


def prepare(sock: socket.socket) -> None:
    """Make a connected socket non-blocking, and set its options for messages between ranks.

    The congestion control is the one that the environment variable CODEC_TCP_CONGESTION names. By default, connections
    with long round trips use bbr, whose rate does not fall with each lost packet. Without the wanted one, the kernel's
    default remains.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    wanted = os.environ.get("CODEC_TCP_CONGESTION", "bbr" if connection_info(sock).rtt >= _FAR else "")
    if wanted in _congestion_controls():
        with suppress(OSError):  # this user may not choose it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted.encode())


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
