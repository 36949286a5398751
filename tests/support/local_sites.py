"""Models and data of four ranks in two sites, for tests of codec.torch.LocalSteps between sites."""

import copy

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import codec
import codec.torch
from support.local_training import adam, gradient

SITES = 2


def sites():
    """Return a mesh of two sites with two ranks each."""
    return init_device_mesh("cpu", (SITES, dist.get_world_size() // SITES), mesh_dim_names=("between", "within"))


class Tied(nn.Module):
    """Language model with an embedding, a head tied to it, a frozen layer and a batch norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(40, 64)
        self.frozen = nn.Linear(64, 64)
        self.hidden = nn.Linear(64, 192)
        self.norm = nn.BatchNorm1d(192)
        self.back = nn.Linear(192, 64)
        self.head = nn.Linear(64, 40)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.frozen(self.embedding(x))
        return self.head(self.back(self.norm(self.hidden(x)).relu()))


def text(rank, step):
    """Return the tokens and next tokens of the batch of `rank` in `step`."""
    tokens = torch.randint(0, 40, (17,), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens, (3 * tokens + 1) % 40


def train(model, optimizer, steps, *after, scale=1.0):
    """Train a model of :class:`Tied` for the range `steps`; call each of `after` after each step."""
    for step in steps:
        x, y = text(dist.get_rank(), step)
        optimizer.zero_grad()
        (scale * nn.functional.cross_entropy(model(x), y)).backward()
        optimizer.step()
        for call in after:
            call()


def train_with_pause(make, pause, **how):
    """Train 9 steps, and synchronize; if `pause` is given, continue after that many steps from a checkpoint.

    `make` is :func:`parallel`, or a function with the same arguments and results. Return the module and its LocalSteps.
    """
    model, optimizer, local = make(**how)
    train(model, optimizer, range(pause or 9), local.step)
    if pause:
        saved = [copy.deepcopy(each.state_dict()) for each in (getattr(model, "module", model), optimizer, local)]
        model, optimizer, local = make(**how)
        for each, state in zip((getattr(model, "module", model), optimizer, local), saved, strict=True):
            each.load_state_dict(state)
        train(model, optimizer, range(pause, 9), local.step)
    local.synchronize()
    return getattr(model, "module", model), local


class Pushed(nn.Module):
    """Model whose gradients do not depend on its parameters. With two ranks a site, one has no part of the last one."""

    shapes = ((30, 20), (7,), (3, 64), (1, 8))

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(5)
        self.all = nn.ParameterList(torch.randn(shape, generator=g) for shape in self.shapes)

    def forward(self, rank, step):
        """Return a loss whose gradients are those of support.local_training.gradient."""
        given = (torch.from_numpy(gradient(i, shape, rank, step)) for i, shape in enumerate(self.shapes))
        return sum((p * g).sum() for p, g in zip(self.all, given, strict=True))


def push(model, optimizer, rank, steps, after):
    """Take steps of a :class:`Pushed` for the range `steps`; call `after` after each of them."""
    for step in steps:
        optimizer.zero_grad()
        model(rank, step).backward()
        optimizer.step()
        after()


def pushed(ranks, steps, lr):
    """Return the change of a :class:`Pushed` by SGD, the mean over `ranks`, as a float64 array."""
    shapes = Pushed.shapes
    total = [sum(gradient(i, s, r, t).astype(np.float64) for r in ranks for t in steps) for i, s in enumerate(shapes)]
    return -lr / len(ranks) * np.concatenate([x.reshape(-1) for x in total])


def parallel(group=None, **how):
    """Return a DistributedDataParallel within the site, its optimizer, and a LocalSteps; by default between sites."""
    mesh = sites()
    model = Tied()
    ddp = DistributedDataParallel(model, process_group=mesh.get_group("within"))
    optimizer = adam(model)
    chosen = mesh if group is None else mesh.get_group(group)
    return ddp, optimizer, codec.torch.LocalSteps(model, optimizer, group=chosen, **how)
