"""Links with a delay, for kernels without netem: TUN devices, and a process that delays their packets.

:func:`device` creates a TUN device in a network namespace. :class:`Delay` runs a process that reads the packets that
each namespace sends, waits, and writes the packets to the device of their destination. Packets keep their order. A
share of them can be dropped at random. As on links without a delay, a token bucket in front of the device limits the
rate (:func:`netns.shape`).

Packets have up to 64 KiB, with a TCP segment size of 1,448 bytes, as between a kernel and a network card with TSO.
TCP's slow start is therefore the same as on real links, and a packet takes about 10 microseconds of a core. If packets
are to be dropped, they have a single segment each, as on a real link.
"""

import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence

_TUN = "/dev/net/tun"
_SETIFF, _SETOFFLOAD, _SETSNDBUF = 0x400454CA, 0x400454D0, 0x400454D4
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_CHECKSUMS, _TSO4 = 0x01, 0x02
_CLONE_NEWNET = 0x40000000
_HEADER_NBYTES = 10  # size of struct virtio_net_hdr, which describes how a packet is segmented
_LARGEST = 65536 + _HEADER_NBYTES


def device(namespace: str, name: str, *, segmented: bool = False) -> int:
    """Create a TUN device in a network namespace, and return its non-blocking file descriptor.

    The device exists until the descriptor and its copies are closed. `segmented`: each packet is a single TCP segment.

    Raises
    ------
    OSError
        The kernel has no TUN devices, or the process lacks the privilege to create one.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def enter(fd: int) -> None:
        if libc.setns(fd, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")

    home, there = os.open("/proc/thread-self/ns/net", os.O_RDONLY), os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        enter(there)
        try:
            tun = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
            try:
                fcntl.ioctl(tun, _SETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
                fcntl.ioctl(tun, _SETOFFLOAD, _CHECKSUMS if segmented else _CHECKSUMS | _TSO4)
            except BaseException:
                os.close(tun)
                raise
        finally:
            enter(home)
    finally:
        os.close(home)
        os.close(there)
    return tun


class Delay:
    """Process that carries packets between TUN devices.

    Parameters
    ----------
    tuns : sequence of int
        File descriptors from :func:`device`, by rank. The last byte of rank r's address is r + 1.
    seconds : float
        Delay from sending to receiving, half of the round-trip time.
    loss : float
        Share of the packets that are dropped.
    """

    def __init__(self, tuns: Sequence[int], seconds: float, loss: float = 0.0) -> None:
        command = [sys.executable, "-S", __file__, str(seconds), str(loss), *map(str, tuns)]
        # a separate session, so that Ctrl-C reaches only the parent
        self.process = subprocess.Popen(command, pass_fds=tuns, stdin=subprocess.PIPE, start_new_session=True)

    def set(self, seconds: float) -> None:
        """Change the delay in seconds, for packets sent from now on."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n".encode())
        self.process.stdin.flush()

    def close(self) -> None:
        """Kill the process that carries packets."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


def packets(tun: int, most: int = 64) -> Iterator[bytes]:
    """Yield up to `most` packets that are ready on a device."""
    for _ in range(most):
        try:
            yield os.read(tun, _LARGEST)
        except BlockingIOError:
            return


def destination(packet: bytes, ranks: int) -> int | None:
    """Return the rank to which an IPv4 packet is sent; None for other packets and broadcasts."""
    address = packet[_HEADER_NBYTES + 16 : _HEADER_NBYTES + 20]
    if len(address) < 4 or packet[_HEADER_NBYTES] >> 4 != 4 or not 1 <= address[3] <= ranks:
        return None
    return address[3] - 1


def carry(seconds: float, loss: float, tuns: Sequence[int]) -> None:
    """Forward packets until standard input is closed, when the parent ends. A line of input sets a new delay."""
    chance = random.Random(1)
    waiting: deque[tuple[float, int, bytes]] = deque()  # (arrival time, device, packet), in order of time
    poll = select.epoll()
    for fd in (sys.stdin.fileno(), *tuns):
        poll.register(fd, select.EPOLLIN)
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else -1
        for fd, _ in poll.poll(patience):
            if fd not in tuns:
                line = os.read(fd, 64).split()
                if not line:
                    return
                seconds = float(line[-1])
                continue
            for packet in packets(fd):
                to = destination(packet, len(tuns))
                if to is not None and not (loss and chance.random() < loss):
                    earliest = waiting[-1][0] if waiting else 0.0  # of the previous packet: keep the order
                    waiting.append((max(earliest, time.monotonic() + seconds), tuns[to], packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, fd, packet = waiting.popleft()
            os.write(fd, packet)


if __name__ == "__main__":
    carry(float(sys.argv[1]), float(sys.argv[2]), [int(fd) for fd in sys.argv[3:]])
