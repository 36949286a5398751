"""Means of sparse frames: over the ranks that have sent a value, equal to the bit on all ranks."""

import numpy as np
import pytest
import torch
from torch import nn

import codec
import codec.torch
from support.local_training import local_steps, raised
from support.ranks import run_ranks

TOPK = codec.TopK(1 / 4, bits=3, chunk=64)


class Matrix(nn.Module):
    """One matrix, of which each rank changes other values."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(16, 64))

    def change(self, rank, step):
        with torch.no_grad():
            self.w += torch.from_numpy(change(rank, step))


def change(rank, step):
    return np.random.default_rng([rank, step]).standard_normal((16, 64), np.float32)


def _trained(rank, size, rounds, algorithm=None):
    model = Matrix()
    with codec.options(algorithm=algorithm):
        local = local_steps(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            every=1,
            spec=codec.torch.Feedback(TOPK, decay=0.5),
        )
    for step in range(rounds):
        model.change(rank, step)
        local.step()
    return model.w.detach().numpy().copy()


def oracle(size, rounds, by_senders):
    """Return the parameters after some rounds of TopK with error feedback, from the definition."""
    w, residuals = np.zeros((16, 64), np.float32), np.zeros((size, 16, 64), np.float32)
    for step in range(rounds):
        total, count = np.zeros_like(w), np.zeros_like(w)
        for rank in range(size):
            x = change(rank, step) + 0.5 * residuals[rank]
            sent = codec.decode(codec.encode(x, TOPK))
            residuals[rank] = x - sent
            total += sent
            count += sent != 0
        w += total / (np.maximum(count, 1) if by_senders else size)
    return w


@pytest.mark.parametrize("size", [2, 4])
def test_changes_are_divided_by_the_number_of_ranks_that_sent_them(size):
    found = run_ranks(size, _trained, 3)
    for each in found:
        np.testing.assert_array_equal(each, found[0])
    np.testing.assert_allclose(found[0], oracle(size, 3, True), rtol=0, atol=1e-5)


def test_named_algorithm_divides_by_all_ranks(pool):
    found = pool.run(_trained, 3, "all_gather")
    np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(found[0], oracle(2, 3, False), rtol=0, atol=1e-5)


def _different_options(rank, size):
    model = Matrix()
    with codec.options(algorithm="all_gather" if rank else None):
        return raised(lambda: local_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), spec=_feedback()))


def _feedback():
    return codec.torch.Feedback(TOPK)


def test_ranks_that_divide_by_other_numbers_are_refused(pool):
    for kind, text in pool.run(_different_options):
        assert kind == "PeerError"
        assert "algorithm" in text
