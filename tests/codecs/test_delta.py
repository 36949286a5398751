"""Delta: a tensor against a base that both sides hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec._c.library import DTYPES, ITEMSIZE
from codec.delta import find_changes
from codec.specs import check_contraction
from reference import decoder as oracle
from support.tensors import ALL_DTYPES, random_bits
from support.weights import encode, weights

DELTA = codec.Delta()


def pair(dtype, n, density, largest, seed=0):
    """Return a base and a tensor as integers; a fraction `density` of values differs, by at most `largest`."""
    rng = np.random.default_rng([seed, n])
    base = random_bits(dtype, n, "normal")
    steps = rng.integers(1, largest + 1, n, dtype=np.uint64).astype(base.dtype)
    signs = np.where(rng.random(n) < 0.5, steps, -steps.astype(np.int64)).astype(base.dtype)
    return base, np.where(rng.random(n) < density, base + signs, base).astype(base.dtype)


def check(new, base, dtype, spec=DELTA):
    """Check a frame's size, digests and values, decoded to new memory, to `out` and in place, with 1 and 3 threads."""
    frame = encode(new, base, dtype, spec)
    assert len(frame) <= codec.bound(new.shape, dtype, spec)
    assert encode(new, base, dtype, spec, options=codec.options(threads=3)) == frame
    codec.verify(frame)
    info = codec.inspect(frame)
    assert (info.base_digest, info.result_digest) == (codec.digest(base), codec.digest(new))
    assert info.dtype == dtype
    for threads in (1, 3):
        options = codec.options(threads=threads)
        out = np.empty_like(base)
        assert codec.decode(frame, base=base, out=out, options=options) is out
        assert (out == new).all()
        weights = base.copy()
        codec.decode(frame, base=weights, out=weights, options=options)
        assert (weights == new).all()
        weights = base.copy()
        changes = find_changes(frame, base=weights, options=options)
        assert (weights == base).all()
        if changes is None:
            assert 8 * np.count_nonzero(new != base) > min(info.block or len(new), len(new))
        else:
            assert set(changes.positions) == set(np.flatnonzero(new != base))
            changes.put(weights)
            assert (weights == new).all()
    return frame


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_bit_is_restored(dtype, isa):
    for n in (0, 1, 63, 64, 65, 1023, 1025, 70_000):
        for density, largest in ((0, 1), (0.003, 1), (0.1, 5), (1, 100)):
            base, new = pair(dtype, n, density, min(largest, 1 << 8 * ITEMSIZE[dtype] - 2))
            check(new, base, dtype)
    # The bits of `new` include NaN, Inf, -0 and subnormals
    base, new = random_bits(dtype, 5000, "normal"), random_bits(dtype, 5000, "mixed")
    check(new, base, dtype, codec.Delta(1024))
    check(base, new, dtype, codec.Delta(2048))


@given(st.sampled_from(ALL_DTYPES), st.integers(0, 3000), st.floats(0, 1), st.integers(1, 60), st.integers(0, 2**32))
def test_any_change_is_restored(dtype, n, density, largest, seed):
    base, new = pair(dtype, n, density, largest, seed)
    check(new, base, dtype, codec.Delta(1024))


def test_patterns_of_nan_and_negative_zero_are_values_like_others():
    base = np.array([0x0000, 0x8000, 0x7F80, 0x7F81, 0xFFFF, 0x7FFF], np.uint16)
    new = np.array([0x8000, 0x0000, 0x7FC1, 0x7F82, 0x8001, 0xFF80], np.uint16)
    check(new, base, "bfloat16")


def test_unchanged_tensor_takes_80_bytes():
    x = np.ones((1000, 1000), np.float32)
    frame = codec.encode(x.copy(), DELTA, base=x)
    assert len(frame) == 80
    assert codec.inspect(frame).nblocks == 0
    assert (codec.decode(frame, base=x) == x).all()


def test_sparse_update_takes_few_bits():
    """A frame's size is within 15% of the entropy of changed positions and steps, given the exponents of the base."""
    base, new = weights()
    e, step = base >> 7 & 255, new.astype(int) - base.astype(int)
    bits = sum(entropy(step[e == k]) for k in np.unique(e))
    frame = encode(new, base, "bfloat16")
    assert 0.01 < (step != 0).mean() < 0.05
    assert 8 * len(frame) < 1.15 * bits
    larger = encode(new, base, "bfloat16", codec.Delta(1 << 18))
    assert len(larger) < len(frame)
    assert (codec.decode(larger, base=base, out=base.copy()) == new).all()


def entropy(x):
    """Return the empirical entropy of all values of x in bits, as if they were independent."""
    _, counts = np.unique(x, return_counts=True)
    return -(counts * np.log2(counts / len(x))).sum()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("density", [0.001, 0.5])
def test_wrong_base_is_refused_and_nothing_is_written(isa, threads, density):
    """Decoding with any other base is an error that writes nothing, even if the stream is valid with that base."""
    base, new = weights(density=density)
    frame = encode(new, base, "bfloat16")
    rng = np.random.default_rng(0)
    for count in (1, 30, 100_000):
        wrong = base.copy()
        wrong[rng.choice(len(base), count, replace=False)] ^= np.uint16(1 << rng.integers(16))
        before = wrong.copy()
        with pytest.raises(codec.StateError, match="not the tensor against which the frame was encoded") as e:
            codec.decode(frame, base=wrong, out=wrong, options=codec.options(threads=threads))
        assert e.value.code == codec.Status.OTHER_BASE
        with pytest.raises(codec.StateError, match="not the tensor against which the frame was encoded"):
            find_changes(frame, base=wrong, options=codec.options(threads=threads))
        assert (wrong == before).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_update_cannot_be_applied_twice(isa, threads):
    base, new = weights()
    frame = encode(new, base, "bfloat16")
    w, options = base.copy(), codec.options(threads=threads)
    codec.decode(frame, base=w, out=w, options=options)
    with pytest.raises(codec.StateError, match="already applied") as e:
        codec.decode(frame, base=w, out=w, options=options)
    assert e.value.code == codec.Status.ALREADY_APPLIED
    assert (w == new).all()


def test_half_applied_update_is_refused():
    base, new = weights()
    frame = encode(new, base, "bfloat16")
    w = np.concatenate([new[:150_000], base[150_000:]])
    with pytest.raises(codec.StateError, match="not the tensor"):
        codec.decode(frame, base=w, out=w)


@pytest.mark.parametrize("threads", [1, 3])
def test_damage_is_reported_before_a_wrong_base(threads):
    base, new = weights(100_000)
    frame = bytearray(encode(new, base, "bfloat16"))
    options = codec.options(threads=threads)
    for at in (*range(24, len(frame), 997), len(frame) - 1):
        damaged = frame.copy()
        damaged[at] ^= 16
        for given_base in (base, new):
            w = given_base.copy()
            with pytest.raises(codec.FrameError):
                codec.decode(damaged, base=w, out=w, options=options)
            with pytest.raises(codec.FrameError):
                find_changes(damaged, base=w, options=options)
            assert (w == given_base).all()
    for n in range(0, len(frame), 499):
        with pytest.raises(codec.FrameError):
            codec.decode(frame[:n], base=base.copy(), out=base.copy())


def test_base_must_be_given_and_fit():
    x, y = np.ones(1000, np.float32), np.zeros(1000, np.float32)
    frame = codec.encode(x, DELTA, base=y)
    with pytest.raises(codec.StateError, match="pass that tensor as base=") as e:
        codec.decode(frame)
    assert e.value.code == codec.Status.MISSING_BASE
    for wrong in (y[:999], y.reshape(10, 100), y.astype(np.float64), y.astype(np.int32)):
        with pytest.raises(codec.ArgumentError, match=r"base= must be .* as the frame, got"):
            codec.decode(frame, base=wrong)
    with pytest.raises(codec.ArgumentError, match="needs base="):
        codec.encode(x, DELTA)
    with pytest.raises(codec.ArgumentError, match=r"base= must be .* as x, got"):
        codec.encode(x, DELTA, base=y[:10])
    with pytest.raises(codec.ArgumentError, match="base= is for Delta"):
        codec.encode(x, base=y)
    assert (codec.decode(codec.encode(x), base=y) == x).all()  # frames of other codecs ignore the base


def test_overlapping_memory_is_refused():
    x = np.zeros(4000, np.float32)
    frame = codec.encode(x[:2000] + 1, DELTA, base=x[:2000])
    with pytest.raises(codec.ArgumentError, match="shares memory with base= without being"):
        codec.decode(frame, base=x[:2000], out=x[1:2001])
    with pytest.raises(codec.ArgumentError, match="out= shares memory with base="):
        codec.encode(x[:2000] + 1, DELTA, base=x[:2000], out=x.view(np.uint8))


def test_new_tensor_is_decoded_without_a_limit():
    """Delta needs no max_nbytes for a large tensor in a small frame, because the base limits the result's size."""
    base = np.zeros(80_000_000, np.uint8)
    new = base.copy()
    new[5] = 1
    frame = codec.encode(new, DELTA, base=base)
    assert len(frame) * 256 < base.nbytes
    assert codec.decode(frame, base=base)[5] == 1
    with pytest.raises(codec.LimitError):
        codec.decode(frame, base=base, max_nbytes=1000)


def test_frames_cannot_be_added_up():
    x = np.ones(1000, np.float32)
    frame = codec.encode(x, DELTA, base=np.zeros_like(x))
    for call in (
        lambda: codec.accumulate(frame, x.copy()),
        lambda: codec.reduce([frame]),
        lambda: codec.reduce([frame, frame], out=x.copy()),
        lambda: codec.sum_codes([frame]),
    ):
        with pytest.raises(codec.ArgumentError, match="Delta"):
            call()


def test_feedback_and_codebooks_are_for_other_specs():
    x = np.ones(1000, np.float32)
    with pytest.raises(codec.SpecError, match="Delta has no residual"):
        codec.encode(x, DELTA, base=x, residual=x.copy(), feedback=True)
    with pytest.raises(codec.ArgumentError, match="codebook= is for"):
        codec.encode(x, DELTA, base=x, codebook=codec.Codebook.from_tensors(np.random.default_rng(0).random(5000)))
    with pytest.raises(codec.SpecError, match="Delta has no residual"):
        check_contraction(DELTA)


@pytest.mark.parametrize("block_size", [0, 512, 1000, 1 << 19, 2.5, "1024"])
def test_block_size_is_a_power_of_two(block_size):
    with pytest.raises(codec.SpecError, match="block_size"):
        codec.Delta(block_size)


@pytest.mark.torch
def test_collectives_refuse():
    from codec.torch.reduction import arguments

    with pytest.raises(codec.SpecError, match="Delta needs a base, which collectives do not have"):
        arguments.plain_spec(DELTA)


class TestBatches:
    """encode_many and decode_many with Delta for all tensors of a model."""

    @staticmethod
    def models():
        rng = np.random.default_rng(0)
        old = {f"layer{i}": rng.standard_normal((50 + 200 * i, 70)).astype(np.float16) for i in range(5)}
        new = {name: x.copy() for name, x in old.items()}
        for x in new.values():
            x.ravel()[::97] *= np.float16(1.01)
        return old, new

    @pytest.mark.parametrize("threads", [1, 3])
    def test_model_is_updated_in_place(self, threads):
        old, new = self.models()
        options = codec.options(threads=threads)
        frames = codec.encode_many(new, DELTA, base=old, options=options)
        assert frames == {name: codec.encode(x, DELTA, base=old[name]) for name, x in new.items()}
        assert {n: (x == new[n]).all() for n, x in codec.decode_many(frames, base=old, options=options).items()} == {
            n: True for n in new
        }
        codec.decode_many(frames, base=old, out=old, options=options)
        assert all((x == new[name]).all() for name, x in old.items())

    @pytest.mark.parametrize("threads", [1, 3])
    def test_one_wrong_base_leaves_the_whole_model_unchanged(self, threads):
        old, new = self.models()
        frames = codec.encode_many(new, DELTA, base=old)
        old["layer3"].ravel()[77] += 1
        before = {name: x.copy() for name, x in old.items()}
        with pytest.raises(codec.StateError, match=r"^'layer3': the base is not the tensor"):
            codec.decode_many(frames, base=old, out=old, options=codec.options(threads=threads))
        assert all((x == before[name]).all() for name, x in old.items())

    def test_lists_with_tensors_of_other_specs(self):
        old, new = np.zeros(3000, np.float32), np.ones(3000, np.float32)
        frames = codec.encode_many([new, new], [DELTA, codec.Lossless()], base=[old, None])
        assert [codec.inspect(f).spec for f in frames] == [codec.Delta(4096), codec.Lossless()]
        for x in codec.decode_many(frames, base=[old, None]):
            assert (x == new).all()
        with pytest.raises(codec.StateError, match=r"^0: .*pass that tensor as base="):
            codec.decode_many(frames)
        with pytest.raises(codec.ArgumentError, match="base= must have as many items as the first argument, 2, got 1"):
            codec.decode_many(frames, base=[old])
        with pytest.raises(codec.ArgumentError, match=r"^1: base= is for Delta"):
            codec.encode_many([new, new], [DELTA, codec.Lossless()], base=[old, old])

    def test_outputs_may_not_be_bases_of_other_items(self):
        old, new = np.zeros((2, 3000), np.float32), np.ones((2, 3000), np.float32)
        frames = codec.encode_many(list(new), DELTA, base=list(old))
        with pytest.raises(codec.ArgumentError, match="shares memory"):
            codec.decode_many(frames, base=list(old), out=list(old[::-1]))


class TestDigest:
    def test_is_that_of_the_format(self, isa):
        for n in (0, 1, 1023, 1024, 1025, 5_000_000):
            x = np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8)
            assert codec.digest(x) == oracle.digest(x.tobytes(), 0x600)

    @pytest.mark.parametrize("dtype", ALL_DTYPES)
    def test_does_not_depend_on_dtype(self, dtype):
        x = random_bits(dtype, 3000, "normal")
        assert codec.digest(codec.view(x, dtype).tensor) == codec.digest(x.view(np.uint8)) == codec.digest(x)

    def test_every_bit_counts(self):
        x = np.zeros(3000, np.uint8)
        seen = {codec.digest(x)}
        for at in range(0, 3000, 11):
            for bit in range(8):
                y = x.copy()
                y[at] = 1 << bit
                seen.add(codec.digest(y))
        assert len(seen) == 1 + 8 * len(range(0, 3000, 11))

    def test_refuses_what_is_no_tensor(self):
        with pytest.raises(codec.ArgumentError):
            codec.digest("text")


def test_dtypes_of_the_format_are_those_of_the_library():
    assert {name: number for number, (name, *_) in oracle.DTYPES.items()} == DTYPES
