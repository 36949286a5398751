"""Stores over TLS and with tokens: who may read them, and what a hostile server, proxy or client can do."""

import ast
import inspect
import pickle
import socket
import ssl
import threading
import time
import traceback
import urllib.error
import urllib.request

import pytest

import codec
from codec.files import signing
from codec.weight_sync import Publisher, UpdateStore, pull, serve
from codec.weight_sync.http import client as http
from codec.weight_sync.http import credentials, handler
from codec.weight_sync.store.source import read_head
from support.certificates import certificate, openssl
from support.weight_updates import equal, published

TOKEN = "sixteen-or-more-characters"


@pytest.fixture(scope="module")
def trusted(tmp_path_factory):
    return certificate(tmp_path_factory.mktemp("certificates"), "trusted")


def status(request):
    """Return the status of the reply to a request."""
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status
    except urllib.error.HTTPError as e:
        return e.code


def exchange(url, *parts, pause=0.0):
    """Send bytes to a server, and return what it sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=30) as s:
        for part in parts:
            s.sendall(part)
            time.sleep(pause)
        found = b""
        try:
            while more := s.recv(1 << 16):
                found += more
        except ConnectionResetError:
            pass
        return found


def test_receivers_read_over_tls_with_a_token(tmp_path, trusted):
    both, public = trusted
    with Publisher(tmp_path, host="127.0.0.1", token=TOKEN, tls=both) as publisher:
        all_weights = published(publisher, 4)
        assert publisher.source.startswith("https://127.0.0.1:")
        receiver = codec.WeightReceiver()
        assert pull(receiver, publisher.source, token=TOKEN, cafile=public) == 3
        assert equal(all_weights[3], receiver.tensors())


def test_tls_of_a_pair_of_files_has_at_least_version_1_2(tmp_path, trusted):
    both, public = trusted
    UpdateStore(tmp_path)
    with serve(tmp_path, tls=(public, both)) as server:
        assert server._server.tls.minimum_version == ssl.TLSVersion.TLSv1_2
        assert pull(codec.WeightReceiver(), server.url, cafile=str(public)) is None
    context = credentials.client_context(public)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


@pytest.mark.parametrize(
    ("name", "host", "expired", "message"),
    [
        ("other", "IP:127.0.0.1", False, "not trusted .*: pass .* as cafile="),
        ("expired", "IP:127.0.0.1", True, "out of date"),
        ("elsewhere", "DNS:trainer.example,IP:192.0.2.1", False, "of another host"),
    ],
)
def test_wrong_certificates_are_refused(tmp_path, trusted, name, host, expired, message):
    both, public = certificate(tmp_path, name, host, expired)
    cafile = trusted[1] if name == "other" else public
    with Publisher(tmp_path / "store", host="127.0.0.1", tls=both) as publisher:
        published(publisher, 1)
        receiver = codec.WeightReceiver()
        with pytest.raises(codec.ArgumentError, match=message):
            pull(receiver, publisher.source, cafile=cafile)
        with pytest.raises(codec.ArgumentError, match="certificate of the server"):
            pull(receiver, publisher.source)
        assert receiver.version is None


def test_plain_and_encrypted_ends_are_errors_with_a_hint(tmp_path, trusted):
    both, public = trusted
    UpdateStore(tmp_path)
    with serve(tmp_path, tls=both) as server, pytest.raises(codec.ArgumentError, match="does the server use https"):
        read_head(server.url.replace("https", "http"))
    with serve(tmp_path) as server, pytest.raises(codec.ArgumentError, match="TLS failed"):
        pull(codec.WeightReceiver(), server.url.replace("http", "https"), cafile=public)


def test_unusable_certificates_and_keys_are_errors(tmp_path, trusted):
    both, public = trusted
    encrypted = tmp_path / "encrypted.pem"
    openssl("pkey", "-in", both, "-aes128", "-passout", "pass:abcdef", "-out", encrypted)
    encrypted.chmod(0o600)
    for tls, message in (
        (public, "cannot be used"),
        (tmp_path / "none", "No such file"),
        ((public, encrypted), "the key is encrypted"),
        ((public, certificate(tmp_path, "other")[0]), "cannot be used"),
        (7, "got int"),
    ):
        with pytest.raises(codec.ArgumentError, match=message):
            serve(tmp_path, tls=tls)
    with pytest.raises(codec.ArgumentError, match="cafile="):
        pull(codec.WeightReceiver(), "https://127.0.0.1:1", cafile=tmp_path / "none")


def test_key_that_others_can_read_is_a_warning(tmp_path):
    both, _ = certificate(tmp_path, "public")
    both.chmod(0o644)
    with pytest.warns(UserWarning, match="other users may read"), serve(tmp_path, tls=both):
        pass


def test_requests_without_the_token_get_nothing(tmp_path):
    with Publisher(tmp_path, host="127.0.0.1", token=TOKEN) as publisher:
        published(publisher, 1)
        receiver = codec.WeightReceiver()
        with pytest.raises(codec.ArgumentError, match="requires a token: pass token="):
            pull(receiver, publisher.source)
        with pytest.raises(codec.ArgumentError, match="does not accept this token") as e:
            pull(receiver, publisher.source, token=TOKEN + "x")
        assert TOKEN not in str(e.value)
        url = f"{publisher.source}/head"
        for value in (TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN[:-1]}", "Bearer ", "Bearer \xe9"):
            assert status(urllib.request.Request(url, headers={"Authorization": value})) == 401
        assert status(f"{publisher.source}/none") == 401
        assert pull(receiver, publisher.source, token=TOKEN) == 0


@pytest.mark.parametrize(
    "token", ["short", "with space in the token", "line\r\nend-of-a-header", "é" * 20, b"x" * 20, 7]
)
def test_invalid_tokens_are_refused_and_not_shown(tmp_path, token):
    for call in (
        lambda: serve(tmp_path, token=token),
        lambda: pull(codec.WeightReceiver(), "http://127.0.0.1:1", token=token),
    ):
        with pytest.raises(codec.ArgumentError, match="a token must be") as e:
            call()
        assert str(token) not in str(e.value)


def test_token_is_not_sent_in_the_clear_to_other_hosts(tmp_path):
    for url in ("http://192.0.2.1:8000", "http://trainer:8000", "http://[2001:db8::1]:1", "http://127.0.0.1.nip.io"):
        with pytest.raises(codec.ArgumentError, match="would be readable on the way"):
            http.Connection(url, 1, TOKEN)
        http.Connection(url, 1, TOKEN, False)
    for url in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "https://192.0.2.1:1"):
        http.Connection(url, 1, TOKEN)
    with pytest.raises(codec.ArgumentError, match="cafile must be a file"):
        http.Connection("https://192.0.2.1:1", 1, TOKEN, False)
    with pytest.raises(codec.ArgumentError, match="cafile= is for https"):
        http.Connection("http://192.0.2.1:1", 1, None, "file")
    with pytest.raises(codec.ArgumentError, match="'folder' is none"):
        pull(codec.WeightReceiver(), "folder", token=TOKEN)
    with pytest.raises(codec.ArgumentError, match="pass host="):
        Publisher(tmp_path / "store", token=TOKEN)
    assert not (tmp_path / "store").exists()


def test_passwords_in_urls_are_refused_and_not_shown():
    for url in ("http://user:hunter2@127.0.0.1:1", "http://user:hunter2\u2100@127.0.0.1:x"):
        with pytest.raises(codec.ArgumentError, match="must not hold a user or password") as e:
            read_head(url)
        assert "hunter2" not in str(e.value)


def test_redirects_are_not_followed(tmp_path):
    """A redirect would show the token, and let another host choose the weights."""
    seen = []
    with socket.create_server(("127.0.0.1", 0)) as listener, Publisher(tmp_path, host="127.0.0.1") as publisher:
        published(publisher, 1)

        def answer():
            for code in (301, 302, 303, 307, 308):
                connection, _ = listener.accept()
                with connection:
                    seen.append(connection.recv(4096))
                    where = f"Location: {publisher.source}/head\r\n".encode()
                    connection.sendall(b"HTTP/1.1 %d Moved\r\nContent-Length: 0\r\n" % code + where + b"\r\n")

        threading.Thread(target=answer, daemon=True).start()
        for _ in range(5):
            with pytest.raises(codec.ArgumentError, match="not followed: pass the URL of the server itself"):
                pull(codec.WeightReceiver(), f"http://127.0.0.1:{listener.getsockname()[1]}", token=TOKEN)
    assert len(seen) == 5


def test_token_is_in_no_repr_state_log_or_output(tmp_path, caplog, capfd):
    caplog.set_level(0)
    with Publisher(tmp_path, host="127.0.0.1", token=TOKEN) as publisher:
        published(publisher, 1)
        pull(codec.WeightReceiver(), publisher.source, token=TOKEN)
        connection = http.Connection(publisher.source, 1, TOKEN)
        server = publisher._server._server
        for one in (publisher, publisher._server, server, server.token, connection):
            assert TOKEN not in repr(one)
            assert TOKEN not in repr(getattr(one, "__dict__", None))
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(server.token)
    assert TOKEN not in caplog.text + "".join(capfd.readouterr())
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize(("module", "name"), [(credentials, "BearerToken"), (signing, "SigningKey")])
def test_secrets_are_compared_in_constant_time(module, name):
    """Secrets are compared by hmac.compare_digest only; the operators == and != compare only numbers of algorithms."""
    tree = ast.parse(inspect.getsource(getattr(module, name)))
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert "hmac.compare_digest" in calls
    assert not any(
        isinstance(op, (ast.Eq, ast.NotEq))
        for n in ast.walk(tree)
        if isinstance(n, ast.Compare) and ast.unparse(n) != "signature[0] != self._algorithm"
        for op in n.ops
    )


def test_requests_that_are_too_large_or_have_a_body_end_the_connection(tmp_path):
    UpdateStore(tmp_path)
    with serve(tmp_path) as server:
        get = b"GET /head HTTP/1.1\r\n"
        for request, code in (
            (get + b"x: " + b"y" * 40000, 431),
            (get + b"x: y\r\n" * 4000 + b"\r\n", 431),
            (b"GET /" + b"a" * 40000, 431),
            (get + b"Content-Length: 20\r\n\r\n" + get, 400),
            (get + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
            (b"POST /head HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 501),
            (b"DELETE /head HTTP/1.1\r\n\r\n", 501),
        ):
            reply = exchange(server.url, request)
            assert reply.count(b"HTTP/1.1 ") == 1 or not reply  # a reset may drop the reply to unread bytes
            assert reply.startswith(b"HTTP/1.1 %d" % code) or (code == 431 and not reply)
            assert b"Python" not in reply
        assert read_head(server.url).updates == ()


def drip(s, data):
    """Send bytes one by one, 20 a second."""
    for k in range(len(data)):
        s.sendall(data[k : k + 1])
        time.sleep(0.05)


def test_slow_requests_and_handshakes_are_cut(tmp_path, trusted, monkeypatch):
    monkeypatch.setattr(handler, "_REQUEST_SECONDS", 0.3)
    UpdateStore(tmp_path)
    for tls in (None, trusted[0]):
        with serve(tmp_path, tls=tls) as server:
            address = ("127.0.0.1", server._server.server_port)
            begin = b"G" if tls is None else b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
            with socket.create_connection(address, timeout=30) as s, pytest.raises(OSError, match=r"reset|pipe"):
                drip(s, begin + bytes(400))


def test_stalled_handshakes_do_not_delay_receivers(tmp_path, trusted):
    both, public = trusted
    with Publisher(tmp_path, host="127.0.0.1", tls=both) as publisher:
        published(publisher, 1)
        address = ("127.0.0.1", publisher._server._server.server_port)
        stalled = [socket.create_connection(address) for _ in range(20)]
        for s in stalled[:10]:
            s.sendall(b"\x16\x03\x01")
        began = time.monotonic()
        assert pull(codec.WeightReceiver(), publisher.source, cafile=public) == 0
        assert time.monotonic() - began < handler._REQUEST_SECONDS / 2
        for s in stalled:
            s.close()


def test_name_of_the_host_is_in_the_url_and_the_certificate(tmp_path, monkeypatch):
    both, public = certificate(tmp_path, "named", "DNS:localhost")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with Publisher(tmp_path / "store", host="localhost", tls=both, token=TOKEN) as publisher:
        published(publisher, 1)
        assert publisher.source.startswith("https://localhost:")
        assert pull(codec.WeightReceiver(), publisher.source, cafile=public, token=TOKEN) == 0
        address = publisher.source.replace("localhost", "127.0.0.1")
        with pytest.raises(codec.ArgumentError, match="of another host"):
            pull(codec.WeightReceiver(), address, cafile=public, token=TOKEN)


def test_ipv6_address_is_in_the_url_and_the_certificate(tmp_path):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    both, public = certificate(tmp_path, "six", "IP:::1")
    with Publisher(tmp_path / "store", host="::1", tls=both, token=TOKEN) as publisher:
        published(publisher, 1)
        assert publisher.source.startswith("https://[::1]:")
        assert pull(codec.WeightReceiver(), publisher.source, cafile=public, token=TOKEN) == 0


def test_slow_header_of_a_server_is_an_error_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                try:
                    connection.sendall(b"HTTP/1.1 200 OK\r\n")
                    for _ in range(400):
                        connection.sendall(b"x: y\r\n"[:1])
                        time.sleep(0.05)
                except OSError:
                    pass

        threading.Thread(target=answer, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(codec.ArgumentError, match="was not complete in time"):
            read_head(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.5)
        assert time.monotonic() - began < 10


CALLS = {
    "no server": lambda folder, url: pull(codec.WeightReceiver(), "http://127.0.0.1:1", token=TOKEN),
    "no reply": lambda folder, url: pull(codec.WeightReceiver(), url, token=TOKEN, timeout=0.1),
    "no store": lambda folder, url: pull(codec.WeightReceiver(), "http://192.0.2.1:1", token=TOKEN),
    "short token": lambda folder, url: pull(codec.WeightReceiver(), url, token=TOKEN[:10]),
    "no address": lambda folder, url: serve(folder, "192.0.2.1", token=TOKEN),
    "no certificate": lambda folder, url: Publisher(folder, host="127.0.0.1", token=TOKEN, tls=folder / "none"),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_traceback_shows_the_token_in_local_variables(tmp_path, name):
    UpdateStore(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(codec.CodecError) as raised:
        CALLS[name](tmp_path, f"http://127.0.0.1:{server.getsockname()[1]}")
    error = traceback.TracebackException.from_exception(raised.value, capture_locals=True)
    leaking = [line for line in error.format() if TOKEN[:8] in line]
    assert len(leaking) == 0, name
