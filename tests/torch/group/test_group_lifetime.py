"""Groups used by several threads, inherited by forked processes, and destroyed while collectives are in flight."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.group import communicator
from support.meshes import until
from support.ranks import RankPool

N = 6000


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=10) as ranks:
        yield ranks


def in_threads(count, work):
    """Run work(i) in `count` threads; return the results in order."""
    found = [None] * count

    def run(i):
        try:
            found[i] = work(i)
        except Exception as e:
            found[i] = repr(e)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def reduced(rank, n=N, group=None):
    x = torch.full((n,), rank + 1.0)
    codec.torch.all_reduce(x, op="sum", group=group)
    return x.unique().tolist()


def _first_call(rank, size):
    found = in_threads(4, lambda i: reduced(rank))
    line = communicator.communicator_of(None)
    assert line.channel.counters.frame_collectives == 4
    return [*found, reduced(rank)]


def test_first_collective_of_a_group_may_come_from_several_threads(ranks):
    for _ in range(3):
        ranks.new_group()
        assert ranks.run(_first_call) == [[[3.0]] * 5] * 2


def new_group_by_tcp(rank, size):
    """Create the default group with a TCPStore whose connection all threads share, as under torchrun."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store.set("port", str(tcp.port))
    else:
        tcp = dist.TCPStore("127.0.0.1", int(store.get("port")), is_master=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=tcp, rank=rank, world_size=size, timeout=timedelta(seconds=10))


def _groups(rank, size, calls):
    new_group_by_tcp(rank, size)
    groups = [dist.new_group() for _ in range(4)]

    def work(i):
        return [reduced(rank, N + i, groups[i]) for _ in range(calls)]

    return in_threads(4, work) == [[[3.0]] * calls] * 4


@pytest.mark.parametrize("calls", [5, pytest.param(100, marks=pytest.mark.nightly)])
def test_threads_use_a_group_each(ranks, calls):
    ranks.new_group()
    assert ranks.run(_groups, calls) == [True, True]


def _crossed(rank, size):
    """Two threads connect one group each, in different orders by rank, without a deadlock."""
    new_group_by_tcp(rank, size)
    groups = [dist.new_group() for _ in range(2)]
    begin = time.monotonic()

    def work(i):
        time.sleep(0.2 * (i ^ rank))
        return reduced(rank, group=groups[i])

    return in_threads(2, work), time.monotonic() - begin


def test_groups_are_connected_in_any_order_by_threads(ranks):
    ranks.new_group()
    for found, took in ranks.run(_crossed):
        assert found == [[3.0]] * 2
        assert took < 5


def _forked(rank, size):
    """Run a collective in a forked child and then in the parent; return the child's error and the parent's result."""
    assert reduced(rank) == [3.0]
    pending = codec.torch.all_reduce(torch.ones(3), async_op=True)
    pending.wait()
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        errors = []
        for call in (
            lambda: reduced(rank),
            lambda: codec.torch.all_to_all_bytes([b""] * 2),
            lambda: codec.torch.all_reduce(torch.ones(3), async_op=True),
            lambda: communicator.close_communicator(dist.group.WORLD, cancel=False),
            lambda: communicator.close_communicator(dist.group.WORLD, cancel=True),
        ):
            try:
                call()
                errors.append("none")
            except codec.PeerError as e:
                errors.append("PeerError" if "make a new group" in str(e) else str(e))
        os.write(here, " ".join(errors).encode())
        os._exit(0)
    os.close(here)
    said = os.read(there, 1000).decode()
    os.close(there)
    os.waitpid(pid, 0)
    return said, reduced(rank)


def test_collective_in_a_forked_child_is_an_error(ranks):
    ranks.new_group()
    assert ranks.run(_forked) == [("PeerError PeerError PeerError none none", [3.0])] * 2


def _held(rank, size):
    """Fork while another thread holds locks of the group's connections, and check that the child does not deadlock."""
    assert reduced(rank) == [3.0]
    line = communicator.communicator_of(None)
    held, go = threading.Event(), threading.Event()

    def hold():
        with line.channel.writing():
            held.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            reduced(rank)
        except codec.PeerError:
            os._exit(3)
        os._exit(4)
    status = os.waitpid(pid, 0)[1]
    go.set()
    thread.join()
    return os.waitstatus_to_exitcode(status)


def test_fork_while_locks_are_held_does_not_hang_the_child(ranks):
    ranks.new_group()
    assert ranks.run(_held) == [3, 3]


def _many(rank, size, count):
    """Create and destroy groups with collectives in flight; all threads and descriptors but a few are freed."""

    def counts():
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    for i in range(count):
        group = dist.new_group()
        x = torch.full((N,), rank + 1.0)
        pending = [codec.torch.all_reduce(x, op="max", group=group, async_op=True) for _ in range(3)]
        if i % 2:
            pending[-1].wait()
        communicator.close_communicator(group, cancel=False)
        dist.destroy_process_group(group)
        assert [p.result()[0].unique().tolist() for p in pending] == [[2.0]] * 3
        del group, pending
        if i == 2:
            before = counts()
    until(lambda: counts()[0] <= before[0] + 1 and counts()[1] <= before[1] + 8)


@pytest.mark.parametrize("count", [6, pytest.param(100, marks=pytest.mark.nightly)])
def test_groups_that_end_leave_nothing_behind(ranks, count):
    ranks.new_group()
    ranks.run(_many, count)


def _destroyed_by_peer(rank, size):
    """Destroy the group on one rank while the other rank waits for a collective."""
    assert reduced(rank) == [3.0]
    if rank == 1:
        communicator.close_communicator(dist.group.WORLD, cancel=True)
        return "closed"
    try:
        reduced(rank)
    except codec.PeerError:
        return "PeerError"
    return "none"


def test_group_closed_by_a_peer_is_an_error(ranks):
    ranks.new_group()
    assert ranks.run(_destroyed_by_peer) == ["PeerError", "closed"]
