"""TlsSocket below handshakes: interrupted writes, bytes that poll does not report, and ends; and meshes over it."""

import os
import random
import select
import socket
import subprocess
import threading
import time

import pytest
import torch.distributed as dist

import codec
from codec._tls import Tls
from codec.torch.network import mesh as meshes
from codec.torch.network import tls
from codec.torch.network.endpoint import Endpoint
from codec.torch.network.mesh import Mesh
from codec.torch.network.stripe import HEADER_NBYTES
from codec.torch.network.tcp import PeerConnection
from codec.torch.network.tls import TlsSocket
from support.meshes import ABORT, SECONDS, Group, ask, outcome, packed, received, until
from support.tls import PSK, finish, tls_pair


@pytest.fixture
def pair():
    both = tls_pair()
    yield both
    for sock in both:
        sock.close()


def _take(sock, nbytes):
    """Receive bytes, and wait by poll only when recv_into has raised BlockingIOError."""
    found, end = bytearray(), time.monotonic() + SECONDS
    into = memoryview(bytearray(1 << 20))
    while len(found) < nbytes:
        assert time.monotonic() < end
        try:
            n = sock.recv_into(into[: nbytes - len(found)])
        except BlockingIOError:
            assert not sock.buffered
            select.select([sock], [], [], 1)
            continue
        if not n:
            break
        found += into[:n]
    return bytes(found)


def _send(sock, parts):
    """Send parts as connections do, which pass the same bytes again after BlockingIOError; return the blocked calls."""
    parts, blocked = [memoryview(p) for p in parts], 0
    while parts:
        try:
            n = sock.sendmsg(parts[:512])
        except BlockingIOError:
            blocked += 1
            select.select([], [sock], [], 1)
            continue
        while parts and n >= parts[0].nbytes:
            n -= parts.pop(0).nbytes
        if n:
            parts[0] = parts[0][n:]
    return blocked


def test_parts_of_all_sizes_arrive_although_writes_are_interrupted(pair):
    server, client = pair
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    rand = random.Random(1)
    sizes = [1, 0, 40, 65_535, 65_536, 65_537, 3, 1_000_000] + [rand.randrange(200) for _ in range(2000)]
    parts = [rand.randbytes(n) for n in sizes]
    blocked = []
    sender = threading.Thread(target=lambda: blocked.append(_send(client, [p for p in parts if p])))
    sender.start()
    assert _take(server, sum(sizes)) == b"".join(parts)
    sender.join()
    assert blocked[0] > 3


def test_retry_sends_the_first_bytes_once_whatever_the_second_call_passes(pair):
    """After BlockingIOError, the bytes are encrypted already. A caller that passes more after them loses nothing."""
    server, client = pair
    first = os.urandom(1 << 16)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sent = 0
    try:
        while True:
            sent += client.sendmsg([first])
    except BlockingIOError:
        pass
    taken = []
    reader = threading.Thread(target=lambda: taken.append(_take(server, sent + len(first) + 4)))
    reader.start()
    blocked = _send(client, [first, b"more"])
    reader.join()
    assert taken == [first * (sent // len(first) + 1) + b"more"]
    assert blocked >= 0


def test_small_parts_travel_in_one_record(pair, monkeypatch):
    server, client = pair
    assert client.sendmsg([b"header", b"body", b""]) == 10
    server._sock.setblocking(True)
    raw = server._sock.recv(1000)
    assert len(raw) == 5 + 10 + 1 + 16  # header of the record, bytes, type of content, tag
    assert b"header" not in raw


def test_bytes_that_poll_does_not_report_are_buffered(pair):
    server, client = pair
    client.sendmsg([bytes(40_000)])
    until(lambda: select.select([server], [], [], 1)[0])
    time.sleep(0.05)
    assert server.recv_into(bytearray(10)) == 10
    assert not select.select([server], [], [], 0)[0]
    assert server.buffered
    assert _take(server, 39_990) == bytes(39_990)
    with pytest.raises(BlockingIOError):
        server.recv_into(bytearray(10))
    assert not server.buffered


def test_end_of_the_connection_is_no_error(pair):
    server, client = pair
    client.sendmsg([b"last"])
    client.close()
    assert _take(server, 5) == b"last"
    assert server.recv_into(bytearray(1)) == 0


@pytest.mark.parametrize("change", ["flip", "replay", "swap", "drop"])
def test_changed_records_are_refused(pair, change):
    server, client = pair
    records = []
    for text in (b"one", b"two"):
        client._sock.setblocking(True)
        a, b = socket.socketpair()
        sock, client._sock = client._sock, a
        client.sendmsg([text])
        client._sock = sock
        records.append(b.recv(1000))
        a.close()
        b.close()
    one, two = records
    flipped = bytearray(one)
    flipped[10] ^= 1
    wrong = {"flip": bytes(flipped), "replay": one + one, "swap": two + one, "drop": two}[change]
    client._sock.sendall(wrong)
    with pytest.raises(tls.TlsError, match="it has sent bytes that were changed on the way"):
        _take(server, 6)


@pytest.fixture
def openssl():
    """Return a TlsSocket that a process of ``openssl s_client`` has connected to, and the process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = ["openssl", "s_client", "-quiet", "-tls1_3", "-connect", f"127.0.0.1:{server.getsockname()[1]}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([*command, "-no_ign_eof"], **pipes) as process:
            sock, _ = server.accept()
            sock.setblocking(False)
            mine = TlsSocket(sock, Tls().contexts()[0], server=True)
            finish(mine.handshake())
            yield mine, process
            process.kill()
            mine.close()


def test_keys_are_updated_when_the_other_side_requests_it(openssl):
    sock, process = openssl
    for i in range(3):
        process.stdin.write(b"K\n")
        process.stdin.flush()
        assert select.select([sock], [], [], SECONDS)[0]
        with pytest.raises(BlockingIOError):  # a record without bytes of the caller
            sock.recv_into(bytearray(1))
        assert sock.sendmsg([b"%d\n" % i]) == 2
        assert process.stdout.readline() == b"%d\n" % i
        process.stdin.write(b"message %d\n" % i)
        process.stdin.flush()
        assert _take(sock, 10) == b"message %d\n" % i


def test_both_directions_at_once(pair):
    data = os.urandom(5_000_000)
    taken = [b"", b""]
    threads = []
    for i, sock in enumerate(pair):
        threads.append(threading.Thread(target=_send, args=(sock, [data])))
        threads.append(threading.Thread(target=lambda i=i, sock=sock: taken.__setitem__(i, _take(sock, len(data)))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken == [data, data]


def test_connection_sends_and_receives_at_once(pair):
    here, there = (PeerConnection(sock, peer) for peer, sock in enumerate(pair))
    data = os.urandom(9_000_000)
    threads = [threading.Thread(target=c.send, args=([data[:7], data[7:]], SECONDS)) for c in (here, there)]
    for thread in threads:
        thread.start()
    for connection in (here, there):
        assert connection.receive(1 << 24, SECONDS).tobytes() == data
    for thread in threads:
        thread.join()
    here.check()
    there.close()
    with pytest.raises(codec.PeerError):
        here.receive(1, SECONDS)
    with pytest.raises(codec.PeerError):
        here.check()


# Meshes


@pytest.fixture
def hand(pair):
    """Return a mesh, and the socket of rank 1 that a test writes to."""
    server, client = pair
    mesh = Mesh(0, {1: [server]})
    yield mesh, client
    mesh.close()


def test_messages_that_arrived_before_the_mesh_are_read(pair):
    server, client = pair
    client.sendmsg([packed(0, b"early")])
    until(lambda: select.select([server], [], [], 1)[0])
    time.sleep(0.02)
    server._fetch()  # as a handshake does, which reads as much as has arrived
    mesh = Mesh(0, {1: [server]})
    mesh.begin(0)
    assert received(ask(mesh, 0)) == b"early"
    mesh.close()


def test_messages_after_the_turn_of_a_connection_are_read(hand, monkeypatch):
    """The network thread serves another connection after _TURN_NBYTES, although poll may not report this one again."""
    monkeypatch.setattr(meshes, "_TURN_NBYTES", 100)
    mesh, client = hand
    mesh.begin(0)
    receives = [ask(mesh, 0, index=i) for i in range(200)]
    _send(client, [b"".join(packed(0, b"%03d" % i, index=i) for i in range(200))])
    assert [received(r) for r in receives] == [b"%03d" % i for i in range(200)]


def test_early_messages_wait_in_a_paused_connection_and_are_read_later(hand):
    mesh, client = hand
    messages = b"".join(packed(1, bytes(60_000), index=i) for i in range(3000))  # 180 MB, more than a rank's share
    sender = threading.Thread(target=_send, args=(client, [messages]), daemon=True)
    sender.start()
    until(lambda: mesh._paused)
    mesh.begin(0)
    mesh.begin(1)
    for i in range(3000):
        assert outcome(ask(mesh, 1, index=i)) is None
    sender.join()


def test_mesh_sends_while_it_receives(pair):
    a, b = Mesh(0, {1: [pair[0]]}), Mesh(1, {0: [pair[1]]})
    data = os.urandom(6_000_000)
    for mesh in (a, b):
        mesh.begin(0)
    receives = [ask(mesh, 0, index=i, source=1 - mesh.rank, most=1 << 24) for mesh in (a, b) for i in range(4)]
    sends = [mesh.send(1 - mesh.rank, 0, 0, i, 7, [data]) for mesh in (a, b) for i in range(4)]
    for wait in sends:
        assert outcome(wait) is None
    for receive in receives:
        assert received(receive) == data
    a.abort(0, b"given up")
    wait = b.explanation(0, 0)
    assert outcome(wait) is None
    a.close()
    b.begin(1)
    assert "rank 0 is gone" in str(outcome(ask(b, 1, source=0)))
    b.close()


@pytest.mark.parametrize(
    "first", [packed(0, b"x", magic=b"HTTP"), packed(0, kind=ABORT, nbytes=1 << 20), bytes(HEADER_NBYTES)]
)
def test_bytes_that_are_no_message_end_the_connection(hand, first):
    mesh, client = hand
    mesh.begin(0)
    receive = ask(mesh, 0)
    _send(client, [first])
    assert "not a message" in str(outcome(receive))


def test_record_cut_in_the_middle_is_an_error(hand):
    mesh, client = hand
    mesh.begin(0)
    receive = ask(mesh, 0)
    client._sock.sendall(b"\x17\x03\x03\x40\x00" + bytes(1000))
    client.close()
    assert "rank 1 is gone" in str(outcome(receive))


def test_bytes_without_tls_are_an_error(hand):
    mesh, client = hand
    mesh.begin(0)
    receive = ask(mesh, 0)
    client._sock.sendall(packed(0, b"plain"))
    assert "rank 1 is gone or does not answer: it " in str(outcome(receive))


def test_slow_handshakes_of_many_ranks_are_in_flight_at_the_same_time():
    """A rank connects to 8 others, each of which answers 0.1 s late."""
    store = dist.HashStore()
    ends = [Endpoint(Group(rank, 9, store), SECONDS, PSK) for rank in range(9)]
    for end in ends[:8]:
        steps = end._listener._steps

        def late(*args, steps=steps):
            time.sleep(0.1)
            return steps(*args)

        end._listener._steps = late
    begin = time.monotonic()
    connections = ends[8].connect(range(8), 1, SECONDS)
    assert time.monotonic() - begin < 0.7
    assert [c.peer for c in connections] == list(range(8))
