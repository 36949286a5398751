"""Small buckets are joined less over slow links, on all ranks alike, without losing a residual."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from codec.torch.group import autotune, shares
from codec.torch.network import stripe
from support.ranks import run_ranks

PERIOD, LAYERS, SIDE = 3, 8, 64
NBYTES = LAYERS * SIDE * SIDE * 4
POLICY = codec.torch.Policy(lossless_small=False, uneven=None)
BUSY = (NBYTES * 400e-9, NBYTES * 30e-9, 0.0)  # seconds for which the link is busy in a step, in each period


class Products(nn.Module):
    """Model in 8 buckets whose gradient is its input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(SIDE, SIDE)) for _ in range(LAYERS))

    def forward(self, g):
        return sum((w * each).sum() for w, each in zip(self.layers, g, strict=True))

    def gradients(self):
        return torch.cat([w.grad.flatten().double() for w in self.layers])


def effect(state, size):
    """Return the effect of one rank's residuals on the mean."""
    found = torch.zeros(LAYERS, SIDE * SIDE, dtype=torch.float64)
    for role in ("worker", "server"):
        factor = state["within"] / size if role == "worker" else 1
        for key, values in state[role].items():
            name, _, where = key.rpartition("[")
            if name:
                start, stop = map(int, where[:-1].split(":"))
                found[int(name.rpartition(".")[2]), start:stop] += factor * values
    return found.flatten()


def _trained(rank, size, within, spec, fails):
    """Measure other links in each period; only the last rank has the slow one."""
    shares.PERIOD, shares._FIRST = PERIOD, 0
    busy = [0.0]

    def rate_of(before, now, steps):
        acked = sum(last.acked_nbytes - was.acked_nbytes for was, last in zip(before, now, strict=True))
        return acked * within / steps / busy[0] if rank == size - 1 and busy[0] else 0

    shares.rate_of, stripe.is_local = rate_of, lambda sock: False
    autotune.RawFallback.way = lambda self, index: "frames"
    group = init_device_mesh("cpu", (size // within, within)) if within > 1 else None
    model = DistributedDataParallel(Products(), bucket_cap_mb=SIDE * SIDE * 4 / 2**20)
    feedback = None if spec == codec.Lossless() else True
    hook = codec.torch.ddp_hook(spec, feedback=feedback, policy=POLICY, group=group).register(model)
    generator = torch.Generator().manual_seed(rank)
    results, gradients = torch.zeros(2, NBYTES // 4, dtype=torch.float64)
    runs = []
    for period in range(len(BUSY) + 1):
        busy[0] = BUSY[period] if period < len(BUSY) else 0.0
        for _ in range(PERIOD):
            g = torch.randn(LAYERS, SIDE, SIDE, generator=generator)
            model.zero_grad()
            model(g).backward()
            results += model.module.gradients()
            gradients += g.flatten() / size
        runs.append(len(hook.reducer.state.buckets))
        if fails:
            raises = pytest.raises(codec.CodecError, match=r"NaN|nothing was changed")
            with raises:  # ranks then compare their states, and join again until they have measured
                model(torch.full((LAYERS, SIDE, SIDE), torch.nan if rank == 1 else 1.0)).backward()
    state = hook.state_dict()
    return results, gradients, effect(state, size) if feedback else 0 * results, runs


@pytest.mark.parametrize(
    ("size", "within", "spec", "fails"),
    [
        (2, 1, codec.Lossless(), False),
        (3, 1, codec.Quantize(4), False),
        (4, 2, codec.Quantize(4), False),
        (3, 1, codec.Quantize(4), True),
    ],
)
def test_ranks_join_fewer_buckets_over_slow_links(size, within, spec, fails):
    found = run_ranks(size, _trained, within, spec, fails, fresh=within > 1)
    total = found[0][0] + sum(residuals for _, _, residuals, _ in found)
    want = sum(gradients for _, gradients, _, _ in found)
    assert torch.linalg.vector_norm(total - want) < 1e-5 * torch.linalg.vector_norm(want)
    for results, _, _, runs in found:
        assert torch.equal(results, found[0][0])
        assert runs == [1] * 4 if fails else runs[::3] == [1, 1] and runs[1] == 8 and 1 < runs[2] < 8, runs
