"""DDP hooks of models whose caller ends each backward pass by finalize_backward(), in torch 2.15 and later."""

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support.ddp_training import data, hook_state_bytes, parameter_bytes, wrapped
from support.one_bit_adam import registered
from support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "finalize_backward"), reason="torch before 2.15 has no finalize_backward()"
)


def _trained(rank, manual, spec, scaler):
    """Train; NaN of rank 0 fails steps 2 and 4. Return the steps that raised, parameters, and the hook's state."""
    model = wrapped()
    hook = codec.torch.ddp_hook(spec, grad_scaler=scaler).register(model)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    model.require_manual_backward_finalization = manual
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    failed = []
    for step in range(6):
        x, y = data(rank, step)
        if step in (2, 4) and rank == 0:
            x[0, 0] = math.nan
        optimizer.zero_grad()
        loss = scaler.scale(nn.functional.cross_entropy(model(x), y))
        try:
            loss.backward()
        except codec.CodecError:
            failed.append(step)
            continue
        if manual:
            model.finalize_backward()
        scaler.step(optimizer)
        scaler.update()
    return failed, parameter_bytes(model), hook_state_bytes(hook)


def _as_automatic(rank, size):
    for spec in (codec.Float8(), codec.Quantize(4)):
        automatic, manual = (_trained(rank, manual, spec, None) for manual in (False, True))
        assert manual == automatic
        assert manual[0] == [2, 4]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8) for _ in range(2)]
    automatic, manual = (_trained(rank, m, codec.Quantize(4), scalers[m]) for m in (False, True))
    assert manual == automatic
    assert manual[0] == []
    return manual[1]


def test_manual_finalization_trains_as_automatic_also_after_errors():
    first, second = run_ranks(2, _as_automatic)
    assert first == second


def _refused(rank, size):
    model = wrapped()
    optimizer = registered(model)
    model.require_manual_backward_finalization = True
    before = parameter_bytes(model)
    with pytest.raises(codec.ArgumentError, match="require_manual_backward_finalization"):
        model(data(rank, 0)[0]).square().mean().backward()
    assert parameter_bytes(model) == before
    assert optimizer.stats().steps == 0


def test_one_bit_adam_refuses_manual_finalization():
    run_ranks(2, _refused)
