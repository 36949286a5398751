"""1-bit SGD: the sum of all sent tensors plus the last residual equals the sum of all gradients."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec
import codec.torch
from support.ranks import run_ranks
from support.tiers import HANG_SECONDS

SCRIPT = Path(__file__).parents[3] / "examples/one_bit_sgd.py"


@given(
    st.sampled_from(["l1", "l2", "two_mean"]),
    st.sampled_from([None, "row", 1, 7, 1024]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 3000),
    st.integers(0, 2**32 - 1),
)
def test_sent_tensors_and_the_residual_add_up_to_the_gradients(scale, group_size, dtype, n, seed):
    """The sums differ at most by the float32 rounding of the two additions of each step."""
    spec = codec.Sign(scale, group_size=group_size)
    generator = torch.Generator().manual_seed(seed)
    residual, given_sum, sent_sum, rounding = torch.zeros(n), *(torch.zeros(n, dtype=torch.float64) for _ in range(3))
    for _ in range(6):
        gradient = torch.randn(n, generator=generator).to(dtype)
        rounding += (gradient.double() + residual).abs() * 2.0**-23
        frame = codec.encode(gradient, spec, residual=residual, feedback=True)
        rounding += residual.abs() * 2.0**-23
        given_sum += gradient
        sent_sum += codec.decode(frame, like=gradient).double()
    assert residual.dtype == torch.float32
    assert bool(((given_sum - sent_sum - residual).abs() <= rounding).all())
    assert group_size == 1 or n < 100 or bool(residual.any())


def test_two_scales_are_the_means_of_both_signs():
    """As in CNTK: the threshold is 0, and each value decodes to the mean of all values with its sign."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, 200)).astype(np.float32)
    decoded = codec.decode(codec.encode(rows, codec.Sign("two_mean", group_size="row")))
    for row, found in zip(rows.astype(np.float64), decoded, strict=True):
        expected = np.where(row < 0, row[row < 0].mean(), row[row >= 0].mean())
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def _trained(rank, size, steps):
    train = runpy.run_path(str(SCRIPT))["train"]
    return [train(one_bit, steps, 0.03) for one_bit in (False, True)]


@pytest.mark.parametrize("size", [1, 3])
def test_training_delays_gradients_and_loses_none(size):
    """Sums of gradients equal sums of results plus the residuals in the state_dict() of all ranks."""
    steps = 40
    results: list[Any] = run_ranks(size, _trained, steps)
    for plain, (losses, bits, (difference, held)) in results:
        assert difference < 1e-6
        assert held > 0.005  # residuals are quantization errors, larger than float32 rounding
        assert losses[0] == plain[0][0]
        assert losses[-1] < losses[0] - 0.1
        assert losses[-1] == pytest.approx(plain[0][-1], abs=0.1)
        assert size == 1 or 1 < bits < 4


@pytest.mark.nightly
def test_example_prints_documented_figures_under_torchrun():
    """The loss and the bits per value are those of docs/methods/systems.md, up to rounding of other CPUs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    plain, compressed = (float(x) for x in re.findall(r"loss [\d.]+ -> ([\d.]+),", done.stdout))
    assert compressed - plain == pytest.approx(0.041, abs=0.02)
    assert float(re.findall(r", ([\d.]+) bits", done.stdout)[1]) == pytest.approx(1.55, abs=0.02)
