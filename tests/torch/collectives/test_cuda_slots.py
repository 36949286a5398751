"""Frames that stay on GPUs: only sizes and heads reach the host, slots have the specified layout, bad heads raise."""

import struct
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

import codec
import codec.torch
from codec.torch.group import communicator
from codec.torch.reduction import heads
from codec.torch.transport import nccl
from support.collective_values import rank_values
from support.cuda_tensors import DeviceTensor, gpu, host
from support.device import Emulated
from support.gpu_collectives import SHAPE, how, outcome


def _bytes_by_way(rank, size):
    """Yield the bytes that an all-reduce sends; check that only integers and heads of frames pass through the host."""
    with gpu("emulated") as put:
        for spec in (codec.Float8(), codec.Lossless()):
            codec.torch.all_reduce(x := put(rank_values(rank, (70_000,))), spec, options=how())
            channel, messages, read = communicator.communicator_of(None).channel, [], Emulated.read_nbytes
            copied = DeviceTensor.copied_nbytes
            before, send = channel.counters.copy(), channel.mesh.send
            channel.mesh.send = lambda *args, send=send, messages=messages: messages.append(args[-1]) or send(*args)
            codec.torch.all_reduce(x, spec, options=how())
            del channel.mesh.send
            # Host messages contain integers and frame heads only
            assert all(sum(part.nbytes for part in body) < 1024 for body in messages)
            assert DeviceTensor.copied_nbytes == copied
            # Copied to the host: lengths, first bytes of frames, verdicts
            assert Emulated.read_nbytes - read < 2 * size * (8 + 4096 + 256)
            yield (channel.counters - before).sent_nbytes


def _frames_stay_on_gpus(rank, size):
    fixed, variable = _bytes_by_way(rank, size)
    # Size of the larger frame; slices begin at multiples of 1,024 values
    largest = codec.bound(70_000 - 34_816, "float32", codec.Float8(), exact=True)
    assert fixed == 2 * -(-(8 + largest) // 16) * 16
    assert fixed < variable < 4 * 70_000


def test_only_headers_are_copied_to_host_memory_if_frames_stay_on_gpus(gpus):
    gpus.run(_frames_stay_on_gpus)


def _slots(rank, size):
    """Run a two-shot all-reduce; return the slots of both phases, the messages before them, and the input."""
    channel, rows, messages = communicator.communicator_of(None).channel, [], []
    device, send = channel.device, channel.mesh.send
    channel.mesh.send = lambda *args: messages.append(b"".join(bytes(b) for b in args[-1])) or send(*args)
    for name in ("all_to_all", "all_gather"):
        collective = getattr(device, name)

        def noted(sent, counters, run=collective):
            rows.append(host(sent).numpy().copy())
            return run(sent, counters)

        setattr(device, name, noted)
    with gpu("emulated") as put:
        x = rank_values(rank, (7000,))
        codec.torch.all_reduce(put(x), codec.Quantize(4), stream=5, options=how())
    return *rows, messages[:2], x.numpy()


def _frame(values, number):
    return codec.encode(values, codec.Quantize(4), stream=(5 * 0x9E3779B97F4A7C15 + number) % 2**64)


def test_slots_between_gpus_are_as_specified(gpus):
    found = gpus.run(_slots)
    size, cuts = 2, [0, 3072, 7000]
    slices = [slice(a, b) for a, b in pairwise(cuts)]
    T = -(-(8 + codec.bound(7000 - 3072, "float32", codec.Quantize(4), exact=True)) // 16) * 16
    for r, (terms, sums, messages, x) in enumerate(found):
        assert (terms.shape, sums.shape) == ((size, 1, T), (1, T))
        total = codec.reduce([_frame(x[slices[r]], q * size + r) for q, (*_, x) in enumerate(found)], op="sum")
        want = [_frame(x[slices[o]], r * size + o) for o in range(size)] + [_frame(total, size * size + r)]
        for slot, frame in zip([*terms[:, 0], sums[0]], want, strict=True):
            assert slot[:8].tobytes() == len(frame).to_bytes(8, "little")
            assert slot[8 : 8 + len(frame)].tobytes() == frame
        terms_most = max(len(frame) for frame in want[:size])
        (first, second), head = messages, codec.inspect(want[0]).sections["directory"][0]
        assert first == struct.pack("<4q", terms_most, len(want[1 - r]), head, 1) + want[1 - r][:head]
        assert second[:56] == struct.pack("<4q", len(want[2]), len(want[2]), head, 0) + want[2][:24]
        assert second[64:] == want[2][32:head]  # bytes after the checksum, which the sender's host does not know


def _altered(rank, size, kind):
    """Alter bytes that rank 0 receives from rank 1; return the outcomes, and True if all tensors are unchanged."""
    device, found = communicator.communicator_of(None).channel.device, []

    def altering(name, at, value):
        collective = getattr(device, name)

        def run(rows, counters):
            received = collective(rows, counters)
            if rank == 0:
                slot = host(received[1, 0]).clone()
                slot[at] = slot[at] ^ value
                received[1, 0].copy_(slot.to(received.device))
            return received

        return run

    with gpu(kind) as put:
        for name in ("all_to_all", "all_gather"):
            # Offset and XOR mask: alter a value, the length, the codec, the shape
            for at, value in ((500, 1), (7, 64), (8 + 5, 3), (8 + 48, 1)):
                x = put(values := rank_values(rank, SHAPE))
                setattr(device, name, altering(name, at, value))
                try:
                    found.append(outcome(codec.torch.all_reduce, x, codec.Quantize(4), options=how("two_shot"))[0])
                finally:
                    delattr(device, name)
                assert torch.equal(host(x), values)
    return found


@pytest.mark.nccl
def test_altered_frame_between_gpus_is_an_error_on_all_ranks(gpus, kind):
    errors = ["ChecksumError", "FrameError", "FrameError", "FrameError"] * 2
    assert gpus.run(_altered, kind) == [errors, ["PeerError"] * 8]


def _announcing(rank, size, kind):
    """Let rank 1 send wrong heads; return the outcomes, and True if all tensors are unchanged."""
    found, pack = [], heads.pack

    def damaged(largest, row, at):
        head = row[0].head.copy()
        head[at % len(head)] ^= 1
        return pack(largest, [row[0]._replace(head=head), *row[1:]])

    def resized(largest, row, change):
        return pack(largest, [row[0]._replace(nbytes=row[0].nbytes + change), *row[1:]])

    def cut(largest, row):
        return pack(largest, [row[0]._replace(head=row[0].head[:-8]), *row[1:]])

    changes = [partial(damaged, at=at) for at in (5, 24, 48, -1)]
    changes += [partial(resized, change=8), partial(resized, change=-8), partial(resized, change=1 << 40), cut]
    with gpu(kind) as put:
        for change in changes:
            for algorithm in ("two_shot", "all_gather"):
                x = put(values := rank_values(rank, SHAPE))
                heads.pack = change if rank == 1 else pack
                try:
                    found.append(outcome(codec.torch.all_reduce, x, codec.Lossless(), options=how(algorithm))[0])
                finally:
                    heads.pack = pack
                assert torch.equal(host(x), values)
        assert outcome(codec.torch.all_reduce, put(values), codec.Lossless(), options=how()) == "success"
    return found


@pytest.mark.nccl
def test_wrong_heads_of_frames_are_errors_on_all_ranks(gpus, kind):
    mine, theirs = gpus.run(_announcing, kind)
    assert theirs == ["PeerError"] * len(mine)
    assert set(mine) == {"FrameError", "ChecksumError", "UnsupportedError"}


def _malformed(rank, size, how_many):
    """Let rank 1's message that announces its frames be `how_many` bytes too long."""
    pack = heads.pack

    def changed(largest, row):
        body = np.concatenate(pack(largest, row))
        return [body[:how_many] if how_many < 0 else np.append(body, np.zeros(how_many, np.uint8))]

    with gpu("emulated") as put:
        codec.torch.all_reduce(put(torch.ones(10)), options=how())
        x = put(values := rank_values(rank, SHAPE))
        heads.pack = changed if rank == 1 else pack
        try:
            found = outcome(codec.torch.all_reduce, x, codec.Lossless(), options=how())[0]
        finally:
            heads.pack = pack
        assert torch.equal(host(x), values)
        return found, communicator.communicator_of(None).channel.closed


@pytest.mark.parametrize("how_many", [-1, 8])
def test_malformed_message_about_frames_ends_the_group_at_once(gpus, how_many):
    [mine, _], [theirs, closed] = gpus.run(_malformed, how_many)
    assert (mine, theirs, closed) == ("FrameError", "PeerError", True)


def _large_frame(rank, size):
    """Let rank 1 announce a frame that exceeds the largest possible size."""
    pack = heads.pack
    if rank == 1:
        heads.pack = lambda largest, row: pack(1 << 40, row)
    try:
        with gpu("emulated") as put:
            return outcome(codec.torch.all_reduce, put(torch.ones(SHAPE)), codec.Lossless(), options=how())[0]
    finally:
        heads.pack = pack


def test_size_beyond_the_bound_of_a_frame_is_an_error_on_all_ranks(gpus):
    gpus.run(_connect)
    assert gpus.run(_large_frame) == ["PeerError", "PeerError"]


def _connect(rank, size):
    communicator.communicator_of(None)


def _cannot_encode(rank, size):
    """Disable the CUDA engine on rank 1; return True if frames stay on GPUs."""
    nccl.engine_is_usable = lambda: rank == 0
    with gpu("emulated") as put:
        codec.torch.all_reduce(x := put(torch.ones(SHAPE)), codec.Float8(), options=how())
        assert bool(host(x).eq(size).all())
    return communicator.communicator_of(None).channel.device.connected


def test_frames_cross_to_host_memory_if_a_rank_cannot_encode_on_its_gpu(gpus):
    assert gpus.run(_cannot_encode) == [False, False]


def _on_one_gpu(rank, size):
    with gpu("emulated") as put:
        x = put(torch.ones(SHAPE)) if rank else torch.ones(SHAPE)
        found = outcome(codec.torch.all_reduce, x, codec.Float8(), options=how())[0]
        # The group still works after the error
        codec.torch.all_reduce(put(x) if rank == 0 else x, codec.Float8(), options=how())
        return found


def test_tensors_in_host_memory_and_on_gpus_are_not_reduced_together_over_nccl(gpus):
    assert gpus.run(_on_one_gpu) == ["PeerError"] * 2
