"""Bytes that change between two ranks: an error that names the sender, on all ranks, with tensors unchanged."""

import contextlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import codec
import codec.torch
from codec.torch.network.stripe import Stripe
from support.expected_messages import HEADER
from support.ranks import RankPool

SOON = codec.options(timeout=20)
LARGE = 300_000  # values of a tensor that is sent in several messages


@pytest.fixture(scope="module")
def pair():
    with RankPool(2) as ranks:
        yield ranks


@contextlib.contextmanager
def damage(active, part, index=0, *, in_header=False):
    """Flip a bit of message `index` of a part that this rank sends in the block; yield a list of the damaged ones."""
    put, found = Stripe.put, []

    def damaged(stripe, send, *, direct):
        message = bytearray(b"".join(send.begin()))
        fields = HEADER.unpack_from(message)
        if active and not found and fields[3:5] == (part, index) and (in_header or fields[6]):
            message[20 if in_header else HEADER.size + fields[6] // 2] ^= 64
            send.parts = [memoryview(bytes(message))]
            found.append(fields)
        put(stripe, send, direct=direct)

    Stripe.put = damaged
    try:
        yield found
    finally:
        Stripe.put = put


def raw(rank):
    x = torch.arange(LARGE) * 1.0 + rank
    return x, lambda: codec.torch.all_reduce(x, options=codec.options(algorithm="raw"))


def small(rank):
    x = torch.arange(10.0) + rank
    return x, lambda: codec.torch.all_reduce(x, options=codec.options(algorithm="raw"))


def scaled(rank):
    x = torch.linspace(-1, 1, LARGE) + rank
    how = codec.options(algorithm="shared_scale")
    return x, lambda: codec.torch.all_reduce(x, codec.Ternary(), options=how)


def frames(rank):
    x = torch.linspace(-1, 1, LARGE) + rank
    return x, lambda: codec.torch.all_reduce(x, codec.Quantize(4), options=codec.options(algorithm="two_shot"))


def blobs(rank):
    x = torch.zeros(1)
    return x, lambda: codec.torch.all_to_all_bytes([bytes(9_000_000)] * 2)


# Call, and part and index of the message that is damaged
DATA = {
    "term of raw values": (raw, 0, 0),
    "sum of raw values": (raw, 0, 1),
    "small tensor": (small, 0, 0),
    "scales of shared_scale": (scaled, 0, 0),
    "integer sums of shared_scale": (scaled, 0, 2),
    "frame": (frames, 0, 0),
    "bytes of the caller": (blobs, 0, 2),
}


def _reduce(rank, size, name):
    """Return the error of a call in which a message of rank 1 is damaged, and digests before, after and of a repeat."""
    make, part, index = DATA[name]
    x, call = make(rank)
    before, error = x.clone(), None
    with damage(rank == 1, part, index) as found:
        try:
            call()
        except codec.CodecError as e:
            error = e
    assert len(found) == (rank == 1)
    assert torch.equal(x, before)
    call()  # connections are still open
    return type(error).__name__, str(error)


@pytest.mark.parametrize("name", DATA)
def test_damaged_data_is_an_error_on_all_ranks_that_names_the_sender(pair, name):
    pair.new_group()
    (here, text), (there, report) = pair.run(_reduce, name)
    assert here == "ChecksumError"
    assert text.startswith("a message of rank 1 was damaged")
    assert there == "PeerError"
    assert "a message of rank 1 was damaged" in report


def _within(rank, size, within):
    """Damage values that ranks send within a machine, in both steps; return the errors."""
    group, found = init_device_mesh("cpu", (2, 2)), []
    x = torch.linspace(-1, 1, LARGE) * (1 + rank)
    how = codec.options(algorithm="two_shot", within=within)
    codec.torch.all_reduce(x.clone(), op="mean", group=group, options=how)
    for part in (0, 2):
        before = x.clone()
        with damage(rank == 1, part):
            try:
                codec.torch.all_reduce(x, op="mean", group=group, options=how)
                found.append("")
            except codec.CodecError as e:
                found.append(f"{type(e).__name__}: {e}")
        assert torch.equal(x, before)
    codec.torch.all_reduce(x, op="mean", group=group, options=how)
    return found


@pytest.mark.parametrize("within", [None, "bfloat16"])
def test_damaged_values_within_a_machine_are_an_error_on_all_ranks(within):
    with RankPool(4) as ranks:
        ranks.new_group()
        for errors in zip(*ranks.run(_within, within), strict=True):
            assert errors[0].startswith("ChecksumError: a message of rank 1 was damaged"), errors
            assert all(error.startswith("PeerError: ") and "a message of rank 1 was" in error for error in errors[1:])


def _integers(rank, size):
    """Damage the report of rank 1; return the errors of this call and of the next one."""
    x, found = torch.ones(1000), []
    codec.torch.all_reduce(x, op="mean")
    for active in (rank == 1, False):
        with damage(active, 1):
            try:
                codec.torch.all_reduce(x, op="mean", options=SOON)
                found.append("")
            except codec.CodecError as e:
                found.append(f"{type(e).__name__}: {e}")
    return found, x


def test_damaged_report_closes_the_connections(pair):
    """Rank 1 may have succeeded before rank 0 has read its report, as if the connection had broken."""
    pair.new_group()
    (zero, x), (one, y) = pair.run(_integers)
    assert zero[0].startswith("ChecksumError: a message of rank 1 was damaged")
    assert zero[1].startswith("PeerError: ")
    assert one[1].startswith("PeerError: ")
    assert torch.equal(x, torch.ones(1000))
    assert torch.equal(y, torch.ones(1000))


def _header(rank, size):
    x = torch.ones(1000) * (1 + rank)
    codec.torch.all_reduce(x, op="mean")
    before = x.clone()
    with damage(rank == 1, 0, in_header=True), pytest.raises(codec.PeerError) as caught:
        codec.torch.all_reduce(x, op="mean", options=SOON)
    return str(caught.value), torch.equal(x, before)


def test_damaged_header_closes_the_connection(pair):
    pair.new_group()
    (text, zero), (_, one) = pair.run(_header)
    assert "a header was damaged" in text
    assert zero
    assert one


def _send(rank, size):
    if rank:
        with contextlib.suppress(codec.PeerError):
            codec.torch.send(b"x" * 100_000, dst=0)
            codec.torch.send(b"y" * 100_000, dst=0, options=SOON)
            codec.torch.recv(src=0, options=SOON)
        return None
    from codec.torch.network.tcp import PeerConnection

    def reads(self, into, deadline):
        n = original(self, into, deadline)
        into[n - 1] ^= len(into) > 1000
        return n

    original, PeerConnection._read_some = PeerConnection._read_some, reads
    try:
        with pytest.raises(codec.PeerError, match="a message of rank 1 was damaged"):
            codec.torch.recv(src=1)
    finally:
        PeerConnection._read_some = original
    with pytest.raises(codec.PeerError, match="closed"):
        codec.torch.recv(src=1)
    return None


def test_damaged_message_of_send_closes_the_connection(pair):
    pair.new_group()
    pair.run(_send)
