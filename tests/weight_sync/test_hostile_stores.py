"""Stores that never end, name too much, or hide in errors; receivers that read too slowly."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

import codec
from codec.weight_sync import Publisher, UpdateStore, pull, serve
from codec.weight_sync.http import client as http
from codec.weight_sync.http import handler
from codec.weight_sync.store.source import read_head
from codec.weight_sync.updates.listing import Listing
from support.hostile_servers import hostile
from support.weight_updates import published

EMPTY = b'{"format": 2, "run": null, "updates": []}'
OK = b"HTTP/1.1 200 OK\r\n"


def endless(begin, more):
    """Return a function that answers with `begin`, and then with `more` again and again."""

    def answer(connection):
        connection.recv(4096)
        connection.sendall(begin)
        while True:
            connection.sendall(more)
            time.sleep(0.02)

    return answer


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (OK + b"Content-Length: 30000\r\n\r\n", b" "),
        (b"HTTP/1.0 200 OK\r\n\r\n", b" "),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"x: y\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"\x16\x03\x03\x3f\xff", b"\2"),
    ],
    ids=["length", "no_length", "chunks", "chunk_header", "trailers", "continue", "handshake"],
)
def test_replies_that_never_end_are_cut(monkeypatch, begin, more):
    monkeypatch.setattr(http, "_BLOCK_SECONDS", 0.2)
    began = time.monotonic()
    with (
        hostile(endless(begin, more)) as url,
        pytest.raises(codec.ArgumentError, match="was not complete in time"),
    ):
        read_head(url.replace("http", "https") if begin.startswith(b"\x16") else url, timeout=0.3)
    assert time.monotonic() - began < 10


def test_lists_that_change_forever_end_in_an_error():
    """Each list names another missing update, as if a trainer had just deleted the one before."""
    lists = []

    def answer(connection):
        while request := connection.recv(4096):
            if b"/head" not in request:
                connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            entry = {"version": len(lists), "base": None, "nbytes": 500, "digest": "11" * 16}
            lists.append(json.dumps({"format": 2, "run": "22" * 16, "updates": [entry]}).encode())
            connection.sendall(OK + b"Content-Length: %d\r\n\r\n" % len(lists[-1]) + lists[-1])

    receiver = codec.WeightReceiver()
    with hostile(answer) as url, pytest.raises(codec.ArgumentError, match="does not exist"):
        pull(receiver, url, timeout=10)
    assert len(lists) == 10
    assert receiver.version is None


@pytest.mark.parametrize("value", [b"[]", b"{}", b"1e9", b'"ab"', b'{"": 1}'])
def test_lists_of_other_values_are_refused_before_they_are_parsed(monkeypatch, value):
    body = b'{"format": 2, "run": null, "updates": [' + b",".join([value] * 1000) + b"]}"
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(ValueError, match="more values than a list"):
        Listing.parse(body)
    monkeypatch.undo()
    entry = {"version": 1, "base": None, "nbytes": 9, "digest": "11" * 16}
    shortest = {"format": 2, "run": "22" * 16, "updates": [entry] * 1000}
    assert len(Listing.parse(json.dumps(shortest, separators=(",", ":")).encode()).updates) == 1000
    assert Listing.parse(EMPTY.replace(b" ", b"")).updates == ()


def test_updates_far_above_max_nbytes_are_not_downloaded(tmp_path):
    """A list of a hostile store may name an update that would fill the disk."""
    with Publisher(tmp_path, host="127.0.0.1") as publisher:
        published(publisher, 1)
        head = json.loads((tmp_path / "head").read_bytes())
        head["updates"][0]["nbytes"] = 1 << 40
        (tmp_path / "head").write_text(json.dumps(head))
        (tmp_path / f"{0:020d}.snapshot").unlink()
        for source in (tmp_path, publisher.source):
            with pytest.raises(codec.LimitError, match="far more than the weights may have"):
                pull(codec.WeightReceiver(max_nbytes=1 << 30), source)


def test_compressed_replies_are_not_decompressed():
    def answer(connection):
        assert b"Accept-Encoding: identity" in connection.recv(4096)
        connection.sendall(OK + b"Content-Encoding: gzip\r\nContent-Length: 20\r\n\r\n" + b"\x1f\x8b\x08" + bytes(17))

    with hostile(answer) as url, pytest.raises(codec.FrameError, match="not a list of updates"):
        read_head(url, timeout=10)


@pytest.mark.parametrize(
    "reply",
    [b"HTTP/1.1\x1b[31m hello\r\n\r\n", OK + b"Content-Length: \x1b[31m\r\n\r\n", b"HTTP/1.1 500 \x1b[2J\r\n\r\n"],
)
def test_terminal_escapes_of_a_server_are_not_in_errors(reply):
    def answer(connection):
        connection.recv(4096)
        connection.sendall(reply)

    with hostile(answer) as url, pytest.raises(codec.ArgumentError) as e:
        read_head(url, timeout=10)
    assert str(e.value).isprintable()


@pytest.mark.parametrize(
    "url", ["https://h/?key=hunter2", "http://h#hunter2", "s3://id:hunter2@bucket/store", "gs://b/x?sig=hunter2"]
)
def test_secrets_in_urls_are_refused_and_not_shown(url):
    with pytest.raises(codec.ArgumentError, match=r"must (not hold|hold no)") as e:
        read_head(url)
    assert "hunter2" not in str(e.value)


@pytest.mark.parametrize("path", ["a\0b", "/tmp/" + "x" * 5000])
def test_impossible_paths_are_documented_errors(path, tmp_path):
    for call in (
        lambda: read_head(path),
        lambda: read_head(f"http://127.0.0.1:1/{path}", timeout=1),
        lambda: UpdateStore(path),
        lambda: Publisher(path),
        lambda: codec.WeightReceiver(folder=path),
        lambda: codec.WeightReceiver(verify=path),
        lambda: serve(tmp_path, tls=path),
        lambda: pull(codec.WeightReceiver(), "https://127.0.0.1:1", cafile=path),
    ):
        with pytest.raises((codec.ArgumentError, codec.StateError)):
            call()


def test_receivers_that_read_byte_by_byte_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(handler, "_BLOCK_SECONDS", 0.5)
    UpdateStore(tmp_path)
    (tmp_path / f"{0:020d}.snapshot").write_bytes(bytes(1 << 23))
    with serve(tmp_path) as server, socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.settimeout(30)
        s.connect(("127.0.0.1", server._server.server_port))
        s.sendall(f"GET /{0:020d}.snapshot HTTP/1.1\r\n\r\n".encode())
        began = time.monotonic()
        assert s.recv(1) == b"H"
        while server._server._open:
            assert s.recv(1)
            assert time.monotonic() - began < 20
            time.sleep(0.01)


def test_connection_without_a_thread_is_given_back(tmp_path, monkeypatch):
    """A machine that has no more threads for a while must not use up the connections of the server."""
    monkeypatch.setattr(handler, "CONNECTIONS", 2)
    monkeypatch.setattr(handler.Server, "handle_error", lambda *_: None)
    with Publisher(tmp_path, host="127.0.0.1") as publisher:
        published(publisher, 1)
        start, left = threading.Thread.start, [5]

        def refuse(thread):
            if thread.name.endswith("(process_request_thread)") and left[0]:
                left[0] -= 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        for _ in range(5):
            with pytest.raises(codec.ArgumentError):
                read_head(publisher.source, timeout=10)
        assert pull(codec.WeightReceiver(), publisher.source, timeout=10) == 0
        assert left == [0]


def test_links_in_the_folder_are_not_served(tmp_path):
    (tmp_path / "secret").write_text("hunter2")
    UpdateStore(tmp_path / "store")
    (tmp_path / "store" / f"{1:020d}.update").symlink_to(tmp_path / "secret")
    with serve(tmp_path / "store") as server:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{server.url}/{1:020d}.update", timeout=30)
        assert read_head(server.url).updates == ()


def test_other_methods_paths_and_ranges_get_no_files(tmp_path):
    (tmp_path / "secret").write_text("hunter2")
    (tmp_path / "store").mkdir()
    UpdateStore(tmp_path / "store")
    with serve(tmp_path / "store") as server:

        def reply(request):
            with socket.create_connection(("127.0.0.1", server._server.server_port), timeout=30) as s:
                s.sendall(request)
                s.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: s.recv(1 << 16), b""))

        for path in (b"/../secret", b"/%2e%2e/secret", b"//head", b"/head/../head", b"/head%00", b"/head?token=x",
                     b"/./head", b"/HEAD", b"http://h/head", b"/" + b"a" * 4096, b"/head\xc2\xb2"):  # fmt: skip
            found = reply(b"GET " + path + b" HTTP/1.1\r\n\r\n")
            assert found.startswith(b"HTTP/1.1 404") or path == b"//head"
            assert b"hunter2" not in found
        for method in (b"HEAD", b"PUT", b"POST", b"DELETE", b"OPTIONS", b"TRACE", b"CONNECT", b"PROPFIND"):
            assert reply(method + b" /head HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 501")
        ranges = reply(b"GET /head HTTP/1.1\r\nRange: bytes=0-0,1-1,2-,-5\r\n\r\n")
        assert ranges.endswith((tmp_path / "store" / "head").read_bytes())
        two = reply(b"GET /head HTTP/1.1\r\n\r\n" * 2)
        assert two.count(b"HTTP/1.1 200") == 2
        body = reply(b"GET /head HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 30\r\n\r\nGET /head HTTP/1.1\r\n\r\n")
        assert (body.count(b"HTTP/1.1 "), body[:12]) == (1, b"HTTP/1.1 400")
