"""Number of examples and limits by test tier: "check" (make check), "merge" (make test), "nightly" (make nightly)."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

TIER = os.environ.get("CODEC_TESTS", "merge")
if TIER not in ("check", "merge", "nightly"):
    raise pytest.UsageError(f"CODEC_TESTS={TIER}: unknown tier of tests; use check, merge or nightly")
NIGHTLY = TIER == "nightly"
CHECK = TIER == "check"  # runs in an environment without torch, Numba and CuPy
N_EXAMPLES = {"check": 20, "merge": 30, "nightly": 1000}[TIER]  # number of examples of each Hypothesis test
N_DAMAGED = 400 if NIGHTLY else 30  # damaged copies of each frame, for each engine
HANG_SECONDS = 300  # seconds until a process is considered hung; generous, since test machines are busy


def every(step: int, items: Iterable[Any]) -> list[Any]:
    """Return all items in nightly tests, and every `step`-th one otherwise.

    Parameters
    ----------
    step : int
        Distance between returned items. Use a prime, so that returned items cover all phases of any period in `items`.
    items : iterable
        All items, in a fixed order.

    Returns
    -------
    list
    """
    return list(items)[:: 1 if NIGHTLY else step]


def nightly(value: object) -> Any:
    """Return a pytest parameter for `value`, with which a test runs in the nightly tier only."""
    return pytest.param(value, marks=pytest.mark.nightly)
