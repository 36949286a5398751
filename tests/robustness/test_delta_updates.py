"""A Delta update that is damaged, truncated, repeated or made for another base is refused and changes no weight."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import codec
from support.tensors import ALL_DTYPES, random_bits
from support.tiers import NIGHTLY

N_UPDATES = 10_000 if NIGHTLY else 100  # number of updates per kind of fault
THREADS = [codec.options(threads=n) for n in (1, 3)]

Bits = np.ndarray[Any, Any]


def updates() -> Iterator[tuple[np.random.Generator, Bits, Bits, bytes]]:
    """Yield a random generator, the bits of base and new values, and the frame of the update."""
    for seed in range(N_UPDATES):
        rng = np.random.default_rng(seed)
        dtype = str(rng.choice(ALL_DTYPES))
        base = random_bits(dtype, int(rng.integers(1, 3000)), "normal")
        new = base.copy()
        changed = rng.random(len(base)) < 10 ** rng.uniform(-3, 0)
        changed[rng.integers(len(base))] = True
        new[changed] ^= rng.integers(1, 1 << int(rng.integers(1, 8)), changed.sum()).astype(base.dtype)
        frame = codec.encode(codec.view(new, dtype), codec.Delta(1024), base=codec.view(base, dtype))
        yield rng, base, new, frame


def check_refused(frame: Any, weights: Bits, error: type[Exception], rng: np.random.Generator) -> None:
    """Check that an update in place raises an error and changes nothing."""
    kept = weights.copy()
    with pytest.raises(error):
        codec.decode(frame, base=weights, out=weights, options=THREADS[rng.integers(2)])
    assert (weights == kept).all()


def test_other_bases_are_refused():
    for rng, base, new, frame in updates():
        places = rng.choice(len(base), rng.integers(1, len(base) + 1), replace=False)
        wrong = (base, new)[rng.integers(2)].copy()
        if rng.random() < 0.3 and not (wrong == base).all():  # a base to which half of an update was applied
            wrong[: len(base) // 2] = base[: len(base) // 2]
        wrong[places] ^= wrong.dtype.type(1 << rng.integers(8 * wrong.itemsize))
        if not (wrong == base).all():
            check_refused(frame, wrong, codec.StateError, rng)


def test_second_applications_are_refused():
    for rng, base, new, frame in updates():
        weights = base.copy()
        codec.decode(frame, base=weights, out=weights)
        assert (weights == new).all()
        check_refused(frame, weights, codec.StateError, rng)


def test_damaged_updates_are_refused():
    for rng, base, _new, frame in updates():
        damaged = np.frombuffer(frame, np.uint8).copy()
        places = rng.choice(len(damaged), rng.integers(1, 4), replace=False)
        damaged[places] ^= rng.integers(1, 256, len(places)).astype(np.uint8)
        check_refused(damaged, base, codec.FrameError, rng)


def test_truncated_updates_are_refused():
    for rng, base, _new, frame in updates():
        check_refused(frame[: rng.integers(len(frame))], base, codec.FrameError, rng)
