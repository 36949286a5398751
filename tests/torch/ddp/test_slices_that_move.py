"""Slices that follow the rates of links: error feedback, failed steps, two levels, uncompressed values, other hooks."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch.group import autotune, shares
from support.ddp_training import ENCODE_ALL, parameter_bytes
from support.ranks import run_ranks

PERIOD = 3
RATES = ([20, 20, 20, 5], [5, 20, 20, 20], [20, 20, 20, 20])  # in each period, by rank; two levels: by machine
SIDE = 256


def measure_often(machine):
    """Measure every PERIOD steps; return the list to which the rates of the period belong."""
    shares.PERIOD, shares._FIRST = PERIOD, 0
    rates = []
    shares.rate_of = lambda *_: rates[machine]
    return rates


class Products(nn.Module):
    """Model whose gradient is its input."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIDE, SIDE))

    def forward(self, g):
        return (self.w * g).sum()


def effect(state, size, roles=("worker", "server")):
    """Return the effect of one rank's residuals on the mean."""
    found = torch.zeros(SIDE * SIDE, dtype=torch.float64)
    for role in roles:
        factor = state["within"] / size if role == "worker" else 1
        for key, values in state[role].items():
            name, _, where = key.rpartition("[")
            if name:
                start, stop = map(int, where[:-1].split(":"))
                found[start:stop] += factor * values
    return found


def _accounted(rank, size, within, way, fails):
    """Move slices twice; return sums of results, residuals and gradients, and the weights after each period."""
    rates = measure_often(rank // within)
    autotune.RawFallback.way = lambda self, index: way
    group = init_device_mesh("cpu", (size // within, within)) if within > 1 else None
    model = DistributedDataParallel(Products())
    hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True, policy=ENCODE_ALL, group=group).register(model)
    generator = torch.Generator().manual_seed(rank)
    results, gradients = torch.zeros(2, SIDE * SIDE, dtype=torch.float64)
    weights = []
    for rates[:] in RATES:
        for step in range(PERIOD):
            g = torch.randn(SIDE, SIDE, generator=generator)
            model.zero_grad()
            model(g).backward()
            results += model.module.w.grad.flatten()
            gradients += g.flatten() / size
            if fails and not step:
                assert hook.reducer.state.shares.weights is None, "slices are equal after a failed step"
        if weights and not fails and not weights[-1][rank]:
            kept = effect(hook.state_dict(), size, ["server"])
            assert not kept.any(), "a rank without a slice has passed its residuals of sums on"
        weights.append(hook.reducer.state.shares.weights)
        if fails:  # in the first step of the new slices
            with pytest.raises(codec.CodecError, match=r"NaN|nothing was changed"):
                model(torch.full((SIDE, SIDE), torch.nan if rank == 1 else 1.0)).backward()
    return results, effect(hook.state_dict(), size), gradients, weights


@pytest.mark.parametrize(
    ("within", "way", "fails"),
    [(1, "frames", False), (1, "frames", True), (1, "values", False), (2, "frames", True)],
)
def test_no_residual_is_lost_or_counted_twice_when_slices_move(within, way, fails):
    found = run_ranks(4 * within, _accounted, within, way, fails, fresh=within > 1)
    weights = found[0][3]
    assert [each.index(0) for each in weights[:2]] == [3, 0]
    assert weights[2] is None
    total = found[0][0] + sum(residuals for _, residuals, _, _ in found)
    want = sum(gradients for _, _, gradients, _ in found)
    assert torch.linalg.vector_norm(total - want) < 1e-5 * torch.linalg.vector_norm(want)
    for results, _, _, theirs in found[1:]:
        assert torch.equal(results, found[0][0])
        assert theirs == weights


class _WithSparseTable(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer = nn.Embedding(50, SIDE, sparse=True), nn.Linear(SIDE, SIDE)

    def forward(self, i):
        return self.layer(self.table(i)).square().mean()


def _trained(rank, size):
    """Train a model with sparse gradients, and one with OneBitAdam; return parameters and the weights of all hooks."""
    measure_often(rank)[:] = RATES[0]
    autotune.RawFallback.way = lambda self, index: "frames"
    model = DistributedDataParallel(_WithSparseTable())
    hook = codec.torch.ddp_hook(codec.Quantize(4), feedback=True, policy=ENCODE_ALL).register(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2 * PERIOD):
        sgd.zero_grad()
        model(torch.tensor([step, rank, 7 + rank])).backward()
        sgd.step()
    averaged = DistributedDataParallel(nn.Linear(SIDE, SIDE))
    adam = codec.torch.OneBitAdam(averaged.parameters(), lr=1e-3, freeze_step=PERIOD + 1)
    adam.register(averaged)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(2 * PERIOD + 3):
        adam.zero_grad()
        averaged(torch.randn(8, SIDE, generator=generator)).square().mean().backward()
        adam.step()
    hooks = [hook, *adam._averager.link.hooks.values()]
    return parameter_bytes(model), parameter_bytes(averaged), [h.reducer.state.shares.weights for h in hooks]


def test_slices_move_beside_sparse_gradients_and_in_both_hooks_of_one_bit_adam():
    found = run_ranks(4, _trained)
    assert found[0][2] == [(22, 21, 21, 0)] * 3
    assert found[1:] == found[:1] * 3
