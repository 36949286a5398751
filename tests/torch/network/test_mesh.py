"""Messages of a mesh, the layer below collectives, between two meshes or a mesh and a test's socket."""

import threading
import time

import numpy as np
import pytest

import codec
from codec.torch.network import inbox
from codec.torch.network.inbox import Refused
from codec.torch.network.mesh import Mesh
from support.meshes import ABORT, DATA, SECONDS, SIGNATURE, ask, outcome, packed, received, tcp_pair, until

# Tests of sending and receiving


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


# Tests of messages that arrive before they are requested


def test_connection_pauses_at_many_early_messages_and_goes_on_when_they_are_asked_for(hand, monkeypatch):
    monkeypatch.setattr(inbox, "MOST_EARLY_NBYTES", 4 << 20)
    mesh, peer = hand
    n, body = 12, bytes(1 << 20)
    sender = threading.Thread(target=lambda: [peer.sendall(packed(5, body, index=i)) for i in range(n)])
    sender.start()
    until(lambda: any(s.paused for s in mesh._by_fd.values()))
    # The fourth would exceed the limit, since each needs a little more than its body
    assert len(mesh._inboxes[5].arrived) == 3
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
    assert "not requested" in str(error)


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
    assert mesh.cpu_seconds() < 15  # an algorithm of quadratic time would take minutes


@pytest.mark.parametrize("kind", [DATA, ABORT])
def test_rank_that_begins_too_many_collectives_is_lost(hand, monkeypatch, kind):
    monkeypatch.setattr(inbox, "MOST_INBOXES", 50)
    mesh, peer = hand
    mesh.begin(0)
    awaited = ask(mesh, 0)
    peer.sendall(b"".join(packed(number, kind=kind) for number in range(1, 60)))
    assert isinstance(outcome(awaited), codec.PeerError)
    assert len(mesh._inboxes) == 51


def test_collectives_that_one_rank_has_begun_do_not_count_for_another_rank(monkeypatch):
    """A rank that begins as many collectives as it may does not make this rank lose the next one that sends."""
    monkeypatch.setattr(inbox, "MOST_INBOXES", 50)
    pairs = {peer: tcp_pair() for peer in (1, 2)}
    mesh = Mesh(0, {peer: [mine] for peer, (mine, _) in pairs.items()})
    pairs[1][1].sendall(b"".join(packed(number) for number in range(1, 51)))
    until(lambda: len(mesh._inboxes) == 50)
    pairs[2][1].sendall(packed(70) + packed(0, b"end"))
    mesh.begin(0)
    assert received(ask(mesh, 0, source=2)) == b"end"
    mesh.close()
    for _, peer in pairs.values():
        peer.close()


def test_connection_pauses_at_many_early_aborts_and_goes_on_when_their_collectives_begin(hand, monkeypatch):
    """Bodies of aborts count as early messages until their collectives have begun and ended."""
    monkeypatch.setattr(inbox, "MOST_EARLY_NBYTES", 1 << 16)
    mesh, peer = hand
    n, body = 40, bytes(8192)
    data = b"".join(packed(number, body, kind=ABORT) for number in range(1, n + 1)) + packed(n + 1, b"end")
    sender = threading.Thread(target=peer.sendall, args=(data,))
    sender.start()
    until(lambda: any(s.paused for s in mesh._by_fd.values()))
    assert mesh._inboxes.early[1] <= 1 << 16
    for number in range(1, n + 1):
        mesh.begin(number)
        assert isinstance(outcome(ask(mesh, number)), Refused)
        mesh.end(number)
    mesh.begin(n + 1)
    assert received(ask(mesh, n + 1)) == b"end"
    sender.join(SECONDS)
    mesh.end(n + 1)
    assert mesh._inboxes.early == {1: 0}


def test_awaited_abort_behind_early_ones_is_read(hand, monkeypatch):
    monkeypatch.setattr(inbox, "MOST_EARLY_NBYTES", 1 << 16)
    mesh, peer = hand
    mesh.begin(0)
    wait = mesh.explanation(0, 1)
    early = b"".join(packed(number, bytes(8192), kind=ABORT) for number in range(1, 20))
    threading.Thread(target=peer.sendall, args=(early + packed(0, b"reason", kind=ABORT),), daemon=True).start()
    assert outcome(wait) is None
    assert mesh._inboxes[0].aborts == {1: b"reason"}


# Tests of messages that arrive when their collective has ended


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
