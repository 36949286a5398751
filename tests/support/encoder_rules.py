"""Compare the library's frames with those of the reference encoder, and make tensors for such comparisons."""

from dataclasses import replace
from typing import get_args

import numpy as np

import codec
from codec import specs
from codec._c.library import isas, use_isa
from reference import encoder
from reference.decoder import DTYPES as NUMBERED
from reference.encoder import Ask
from support import flatcall
from support.tensors import random_bits

F32 = np.float32
NUMBER = {name: number for number, (name, *_) in NUMBERED.items()}
FLOATS = ("float32", "bfloat16", "float16")
LOSSLESS = codec.Lossless()
PATTERNS = (*FLOATS, "float64")


def ask_of(spec):
    """Return a spec as arguments of the reference encoder: the numbers of the format's parameters."""
    index = lambda choices, value: get_args(choices).index(value)
    stochastic = getattr(spec, "rounding", None) == "stochastic"
    match spec:
        case codec.Delta():
            return Ask(8, block_log2=(spec.block_size or 1 << 16).bit_length() - 1)
        case codec.TopK():
            log2 = spec.chunk.bit_length() - 1
            return Ask(9, 0, int(stochastic), spec.bits, seed=spec.seed, chunk_log2=log2, kept=spec.kept)
        case codec.Lossless():
            return Ask(1, index(specs.Model, spec.model), max_code_length=spec.max_code_length)
        case codec.Sign():
            row = encoder.BY_SHAPE if spec.group_size == "row" else spec.group_size or 0
            return Ask(2, index(specs.SignScale, spec.scale), row=row)
        case codec.Ternary():
            packing = index(specs.Packing, spec.packing)
            return Ask(3, packing, scale=spec.scale, clip=spec.clip, seed=spec.seed)
        case codec.Float8():
            options = stochastic | 2 * (spec.nonfinite == "propagate") | 4 * spec.entropy
            variant = index(specs.Format8, spec.format)
            scale = None if spec.scale == "rceil" else spec.scale
            options |= 128 * (spec.scale == "rceil")
            return Ask(4, variant, options, row=spec.group_size, scale=scale, seed=spec.seed)
        case codec.Float4():
            return Ask(5, index(specs.Format4, spec.format), int(stochastic), seed=spec.seed)
        case codec.Quantize():
            levels = 2 if spec.zero_point else index(specs.Levels, spec.levels)
            return Ask(6, levels, int(stochastic), spec.bits, spec.group_size, seed=spec.seed)
        case codec.Truncate():
            cut = 16 * (spec.rounding == "truncate")
            if spec.fixed_level is not None:
                return Ask(7, 3, cut, spec.fixed_level, max_code_length=spec.max_code_length)
            options = cut | 8 * (spec.granularity == "bit")
            return Ask(
                7,
                index(specs.LevelCoding, spec.level_coding),
                options,
                max_code_length=spec.max_code_length,
                guard=spec.guard_bits,
            )


def asked_metric(ask, metric, state):
    """Return `ask` with the metric, metric groups or levels of Truncate, and the optimizer state, added."""
    if isinstance(metric, np.ndarray):
        return replace(ask, levels=metric)
    if metric is None:
        return ask
    groups = metric if isinstance(metric, list) else [(0, metric)]
    terms = [(start, m.final(state)) for start, m in groups]
    names = {"theta"} | {"v" for _, t in terms if t.theta_v} | {"m" for _, t in terms if t.m}
    floats = {name: np.asarray(x).astype(F32) for name, x in state.items() if name in names}
    p = {"float32": 23, "bfloat16": 7, "float16": 10}[state["theta"].dtype.name]
    numbers = [(start, (t.theta, t.theta_v, t.v, t.eps, t.m)) for start, t in terms]
    return replace(ask, groups=numbers, state=floats, p=p)


def same(x, spec=LOSSLESS, *, dtype=None, shape=None, **how):
    """Check that the library encodes `x` to the reference encoder's frame on every instruction set; return the frame.

    Also check that encoding leaves the tensor unchanged.
    """
    dtype = dtype or x.dtype.name
    shape = shape or x.shape
    bits = x.reshape(-1).view(f"u{x.itemsize}")
    before = bits.tobytes()
    ask = asked_metric(ask_of(spec), how.get("optimizer"), how.get("state"))
    ask = replace(ask, segments=how.get("segments"), stream=how.get("stream", 0))
    if book := how.get("codebook"):
        ask = replace(ask, book=[*book.lengths, book.escape_length])
    if (error := how.get("residual")) is not None:
        ask = replace(ask, error=error.copy())
    if (base := how.get("base")) is not None:
        ask = replace(ask, base=base)
        how["base"] = codec.view(base.reshape(shape), dtype)
    expected = encoder.encode(bits, NUMBER[dtype], shape, ask)
    for isa in isas():
        with use_isa(isa):
            if error is not None:
                how["residual"] = error.copy()
            for threads in (1, 3) if x.nbytes > 400_000 and error is None else (1,):
                assert bytes(flatcall.encode(x.reshape(shape), spec, dtype=dtype, threads=threads, **how)) == expected
    assert bits.tobytes() == before
    return expected


def matrix(dtype, rows, cols, seed=0):
    """Return the bits of a matrix in which each row and each column has a different scale, and some values are zero."""
    rng = np.random.default_rng([seed, rows, cols])
    scales = np.exp(1.5 * rng.standard_normal((rows, 1)) + 1.5 * rng.standard_normal((1, cols)) - 7)
    x = rng.standard_normal((rows, cols)) * scales
    x[: rows // 20], x[rows // 2, :], x[:, 5] = 0, 0, 0
    return bits_of(x.ravel(), dtype)


def bits_of(x, dtype):
    if dtype == "bfloat16":
        return (x.astype(F32).view(np.uint32) >> 16).astype(np.uint16)
    x = x.astype(dtype)
    return x.view(f"u{x.itemsize}")


def tame(dtype, n, kind, seed=0):
    """Return n finite values with magnitudes below 1e4."""
    x = random_bits(dtype, n, kind, seed)
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(encoder.floats(x, NUMBER[dtype])) < 1e4, x, 0).astype(x.dtype)
