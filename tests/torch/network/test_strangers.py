"""Strangers at the port of a rank: a good rank still connects, and memory, descriptors and log lines are bounded."""

import contextlib
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
from codec._security import security_of_environment
from codec.torch.network import handshake
from codec.torch.network.endpoint import Endpoint, endpoint_of
from support.handshakes import KEY, address_of, call, endpoints, hand, met, read, waiting
from support.meshes import SECONDS, Group, until
from support.ranks import RankPool

CLIENT_HELLO = bytes.fromhex("16030100a5010000a10303") + bytes(32) + b"\x20" + bytes(126)
SCANNERS = {
    "nothing": b"",
    "HTTP": b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n",
    "TLS": CLIENT_HELLO,
    "SSH": b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "garbage": bytes(range(200)),
    "zeros": bytes(5000),
    "magic": b"CDPH",
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in [name for name in os.environ if name.startswith(("CODEC_SECRET", "CODEC_TLS"))]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def thread_errors(monkeypatch):
    """Fail if a thread ends by an exception."""
    found = []
    monkeypatch.setattr(threading, "excepthook", lambda args: found.append(args))
    yield
    assert not found, found


def pair(mode, monkeypatch):
    """Return the store and two endpoints in the environment of a mode."""
    for name, value in mode.environment.items():
        monkeypatch.setenv(name, value)
    store = dist.HashStore()
    return store, [Endpoint(Group(rank, 2, store), SECONDS, security_of_environment()) for rank in range(2)]


def open_files():
    return len(os.listdir("/proc/self/fd"))


def strangers_of(endpoint):
    return len(endpoint._listener._strangers)


def test_port_scanners_do_not_keep_a_good_rank_out(mode, monkeypatch, caplog):
    store, ends = pair(mode, monkeypatch)
    _, _, address = address_of(store, 0)
    before = open_files()
    for first in SCANNERS.values():
        for end in ("close", "reset", "half", "open"):
            sock = call(address, first)
            if end == "half":
                with contextlib.suppress(OSError):  # the rank has already reset the connection
                    sock.shutdown(socket.SHUT_WR)
            elif end == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if end in ("close", "reset"):
                sock.close()
            else:
                sock.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    assert read(sock, 1) == b""
                sock.close()
    met(*ends)
    until(lambda: strangers_of(ends[0]) == 0)
    assert open_files() <= before + 2
    assert waiting(ends[0]) == {}
    assert caplog.text == ""


def test_bytes_that_are_no_hello_end_the_connection_at_once():
    store, _ends = endpoints(KEY, KEY)
    _, _, address = address_of(store, 0)
    for name, first in SCANNERS.items():
        if first and name != "magic":
            with call(address, first) as sock:  # stays open for writing
                assert read(sock, 1) == b"", name


def test_stranger_is_closed_after_the_limit_whatever_others_do(monkeypatch):
    monkeypatch.setattr(handshake, "_HELLO_SECONDS", 1.0)
    store, _ends = endpoints(KEY, KEY)
    _, _, address = address_of(store, 0)
    begin = time.monotonic()
    with call(address, b"") as silent:
        time.sleep(0.7)
        with call(address, b""):  # a later one must not prolong the limit
            assert read(silent, 1) == b""
            assert time.monotonic() - begin < 1.6


def test_slow_hellos_of_many_sockets_end_in_time(monkeypatch):
    monkeypatch.setattr(handshake, "_HELLO_SECONDS", 1.0)
    store, ends = endpoints(KEY, KEY)
    fields, address = hand(store)
    slow = [call(address, b"") for _ in range(40)]
    begin = time.monotonic()
    for byte in fields.hello()[:8]:
        for sock in slow:
            with contextlib.suppress(OSError):
                sock.sendall(bytes([byte]))
        time.sleep(0.02)
    met(*ends)
    assert time.monotonic() - begin < SECONDS
    for sock in slow:
        assert read(sock, 1) == b""
        sock.close()
    until(lambda: strangers_of(ends[0]) == 0)


def test_flood_from_one_address_does_not_close_a_connection_from_another_one(monkeypatch):
    monkeypatch.setattr(handshake, "_MOST_STRANGERS", 20)
    store, ends = endpoints(KEY, KEY)
    fields, address = hand(store)
    slow = socket.create_connection(address, SECONDS, source_address=("127.0.0.2", 0))
    slow.sendall(fields.hello()[:45])  # a rank on a slow link, whose nonce has not arrived yet
    until(lambda: strangers_of(ends[0]) == 1)
    flood = [call(address, b"") for _ in range(100)]
    met(*ends)
    assert strangers_of(ends[0]) <= 22
    fields = fields._replace(client_nonce=b"n" * 32)
    slow.sendall(fields.client_nonce)
    assert len(read(slow, 64)) == 64  # still open
    for sock in (*flood, slow):
        sock.close()


def test_flood_of_connections_in_a_row_leaves_the_port_usable():
    store, ends = endpoints(KEY, KEY)
    _, _, address = address_of(store, 0)
    stop = threading.Event()

    def flood():
        while not stop.is_set():
            with contextlib.suppress(OSError):
                call(address, b"CDP").close()

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for tag in range(5):
            met(*ends, tag=tag)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    until(lambda: strangers_of(ends[0]) == 0)


def _limit(rank, size, spare):
    """Lower the limit of open files of rank 0 to a few more than it has."""
    if rank == 0:
        endpoint_of(dist.group.WORLD)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (open_files() + spare, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        return address_of(dist.group.WORLD.get_group_store(), 0)[2]
    return None


def _strangers(rank, size):
    return strangers_of(endpoint_of(dist.group.WORLD))


def _received(rank, size):
    begin = time.monotonic()
    if rank:
        codec.torch.send(b"good", 0, tag=3, options=codec.options(timeout=60))
        return None
    assert codec.torch.recv(1, tag=3) == b"good"
    return time.monotonic() - begin


def _opens_files(rank, size):
    """Check that the program of rank 0 can open files."""
    if rank == 0:
        with contextlib.ExitStack() as files:
            for _ in range(8):
                files.enter_context(open("/dev/null"))


@pytest.mark.parametrize("spare", [24, 5])
def test_strangers_do_not_use_up_the_descriptors_of_a_rank(spare):
    """At most a quarter of the limit; if fewer are left, silent strangers are closed after a second."""
    with RankPool(2) as ranks, contextlib.ExitStack() as strangers:
        ranks.new_group()
        address = ranks.run(_limit, spare)[0]
        for _ in range(60 if spare == 24 else 10):
            strangers.enter_context(call(address, b""))
        if spare == 24:
            until(lambda: ranks.run(_strangers)[0] > 8)
            ranks.run(_opens_files)
        assert ranks.run(_received)[0] < 15


def test_hello_of_a_stranger_in_the_name_of_a_rank_ends_no_unlimited_wait(mode, monkeypatch):
    """A rank stores its address before it connects, so that a hello with other flags before that is a stranger's."""
    for name, value in mode.environment.items():
        monkeypatch.setenv(name, value)
    store = dist.HashStore()
    zero = Endpoint(Group(0, 2, store), SECONDS, security_of_environment())
    zero.timeout = timedelta(seconds=0.2)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(zero.accept, 1, 5, None)
        fields, address = hand(store, flags=zero.security.flags ^ 1)
        with call(address, fields.hello()) as sock:
            assert read(sock, 1) == b""
        with pytest.raises(TimeoutError):
            accepted.result(1)
        one = Endpoint(Group(1, 2, store), SECONDS, security_of_environment())
        (there,) = one.connect([0], 5, SECONDS)
        assert accepted.result(SECONDS).peer == 1
        there.close()


@pytest.mark.parametrize("host", ["localhost", "rank.invalid", "a\0b", "x" * 300, "", "10.0.0.1 ", "::1\n", "ä"])
def test_address_in_the_store_that_is_not_numeric_is_an_error_without_a_lookup(host, monkeypatch):
    store, (_, one) = endpoints(KEY, KEY)
    value = store.get("codec/point-to-point/0")
    store.set("codec/point-to-point/0", value[:27] + host.encode())
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("a name is looked up"))
    with pytest.raises(codec.PeerError, match="has no valid address of rank 0"):
        one.connect([0], 3, SECONDS)
