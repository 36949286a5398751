"""Groups of real ranks with TLS: every way to communicate is encrypted; faults end calls as without TLS."""

import gc
import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import init_device_mesh

import codec
import codec.torch
from codec.torch.network.endpoint import endpoint_of
from codec.torch.network.stripe import Stripe
from codec.torch.network.tcp import PeerConnection
from codec.torch.network.tls import TlsSocket
from support import rank_loss
from support.ddp_training import parameter_bytes
from support.faults import KILLED, at_fault_point, die
from support.handshakes import ADDRESS, HELLO
from support.local_training import started, train
from support.parameter_servers import serve_or_call
from support.pipelines import Pipeline
from support.point_to_point import SOON
from support.ranks import RankPool
from support.refusals import connecting_errors
from support.tls import Authority

KEY = "0123456789abcdef-the-secret"
PSK = {"CODEC_SECRET": KEY, "CODEC_TLS": "psk"}
TIMEOUT = 5


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=TIMEOUT) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """Return environment variables for ranks with certificates."""
    return Authority(tmp_path_factory.mktemp("ca")).variables()


def _with(rank, size, variables, call, *args):
    """Return call(rank, size, *args) with environment variables, and check that all its connections are encrypted."""
    os.environ.update(variables)
    try:
        found = call(rank, size, *args)
        open_now = [o for o in gc.get_objects() if isinstance(o, Stripe | PeerConnection) and o._sock.fileno() >= 0]
        assert all(isinstance(o._sock, TlsSocket) for o in open_now)
        return found, len(open_now)
    finally:
        for name in variables:
            del os.environ[name]


def _communicate(rank, size):
    x = torch.arange(100_000.0) % 7
    for algorithm in ("two_shot", "all_gather", "ring", "raw"):
        y = x.clone()
        codec.torch.all_reduce(y, options=codec.options(algorithm=algorithm))
        assert torch.equal(y, 2 * x)
    blobs = [bytes([rank]) * n for n in (3, 3_000_000)]
    assert codec.torch.all_to_all_bytes(blobs)[1 - rank] == bytes([1 - rank]) * (3, 3_000_000)[rank]
    for n in (0, 10, 5_000_000):
        if rank:
            codec.torch.send(bytes(n), 0)
        else:
            assert codec.torch.recv(1) == bytes(n)
    assert codec.torch.group_stats().connections == "encrypted, authenticated"
    assert str(endpoint_of(dist.group.WORLD).security) == "encrypted, authenticated"


def test_collectives_and_messages_are_encrypted_with_a_secret(ranks):
    ranks.new_group()
    assert all(n >= 2 for _, n in ranks.run(_with, PSK, _communicate))


def test_collectives_and_messages_are_encrypted_with_certificates(ranks, certificates):
    ranks.new_group()
    assert all(n >= 2 for _, n in ranks.run(_with, certificates, _communicate))


def _hook(rank, size):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 20))
    hook = codec.torch.ddp_hook(codec.Quantize(4))
    hook.register(model)
    for _ in range(2):
        model(torch.ones(4, 30)).sum().backward()
    assert hook.stats().connections == "encrypted, authenticated"


def _backend(rank, size):
    x = torch.ones(100_000)
    dist.all_reduce(x)
    assert x.eq(2).all()
    assert dist.group.WORLD.stats().connections == "encrypted, authenticated"


@pytest.mark.parametrize("backend", ["gloo", "codec"])
def test_hook_and_backend_are_encrypted(ranks, backend):
    ranks.new_group(backend)
    assert all(n for _, n in ranks.run(_with, PSK, _hook if backend == "gloo" else _backend))


def _served(rank, size):
    def call(client, worker, workers):
        g = {"w": torch.arange(6.0), "b": torch.ones(2, 3)}
        client.init(g)
        assert client.average(0, g, codec.Lossless())["w"].equal(g["w"])
        assert all(isinstance(o._sock, TlsSocket) for o in gc.get_objects() if isinstance(o, PeerConnection))

    serve_or_call(rank, size, 1, call)


def test_parameter_server_is_encrypted(ranks):
    ranks.new_group()
    ranks.run(_with, PSK, _served)


def _pipeline(rank, size):
    pipeline = Pipeline("1F1B", rank, size, static=True)
    pipeline.train(1)


def test_pipeline_is_encrypted(ranks):
    ranks.new_group()
    assert all(n for _, n in ranks.run(_with, PSK, _pipeline))


def _local_steps(rank, size):
    model, optimizer, local = started(every=2)
    train(model, optimizer, rank, range(4), local.step)
    assert local.stats().connections == "encrypted, authenticated"
    return parameter_bytes(model)


def test_local_steps_are_encrypted(ranks):
    ranks.new_group()
    ranks.run(_with, PSK, _local_steps)


def _levels(rank, size):
    x = torch.arange(60_000.0)
    codec.torch.all_reduce(x, group=init_device_mesh("cpu", (2, 2)))
    assert torch.equal(x, 4 * torch.arange(60_000.0))
    y = torch.ones(5)
    codec.torch.all_reduce(y)
    assert y.eq(4).all()


def test_four_ranks_in_one_and_two_levels_are_encrypted(certificates):
    with RankPool(4, timeout=SOON) as four:
        for variables in (PSK, certificates):
            four.new_group()
            assert all(n >= 5 for _, n in four.run(_with, variables, _levels))


# Faults


def _mixed(rank, size, has, variables):
    """Rank `has` has the variables; return the errors of a collective and of send or recv, and the seconds."""
    begin = time.monotonic()
    os.environ.update({"CODEC_SECRET": KEY} | (variables if rank == has else {}))
    try:
        errors = connecting_errors(rank)
    finally:
        for name in {"CODEC_SECRET", *variables}:
            os.environ.pop(name, None)
    return errors, time.monotonic() - begin


@pytest.mark.parametrize("has", [0, 1])
def test_rank_without_tls_is_named_on_both_ranks(ranks, certificates, has):
    for variables in (PSK, certificates):
        ranks.new_group()
        for errors, seconds in ranks.run(_mixed, has, variables):
            assert seconds < TIMEOUT
            for error in errors:
                assert f"rank {has} uses TLS, and rank {1 - has} does not: set CODEC_TLS" in error


def _refused(rank, size, variables):
    """All-reduce with the variables of this rank; return the error."""
    os.environ.update(variables[rank])
    try:
        with pytest.raises(codec.PeerError) as raised:
            codec.torch.all_reduce(torch.ones(3), options=codec.options(timeout=2))
        return str(raised.value)
    finally:
        for name in variables[rank]:
            del os.environ[name]


def test_wrong_or_expired_certificate_is_named_on_both_ranks(ranks, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    one, two = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    for mine, why in ((two.variables(), "is not trusted"), (one.variables("old", expired=True), "is out of date")):
        ranks.new_group()
        server, client = ranks.run(_refused, [one.variables(), mine])
        assert "rank 0" in client
        assert why in client or "which is out of date" in client
        assert "refused a connection from 127.0.0.1" in server


def _frozen(rank, size, silent):
    """Rank 1 says hello, and then nothing, or is stopped while it connects."""
    if not rank:
        begin = time.monotonic()
        with pytest.raises(codec.PeerError, match="rank 1 has not connected within the timeout"):
            codec.torch.all_reduce(torch.ones(3), options=codec.options(timeout=1))
        return time.monotonic() - begin
    store = PrefixStore("codec/point-to-point", dist.group.WORLD.get_group_store().clone())
    store.wait(["0"])
    version, token, port, flags = ADDRESS.unpack_from(store.get("0"))
    with socket.create_connection((store.get("0")[ADDRESS.size :].decode(), port)) as sock:
        sock.sendall(HELLO.pack(b"CDPH", token, version, rank, -2, flags) + silent)
        time.sleep(1.5)
    return 0.0


@pytest.mark.parametrize("silent", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01"])
def test_rank_that_freezes_during_the_handshake_is_an_error_in_time(ranks, silent):
    ranks.new_group()
    (seconds, _), _ = ranks.run(_with, PSK, _frozen, silent)
    assert seconds < 4


def _lost(rank, size, point):
    x, before = rank_loss.values(rank), rank_loss.digest(rank_loss.values(rank))
    begin = time.monotonic()
    try:
        with at_fault_point(rank_loss.channel(), point if rank else -1, die):
            codec.torch.all_reduce(x, codec.Quantize(4), options=codec.options(algorithm="two_shot"))
    except codec.PeerError as e:
        assert rank_loss.digest(x) == before
        return str(e), time.monotonic() - begin
    return "", time.monotonic() - begin


def test_rank_that_dies_is_an_error_at_once():
    with RankPool(2, timeout=SOON) as pool:
        for point in (0, 3):
            pool.new_group()
            pool.run(_with, PSK, rank_loss.connect)
            pool.start(_lost, point)
            (error, seconds), other = pool.results()
            assert other is KILLED
            assert "rank 1 is gone" in error
            assert seconds < SOON / 4
            pool.replace(1)


def _interrupted(rank, size):
    """Interrupt recv of rank 0 while it waits for a message."""
    if rank:
        codec.torch.send(b"before the interrupt", 0, tag=1)
        assert codec.torch.recv(0, tag=2) == b"begin"
        codec.torch.send(b"after the interrupt", 0, tag=1)
        return
    assert codec.torch.recv(1, tag=1) == b"before the interrupt"
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            codec.torch.recv(1, tag=1)
    finally:
        signal.signal(signal.SIGALRM, before)
    codec.torch.send(b"begin", 1, tag=2)
    assert codec.torch.recv(1, tag=1) == b"after the interrupt"


def test_interrupt_of_a_wait_leaves_the_connection_usable(ranks):
    ranks.new_group()
    ranks.run(_with, PSK, _interrupted)


def test_setting_of_gloo_without_tls_of_codec_is_an_error(ranks):
    ranks.new_group()
    ranks.run(_gloo)


def _gloo(rank, size):
    os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"
    try:
        with pytest.raises(codec.ArgumentError, match="encrypts the connections of Gloo, but not those of codec"):
            codec.torch.all_reduce(torch.ones(3))
    finally:
        del os.environ["GLOO_DEVICE_TRANSPORT"]
