"""All-reduces with error feedback, their reference in numpy, and access to the residuals of ranks."""

import itertools

import numpy as np
import torch
import torch.distributed as dist

import codec
import codec.torch

N = 40_000  # values, 160 KB: with three ranks or more, algorithm="auto" chooses two-shot
SPECS = (codec.Quantize(4), codec.Float8(), codec.Float8("mxfp8_e4m3"), codec.Sign(group_size=256), codec.Float4())
NEAREST = (
    codec.Quantize(3, levels="odd", rounding="nearest"),
    codec.Sign(group_size=256),
    codec.Float8(group_size=128),
)
BUCKETS = [
    {"a": (40, 100), "b": (), "c": (3, 1000)},
    {"c": (3, 1000), "d": (130, 50), "a": (40, 100)},  # the same parameters in other buckets
    {"b": (), "d": (130, 50)},
]


def gradient(rank, step, n=N):
    return torch.randn(n, generator=torch.Generator().manual_seed(1000 * step + rank))


def reduce(x, feedback, algorithm="two_shot", **how):
    """All-reduce x in place by an algorithm that no measurement influences; return x, or the handle if asynchronous."""
    how.setdefault("op", "mean")
    options = codec.options(algorithm=algorithm)
    return codec.torch.all_reduce(x, feedback=feedback, options=options, **how) or x


def state_bytes(feedback):
    state = feedback.state_dict()
    parts = [(role, name, x) for role in ("worker", "server") for name, x in sorted(state[role].items())]
    return [
        state["op"],
        *((role, name, x.numpy().tobytes() if isinstance(x, torch.Tensor) else x) for role, name, x in parts),
    ]


def corrections(states, op):
    """Return, for each parameter, the sum that the residuals of all ranks will add to later results."""
    found = {}
    for role in ("worker", "server"):
        for state in states:
            for name, x in state[role].items():
                if not isinstance(x, torch.Tensor):
                    continue
                key, _, place = name.partition("[")
                start, stop = map(int, place[:-1].split(":"))
                total = found.setdefault(key, np.zeros(1 << 16))
                share = len(states) if role == "worker" and op == "mean" else 1
                total[start:stop] += x.numpy() / share
    return found


def gathered(feedback):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, feedback.state_dict())
    return states


class Oracle:
    """Reference of an all-reduce with error feedback: all ranks in numpy; only the codec is the library's."""

    def __init__(self, spec, size, op, algorithm, n=N):
        self.spec, self.size, self.op, self.two_shot = spec, size, op, algorithm == "two_shot" and size > 1
        self.workers = [np.zeros(n, np.float32) for _ in range(size)]
        self.servers = np.zeros(n, np.float32)
        cuts = [i * n // size // 1024 * 1024 for i in range(size)] + [n] if self.two_shot else [0, n]
        self.slices = [slice(a, b) for a, b in itertools.pairwise(cuts)]

    def send(self, x, residual):
        """Return the values that ranks decode from x plus the residual; write the error to `residual`."""
        x = x + residual
        seen = np.concatenate([codec.decode(codec.encode(x[s], self.spec)) for s in self.slices])
        residual[:] = x - seen
        return seen

    def step(self, gradients):
        total = None
        for x, residual in zip(gradients, self.workers, strict=True):
            seen = self.send(x, residual)
            total = seen if total is None else total + seen
        if self.op == "mean":
            total = total / np.float32(self.size)
        return self.send(total, self.servers) if self.two_shot else total
