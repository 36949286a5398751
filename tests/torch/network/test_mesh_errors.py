"""Errors of a mesh, the layer below collectives: aborts, broken and closed connections."""

import gc
import itertools
import socket
import struct
import sys
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest

import codec
from codec.torch.network import connect, inbox
from codec.torch.network.inbox import Refused
from codec.torch.network.mesh import Mesh
from support.fault_lines import at_line, raising
from support.meshes import ABORT, SECONDS, SIGNATURE, ask, outcome, packed, received, tcp_pair, until


def test_abort_ends_waits_and_refuses_later_ones_but_not_those_of_other_collectives(two):
    zero, one = two
    for number in (0, 1):
        zero.begin(number)
        one.begin(number)
    first, other = ask(zero, 0), ask(zero, 1)
    one.abort(0, b"reason")
    error = outcome(first)
    assert isinstance(error, Refused)
    assert (error.source, error.body) == (1, b"reason")
    assert isinstance(outcome(ask(zero, 0, index=1)), Refused)
    assert outcome(zero.explanation(0, 1)) is None
    assert zero._inboxes[0].aborts == {1: b"reason"}
    one.send(0, 1, 0, 0, SIGNATURE, [b"other"])
    assert received(other) == b"other"


def test_first_abort_of_a_rank_counts(hand):
    mesh, peer = hand
    peer.sendall(packed(5, b"first", kind=ABORT) + packed(5, b"second", kind=ABORT) + packed(3, b"next"))
    mesh.begin(3)
    assert received(ask(mesh, 3)) == b"next"
    assert mesh.begin(5).aborts == {1: b"first"}
    mesh.end(5)
    assert mesh._inboxes.early == {1: 0}


def test_abort_before_the_collective_has_begun_refuses_its_first_wait(hand):
    mesh, peer = hand
    peer.sendall(packed(5, b"early", kind=ABORT) + packed(3, b"next"))
    mesh.begin(3)
    assert received(ask(mesh, 3)) == b"next"
    mesh.begin(5)
    assert isinstance(outcome(ask(mesh, 5)), Refused)


@pytest.mark.parametrize("end", ["loss", "close"])
def test_wait_for_an_explanation_ends_with_the_connection(hand, end):
    mesh, peer = hand
    mesh.begin(0)
    wait = mesh.explanation(0, 1)
    if end == "loss":
        peer.close()
    else:
        mesh.close()
    assert isinstance(outcome(wait), codec.PeerError)


def test_all_waits_for_an_explanation_end(hand):
    """If several parts of a collective detect a mismatch and wait for the peer's explanation, all waits end."""
    mesh, peer = hand
    mesh.begin(0)
    waits = [mesh.explanation(0, 1) for _ in range(2)]
    peer.sendall(packed(0, b"reason", kind=ABORT))
    assert [outcome(wait) for wait in [*waits, mesh.explanation(0, 1)]] == [None] * 3


# Tests of lost ranks


def test_memory_of_messages_that_are_being_sent_may_be_reused_after_an_abort():
    """The receiver, which may still wait for these messages, must see the error, and no damage."""
    mine, peer = tcp_pair()
    mesh, values = Mesh(0, {1: [mine]}), bytearray(b"x" * 20_000_000)
    mesh.begin(0)
    expected = packed(0, bytes(values))
    for index in (0, 1):  # the first one is partly written, the second one not at all
        mesh.send(1, 0, 0, index, SIGNATURE, [values])
    mesh.abort(0, b"reason")
    values[:] = bytes(len(values))
    expected += packed(0, b"x" * len(values), index=1) + packed(0, b"reason", kind=ABORT, signature=0)
    found = bytearray()
    while len(found) < len(expected):
        found += peer.recv(1 << 20)
    assert found == expected
    mesh.close()
    peer.close()


def test_lost_rank_ends_waits_for_it_and_no_others():
    pairs = [tcp_pair(), tcp_pair()]
    mesh = Mesh(0, {1: [pairs[0][0]], 2: [pairs[1][0]]})
    mesh.begin(0)
    of_one, of_two = ask(mesh, 0, source=1), ask(mesh, 0, source=2)
    pairs[0][1].close()
    error = outcome(of_one)
    assert isinstance(error, codec.PeerError)
    assert "rank 1" in str(error)
    assert isinstance(outcome(ask(mesh, 0, source=1, index=1)), codec.PeerError)
    assert not of_two.done
    pairs[1][1].sendall(packed(0, b"two"))
    assert received(of_two) == b"two"
    with pytest.raises(codec.PeerError, match="rank 1"):
        mesh.send(1, 0, 0, 0, SIGNATURE, [b""])
    with pytest.raises(codec.PeerError, match="rank 1"):
        mesh.check_open()
    assert mesh.closed
    pairs[1][1].close()


@pytest.mark.parametrize("nbytes", [10, 45])
def test_connection_that_ends_in_a_message_is_lost(hand, nbytes):
    mesh, peer = hand
    mesh.begin(0)
    receive = ask(mesh, 0)
    peer.sendall(packed(0, b"x" * 100)[:nbytes])
    peer.close()
    assert isinstance(outcome(receive), codec.PeerError)


@pytest.mark.parametrize(
    "bytes_",
    [
        packed(0, magic=b"CDPM"),
        packed(0, kind=2),
        packed(0, kind=1 << 31),
        packed(0, nbytes=1 << 60),
        packed(0, nbytes=(1 << 36) + 1),
        packed(0, kind=ABORT, nbytes=(1 << 13) + 1),
    ],
    ids=["magic", "kind", "large kind", "2^60 bytes", "2^36 + 1 bytes", "long abort"],
)
def test_bytes_that_are_no_message_are_a_lost_rank(hand, bytes_):
    mesh, peer = hand
    mesh.begin(0)
    receive = ask(mesh, 0)
    peer.sendall(bytes_)
    error = outcome(receive)
    assert isinstance(error, codec.PeerError)
    assert "not a message" in str(error)


def test_paused_connection_that_breaks_is_noticed_once(hand, monkeypatch):
    monkeypatch.setattr(inbox, "EARLY_SHARES", (1 << 10, 1 << 10))
    mesh, peer = hand
    peer.sendall(packed(0, b"x" * 5000))
    until(lambda: any(s.paused for s in mesh._by_fd.values()))
    # SO_LINGER with timeout 0: close() resets the connection
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    until(lambda: mesh.has_lost)
    used = mesh.cpu_seconds()
    time.sleep(0.2)
    assert mesh.cpu_seconds() - used < 0.1


def test_send_to_a_rank_that_reads_nothing_does_not_block_and_ends_with_the_connection(hand):
    mesh, peer = hand
    mesh.begin(0)
    begin = time.monotonic()
    sends = [mesh.send(1, 0, 0, i, SIGNATURE, [bytes(1 << 20)]) for i in range(64)]
    assert time.monotonic() - begin < SECONDS
    assert not sends[-1].done
    peer.close()
    assert isinstance(outcome(sends[-1]), codec.PeerError)


# Tests of connecting and closing a mesh


def test_failed_connecting_closes_the_connections_that_were_made(monkeypatch):
    a, b = tcp_pair()

    def accept(peer, tag, seconds):
        raise codec.PeerError(f"rank {peer} has not connected within the timeout")

    connection = SimpleNamespace(peer=0, detach=lambda: a)
    endpoint = SimpleNamespace(connect=lambda peers, tag, seconds: [connection], accept=accept)
    monkeypatch.setattr(connect, "endpoint_of", lambda group, seconds: endpoint)
    with pytest.raises(codec.PeerError, match="rank 2"), b:
        connect.connect(SimpleNamespace(rank=lambda: 1, size=lambda: 3), timedelta(seconds=1))
    assert a.fileno() == -1


def test_close_from_another_thread_ends_all_waits_here_and_on_the_peer(two):
    zero, one = two
    zero.begin(0)
    one.begin(0)
    waits = [ask(zero, 0), ask(one, 0, source=0), ask(zero, 0, index=1)]
    threading.Thread(target=zero.close).start()
    assert [type(outcome(wait)) for wait in waits] == [codec.PeerError] * 3
    assert isinstance(outcome(ask(zero, 0, index=2)), codec.PeerError)
    with pytest.raises(codec.PeerError, match="new group"):
        zero.send(1, 0, 0, 0, SIGNATURE, [b""])
    zero.close()
    zero.end(0)


def test_interrupted_constructor_reports_nothing_and_closes_its_connections(monkeypatch):
    """An exception at any line of the constructor leaves no thread, and no message of the garbage collector."""
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", reports.append)
    for point in itertools.count():
        a, b = tcp_pair()
        with suppress(KeyboardInterrupt), at_line(point, raising(KeyboardInterrupt), "mesh.py:__init__") as lines:
            Mesh(0, {1: [a]})
        del a
        gc.collect()
        b.settimeout(SECONDS)
        assert b.recv(1) == b"", lines.place
        b.close()
        if lines.place is None:
            break
    assert point > 10
    assert [
        r.exc_value for r in reports if r.exc_type is not ResourceWarning
    ] == []  # Python closes some sockets itself


def test_connections_end_with_the_last_reference():
    a, b = tcp_pair()
    mesh = Mesh(0, {1: [a]})
    reference = weakref.ref(mesh)
    gc.disable()
    try:
        del mesh
        until(lambda: reference() is None)
    finally:
        gc.enable()
    b.settimeout(SECONDS)
    assert b.recv(1) == b""
    b.close()


def test_mesh_of_one_rank_has_no_thread_and_can_be_closed():
    before = set(threading.enumerate())  # compared with <=, because threads of earlier meshes may still end
    mesh = Mesh(0, {})
    assert set(threading.enumerate()) <= before
    mesh.begin(0)
    mesh.end(0)
    mesh.close()
    with pytest.raises(codec.PeerError):
        mesh.check_open()
