"""The message about ranks that have begun different collectives names the field that differs, with both values."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec.torch.reduction import difference
from codec.torch.reduction.arguments import reduction_of
from codec.torch.reduction.difference import Collective, describe

TENSOR = torch.ones(6, 8)


def all_reduce(tensor=TENSOR, spec="small", op="mean", requested="auto", algorithm="two_shot", **how):
    """Return the fields of an all-reduce, as another rank gets them."""
    if tensor.dim() > 1:
        how.setdefault("segments", codec.segments([tensor]))
    packed = codec.view(tensor, segments=how.pop("segments")).segments if "segments" in how else None
    r = reduction_of(tensor, spec, op, segments=packed)
    number = None if packed is None else -5 - len(packed)
    return received(difference.collective_of("all_reduce", requested, [(r, algorithm, number)]))


def received(collective):
    """Return a collective after encoding and decoding, which keep it."""
    data = difference.to_bytes(collective)
    assert len(data) <= difference.MAX_NBYTES
    assert difference.from_bytes(data) == collective
    return difference.from_bytes(data)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"spec": "balanced"}, "spec: Quantize(bits=4, .*) on rank 0, Float8(format='e4m3fn', .*) on rank 2"),
        ({"op": "sum"}, "op: mean on rank 0, sum on rank 2"),
        ({"tensor": torch.ones(6, 9)}, "number of values: 48 on rank 0, 54 on rank 2"),
        ({"tensor": torch.ones(8, 6)}, r"shape: (6, 8) on rank 0, (8, 6) on rank 2"),
        ({"tensor": torch.ones(48)}, r"shape: (6, 8) on rank 0, no shape of its own on rank 2"),
        ({"tensor": TENSOR.bfloat16()}, "dtype: float32 on rank 0, bfloat16 on rank 2"),
        ({"algorithm": "ring"}, "algorithm: two_shot on rank 0, ring on rank 2"),
        ({"requested": "ring"}, "algorithm=: 'auto' on rank 0, 'ring' on rank 2"),
    ],
)
def test_field_that_differs_is_named_with_both_values(other, words):
    parts = words.split(".*")
    text = describe(all_reduce(), all_reduce(**other), 0, 2)
    assert all(part in text for part in parts), text
    assert describe(all_reduce(), all_reduce(), 0, 2).endswith("differ in a field that is not exchanged")


def test_bound_specs_codebooks_and_segments_are_named():
    theta = torch.ones(6, 8)
    bound = codec.Truncate().bind(codec.optimizers.SGD(0.1), theta=theta)
    levels = codec.Truncate(level=0)
    assert "optimizer: not bound on rank 1, bound to the spec on rank 0" in describe(
        all_reduce(spec=levels)._replace(reductions=(all_reduce(spec=bound).reductions[0]._replace(unbound=True),)),
        all_reduce(spec=bound),
        1,
        0,
    )
    one = all_reduce()
    book = one._replace(reductions=(one.reductions[0]._replace(codebook=7),))
    assert describe(one, received(book), 0, 1) == "codebook: none on rank 0, 7 on rank 1"
    vector = all_reduce(torch.ones(48), segments=[(0, (4, 4)), (16, (4, 8))])
    other = all_reduce(torch.ones(48), segments=[(0, (4, 4)), (16, (4, 4)), (32, (4, 4))])
    assert describe(vector, other, 0, 1).startswith("shapes of parameters: hash ff")


def test_different_collectives_and_buckets_are_named():
    assert describe(all_reduce(), received(Collective("exchange", "", 0, ())), 1, 0) == (
        "collective: all_reduce of 48 values of float32 on rank 1, exchange on rank 0"
    )
    one = all_reduce()
    two = received(one._replace(n_reductions=2, reductions=one.reductions * 2))
    assert describe(one, two, 0, 1) == "number of specs in a bucket: 1 on rank 0, 2 on rank 1"
    other = received(two._replace(reductions=(two.reductions[0], two.reductions[1]._replace(n=9))))
    assert describe(two, other, 0, 1) == "number of values of part 1: 48 on rank 0, 9 on rank 1"


def test_long_collectives_are_cut():
    one = all_reduce().reductions[0]
    r = reduction_of(torch.ones(1000), "small", "mean")
    many = difference.collective_of("all_reduce", "auto", [(r, "two_shot", None)] * 300)
    assert received(many).n_reductions == 300
    large = Collective("all_reduce", "auto", 8, (one._replace(spec="S" * 240, shape=(1 << 59,) * 8),) * 8)
    cut = difference.from_bytes(difference.to_bytes(large))
    assert 0 < len(cut.reductions) < 8
    assert cut.n_reductions == 8


GOOD = json.loads(difference.to_bytes(all_reduce()))


def changed(path, value):
    """Return the good encoding with another value at a path of indices."""
    entries = json.loads(json.dumps(GOOD))
    inner = entries
    for i in path[:-1]:
        inner = inner[i]
    inner[path[-1]] = value
    return json.dumps(entries).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 2048,
        b'"' + b"x" * 5000 + b'"',
        json.dumps(GOOD[:3]).encode(),
        json.dumps([*GOOD, 1]).encode(),
        changed([0], 5),
        changed([0], "line\nline"),
        changed([0], "\u202e"),
        changed([1], "x" * 241),
        changed([2], -1),
        changed([2], 0),
        changed([2], True),
        changed([3], "x"),
        changed([3, 0], 9),
        changed([3, 0, 0], None),
        changed([3, 0, 2], 1.5),
        changed([3, 0, 2], 1 << 64),
        changed([3, 0, 3], "median"),
        changed([3, 0, 3], ["sum"]),
        changed([3, 0, 5], "hash"),
        changed([3, 0, 6], 1),
        changed([3, 0, 8], [-1]),
        changed([3, 0, 8], {"a": 1}),
        changed([3], GOOD[3] * 9),
        b"[1e999,NaN,Infinity,0]",
        b"[" + b"9" * 2040 + b"]",
    ],
)
def test_hostile_encodings_are_refused(data):
    with pytest.raises(codec.FrameError, match="a rank describes its collective by what cannot be") as e:
        difference.from_bytes(data)
    assert len(str(e.value)) < 300


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_damaged_encodings_are_refused_or_readable(data, at, byte):
    damaged = bytearray(json.dumps(GOOD).encode())
    damaged[at % len(damaged)] = byte
    for hostile in (data, bytes(damaged)):
        try:
            found = difference.from_bytes(hostile)
        except codec.FrameError:
            continue
        assert describe(all_reduce(), found, 0, 1).isprintable()


def test_numpy_bytes_are_accepted():
    assert difference.from_bytes(np.frombuffer(difference.to_bytes(all_reduce()), np.uint8)).n_reductions == 1
