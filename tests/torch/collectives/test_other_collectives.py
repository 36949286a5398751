"""Reduce-scatter, all-gather, all-to-all and exchange between processes: results and errors."""

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch
from codec.torch.group import exchange
from codec.torch.transport.collective import CollectivePart
from support.collective_values import rank_values, sum_in_order, tensor_bytes
from support.ranks import run_ranks


def _exchanged(rank, size):
    frames = [bytes([rank, to]) * (1000 * (rank + 3 * to) % 70_001) for to in range(size)]
    got = codec.torch.all_to_all_bytes(frames)
    assert got == [bytes([r, rank]) * (1000 * (r + 3 * rank) % 70_001) for r in range(size)]
    with pytest.raises(codec.CodecError):
        codec.torch.all_to_all_bytes(frames[: size - (rank == 0)])
    assert codec.torch.all_to_all_bytes([b""] * size) == [b""] * size


def test_exchange():
    run_ranks(4, _exchanged)


def _announced(rank, size):
    """If a rank announces impossible sizes or lacks memory, all ranks raise."""
    raised = []
    for lie in (1 << 60, -1, None):
        group = dist.new_group()
        codec.torch.all_to_all_bytes([b"x"] * size, group=group)
        scatter, empty = CollectivePart.scatter, exchange._memory

        def lying(part, numbers, scatter=scatter, lie=lie):
            return scatter(part, [lie] * len(numbers))

        def failing(*args):
            raise MemoryError

        if rank == 1 and lie is None:
            exchange._memory = failing
        elif rank == 1:
            CollectivePart.scatter = lying
        for _ in range(2):
            with pytest.raises((codec.CodecError, MemoryError)) as e:
                codec.torch.all_to_all_bytes([b"y" * 5000] * size, group=group)
            raised.append(type(e.value).__name__)
        CollectivePart.scatter, exchange._memory = scatter, empty
        assert codec.torch.all_to_all_bytes([b"z"] * size, group=group) == [b"z"] * size
    return raised


def test_exchange_of_impossible_sizes_raises_on_all():
    results = run_ranks(3, _announced)
    wrong = ["FrameError"] * 4
    assert results[0] == results[2] == [*wrong, "PeerError", "PeerError"]
    assert results[1] == [*wrong, "MemoryError", "MemoryError"]


def _others(rank, size):
    for dtype in (torch.float32, torch.bfloat16):
        for n in (0, 3, 1000, 400_000):
            every = [rank_values(r, (size, n), dtype) for r in range(size)]
            out = torch.full((n,), 7, dtype=dtype)
            codec.torch.reduce_scatter(out, every[rank], op="sum")
            assert torch.equal(out, sum_in_order([x[rank] for x in every], "sum"))
            out = torch.full((size, n), 7, dtype=dtype)
            codec.torch.all_gather(out, every[rank][0])
            assert torch.equal(out, torch.stack([x[0] for x in every]))
            codec.torch.all_to_all(out, every[rank])
            assert torch.equal(out, torch.stack([x[rank] for x in every]))
    x = rank_values(rank, (size, 1000))
    out = torch.zeros(size, 1000)
    codec.torch.all_gather(out, x[0], codec.Float8())
    want = [
        torch.from_numpy(codec.decode(codec.encode(rank_values(r, (size, 1000))[0], codec.Float8())))
        for r in range(size)
    ]
    assert torch.equal(out, torch.stack(want))
    before = tensor_bytes(x)
    with pytest.raises(codec.CodecError):
        codec.torch.reduce_scatter(torch.zeros(1000 + (rank == 1)), x, op="mean")
    with pytest.raises(codec.CodecError):
        codec.torch.all_to_all(x, torch.zeros(size, 1000) if rank else x.double())
    assert tensor_bytes(x) == before


def test_reduce_scatter_all_gather_and_all_to_all_equal_torch():
    """With Lossless, reduce-scatter, all-gather and all-to-all equal torch's, with sums in rank order."""
    run_ranks(3, _others)
