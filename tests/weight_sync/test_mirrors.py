"""Receivers that serve what they download: fan-out from a busy server, and mirrors that die, lie or stall.

One file: all tests use a server that records what it sends, and is busy with few receivers.
"""

import os
import resource
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

import codec
from codec.weight_sync import Publisher, pull, serve
from codec.weight_sync.http import client as http
from codec.weight_sync.http import fan_out, handler, hints, server
from codec.weight_sync.http.arriving import Arriving
from codec.weight_sync.store.source import StoreReader, read_head, read_update
from support.certificates import certificate
from support.hostile_servers import hostile

TOKEN = "sixteen-or-more-characters"
OK = "HTTP/1.1 200 OK\r\n"
WEIGHTS = {"w": np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8)}


@pytest.fixture(autouse=True)
def sent(monkeypatch):
    """Let servers send nothing themselves if a mirror has it; return the ports and headers of requests they served."""
    requests, reply = [], handler.Handler._reply

    def noted(self, offered):
        if self.path != "/head":
            requests.append((self.server.server_port, self.headers.get("Range")))
        reply(self, offered)

    monkeypatch.setattr(handler.Handler, "_reply", noted)
    monkeypatch.setattr(handler, "MIN_NBYTES", 0)
    monkeypatch.setattr(fan_out, "READERS", 0)
    monkeypatch.setattr(http, "_BLOCK", 1 << 14)
    return requests


@pytest.fixture
def store(tmp_path):
    with Publisher(tmp_path / "store", host="127.0.0.1") as publisher:
        publisher.publish(WEIGHTS)
        yield publisher


def pulled(source, **how):
    """Pull into a new receiver, and check the weights."""
    with codec.WeightReceiver(**({"verify": how.pop("verify")} if "verify" in how else {})) as receiver:
        assert pull(receiver, source, **how) == 0
        assert dict(receiver.tensors())["w"].tobytes() == WEIGHTS["w"].tobytes()


def port_of(server):
    return int(server.url.rpartition(":")[2]) if hasattr(server, "url") else int(server.source.rpartition(":")[2])


def register(source, url):
    """Request the snapshot as a mirror at `url` would."""
    with StoreReader(source) as reader:
        [one] = reader.listing().updates
        with Arriving(one.file, one.nbytes) as file:
            assert reader._connection.copy(one.file, file, url.removeprefix("http://")) is None
            return bytes(file.mapped())


def test_busy_server_names_mirrors_to_mirrors_and_to_other_receivers(store, sent):
    with serve(store.source) as a, serve(store.source) as b:
        for source in (a, b, store.source, a):
            pulled(source)
    assert [port for port, _ in sent] == [port_of(store), port_of(a), port_of(b)]


def test_server_that_is_not_busy_sends_files_itself(store, sent, monkeypatch):
    monkeypatch.setattr(fan_out, "READERS", 2)
    with serve(store.source) as a:
        for source in (a, store.source, store.source):
            pulled(source)
    assert [port for port, _ in sent] == [port_of(store)] * 3


def test_server_is_busy_until_receivers_have_what_it_has_sent(store, monkeypatch):
    """A small file fits into the buffers of the operating system, long before a slow receiver has it."""
    monkeypatch.setattr(fan_out, "READERS", 1)
    [one] = read_head(store.source).updates
    with socket.socket() as slow, serve(store.source) as mirror:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port_of(store)))
        slow.sendall(f"GET /{one.file} HTTP/1.1\r\nCodec-Mirror: -\r\n\r\n".encode())
        slow.recv(1)
        pulled(mirror)
        with StoreReader(store.source) as reader, Arriving(one.file, one.nbytes) as file:
            hint = reader._connection.copy(one.file, file, "-")
            assert hint.url == mirror.url
            [tree] = [one for one in store._server._server.fan_out._trees.values() if one.nodes]
            slow.settimeout(0.05)
            while tree.sends:
                with suppress(TimeoutError):
                    slow.recv(1 << 20)
            assert reader._connection.copy(one.file, file, "-") is None


def test_mirror_forwards_a_file_while_it_arrives(store, sent, monkeypatch):
    """A chain of three mirrors, of which the first one stops in the middle until the last one has the first half."""
    append, half, halves = Arriving.append, threading.Event(), []

    def gated(file, block):
        append(file, block)
        if file not in halves and file.size > file.nbytes // 2:
            halves.append(file)
            if len(halves) == 3:
                half.set()
            assert half.wait(30)

    monkeypatch.setattr(hints, "_PATIENCE", 30.0)
    monkeypatch.setattr(Arriving, "append", gated)
    with ThreadPoolExecutor(3) as threads, serve(store.source) as a, serve(store.source) as b, serve(store.source) as c:
        waiting = []
        for k, mirror in enumerate((a, b, c)):
            waiting.append(threads.submit(pulled, mirror))
            while len(halves) <= k and not half.is_set():
                time.sleep(0.005)
        for one in waiting:
            one.result()
    assert [port for port, _ in sent] == [port_of(store), port_of(a), port_of(b)]


def faults(body):
    """Return the replies of faulty mirrors to the request of a file, and the pauses after which they close."""
    length = f"Content-Length: {len(body)}\r\n\r\n"
    other = bytes(reversed(body))
    return {
        "nothing": (b"", 0),
        "garbage": ((OK + length).encode() + other, 0),
        "one_bit": ((OK + length).encode() + body[:999] + bytes([body[999] ^ 1]) + body[1000:], 0),
        "stops": ((OK + length).encode() + body[:100_000], 0),
        "stops_after_garbage": ((OK + length).encode() + other[:100_000], 0),
        "stalls": ((OK + length).encode() + body[:100_000], 60),
        "never_answers": (b"", 60),
        "shorter": (OK.encode() + b"Content-Length: 5\r\n\r\nhello", 0),
        "longer": ((OK + "Content-Length: 999999999\r\n\r\n").encode() + body * 2, 0),
        "endless": (OK.encode() + b"\r\n" + body * 2, 0),
        "missing": (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", 0),
        "redirects": (b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/x\r\nContent-Length: 0\r\n\r\n", 0),
        "other_protocol": (b"\0" * 100, 0),
    }


@pytest.mark.parametrize("fault", faults(b"x" * 2000))
@pytest.mark.parametrize("mirrored", [False, True], ids=["receiver", "mirror"])
def test_faulty_mirror_costs_a_retry_only(store, sent, monkeypatch, fault, mirrored):
    monkeypatch.setattr(hints, "_PATIENCE", 0.15)
    asked = []

    def answer(connection):
        asked.append(connection.recv(4096))
        reply, pause = faults(body)[fault]
        connection.sendall(reply)
        connection.settimeout(pause)
        if pause:
            connection.recv(1)

    with hostile(answer) as url:
        body = register(store.source, url)
        del sent[:]
        began = time.monotonic()
        if mirrored:
            with serve(store.source) as mirror:
                pulled(mirror)
                with mirror.mirror.files.open(f"{0:020d}.snapshot") as offered:
                    assert os.pread(offered.file.fileno(), len(body) + 1, 0) == body
        else:
            pulled(store.source)
        assert time.monotonic() - began < 10
    assert len(asked) == 1
    begin = {"stops": "bytes=100000-", "stalls": "bytes=98304-", "endless": "bytes=294912-"}  # whole blocks
    assert sent[-1] == (port_of(store), begin.get(fault))


def test_slow_mirror_is_left(store, sent, monkeypatch):
    monkeypatch.setattr(hints, "_PATIENCE", 0.15)
    monkeypatch.setattr(hints, "_RATE", 1 << 24)

    def answer(connection):
        connection.recv(4096)
        connection.sendall(f"{OK}Content-Length: {len(body)}\r\n\r\n".encode())
        for k in range(0, len(body), 20_000):
            connection.sendall(body[k : k + 20_000])
            time.sleep(0.1)

    with hostile(answer) as url:
        body = register(store.source, url)
        pulled(store.source)
    assert sent[-1][1].startswith("bytes=")


def test_port_on_which_nothing_listens_costs_a_retry(store, sent):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"127.0.0.1:{closed.getsockname()[1]}"
    register(store.source, url)
    pulled(store.source)
    assert len(sent) == 2


def test_killed_mirror_loses_no_receiver(store, sent, monkeypatch):
    """A process is killed that has received a third of the file, and forwarded it."""
    append, (readable, writable) = Arriving.append, os.pipe()

    def slowly(file, block):
        append(file, block)
        if file.size > 100_000:
            os.write(writable, b"x")
            time.sleep(60)

    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(Arriving, "append", slowly)
        with serve(store.source) as mirror:
            pull(codec.WeightReceiver(), mirror)
        os._exit(1)
    try:
        os.read(readable, 1)
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        pulled(store.source)
    finally:
        os.waitpid(pid, 0)
        os.close(readable)
        os.close(writable)
    assert sent[-1][0] == port_of(store)
    assert int(sent[-1][1].removeprefix("bytes=").removesuffix("-")) > 100_000


def test_mirrors_use_the_token_and_tls_of_the_store(tmp_path, sent):
    both, public = certificate(tmp_path, "trusted")
    elsewhere, _ = certificate(tmp_path, "elsewhere", "IP:192.0.2.1")
    key = b"k" * 32
    how = {"token": TOKEN, "cafile": public}
    with Publisher(tmp_path / "store", host="127.0.0.1", token=TOKEN, tls=both, sign=key) as publisher:
        publisher.publish(WEIGHTS)
        with serve(publisher.source, tls=both, **how) as a, serve(publisher.source, tls=both, **how) as b:
            assert a.url.startswith("https://127.0.0.1:")
            pulled(a, verify=key)
            pulled(b, verify=key)
            pulled(publisher.source, verify=key, **how)
            assert [port for port, _ in sent] == [port_of(publisher), port_of(a), port_of(b)]
            for wrong in ({"cafile": public}, {"cafile": public, "token": TOKEN + "x"}):
                with pytest.raises(codec.ArgumentError, match="token"):
                    StoreReader(a.url, **wrong)._connection.read(f"{0:020d}.snapshot", 1 << 20)
        for wrong, message in (
            (how, "needs tls="),
            (how | {"tls": elsewhere}, "cannot reach this mirror: .* not trusted"),
            (how | {"tls": elsewhere, "cafile": elsewhere}, "cannot reach this mirror: .* of another host"),
        ):
            with pytest.raises(codec.ArgumentError, match=message):
                serve(publisher.source, **wrong)
    with pytest.raises(codec.ArgumentError, match="begins with http"):
        serve("http://127.0.0.1:1", tls=both)


def test_receivers_with_a_key_refuse_a_signed_list_of_another_size(store, sent):
    """A mirror is no source of lists, and a receiver with a key demands a signature of what a mirror forwards."""
    with serve(store.source) as mirror:
        with pytest.raises(codec.FrameError, match="not signed"):
            pull(codec.WeightReceiver(verify=b"k" * 32), mirror)
        pulled(mirror)
        with pytest.raises(codec.ArgumentError, match="not a store of updates"):
            read_head(mirror.url)


def test_mirror_fails_as_a_receiver_does_and_goes_on(store, sent):
    """Files that cannot be written, and interrupts, leave the receiver unchanged; the next pull succeeds."""
    files = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with serve(store.source) as mirror:
        receiver = codec.WeightReceiver()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            with pytest.raises(codec.ArgumentError, match="cannot be written to the folder"):
                pull(receiver, mirror)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        append = Arriving.append

        def interrupted(file, block):
            append(file, block)
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Arriving, "append", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pull(receiver, mirror)
        assert receiver.version is None
        with pytest.raises(codec.ArgumentError, match="does not exist"):
            StoreReader(mirror.url)._connection.read(f"{0:020d}.snapshot", 1 << 20)
        pulled(mirror)
        receiver.close()
    del receiver
    assert len(os.listdir("/proc/self/fd")) <= files + 1


def test_mirror_keeps_files_for_two_minutes(store, sent, monkeypatch):
    with serve(store.source) as mirror:
        pulled(mirror)
        offered = mirror.mirror.files._files
        assert list(offered) == [f"{0:020d}.snapshot"]
        from codec.weight_sync.http import offered as module

        monkeypatch.setattr(module, "SECONDS", 0.0)
        end = time.monotonic() + 10
        while offered:
            assert time.monotonic() < end
            time.sleep(0.01)
        monkeypatch.undo()
        pulled(mirror)


def test_new_run_replaces_files_of_the_same_name(tmp_path, sent):
    with Publisher(tmp_path / "old", host="127.0.0.1") as old, serve(old.source) as mirror:
        old.publish({"w": WEIGHTS["w"][::-1].copy()})
        receiver = codec.WeightReceiver()
        pull(receiver, mirror)
        old.close()
        with Publisher(tmp_path / "old", host="127.0.0.1", port=port_of(old)) as new:
            (tmp_path / "old" / "head").unlink()
            new.publish(WEIGHTS)
            pulled(mirror)
            pulled(new.source)


def test_update_whose_sha256_differs_from_the_list_is_refused(store, sent):
    path = store._store.folder / f"{0:020d}.snapshot"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    with serve(store.source) as mirror:
        for source in (mirror, store.source):
            with pytest.raises(codec.FrameError, match="not the update that the list"):
                pull(codec.WeightReceiver(), source)


def test_lists_without_sha256_use_no_mirrors(store, sent):
    one = read_head(store.source).updates[0]._replace(sha256=None)
    with serve(store.source) as mirror:
        pulled(mirror)
        read_update(store.source, one)
    assert [port for port, _ in sent] == [port_of(store)] * 2


def test_sources_that_cannot_be_mirrored_are_errors(store, sent, tmp_path):
    with pytest.raises(codec.ArgumentError, match="cafile="):
        serve(tmp_path, cafile=False)
    for url in ("ftp://127.0.0.1", "http://", "http://no-such-host.invalid", "http://127.0.0.1:99999"):
        with pytest.raises(codec.ArgumentError):
            serve(url)
    with pytest.raises(codec.ArgumentError, match="cannot reach this mirror"):
        serve(store.source, "127.0.0.2")
    with pytest.raises(codec.ArgumentError, match="pass the URL"):
        pull(codec.WeightReceiver(), store._server)
    with serve(store.source) as mirror, pytest.raises(codec.ArgumentError, match="token="):
        pull(codec.WeightReceiver(), mirror, token=TOKEN)
    for call in (
        lambda: pull(codec.WeightReceiver(), mirror),
        lambda: read_update(mirror, read_head(mirror).updates[0]),
    ):
        with pytest.raises(codec.StateError, match=r"call serve\(\) again"):
            call()


@pytest.mark.parametrize(
    "location",
    ["https://127.0.0.1:{port}/{name}", "http://localhost:{port}/{name}", "http://127.0.0.1:{port}/head", "",
     "http://x@127.0.0.1:{port}/{name}", "http://127.0.0.1:{port}/../{name}", "http://127.0.0.1/{name}", "/{name}",
     "http://127.0.0.1:0/{name}", "http://[fe80::1%eth0]:{port}/{name}", "file:///etc/{name}", "http://1:{port}/{name}"],
)  # fmt: skip
def test_redirects_that_are_no_hints_are_not_followed(store, sent, location):
    reached = []

    def trainer(connection):
        while request := connection.recv(4096):
            if b"/head" in request:
                body = (store._store.folder / "head").read_bytes()
                connection.sendall(f"{OK}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            else:
                name = request.split()[1].decode().strip("/")
                where = location.format(port=port, name=name)
                reply = f"HTTP/1.1 307 x\r\nCodec-Depth: 1\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n"
                connection.sendall(reply.encode())

    with hostile(lambda connection: reached.append(connection.recv(4096))) as other, hostile(trainer) as url:
        port = other.rpartition(":")[2]
        with pytest.raises(codec.ArgumentError, match="not the address of a mirror"):
            pull(codec.WeightReceiver(), url)
    assert reached == []


def test_variable_makes_each_process_a_mirror(store, sent, monkeypatch):
    """Programs whose users cannot pass a mirror, such as workers of vLLM, read from each other."""
    one = read_head(store.source).updates[0]
    monkeypatch.setenv("CODEC_STORE_MIRROR", "1")
    for _ in range(2):
        read_update(store.source, one)
    [mirror] = server._mirrors.values()
    monkeypatch.delenv("CODEC_STORE_MIRROR")
    with mirror:
        pulled(store.source)
    server._mirrors.clear()
    assert [port for port, _ in sent] == [port_of(store), port_of(mirror)]
    for value, message in (("yes", "must be 1 or 0"), ("1", "CODEC_STORE_MIRROR: this machine cannot be a mirror")):
        monkeypatch.setenv("CODEC_STORE_MIRROR", value)
        with pytest.raises(codec.ArgumentError, match=message):
            read_head("http://no-such-host.invalid")


def test_rest_of_a_file_is_sent_on_request(store, sent):
    body = (store._store.folder / f"{0:020d}.snapshot").read_bytes()

    def reply(wanted):
        with socket.create_connection(("127.0.0.1", port_of(store)), timeout=30) as s:
            s.sendall(f"GET /{0:020d}.snapshot HTTP/1.1\r\nRange: {wanted}\r\n\r\n".encode())
            s.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: s.recv(1 << 16), b"")).partition(b"\r\n\r\n")

    for begin in (1, 4096, len(body) - 1):
        head, _, found = reply(f"bytes={begin}-")
        assert head.startswith(b"HTTP/1.1 206")
        assert f"Content-Range: bytes {begin}-{len(body) - 1}/{len(body)}".encode() in head
        assert found == body[begin:]
    for wanted in ("bytes=0-", f"bytes={len(body)}-", "bytes=5-9", "bytes=-5", "lines=5-", "bytes=" + "9" * 30 + "-"):
        head, _, found = reply(wanted)
        assert head.startswith(b"HTTP/1.1 200")
        assert found == body
