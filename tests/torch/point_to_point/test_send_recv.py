"""Point-to-point messages between processes: order, both directions, threads, hostile peers, lost peers, Ctrl-C."""

import os
import random
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.network import endpoint, tcp
from codec.torch.network.version import protocol_hash
from support.faults import KILLED, die, freeze
from support.ranks import RankPool
from support.tiers import NIGHTLY

SOON = 60  # seconds: a wait that must succeed; generous, since test machines are busy


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=SOON) as ranks:
        ranks.new_group()
        yield ranks


@pytest.fixture(scope="module")
def three_ranks():
    with RankPool(3, timeout=SOON) as ranks:
        ranks.new_group()
        yield ranks


def within(seconds):
    return codec.options(timeout=seconds)


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
    """Receive tags in the reverse order of sending, from all ranks."""
    others = [r for r in range(size) if r != rank]
    works = [codec.torch.send(message(rank, t, o), o, tag=t, async_op=True) for t in range(6) for o in others]
    for t in reversed(range(6)):
        for o in others:
            assert codec.torch.recv(o, tag=t) == message(o, t, rank)
    return all(w.wait() for w in works)


def test_tags_and_ranks_do_not_wait_for_each_other(three_ranks):
    assert three_ranks.run(_tags) == [True] * 3


def _threads(rank, size):
    """Many threads make the first connections of their tags at once."""
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
    with pytest.raises(codec.PeerError, match="12 bytes, but max_nbytes is 11"):
        codec.torch.recv(0, tag=7, max_nbytes=11)
    return codec.torch.recv(0, tag=7, max_nbytes=12), codec.torch.recv(0, tag=7, max_nbytes=12)


def test_message_above_max_nbytes_can_be_received_later(ranks):
    assert ranks.run(_too_long)[1] == (b"long message", b"next")


def _late(rank, size):
    if rank == 0:
        with pytest.raises(codec.PeerError, match="in time"):
            codec.torch.recv(1, tag=8, options=within(0.05))  # no connection yet
        dist.barrier()
        with pytest.raises(codec.PeerError, match="in time"):
            codec.torch.recv(1, tag=8, options=within(0.05))  # no message yet
        dist.barrier()
        return codec.torch.recv(1, tag=8)
    dist.barrier()
    connection(0, 8)
    dist.barrier()
    codec.torch.send(b"late", 0, tag=8)
    return None


def test_recv_can_be_repeated_after_a_timeout(ranks):
    assert ranks.run(_late)[0] == b"late"


def connection(peer, tag):
    """Return the connection of send and recv with a rank."""
    from codec.torch.point_to_point.send_recv import _route

    return _route("recv", "src", peer, None, tag, None).pair._connected(SOON)


def _stuck_sender(rank, size):
    """Nobody receives: the message is too large for the operating system's buffers."""
    if rank == 0:
        with pytest.raises(codec.PeerError, match="in time"):
            codec.torch.send(bytes(1 << 26), 1, tag=9, options=within(0.3))
        with pytest.raises(codec.PeerError, match="closed: make a new group"):
            codec.torch.send(b"", 1, tag=9)
        with pytest.raises(codec.PeerError, match="closed: make a new group"):
            codec.torch.recv(1, tag=9)
        dist.barrier()
        return
    connection(0, 9)
    dist.barrier()
    with pytest.raises(codec.PeerError, match="is gone"):
        codec.torch.recv(0, tag=9)
    codec.torch.send(b"other tags are usable", 0, tag=10)


def test_send_without_receiver_closes_its_connection_only(ranks):
    ranks.run(_stuck_sender)


def hello(peer, tag, *, token=None, version=None, rank=None, magic=endpoint.HELLO_MAGIC):
    """Return a socket connected to a rank's port, and the bytes of a hello."""
    mine = endpoint.endpoint_of(dist.group.WORLD)
    true_token, port, host = mine._address_of(peer, time.monotonic() + SOON)
    sock = socket.create_connection((host, port))
    version = protocol_hash() if version is None else version
    return sock, endpoint.HELLO.pack(magic, token or true_token, version, mine.rank if rank is None else rank, tag)


def raw(magic=tcp.MAGIC, number=0, nbytes=0, body=b""):
    return tcp.MESSAGE.pack(magic, number, nbytes) + body


HOSTILE = {
    "garbage": raw()[:4] + os.urandom(100) + b"x",
    "wrong magic": raw(b"HTTP", body=b"abc"),
    "wrong number": raw(number=1, nbytes=3, body=b"abc"),
    "too large": raw(nbytes=(1 << 64) - 1, body=b"abc"),
    "above max_nbytes": raw(nbytes=1 << 30, body=b"abc"),
    "cut in the header": raw(nbytes=3)[:7],
    "cut in the body": raw(nbytes=300, body=b"abc"),
    "nothing": b"",
}


def _hostile(rank, size, name, tag):
    """Rank 1 writes bytes by hand and closes the connection; rank 0 receives."""
    if rank == 1:
        sock, first = hello(0, tag)
        for byte in first:  # one by one: a hello may arrive in pieces
            sock.sendall(bytes([byte]))
        sock.sendall(HOSTILE[name])
        sock.close()
        codec.torch.send(b"still here", 0, tag=99)
        return None
    begin = time.monotonic()
    with pytest.raises(codec.PeerError) as raised:
        codec.torch.recv(1, tag=tag, max_nbytes=1 << 20, options=within(SOON))
    assert codec.torch.recv(1, tag=99) == b"still here"
    return str(raised.value), time.monotonic() - begin < SOON


def test_hostile_messages_raise_and_leave_other_connections(ranks):
    for tag, name in enumerate(HOSTILE, 200):
        (text, soon), _ = ranks.run(_hostile, name, tag)
        assert soon, name
        assert "max_nbytes is 1048576" in text or "no message" in text or "is gone" in text, (name, text)


def _hostile_size(rank, size):
    """Announced bytes that do not come take no memory."""
    if rank == 1:
        sock, first = hello(0, 300)
        sock.sendall(first + raw(nbytes=1 << 36, body=bytes(100_000)))
        assert codec.torch.recv(0, tag=301) == b"done"
        sock.close()
        return None
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(codec.PeerError, match="in time"):
        codec.torch.recv(1, tag=300, max_nbytes=1 << 36, options=within(0.3))
    with pytest.raises(codec.PeerError, match="closed"):
        codec.torch.recv(1, tag=300, max_nbytes=1 << 36, options=within(0.3))
    codec.torch.send(b"done", 1, tag=301)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024


def test_announced_size_takes_no_memory(ranks):
    assert ranks.run(_hostile_size)[0] < 64  # MiB


def _strangers(rank, size):
    """Connections with a wrong hello are closed, and do not disturb others."""
    if rank == 1:
        wrong = [
            dict(token=bytes(16)),
            dict(version=5),
            dict(rank=0),
            dict(rank=2),
            dict(rank=-1),
            dict(magic=b"HTTP"),
        ]
        for how in wrong:
            sock, first = hello(0, 400, **how)
            sock.settimeout(SOON)
            sock.sendall(first)
            assert sock.recv(1) == b""
            sock.close()
        silent = [hello(0, 400)[0] for _ in range(20)]  # connect and say nothing
        codec.torch.send(b"honest", 0, tag=400)
        for sock in silent:
            sock.close()
        return None
    return codec.torch.recv(1, tag=400)


def test_strangers_are_turned_away(ranks):
    assert ranks.run(_strangers)[0] == b"honest"


def _version(rank, size):
    if rank == 1:
        mine = endpoint.endpoint_of(dist.group.WORLD)
        codec.torch.send(b"", 0, tag=500)  # rank 0 has an endpoint now
        store = mine._store
        address = store.get("0")
        store.set("0", (5).to_bytes(8, "little") + address[8:])
        with pytest.raises(codec.PeerError, match="another version"):
            codec.torch.send(b"", 0, tag=501)
        store.set("0", b"short")
        with pytest.raises(codec.PeerError, match="no valid address"):
            codec.torch.send(b"", 0, tag=502)
        store.set("0", address)
        codec.torch.send(b"", 0, tag=503)
    else:
        codec.torch.recv(1, tag=500)
        codec.torch.recv(1, tag=503)


def test_rank_of_another_version_is_refused(ranks):
    ranks.run(_version)


def _lost(rank, size, fault, where):
    """Rank 1 dies or freezes: before connecting, before a message, or within one."""
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
        assert "forked" in text
        assert received == b"parent again"


def _groups(rank, size, count):
    """Ports and threads of destroyed groups are freed."""
    import gc

    counts = []
    for _ in range(count):
        group = dist.new_group()
        codec.torch.send(b"x", 1 - rank, group=group, async_op=True)
        assert codec.torch.recv(1 - rank, group=group) == b"x"
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        time.sleep(0.05)
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    return counts


def test_groups_free_their_ports_and_threads(ranks):
    ranks.new_group()
    for counts in ranks.run(_groups, 40 if NIGHTLY else 8):
        (files, threads), (last_files, last_threads) = counts[2], counts[-1]
        assert last_files <= files + 3
        assert last_threads <= threads + 2
