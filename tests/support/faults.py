"""Faults of a rank: it dies, freezes or loses a connection at a chosen point of a collective."""

import os
import signal
import socket
import stat
import struct
import threading
import time
from contextlib import contextmanager, suppress

GONE = "gone"  # the result of a rank that was killed
_BYTES_ACKED = 120  # where it is in Linux's struct tcp_info
_MAX_PACING_RATE = 47  # Linux's SO_MAX_PACING_RATE


@contextmanager
def at_event(channel, moment, act):
    """Have act() come before event number `moment` of a channel; yields a function that says how many there were.

    An event is a message that is posted, one that is waited for, an agreement that begins. The function's `last_send()`
    is the number of the last message that was sent.
    """
    count = last = 0
    names = ("post", "wait", "gather")

    def events():
        return count

    events.last_send = lambda: last

    def before(call):
        def counted(*args):
            nonlocal count, last
            if args[:1] == ("send",):
                last = count
            count += 1
            if count - 1 == moment:
                act()
            return call(*args)

        return counted

    for name in names:
        setattr(channel, name, before(getattr(channel, name)))
    try:
        yield events
    finally:
        for name in names:
            delattr(channel, name)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def freeze():
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # by this thread, before it goes on, for all


def _connections():
    """This process's TCP connections by inode: descriptors of our own, since another thread may close its meanwhile."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            fd = os.dup(int(name))
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.close(fd)
                continue
            with socket.socket(fileno=fd) as s:
                if s.family in (socket.AF_INET, socket.AF_INET6) and s.getpeername():
                    found[os.fstat(fd).st_ino] = socket.socket(fileno=os.dup(fd))  # s.dup() would have it block
    return found


@contextmanager
def new_connections():
    """Sockets of the connections that are made meanwhile: a list, filled at the end."""
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
    """How many bytes the other side of a connection has confirmed."""
    return struct.unpack_from("Q", s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), _BYTES_ACKED)[0]


SEND_BUFFER = 1 << 14  # bytes, of which the kernel makes twice as many


def cut_after(connections, nbytes, rate):
    """Send at so many bytes a second, and cut the connection over which so many have arrived first.

    How many had then: a list, filled at the cut. What the kernel had to send by then may arrive yet.
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
                    with suppress(OSError):  # the other side may have gone already
                        s.shutdown(socket.SHUT_RDWR)
                    return
            time.sleep(0.0005)  # there is no event for bytes that arrive elsewhere

    threading.Thread(target=watch, daemon=True).start()
    return arrived
