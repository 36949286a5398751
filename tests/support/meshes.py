"""Helpers for tests that call a mesh directly, below the collectives: sockets, waits and signatures."""

import socket
import threading
import time

import torch.distributed as dist

from codec.torch.network.inbox import Receive
from codec.torch.network.stripe import FIELDS
from codec.torch.network.version import checksum, with_crc

SECONDS = 20  # limit of a wait, in seconds; generous, since test machines are busy
SIGNATURE = 7
DATA, ABORT = range(2)


class Group(dist.ProcessGroup):
    """Process group that only has a store."""

    def __init__(self, rank, size, base):
        super().__init__(rank, size)
        self._place, self._base = (rank, size), base

    def rank(self):
        return self._place[0]

    def size(self):
        return self._place[1]

    def get_group_store(self):
        return self._base

    @property
    def _device_types(self):
        return []


def tcp_pair():
    """Return two connected TCP sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        return a, server.accept()[0]


def packed(number, body=b"", *, part=0, index=0, kind=DATA, magic=b"CDCM", nbytes=None, signature=SIGNATURE):
    nbytes = len(body) if nbytes is None else nbytes
    return with_crc(FIELDS.pack(magic, kind, number, part, index, signature, nbytes, checksum([body]))) + body


def outcome(wait, seconds=SECONDS):
    """Wait, and return the error that the wait raised, or None if it raised none."""
    ended = threading.Event()
    if wait.call_when_done(ended.set):
        assert ended.wait(seconds), "the wait does not end"
    try:
        next(wait.__await__())
    except StopIteration:
        return None
    except BaseException as e:
        return e.with_traceback(None)  # the traceback's stack frames would keep the mesh alive
    raise AssertionError("the wait has not ended")


def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition does not come true"
        time.sleep(0.001)


def ask(mesh, number, *, index=0, part=0, source=1, most=1 << 20, room=None, exact=False):
    receive = Receive(source, part, index, SIGNATURE, most, room, exact=exact)
    mesh.post(number, receive)
    return receive


def received(receive):
    assert outcome(receive) is None
    return receive.message.tobytes()
