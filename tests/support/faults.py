"""Faults of a rank: it dies, freezes or loses a connection at a chosen point of a collective."""

import os
import signal
import socket
import stat
import struct
import threading
import time
from contextlib import contextmanager, suppress

from codec.torch.transport.collective import CollectivePart

KILLED = "killed"  # stands for the result of a rank that died
_BYTES_ACKED = 120  # offset of tcpi_bytes_acked in Linux's struct tcp_info
_MAX_PACING_RATE = 47  # Linux's socket option SO_MAX_PACING_RATE


class _Events:
    """Counter of a channel's events: sends, requests for a message, and waits."""

    def __init__(self):
        self.count = self.last_send = 0


@contextmanager
def at_fault_point(channel, point, fault):
    """Call fault() before event number `point` of a channel.

    An event is a send, a request for a message, or the begin of a wait. Yields an object with `count`, the number of
    events so far, and `last_send`, the event number of the latest send.

    Parameters
    ----------
    channel : codec.torch.transport.channel.Channel
        Channel whose events are counted.
    point : int
        Number of the event, from 0. -1: events are counted, and fault() is never called.
    fault : callable
        Function without arguments.
    """
    events = _Events()
    mesh, wait = channel.mesh, CollectivePart._wait

    def before(name, call):
        def counted(*args):
            if name == "send":
                events.last_send = events.count
            events.count += 1
            if events.count - 1 == point:
                fault()
            return call(*args)

        return counted

    mesh.send, mesh.post = before("send", mesh.send), before("post", mesh.post)
    CollectivePart._wait = before("wait", wait)
    try:
        yield events
    finally:
        del mesh.send, mesh.post
        CollectivePart._wait = wait


@contextmanager
def damaged_frames(damage):
    """Send `damage(frame, to)` in place of each frame that this rank sends to rank `to`.

    The same frame may go to several ranks.
    """
    send = CollectivePart.send_frame
    CollectivePart.send_frame = lambda part, frame, to: send(part, damage(frame, to), to)
    try:
        yield
    finally:
        CollectivePart.send_frame = send


def die():
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def freeze():
    """Stop this process by SIGSTOP. The signal goes to this thread, so that it takes effect before the call returns."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def _connections():
    """Return duplicates of this process's TCP sockets, by inode: other threads may close the originals."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            fd = os.dup(int(name))
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)
                continue
            with socket.socket(fileno=fd) as s:
                if s.family in (socket.AF_INET, socket.AF_INET6) and s.getpeername():
                    found[os.fstat(fd).st_ino] = socket.socket(fileno=os.dup(fd))  # s.dup() would change it to blocking
    return found


@contextmanager
def new_connections():
    """Yield a list. When the context ends, the sockets of connections made inside are appended to the list."""
    found, before = [], set()
    for inode, s in _connections().items():
        before.add(inode)
        s.close()
    yield found
    for inode, s in _connections().items():
        if inode in before:
            s.close()
        else:
            found.append(s)


def acked_nbytes(s):
    """Return the number of bytes that the other side of a connection has acknowledged."""
    return struct.unpack_from("Q", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), _BYTES_ACKED)[0]


SEND_BUFFER = 1 << 14  # size of the send buffer in bytes; Linux allocates twice as many


def cut_after(connections, nbytes, rate):
    """Slow connections to `rate` bytes per second, and close the first one whose peer has acknowledged `nbytes`.

    Returns a list, to which the number of acknowledged bytes is appended at the cut. Bytes in the kernel's buffers may
    arrive later.
    """
    arrived = []
    for s in connections:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        s.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, rate)
    before = [acked_nbytes(s) for s in connections]

    def watch():
        while True:
            for s, begun in zip(connections, before, strict=True):
                if (now := acked_nbytes(s) - begun) >= nbytes:
                    arrived.append(now)
                    with suppress(OSError):  # the other side may have closed it
                        s.shutdown(socket.SHUT_RDWR)
                    return
            time.sleep(0.0005)  # poll: no event reports acknowledged bytes

    threading.Thread(target=watch, daemon=True).start()
    return arrived
