"""Fine-tuning through ActivationDelta reaches uncompressed training's loss, within a tolerance for each bit width."""

import functools
import logging

import pytest
import torch

from support.pipeline_training import edges_of, fine_tune
from support.tiers import NIGHTLY

SIZES = (
    {"pretraining": 1500, "samples": 256, "epochs": 6} if NIGHTLY else {"pretraining": 120, "samples": 64, "epochs": 3}
)
SEEDS = range(3) if NIGHTLY else range(1)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def uncompressed(seed):
    return fine_tune(seed=seed, **SIZES)[-1]


def gap(seed, *args, **kwargs):
    """Return the loss of the last epoch minus that of uncompressed training."""
    return fine_tune(edges_of(*args, seed=seed, **kwargs), seed=seed, **SIZES)[-1] - uncompressed(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_uncompressed_training_learns(seed):
    """Uncompressed training reduces the loss. This runs first, so that its CPU time includes the pretraining."""
    assert uncompressed(seed) < (1.4 if NIGHTLY else 2.4)


@pytest.mark.parametrize("entries", ["float32", "8bit"])
@pytest.mark.parametrize("seed", SEEDS)
def test_deltas_of_4_bits_lose_nothing(seed, entries):
    assert abs(gap(seed, True, 4, 8, dtype=entries)) < 0.002


@pytest.mark.parametrize("seed", SEEDS)
def test_deltas_of_2_bits_lose_little(seed):
    assert gap(seed, True, 2, 4) < 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_direct_quantization_to_2_bits_loses_much(seed):
    """Direct quantization to 2 bits has a much larger loss, so the tests of deltas above are sensitive."""
    assert gap(seed, False, 2, 4, rounding="stochastic") > (0.3 if NIGHTLY else 0.1)


def test_divergence_is_reported(caplog):
    """Divergence with 1 bit, whose error is no contraction, is logged."""
    with caplog.at_level(logging.WARNING, "codec"):
        fine_tune(edges_of(True, 1, 4), **SIZES)
    assert "may not contract" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "codec"):
        fine_tune(edges_of(True, 4, 8), **SIZES)
    assert not caplog.text
