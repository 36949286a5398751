"""FP8 all-reduce with row scales: torchft's test configurations and error bound, and its algorithm step by step."""

import itertools
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import codec
import codec.torch
from support.ranks import run_ranks
from support.tiers import HANG_SECONDS, NIGHTLY, every

SCRIPT = Path(__file__).parents[3] / "examples/fp8_all_reduce.py"

# As in torchft's test_all_reduce_collective: two tensors per rank, of uniform random numbers times a factor.
N_VALUES = (256, 1024, 2048)
FACTORS = (1.0, 100.0, 1000.0)
OPS = ("mean", "sum")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CONFIGURATIONS = list(itertools.product(N_VALUES, FACTORS, OPS, DTYPES))
LARGEST_ERROR = 0.04  # limit of the mean of abs(error / value)
TWO_SHOT = codec.options(algorithm="two_shot")


def shapes_of(n):
    """Return all matrix shapes with n values in torchft's tests: every divisor of n except n as the number of rows."""
    return [(rows, n // rows) for rows in range(1, n) if n % rows == 0]


def values_of(rank, n, factor, dtype):
    """Return a rank's random values for a configuration."""
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(n, generator=generator, dtype=torch.float64).to(dtype) * factor


def exact_result(size, n, factor, op, dtype):
    """Return the exact result of a configuration, computed in float64."""
    total = sum(values_of(rank, n, factor, dtype).double() for rank in range(size))
    return total / size if op == "mean" else total


def mean_relative_error(result, exact):
    """Return the mean of abs(error / value), as torchft's tests compute it."""
    return float(((exact - result.double().flatten()) / (exact + 1e-7)).abs().mean())


def _matrices(rank, size):
    """Return each configuration's largest error over all shapes, and True if results equal torchft's steps."""
    in_steps = runpy.run_path(str(SCRIPT))["all_reduce_in_steps"]
    found = []
    for n, factor, op, dtype in CONFIGURATIONS:
        exact, mine = exact_result(size, n, factor, op, dtype), values_of(rank, n, factor, dtype)
        shapes, errors, equal = shapes_of(n), [], []
        for shape in shapes:
            spec, matrix = codec.Float8(group_size=shape[1]), mine.clone().view(shape)
            codec.torch.all_reduce(matrix, spec, op=op, options=TWO_SHOT)
            errors.append(mean_relative_error(matrix, exact))
            if shape in every(3, shapes):
                in_steps(other := mine.clone().view(shape), spec, op)
                equal.append(torch.equal(matrix, other))
        found.append((max(errors), all(equal)))
    return found


@pytest.mark.parametrize("size", [2, 4] if NIGHTLY else [2])
def test_all_configurations_of_torchft_are_within_its_bound_and_equal_its_steps(size):
    """Each matrix row has its own scale. With two ranks, as in torchft's tests, all errors stay below its bound."""
    assert len(CONFIGURATIONS) == 54
    results = run_ranks(size, _matrices)
    assert all(found == results[0] for found in results)
    for configuration, (error, equal) in zip(CONFIGURATIONS, results[0], strict=True):
        assert 0 < error <= LARGEST_ERROR, configuration
        assert equal, configuration


def _buckets(rank, size):
    """Return each configuration's largest error if both tensors are reduced in one flat bucket with default rows."""
    found = []
    for n, factor, op, dtype in CONFIGURATIONS:
        exact, mine = exact_result(size, 2 * n, factor, op, dtype), values_of(rank, 2 * n, factor, dtype)
        shapes = shapes_of(n)
        pairs = itertools.product(shapes, shapes) if NIGHTLY else zip(shapes, reversed(shapes), strict=True)
        errors = []
        for pair in pairs:
            bucket = mine.clone()
            view = codec.view(bucket, segments=codec.segments(list(pair)))
            codec.torch.all_reduce(view, codec.Float8(), op=op, options=TWO_SHOT)
            errors.append(mean_relative_error(bucket, exact))
        found.append(max(errors))
    return found


def test_buckets_of_two_tensors_are_within_the_bound_of_torchft():
    results = run_ranks(2, _buckets)
    assert results[0] == results[1]
    for configuration, error in zip(CONFIGURATIONS, results[0], strict=True):
        assert 0 < error <= LARGEST_ERROR, configuration


def _reduce_scattered(rank, size):
    """Return each configuration's error in a reduce-scatter, which quantizes once."""
    found = []
    for n, factor, op, dtype in CONFIGURATIONS:
        exact = exact_result(size, n, factor, op, dtype).view(size, -1)[rank]
        part = torch.empty(n // size, dtype=dtype)
        codec.torch.reduce_scatter(part, values_of(rank, n, factor, dtype), codec.Float8(group_size=128), op=op)
        found.append(mean_relative_error(part, exact))
    return found


def test_reduce_scatter_quantizes_once_and_has_a_smaller_error():
    """Reduce-scatter quantizes once, with a smaller error than torchft, which quantizes the sum and allows 0.05."""
    for found in run_ranks(2, _reduce_scattered):
        for configuration, error in zip(CONFIGURATIONS, found, strict=True):
            assert 0 < error <= 0.025, configuration


def _sparse_rows(rank, size):
    """Reduce rows that are zero, tiny, or have one nonzero value; return the results."""
    matrix = torch.zeros(8, 640)
    matrix[1, 5] = 3.0 * (rank + 1)
    matrix[2] = 1e-42  # 448 / 1e-42 overflows, so the scale is 1
    matrix[3, :320], matrix[3, 320:] = 1e30, -1e30
    matrix[4] = 7.0 if rank == 0 else -7.0
    codec.torch.all_reduce(matrix, codec.Float8(group_size=640), options=TWO_SHOT)
    return matrix


def test_rows_of_zeros_and_extreme_rows():
    for result in run_ranks(2, _sparse_rows):
        expected = torch.zeros(8, 640)
        expected[1, 5] = 9.0
        expected[3, :320], expected[3, 320:] = 2e30, -2e30
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)


def _one_bad_rank(rank, size):
    """Return the error that a NaN on rank 1 raises, and True if the tensor is unchanged."""
    matrix = torch.rand(64, 128, generator=torch.Generator().manual_seed(rank))
    if rank == 1:
        matrix[63, 127] = torch.nan
    before = matrix.clone()
    with pytest.raises(codec.CodecError) as caught:
        codec.torch.all_reduce(matrix, codec.Float8(group_size=128), options=TWO_SHOT)
    return type(caught.value).__name__, torch.equal(matrix.nan_to_num(9), before.nan_to_num(9))


def test_nan_on_one_rank_is_refused_on_all():
    assert run_ranks(2, _one_bad_rank) == [("PeerError", True), ("ArgumentError", True)]


def _row_bytes(rank, size):
    """Return the number of bytes sent per value, for a 1-D tensor and for a matrix."""
    found = []
    for shape in ((1 << 18,), (1 << 8, 1 << 10)):
        before = codec.torch.group_stats().sent_nbytes
        codec.torch.all_reduce(torch.rand(shape), codec.Float8(), options=TWO_SHOT)
        found.append((codec.torch.group_stats().sent_nbytes - before) / (1 << 18))
    return found


def test_tensors_of_rank_one_are_sent_in_rows_of_1024():
    """1-D tensors are sent in rows of 1,024: in each phase 1 byte per value of a slice, and 4 bytes per row."""
    for found in run_ranks(2, _row_bytes):
        assert all(1.0 < nbytes < 1.01 for nbytes in found)
    frame = codec.encode(torch.rand(5000), codec.Float8())
    assert codec.inspect(frame).spec.group_size == 1024


def _example(rank, size):
    compare = runpy.run_path(str(SCRIPT))["compare"]
    return [compare(rows, 768, dtype, op) for rows in (3, 300) for dtype in DTYPES for op in OPS]


def test_example_gives_equal_bits_in_steps_and_in_one_call():
    """The example gives equal bits in steps and in one call, on three ranks, for rows that divide evenly and not."""
    results = run_ranks(3, _example)
    for equal, error, ratio in itertools.chain.from_iterable(results):
        assert equal
        assert 0 < error <= LARGEST_ERROR
        assert 0.25 < ratio < 0.7


@pytest.mark.nightly
def test_example_runs_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, "--rows", "300"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True, env=environment)
    assert "five steps and one call: the same bits on all ranks" in done.stdout
    assert 0 < float(re.search(r"mean relative error: ([\d.]+) ", done.stdout)[1]) <= LARGEST_ERROR
    assert 25 < float(re.search(r"sends: ([\d.]+)%", done.stdout)[1]) < 26
