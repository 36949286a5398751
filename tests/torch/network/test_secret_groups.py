"""A rank with a secret that connects, groups in which ranks differ, and the origin of the secret."""

import itertools
import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

import codec
from codec._secret import Secret
from codec._security import Security
from codec.torch.network.connect import connect
from codec.torch.network.endpoint import Endpoint, endpoint_of, use_security
from support.handshakes import (
    CLIENT,
    KEY,
    OTHER,
    PAIR,
    SERVER,
    Hand,
    address_of,
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


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    without_secret(monkeypatch)


# Attacks on a rank that connects


def _mirror(sock, hello):
    """Answer with the client's own nonce and a proof of the client, as far as an attacker has one."""
    return hello[45:] + hello[45:]


ANSWERS = {
    "zeros": lambda sock, hello: bytes(64),
    "random": lambda sock, hello: os.urandom(64),
    "mirror": _mirror,
    "nothing": lambda sock, hello: b"",
    "half": lambda sock, hello: bytes(40),
    "another secret": lambda sock, hello: (
        bytes(32) + Hand(b"t" * 16, PAIR, 1, 0, 3, hello[45:], bytes(32)).proof(OTHER, SERVER)
    ),
    "proof of a client": lambda sock, hello: (
        bytes(32) + Hand(b"t" * 16, PAIR, 1, 0, 3, hello[45:], bytes(32)).proof(KEY, CLIENT)
    ),
    "another group": lambda sock, hello: (
        bytes(32) + Hand(b"t" * 16, group_of("", [0, 2]), 1, 0, 3, hello[45:], bytes(32)).proof(KEY, SERVER)
    ),
    "another rank": lambda sock, hello: (
        bytes(32) + Hand(b"t" * 16, PAIR, 1, 1, 3, hello[45:], bytes(32)).proof(KEY, SERVER)
    ),
    "replayed": lambda sock, hello: bytes(32) + Hand(b"t" * 16, PAIR, 1, 0, 3, b"o" * 32, bytes(32)).proof(KEY, SERVER),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_port_that_does_not_prove_the_secret_gets_neither_proof_nor_message(name, caplog):
    store = dist.HashStore()
    one = Endpoint(Group(1, 2, store), SECONDS, Security(Secret(KEY)))
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        publish(store, 0, server.getsockname()[1], token=b"t" * 16)
        connected = pool.submit(one.connect, [0], 3, SECONDS)
        sock, _ = server.accept()
        sock.settimeout(SECONDS)
        sock.sendall(ANSWERS[name](sock, read(sock, 77)))
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(codec.PeerError, match=r"rank 0 at 127.0.0.1, port \d+ has .*secret"):
            connected.result()
        assert refused(sock)
    assert len(caplog.records) == 1
    assert "127.0.0.1" in caplog.text


def test_silent_port_is_an_error_at_the_timeout():
    store = dist.HashStore()
    one = Endpoint(Group(1, 2, store), SECONDS, Security(Secret(KEY)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        publish(store, 0, server.getsockname()[1])
        with pytest.raises(codec.PeerError, match=r"rank 0 cannot be reached.*timed out"):
            one.connect([0], 3, 0.2)


def test_nonces_of_a_client_are_new_for_each_connection():
    store, seen = dist.HashStore(), set()
    one = Endpoint(Group(1, 2, store), SECONDS, Security(Secret(KEY)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        publish(store, 0, server.getsockname()[1])
        for _ in range(3):
            with pytest.raises(codec.PeerError):
                one.connect([0], 3, 0.1)
            with server.accept()[0] as sock:
                seen.add(read(sock, 77)[45:])
    assert len(seen) == 3


def test_connection_passed_on_to_another_group_or_rank_is_refused():
    """An attacker writes the address of another group's rank 0 into the store of this group."""
    elsewhere, (other, _) = endpoints(KEY, KEY)
    other._listener._group = group_of("7", [0, 1])  # as if torch had given it another name
    store = dist.HashStore()
    one = Endpoint(Group(1, 2, store), SECONDS, Security(Secret(KEY)))
    token, flags, (_, port) = address_of(elsewhere, 0)
    publish(store, 0, port, token=token, flags=flags)
    with pytest.raises(codec.PeerError, match="has not proven the secret"):
        one.connect([0], 1, SECONDS)
    until(lambda: other._listener._strangers == {})
    assert waiting(other) == {}


def test_flag_in_the_store_gains_an_attacker_nothing(caplog):
    for theirs in (KEY, None):
        store, (zero, _) = endpoints(theirs, KEY)
        token, flags, (_, port) = address_of(store, 0)
        assert flags == (theirs is not None)
        publish(store, 0, port, token=token, flags=1 - flags)  # before rank 1 reads it
        one = Endpoint(Group(1, 2, store), SECONDS, Security(Secret(KEY)))
        with pytest.raises(codec.PeerError, match="secret"):
            one.connect([0], 1, SECONDS)
        until(lambda zero=zero: zero._listener._strangers == {})
        assert waiting(zero) == {}


# Groups in which some ranks have a secret


@pytest.mark.parametrize("has", [h for h in itertools.product((KEY, None), repeat=3) if len(set(h)) == 2])
def test_mixed_ranks_all_raise_at_once_and_name_both_kinds(has):
    store = dist.HashStore()
    groups = [Group(rank, 3, store) for rank in range(3)]
    for group, key in zip(groups, has, strict=True):
        use_security(group, Security(key and Secret(key)))

    def run(group):
        with pytest.raises(codec.PeerError) as raised:
            connect(group, timedelta(seconds=2 * SECONDS))
        return str(raised.value)

    begin = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        errors = list(pool.map(run, groups))
    assert time.monotonic() - begin < SECONDS
    for error in errors:
        named = [(a, b) for a in range(3) for b in range(3) if f"rank {a} has a secret, and rank {b} has none" in error]
        assert [(has[a], has[b]) for a, b in named] == [(KEY, None)], error


def test_ranks_with_different_secrets_raise():
    _, (zero, one) = endpoints(KEY, OTHER)
    with pytest.raises(codec.PeerError, match=r"rank 0 .* has not proven the secret of this rank: set the same secret"):
        one.connect([0], 1, SECONDS)
    with pytest.raises(codec.PeerError, match=r"rank 1 has not connected .*refused a connection from .*as rank 1"):
        zero.accept(1, 1, 0.5)


def test_new_secret_after_a_restart_refuses_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    monkeypatch.setenv("CODEC_SECRET_FILE", str(file))
    store, ends = dist.HashStore(), []
    for key in (KEY, OTHER):
        file.write_bytes(key + b"\n")
        pair = [endpoint_of(group) for group in (Group(0, 2, store), Group(1, 2, store))]
        met(*pair)
        ends.append(pair)
    fields, address = hand(store)
    sock = call(address, fields.hello())
    fields = fields._replace(server_nonce=read(sock, 64)[:32])
    sock.sendall(fields.proof(KEY, CLIENT))
    assert refused(sock)
    met(*ends[0], tag=6)  # old connections and endpoints keep their secret


# The secret


def test_secret_of_options_applies_to_the_first_call_of_a_group():
    store = dist.HashStore()
    group = Group(0, 2, store)
    use_security(group, codec.options(secret=KEY.decode()).security)
    zero = endpoint_of(group)
    assert address_of(store, 0)[1] == 1
    use_security(group, Security(Secret(KEY)))  # the same one
    with pytest.raises(codec.ArgumentError, match="already communicates in the group with another secret"):
        use_security(group, Security(Secret(OTHER)))
    plain = Group(0, 2, dist.HashStore())
    endpoint_of(plain)
    with pytest.raises(codec.ArgumentError, match="with no secret: pass the secret to the first call"):
        use_security(plain, Security(Secret(KEY)))
    assert waiting(zero) == {}


def test_options_override_the_environment(monkeypatch):
    monkeypatch.setenv("CODEC_SECRET", OTHER.decode())
    store = dist.HashStore()
    groups = [Group(rank, 2, store) for rank in range(2)]
    use_security(groups[0], Security(Secret(OTHER)))
    met(*map(endpoint_of, groups))
    store = dist.HashStore()
    groups = [Group(rank, 2, store) for rank in range(2)]
    use_security(groups[0], Security(Secret(KEY)))
    zero, one = map(endpoint_of, groups)
    with pytest.raises(codec.PeerError, match="has not proven"):
        one.connect([0], 0, SECONDS)
    assert waiting(zero) == {}


def test_bad_secret_in_the_environment_opens_no_port(monkeypatch):
    monkeypatch.setenv("CODEC_SECRET", "")
    store = dist.HashStore()
    with pytest.raises(codec.ArgumentError, match="CODEC_SECRET must have 16 to 4096 bytes, got 0"):
        endpoint_of(Group(0, 2, store))
    assert not store.check(["codec/point-to-point/0"])


def test_secret_is_in_no_log_and_no_error(caplog):
    caplog.set_level(logging.DEBUG)
    _, (zero, one) = endpoints(KEY, OTHER)
    with pytest.raises(codec.PeerError) as raised:
        one.connect([0], 1, SECONDS)
    with pytest.raises(codec.PeerError) as late:
        zero.accept(1, 1, 0.2)
    _, (zero, one) = endpoints(KEY, None)
    with pytest.raises(codec.PeerError) as mixed:
        one.connect([0], 1, SECONDS)
    text = caplog.text + "".join(map(str, (raised.value, late.value, mixed.value)))
    for key in (KEY, OTHER):
        assert key.decode()[:8] not in text
        assert key.hex()[:16] not in text


def test_handshakes_of_many_ranks_are_in_flight_at_the_same_time():
    """A rank connects to 12 ports that each wait 0.1 s before they answer."""
    store = dist.HashStore()
    last = Endpoint(Group(12, 13, store), SECONDS, Security(Secret(KEY)))
    group = group_of("", list(range(13)))
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(12)]

    def answer(rank):
        sock, _ = servers[rank].accept()
        fields = Hand(bytes(16), group, 12, rank, 1, read(sock, 77)[45:])
        time.sleep(0.1)
        with sock:
            sock.sendall(fields.server_nonce + fields.proof(KEY, SERVER))
            return read(sock, 32) == fields.proof(KEY, CLIENT)

    for rank, server in enumerate(servers):
        publish(store, rank, server.getsockname()[1])
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(answer, rank) for rank in range(12)]
        begin = time.monotonic()
        connections = last.connect(range(12), 1, SECONDS)
        assert time.monotonic() - begin < 1.0
        assert all(found.result() for found in answers)
    assert [c.peer for c in connections] == list(range(12))
    for server in servers:
        server.close()


def test_difference_is_named_although_another_rank_is_silent():
    store, ends = endpoints(None, KEY, KEY)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        publish(store, 1, silent.getsockname()[1])
        with pytest.raises(codec.PeerError, match="rank 2 has a secret, and rank 0 has none"):
            ends[2].connect([0, 1], 1, 0.3)
