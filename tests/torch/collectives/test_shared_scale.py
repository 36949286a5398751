"""Ternary all-reduces with scales shared by all ranks: exact sums of codes, identical bits, failures without effect."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

import codec
import codec.torch
from codec.torch.collectives import lists
from codec.torch.reduction import shared_scale
from codec.torch.reduction.host import Reduction
from codec.torch.reduction.partition import Piece
from support import flatcall
from support.ddp_training import ENCODE_ALL, check_failed_step, parameter_bytes, train, wrapped
from support.faults import damaged_frames
from support.ranks import run_ranks
from support.tiers import every

SHAPES = [(40, 100), (), (3, 5, 7), (0, 4), (6000,), (300, 500)]
LEFT_OUT = 777  # number of values after the last parameter
LARGEST = float(np.finfo(np.float32).max)


def bits(t):
    return t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def bounds():
    """Return (begin, end) of each parameter in the flat bucket, and of the LEFT_OUT values after the last parameter."""
    edges = np.cumsum([0, *[int(np.prod(s)) for s in SHAPES], LEFT_OUT]).tolist()
    return list(itertools.pairwise(edges))


def values(rank, factors, dtype=torch.float32):
    """Return parameters of very different magnitudes. Each parameter's largest value may be on another rank."""
    g = torch.Generator().manual_seed(5 + rank)
    parts = []
    for i, (begin, end) in enumerate(bounds()):
        x = torch.randn(end - begin, generator=g).clamp(-3, 3) / 3
        parts.append(x.double() * factors[i % len(factors)] * (1 + (rank + i) % 3) / 3)
    return torch.cat(parts).to(dtype)


def sum_range(terms, scale):
    """Return the smallest and the largest possible sum of ternary terms, with each x / scale rounded down or up."""
    least = sum(torch.where(x.abs() >= scale, x.sign(), x.sign().clamp(max=0)) for x in terms)
    most = sum(torch.where(x.abs() >= scale, x.sign(), x.sign().clamp(min=0)) for x in terms)
    return least, most


CASES = [
    (codec.Ternary("base3"), "mean", torch.float32, (1e-3, 5.0, 0.0, 2e4)),
    (codec.Ternary("entropy", seed=9), "sum", torch.float32, (1.0, 1e-44, 1e-30, 3e-39)),
    (codec.Ternary(), "mean", torch.float32, (LARGEST,)),
    (codec.Ternary(clip=2.5), "mean", torch.float32, (1e-3, 5.0, 0.0, 1e-44, 2e4)),
    (codec.Ternary("base3", clip=1.0), "sum", torch.bfloat16, (1e-3, 7.0)),
    (codec.Ternary(), "mean", torch.float16, (1e-6, 7.0, 0.0)),
]


def _exact(rank, size):
    """Each result is a multiple of its parameter's scale, and within the range that rounding down or up allows."""
    found = []
    for spec, op, dtype, factors in CASES:
        divide = size if op == "mean" else 1
        every = [values(r, factors, dtype).float() for r in range(size)]
        out = values(rank, factors, dtype)
        codec.torch.all_reduce(
            codec.view(out, segments=codec.segments(SHAPES)),
            spec,
            op=op,
            options=codec.options(algorithm="shared_scale"),
        )
        found.append(bits(out))
        for begin, end in bounds():
            if begin == end:
                continue
            mine = [x[begin:end].double() for x in every]
            scales = [x.abs().max().item() for x in mine]
            if spec.clip:
                scales = [
                    min(s, spec.clip * x.std(correction=0).item() or s) for s, x in zip(scales, mine, strict=True)
                ]
            scale = max(scales)
            sent = out[begin:end].double() * divide
            whole = sent / scale if scale else sent
            exact = {torch.float32: 3e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
            room = size * (scale * exact + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
            apart = room / scale + 1e-6 if scale else 0
            assert (whole - whole.round()).abs().max() <= apart, (spec, begin)
            least, most = sum_range(mine, scale)
            assert (whole >= least - apart).all(), (spec, begin)
            assert (whole <= most + apart).all(), (spec, begin)
    t, apart = values(rank, (1e-3, 7.0)), torch.empty(sum(end - begin for begin, end in bounds()))
    codec.torch.all_reduce(t, codec.Ternary(), out=apart, op="mean", options=codec.options(algorithm="shared_scale"))
    assert torch.equal(t, values(rank, (1e-3, 7.0)))
    codec.torch.all_reduce(t, codec.Ternary(), op="mean", options=codec.options(algorithm="shared_scale"))
    assert torch.equal(t, apart)
    empty = torch.zeros(0)
    codec.torch.all_reduce(empty, codec.Ternary(), op="mean", options=codec.options(algorithm="shared_scale"))
    zeros = -torch.zeros(500)
    codec.torch.all_reduce(zeros, codec.Ternary(clip=2.5), op="mean", options=codec.options(algorithm="shared_scale"))
    assert bits(zeros) == bytes(2000)
    ones = torch.full((3, 4), -1.0)  # values of equal magnitude are sent exactly
    codec.torch.all_reduce(ones, codec.Ternary(clip=2.5), op="mean", options=codec.options(algorithm="shared_scale"))
    assert (ones == -1).all()
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_are_possible_sums_of_ternary_values(size):
    results = run_ranks(size, _exact)
    assert all(r == results[0] for r in results)


def _unbiased(rank, size):
    n = 200_000
    x = torch.full((n,), 0.3)
    x[7] = 1
    codec.torch.all_reduce(x, codec.Ternary("base3"), op="mean", options=codec.options(algorithm="shared_scale"))
    assert x[7] == 1
    variance = 0.3 * 0.7 / size  # if ranks used equal random bits, the variance would be `size` times larger
    assert abs(x.mean() - 0.3) < 5 * (variance / n) ** 0.5
    assert abs(x.var() / variance - 1) < 0.05
    every = [values(r, (1e-3, 5.0, 1e2)) for r in range(size)]
    want = sum(every) / size
    errors = {}
    for algorithm in ("shared_scale", "two_shot"):
        t = every[rank].clone()
        codec.torch.all_reduce(
            codec.view(t, segments=codec.segments(SHAPES)),
            codec.Ternary(),
            op="mean",
            options=codec.options(algorithm=algorithm),
        )
        errors[algorithm] = float((t - want).norm() / want.norm())
    assert errors["shared_scale"] < 0.75 * errors["two_shot"]  # two_shot also rounds the sums to ternary values


def test_results_are_unbiased_and_ranks_use_independent_streams():
    run_ranks(4, _unbiased)


def _refused(rank, size):
    """An error on one rank raises on all ranks and leaves tensors unchanged; the next collective works."""
    raised = []
    for case in range(8):
        x = torch.linspace(-1, 2, 50_000) * (1 + rank)
        spec, kwargs = codec.Ternary("base3", clip=2.5), {}
        wrong = rank == 1
        if case == 0 and wrong:
            x[49_999] = float("nan")
        elif case == 1 and wrong:
            x[0] = float("-inf")
        elif case == 2 and wrong:
            spec = codec.Ternary()
        elif case == 3 and wrong:
            kwargs = {"segments": [(0, (100, 10))]}
        elif case == 4 and wrong:
            kwargs = {"op": "max"}
        elif case == 5:
            spec = codec.Sign() if wrong else codec.Lossless()
        elif case == 6:
            spec = codec.Ternary(scale=6.0)
        elif case == 7:
            kwargs = {"op": "max"}
        before = bits(x)
        with pytest.raises(codec.CodecError) as e:
            flatcall.all_reduce(x, spec, **({"algorithm": "shared_scale", "op": "mean"} | kwargs))
        assert bits(x) == before
        raised.append((type(e.value).__name__, getattr(e.value, "code", None) == codec.Status.NONFINITE))
        y = torch.ones(30)
        codec.torch.all_reduce(y, codec.Ternary(), op="mean", options=codec.options(algorithm="shared_scale"))
        assert (y == 1).all()
    return raised


def test_error_on_one_rank_raises_on_all():
    results = run_ranks(3, _refused)
    spec, op, peer = ("SpecError", False), ("ArgumentError", False), ("PeerError", False)
    first = [("PeerError", True)] * 2 + [peer] * 3
    mine = [("ArgumentError", True)] * 2 + [peer, peer, op]
    every = [spec, spec, op]
    assert results == [first + every, mine + every, first + every]


def _damaged(rank, size):
    """Damage each of a rank's messages in the three phases; every time all ranks raise and tensors are unchanged."""
    x = torch.linspace(-1, 2, 40_000) * (1 + rank)
    raised = []
    for which in range(3 * (size - 1)):
        before, count = bits(x), [0]

        def damage(frame, to, which=which, count=count):
            if rank == 2 and count[0] == which:
                frame = frame.copy()
                frame[frame.nbytes // 2] ^= 4
            count[0] += 1
            return frame

        with damaged_frames(damage), pytest.raises((codec.FrameError, codec.PeerError)) as e:
            codec.torch.all_reduce(x, codec.Ternary(), op="mean", options=codec.options(algorithm="shared_scale"))
        assert which < count[0] or rank != 2
        assert bits(x) == before
        raised.append(type(e.value).__name__)
        codec.torch.all_reduce(x.clone(), codec.Ternary(), op="mean", options=codec.options(algorithm="shared_scale"))
    return raised


def test_damaged_frame_raises_on_all():
    results = run_ranks(3, _damaged)
    assert all("ChecksumError" in {r[i] for r in results} for i in range(6))


def _lied(rank, size):
    """If a rank sends valid frames with impossible contents, all ranks raise."""
    x = torch.linspace(-1, 2, 40_000) * (1 + rank)
    shared, signs = shared_scale._Shared, shared_scale._Shared.encode
    sums, magnitude = shared.encode_sum, shared_scale.magnitude

    def encoded(spec, values):
        return lambda self, piece, out, number: len(codec.encode(values(piece.n), spec, out=out))

    def of_sums(value, dtype="uint8", more=0):
        return lambda self, total, piece, out, number: len(
            codec.encode(np.full(self._packed(piece.n)[0] + more, value, dtype), out=out)
        )

    lies = [
        ("encode", encoded(codec.Ternary(scale=3.0), lambda n: np.full(n, 3, np.float32))),
        ("encode", encoded(codec.Ternary(scale=0.5), lambda n: np.full(n, 0.5, np.float32))),
        ("encode", encoded(codec.Ternary(), lambda n: np.full(n - 1, 1, np.float32))),
        ("encode", encoded(codec.Ternary(), lambda n: np.full(n, 1, np.float16))),
        ("encode_sum", of_sums(255)),
        ("encode_sum", of_sums(0, more=-1)),
        ("encode_sum", of_sums(0, "int8")),
        ("magnitude", lambda x, spec: float("inf")),
    ]
    raised = []
    for name, lie in lies:
        before = bits(x)
        if rank == 1:
            if name == "magnitude":
                shared_scale.magnitude = lie
            else:
                setattr(shared, name, lie)
        with pytest.raises((codec.FrameError, codec.PeerError)) as e:
            codec.torch.all_reduce(x, codec.Ternary(), op="mean", options=codec.options(algorithm="shared_scale"))
        shared.encode, shared.encode_sum, shared_scale.magnitude = signs, sums, magnitude
        assert bits(x) == before
        raised.append(type(e.value).__name__)
    codec.torch.all_reduce(x, codec.Ternary(), op="mean", options=codec.options(algorithm="shared_scale"))
    return raised, bits(x)


def test_valid_frames_with_impossible_contents_raise_on_all():
    results = run_ranks(3, _lied)
    assert len({b for _, b in results}) == 1
    assert all("FrameError" in {r[i] for r, _ in results} for i in range(8))


@given(
    st.sampled_from([1, 2, 3, 4, 7, 8, 127, 128, 32767]),
    st.integers(0, 3000),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from([None, np.nan, 0.5, -1e30, "more", "less"]),
)
@example(7, 1, 72, "mean", None)  # a case whose sum rounds to -0
def test_sums_of_codes_are_exact(size, n, seed, op, wrong):
    """For any ranks and segments, the result is scale * sum of codes, divided by N for a mean, and rounded once."""
    rng = np.random.default_rng(seed)
    edges = [0, *sorted(rng.integers(0, n + 1, 3).tolist()), n]
    parts = [(a, b, i) for i, (a, b) in enumerate(itertools.pairwise(edges)) if a < b]
    scales = (2.0 ** rng.integers(-149, 127, 4) * 1.37).astype(np.float32)
    x = np.zeros(n, np.float32)
    shared = shared_scale._Shared(Reduction(x, "float32", codec.Ternary(), op, 0), x, parts, scales, size)
    begin = int(rng.integers(0, n + 1))
    piece = Piece(begin, n, None)
    total = rng.integers(-size, size + 1, piece.n).astype(np.float32)
    out = np.empty(shared.bound(piece.n), np.uint8)
    if wrong is not None and piece.n:
        total[rng.integers(piece.n)] = {"more": size + 1, "less": -size - 1}.get(wrong, wrong)
        with pytest.raises(codec.FrameError):
            shared.encode_sum(total, piece, out, 0)
        return
    frame = out[: shared.encode_sum(total, piece, out, 0)]
    into = np.full(n, 7, np.float32)
    shared.decode(frame, piece, into)
    s = np.concatenate([np.zeros(0), *(np.full(b - a, scales[i], np.float64) for a, b, i in parts)])
    with np.errstate(over="ignore"):
        want = (s[begin:] / (size if op == "mean" else 1) * total).astype(np.float32)
    assert (into[:begin] == 7).all()
    assert into[begin:].tobytes() == want.tobytes()


def quantize_third(name, parameter):
    return codec.Quantize(4) if "3" in name else None


HOW = [
    (codec.Ternary("base3"), {}),
    (codec.Ternary("base3", clip=2.5), {}),
    (codec.Ternary(), {"policy": ENCODE_ALL}),
    (
        codec.Ternary(),
        {"policy": replace(ENCODE_ALL, choose=quantize_third)},
    ),
]


def _trained(rank, size):
    found = {}
    for i, (spec, how) in enumerate(every(2, HOW)):
        model = wrapped()
        hook = codec.torch.ddp_hook(spec, options=codec.options(algorithm="shared_scale"), **how).register(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        losses = train(model, optimizer, rank, 4)
        check_failed_step(model, hook, optimizer, rank, 4)
        losses += train(model, optimizer, rank, 4, 5)
        assert not {"worker", "server"} & hook.state_dict().keys()
        found[i] = parameter_bytes(model), losses
    return found


def test_ddp_with_shared_scales():
    """DDP replicas with shared scales stay identical, for mixed buckets and without feedback; NaN changes nothing."""
    results = run_ranks(3, _trained)
    for i, (mine, losses) in results[0].items():
        assert all(r[i][0] == mine for r in results), i
        assert sum(losses[-3:]) < sum(losses[:3]) + 0.3, i


def test_wrong_arguments_are_rejected():
    for spec in (codec.Sign(), codec.Lossless()):
        with pytest.raises(codec.SpecError, match="spec must be Ternary"):
            codec.torch.ddp_hook(spec, options=codec.options(algorithm="shared_scale"))
    with pytest.raises(codec.SpecError, match="leave out scale="):
        codec.torch.ddp_hook(codec.Ternary(scale=1.0), options=codec.options(algorithm="shared_scale"))
    with pytest.raises(codec.SpecError, match="not a contraction"):
        codec.torch.ddp_hook(codec.Ternary(clip=2.5), feedback=True, options=codec.options(algorithm="shared_scale"))


def _backend(rank, size):
    """In the backend, sums use shared scales, and maxima are exact."""
    options = codec.torch.BackendOptions(codec.Ternary(), algorithm="shared_scale")
    group = dist.new_group(backend="codec", pg_options=options)
    x = torch.full((10_000,), 2.0)
    dist.all_reduce(x, group=group)
    assert (x == 2 * size).all()
    x = torch.full((10_000,), rank / 3)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    assert (x == torch.tensor((size - 1) / 3)).all()
    several = [torch.full((10_000,), 2.0), torch.full((5, 100), 2.0)]
    how = {"op": "sum", "stream": 0, "group": group, "options": codec.options(algorithm="shared_scale")}
    with pytest.raises(codec.SpecError, match="spec must be Ternary"):
        lists.all_reduce(several, codec.Float8(), **how).wait()
    assert all((x == 2).all() for x in several)
    lists.all_reduce(several, codec.Ternary(), **how).wait()
    assert all((x == 2 * size).all() for x in several)


@pytest.mark.parametrize("size", [2, 4])
def test_backend_with_shared_scales(size):
    """The backend reduces a list of tensors by shared scales as it does a single tensor."""
    run_ranks(size, _backend)
