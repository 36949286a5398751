"""Calls for small tensors, which make no request, give the frames, values and errors of calls that make one."""

import numpy as np
import pytest
import torch

import codec
from support.specs import SPECS

REQUEST = codec.options(engine="native")  # an engine by name: the call makes a request
RNG = np.random.default_rng(0)


def outcome(function, *args, **how):
    """Return the result of a call as bytes, or its error's type, message and fields."""
    try:
        result = function(*args, **how)
    except codec.CodecError as e:
        return type(e), *e.args, e.code, e.item, getattr(e, "offset", None)
    return result if type(result) is bytes else (result.dtype, tuple(result.shape), np.asarray(result).tobytes())


def test_frames_are_those_of_a_request():
    """Every spec, and streams of random bits; also tensors that the call does not accept."""
    xs = [RNG.standard_normal(n).astype(np.float32) for n in (1, 64, 600, 4096, 16_384, 16_385)]
    xs += [np.arange(9), np.zeros(0), np.float32([1, np.nan]), np.ones((3, 1, 2), np.float16), np.array(["a"])]
    xs += [xs[3][::2], torch.randn(70).bfloat16(), torch.randn(6, 7).t(), torch.eye(3).to_sparse()]
    for spec in SPECS.values():
        for x in xs:
            for stream in (0, 1 << 63):
                small = outcome(codec.encode, x, spec, stream=stream)
                assert small == outcome(codec.encode, x, spec, stream=stream, options=REQUEST)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.frombuffer])
def test_values_and_errors_are_those_of_a_request(kind):
    """Whole and truncated frames, and frames with one changed byte, in every kind of buffer."""
    frame = codec.encode(RNG.standard_normal((2, 30)).astype(np.float32), codec.Quantize(4))
    stored = codec.encode(np.arange(5, dtype=np.int16))
    out = np.zeros((2, 30), np.float32)
    for good in (frame, stored):
        changed = [bytearray(good) for _ in good]
        for i, each in enumerate(changed):
            each[i] ^= 0x11
        for bad in (good, good + b"\0", *(good[:i] for i in range(len(good))), *changed):
            data = kind(bytearray(bad)) if kind is not np.frombuffer else np.frombuffer(bytes(bad), np.uint8)
            for how in ({}, {"out": out}, {"like": torch.zeros(1)}, {"out": out.T}, {"out": torch.zeros(2, 30)}):
                assert outcome(codec.decode, data, **how) == outcome(codec.decode, data, **how, options=REQUEST)


def test_frames_that_need_more_arguments_raise_the_error_of_a_request():
    x = np.ones(600, np.float32)
    bound = codec.Truncate(level_coding="shared").bind(codec.optimizers.SGD(0.1), theta=x)
    book = codec.Codebook.from_tensors(RNG.standard_normal(4096).astype(np.float32))
    normal = RNG.standard_normal(600).astype(np.float32)
    frames = codec.encode(x, codec.Delta(), base=x + 1), codec.encode(x, bound), codec.encode(normal, codebook=book)
    for frame in frames:
        got = outcome(codec.decode, frame)
        assert issubclass(got[0], codec.StateError)
        assert got == outcome(codec.decode, frame, options=REQUEST)
