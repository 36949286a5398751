"""Updates over HTTP: servers and clients that are slow, silent, many, or hostile."""

import os
import signal
import socket
import threading
import urllib.error
import urllib.request

import pytest

import codec
from codec.weight_sync import Publisher, UpdateStore, pull, serve
from codec.weight_sync.http import handler
from codec.weight_sync.http import server as server_module
from codec.weight_sync.store.source import read_head
from support.weight_updates import equal, published


def test_server_offers_updates_only(tmp_path):
    (tmp_path / "secret").write_text("x")
    with serve(tmp_path) as server:
        for path in ("secret", "../secret", "", "head", "%2e%2e/secret", "00000000000000000001.update"):
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{server.url}/{path}", timeout=30)
        url = server.url
    with pytest.raises(codec.ArgumentError, match="cannot be read"):
        read_head(url, timeout=5)
    with pytest.raises(codec.ArgumentError, match="cannot listen on"):
        serve(tmp_path, "203.0.113.1")


def test_connection_that_is_cut_or_lies_changes_nothing(tmp_path):
    """If a server stops inside a file, or sends more bytes than its list declares, the receiver raises, unchanged."""
    with Publisher(tmp_path) as publisher:
        published(publisher, 1)
    snapshot = (tmp_path / f"{0:020d}.snapshot").read_bytes()
    head = (tmp_path / "head").read_bytes()
    for body, length in (
        (snapshot[:-9], len(snapshot)),
        (snapshot + b"more", len(snapshot) + 4),
        (snapshot[:-9], None),
    ):
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer(listener=listener, body=body, length=length):
                for content, size in ((head, len(head)), (body, length)):
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(4096)
                        line = "" if size is None else f"Content-Length: {size}\r\n"
                        connection.sendall(f"HTTP/1.0 200 OK\r\n{line}\r\n".encode() + content)

            thread = threading.Thread(target=answer)
            thread.start()
            receiver = codec.WeightReceiver()
            with pytest.raises((codec.FrameError, codec.ArgumentError)):
                pull(receiver, f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=1)
            thread.join()
            assert receiver.version is None


def replies(*bodies):
    """Serve one of the replies to each connection; return the URL."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listener:
            for body in bodies:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(body)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


OK, MOVED = b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: "
EMPTY = b'{"format":2,"run":null,"updates":[]}'


HOSTILE = [
    OK + b"Content-Length: abc\r\n\r\n" + EMPTY, OK + b"Content-Length: 1e3\r\n\r\n" + EMPTY,
    OK + b"Content-Length: -1\r\n\r\n" + EMPTY, OK + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + EMPTY,
    OK + b"Content-Length: 99999999\r\n\r\n", OK + b"Content-Length: 100\r\n\r\n" + EMPTY,
    OK + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n" + EMPTY, OK + b"Content-Length: 99999\r\n\r\n" + b"[" * 99999,
    MOVED + b"http://[::1\r\n\r\n", MOVED + b"http://\xff\xfe/\r\n\r\n",
    MOVED + b"http://" + b"a" * 70 + b".b/\r\n\r\n", MOVED + b"ftp://127.0.0.1/head\r\n\r\n",
    MOVED + b"file:///etc/passwd\r\n\r\n", MOVED + b"/head\r\n\r\n", b"HTTP/1.1 503 Service Unavailable\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n", b"", b"\0" * 99, b"HTTP/9.9 2\r\n\r\n", b"HTTP/1.1 abc OK\r\n\r\n",
    OK + b"x: y\r\n" * 999 + b"\r\n",
]  # fmt: skip


@pytest.mark.parametrize("k", range(len(HOSTILE)))
def test_hostile_replies_are_documented_errors(k):
    with pytest.raises((codec.ArgumentError, codec.FrameError)):
        pull(codec.WeightReceiver(), replies(*[HOSTILE[k]] * 9), timeout=10)


def test_receiver_reads_a_chain_on_one_connection_without_a_proxy(tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with Publisher(tmp_path, host="127.0.0.1", snapshot_every=100) as publisher:
        all_weights = published(publisher, 8)
        server = publisher._server._server
        connections, original = [], server.process_request
        monkeypatch.setattr(server, "process_request", lambda *a: (connections.append(a), original(*a)))
        receiver = codec.WeightReceiver()
        assert pull(receiver, publisher.source) == 7
        assert equal(all_weights[7], receiver.tensors())
        assert len(connections) == 1


def test_connection_that_the_server_has_closed_is_opened_again(tmp_path):
    with Publisher(tmp_path, host="127.0.0.1") as publisher:
        published(publisher, 3)
        server = publisher._server._server

        def close_all(update):
            with server._lock:
                for connection in server._open:
                    connection.shutdown(socket.SHUT_RDWR)

        assert pull(codec.WeightReceiver(), publisher.source, progress=close_all) == 2


def test_files_are_not_to_be_cached(tmp_path):
    UpdateStore(tmp_path)
    with serve(tmp_path) as server, urllib.request.urlopen(f"{server.url}/head", timeout=30) as reply:
        assert reply.headers["Cache-Control"] == "no-store"


def test_silent_connections_are_closed_and_do_not_block_receivers(tmp_path, monkeypatch):
    """More silent clients than the server serves at a time have a limited time to send a request."""
    monkeypatch.setattr(handler, "_REQUEST_SECONDS", 2.0)
    monkeypatch.setattr(handler, "_BUSY_SECONDS", 0.1)
    monkeypatch.setattr(handler, "CONNECTIONS", 8)
    with Publisher(tmp_path, host="127.0.0.1") as publisher:
        published(publisher, 1)
        port = publisher._server._server.server_port
        before = threading.active_count()
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        silent[0].sendall(b"GET /head HT")
        assert pull(codec.WeightReceiver(), publisher.source, timeout=60) == 0
        assert threading.active_count() <= before + 8
        assert silent[0].recv(1) == b""
        for one in silent:
            one.close()


def test_closed_server_refuses_connections_also_while_a_child_lives(tmp_path):
    UpdateStore(tmp_path)
    server = serve(tmp_path)
    idle = socket.create_connection(("127.0.0.1", server._server.server_port))
    pid = os.fork()
    if pid == 0:
        server.close()  # releases the child's copy only
        signal.pause()
    try:
        assert read_head(server.url).updates == ()
        server.close()
        assert idle.recv(1) == b""
        with pytest.raises(codec.ArgumentError, match="refused"):
            read_head(server.url)
    finally:
        idle.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "::1", "localhost"])
def test_url_has_an_address_that_receivers_can_reach(tmp_path, host):
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    UpdateStore(tmp_path)
    with serve(tmp_path, host) as server:
        assert read_head(server.url).updates == ()
        address = server.url.removeprefix("http://").rpartition(":")[0]
        assert address not in ("0.0.0.0", "[::]", "")


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_address_of_another_machine_is_preferred_to_loopback(monkeypatch):
    named = [(socket.AF_INET, 1, 6, "", (ip, 0)) for ip in ("127.0.1.1", "169.254.3.4", "192.0.2.7", "10.1.2.3")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: named)
    monkeypatch.setattr(server_module, "_can_bind", lambda address, family: address != "192.0.2.7")
    assert server_module._reachable("0.0.0.0", socket.AF_INET) == "10.1.2.3"
    assert server_module._reachable("10.9.9.9", socket.AF_INET) == "10.9.9.9"
