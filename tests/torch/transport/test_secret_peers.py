"""A collective of a rank with a secret, whose only peer is a fake rank: with the secret, with another one, or none."""

import contextlib
import os
import time

import pytest
import torch

import codec
from support import flatcall
from support.fake_rank import TIMEOUT, FakeRank, gathered, good, header, values, wait_for_end
from support.ranks import RankPool

KEY, OTHER = b"0123456789abcdef-the-secret", b"fedcba9876543210-another-one"
LIMIT = TIMEOUT + 3  # seconds until the error, with margin for shared CPUs


@pytest.fixture(scope="module")
def ranks():
    with RankPool(2, timeout=TIMEOUT) as ranks:
        yield ranks


def _real(call):
    """Run a call of rank 0, which has the secret; return its error and its time."""
    os.environ["CODEC_SECRET"] = KEY.decode()
    begin = time.monotonic()
    try:
        call()
        return "", time.monotonic() - begin
    except codec.CodecError as e:
        return f"{type(e).__name__}: {e}", time.monotonic() - begin
    finally:
        del os.environ["CODEC_SECRET"]


def _refused(rank, size, secret):
    if not rank:
        return _real(gathered())
    k = FakeRank(1, secret)
    k.sock.settimeout(LIMIT)
    try:
        k.send(good())
        k.report()
    except OSError:
        pass
    with contextlib.suppress(ConnectionResetError):
        assert k.sock.recv(1) == b""
    k.sock.close()
    return None


@pytest.mark.parametrize("secret", [None, OTHER])
def test_messages_of_a_rank_without_the_secret_are_not_read(ranks, secret):
    ranks.new_group()
    (error, seconds), _ = ranks.run(_refused, secret)
    assert error.startswith("PeerError: rank 1 has not ")
    assert seconds < LIMIT


def _hostile(rank, size):
    if not rank:
        return _real(gathered())
    k = FakeRank(1, KEY)
    k.read()
    k.raw(header(nbytes=1 << 60))
    wait_for_end(k)
    k.sock.close()
    return None


def test_wrong_message_of_a_rank_with_the_secret_is_an_error(ranks):
    ranks.new_group()
    (error, seconds), _ = ranks.run(_hostile)
    assert error.startswith("PeerError: rank 1 ")
    assert "not a message" in error
    assert seconds < LIMIT


def _honest(rank, size):
    if not rank:
        reduced = values()
        found = _real(lambda: flatcall.all_reduce(reduced, op="mean", algorithm="all_gather"))
        assert torch.equal(reduced, values())
        return found[0]
    k = FakeRank(1, KEY)
    k.read()
    k.send(good())
    k.report()
    k.read()
    k.sock.close()
    return None


def test_handwritten_rank_with_the_secret_takes_part(ranks):
    ranks.new_group()
    assert ranks.run(_honest) == ["", None]
