"""Training loops that plain DistributedDataParallel allows: the hook trains as well, or all ranks raise an error."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support.ranks import run_ranks


def _batch(rank, step, n=80):
    return torch.randn(16, n, generator=torch.Generator().manual_seed(10 * step + rank))


def _nan_with_scaler_off(rank, size):
    """A NaN on rank 0 is an error on all ranks if the scaler is disabled; the next batch trains."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(80, 80))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    codec.torch.ddp_hook("small", grad_scaler=scaler).register(model)
    for step in range(4):
        x = _batch(rank, step)
        if step == 1 and rank == 0:
            x[0, 0] = torch.nan
        optimizer.zero_grad()
        loss = scaler.scale(model(x).square().mean())
        if step == 1:
            with pytest.raises(codec.PeerError if rank else codec.ArgumentError):
                loss.backward()
            continue
        loss.backward()
        scaler.step(optimizer)
        scaler.update()
    return model.module.weight.detach().numpy().tobytes(), bool(model.module.weight.isfinite().all())


def test_disabled_grad_scaler_skips_no_step():
    first, second = run_ranks(2, _nan_with_scaler_off)
    assert first == second
    assert first[1]
