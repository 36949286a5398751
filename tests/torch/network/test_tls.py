"""Connections of ranks with TLS: settings that meet, settings that differ, and attackers on both sides."""

import contextlib
import os
import signal
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from cryptography import x509

import codec
from codec._secret import Secret
from codec._security import Security
from codec._tls import Tls, tls_of, tls_of_environment
from codec.torch.network import handshake, tls
from codec.torch.network.endpoint import Endpoint, endpoint_of
from codec.torch.network.tls import TlsSocket
from support.handshakes import CLIENT, KEY, OTHER, PAIR, Hand, call, hand, met, publish, read, refused, waiting
from support.meshes import SECONDS, Group, until
from support.tls import PSK, Authority, Middle, context, contexts, secured


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in [name for name in os.environ if name.startswith(("CODEC_SECRET", "CODEC_TLS"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("other"), "another ca")


@pytest.fixture(scope="module")
def served():
    """Return the store and the endpoint of a rank 0 that uses TLS and a secret; tests do not close it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.HashStore()
    return store, Endpoint(Group(0, 2, store), SECONDS, PSK)


def encrypted(pair):
    return all(isinstance(connection._sock, TlsSocket) for connection in pair)


def refusals(zero, one, seconds=1.0):
    """Connect rank 1 to rank 0; return the errors of both."""
    with pytest.raises(codec.PeerError) as client:
        one.connect([0], 1, SECONDS)
    with pytest.raises(codec.PeerError) as server:
        zero.accept(1, 1, seconds)
    return str(client.value), str(server.value)


# Settings that meet


def test_ranks_with_a_secret_connect_without_certificates():
    _, (zero, one) = secured(PSK, PSK)
    assert encrypted(met(zero, one))
    assert encrypted(met(zero, one, tag=6))


def test_ranks_with_certificates_of_one_issuer_connect(ca, monkeypatch):
    store, ends = dist.HashStore(), []
    for rank in range(2):
        for name, path in ca.variables(f"rank {rank}").items():
            monkeypatch.setenv(name, path)
        ends.append(endpoint_of(Group(rank, 2, store)))
    assert encrypted(met(*ends))


@pytest.mark.parametrize("secret", [None, KEY])
def test_ranks_with_contexts_of_their_own_connect(ca, secret):
    each = [Security(secret and Secret(secret), tls_of(contexts(ca, ca.issue(f"rank{i}")))) for i in range(2)]
    _, ends = secured(*each)
    assert encrypted(met(*ends))


def test_context_that_checks_the_host_gets_the_address(ca):
    for host, fits in (("127.0.0.1", True), ("10.1.2.3", False)):
        chain = ca.issue("host", host=host)
        each = (
            context(server=True, chain=chain, ca=ca.file),
            context(server=False, chain=chain, ca=ca.file, host=True),
        )
        _, (zero, one) = secured(*[Security(tls=tls_of(each))] * 2)
        if fits:
            met(zero, one)
        else:
            client, _ = refusals(zero, one)
            assert "it has a certificate that is of another host (IP address mismatch" in client


def test_contexts_without_certificates_of_clients_need_a_secret(ca):
    chain = ca.issue("server")
    pair = context(server=True, chain=chain, verify=False), context(server=False, verify=False)
    with pytest.raises(codec.ArgumentError, match="tls needs a secret"):
        secured(Security(tls=tls_of(pair)))
    _, ends = secured(*[Security(Secret(KEY), tls_of(pair))] * 2)
    assert encrypted(met(*ends))


# Settings that differ


def test_wrong_issuer_is_named_on_both_ranks(ca, other):
    _, (zero, one) = secured(*(Security(tls=tls_of(contexts(c, c.issue()))) for c in (ca, other)))
    client, server = refusals(zero, one)
    assert "rank 0 at 127.0.0.1, port" in client
    assert "cannot be connected by TLS: it has a certificate that is not trusted" in client
    assert "as rank 1 with tag 1: it does not trust the issuer of this rank's certificate" in server


def test_client_of_another_issuer_is_refused_with_the_reason(ca, other):
    """In TLS 1.3 the handshake of a client ends before the server has seen its certificate."""
    mine = other.issue()
    client = context(server=False, chain=mine, ca=ca.file)
    _, (zero, one) = secured(
        Security(tls=tls_of(contexts(ca, ca.issue()))),
        Security(tls=tls_of((context(server=True, chain=mine, ca=ca.file), client))),
    )
    client, server = refusals(zero, one)
    assert "it does not trust the issuer of this rank's certificate: use one CODEC_TLS_CA" in client
    assert "it has a certificate that is not trusted" in server


@pytest.mark.parametrize("secret", [None, KEY])
def test_client_without_a_certificate_is_refused_with_the_reason(ca, secret):
    bare = context(server=True, chain=ca.issue(), ca=ca.file), context(server=False, ca=ca.file)
    each = [Security(secret and Secret(secret), tls_of(pair)) for pair in (contexts(ca, ca.issue()), bare)]
    _, (zero, one) = secured(*each)
    client, server = refusals(zero, one)
    assert "it requires a certificate, and this rank has none" in client
    assert "it has sent no certificate, which this rank requires" in server


@pytest.mark.parametrize("rank", [0, 1])
def test_expired_certificate_is_named_on_both_ranks(ca, rank):
    each = [Security(tls=tls_of(contexts(ca, ca.issue(f"e{i}", expired=i == rank)))) for i in range(2)]
    _, (zero, one) = secured(*each)
    errors = refusals(zero, one)
    assert "it refuses this rank's certificate, which is out of date" in errors[rank == 0]
    assert "it has a certificate that is out of date" in errors[rank]


def test_certificate_for_servers_only_is_refused_with_the_reason(ca):
    usages = [x509.ExtendedKeyUsageOID.SERVER_AUTH]
    _, (zero, one) = secured(*[Security(tls=tls_of(contexts(ca, ca.issue("eku", usages=usages))))] * 2)
    _, server = refusals(zero, one)
    assert "must allow both clientAuth and serverAuth in its extended key usage" in server


@pytest.mark.parametrize("rank", [0, 1])
def test_secret_on_one_side_and_certificates_on_the_other_are_an_error(ca, rank):
    each = [PSK, Security(Secret(KEY), tls_of(contexts(ca, ca.issue())))]
    _, (zero, one) = secured(*each[:: 1 if rank else -1])
    client, server = refusals(zero, one)
    assert "rank 0 at 127.0.0.1" in client
    assert "use the same tls=" in client
    assert "TLS" in server or "certificate" in server


def test_ranks_with_different_secrets_raise():
    _, (zero, one) = secured(PSK, Security(Secret(OTHER), Tls()))
    client, server = refusals(zero, one)
    assert "has not proven the secret of this rank: set the same secret" in client
    assert "it has ended before it has proven the secret" in server


def test_version_below_1_3_is_refused(ca, monkeypatch):
    """A server that speaks TLS 1.2 only, as one could be made by a user who passes other contexts on each rank."""
    pair = contexts(ca, ca.issue())
    old = contexts(ca, ca.issue("old"))
    for each in old:
        each.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(codec.ArgumentError, match=r"the context of the server excludes TLS 1\.3"):
        tls_of(old)
    _, (zero, one) = secured(Security(tls=Tls(old)), Security(tls=tls_of(pair)))
    client, server = refusals(zero, one)
    assert "it uses TLSv1.2: allow TLS 1.3" in client
    assert "it uses TLSv1.2" in server


MIXED = {
    "TLS": (Security(Secret(KEY)), PSK, "rank {1} uses TLS, and rank {0} does not: set CODEC_TLS"),
    "secret": ("certificates", PSK, "rank {1} has a secret, and rank {0} has none: set CODEC_SECRET_FILE"),
    "both": (
        Security(),
        PSK,
        "rank {1} has a secret, and rank {0} has none: .*; rank {1} uses TLS, and rank {0} does not",
    ),
}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", MIXED)
def test_ranks_that_differ_raise_at_once_on_both_sides(ca, name, swapped):
    *each, text = MIXED[name]
    each = [Security(tls=tls_of(contexts(ca, ca.issue()))) if e == "certificates" else e for e in each]
    text = text.format(*([1, 0] if swapped else [0, 1]))
    _, (zero, one) = secured(*each[:: -1 if swapped else 1])
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(zero.accept, 1, 1, SECONDS)
        with pytest.raises(codec.PeerError, match=text):
            one.connect([0], 1, SECONDS)
        with pytest.raises(codec.PeerError, match=text):
            accepted.result()
    assert time.monotonic() - begin < SECONDS / 2
    assert waiting(zero) == {}


# Attackers in the path


def _reads(middle, pair):
    """Send a message; return True if the man in the middle has read it."""
    here, there = pair
    there.send([b"a gradient of a private model"], SECONDS)
    assert here.receive(100, SECONDS).tobytes() == b"a gradient of a private model"
    return b"gradient" in b"".join(middle.seen)


def _late(store, security):
    """Return an endpoint of rank 1, which reads the address of rank 0 from now on."""
    return Endpoint(Group(1, 2, store), SECONDS, security)


def test_observer_of_a_connection_reads_nothing():
    for security, reads in ((Security(Secret(KEY)), True), (PSK, False)):
        store, (zero, _) = secured(security, security)
        with Middle(store) as middle:
            assert _reads(middle, met(zero, _late(store, security))) == reads


def _attacker():
    """Return contexts of a man in the middle without the secret: they trust everyone."""
    server, client = Tls().contexts()
    return server, client


def test_man_in_the_middle_without_the_secret_is_caught_by_both_ranks():
    """He ends TLS with a certificate of his own, and passes on nonces and proofs."""
    store, (zero, _) = secured(PSK, PSK)
    with Middle(store, *_attacker()) as middle:
        client, server = refusals(zero, _late(store, PSK))
    assert "has not proven the secret of this rank" in client
    assert "it has ended before it has proven the secret" in server
    assert [len(seen) for seen in middle.seen] == [32, 64]  # he has read the nonce, and nonce and proof of the server


def test_man_in_the_middle_with_the_certificate_of_the_server_is_caught(ca):
    """He has the certificate and the key of rank 0, but not the secret."""
    chain = ca.issue()
    security = Security(Secret(KEY), tls_of(contexts(ca, chain)))
    store, (zero, _) = secured(security, security)
    server, client = contexts(ca, chain)
    client.check_hostname = False
    with Middle(store, server, client) as middle:
        client, _ = refusals(zero, _late(store, security))
    assert "has not proven the secret of this rank" in client
    assert len(middle.seen[1]) == 64


def test_man_in_the_middle_without_a_certificate_is_caught(ca):
    security = Security(tls=tls_of(contexts(ca, ca.issue())))
    store, (zero, _) = secured(security, security)
    with Middle(store, *_attacker()):
        client, _ = refusals(zero, _late(store, security))
    assert "it has a certificate that is not trusted" in client


@pytest.mark.parametrize("where", ["handshake", "message"])
def test_changed_bytes_end_the_connection(where):
    store, (zero, _) = secured(PSK, PSK)
    changing = [where == "handshake"]

    def change(data):
        if changing[0]:
            data = bytearray(data)
            data[len(data) // 2] ^= 1
        return bytes(data)

    with Middle(store, change=change):
        one = _late(store, PSK)
        if changing[0]:
            with pytest.raises(codec.PeerError, match=r"rank 0 at .* (TLS|secret)"):
                one.connect([0], 1, SECONDS)
            return
        (there,) = one.connect([0], 1, SECONDS)
        here = zero.accept(1, 1, SECONDS)
        changing[0] = True
        there.send([b"hello"], SECONDS)
        with pytest.raises(codec.PeerError, match="rank 1 is gone: it has sent bytes that were changed on the way"):
            here.receive(100, SECONDS)


@pytest.mark.parametrize("nbytes", [1, 5, 30, 100_000, 1_000_000])
def test_connection_cut_within_a_record_is_an_error_at_once(nbytes):
    store, (zero, _) = secured(PSK, PSK)
    left, ends = [1 << 60], []

    def change(data):
        part = data[: left[0]]
        left[0] -= len(part)
        return part if left[0] else cut(part)

    def cut(part):
        ends.append(part)
        return part

    with Middle(store, change=change) as middle, ThreadPoolExecutor(1) as pool:
        (there,) = _late(store, PSK).connect([0], 1, SECONDS)
        here = zero.accept(1, 1, SECONDS)
        left[0] = nbytes
        sent = pool.submit(there.send, [bytes(3_000_000)], SECONDS)
        until(lambda: ends)
        middle.close_connections()
        begin = time.monotonic()
        with pytest.raises(codec.PeerError, match="rank 1 is gone"):
            here.receive(1 << 30, SECONDS)
        assert time.monotonic() - begin < SECONDS / 2
        with contextlib.suppress(codec.PeerError):
            sent.result()


# Strangers


def test_strangers_without_the_token_never_reach_openssl(served, monkeypatch):
    store, zero = served
    seen = []
    monkeypatch.setattr(handshake, "TlsSocket", lambda *args, **how: seen.append(args))
    _, address = hand(store)
    wrong = Hand(bytes(16), PAIR, 1, 0, 5, flags=3)
    for first in (
        b"\x16\x03\x01\x02\x00\x01" + bytes(600),
        wrong.hello(),
        b"GET / HTTP/1.1\r\n\r\n" * 5,
        os.urandom(200),
    ):
        sock = call(address, first)
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        assert refused(sock)
    assert seen == []
    assert waiting(zero) == {}


@pytest.mark.parametrize("flags", [4, 7, 128, 255])
def test_unknown_flags_are_refused(served, flags):
    store, zero = served
    fields, address = hand(store, flags=flags)
    assert refused(call(address, fields.hello()))
    assert waiting(zero) == {}


GARBAGE = {
    "zeros": bytes(500),
    "random": os.urandom(500),
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "record of alerts": b"\x15\x03\x03\x00\x02\x02\x28",
    "huge record": b"\x16\x03\x03\xff\xff" + bytes(70_000),
    "application data": b"\x17\x03\x03\x00\x20" + bytes(32),
    "message": b"CDPM" + bytes(12),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_bytes_after_the_hello_that_are_not_tls_are_refused_with_one_line(served, caplog, name):
    store, zero = served
    zero._listener._warnings = 0
    fields, address = hand(store, flags=3)
    sock = call(address, fields.hello())
    port = sock.getsockname()[1]
    with contextlib.suppress(OSError):
        sock.sendall(GARBAGE[name])
        sock.shutdown(socket.SHUT_WR)
    read(sock, 1000)  # an alert, or nothing
    sock.close()
    until(lambda: any(f"port {port}," in r.getMessage() for r in caplog.records))
    (record,) = [r for r in caplog.records if f"port {port}," in r.getMessage()]
    assert "as rank 1 with tag 5: it has " in record.getMessage() or "it breaks TLS" in record.getMessage()
    assert waiting(zero) == {}


def _through(store, **how):
    """Say hello to rank 0 as rank 1; return the fields with the binding, and a blocking socket inside of TLS."""
    fields, address = hand(store, flags=3, **how)
    sock = call(address, fields.hello())
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    inside = made.wrap_socket(sock)
    import hashlib

    return fields._replace(binding=hashlib.sha256(inside.get_channel_binding("tls-unique")).digest()), inside


def test_handshake_is_that_of_the_specification(served):
    store, zero = served
    fields, sock = _through(store, tag=61)
    for byte in fields.client_nonce:
        sock.sendall(bytes([byte]))
    fields = fields._replace(server_nonce=read(sock, 64)[:32])
    sock.sendall(fields.proof(KEY, CLIENT) + b"CDPM" + bytes(4) + (3).to_bytes(8, "little") + b"abc")
    assert zero.accept(1, 61, SECONDS).receive(10, SECONDS).tobytes() == b"abc"
    sock.close()


@pytest.mark.parametrize("wrong", [{"binding": bytes(32)}, {"binding": b"x" * 32}, {"flags": 1}])
def test_proof_for_another_channel_is_refused(served, wrong):
    store, zero = served
    fields, sock = _through(store)
    sock.sendall(fields.client_nonce)
    fields = fields._replace(server_nonce=read(sock, 64)[:32], **wrong)
    sock.sendall(fields.proof(KEY, CLIENT))
    assert refused(sock)
    assert waiting(zero) == {}


def test_slow_and_frozen_handshakes_end_in_time_and_stop_no_other_one(monkeypatch, caplog):
    monkeypatch.setattr(handshake, "_HELLO_SECONDS", 0.3)
    store, (zero, one) = secured(PSK, PSK)
    fields, address = hand(store, flags=3)
    slow = [
        call(address, fields.hello()),
        call(address, fields.hello() + b"\x16\x03\x01\x02\x00\x01"),
        _through(store)[1],
    ]
    met(zero, one)  # while three handshakes are incomplete
    for sock in slow:
        read(sock, 1000)  # returns once the connection is closed
        sock.close()
    until(lambda: zero._listener._strangers == {})
    assert caplog.text.count("it has not completed TLS in time") == 2
    assert caplog.text.count("it has not proven the secret in time") == 1


def test_number_of_incomplete_handshakes_is_bounded(monkeypatch):
    monkeypatch.setattr(handshake, "_MOST_STRANGERS", 6)
    store, (zero, one) = secured(PSK, PSK)
    fields, address = hand(store, flags=3)
    many = [call(address, fields.hello() + b"\x16\x03\x01\x20\x00\x01\x00\x1f\xfc" + bytes(3000)) for _ in range(40)]
    met(zero, one)
    until(lambda: len(zero._listener._strangers) <= 8)
    for sock in many:
        sock.close()


def test_endless_handshake_is_refused(served, caplog):
    """A stranger sends handshake records that form no message; memory is bounded by the limit."""
    store, zero = served
    zero._listener._warnings = 0
    fields, address = hand(store, flags=3)
    sock = call(address, fields.hello())
    hello = b"\x01\x01\xff\xfc\x03\x03"  # a ClientHello of 131,068 bytes
    with contextlib.suppress(OSError):
        for n in range(30):
            part = (hello if not n else b"") + bytes(8000)
            sock.sendall(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part)
    read(sock, 1000)
    sock.close()
    until(lambda: "a handshake of TLS that is too long" in caplog.text)
    assert waiting(zero) == {}


@pytest.mark.parametrize("answer", [b"", b"\x15\x03\x03\x00\x02\x02\x28", bytes(200), b"\x16\x03\x03\x00\x05hello"])
def test_port_that_does_not_speak_tls_is_an_error(answer):
    store = dist.HashStore()
    one = Endpoint(Group(1, 2, store), SECONDS, PSK)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        publish(store, 0, server.getsockname()[1], flags=3)
        connected = pool.submit(one.connect, [0], 3, SECONDS)
        sock, _ = server.accept()
        sock.sendall(answer)
        sock.shutdown(socket.SHUT_WR)
        with pytest.raises(codec.PeerError, match=r"rank 0 at 127.0.0.1, port \d+ .*TLS"):
            connected.result()
        sock.close()


def test_silent_port_is_an_error_at_the_timeout():
    store = dist.HashStore()
    one = Endpoint(Group(1, 2, store), SECONDS, PSK)
    with socket.create_server(("127.0.0.1", 0)) as server:
        publish(store, 0, server.getsockname()[1], flags=3)
        with pytest.raises(codec.PeerError, match=r"rank 0 cannot be reached.*timed out"):
            one.connect([0], 3, 0.2)


# Processes


def test_child_of_fork_uses_no_connection_of_its_parent_and_can_connect_anew():
    _, (zero, one) = secured(PSK, PSK)
    here, there = met(zero, one)
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        code = 1
        try:
            with contextlib.suppress(codec.PeerError):
                there.send([b"from the child"], SECONDS)
                os._exit(3)
            here.close()
            _, (a, b) = secured(PSK, PSK)
            met(a, b)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    there.send([b"of the parent"], SECONDS)
    assert here.receive(20, SECONDS).tobytes() == b"of the parent"


def test_new_secret_after_a_restart_refuses_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.touch(mode=0o600)
    monkeypatch.setenv("CODEC_SECRET_FILE", str(file))
    monkeypatch.setenv("CODEC_TLS", "psk")
    assert tls_of_environment() == Tls()
    store = dist.HashStore()
    file.write_bytes(KEY)
    old = endpoint_of(Group(1, 2, store))
    file.write_bytes(OTHER)
    zero, one = (endpoint_of(Group(rank, 2, store)) for rank in range(2))
    with pytest.raises(codec.PeerError, match="has not proven the secret"):
        old.connect([0], 1, SECONDS)
    assert encrypted(met(zero, one))


def test_missing_package_is_an_error_with_the_command_that_installs_it(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(codec.ArgumentError, match=r"needs the package cryptography: pip install 'tensor-codec\[tls\]'"):
        Tls().contexts()


def test_key_is_in_no_file(tmp_path, monkeypatch):
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.chdir(tmp_path)
    Tls().contexts()
    assert set(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []
    assert tls.TlsSocket is TlsSocket
