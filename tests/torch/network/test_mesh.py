"""Connections of collectives, without collectives: two meshes, or a mesh and a socket written by hand, in a process."""

import gc
import socket
import struct
import threading
import time
import weakref
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest

import codec
from codec.torch.network import connect, inbox
from codec.torch.network.inbox import Receive, Refused
from codec.torch.network.mesh import Mesh
from codec.torch.network.stripe import HEADER

SECONDS = 20  # limit of a wait, for busy machines
SIGNATURE = 7
DATA, ABORT = range(2)


def tcp_pair():
    """Return two connected sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        return a, server.accept()[0]


def packed(number, body=b"", *, part=0, index=0, kind=DATA, magic=b"CDCM", nbytes=None, signature=SIGNATURE):
    nbytes = len(body) if nbytes is None else nbytes
    return HEADER.pack(magic, kind, number, part, index, signature, nbytes) + body


def outcome(wait, seconds=SECONDS):
    """Wait, and return the error with which the wait ended, or None."""
    ended = threading.Event()
    if wait.call_when_done(ended.set):
        assert ended.wait(seconds), "the wait does not end"
    try:
        next(wait.__await__())
    except StopIteration:
        return None
    except BaseException as e:
        return e.with_traceback(None)  # whose frames refer to the mesh
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


@pytest.fixture
def two():
    a, b = tcp_pair()
    meshes = Mesh(0, {1: [a]}), Mesh(1, {0: [b]})
    yield meshes
    for mesh in meshes:
        mesh.close()


@pytest.fixture
def hand():
    """Return a mesh, and the socket of rank 1 that a test writes to."""
    a, b = tcp_pair()
    mesh = Mesh(0, {1: [a]})
    with b:
        yield mesh, b
    mesh.close()


# Messages


def test_messages_reach_their_receives_in_any_order(two):
    zero, one = two
    places = [(number, part, index) for number in (3, 4) for part in (0, 1) for index in (0, 1)]
    for number in (3, 4):
        zero.begin(number)
        one.begin(number)
    early = {place: ask(zero, place[0], part=place[1], index=place[2]) for place in places[::2]}
    for number, part, index in reversed(places):
        one.send(0, number, part, index, SIGNATURE, [bytes([number, part, index])])
    late = {place: ask(zero, place[0], part=place[1], index=place[2]) for place in places[1::2]}
    for place, receive in (early | late).items():
        assert received(receive) == bytes(place)


def test_messages_of_all_sizes_arrive_whole_in_both_directions(two):
    sizes = [0, 1, 39, 1 << 16, (1 << 18) + 1, 5 << 20]
    waits = []
    for me, mesh in enumerate(two):
        mesh.begin(0)
        for i, n in enumerate(sizes):
            body = [bytes([me + i]) * (n // 2), bytes([me + i]) * (n - n // 2)]
            waits.append(mesh.send(1 - me, 0, 0, i, SIGNATURE, body))
    for me, mesh in enumerate(two):
        for i, n in enumerate(sizes):
            room = np.zeros(n, np.uint8)
            receive = ask(mesh, 0, index=i, source=1 - me, most=n, room=room, exact=True)
            assert received(receive) == bytes([1 - me + i]) * n == room.tobytes()
    assert [outcome(wait) for wait in waits] == [None] * len(waits)


def test_message_whose_receive_is_posted_while_it_arrives_is_copied_to_its_room(hand):
    mesh, peer = hand
    mesh.begin(0)
    peer.sendall(packed(0, b"abcdefgh")[:-4])
    until(lambda: mesh._inboxes[0].arrived)
    room = np.zeros(8, np.uint8)
    receive = ask(mesh, 0, most=8, room=room, exact=True)
    peer.sendall(b"efgh")
    assert received(receive) == room.tobytes() == b"abcdefgh"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (packed(0, b"abcd", signature=8), Refused),
        (packed(0, b"abcde"), codec.FrameError),
        (packed(0, b"abc"), codec.FrameError),
    ],
    ids=["signature", "too long", "too short"],
)
def test_message_that_is_not_the_awaited_one_is_an_error_and_later_ones_arrive(hand, sent, wanted, early):
    mesh, peer = hand
    mesh.begin(0)
    room = np.zeros(4, np.uint8)
    if early:
        peer.sendall(sent)
        until(lambda: mesh._inboxes[0].arrived)
    receive = ask(mesh, 0, most=4, room=room, exact=True)
    if not early:
        peer.sendall(sent)
    assert isinstance(outcome(receive), wanted)
    assert not room.any()
    peer.sendall(packed(0, b"next", index=1))
    assert received(ask(mesh, 0, index=1)) == b"next"


def test_second_message_of_a_place_is_dropped(hand):
    mesh, peer = hand
    mesh.begin(0)
    peer.sendall(packed(0, b"one") + packed(0, b"two") + packed(0, b"end", index=1))
    assert received(ask(mesh, 0, index=1)) == b"end"
    assert received(ask(mesh, 0)) == b"one"
    peer.sendall(packed(0, b"three") + packed(0, b"end", index=2))
    assert received(ask(mesh, 0, index=2)) == b"end"
    mesh.end(0)
    assert mesh._inboxes.early == {1: 0}


# Early messages


def test_connection_pauses_at_many_early_messages_and_goes_on_when_they_are_asked_for(hand, monkeypatch):
    monkeypatch.setattr(inbox, "MOST_EARLY_NBYTES", 4 << 20)
    mesh, peer = hand
    n, body = 12, bytes(1 << 20)
    sender = threading.Thread(target=lambda: [peer.sendall(packed(5, body, index=i)) for i in range(n)])
    sender.start()
    until(lambda: any(s.paused for s in mesh._by_fd.values()))
    assert len(mesh._inboxes[5].arrived) == 3  # each takes a little more than its body
    mesh.begin(5)
    assert [len(received(ask(mesh, 5, index=i))) for i in range(n)] == [1 << 20] * n
    sender.join(SECONDS)
    mesh.end(5)
    assert mesh._inboxes.early == {1: 0}


def test_end_of_a_collective_resumes_a_paused_connection(hand, monkeypatch):
    monkeypatch.setattr(inbox, "MOST_EARLY_NBYTES", 1 << 16)
    mesh, peer = hand
    mesh.begin(0)
    peer.sendall(packed(0, bytes(60_000)) + packed(0, bytes(60_000), index=1) + packed(1, b"next"))
    until(lambda: any(s.paused for s in mesh._by_fd.values()))
    mesh.end(0)
    mesh.begin(1)
    assert received(ask(mesh, 1)) == b"next"


def test_awaited_message_behind_early_ones_is_read(hand, monkeypatch):
    monkeypatch.setattr(inbox, "MOST_EARLY_NBYTES", 1 << 16)
    mesh, peer = hand
    mesh.begin(0)
    awaited = ask(mesh, 0)
    peer.sendall(b"".join(packed(9, bytes(50_000), index=i) for i in range(8)) + packed(0, b"awaited"))
    assert received(awaited) == b"awaited"


def test_rank_that_floods_a_waiting_one_is_lost(hand, monkeypatch):
    monkeypatch.setattr(inbox, "MOST_EARLY_NBYTES", 1 << 16)
    monkeypatch.setattr(inbox, "MOST_AHEAD_NBYTES", 1 << 18)
    mesh, peer = hand
    mesh.begin(0)
    awaited = ask(mesh, 0)
    peer.sendall(b"".join(packed(9, b"", index=i) for i in range(300)))
    error = outcome(awaited)
    assert isinstance(error, codec.PeerError)
    assert "not asked for" in str(error)


def test_many_small_early_messages_take_linear_time(hand):
    mesh, peer = hand
    n = 50_000
    mesh.begin(0)
    data = b"".join(packed(1, b"", index=i) for i in range(n)) + packed(0, b"end")
    awaited = ask(mesh, 0)
    threading.Thread(target=peer.sendall, args=(data,), daemon=True).start()
    before = time.thread_time()
    assert received(awaited) == b"end"
    assert len(mesh._inboxes[1].arrived) == n
    assert time.thread_time() - before < 5
    assert mesh.cpu_seconds() < 15  # quadratic time took minutes


@pytest.mark.parametrize("kind", [DATA, ABORT])
def test_rank_that_begins_too_many_collectives_is_lost(hand, monkeypatch, kind):
    monkeypatch.setattr(inbox, "MOST_INBOXES", 50)
    mesh, peer = hand
    mesh.begin(0)
    awaited = ask(mesh, 0)
    peer.sendall(b"".join(packed(number, kind=kind) for number in range(1, 60)))
    assert isinstance(outcome(awaited), codec.PeerError)
    assert len(mesh._inboxes) == 50


# Ends of collectives


def test_end_drops_a_message_on_its_way_and_never_writes_its_memory_again(hand):
    mesh, peer = hand
    mesh.begin(0)
    room = np.zeros(1 << 16, np.uint8)
    ask(mesh, 0, most=1 << 16, room=room, exact=True)
    message = packed(0, b"x" * (1 << 16))
    peer.sendall(message[:1000])
    until(lambda: room[:900].any())
    mesh.end(0)
    room[:] = 0
    mesh.begin(1)
    peer.sendall(message[1000:] + packed(1, b"next"))
    assert received(ask(mesh, 1)) == b"next"
    assert not room.any()


def test_end_drops_a_message_that_was_asked_for_while_it_arrived(hand):
    mesh, peer = hand
    mesh.begin(0)
    peer.sendall(packed(0, b"abcdefgh")[:-4])
    until(lambda: mesh._inboxes[0].arrived)
    room = np.zeros(8, np.uint8)
    ask(mesh, 0, most=8, room=room, exact=True)
    mesh.end(0)
    mesh.begin(1)
    peer.sendall(b"efgh" + packed(1, b"next"))
    assert received(ask(mesh, 1)) == b"next"
    assert not room.any()


@pytest.mark.parametrize("number", [3, 4])
def test_messages_of_ended_collectives_are_dropped(hand, number):
    mesh, peer = hand
    mesh.begin(4)
    mesh.end(4)
    mesh.begin(8)
    peer.sendall(packed(number, b"late") + packed(number, kind=ABORT) + packed(8, b"next"))
    assert received(ask(mesh, 8)) == b"next"
    assert list(mesh._inboxes) == [8]


# Aborts


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
    """Several parts of a collective may find that a rank has other arguments."""
    mesh, peer = hand
    mesh.begin(0)
    waits = [mesh.explanation(0, 1) for _ in range(2)]
    peer.sendall(packed(0, b"reason", kind=ABORT))
    assert [outcome(wait) for wait in [*waits, mesh.explanation(0, 1)]] == [None] * 3


# Lost ranks


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
    assert "no message" in str(error)


def test_paused_connection_that_breaks_is_noticed_once(hand, monkeypatch):
    monkeypatch.setattr(inbox, "MOST_EARLY_NBYTES", 1 << 10)
    mesh, peer = hand
    peer.sendall(packed(0, b"x" * 5000))
    until(lambda: any(s.paused for s in mesh._by_fd.values()))
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() resets the connection
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


# Life


def test_failed_connecting_closes_the_connections_that_were_made(monkeypatch):
    a, b = tcp_pair()

    def accept(peer, tag, seconds):
        raise codec.PeerError(f"rank {peer} has not connected in time")

    connection = SimpleNamespace(detach=lambda: a)
    endpoint = SimpleNamespace(connect=lambda peer, tag, seconds: connection, accept=accept)
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
    before = threading.active_count()
    mesh = Mesh(0, {})
    assert threading.active_count() == before
    mesh.begin(0)
    mesh.end(0)
    mesh.close()
    with pytest.raises(codec.PeerError):
        mesh.check_open()
