"""Models, data and oracles for tests of codec.torch.LocalSteps."""

import logging
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

import codec
import codec.torch

EXACT = codec.Lossless()
ROUNDED = codec.Quantize(4, levels="odd", rounding="nearest")  # deterministic, so an oracle needs no random bits


def net(seed=3):
    """Return a small model with weights from a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 3))


def batch(rank, step):
    """Return the inputs and labels of the batch of `rank` in `step`."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 12, generator=g)
    return x, (x[:, :3] * x[:, 3:6]).argmax(1)


def adam(model, lr=1e-2):
    """Return an Adam optimizer, each of whose steps depends on all earlier steps."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def nesterov(parameters):
    """Return an SGD optimizer with Nesterov momentum, the outer optimizer of DiLoCo."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def local_steps(model, optimizer=None, **how):
    return codec.torch.LocalSteps(model, optimizer or adam(model), **how)


def started(model=None, **how):
    """Return a model, by default that of :func:`net`, its Adam optimizer, and a LocalSteps of both."""
    model = net() if model is None else model
    optimizer = adam(model)
    return model, optimizer, local_steps(model, optimizer, **how)


def started_linear(**how):
    """As :func:`started`, for a :class:`Linear` and SGD with a learning rate of 0.01."""
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, local_steps(model, optimizer, **how)


@contextmanager
def log_records():
    """Return a context manager with a list of the level and text of each message that the library logs within it."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelname, record.getMessage()))
    logging.getLogger("codec.torch").addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger("codec.torch").removeHandler(handler)


def train(model, optimizer, rank, steps, after=lambda: None):
    """Train for the range `steps`; call `after` after each step of the optimizer."""
    for step in steps:
        x, y = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        after()


class Linear(nn.Module):
    """Model whose gradients do not depend on its parameters, so that the mean of all changes is known."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        g = torch.Generator().manual_seed(5)
        shapes = {"a": (30, 20), "b": (7,), "c": (100, 11), "d": ()}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=g).to(dtype)))


def push(model, optimizer, rank, steps, after=lambda: None):
    """Take steps, a range, whose gradients depend on rank and step alone; call `after` after each of them."""
    for step in steps:
        for i, p in enumerate(model.parameters()):
            p.grad = torch.from_numpy(gradient(i, tuple(p.shape), rank, step)).to(p.dtype)
        optimizer.step()
        after()


def gradient(i, shape, rank, step):
    """Return the gradient of parameter `i` that :func:`push` uses in a step of a rank."""
    return np.random.default_rng([i, rank, step]).standard_normal(shape, np.float32)


def flat(model):
    """Return the parameters of a model as one float64 array."""
    return np.concatenate([p.detach().double().numpy().reshape(-1) for p in model.parameters()])


def moved(ranks, steps, lr):
    """Return the change of Linear's parameters by SGD with :func:`push`, as the mean over `ranks` in float64."""
    shapes = [tuple(p.shape) for p in Linear().parameters()]
    total = [sum(gradient(i, s, r, t).astype(np.float64) for r in ranks for t in steps) for i, s in enumerate(shapes)]
    return -lr / len(ranks) * np.concatenate([np.reshape(x, -1) for x in total])


def parameter_bytes(model):
    """Return the bytes of all parameters and buffers."""
    return b"".join(
        x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for x in model.state_dict().values()
    )


def state_bytes(local):
    """Return the bytes of all tensors in the state of a LocalSteps, by name."""
    found = []

    def put(name, value):
        if isinstance(value, dict):
            for key, each in value.items():
                put(f"{name}.{key}", each)
        elif isinstance(value, torch.Tensor):
            found.append((name, value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""))
        else:
            found.append((name, repr(value)))

    put("", local.state_dict())
    return found


def raised(call):
    """Return the class and the message of the error, or the KeyboardInterrupt, that call() raises."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as e:
        return type(e).__name__, str(e)
    return None
