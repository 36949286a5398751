"""Check that all engines return the same bytes or values, or raise the same error, for the same call."""

import numpy as np
from hypothesis import strategies as st

import codec
from codec import optimizers
from codec._c.library import ITEMSIZE, MANTISSA_BITS
from support import flatcall
from support.specs import SPECS
from support.tensors import ADAMW, ALL_DTYPES, F32, KINDS, LOSSY_DTYPES, optimizer_state, random_bits

ENGINES = ("native", "numba")
MBITS = {**MANTISSA_BITS, "float64": 52}


def outcome(call):
    """Return the result of a call, or its error as (type, code, message)."""
    try:
        return call()
    except codec.CodecError as e:
        return type(e), e.code, str(e)


def agreed(call):
    """Check that a call has the same outcome with every engine, and return the outcome."""
    expected, *others = (outcome(lambda: call(engine)) for engine in ENGINES)  # noqa: B023
    assert others == [expected] * len(others)
    return expected


def dtypes_of(spec):
    """Return the dtypes that a spec accepts."""
    return ALL_DTYPES if isinstance(spec, codec.Lossless) else LOSSY_DTYPES


def sample_bits(dtype, n, kind="mixed", seed=0, odd=0, finite=True):
    """Return the bits of n values, `odd` of which are at the limits of the dtype. `finite` excludes NaN and Inf."""
    x = random_bits(dtype, n, kind, seed)
    if dtype not in MBITS:
        return x
    u, sign, mbits = x.dtype.type, 1 << 8 * ITEMSIZE[dtype] - 1, MBITS[dtype]
    inf = sign - (1 << mbits)
    if finite:
        x = np.where(x & u(inf) == u(inf), x ^ u(1 << mbits), x)
    ends = [0, sign, 1, sign | (1 << mbits) - 1, 1 << mbits, inf - 1, sign | inf - 1]
    ends += [] if finite else [inf, sign | inf, inf | 1, inf | 1 << mbits - 1, sign | inf | 5]
    rng = np.random.default_rng([seed, n])
    if n and odd:
        x[rng.integers(0, n, odd)] = rng.choice(np.array(ends, x.dtype), odd)
    return x


def level_arguments(spec, n, seed=0, how="sgd"):
    """Return the metric and state that a Truncate spec needs for n values; {} for other specs."""
    if not isinstance(spec, codec.Truncate) or spec.fixed_level is not None:
        return {}
    state = {k: v * F32(1e3 if k == "theta" else 1) for k, v in optimizer_state(n, seed).items()}
    if how == "sgd":
        return {"optimizer": optimizers.SGD(1e-2), "state": {"theta": state["theta"]}}
    if how == "groups" and n > 1:
        return {"optimizer": [(0, optimizers.SGD(1e-3)), (n // 3 + 1, ADAMW)], "state": state}
    return {"optimizer": ADAMW, "state": state}


def like(dtype):
    """Return an empty array of the unsigned integer dtype that has the dtype's item size."""
    return np.empty(0, f"u{ITEMSIZE[dtype]}")


def misaligned(x, shift=3):
    """Return a copy of an array at an address that is not aligned to the array's item size."""
    raw = np.empty(x.nbytes + 16, np.uint8)
    raw[shift : shift + x.nbytes] = x.reshape(-1).view(np.uint8)
    return np.ndarray(x.shape, x.dtype, raw[shift:])


def unify_nan(y):
    """Return the bytes of float32 values with all NaNs made equal."""
    return np.where(np.isnan(y), F32(np.nan), y).tobytes()


def check_encode(x, spec, dtype, left=None, **how):
    """Check that all engines return the same frame or raise the same error in encode; return the frame or the error.

    `left` is the residual before the call. All engines must write the same new residual, and none after an error.
    """

    def call(engine):
        residual = None if left is None else left.copy()
        frame = outcome(lambda: bytes(flatcall.encode(x, spec, dtype=dtype, engine=engine, residual=residual, **how)))
        if left is not None and not isinstance(frame, bytes):
            assert residual.tobytes() == left.tobytes()
        return frame, None if left is None else residual.tobytes()

    frame, _ = agreed(call)
    return frame


def check_decode(frame, dtype, shape, **how):
    """Check that all engines decode a frame to the same bytes, into new memory and into `out`; return the bytes."""
    values = agreed(lambda engine: flatcall.decode(frame, like=like(dtype), engine=engine, **how).tobytes())
    out = misaligned(np.zeros(shape, like(dtype).dtype))
    flatcall.decode(
        misaligned(np.frombuffer(frame, np.uint8), 5),
        out=out,
        engine=ENGINES[-1],
        verify_first=len(frame) % 16 == 0,
        **how,
    )
    assert out.tobytes() == values
    return values


def check_sums(frames, dtype, n, op="mean", **how):
    """Check that accumulate and reduce compute the same sums with all engines."""

    def accumulate(engine):
        total = misaligned(np.linspace(-1, 1, n, dtype=F32))
        for i, frame in enumerate(frames):
            flatcall.accumulate(frame, total, 0.3 * i - 1, engine=engine, **how)
        return unify_nan(total)

    if dtype in LOSSY_DTYPES:
        agreed(accumulate)
        agreed(lambda engine: unify_nan(flatcall.reduce(frames, op, engine=engine, **how)))


def check_engines(draw):
    """Compare the engines for a tensor, spec and arguments that Hypothesis draws."""
    name = draw(st.sampled_from(sorted(SPECS)))
    spec = SPECS[name]
    dtype = draw(st.sampled_from(dtypes_of(spec)))
    n = draw(st.integers(0, 600) | st.sampled_from([2559, 4097, 8192, 16384, 16385, 33000, 60000]))
    seed, kind, finite = draw(st.integers(0, 1 << 20)), draw(st.sampled_from(KINDS)), draw(st.integers(0, 3)) > 0
    x = sample_bits(dtype, n, kind, seed, draw(st.integers(0, 4)), finite)
    if draw(st.booleans()):
        columns = draw(st.sampled_from([1, 7, 64, 100, 1030]))
        x = x[: n // columns * columns].reshape(-1, columns)
        n = x.size
    how = level_arguments(spec, n, seed % 7, draw(st.sampled_from(["sgd", "adamw", "groups"])))
    levels = how
    threads = {"threads": draw(st.sampled_from([1, 2, 5]))}
    if draw(st.booleans()):
        cut = draw(st.integers(0, n))
        how = {**how, "segments": [(0, (cut // 70, 70)), (cut // 70 * 70, (n - cut,))]}
    left, feedback = None, False
    if draw(st.booleans()):
        left = (np.random.default_rng(seed).standard_normal(x.shape) * 1e-2).astype(F32)
        feedback = draw(st.booleans()) and not isinstance(spec, codec.Lossless)
        if left.size and draw(st.integers(0, 9)) == 0:
            left.reshape(-1)[n // 2] = np.nan if feedback else np.inf
    stream = draw(st.integers(0, 1 << 40))
    frame = check_encode(x, spec, dtype, left, feedback=feedback, stream=stream, **threads, **how)
    if isinstance(frame, bytes):
        if isinstance(spec, codec.Lossless):
            assert check_decode(frame, dtype, x.shape, **threads) == x.tobytes()
        else:
            check_decode(frame, dtype, x.shape, **threads, **levels)
        again = flatcall.encode(x, spec, dtype=dtype, stream=stream + 1, **how)
        frames = [frame, again, frame][: draw(st.integers(1, 3))]
        total = np.linspace(-1, 1, n, dtype=F32).reshape(x.shape)
        op = draw(st.sampled_from(["sum", "mean", "max"]))
        if dtype in LOSSY_DTYPES:
            agreed(lambda engine: unify_nan(flatcall.reduce(frames, op, engine=engine, **threads, **levels)))
            agreed(
                lambda engine: unify_nan(flatcall.accumulate(frames[-1], total.copy(), 0.7, engine=engine, **levels))
            )
