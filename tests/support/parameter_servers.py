"""Run functions on ranks that are parameter servers and workers."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import codec
import codec.torch

SOON = 60  # seconds: a wait that must succeed; generous, since test machines are busy
TERNARY = codec.Ternary("base3")


def run(pool, servers, function, *args, **how):
    """Run a function on the workers; return the workers' results and the servers' stats."""
    found = pool.run(partial(serve_or_call, **how), servers, function, *args)
    return found[servers:], found[:servers]


def serve_or_call(rank, size, servers, function, *args, timeout=SOON, **limits):
    """Serve on the first `servers` ranks, and run function(client, worker, workers, *args) on the other ranks.

    On a server, returns its stats; on a worker, closes the client and returns the function's result.
    """
    ranks, options = list(range(servers)), codec.options(timeout=timeout)
    if rank in ranks:
        server = codec.torch.ParameterServer(ranks, list(range(servers, size)), options=options, **limits)
        server.serve()
        found = server.stats()
    else:
        with codec.torch.ParameterClient(ranks, options=options) as client:
            found = function(client, rank - servers, size - servers, *args)
    dist.barrier()
    return found


def gradients(worker, step=0, keys=5, dtype=torch.float32):
    """Return a worker's gradients by key. One key is zero on all workers, another one is zero on worker 0 only."""
    g = torch.Generator().manual_seed(1000 * step + worker)
    found = {f"layer{i}.weight": torch.randn(7 * i + 3, 11, generator=g).to(dtype) for i in range(keys)}
    found["zero"] = torch.zeros(50, dtype=dtype)
    found["scalar"] = torch.randn((), generator=g).to(dtype)
    found["empty"] = torch.zeros(0, 4, dtype=dtype)
    found["zero on one"] = torch.zeros(40).to(dtype) if worker == 0 else torch.randn(40, generator=g).to(dtype)
    return found


def ternary_mean(every, spec, step, ranks):
    """Compute, without a server, the mean of all workers' ternary-coded gradients of one key.

    Parameters
    ----------
    every : list of (str, torch.Tensor)
        Key and gradient of each worker.
    spec : codec.Ternary
        Spec without a scale.
    step : int
        Number of the step.
    ranks : list of int
        Ranks of the workers.
    """
    from codec.torch.network.version import hash64

    limits = []
    for _, x in every:
        limit = x.float().abs().max().item() if x.numel() else 0.0
        if spec.clip is not None and limit:
            clipped = torch.tensor(spec.clip * float(x.float().std(correction=0))).item()
            limit = torch.tensor(min(limit, clipped or limit), dtype=x.dtype).item()
        limits.append(limit)
    scale = max(limits)
    if not scale:
        return torch.zeros_like(every[0][1])
    sums = torch.zeros(every[0][1].shape, dtype=torch.int32)
    for (name, x), rank in zip(every, ranks, strict=True):
        stream = hash64("parameter server", step, rank, name) % (1 << 64)
        spec_of_scale = codec.Ternary(spec.packing, scale=scale, seed=spec.seed)
        frame = codec.encode(x.clamp(-scale, scale), spec_of_scale, stream=stream)
        sums += torch.as_tensor(codec.decode(frame, like=torch.empty(0))).sign().int()
    return (sums.double() * (scale / len(every))).float().to(every[0][1].dtype)


def raises(error, match):
    return pytest.raises(error, match=match)


_groups = {}


def workers_group():
    """Return the process group of the workers, which `make_groups` has created."""
    return _groups["workers"]


def make_groups(rank, size, servers):
    _groups["workers"] = dist.new_group(list(range(servers, size)))
