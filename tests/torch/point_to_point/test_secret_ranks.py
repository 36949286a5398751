"""Groups of real ranks with a secret: every way to communicate proves it, and ranks without it are named."""

import logging
import os
import time

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch import _compat
from codec.torch.network.endpoint import endpoint_of
from support.parameter_servers import serve_or_call
from support.point_to_point import SOON
from support.refusals import connecting_errors

KEY, OTHER = "0123456789abcdef-the-secret", "fedcba9876543210-another-one"


def _proven(group=None):
    """Return True if the endpoint of a group has the secret KEY, which it demands of every connection."""
    return endpoint_of(group or dist.group.WORLD).security == codec.options(secret=KEY).security


def _communicate(rank, size):
    options = codec.options(secret=KEY, timeout=SOON)
    assert codec.torch.all_to_all_bytes([b"a", b"b"], options=options) == [[b"a"] * 2, [b"b"] * 2][rank]
    assert _proven()
    x = torch.ones(1000)
    codec.torch.all_reduce(x)  # later calls need no option
    assert x.eq(2).all()
    if rank:
        codec.torch.send(b"hello", 0, options=options)
    else:
        assert codec.torch.recv(1) == b"hello"
    with pytest.raises(codec.ArgumentError if rank else codec.PeerError, match="another secret"):
        codec.torch.all_reduce(x, options=codec.options(secret=OTHER) if rank else None)
    codec.torch.all_reduce(x)
    assert x.eq(4).all()


def test_collectives_and_messages_prove_the_secret_of_their_options(ranks):
    ranks.new_group()
    ranks.run(_communicate)


def _each_first(rank, size, call):
    with codec.options(secret=KEY):
        group = dist.new_group([0, 1])
        if call == "send" and rank:
            codec.torch.send(b"hello", 0, group=group)
        elif call == "send":
            assert codec.torch.recv(1, group=group) == b"hello"
        elif call == "list":
            from codec.torch.collectives import lists

            outputs = [torch.zeros(3)]
            lists.reduce_scatter(
                outputs, [torch.ones(6)], codec.Lossless(), group=group, op=dist.ReduceOp.SUM, stream=0
            ).wait()
        else:
            codec.torch.all_to_all_rows(torch.ones(2, 3), [1, 1], [1, 1], group=group)
        assert _proven(group)
        assert _compat.group_identity(group) != _compat.group_identity(dist.group.WORLD)
        return _compat.group_identity(group)


@pytest.mark.parametrize("call", ["send", "list", "rows"])
def test_secret_of_a_context_reaches_the_first_call_of_any_kind(ranks, call):
    ranks.new_group()
    assert len(set(ranks.run(_each_first, call))) == 1


def _trained(rank, size, backend):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    if backend == "gloo":
        codec.torch.ddp_hook(codec.Lossless(), options=codec.options(secret=KEY)).register(model)
        model(torch.ones(1, 3)).sum().backward()
        assert _proven()
    else:
        with codec.options(secret=KEY):
            x = torch.ones(100_000)
            dist.all_reduce(x)
        assert x.eq(2).all()


@pytest.mark.parametrize("backend", ["gloo", "codec"])
def test_hook_and_backend_prove_the_secret(ranks, backend):
    ranks.new_group(backend)
    ranks.run(_trained, backend)


def _served(rank, size):
    with codec.options(secret=KEY):
        serve_or_call(rank, size, 1, lambda client, worker, workers: None)
    assert _proven()


def test_parameter_server_proves_the_secret(ranks):
    ranks.new_group()
    ranks.run(_served)


def _mixed(rank, size, has):
    """Rank `has` has the secret in its environment; return the errors of a collective and of send or recv."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("codec.torch").addHandler(handler)
    if rank == has:
        os.environ["CODEC_SECRET"] = KEY
    try:
        begin = time.monotonic()
        errors = connecting_errors(rank)
        assert time.monotonic() - begin < SOON / 2
    finally:
        os.environ.pop("CODEC_SECRET", None)
        logging.getLogger("codec.torch").removeHandler(handler)
    assert KEY[:10] not in "".join(errors + lines)
    return errors


@pytest.mark.parametrize("has", [0, 1])
def test_rank_without_the_secret_is_named_on_both_ranks(ranks, has):
    ranks.new_group()
    for errors in ranks.run(_mixed, has):
        for error in errors:
            assert f"rank {has} has a secret, and rank {1 - has} has none: set CODEC_SECRET_FILE" in error
