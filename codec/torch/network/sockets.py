"""Addresses of this machine, options and statistics of TCP connections, and the limit of open files."""

import errno
import fcntl
import functools
import os
import resource
import socket
import struct
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any, NamedTuple

from codec import PeerError

_SIOCGIFADDR = 0x8915  # Linux: IPv4 address of an interface
_LINK_LOCAL = 0x20  # Linux: scope of IPv6 addresses
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, probes
_FAR = 0.005  # seconds of a round trip from which a connection uses bbr

_RTT, _ACKED, _BUSY = 68, 120, 168  # offsets of tcpi_rtt (u32), tcpi_bytes_acked and tcpi_busy_time (u64)
_NBYTES = _BUSY + 8


def host_address() -> str:
    """Return the IPv4 or IPv6 address at which other ranks can reach this rank, chosen as Gloo does."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        for address in _addresses(interface):
            if _can_bind(address):
                return address
        raise PeerError(
            f"GLOO_SOCKET_IFNAME={interface} is not a network interface with an IPv4 or IPv6 address: set it to one of "
            "this host"
        )
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            if _can_bind(str(address[0])):
                return str(address[0])
    return "127.0.0.1"


def _addresses(interface: str) -> Generator[str]:
    """Yield the addresses of an interface, except link-local IPv6 addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s, suppress(OSError):
        request = struct.pack("256s", interface[:15].encode())
        yield socket.inet_ntoa(fcntl.ioctl(s.fileno(), _SIOCGIFADDR, request)[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, _, _, scope, _, name = line.split()
            if name == interface and int(scope, 16) != _LINK_LOCAL:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


def _can_bind(address: str) -> bool:
    """Return True if `address` belongs to this machine."""
    with suppress(OSError), socket.socket(family(address), socket.SOCK_STREAM) as s:
        s.bind((address, 0))
        return True
    return False


def family(address: str) -> socket.AddressFamily:
    """Return the address family of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def reserve_descriptors(count: int) -> None:
    """Raise the soft limit of open files if this process needs `count` more of them, at most to the hard limit.

    The new limit is twice the number of open files, so that half of it remains for the program.

    Raises
    ------
    PeerError
        The hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = 0
    with suppress(OSError):  # /proc is not mounted
        opened = len(os.listdir("/proc/self/fd"))
    limit = 2 * (opened + count)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return
    highest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    if highest > soft:
        with suppress(OSError, ValueError):  # a sandbox may forbid the call
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    if highest < opened + count:
        raise PeerError(
            f"the connections of the group need {count} more open files, but this process has {opened} of at most "
            f"{hard}: raise the hard limit (RLIMIT_NOFILE, `ulimit -Hn`)"
        )


def shown_address(address: tuple[Any, ...]) -> str:
    """Return host and port of a socket's address for messages."""
    return f"{address[0]}, port {address[1]}"


def send_all(channel: Any, data: bytes) -> Generator[int]:
    """Send bytes on a non-blocking socket or :class:`TlsSocket`; yield the event of the socket to wait for."""
    left = memoryview(data)
    while left:
        try:
            left = left[channel.sendmsg([left]) :]
        except BlockingIOError:
            yield EVENT_WRITE


def receive_all(channel: Any, nbytes: int) -> Generator[int, None, bytes]:
    """Receive exactly `nbytes` bytes from a non-blocking socket or :class:`TlsSocket`; yield the event to wait for."""
    data = memoryview(bytearray(nbytes))
    left = data
    while left:
        try:
            n = channel.recv_into(left)
        except BlockingIOError:
            yield EVENT_READ
            continue
        if not n:
            raise ConnectionError("it has closed the connection")
        left = left[n:]
    return bytes(data)


def descriptor_limit() -> int:
    """Return the maximum number of open files of this process."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit


def reason(error: OSError) -> str:
    """Return the message of an error, with the limit of open files if this process has reached it."""
    if error.errno != errno.EMFILE:
        return str(error)
    return f"{error}; the limit of this process is {descriptor_limit()} (RLIMIT_NOFILE): raise it with `ulimit -n`"


@functools.cache
def _congestion_controls() -> list[str]:
    """Return the names of the congestion controls that the kernel has loaded."""
    with suppress(OSError):
        return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return []


def prepare(sock: Any) -> None:
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
    """Statistics of a connection (struct tcp_info); 0 for values that the kernel does not provide."""

    rtt: float = 0.0  # round-trip time in seconds, a running mean
    acked_nbytes: int = 0  # bytes that the peer has acknowledged
    busy: float = 0.0  # seconds in which sent bytes were not yet acknowledged
    local: bool = False  # True: both ends have the same address, as on the loopback interface


def is_local(sock: Any) -> bool:
    """Return True if both ends of a connected socket have the same address."""
    try:
        return sock.getsockname()[0] == sock.getpeername()[0]
    except OSError:  # the peer has closed the connection
        return False


def connection_info(sock: Any) -> ConnectionInfo:
    """Return the statistics of a connected socket."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _NBYTES)
    except OSError:
        return ConnectionInfo()

    def field(offset: int, nbytes: int) -> int:
        return int.from_bytes(info[offset : offset + nbytes], "little") if len(info) >= offset + nbytes else 0

    return ConnectionInfo(field(_RTT, 4) * 1e-6, field(_ACKED, 8), field(_BUSY, 8) * 1e-6)
