"""Windows of the ranks of a machine: rows are never cut, so that they keep their scales."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import codec
import codec.torch
from codec.tensors.segments import pack, segments, unpack
from codec.torch.reduction.partition import windows
from support.ranks import run_ranks

size = st.integers(1, 300)
shapes = st.lists(st.one_of(st.tuples(size, size), st.tuples(size)), min_size=1, max_size=9)


@given(shapes, st.integers(1, 9))
@example([(21, 49), (129,)], 9)  # the multiple of 1,024 before a cut point in the bias lies in the weight
def test_windows_cover_the_tensor_and_never_cut_a_row(shapes, ranks):
    records = pack(segments(shapes))
    n = sum(int(np.prod(shape)) for shape in shapes)
    found = windows(n, ranks, 4, records)
    assert len(found) == ranks
    assert [w.begin for w in found[1:]] == [w.end for w in found[:-1]]
    assert (found[0].begin, found[-1].end) == (0, n)
    for w in found:
        for offset, shape in unpack(records):
            if len(shape) > 1 and offset < w.begin < offset + shape[0] * shape[1]:
                assert (w.begin - offset) % shape[1] == 0
        inside = sum(int(np.prod(shape)) for _, shape in unpack(w.segments)) if w.segments else 0
        assert inside <= w.n


def _rows(rank, size):
    """Rows of very different magnitudes keep their own scales, with and without an odd number of rows."""
    mesh = init_device_mesh("cpu", (2, size // 2))
    for rows in (1, 2, 37, 128):
        scales = 2.0 ** torch.linspace(-60, 60, rows).round()
        x = torch.rand(rows, 96, generator=torch.Generator().manual_seed(rank)) + 1
        exact = x.clone()
        codec.torch.all_reduce(exact, op="mean")
        for spec in (codec.Quantize(8, 32), codec.Float8(group_size=32)):
            for algorithm in ("two_shot", "all_gather"):
                y = (x * scales[:, None]).clone()
                codec.torch.all_reduce(
                    y, spec, op="mean", group=mesh, feedback=False, options=codec.options(algorithm=algorithm)
                )
                error = (y / scales[:, None] - exact).norm(dim=1) / exact.norm(dim=1)
                assert error.max() < 0.05, (rows, spec, algorithm)
    return y.numpy().tobytes()


@pytest.mark.parametrize("size", [4, 6])
def test_rows_keep_their_scales_over_two_levels(size):
    assert len(set(run_ranks(size, _rows))) == 1
