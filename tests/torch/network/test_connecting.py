"""Ranks that connect to a mesh: requests to the store, waits in parallel, errors that name a rank or a limit."""

import errno
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

import codec
from codec.torch.network import endpoint as endpoints
from codec.torch.network import sockets, store
from codec.torch.network.connect import connect
from codec.torch.network.endpoint import endpoint_of
from support.meshes import SECONDS, Group, until


class RecordingStore(dist.Store):
    """Store in memory, which records the names of requests."""

    def __init__(self):
        super().__init__()
        self.values, self.requests = {}, []

    def set(self, key, value):
        self.requests.append("set")
        self.values[key] = value

    def check(self, keys):
        self.requests.append("check")
        return all(key in self.values for key in keys)

    def multi_get(self, keys):
        self.requests.append("multi_get")
        return [self.values[key] for key in keys]


@pytest.fixture(autouse=True)
def _loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def connected(groups, seconds=SECONDS):
    """Connect all groups at the same time, each in a thread; return the meshes and errors."""

    def run(group):
        try:
            return connect(group, timedelta(seconds=seconds))
        except codec.PeerError as e:
            return e

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(run, groups))


@pytest.mark.parametrize("size", [2, 5, 24])
def test_requests_to_the_store_do_not_grow_with_the_number_of_ranks(size):
    values = {}
    groups = [Group(rank, size, RecordingStore()) for rank in range(size)]
    for group in groups:
        group.get_group_store().values = values
        endpoint_of(group)
    meshes = connected(groups)
    for group, mesh in zip(groups, meshes, strict=True):
        assert len(mesh.connections([o for o in range(size) if o != mesh.rank])) == size - 1
        mesh.close()
        assert group.get_group_store().requests == ["set", "check", "multi_get"][: 3 if group.rank() else 1]


def test_error_names_the_rank_that_has_not_come():
    base = dist.HashStore()
    groups = [Group(rank, 5, base) for rank in range(5) if rank != 2]
    errors = connected(groups, 0.5)
    assert all(isinstance(e, codec.PeerError) for e in errors)
    assert "rank 2 has not begun" in str(errors[2])
    assert "rank 2 has not begun" in str(errors[3])


def test_rank_that_cannot_be_reached_is_named_and_no_connection_remains():
    base = dist.HashStore()
    groups = [Group(rank, 3, base) for rank in range(3)]
    zero, one, two = map(endpoint_of, groups)
    one._listener.stop()
    until(lambda: one._listener._sock.fileno() == -1)
    with pytest.raises(codec.PeerError, match="rank 1 cannot be reached"):
        two.connect([0, 1], 7, SECONDS)
    accepted = zero._listener.take((2, 7))
    if accepted is not None:
        with pytest.raises(codec.PeerError, match="gone"):
            accepted.receive(1, SECONDS)


def test_rank_that_does_not_answer_is_named_after_the_timeout(monkeypatch):
    groups = [Group(rank, 2, dist.HashStore()) for rank in range(2)]
    one = endpoint_of(groups[1])
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.socket() as filler:
        filler.connect(full.getsockname())  # the queue of the port is full, so that it answers no one
        one._addresses[0] = endpoints.PeerAddress(bytes(16), full.getsockname()[1], "127.0.0.1")
        begin = time.monotonic()
        with pytest.raises(codec.PeerError, match=r"rank 0 cannot be reached at .*, port .*: timed out"):
            one.connect([0], 0, 0.3)
        assert time.monotonic() - begin < SECONDS


def test_wait_of_another_thread_on_the_connection_to_the_store_blocks_no_rank(monkeypatch):
    monkeypatch.setattr(store, "_BUSY_SECONDS", 0.3)
    host = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    clients = [dist.TCPStore("127.0.0.1", host.port, None, False) for _ in range(2)]
    waiter = threading.Thread(target=clients[1].get, args=("late",))
    waiter.start()
    time.sleep(0.1)
    meshes = connected([Group(rank, 2, clients[rank]) for rank in range(2)])
    host.set("late", b"")
    waiter.join()
    assert [len(mesh.connections([1 - mesh.rank])) for mesh in meshes] == [1, 1]
    for mesh in meshes:
        mesh.close()


# Tests of the limit of open files


def _limits(monkeypatch, soft, hard):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: raised.append(limits))
    return raised


def test_soft_limit_of_open_files_is_raised_only_for_groups_that_need_it(monkeypatch):
    raised = _limits(monkeypatch, 1024, 20000)
    monkeypatch.setattr(os, "listdir", lambda path: ["0"] * 100)
    sockets.reserve_descriptors(300)
    assert raised == []
    sockets.reserve_descriptors(700)
    sockets.reserve_descriptors(15000)
    assert raised == [(1600, 20000), (20000, 20000)]


def test_hard_limit_of_open_files_is_named(monkeypatch):
    _limits(monkeypatch, 64, 100)
    monkeypatch.setattr(os, "listdir", lambda path: ["0"] * 60)
    with pytest.raises(codec.PeerError, match=r"need 50 more open files.* has 60 of at most 100.*RLIMIT_NOFILE"):
        sockets.reserve_descriptors(50)


def test_error_of_a_port_without_descriptors_names_the_limit(monkeypatch):
    zero, one = (endpoint_of(Group(rank, 2, dist.HashStore())) for rank in range(2))
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    one._addresses[0] = endpoints.PeerAddress(bytes(16), 1, "127.0.0.1")
    zero._listener.failure = sockets.reason(error)
    with pytest.raises(codec.PeerError, match=r"rank 1 has not connected within the timeout: .*RLIMIT_NOFILE"):
        zero.accept(1, 0, 0.01)

    def full(*args):
        raise error

    monkeypatch.setattr(endpoints.socket, "socket", full)
    with pytest.raises(codec.PeerError, match=r"rank 0 cannot be reached.*Too many open files.*RLIMIT_NOFILE"):
        one.connect([0], 0, 1.0)
