"""Connections of ranks with TLS: attackers in the path, and strangers on both sides."""

import contextlib
import os
import signal
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import codec
from codec._secret import Secret
from codec._security import Security
from codec._tls import Tls, tls_of
from codec.torch.network import handshake
from codec.torch.network.endpoint import Endpoint
from support.handshakes import CLIENT, KEY, PAIR, Hand, call, hand, met, publish, read, refused, waiting
from support.meshes import SECONDS, Group, until
from support.point_to_point import raw as message_of
from support.tls import PSK, Middle, contexts, refusals, secured


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in [name for name in os.environ if name.startswith(("CODEC_SECRET", "CODEC_TLS"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def served():
    """Return the store and the endpoint of a rank 0 that uses TLS and a secret; tests do not close it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.HashStore()
    return store, Endpoint(Group(0, 2, store), SECONDS, PSK)


# Attackers in the path


def _reads(middle, pair):
    """Send a message; return True if the man in the middle has read it."""
    here, there = pair
    there.send([b"a gradient of a private model"], SECONDS)
    assert here.receive(100, SECONDS).tobytes() == b"a gradient of a private model"
    return b"gradient" in b"".join(middle.seen)


def _late(store, security):
    """Return an endpoint of rank 1, which reads the address of rank 0 from now on."""
    return Endpoint(Group(1, 2, store), SECONDS, security)


def test_observer_of_a_connection_reads_nothing():
    for security, reads in ((Security(Secret(KEY)), True), (PSK, False)):
        store, (zero, _) = secured(security, security)
        with Middle(store) as middle:
            assert _reads(middle, met(zero, _late(store, security))) == reads


def _attacker():
    """Return contexts of a man in the middle without the secret: they trust everyone."""
    server, client = Tls().contexts()
    return server, client


def test_man_in_the_middle_without_the_secret_is_caught_by_both_ranks():
    """The attacker ends TLS with a new certificate, and passes on nonces and proofs."""
    store, (zero, _) = secured(PSK, PSK)
    with Middle(store, *_attacker()) as middle:
        client, server = refusals(zero, _late(store, PSK))
    assert "has not proven the secret of this rank" in client
    assert "it has ended before it has proven the secret" in server
    assert [len(seen) for seen in middle.seen] == [32, 64]  # both nonces, and the proof of the server


def test_man_in_the_middle_with_the_certificate_of_the_server_is_caught(ca):
    """The attacker has the certificate and the key of rank 0, but not the secret."""
    chain = ca.issue()
    security = Security(Secret(KEY), tls_of(contexts(ca, chain)))
    store, (zero, _) = secured(security, security)
    server, client = contexts(ca, chain)
    client.check_hostname = False
    with Middle(store, server, client) as middle:
        client, _ = refusals(zero, _late(store, security))
    assert "has not proven the secret of this rank" in client
    assert len(middle.seen[1]) == 64


def test_man_in_the_middle_without_a_certificate_is_caught(ca):
    security = Security(tls=tls_of(contexts(ca, ca.issue())))
    store, (zero, _) = secured(security, security)
    with Middle(store, *_attacker()):
        client, _ = refusals(zero, _late(store, security))
    assert "it has a certificate that is not trusted" in client


@pytest.mark.parametrize("where", ["handshake", "message"])
def test_changed_bytes_end_the_connection(where):
    store, (zero, _) = secured(PSK, PSK)
    changing = [where == "handshake"]

    def change(data):
        if changing[0]:
            data = bytearray(data)
            data[len(data) // 2] ^= 1
        return bytes(data)

    with Middle(store, change=change):
        one = _late(store, PSK)
        if changing[0]:
            with pytest.raises(codec.PeerError, match=r"rank 0 at .* (TLS|secret)"):
                one.connect([0], 1, SECONDS)
            return
        (there,) = one.connect([0], 1, SECONDS)
        here = zero.accept(1, 1, SECONDS)
        changing[0] = True
        there.send([b"hello"], SECONDS)
        with pytest.raises(codec.PeerError, match="rank 1 is gone: it has sent bytes that were changed on the way"):
            here.receive(100, SECONDS)


@pytest.mark.parametrize("nbytes", [1, 5, 30, 100_000, 1_000_000])
def test_connection_cut_within_a_record_is_an_error_at_once(nbytes):
    store, (zero, _) = secured(PSK, PSK)
    left, ends = [1 << 60], []

    def change(data):
        part = data[: left[0]]
        left[0] -= len(part)
        return part if left[0] else cut(part)

    def cut(part):
        ends.append(part)
        return part

    with Middle(store, change=change) as middle, ThreadPoolExecutor(1) as pool:
        (there,) = _late(store, PSK).connect([0], 1, SECONDS)
        here = zero.accept(1, 1, SECONDS)
        left[0] = nbytes
        sent = pool.submit(there.send, [bytes(3_000_000)], SECONDS)
        until(lambda: ends)
        middle.close_connections()
        begin = time.monotonic()
        with pytest.raises(codec.PeerError, match="rank 1 is gone"):
            here.receive(1 << 30, SECONDS)
        assert time.monotonic() - begin < SECONDS / 2
        with contextlib.suppress(codec.PeerError):
            sent.result()


# Strangers


def test_strangers_without_the_token_never_reach_openssl(served, monkeypatch):
    store, zero = served
    seen = []
    monkeypatch.setattr(handshake, "TlsSocket", lambda *args, **how: seen.append(args))
    _, address = hand(store)
    wrong = Hand(bytes(16), PAIR, 1, 0, 5, flags=3)
    for first in (
        b"\x16\x03\x01\x02\x00\x01" + bytes(600),
        wrong.hello(),
        b"GET / HTTP/1.1\r\n\r\n" * 5,
        os.urandom(200),
    ):
        sock = call(address, first)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        assert refused(sock)
    assert seen == []
    assert waiting(zero) == {}


@pytest.mark.parametrize("flags", [4, 7, 128, 255])
def test_unknown_flags_are_refused(served, flags):
    store, zero = served
    fields, address = hand(store, flags=flags)
    assert refused(call(address, fields.hello()))
    assert waiting(zero) == {}


GARBAGE = {
    "zeros": bytes(500),
    "random": os.urandom(500),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "record of alerts": b"\x15\x03\x03\x00\x02\x02\x28",
    "huge record": b"\x16\x03\x03\xff\xff" + bytes(70_000),
    "application data": b"\x17\x03\x03\x00\x20" + bytes(32),
    "message": b"CDPM" + bytes(12),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_bytes_after_the_hello_that_are_not_tls_are_refused_with_one_line(served, caplog, name):
    store, zero = served
    zero._listener._warnings = 0
    fields, address = hand(store, flags=3)
    sock = call(address, fields.hello())
    port = sock.getsockname()[1]
    with contextlib.suppress(OSError):
        sock.sendall(GARBAGE[name])
        sock.shutdown(socket.SHUT_WR)
    read(sock, 1000)  # an alert, or nothing
    sock.close()
    until(lambda: any(f"port {port}," in r.getMessage() for r in caplog.records))
    (record,) = [r for r in caplog.records if f"port {port}," in r.getMessage()]
    assert "as rank 1 with tag 5: it has " in record.getMessage() or "it breaks TLS" in record.getMessage()
    assert waiting(zero) == {}


def _through(store, **how):
    """Say hello to rank 0 as rank 1; return the fields with the binding, and a blocking socket inside of TLS."""
    fields, address = hand(store, flags=3, **how)
    sock = call(address, fields.hello())
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    inside = made.wrap_socket(sock)
    import hashlib

    return fields._replace(binding=hashlib.sha256(inside.get_channel_binding("tls-unique")).digest()), inside


def test_handshake_is_that_of_the_specification(served):
    store, zero = served
    fields, sock = _through(store, tag=61)
    for byte in fields.client_nonce:
        sock.sendall(bytes([byte]))
    fields = fields._replace(server_nonce=read(sock, 64)[:32])
    sock.sendall(fields.proof(KEY, CLIENT) + message_of(nbytes=3, body=b"abc"))
    assert zero.accept(1, 61, SECONDS).receive(10, SECONDS).tobytes() == b"abc"
    sock.close()


@pytest.mark.parametrize("wrong", [{"binding": bytes(32)}, {"binding": b"x" * 32}, {"flags": 1}])
def test_proof_for_another_channel_is_refused(served, wrong):
    store, zero = served
    fields, sock = _through(store)
    sock.sendall(fields.client_nonce)
    fields = fields._replace(server_nonce=read(sock, 64)[:32], **wrong)
    sock.sendall(fields.proof(KEY, CLIENT))
    assert refused(sock)
    assert waiting(zero) == {}


def test_slow_and_frozen_handshakes_end_in_time_and_stop_no_other_one(monkeypatch, caplog):
    monkeypatch.setattr(handshake, "_HELLO_SECONDS", 0.3)
    store, (zero, one) = secured(PSK, PSK)
    fields, address = hand(store, flags=3)
    slow = [
        call(address, fields.hello()),
        call(address, fields.hello() + b"\x16\x03\x01\x02\x00\x01"),
        _through(store)[1],
    ]
    met(zero, one)  # while three handshakes are incomplete
    for sock in slow:
        read(sock, 1000)  # returns once the connection is closed
        sock.close()
    until(lambda: zero._listener._strangers == {})
    assert caplog.text.count("it has not completed TLS in time") == 2
    assert caplog.text.count("it has not proven the secret in time") == 1


def test_number_of_incomplete_handshakes_is_bounded(monkeypatch):
    monkeypatch.setattr(handshake, "_MOST_STRANGERS", 6)
    store, (zero, one) = secured(PSK, PSK)
    fields, address = hand(store, flags=3)
    many = [call(address, fields.hello() + b"\x16\x03\x01\x20\x00\x01\x00\x1f\xfc" + bytes(3000)) for _ in range(40)]
    met(zero, one)
    until(lambda: len(zero._listener._strangers) <= 8)
    for sock in many:
        sock.close()


def test_endless_handshake_is_refused(served, caplog):
    """A stranger sends handshake records that form no message; memory is bounded by the limit."""
    store, zero = served
    zero._listener._warnings = 0
    fields, address = hand(store, flags=3)
    sock = call(address, fields.hello())
    hello = b"\x01\x01\xff\xfc\x03\x03"  # a ClientHello of 131,068 bytes
    with contextlib.suppress(OSError):
        for n in range(30):
            part = (hello if not n else b"") + bytes(8000)
            sock.sendall(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part)
    read(sock, 1000)
    sock.close()
    until(lambda: "a handshake of TLS that is too long" in caplog.text)
    assert waiting(zero) == {}


@pytest.mark.parametrize("answer", [b"", b"\x15\x03\x03\x00\x02\x02\x28", bytes(200), b"\x16\x03\x03\x00\x05hello"])
def test_port_that_does_not_speak_tls_is_an_error(answer):
    store = dist.HashStore()
    one = Endpoint(Group(1, 2, store), SECONDS, PSK)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        publish(store, 0, server.getsockname()[1], flags=3)
        connected = pool.submit(one.connect, [0], 3, SECONDS)
        sock, _ = server.accept()
        sock.sendall(answer)
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(codec.PeerError, match=r"rank 0 at 127.0.0.1, port \d+ .*TLS"):
            connected.result()
        sock.close()


def test_silent_port_is_an_error_at_the_timeout():
    store = dist.HashStore()
    one = Endpoint(Group(1, 2, store), SECONDS, PSK)
    with socket.create_server(("127.0.0.1", 0)) as server:
        publish(store, 0, server.getsockname()[1], flags=3)
        with pytest.raises(codec.PeerError, match=r"rank 0 cannot be reached.*timed out"):
            one.connect([0], 3, 0.2)


# Processes


@pytest.mark.parametrize("security", [Security(Secret(KEY)), PSK], ids=["secret", "tls"])
def test_child_of_fork_uses_no_connection_of_its_parent_and_can_connect_anew(security):
    _, (zero, one) = secured(security, security)
    here, there = met(zero, one)
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        code = 1
        try:
            with contextlib.suppress(codec.PeerError):
                zero.check_process()
                os._exit(2)
            with contextlib.suppress(codec.PeerError):
                there.send([b"from the child"], SECONDS)
                os._exit(3)
            here.close()
            _, (a, b) = secured(security, security)
            met(a, b)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    there.send([b"of the parent"], SECONDS)
    assert here.receive(20, SECONDS).tobytes() == b"of the parent"
