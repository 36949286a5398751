"""Small models and data for tests of DistributedDataParallel hooks."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import codec.torch
from codec.torch.ddp import joined
from codec.torch.feedback.checkpoint import packed
from support.states import through_a_file

ENCODE_ALL = codec.torch.Policy(lossless_small=False, uneven=None)  # uses the hook's spec for every parameter


def net():
    """Return a model of 12 layers, the same on all ranks."""
    torch.manual_seed(3)
    middle = [m for _ in range(9) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())]
    return torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.LayerNorm(64), *middle, torch.nn.Linear(64, 5))


def data(rank, step):
    """Return the inputs and labels of the batch of `rank` in `step`."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 20, generator=g)
    return x, (x[:, :5] * x[:, 5:10]).argmax(1)


def separate_buckets():
    """In this process, reduce each bucket in a collective of its own, however small it is."""
    joined.SLICE_NBYTES = 0


def wrapped(model=None, *, joins=False, **kwargs):
    """Wrap a model in DistributedDataParallel with at least 8 buckets, which are joined only if `joins` is True."""
    if not joins:
        separate_buckets()
    return DistributedDataParallel(model or net(), bucket_cap_mb=0.015, **kwargs)


def parameter_bytes(model):
    """Return the bytes of all parameters."""
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def change_error(found, expected, initial):
    """Return the error of the parameters after a training, relative to the norm of their change since `initial`.

    Another order of additions, as on another CPU, changes gradients by about 1e-7 of their norm, which is far more than
    1e-7 of a value near 0. So trainings that do not diverge are compared by norms.
    """
    found, expected, initial = (
        torch.cat([torch.as_tensor(p).detach().double().flatten() for p in each]) for each in (found, expected, initial)
    )
    return float((found - expected).norm() / (expected - initial).norm())


def hook_state_bytes(hook):
    """Return the state of a hook with tensors as bytes, so that states can be compared with ==."""
    return packed(hook.state_dict())


def check_failed_step(model, hook, optimizer, rank, step):
    """Check that a step in which rank 1 has a NaN raises on all ranks, and changes neither parameters nor the hook."""
    before, state = parameter_bytes(model), hook_state_bytes(hook)
    x, y = data(rank, step)
    if rank == 1:
        x[3, 4] = float("nan")
    optimizer.zero_grad()
    with pytest.raises(codec.ArgumentError if rank == 1 else codec.PeerError, match=r"NaN|nothing was changed"):
        torch.nn.functional.cross_entropy(model(x), y).backward()
    assert parameter_bytes(model) == before
    assert hook_state_bytes(hook) == state


def train(model, optimizer, rank, steps, first=0):
    """Train for `steps` steps, of which `first` is the number of the first, and return their losses."""
    losses = []
    for step in range(first, first + steps):
        x, y = data(rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def take_step(model, rank, forward, optimizer=None):
    """Backpropagate the loss forward(model, rank), step the optimizer if given, and return the gradients."""
    model.zero_grad()
    forward(model, rank).backward()
    if optimizer is not None:
        optimizer.step()
    return [p.grad for p in model.parameters()]


def small_net():
    """Return a model of three layers, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 8))


def small_forward(model, rank):
    """Return the loss of the small model for a rank's batch."""
    return model(torch.randn(16, 64, generator=torch.Generator().manual_seed(rank))).square().mean()


def train_small_net(hooked, rank, steps, pause=None):
    """Train a wrapped :func:`small_net`; with `pause`, continue after that many steps from a checkpoint in a file.

    `hooked` is called for the model and its hook. Return the bytes of the parameters and of the hook's state, and the
    state in the file.
    """
    (model, hook), saved = hooked(), None
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        if step == pause:
            saved = through_a_file([model.module.state_dict(), optimizer.state_dict(), hook.state_dict()])
            model, hook = hooked()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            for each, state in zip((model.module, optimizer, hook), saved, strict=True):
                each.load_state_dict(state)
        take_step(model, 10 * step + rank, small_forward, optimizer)
    return parameter_bytes(model), hook_state_bytes(hook), saved and saved[2]


class EqualLayers(torch.nn.Module):
    """Model of equal layers, each in a bucket of its own. `nested`: their backwards run inside the outer backward."""

    def __init__(self, nested=False):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.nested = nested

    def forward(self, x):
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True) if self.nested else layer(x)
        return x
