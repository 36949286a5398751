"""Fixtures and helpers of all tests: counts of examples, tensors of every dtype and kind, instruction sets."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import codec
from codec._c.library import DTYPES, ITEMSIZE

# The tier of tests: "merge" (make test) or "nightly" (make nightly). All counts that differ between tiers are here.
TIER = os.environ.get("CODEC_TESTS", "merge")
if TIER not in ("merge", "nightly"):
    raise pytest.UsageError(f"CODEC_TESTS={TIER}: unknown tier of tests; use merge or nightly")
NIGHTLY = TIER == "nightly"
EXAMPLES = 1000 if NIGHTLY else 100  # of each Hypothesis test
DAMAGED = 400 if NIGHTLY else 60  # damaged frames of each kind, for each engine

HANG = 300  # seconds after which a process is taken to hang; a busy machine is slow

# Python processes that tests start import the package that the tests import, whether it is installed or not.
_PACKAGES = str(Path(codec.__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGES, os.environ.get("PYTHONPATH")]))

settings.register_profile(
    "codec",
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("codec")


def every(step: int, items: Iterable[Any]) -> list[Any]:
    """Return all items in nightly tests, and every `step`-th one otherwise.

    Parameters
    ----------
    step : int
        Distance of the items that are returned. Choose a prime: then no period in `items` is met in one phase only.
    items : iterable
        All items, in a fixed order.

    Returns
    -------
    list
    """
    return list(items)[:: 1 if NIGHTLY else step]


ALL_DTYPES = sorted(DTYPES)
# every lossy codec, and each of its ways to write
LOSSY = {
    "sign_l1": codec.Sign(),
    "sign_l2": codec.Sign("l2", 128),
    "sign_two_mean": codec.Sign("two_mean"),
    "sign_row": codec.Sign("two_mean", "row"),
    "ternary_2bit": codec.Ternary(),
    "ternary_base3": codec.Ternary("base3", seed=7),
    "ternary_entropy": codec.Ternary("entropy"),
    "ternary_clip": codec.Ternary("base3", clip=2.5),
    "float8_e4m3fn": codec.Float8(),
    "float8_e5m2": codec.Float8("e5m2", 100, "stochastic"),
    "float8_entropy": codec.Float8(nonfinite="propagate", entropy=True),
    "float4_nvfp4": codec.Float4(),
    "float4_mxfp4": codec.Float4("mxfp4", "stochastic"),
    "quantize_4": codec.Quantize(),
    "quantize_3_odd": codec.Quantize(3, 50, "odd"),
    "quantize_1": codec.Quantize(1, 20000),
    "quantize_7": codec.Quantize(7, 3, "odd", "nearest"),
    "quantize_8": codec.Quantize(8, 3000, "even", "nearest"),
}

TRUNCATES = {
    "truncate_fixed": codec.Truncate(2),
    "truncate_plane": codec.Truncate(level_coding="plane", guard=0),
    "truncate_coded": codec.Truncate(guard=0),
    "truncate_cut": codec.Truncate(rounding="truncate", level_coding="plane", guard="exact"),
    "truncate_shared": codec.Truncate(level_coding="shared", guard=0),
    "truncate_bit": codec.Truncate(level_coding="shared", granularity="bit", guard=0),
}

KINDS = ("noise", "few", "normal", "zeros", "sparse", "mixed", "constant", "wide")


def make(dtype: str, n: int, kind: str, seed: int = 0) -> np.ndarray[Any, Any]:
    """The bits, as unsigned integers, of n values of a dtype."""
    rng = np.random.default_rng([seed, n, KINDS.index(kind)])
    size = ITEMSIZE[dtype]
    u = np.dtype(f"u{size}")
    noise = rng.integers(0, 256, (n, size), dtype=np.uint8).view(u).reshape(n)
    scale = np.exp(rng.standard_normal() + rng.standard_normal(n) * (40 if kind == "wide" else 0.3))
    x = rng.standard_normal(n) * scale
    with np.errstate(over="ignore", under="ignore"):
        if dtype == "float64":
            normal = x.view(u)
        elif dtype == "float16":
            normal = x.astype(np.float16).view(u)
        elif size == 1:
            normal = np.clip(x * 10, -127, 127).astype(np.int8).view(u)
        else:
            bits = x.astype(np.float32).view(np.uint32)
            normal = (bits >> 16).astype(u) if size == 2 else bits.astype(u)
    if kind == "noise":
        return noise
    if kind == "few":
        return rng.integers(0, 20, n).astype(u)
    if kind == "zeros":
        return np.where(rng.random(n) < 0.6, 0, normal).astype(u)
    if kind == "sparse":
        return np.where((np.arange(n) // 300) % 7 == 3, normal, 0).astype(u)
    if kind == "mixed":
        return np.where(rng.random(n) < 0.02, noise, normal).astype(u)
    if kind == "constant":
        return np.full(n, normal[0] if n else 0, u)
    return normal


def nightly(value: object) -> Any:
    """Return a value of a parametrized test for which the test runs in the nightly tier only."""
    return pytest.param(value, marks=pytest.mark.nightly)


@pytest.fixture(params=codec.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine in turn."""
    with codec.use_isa(request.param):
        yield request.param
