"""A rank with a secret that listens: it accepts only ranks that prove the secret, whatever others send or replay."""

import contextlib
import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codec._secret import Secret
from codec._security import Security
from codec.torch.network import handshake
from codec.torch.network.endpoint import Endpoint
from support.handshakes import (
    CLIENT,
    KEY,
    OTHER,
    PAIR,
    SERVER,
    Hand,
    call,
    endpoints,
    group_of,
    hand,
    met,
    publish,
    read,
    refused,
    waiting,
    without_secret,
)
from support.meshes import SECONDS, Group, until
from support.point_to_point import raw as message_of


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    without_secret(monkeypatch)


@pytest.fixture(scope="module")
def served():
    """Return the store and the endpoint of a rank 0 whose group has a secret; tests do not close it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.HashStore()
    return store, Endpoint(Group(0, 2, store), SECONDS, Security(Secret(KEY)))


def begun(store, **how):
    """Say hello to rank 0 as rank 1; return the socket, the fields with the server's nonce, and the server's proof."""
    fields, address = hand(store, **how)
    sock = call(address, fields.hello())
    answer = read(sock, 64)
    return sock, fields._replace(server_nonce=answer[:32]), answer[32:]


# The handshake itself


def test_ranks_with_one_secret_connect():
    _, (zero, one) = endpoints(KEY, KEY)
    met(zero, one)
    _, (zero, one) = endpoints(None, None)
    met(zero, one)


def test_handshake_is_that_of_the_specification(served):
    store, zero = served
    sock, fields, proof = begun(store, tag=6)
    assert proof == fields.proof(KEY, SERVER)
    sock.sendall(fields.proof(KEY, CLIENT))
    assert zero.accept(1, 6, SECONDS) is not None
    sock.close()


def test_client_sends_the_handshake_of_the_specification():
    store = dist.HashStore()
    one = Endpoint(Group(1, 2, store), SECONDS, Security(Secret(KEY)))
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        publish(store, 0, server.getsockname()[1], token=b"t" * 16)
        connected = pool.submit(one.connect, [0], 9, SECONDS)
        sock, _ = server.accept()
        hello = read(sock, 77)
        fields = Hand(b"t" * 16, PAIR, 1, 0, 9, hello[45:])
        assert hello == fields.hello()
        answer = fields.server_nonce + fields.proof(KEY, SERVER)
        for byte in answer:
            sock.sendall(bytes([byte]))
        assert read(sock, 32) == fields.proof(KEY, CLIENT)
        assert len(connected.result()) == 1
        sock.close()


def test_handshake_in_single_bytes_is_complete_and_leaves_the_message_after_it(served):
    store, zero = served
    fields, address = hand(store, tag=7)
    with call(address, b"") as sock:
        for byte in fields.hello():
            sock.sendall(bytes([byte]))
        fields = fields._replace(server_nonce=read(sock, 64)[:32])
        message = message_of(nbytes=3, body=b"abc")
        for byte in fields.proof(KEY, CLIENT) + message:
            sock.sendall(bytes([byte]))
        assert zero.accept(1, 7, SECONDS).receive(10, SECONDS).tobytes() == b"abc"


def test_nonces_are_new_for_each_connection(served):
    store, _ = served
    seen = set()
    for _ in range(5):
        sock, fields, _ = begun(store)
        seen.add(fields.server_nonce)
        sock.close()
    assert len(seen) == 5


# Attacks on a rank that listens


WRONG = {
    "zeros": lambda fields, server: bytes(32),
    "reflected proof": lambda fields, server: server,
    "another secret": lambda fields, server: fields.proof(OTHER, CLIENT),
    "no secret": lambda fields, server: fields.proof(b"", CLIENT),
    "another rank": lambda fields, server: fields._replace(client=0).proof(KEY, CLIENT),
    "another server": lambda fields, server: fields._replace(server=1).proof(KEY, CLIENT),
    "another tag": lambda fields, server: fields._replace(tag=4).proof(KEY, CLIENT),
    "another group": lambda fields, server: fields._replace(group=group_of("1", [0, 1])).proof(KEY, CLIENT),
    "another port": lambda fields, server: fields._replace(token=bytes(16)).proof(KEY, CLIENT),
    "exchanged nonces": lambda fields, server: fields._replace(
        client_nonce=fields.server_nonce, server_nonce=fields.client_nonce
    ).proof(KEY, CLIENT),
    "one bit": lambda fields, server: bytes([fields.proof(KEY, CLIENT)[0] ^ 1]) + fields.proof(KEY, CLIENT)[1:],
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_proof_is_refused_with_one_line(served, caplog, name):
    store, zero = served
    zero._listener._warnings = 0
    sock, fields, server = begun(store)
    port = sock.getsockname()[1]
    sock.sendall(WRONG[name](fields, server))
    assert refused(sock)
    assert waiting(zero) == {}
    (record,) = [r for r in caplog.records if f"port {port}," in r.getMessage()]
    assert record.name == "codec.torch"
    assert record.levelno == logging.WARNING
    origin = f"127.0.0.1, port {port}, as rank 1 with tag 5"
    assert record.getMessage() == f"rank 0 has refused a connection from {origin}: its proof of the secret is wrong"


def test_replayed_handshake_is_refused(served):
    store, zero = served
    sock, fields, _ = begun(store, tag=8)
    proof = fields.proof(KEY, CLIENT)
    sock.sendall(proof)
    assert zero.accept(1, 8, SECONDS) is not None
    sock.close()
    again, other, _ = begun(store, tag=8)  # the same hello
    assert other.server_nonce != fields.server_nonce
    again.sendall(proof)
    assert refused(again)
    assert waiting(zero) == {}


def test_hello_of_a_rank_without_the_secret_is_refused_and_the_true_rank_connects(caplog):
    store, (zero, one) = endpoints(KEY, KEY)
    fields, address = hand(store)
    for _ in range(3):
        assert refused(call(address, fields._replace(flags=0).hello() + b"CDPM"))
    assert "its hello says that rank 0 has a secret, and rank 1 has none" in caplog.text
    met(zero, one)  # although the hello has named rank 1, as its address says that it has a secret
    assert waiting(zero) == {}


@pytest.mark.parametrize("nbytes", [0, 1, 44, 45, 46, 76, 77, 108])
def test_truncated_handshakes_are_closed(served, nbytes):
    store, zero = served
    sock, fields, _ = begun(store)
    whole = fields.hello() + fields.proof(KEY, CLIENT)
    sock.close()
    fields, address = hand(store)
    sock = call(address, whole[:nbytes])
    sock.shutdown(socket.SHUT_WR)
    assert len(read(sock, 1000)) in (0, 64)
    sock.close()
    assert waiting(zero) == {}


def test_slow_handshakes_end_in_time_and_stop_no_other_one(monkeypatch, caplog):
    monkeypatch.setattr(handshake, "_HELLO_SECONDS", 0.3)
    store, (zero, one) = endpoints(KEY, KEY)
    fields, address = hand(store)
    slow = [call(address, fields.hello()), call(address, fields.hello()[:50]), call(address, b"")]
    met(zero, one)  # while three handshakes are incomplete
    begin = time.monotonic()
    for sock in slow:
        read(sock, 1000)  # returns once the connection is closed
        sock.close()
    assert time.monotonic() - begin < SECONDS
    until(lambda: zero._listener._strangers == {})
    assert caplog.text.count("has not proven the secret in time") == 2


def test_number_of_incomplete_handshakes_is_bounded(monkeypatch):
    monkeypatch.setattr(handshake, "_MOST_STRANGERS", 6)
    store, (zero, one) = endpoints(KEY, KEY)
    fields, address = hand(store)
    many = [call(address, fields.hello()) for _ in range(40)]
    met(zero, one)
    until(lambda: len(zero._listener._strangers) <= 8)
    for sock in many:
        sock.close()


def test_port_scanners_are_closed_without_a_line(served, caplog):
    store, zero = served
    _, address = hand(store)
    for first in (b"GET / HTTP/1.1\r\n\r\n" * 5, b"\x16\x03\x01" + bytes(200), os.urandom(77), b"CDPH" + bytes(73)):
        sock = call(address, first)
        port = sock.getsockname()[1]
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        assert refused(sock)
        assert f"port {port}," not in caplog.text
    assert waiting(zero) == {}


def test_connection_that_breaks_after_its_proof_does_not_end_the_listener(monkeypatch):
    store, (zero, one) = endpoints(KEY, KEY)
    made = handshake.PeerConnection

    def broken(sock, peer):
        monkeypatch.setattr(handshake, "PeerConnection", made)
        raise OSError("the peer has reset the connection")

    monkeypatch.setattr(handshake, "PeerConnection", broken)
    sock, fields, _ = begun(store)
    sock.sendall(fields.proof(KEY, CLIENT))
    assert refused(sock)
    assert waiting(zero) == {}
    met(zero, one)


def test_attacker_cannot_fill_the_log(caplog, monkeypatch):
    monkeypatch.setattr(handshake, "_MOST_WARNINGS", 3)
    store, (zero, _) = endpoints(KEY, KEY)
    for _ in range(6):
        sock, *_ = begun(store)
        sock.sendall(bytes(32))
        assert refused(sock)
    assert caplog.text.count("has refused") == 3
    assert caplog.records[-1].getMessage().endswith("further ones are not logged")
    assert waiting(zero) == {}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2), st.binary(max_size=140), st.randoms(use_true_random=False))
def test_random_bytes_never_pass(served, steps, data, random):
    """Bytes after none, one or both valid parts of a handshake; the second part with one changed byte."""
    store, zero = served
    if steps == 0:
        sock = call(hand(store)[1], data)
    else:
        sock, fields, _ = begun(store)
        proof = bytearray(fields.proof(KEY, CLIENT))
        proof[random.randrange(32)] ^= random.randrange(1, 256)
        with contextlib.suppress(OSError):
            sock.sendall(data if steps == 1 else bytes(proof) + data)
    with sock:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        assert read(sock, 1) == b""
    assert waiting(zero) == {}
