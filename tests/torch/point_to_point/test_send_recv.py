"""Point-to-point messages between processes: order, both directions, threads, lost peers, Ctrl-C."""

import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from support.faults import KILLED, die, freeze
from support.meshes import until
from support.point_to_point import SOON, connection, raw, within
from support.ranks import RankPool
from support.tiers import NIGHTLY


@pytest.fixture(scope="module")
def three_ranks():
    with RankPool(3, timeout=SOON) as ranks:
        ranks.new_group()
        yield ranks


def message(sender, number, tag=0):
    """Return message `number` of a rank; some are empty, some have several MiB."""
    nbytes = [0, 1, 15, 70_000, (4 << 20) + 3, 1 << 22, 9_000_000, 16][number % 8]
    return random.Random(f"{sender} {number} {tag}").randbytes(nbytes)


def _frames(rank, size):
    x = torch.linspace(-1, 1, 3000)
    if rank == 0:
        assert codec.torch.send(codec.encode(x, codec.Quantize(4)), 1) is None
        assert codec.torch.recv(1) == b""
        return None
    y = codec.decode(codec.torch.recv(0, max_nbytes=codec.bound((3000,), "float32", codec.Quantize(4))))
    codec.torch.send(b"", 0)
    return torch.equal(torch.as_tensor(y), torch.as_tensor(codec.decode(codec.encode(x, codec.Quantize(4)))))


def test_frames_and_empty_messages_arrive(ranks):
    assert ranks.run(_frames) == [None, True]


def _both_directions(rank, size, asynchronous):
    other = 1 - rank
    if asynchronous:
        sent = [codec.torch.send(message(rank, i), other, async_op=True) for i in range(16)]
        received = [codec.torch.recv(other, async_op=True) for _ in range(8)]
        found = [w.result() for w in received] + [codec.torch.recv(other) for _ in range(8)]
        assert all(w.wait() for w in sent)
    else:
        sender = threading.Thread(target=lambda: [codec.torch.send(message(rank, i), other) for i in range(16)])
        sender.start()
        found = [codec.torch.recv(other) for _ in range(16)]
        sender.join()
    return found == [message(other, i) for i in range(16)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_messages_of_both_directions_arrive_in_order(ranks, asynchronous):
    assert ranks.run(_both_directions, asynchronous) == [True, True]


def _tags(rank, size):
    """Messages with different tags can be received in the reverse order of sending, from all ranks."""
    others = [r for r in range(size) if r != rank]
    works = [codec.torch.send(message(rank, t, o), o, tag=t, async_op=True) for t in range(6) for o in others]
    for t in reversed(range(6)):
        for o in others:
            assert codec.torch.recv(o, tag=t) == message(o, t, rank)
    return all(w.wait() for w in works)


def test_tags_and_ranks_do_not_wait_for_each_other(three_ranks):
    assert three_ranks.run(_tags) == [True] * 3


def _threads(rank, size):
    """Many threads can open the first connections of their tags concurrently."""
    failed = []

    def work(tag):
        for i in range(5):
            if (tag + i + rank) % 2:
                codec.torch.send(message(rank, i % 4, tag), 1 - rank, tag=tag)
            elif codec.torch.recv(1 - rank, tag=tag) != message(1 - rank, i % 4, tag):
                failed.append((tag, i))

    threads = [threading.Thread(target=work, args=(100 + t,)) for t in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return failed


def test_threads_use_tags_of_their_own(ranks):
    assert ranks.run(_threads) == [[], []]


def _arguments(rank, size):
    other = 1 - rank
    for call in (
        lambda: codec.torch.send("text", other),
        lambda: codec.torch.send(torch.ones(2, 3).numpy().T, other),
        lambda: codec.torch.send(b"", rank),
        lambda: codec.torch.send(b"", 2),
        lambda: codec.torch.send(b"", other, tag=-1),
        lambda: codec.torch.send(b"", other, group="world"),
        lambda: codec.torch.send(b"", other, options=within(0)),
        lambda: codec.torch.recv(rank),
        lambda: codec.torch.recv(other, max_nbytes=-1),
        lambda: codec.torch.recv(1.5),
    ):
        with pytest.raises(codec.ArgumentError):
            call()
    group = dist.new_group([0])
    if rank == 1:
        with pytest.warns(UserWarning, match="group"):
            assert codec.torch.send(b"", 0, group=group) is None


def test_wrong_arguments_are_rejected(ranks):
    ranks.run(_arguments)


def _too_long(rank, size):
    if rank == 0:
        codec.torch.send(b"long message", 1, tag=7)
        codec.torch.send(b"next", 1, tag=7)
        return None
    with pytest.raises(codec.PeerError, match="12 bytes, more than max_nbytes, 11"):
        codec.torch.recv(0, tag=7, max_nbytes=11)
    return codec.torch.recv(0, tag=7, max_nbytes=12), codec.torch.recv(0, tag=7, max_nbytes=12)


def test_message_above_max_nbytes_can_be_received_later(ranks):
    assert ranks.run(_too_long)[1] == (b"long message", b"next")


def _late(rank, size):
    if rank == 0:
        with pytest.raises(codec.PeerError, match="within the timeout"):
            codec.torch.recv(1, tag=8, options=within(0.05))  # times out: the sender has not connected yet
        dist.barrier()
        with pytest.raises(codec.PeerError, match="within the timeout"):
            codec.torch.recv(1, tag=8, options=within(0.05))  # times out: connected, but no message yet
        dist.barrier()
        return codec.torch.recv(1, tag=8)
    dist.barrier()
    connection(0, 8)
    dist.barrier()
    codec.torch.send(b"late", 0, tag=8)
    return None


def test_recv_can_be_repeated_after_a_timeout(ranks):
    assert ranks.run(_late)[0] == b"late"


def _lost(rank, size, fault, where):
    """Rank 1 dies or freezes before it connects, before a message, or within a message: rank 0 raises in time."""
    if rank == 1:
        if where != "connect":
            codec.torch.send(b"first", 0)
        if where == "message":
            sock = connection(0, 0)._sock
            sock.setblocking(True)
            sock.sendall(raw(number=1, nbytes=1000, body=bytes(500)))
        fault()
        return None
    if where != "connect":
        assert codec.torch.recv(1) == b"first"
    begin = time.monotonic()
    with pytest.raises(codec.PeerError):
        codec.torch.recv(1, options=within(1.5))
    return time.monotonic() - begin


@pytest.mark.parametrize("where", ["connect", "begin", "message"])
@pytest.mark.parametrize("fault", [die, freeze])
def test_lost_rank_raises_within_the_timeout(where, fault):
    with RankPool(2, timeout=SOON) as ranks:
        ranks.new_group()
        ranks.start(_lost, fault, where)
        assert ranks.results([0])[0] < 1.5 + 20
        if fault is die:
            assert ranks.results([1]) == [KILLED]


def _interrupted(rank, size, where):
    other = 1 - rank
    if rank == 1:
        connection(0, 0)
        if where == "message":
            sock = connection(0, 0)._sock
            sock.setblocking(True)
            sock.sendall(raw(nbytes=1000, body=bytes(500)))
        dist.barrier()
        if where == "begin":
            codec.torch.send(b"after", other)
        return None
    connection(1, 0)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        codec.torch.recv(1) if where != "send" else codec.torch.send(bytes(1 << 26), 1)
    dist.barrier()
    if where == "begin":
        return codec.torch.recv(1)
    with pytest.raises(codec.PeerError, match="closed: make a new group"):
        codec.torch.recv(1)
    return None


@pytest.mark.parametrize("where", ["begin", "message", "send"])
def test_ctrl_c_leaves_a_usable_or_a_closed_connection(where):
    with RankPool(2, timeout=SOON) as ranks:
        ranks.new_group()
        assert ranks.run(_interrupted, where)[0] == (b"after" if where == "begin" else None)


def _forked(rank, size):
    codec.torch.send(b"parent", 1 - rank, async_op=True)
    codec.torch.recv(1 - rank)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            codec.torch.send(b"child", 1 - rank)
        except codec.PeerError as e:
            os.write(write, str(e).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    codec.torch.send(b"parent again", 1 - rank)
    return os.read(read, 1000).decode(), codec.torch.recv(1 - rank)


def test_forked_process_cannot_use_connections(ranks):
    ranks.new_group()
    for text, received in ranks.run(_forked):
        assert "fork()" in text
        assert received == b"parent again"


def _groups(rank, size, count):
    """Check that destroyed groups release their ports and threads."""
    import gc

    def counts():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for i in range(count):
        group = dist.new_group()
        codec.torch.send(b"x", 1 - rank, group=group, async_op=True)
        assert codec.torch.recv(1 - rank, group=group) == b"x"
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        if i == 2:
            before = counts()
    until(lambda: counts()[0] <= before[0] + 3 and counts()[1] <= before[1] + 2)


def test_groups_free_their_ports_and_threads(ranks):
    ranks.new_group()
    ranks.run(_groups, 40 if NIGHTLY else 8)
