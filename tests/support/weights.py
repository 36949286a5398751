"""Updates of weights, as bits of bfloat16."""

import numpy as np

import codec


def encode(new, base, dtype, spec=codec.Delta(), **how):  # noqa: B008 - immutable
    """Return the frame of bits against those of a base."""
    return codec.encode(codec.view(new, dtype), spec, base=codec.view(base, dtype), **how)


def weights(n=300_000, density=0.01):
    """Return bfloat16 bits of weights and of their successors; small weights change more often."""
    rng = np.random.default_rng(1)
    base = (rng.standard_normal(n).astype(np.float32) / 50).view(np.uint32)
    moved = base.view(np.float32) + rng.standard_normal(n).astype(np.float32) * np.float32(density * 1e-4)
    round_ = lambda x: ((x + 0x7FFF + (x >> 16 & 1)) >> 16).astype(np.uint16)
    return round_(base), round_(moved.view(np.uint32))
