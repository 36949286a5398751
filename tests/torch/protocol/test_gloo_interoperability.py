"""The C++ adapter for Gloo and codec.torch implement the same protocol and give bit-identical results."""

import os
import struct
import subprocess
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import codec
import codec.torch
from codec import optimizers
from codec._c.library import DTYPES, ffi
from codec._c.spec_structs import spec_struct
from codec._call import Call
from codec.optimizers.arguments import level_source, set_levels
from codec.tensors.segments import pack
from codec.torch.group import communicator
from codec.torch.reduction import arguments, execution
from support import flatcall
from support.ranks import run_ranks
from support.specs import LOSSY, TRUNCATES
from support.tiers import HANG_SECONDS, NIGHTLY, every

PEER = Path(os.environ.get("CODEC_GLOO_PEER", Path(__file__).parents[3] / "build/native/gloo_peer"))
KINDS = ["allreduce", "reduce_scatter", "allgather"]
OPS = ["mean", "sum", "max"]
ALGORITHMS = ["auto", "two_shot", "all_gather", "ring", "raw"]
DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STATE = ["theta", "v", "m"]
# Number of random values drawn per rank; longer tensors repeat them, at other offsets in blocks because it is prime
MANY = 999_983


class Job(NamedTuple):
    """Arguments of one collective, from which `values` generates the tensors of all ranks."""

    spec: Any
    kind: str = "allreduce"
    dtype: str = "float32"
    op: str = "mean"
    algorithm: str = "two_shot"
    n: int = 5000
    segments: Any = None
    stream: int = 0
    metric: Any = None
    state: tuple[tuple[str, str], ...] = ()  # (name, dtype) of each tensor of optimizer state
    feedback: bool = False
    values: str = "normal"

    def whole(self, size):
        """Return the number of values of the input tensor on each of `size` ranks."""
        return self.n * (size if self.kind == "reduce_scatter" else 1)


def values(job, rank, size):
    n = job.whole(size)
    g = torch.Generator().manual_seed(100 * job.n + rank)
    if job.values == "bits":  # random bit patterns: NaN, Inf, subnormals, zeros of both signs
        bits = torch.randint(-(1 << 31), 1 << 31, (n,), generator=g).int()
        bits[torch.randint(0, 4, (n,), generator=g) == 0] &= -(1 << 31)
        return (bits if job.dtype == "float32" else (bits >> 16).short()).view(DTYPE[job.dtype])
    x = torch.randn(min(n, MANY), generator=g) * torch.exp2(torch.randint(-9, 0, (min(n, MANY),), generator=g))
    return x.to(DTYPE[job.dtype]).repeat(-(-n // MANY))[:n]


def state_of(job, size):
    g = torch.Generator().manual_seed(5)
    found = {}
    for name, dtype in job.state:
        x = torch.randn(job.whole(size), generator=g) * (0.05 if name == "theta" else 1e-3)
        found[name] = (x * x if name == "v" else x).to(DTYPE[dtype])
    return found or None


def residual_of(job, size):
    g = torch.Generator().manual_seed(6)
    return (torch.randn(job.whole(size) if job.feedback else 0, generator=g) * 0.01).numpy()


def as_bytes(x):
    return x.contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""


def _python(rank, size, jobs):
    """Run the jobs on a Python rank; return the bytes of each job's result and residuals."""
    results = []
    for job in jobs:
        x = values(job, rank, size)
        if job.kind == "reduce_scatter":
            out = torch.empty(job.n, dtype=x.dtype)
            codec.torch.reduce_scatter(out, x, job.spec, op=job.op, stream=job.stream)
            results.append(as_bytes(out))
        elif job.kind == "allgather":
            out = torch.empty(job.n * size, dtype=x.dtype)
            codec.torch.all_gather(out, x, job.spec, stream=job.stream)
            results.append(as_bytes(out))
        elif job.feedback:
            results.append(_with_feedback(job, x, size))
        else:
            how = {"optimizer": job.metric, "state": state_of(job, size)} if job.metric is not None else {}
            segments = None if job.segments is None else list(job.segments)
            how |= {"op": job.op, "algorithm": job.algorithm, "segments": segments, "stream": job.stream}
            flatcall.all_reduce(x, job.spec, **how)
            results.append(as_bytes(x))
    return results


def _with_feedback(job, x, size):
    """All-reduce with residuals as a DDP hook passes them; the public all_reduce does not accept them as arrays."""
    residual, sums = residual_of(job, size), residual_of(job, size)

    async def reduced(collective):
        r = arguments.reduction_of(x, job.spec, job.op, job.stream, segments=pack(job.segments or ()))
        r.residual, r.sum_residual = residual, lambda begin, end: sums[begin:end]
        planned = r, execution.choose(job.algorithm, r, line.channel)
        [result] = await execution.run_several(collective, job.algorithm, [planned])
        await collective.agree()
        return result.tobytes()  # copies: the result is in memory of the collective

    line = communicator.communicator_of(None)
    return line.run(reduced) + residual.tobytes() + sums.tobytes()


def packed_metrics(job, size):
    """Return the metrics of all parameter groups, packed for peer.cc, and the number of groups."""
    if job.metric is None:
        return b"", 0
    call = Call()
    bound = codec.Truncate().bind(job.metric, **state_of(job, size))
    set_levels(call, level_source(bound, job.whole(size)))
    m, found = call.context.metric, []
    while m:
        terms = m.theta_term, m.theta_v_term, m.v_term, m.eps, m.m_term
        has = [int(getattr(m, name) != ffi.NULL) for name in STATE]
        found.append(struct.pack("I5f4IQ", m.theta_dtype, *terms, *has, 0, m.until))
        m = m.next
    return b"".join(found), len(found)


def packed(job, size):
    """Yield the bytes of a job and of its tensors on all ranks, in the layout that peer.cc reads."""
    state = state_of(job, size) or {}
    terms, nmetrics = packed_metrics(job, size)
    dtypes = [DTYPES[dict(job.state)[name]] if name in state else 0 for name in STATE]
    head = struct.pack(
        "8I4Q",
        *(KINDS.index(job.kind), DTYPES[job.dtype], OPS.index(job.op), ALGORITHMS.index(job.algorithm)),
        *(*dtypes, job.feedback, job.n, job.stream, len(job.segments or ()), nmetrics),
    )
    head += ffi.buffer(spec_struct(job.spec))[:]
    head += bytes(-len(head) % 8)
    yield head + (pack(job.segments) if job.segments else b"") + terms
    yield from (as_bytes(state[name]) for name in STATE if name in state)
    yield residual_of(job, size).tobytes()
    yield from (as_bytes(values(job, rank, size)) for rank in range(size))


def in_cpp(size, jobs, folder):
    """Run the jobs in C++ (peer.cc); return the concatenated results of all jobs for each rank."""
    if not PEER.exists():
        pytest.fail(f"{PEER} is missing: make gloo builds it")
    with (folder / "jobs").open("wb") as file:
        file.write(struct.pack("Q", size))
        for job in jobs:
            file.writelines(packed(job, size))
    subprocess.run([PEER, folder / "jobs", folder / "results"], check=True, timeout=HANG_SECONDS)
    return [(folder / f"results.{rank}").read_bytes() for rank in range(size)]


def compare(size, jobs, folder, like=lambda job, got: got):
    """Check that C++ and Python ranks return equal bytes, apart from bits that `like` replaces."""
    found = in_cpp(size, jobs, folder)
    for rank, (want, got) in enumerate(zip(run_ranks(size, _python, jobs), found, strict=True)):
        at = 0
        for job, part in zip(jobs, want, strict=True):
            assert like(job, got[at : at + len(part)]) == like(job, part), (size, rank, job)
            at += len(part)
        assert at == len(got)


SHAPES = [(64, 30), (0, 7), (5, 3, 3, 3), (), (1,), (2, 700), (300, 1)]
SEGMENTS = [*codec.segments(SHAPES), (sum(map(prod, SHAPES)) + 50, (3, 5))]
WITHIN = SEGMENTS[-1][0] + 40
FIXED = {"lossless": codec.Lossless(), "lossless_flat": codec.Lossless(5, "flat"), "truncate": codec.Truncate(1)}


def every_codec(size):
    """Return a job per codec and algorithm, with varying dtypes and operations."""
    jobs = []
    for i, spec in enumerate((FIXED | LOSSY).values()):
        for a, algorithm in enumerate(ALGORITHMS):
            dtype, op = list(DTYPE)[(i + a + size) % 3], OPS[(i + 2 * a + size // 2) % 3]
            how = {"n": WITHIN, "segments": SEGMENTS} if (i + a) % 2 else {"n": 3000 + 17 * i}
            jobs.append(Job(spec, "allreduce", dtype, op, algorithm, stream=1000 * i + a, **how))
        jobs += [Job(spec, kind, list(DTYPE)[(i + size) % 3], "sum", n=1000 + i) for kind in KINDS[1:]]
    return jobs


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_codec_gives_the_same_bits(size, tmp_path):
    """Python and C++ agree for every codec and algorithm, with and without segments."""
    compare(size, every_codec(size), tmp_path)


def test_every_size_gives_the_same_bits(tmp_path):
    """Python and C++ agree for slices of several chunks, and for sizes around block and slice boundaries."""
    sizes = [0, 1, 2, 1023, 1024, 1025, 3071, 3073, 65537]
    specs = [codec.Lossless(), codec.Quantize(4), codec.Float8(group_size=100)]
    small = [
        Job(specs[(i + a) % 3], algorithm=algorithm, n=n)
        for i, n in enumerate(sizes)
        for a, algorithm in enumerate(ALGORITHMS)
    ]
    n = 3 << 20 if NIGHTLY else 900_000  # slices of 4 MiB in up to 4 chunks, or of 1.1 MiB in 2 chunks
    rows, row = n // 66, n // 11  # rows may be split if they have more than 65,536 values
    long = [(0, (rows, 33)), (rows * 33, (3, row)), (rows * 33 + 3 * row, (n // 7,))]
    large = [
        Job(codec.Quantize(4), n=n, segments=long, stream=7),
        Job(codec.Float8(group_size=128), algorithm="ring", n=n, segments=long),
        Job(codec.Sign("l2", "row"), algorithm="all_gather", n=n, segments=long),
        Job(codec.Float8(), algorithm="raw", n=n),
        Job(codec.Ternary("base3"), "reduce_scatter", n=n // 3 + 1000),
    ]
    compare(3, every(2, small) + every(2, large), tmp_path)


def optimizer_jobs():
    adamw = optimizers.AdamW(1e-3, step=99)
    groups = [(0, adamw), (1500, optimizers.SGD(0.1)), (1503, optimizers.SGD(0.05, momentum=0.9)), (4990, adamw)]
    wide = tuple((name, "float32") for name in STATE)
    mixed = (("theta", "float16"), ("v", "float32"), ("m", "float16"))
    for spec in TRUNCATES.values():
        if spec.fixed_level is not None:
            continue
        for algorithm in ("two_shot", "all_gather", "ring", "raw"):
            yield Job(spec, algorithm=algorithm, metric=adamw, state=wide)
            yield Job(spec, dtype="bfloat16", op="sum", algorithm=algorithm, metric=groups, state=mixed)
        yield Job(spec, dtype="float16", metric=optimizers.SGD(0.1), state=(("theta", "float16"),))


@pytest.mark.parametrize("size", [2, 3])
def test_truncate_by_optimizer_state_gives_the_same_bits(size, tmp_path):
    """Python and C++ agree for Truncate with parameter groups, whether levels are sent or shared by the ranks."""
    compare(size, list(optimizer_jobs()), tmp_path)


def test_error_feedback_gives_the_same_residuals(tmp_path):
    """Python and C++ agree in results, in residuals of inputs, and in residuals of the sums that a rank owns."""
    specs = [codec.Quantize(2), codec.Sign(group_size=1024), codec.Float8("e5m2"), codec.Truncate(2)]
    ways = [(dtype, algorithm) for dtype in DTYPE for algorithm in ("two_shot", "all_gather", "raw")]
    jobs = [Job(spec, dtype=d, algorithm=a, n=20_000, feedback=True) for spec in specs for d, a in ways]
    compare(3, jobs, tmp_path)


def any_nan(job, got):
    """Replace every NaN by the same NaN: the protocol leaves their bits open if arithmetic produced them.

    For ring and raw with op "max", also replace -0 by 0. C++ and codec.reduce return the first operand of max(-0, 0).
    In numpy's and torch's raw and ring reductions the result may be the other zero, on all ranks alike.
    """
    x = torch.frombuffer(bytearray(got), dtype=DTYPE[job.dtype])
    if job.algorithm in ("ring", "raw") and job.op == "max":
        x = x + 0
    return as_bytes(torch.where(x.isnan(), torch.tensor(float("nan"), dtype=x.dtype), x))


def test_special_values_give_the_same_bits(tmp_path):
    """Python and C++ agree for random bit patterns sent lossless; only payloads of NaN may differ."""
    jobs = [
        Job(codec.Lossless(), dtype=dtype, op=op, algorithm=algorithm, n=20_000, values="bits")
        for dtype in DTYPE
        for op in OPS
        for algorithm in ALGORITHMS
    ]
    compare(3, jobs, tmp_path, any_nan)
