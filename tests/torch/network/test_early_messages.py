"""Limits of the memory for early messages in groups of several ranks, and the progress of ranks at these limits."""

import threading
from contextlib import closing, contextmanager

import pytest

from codec.torch.network import inbox, mesh
from codec.torch.network.mesh import Mesh
from codec.torch.network.sockets import ConnectionInfo
from support.meshes import SECONDS, SIGNATURE, ask, outcome, packed, received, tcp_pair, until

COST = 1 << 10  # bytes that an early message counts besides its body


@contextmanager
def among(n):
    """Return the connected meshes of `n` ranks."""
    sockets = {rank: {} for rank in range(n)}
    for a in range(n):
        for b in range(a):
            one, two = tcp_pair()
            sockets[a][b], sockets[b][a] = [one], [two]
    meshes = [Mesh(rank, sockets[rank]) for rank in range(n)]
    try:
        yield meshes
    finally:
        for each in meshes:
            each.close()


@contextmanager
def by_hand(n):
    """Return a mesh, and the sockets of its `n` peers that a test writes to."""
    pairs = {peer: tcp_pair() for peer in range(1, n + 1)}
    with closing(Mesh(0, {peer: [mine] for peer, (mine, _) in pairs.items()})) as it:
        yield it, {peer: theirs for peer, (_, theirs) in pairs.items()}
    for _, theirs in pairs.values():
        theirs.close()


@pytest.mark.parametrize(
    ("ranks", "share"), [(1, 1 << 26), (4, 1 << 26), (15, (1 << 28) // 15), (1023, (1 << 28) // 1023), (9999, 1 << 16)]
)
def test_each_rank_has_an_equal_share_of_memory(ranks, share):
    inboxes = inbox.Inboxes(range(1, ranks + 1))
    begun = inboxes.begin(0)

    def waits(nbytes):
        return inboxes.must_wait(inbox.Arrival(1, 0, 0, 0, 0, nbytes, 0, abort=False))

    assert not waits(share - COST)
    assert waits(share - COST + 1)
    begun.request(inbox.Receive(1, 0, 0, SIGNATURE, 10))
    assert not waits(share - COST + 1)


def test_ranks_that_all_send_early_fill_the_memory_of_one_sum(monkeypatch):
    monkeypatch.setattr(inbox, "MOST_EARLY_NBYTES", 1 << 20)
    n, body = 8, bytes(30_000)
    with by_hand(n) as (zero, peers):
        threads = [
            threading.Thread(target=sock.sendall, args=(b"".join(packed(5, body, index=i) for i in range(100)),))
            for sock in peers.values()
        ]
        for thread in threads:
            thread.start()
        until(lambda: len(zero._paused) == n)
        assert (1 << 19) < sum(zero._inboxes.early.values()) <= 1 << 20
        zero.begin(5)
        for peer in peers:
            for i in range(100):
                assert received(ask(zero, 5, index=i, source=peer)) == body
        for thread in threads:
            thread.join(SECONDS)
        zero.end(5)
        assert set(zero._inboxes.early.values()) == {0}


def test_request_resumes_the_connection_of_its_rank_alone(monkeypatch):
    monkeypatch.setattr(inbox, "EARLY_SHARES", (1 << 10, 1 << 10))
    with by_hand(3) as (zero, peers):
        for sock in peers.values():
            sock.sendall(packed(5, b"early") + packed(4, b"next"))
        until(lambda: len(zero._paused) == 3)
        zero.begin(4)
        assert received(ask(zero, 4, source=2)) == b"next"
        assert {stripe.peer for stripe in zero._paused} == {1, 3}


def test_two_ranks_go_on_while_the_third_is_far_ahead(monkeypatch):
    """A rank that has sent all its messages neither fills the memory of the others nor keeps them from each other.

    Ranks 0 and 1 need two exchanges in each collective, whose second one depends on the first, and messages of rank 2,
    which come behind early ones. Rank 2 receives nothing until all its messages are queued.
    """
    share, n, body = 1 << 18, 60, bytes(200_000)
    monkeypatch.setattr(inbox, "EARLY_SHARES", (share, share))
    most = [0, 0]

    def send(it, number, part):
        return [it.send(o, number, part, 0, SIGNATURE, [bytes([it.rank, number, part]), body]) for o in it.progress]

    def receive(it, number, part):
        receives = {o: ask(it, number, part=part, source=o) for o in it.progress}
        for o, each in receives.items():
            assert received(each) == bytes([o, number, part]) + body

    def run(it):
        for number in range(n):
            it.begin(number)
            for part in (0, 1):
                sends = send(it, number, part)
                receive(it, number, part)
                assert [outcome(each) for each in sends] == [None, None]
                most[it.rank] = max(most[it.rank], it._inboxes.early[2])
            it.end(number)

    with among(3) as (zero, one, ahead):
        for number in range(n):
            ahead.begin(number)
        # Collectives 1, 0, 3, 2, ...: a rank in collective 2 k must read both messages of collective 2 k + 1 first
        sends = [wait for number in range(n) for part in (0, 1) for wait in send(ahead, number ^ 1, part)]
        until(lambda: zero._paused and one._paused)
        assert not sends[-1].done
        threads = [threading.Thread(target=run, args=(it,)) for it in (zero, one)]
        for thread in threads:
            thread.start()
        for number in range(n):
            for part in (0, 1):
                receive(ahead, number, part)
            ahead.end(number)
        assert [outcome(each) for each in sends] == [None] * len(sends)
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        assert 0 < max(most) <= share + 2 * (len(body) + 3 + COST)
        assert [sum(it._inboxes.early.values()) for it in (zero, one, ahead)] == [0, 0, 0]


def test_rtt_reads_connections_at_equal_distances(monkeypatch):
    monkeypatch.setattr(mesh, "_MOST_SAMPLES", 4)
    with by_hand(9) as (zero, _):
        assert 0 < zero.rtt(range(1, 10)) < SECONDS
        read = []
        for peer, [stripe] in zero._stripes.items():
            monkeypatch.setattr(stripe, "info", lambda peer=peer: read.append(peer) or ConnectionInfo(float(peer)))
        assert (zero.rtt(range(1, 10)), read) == (7.0, [1, 4, 7])
        assert zero.rtt((2, 3)) == 3.0
        assert [info.rtt for info in zero.connections((5, 2))] == [5.0, 2.0]
        assert zero.rtt(()) == 0.0
