"""Delta on the Numba and CUDA engines gives the frames, values and errors of the native engine."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import codec
from codec._c.library import ITEMSIZE
from codec.engines.cuda import batch_decode
from support import flatcall
from support.device import Emulated, build, use
from support.engine_comparison import like, misaligned, outcome, sample_bits
from support.sample_frames import damage
from support.tensors import ALL_DTYPES, random_bits
from support.tiers import N_DAMAGED
from support.weights import frames_with_invalid_changes

DELTA, SMALL = codec.Delta(), codec.Delta(1024)


@pytest.fixture(params=["numba", "cuda"])
def engine(request, monkeypatch):
    """Return the name of the engine under test: once "numba", once "cuda" with kernels on the CPU."""
    if request.param == "cuda":
        use(monkeypatch, Emulated(build()))
    return request.param


def changed(dtype, base, density, largest, seed=0):
    """Return `base` with a fraction `density` of values changed by up to `largest` patterns."""
    rng = np.random.default_rng([seed, len(base)])
    steps = rng.integers(1, min(largest, 1 << 8 * ITEMSIZE[dtype] - 2) + 1, len(base), dtype=np.uint64)
    steps = np.where(rng.random(len(base)) < 0.5, steps, ~steps + np.uint64(1)).astype(base.dtype)
    return np.where(rng.random(len(base)) < density, base + steps, base).astype(base.dtype)


def check(engine, dtype, base, new, spec=SMALL):
    """Check the frame, decoding to new memory, to `out` and in place, and the error for a wrong base."""
    how = {"dtype": dtype, "base": base}
    frame = bytes(flatcall.encode(new, spec, **how))
    for threads in (1, 3):
        assert bytes(flatcall.encode(misaligned(new), spec, engine=engine, threads=threads, **how)) == frame
        call = {"engine": engine, "threads": threads}
        assert flatcall.decode(frame, base=base, like=like(dtype), **call).tobytes() == new.tobytes()
        for verify_first in (True, False):
            weights = misaligned(base)
            flatcall.decode(frame, base=weights, out=weights, verify_first=verify_first, **call)
            assert (weights == new).all()
    weights, out = new.copy(), np.full_like(base, 7)
    again = outcome(lambda: flatcall.decode(frame, base=weights, out=out, engine=engine).tobytes())
    assert again == outcome(lambda: flatcall.decode(frame, base=weights, out=out.copy()).tobytes())
    assert (out == (new if isinstance(again, bytes) else 7)).all()
    return frame


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_dtype(engine, dtype):
    for n in (0, 1, 33, 1023, 2049, 4100):
        base = random_bits(dtype, n, "normal")
        for density, largest in ((0, 1), (0.003, 1), (0.1, 5), (1, 100)):
            check(engine, dtype, base, changed(dtype, base, density, largest))
    base, new = sample_bits(dtype, 3000, "normal"), sample_bits(dtype, 3000, "mixed", odd=40, finite=False)
    check(engine, dtype, base, new)
    check(engine, dtype, new, base, codec.Delta(2048))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(ALL_DTYPES), st.integers(0, 3000), st.floats(0, 1), st.integers(1, 1 << 60), st.integers(0, 99))
def test_any_change(engine, dtype, n, density, largest, seed):
    base = random_bits(dtype, n, "normal", seed)
    check(engine, dtype, base, changed(dtype, base, density, 1 + largest % (1 << seed % 60), seed))


def test_blocks_of_default_size(engine):
    for dtype, n, density in (("bfloat16", 132_000, 0.01), ("float32", 40_000, 0.4), ("int8", 40_000, 0.002)):
        base = random_bits(dtype, n, "normal")
        check(engine, dtype, base, changed(dtype, base, density, 3), DELTA)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int16"])
def test_other_bases_are_refused(engine, dtype):
    """A wrong base gives the native engine's error, also if the stream is invalid with that base."""
    base = random_bits(dtype, 5000, "normal")
    for density in (0.003, 0.5):
        new = changed(dtype, base, density, 2)
        frame = bytes(flatcall.encode(new, SMALL, dtype=dtype, base=base))
        rng = np.random.default_rng(0)
        for count in (1, 30, 5000):
            wrong = base.copy()
            wrong[rng.choice(5000, count, replace=False)] ^= base.dtype.type(1 << rng.integers(16))
            before = wrong.copy()
            ours = outcome(lambda: flatcall.decode(frame, base=wrong, out=wrong, engine=engine))  # noqa: B023
            native = outcome(lambda: flatcall.decode(frame, base=wrong, out=wrong))  # noqa: B023
            assert ours == native
            assert ours[1] == codec.Status.OTHER_BASE
            assert (wrong == before).all()


@pytest.mark.parametrize("listed", [256_000_000, 800, 0])
def test_base_on_a_device(listed, monkeypatch):
    """A base on the device is updated there, from lists of changes or, if those do not fit, by decoding again."""
    monkeypatch.setattr(batch_decode, "_MOST_LISTED", listed)
    device = Emulated(build())
    use(monkeypatch, device)
    base = random_bits("bfloat16", 5000, "normal")
    new = changed("bfloat16", base, 0.02, 2)
    old, weights = device.put(base), device.put(base)
    with codec.options(engine="cuda"):
        frame = codec.encode(codec.view(device.put(new), "bfloat16"), SMALL, base=codec.view(old, "bfloat16"))
    assert bytes(frame.get()) == bytes(flatcall.encode(new, SMALL, dtype="bfloat16", base=base))
    codec.decode(frame, base=weights, out=weights)
    assert (weights.array == new).all()
    with pytest.raises(codec.StateError, match="already applied"):
        codec.decode(frame, base=weights, out=weights)
    assert (codec.decode(frame, base=old).array == new).all()
    assert (old.array == base).all()


def test_kernels_are_compiled_by_warmup(engine):
    codec.warmup(codec.Delta(), ["bfloat16", "int8"], options=codec.options(engine=engine))


def test_encode_async_takes_a_base(monkeypatch):
    device = Emulated(build())
    use(monkeypatch, device)
    base = np.linspace(1, 2, 3000, dtype=np.float32)
    new = base.copy()
    new[::50] *= np.float32(1.000001)
    out = device.put(np.empty(codec.bound(new.shape, new.dtype, SMALL), np.uint8))
    pending = codec.encode_async(device.put(new), SMALL, out=out, base=device.put(base))
    assert bytes(pending.wait().get()) == bytes(codec.encode(new, SMALL, base=base))


def test_base_must_be_given_and_fit(engine):
    x = np.ones(2000, np.float32)
    frame = bytes(codec.encode(x, DELTA, base=np.zeros_like(x)))
    same = bytes(codec.encode(x, DELTA, base=x))
    for call in (
        lambda by: flatcall.decode(frame, engine=by),
        lambda by: flatcall.decode(same, engine=by),
        lambda by: flatcall.decode(frame, base=x[:10], engine=by),
        lambda by: flatcall.decode(frame, base=x.astype(np.float64), engine=by),
        lambda by: flatcall.encode(x, DELTA, base=x[1:], engine=by),
        lambda by: flatcall.encode(x, DELTA, engine=by),
        lambda by: flatcall.accumulate(frame, x, engine=by),
        lambda by: flatcall.reduce([frame, frame], engine=by),
    ):
        ours = outcome(lambda: call(engine))  # noqa: B023
        assert ours == outcome(lambda: call("native"))  # noqa: B023
        assert isinstance(ours, tuple)


def test_model_is_updated_as_a_whole(engine):
    rng = np.random.default_rng(0)
    old = [rng.standard_normal((10 + 60 * i, 70)).astype(np.float16) for i in range(4)]
    new = [x.copy() for x in old]
    for x in new[1:]:
        x.ravel()[::97] *= np.float16(1.01)
    options = codec.options(engine=engine)
    frames = codec.encode_many(new, DELTA, base=old, options=options)
    assert [bytes(frame) for frame in frames] == codec.encode_many(new, DELTA, base=old)
    for got, x in zip(codec.decode_many(frames, base=old, options=options), new, strict=True):
        assert (got == x).all()
    wrong = [x.copy() for x in old]
    wrong[2].ravel()[77] += 1
    before = [x.copy() for x in wrong]
    with pytest.raises(codec.StateError, match=r"^2: the base is not the tensor"):
        codec.decode_many(frames, base=wrong, out=wrong, options=options)
    assert all((x == y).all() for x, y in zip(wrong, before, strict=True))
    codec.decode_many(frames, base=old, out=old, options=options)
    assert all((x == y).all() for x, y in zip(old, new, strict=True))


def frames_to_damage():
    """Return pairs of a frame and its base, as bits, by name."""
    found = {}
    for dtype, density, largest in (
        ("bfloat16", 0.02, 3),
        ("float32", 0.5, 900),
        ("float16", 0.004, 1 << 14),
        ("int32", 0.05, 40),
        ("float64", 0.01, 1 << 60),
        ("uint8", 1, 100),
    ):
        base = random_bits(dtype, 2500, "normal")
        new = changed(dtype, base, density, largest)
        found[dtype] = bytes(flatcall.encode(new, SMALL, dtype=dtype, base=base)), base
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "int32", "float64", "uint8"])
def test_hostile_frames(engine, dtype):
    """Damaged frames give the native tensor or error, and an error leaves the base unchanged."""
    frame, base = frames_to_damage()[dtype]
    rng = np.random.default_rng(len(frame))
    refused = 0
    for i in range(N_DAMAGED):
        mutant = damage(frame, rng)
        if i % 5 == 0:
            mutant = frame[: rng.integers(len(frame))]
        how = {"verify_first": i % 7 > 0, "threads": 1 + i % 3}
        given = base.copy()
        given[-1] ^= i % 4 == 3  # every fourth time, decode with a wrong base

        def decode(by, mutant=mutant, how=how, given=given):
            weights = given.copy()
            found = outcome(lambda: flatcall.decode(mutant, base=weights, out=weights, engine=by, **how).tobytes())
            assert isinstance(found, bytes) or not how["verify_first"] or (weights == given).all()
            return found if isinstance(found, bytes) else found[:2]

        ours = decode(engine)
        assert ours == decode("native")
        refused += not isinstance(ours, bytes)
    assert refused


@pytest.mark.parametrize("verify_first", [True, False])
@pytest.mark.parametrize("threads", [1, 3])
def test_first_error_is_reported(engine, threads, verify_first):
    """The first error is reported, even if decoding in place has already changed part of the base."""
    for frame, base, status in frames_with_invalid_changes():
        for by in (engine, "native"):
            weights = base.copy()
            with pytest.raises(codec.CodecError) as e:
                flatcall.decode(frame, base=weights, out=weights, engine=by, threads=threads, verify_first=verify_first)
            assert e.value.code == status, by
