"""Rows keep their scales however a tensor is sliced, so results do not depend on the number of ranks."""

import numpy as np
import torch

import codec
import codec.torch
from codec.tensors.segments import pack
from codec.torch.reduction import heads
from codec.torch.reduction.host import Reduction
from support.ddp_training import wrapped
from support.ranks import run_ranks

SPECS = (codec.Float8(), codec.Sign("two_mean", group_size="row"))


def _rows(rank, size):
    """Reduce a matrix with rows of different magnitudes as a tensor, in a view and in a hook; return all results."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=g) * 10.0 ** torch.linspace(-4, 4, 64)[:, None]
    bucket = torch.cat([x.flatten(), torch.ones(100), x[:20, :90].flatten()])
    found = []
    for spec in SPECS:
        options = codec.options(algorithm="two_shot")
        tensor, flat = x.clone(), bucket.clone()
        codec.torch.all_reduce(tensor, spec, op="mean", options=options)
        shapes = {"a": (64, 128), "b": (100,), "c": (20, 90)}
        codec.torch.all_reduce(codec.view(flat, segments=shapes), spec, op="mean", options=options)
        model = wrapped(torch.nn.Linear(128, 64, bias=False))
        hook = codec.torch.ddp_hook(spec, feedback=False, policy=lambda *_, spec=spec: spec, options=options)
        hook.register(model)
        (model(torch.eye(128)).T * x).sum().backward()
        found += [tensor, flat, model.module.weight.grad]
    errors = []
    for y in found[:1] + found[2:3]:
        errors.append(float(((y - x).norm(dim=1) / x.norm(dim=1)).max()))
    assert max(errors) < 0.04, errors
    return found


def test_rows_have_the_same_scales_on_any_number_of_ranks():
    one = run_ranks(1, _rows)[0]
    for size in (2, 4):
        for found in run_ranks(size, _rows):
            for y, expected in zip(found, one, strict=True):  # the mean of a sum is rounded once more than on one rank
                torch.testing.assert_close(y, expected, rtol=1e-5, atol=0)


def test_room_for_a_piece_is_the_size_of_its_frame():
    """Memory for a piece is the size of its frame, without records of parts that the piece cannot have."""
    x = np.random.default_rng(0).standard_normal(8192).astype(np.float32)
    segments = pack([(0, (20, 100)), (2000, (100,)), (2100, (30, 200))])
    for given_segments in (None, segments):
        for spec in (*SPECS, codec.Quantize(4)):
            r = Reduction(x, "float32", spec, "sum", 0, given_segments)
            for piece in [piece for pieces in r.slices(4) for piece in pieces]:
                out = np.empty(r.frame_bound(piece), np.uint8)
                assert r.encode(piece, out, 0) == out.size < r.bound(piece.n) - 1000


def test_slices_and_frames_of_more_than_2_31_values():
    """For more than 2^31 values, without allocating these, pieces cover all values, and frame sizes are announced."""
    n, rows = (1 << 34) + 5, 1 << 21
    x = np.broadcast_to(np.float32(0), (n,))  # a broadcast view that takes 4 bytes
    for segments in (None, pack([(0, (rows, (1 << 13) - 1)), (1 << 34, (5,))])):
        for spec in (codec.Lossless(), codec.Quantize(4)):
            r = Reduction(x, "float32", spec, "sum", 0, segments)
            for size in (2, 64):
                pieces = [piece for row in r.slices(size) for piece in row]
                assert [piece.begin for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
                assert pieces[-1].end == n
                bounds = [r.frame_bound(piece) for piece in pieces]
                assert sum(bounds) > n / 2 > 1 << 32
                row = [heads.Announced(bound, x[:0].view(np.uint8), complete=True) for bound in bounds]
                body = np.concatenate(heads.pack(max(bounds), row))
                largest, found = heads.unpack(body, len(row), rank=1)
                assert (largest, [each.nbytes for each in found]) == (max(bounds), bounds)
                assert len(body) <= heads.most_nbytes(bounds)
