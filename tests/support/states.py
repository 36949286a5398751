"""Random layouts of parameters in buckets, and round trips of state dicts through files."""

import io
import itertools

import numpy as np
import torch
from hypothesis import strategies as st

import codec

NAMES = ("layer.0.weight", "layer.0.bias", "a[0:5]", "ünïcode/\n", "")


def random_values(rng, n):
    """Return n float32 values with heavy tails."""
    return (rng.standard_normal(n) * np.exp(rng.standard_normal(n))).astype(np.float32)


def equal_states(a, b):
    """Return True if two dicts have the same keys in the same order, and bit-identical values."""
    plain = [[(k, v.dtype, v.tobytes()) if isinstance(v, np.ndarray) else (k, v) for k, v in d.items()] for d in (a, b)]
    return plain[0] == plain[1]


def random_cuts(rng, n, most=4):
    """Return at most `most` random ranges that partition [0, n)."""
    edges = [0, *sorted(rng.integers(0, n + 1, rng.integers(0, most)).tolist()), n]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]


def random_buckets(rng, sizes):
    """Return random layouts of a few buckets that together contain all parameters, some split into ranges."""
    ranges = [(k, a, b) for k, n in sizes.items() for a, b in (random_cuts(rng, n) if rng.random() < 0.5 else [(0, n)])]
    ranges = [ranges[i] for i in rng.permutation(len(ranges))]
    return [ranges[a:b] for a, b in random_cuts(rng, len(ranges))]


def random_feedback(rng, sizes, role="worker"):
    """Return an ErrorFeedback with a random residual for every parameter."""
    store = codec.ErrorFeedback(codec.Sign(), role=role)
    for layout in random_buckets(rng, sizes):
        buffer = store.begin(layout)
        buffer[:] = random_values(rng, len(buffer))
    store.commit()
    return store


parameter_sizes = st.lists(st.integers(1, 300), min_size=1, max_size=len(NAMES)).map(
    lambda n: dict(zip(NAMES, n, strict=False))
)
seeds = st.integers(0, 2**32 - 1)


def through_npz(saved):
    """Return a state dict after np.savez and np.load."""
    file = io.BytesIO()
    np.savez(file, **saved)
    file.seek(0)
    return np.load(file, allow_pickle=False)


def through_torch_save(saved):
    """Return a state dict after torch.save and torch.load."""
    file = io.BytesIO()
    torch.save({k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in saved.items()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_a_file(state):
    """Return a state dict after torch.save to a file and torch.load from the file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # torch.load defaults to weights_only=True


def parts_of(state):
    """Yield each dict, list or tuple in a state with each of its keys or indices."""
    for key in list(state) if isinstance(state, dict) else range(len(state)):
        yield state, key
        if isinstance(state[key], dict | list | tuple):
            yield from parts_of(state[key])
