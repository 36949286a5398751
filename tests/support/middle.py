"""Man in the middle of two ranks: a TCP proxy that changes, cuts, delays, repeats or redirects their bytes.

Rank 1 connects to the proxy, since :func:`lead_through` writes the proxy's address into the store of the group.
"""

import contextlib
import os
import random
import socket
import struct
import threading
import time
from hashlib import sha256

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

import codec
import codec.torch
from codec.torch.network.endpoint import endpoint_of
from codec.torch.network.store import PREFIX
from support.ranks import enter_namespace

TO_SERVER, TO_CLIENT = range(2)  # directions: toward rank 0, which listens; toward rank 1, which connects
N = 30_000
TIMEOUT = 0.7  # timeout of disturbed collectives in seconds
SLACK = 15.0  # allowance for busy machines in seconds
PATIENT = 60.0  # timeout of collectives that must succeed in seconds
_PORT, _HOST = slice(24, 26), 27  # place of port and host in an address (protocol.md, section 2.1)


class Edit:
    """Attack that replaces some bytes of one direction of a connection.

    Parameters
    ----------
    toward : int
        Direction.
    at : int
        Offset of the first byte that is replaced.
    nbytes : int
        Number of bytes that are removed.
    replace : callable
        Function of the removed bytes that returns the bytes to send instead.
    connection : int
        Number of the connection, in the order in which they are opened.
    """

    def __init__(self, toward, at, nbytes, replace, connection=0):
        self.toward, self.at, self.nbytes, self.replace, self.connection = toward, at, nbytes, replace, connection
        self._held: bytes | None = b""  # None: the bytes were replaced
        self.done = False  # True: the attack has begun

    def __call__(self, wire, toward, offset, data):
        """Return the bytes to pass on in place of `data`, which begins at `offset` of its stream."""
        elsewhere = toward != self.toward or wire.number != self.connection
        if elsewhere or self._held is None or offset + len(data) <= self.at:
            return data
        before, self.done = data[: max(0, self.at - offset)], True
        self._held += data[len(before) :]
        if len(self._held) < self.nbytes:
            return before
        held, self._held = self._held, None
        return before + self.replace(held[: self.nbytes]) + held[self.nbytes :]


def changed(toward, at, mask=1):
    """Return an attack that inverts the bits `mask` of one byte."""
    return Edit(toward, at, 1, lambda old: bytes([old[0] ^ mask]))


def dropped(toward, at, nbytes):
    """Return an attack that leaves bytes out."""
    return Edit(toward, at, nbytes, lambda old: b"")


def repeated(toward, at, nbytes):
    """Return an attack that sends bytes twice."""
    return Edit(toward, at, nbytes, lambda old: old + old)


def injected(toward, at, data):
    """Return an attack that inserts bytes."""
    return Edit(toward, at, 0, lambda old: data)


def exchanged(toward, at, nbytes):
    """Return an attack that exchanges two successive pieces of `nbytes` bytes each."""
    return Edit(toward, at, 2 * nbytes, lambda old: old[nbytes:] + old[:nbytes])


def exchanged_tags(toward_other):
    """Return an attack that writes another tag into the hello of each connection; `toward_other` maps tags."""
    edits = {}

    def replace(old):
        tag = int.from_bytes(old, "little", signed=True)
        return toward_other[tag].to_bytes(8, "little", signed=True)

    def attack(wire, toward, offset, data):
        edit = edits.setdefault(wire.number, Edit(TO_SERVER, 36, 8, replace, wire.number))
        return edit(wire, toward, offset, data)

    return attack


class Crossed:
    """Attack that passes the bytes of each of two connections toward rank 0 on in the other one, once `active`."""

    def __init__(self):
        self.active = False
        self._servers = {}  # socket of rank 0, by connection

    def __call__(self, wire, toward, offset, data):
        self._servers[wire.number] = wire.sockets[1]
        if not self.active or toward == TO_CLIENT:
            return data
        self._servers[1 - wire.number].sendall(data)
        return b""


class Cut:
    """Attack that closes the connection after some bytes of one direction; with `reset`, by a TCP reset."""

    def __init__(self, toward, at, reset=False):
        self.toward, self.at, self.reset, self.done = toward, at, reset, False

    def __call__(self, wire, toward, offset, data):
        if toward != self.toward or offset + len(data) <= self.at:
            return data
        self.done = True
        wire.sockets[1 - toward].sendall(data[: max(0, self.at - offset)])
        wire.close(reset=self.reset)
        return b""


class Stall:
    """Attack that passes nothing on after some bytes of one direction; both connections stay open."""

    def __init__(self, toward, at):
        self.toward, self.at, self.done = toward, at, False

    def __call__(self, wire, toward, offset, data):
        if toward != self.toward or offset + len(data) <= self.at:
            return data
        self.done = True
        return data[: max(0, self.at - offset)]


class Dribble:
    """Harmless attack: passes bytes on in pieces of random sizes, with pauses."""

    done = True

    def __init__(self, seed):
        self._random = random.Random(seed)

    def __call__(self, wire, toward, offset, data):
        while data:
            n = self._random.choice((1, 2, 7, 40, 500, 5000, 50_000))
            wire.sockets[1 - toward].sendall(data[:n])
            data = data[n:]
            if self._random.random() < 0.2:
                time.sleep(0.01)
        return b""


class Replay:
    """Attack that sends the recorded bytes of another connection toward rank 0 in place of those of rank 1."""

    def __init__(self, recorded):
        self._recorded, self.done = recorded, False

    def __call__(self, wire, toward, offset, data):
        if toward == TO_CLIENT:
            return data
        first, self.done = not self.done, True
        return self._recorded if first else b""


class Wire:
    """Two connections that the proxy joins: that of rank 1, and that to rank 0. A thread passes on each direction."""

    def __init__(self, number, client, server, attack):
        self.number = number
        self.sockets = client, server
        self.seen = bytearray(), bytearray()  # bytes that arrived at the proxy, by direction
        self._attack = attack
        self._reset = False
        self._threads = [threading.Thread(target=self._pump, args=(toward,)) for toward in (TO_SERVER, TO_CLIENT)]
        for thread in self._threads:
            thread.start()

    def close(self, *, reset=False):
        """End both connections; with `reset`, by a TCP reset once both threads have ended."""
        self._reset = self._reset or reset
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)

    def join(self):
        """Close both connections, and wait for the threads."""
        self.close()
        for thread in self._threads:
            thread.join()
        for sock in self.sockets:
            sock.close()

    def _pump(self, toward):
        """Pass the bytes of one direction on, and then their end."""
        source, sink = self.sockets[toward], self.sockets[1 - toward]
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                offset = len(self.seen[toward])
                self.seen[toward].extend(data)
                sink.sendall(self._attack(self, toward, offset, data))
        with contextlib.suppress(OSError):
            if self._reset:
                sink.close()  # each thread closes the socket that only the other one reads, which has ended
            else:
                sink.shutdown(socket.SHUT_WR)


def _nothing(wire, toward, offset, data):
    return data


class Middle:
    """Proxy, and context manager that closes its port and connections.

    Parameters
    ----------
    host : str
        Address of the proxy.
    namespace : str, optional
        Network namespace of the proxy; by default the caller's.
    """

    def __init__(self, host="127.0.0.1", namespace=None):
        self.host = host
        self.target = None  # address of rank 0
        self.attack = _nothing
        self.wires = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(namespace,), daemon=True)
        self._thread.start()
        assert self._ready.wait(20)
        self.port = self._sock.getsockname()[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()
        self.reset()

    def reset(self, attack=_nothing):
        """Close all connections, and use an attack for those that are opened from now on."""
        for wire in self.wires:
            wire.join()
        self.wires, self.attack = [], attack

    def seen(self, number=0):
        """Return the bytes of a connection that have arrived so far: toward rank 0, and toward rank 1."""
        return tuple(map(bytes, self.wires[number].seen))

    def _serve(self, namespace):
        if namespace is not None:
            enter_namespace(namespace)  # applies to this thread and those that it starts
        self._sock = socket.create_server((self.host, 0))
        self._ready.set()
        while True:
            try:
                client, _ = self._sock.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self.target, 20)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self.wires.append(Wire(len(self.wires), client, server, self.attack))


# Functions of ranks


def secured(rank, size, environment):
    """Set the environment variables that secure the connections of this rank, and remove all others."""
    for name in [name for name in os.environ if name.startswith("CODEC_SECRET") or name.startswith("CODEC_TLS")]:
        del os.environ[name]
    os.environ.update(environment)


def lead_through(rank, size, host, port, flags=None):
    """Write the address of the proxy, and flags, into the store in place of those of rank 0; return its address."""
    endpoint_of(dist.group.WORLD)
    dist.barrier()
    address = None
    if rank == 0:
        store = PrefixStore(PREFIX, dist.group.WORLD.get_group_store())
        value = store.get("0")
        address = value[_HOST:].decode(), int.from_bytes(value[_PORT], "little")
        flag = value[_PORT.stop : _HOST] if flags is None else bytes([flags])
        store.set("0", value[: _PORT.start] + port.to_bytes(2, "little") + flag + host.encode())
    dist.barrier()
    return address


def digest(tensor):
    """Return a digest of a tensor's bytes."""
    return sha256(tensor.numpy().tobytes()).hexdigest()


def values(rank):
    """Return the tensor of a rank."""
    return torch.linspace(-1, 1 + rank, N)


def reduced(rank, size, algorithm, timeout):
    """All-reduce values(); return the name of the error and its text, the seconds it took, and the tensor's digest.

    Check that an error leaves the tensor unchanged.
    """
    x = values(rank)
    before, error, text = digest(x), "", ""
    begin = time.monotonic()
    try:
        options = codec.options(algorithm=algorithm, timeout=timeout)
        codec.torch.all_reduce(x, codec.Quantize(8), op="mean", options=options)
    except codec.CodecError as e:
        error, text = type(e).__name__, str(e)
        assert digest(x) == before, "an error has changed the tensor"
    return error, text, time.monotonic() - begin, digest(x)


def exchanged_messages(rank, size, first, timeout):
    """Rank 1 sends a message with each of the tags 1 and 2; return the messages that rank 0 receives, or errors."""
    found = []
    for tag in (1, 2):
        options = codec.options(timeout=timeout)
        try:
            if rank:
                codec.torch.send(b"%s, tag %d" % (first, tag), 0, tag=tag, options=options)
                found.append("sent")
            else:
                found.append(codec.torch.recv(1, tag=tag, options=options))
        except codec.CodecError as e:
            found.append(type(e).__name__)
    return found


def replayed(rank, size, address, data, refused):
    """Rank 1 connects to an address and sends recorded bytes; if `refused`, wait until the connection is closed."""
    if rank:
        with socket.create_connection(address, SLACK) as sock:
            sock.sendall(data)
            if refused:
                with contextlib.suppress(ConnectionError):
                    while sock.recv(1 << 16):
                        pass


def waiting(rank, size):
    """Return the ranks and tags of connections that this rank has accepted and not used."""
    return sorted(endpoint_of(dist.group.WORLD)._listener._waiting)
