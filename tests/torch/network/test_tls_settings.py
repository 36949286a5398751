"""Connections of ranks with TLS: settings that meet, and settings that differ."""

import os
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
from codec.torch.network.endpoint import endpoint_of
from support.handshakes import KEY, OTHER, address_of, met, waiting
from support.meshes import SECONDS, Group
from support.tls import PSK, context, contexts, encrypted, refusals, secured


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in [name for name in os.environ if name.startswith(("CODEC_SECRET", "CODEC_TLS"))]:
        monkeypatch.delenv(name)


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


# Origin of the settings


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
    assert set(os.listdir("/proc/self/fd")) <= before  # the garbage collector may close others meanwhile
    assert list(tmp_path.iterdir()) == []


def test_port_is_open_on_the_chosen_interface_only():
    store, (zero,) = secured(Security())
    _, _, (host, port) = address_of(store, 0)
    assert host == zero._listener.host == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=SECONDS)
