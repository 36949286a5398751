"""Truncate's frames are bit-identical to those of the reference encoder."""

import itertools
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec import optimizers, specs
from reference import encoder
from support import flatcall
from support.encoder_rules import FLOATS, NUMBER, ask_of, asked_metric, bits_of, matrix, same
from support.specs import TRUNCATES
from support.tensors import KINDS, optimizer_state, random_bits, with_empty_rows
from support.tiers import every

F32 = np.float32


def gradient(n, dtype="float32", scale=1e-3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) * scale * np.exp(rng.standard_normal(n))
    x[rng.random(n) < 0.05] = 0
    x[7:9] = np.nan, np.inf
    return bits_of(x, dtype)


ADAMW = optimizers.AdamW(1e-3, step=99)
METRICS = {
    "sgd": optimizers.SGD(1e-3),
    "momentum": optimizers.SGD(1e-3, momentum=0.9),
    "nesterov": optimizers.SGD(1e-3, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adagrad": optimizers.Adagrad(1e-2),
    "rmsprop": optimizers.RMSprop(1e-3),
    "adam": optimizers.Adam(1e-3, weight_decay=0.1, step=1),
    "adamw": ADAMW,
    "unknown": optimizers.AdamW(1e-3, maximize=True, step=1),
    "still": optimizers.SGD(0),
    "groups": [
        (0, ADAMW),
        (700, optimizers.SGD(1e-4)),
        (701, optimizers.Adam(1e-2, step=1)),
        (6000, optimizers.SGD(1e-9)),
    ],
}
WAYS = [("plane", "six"), ("coded", "six"), ("shared", "six"), ("shared", "bit")]


@pytest.mark.parametrize(("levels", "granularity"), WAYS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_truncate_frames(dtype, levels, granularity):
    rare = 1e-20 if dtype != "float16" else 300
    for n, rounding, guard in itertools.product((600, 9000), get_args(specs.Cut), (-8, "exact", -20)):
        spec = codec.Truncate("optimizer", rounding, levels, granularity, guard)
        for scale in (1e-3, rare):
            same(gradient(n, dtype, scale), spec, dtype=dtype, optimizer=ADAMW, state=optimizer_state(n))
    spec = codec.Truncate("optimizer", "nearest", levels, granularity, -8, 5)
    for n in (0, 511, 512):
        same(random_bits(dtype, n, "normal"), spec, dtype=dtype, optimizer=ADAMW, state=optimizer_state(n))
    for metric in METRICS.values():
        same(gradient(8000, dtype), spec, dtype=dtype, optimizer=metric, state=optimizer_state(8000))
    for kind in KINDS:
        same(random_bits(dtype, 5000, kind), spec, dtype=dtype, optimizer=ADAMW, state=optimizer_state(5000))
    x = random_bits(dtype, 20_000, "mixed")
    state = optimizer_state(20_000)
    same(x, spec, dtype=dtype, optimizer=ADAMW, state=state, segments=[(100, (90, 100)), (9500, (9000,))])
    same(matrix(dtype, 130, 70), spec, dtype=dtype, shape=(130, 70), optimizer=ADAMW, state=optimizer_state(9100))
    halves = {name: y.astype(np.float16) for name, y in state.items()}
    same(x, spec, dtype=dtype, optimizer=optimizers.SGD(1e-3), state=halves)


@pytest.mark.parametrize(("levels", "granularity"), WAYS)
def test_gaps_of_truncate(levels, granularity):
    """Frames equal the reference encoder's if the truncated values of quad rows are 0."""
    spec = codec.Truncate("optimizer", "nearest", levels, granularity)
    for dtype, n in itertools.product(FLOATS, (20_000, 641)):
        x = gradient(n, dtype)
        tiny = np.where(np.arange(n) // 128 % 7 == 2, x & x.dtype.type(1), x)
        for empty in every(2, (range(1, 157), [n // 128], range(n // 128), range(0, 157, 3), [128, 129, 130])):
            how = {"optimizer": ADAMW, "state": optimizer_state(n)}
            same(with_empty_rows(tiny, empty), spec, dtype=dtype, **how)


@pytest.mark.parametrize("dtype", FLOATS)
def test_truncate_frames_with_given_levels(dtype):
    rng = np.random.default_rng(0)
    for n, rounding in itertools.product((511, 600, 17_000), get_args(specs.Cut)):
        for level in range(4):
            same(gradient(n, dtype), codec.Truncate(level, rounding), dtype=dtype)
        levels = rng.integers(0, 4, n).astype(np.uint8)
        for sent in ("plane", "coded"):
            spec = codec.Truncate("optimizer", rounding, sent, max_code_length=7, guard=3)
            same(gradient(n, dtype), spec, dtype=dtype, optimizer=levels)
    if dtype != "float32":
        for level in range(4):
            same(np.arange(1 << 16, dtype=np.uint16), codec.Truncate(level), dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", every(2, TRUNCATES))
def test_truncate_frames_with_a_shared_codebook(name, dtype):
    spec, n = TRUNCATES[name], 6000
    how = {"optimizer": ADAMW, "state": optimizer_state(n)} if spec.fixed_level is None else {}
    ask = asked_metric(ask_of(spec), how.get("optimizer"), how.get("state"))
    counts = encoder.count_symbols(gradient(n, dtype), NUMBER[dtype], (n,), ask)
    book = codec.Codebook.from_counts(counts, spec, dtype)
    if dtype != "bfloat16":
        assert book == flatcall.codebook(gradient(n, dtype).view(dtype), spec=spec, **how)
    for scale in (1e-3, 1e-5):
        same(gradient(n, dtype, scale, 2), spec, dtype=dtype, codebook=book, **how)


@given(st.integers(0, 9000), st.integers(0, 2**32), st.sampled_from(WAYS), st.integers(-30, 10), st.data())
def test_random_truncate_frames(n, seed, way, guard, data):
    dtype, kind = data.draw(st.sampled_from(FLOATS)), data.draw(st.sampled_from(KINDS))
    metric = METRICS[data.draw(st.sampled_from(sorted(METRICS)))]
    rounding = data.draw(st.sampled_from(get_args(specs.Cut)))
    spec = codec.Truncate("optimizer", rounding, *way, guard, data.draw(st.integers(2, 8)))
    same(random_bits(dtype, n, kind, seed), spec, dtype=dtype, optimizer=metric, state=optimizer_state(n, seed))
