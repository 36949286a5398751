"""All-to-all of rows gives torch.distributed's values and gradients, if experts receive many, few or no rows."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import codec
import codec.torch
from support.ranks import run_ranks


def counts(rank, size, case):
    """Return the number of rows that each rank sends to each rank, indexed [from][to]."""
    if case == "none":
        return np.zeros((size, size), int)
    table = np.random.default_rng(7).integers(0, 40, (size, size))
    table[:, -1] = 0 if case == "unused" else 700  # rows for the last rank's experts: none, or 700 from every rank
    return table


def rows(rank, n, dtype, width=48):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(n, 3, width, generator=generator).to(dtype)


def _as_torch(rank, size, case):
    for dtype in (torch.float32, torch.bfloat16):
        table = counts(rank, size, case)
        mine, theirs = table[rank].tolist(), table[:, rank].tolist()
        x, expected_x = (rows(rank, sum(mine), dtype).requires_grad_() for _ in range(2))
        found = codec.torch.all_to_all_rows(x, theirs, mine)
        expected = functional.all_to_all_single_autograd(expected_x, theirs, mine, dist.group.WORLD)
        assert torch.equal(found, expected)
        weight = rows(100 + rank, sum(theirs), dtype)
        (found * weight).sum().backward()
        (expected * weight).sum().backward()
        assert torch.equal(x.grad, expected_x.grad)


@pytest.mark.parametrize("case", ["many", "unused", "none"])
@pytest.mark.parametrize("size", [2, 4])
def test_values_and_gradients_are_torchs(size, case):
    run_ranks(size, _as_torch, case)


def _lossy(rank, size):
    table = counts(rank, size, "many")
    mine, theirs = table[rank].tolist(), table[:, rank].tolist()
    spec = codec.Float8()
    x = rows(rank, sum(mine), torch.float32).requires_grad_()
    y = codec.torch.all_to_all_rows(x, theirs, mine, spec, backward_spec="lossless")
    begin = 0
    for source, n in enumerate(theirs):
        before = sum(table[source][:rank])
        sent = rows(source, sum(table[source]), torch.float32)[before : before + n]
        if n:  # the error of a token's values does not depend on other tokens
            alone = codec.decode(codec.encode(sent[-1:].reshape(-1, 48).numpy(), spec))
            np.testing.assert_array_equal(y[begin + n - 1].detach().numpy().reshape(-1, 48), alone)
        begin += n
    y.sum().backward()
    assert x.grad.eq(1).all()


def test_lossy_rows_keep_scales_of_their_own():
    run_ranks(2, _lossy)


def _refused(rank, size):
    """An error on one rank raises on all ranks, and the next call succeeds."""
    x = torch.ones(4, 8)
    wrong = [
        (x, [2, 2], [2, 1 + rank]),  # rank 0's input rows add up to 3 instead of 4
        (x, [2, 2 - (rank == 0)], [2, 2]),  # rank 0 expects 1 row from rank 1, which sends 2
        (x, [2 + 2 * (rank == 1), 2], [2, 2]),
        (x, [2, 2], [2, 2, 0][: 3 - rank]),
        (x, [2, 2], [2, -2] if rank else [2, 2]),
        (x.double() if rank else x, [2, 2], [2, 2]),
        (x if rank else x.reshape(4, 4, 2), [2, 2], [2, 2]),
        (torch.full((4, 8), torch.nan) if rank else x, [2, 2], [2, 2]),
    ]
    for tensor, theirs, mine in wrong:
        with pytest.raises(codec.CodecError):
            codec.torch.all_to_all_rows(tensor, theirs, mine, codec.Quantize(4))
    with pytest.raises(codec.SpecError):
        codec.torch.all_to_all_rows(x, [2, 2], [2, 2], codec.TopK())
    assert codec.torch.all_to_all_rows(x, [2, 2], [2, 2]).eq(1).all()


def test_errors_of_one_rank_are_errors_of_all():
    run_ranks(2, _refused)
