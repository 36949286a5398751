"""The CUDA kernels on the CPU: the bytes, the values and the errors of the native engine."""

import hashlib
import os

import numpy as np
import pytest
import test_lossy
import test_numba
import test_page
import test_truncate
import test_vectors
from conftest import ALL_DTYPES, KINDS, LOSSY, TRUNCATES, make
from device import (
    ADD,
    FLOAT32,
    MAXIMUM,
    Fault,
    build,
    decode,
    encode,
)

import codec
from codec import metrics
from codec.core import ITEMSIZE
from codec.errors import Status

F32 = np.float32
HALVES = ("float32", "bfloat16", "float16")
ROWS = {name: spec for name, spec in (LOSSY | test_numba.MORE).items() if not isinstance(spec, codec.Truncate)}


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("cuda"), options=os.environ.get("CUDA_ON_CPU_FLAGS", "").split())


def like(dtype):
    return np.empty(0, f"u{ITEMSIZE[dtype]}")


def expected(frame, dtype, **how):
    """By the native engine: values, or an error's code."""
    try:
        return codec.decode(frame, like=like(dtype), **how).tobytes()
    except codec.CodecError as e:
        return e.code


def found(library, frame, **how):
    try:
        return decode(library, frame, **how)
    except Fault as e:
        return e.status
    except codec.CodecError as e:
        return e.code


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_lossless(dtype, kind, library):
    for n in (512, 513, 9001):
        x = make(dtype, n, kind)
        frame = bytes(codec.encode(x, dtype=dtype))
        assert encode(library, x, codec.Lossless(), dtype) == frame
        assert decode(library, frame) == x.tobytes()
        decode(library, frame, stores=False)


@pytest.mark.parametrize("shape", [(1100, 64), (1030, 601), (3, 150, 133), (300_000,)])
@pytest.mark.parametrize("dtype", ["float64", *HALVES])
def test_scale_models(dtype, shape, library):
    x = make(dtype, int(np.prod(shape)), "normal").reshape(shape)
    for model in ("separable", "flat"):
        frame = bytes(codec.encode(x, codec.Lossless(model=model), dtype=dtype))
        assert encode(library, x, codec.Lossless(model=model), dtype, grid=3) == frame
        assert decode(library, frame, grid=5) == x.tobytes()


@pytest.mark.parametrize("name", ROWS)
def test_rows(name, library):
    for dtype in HALVES:
        for n in (1, 5, 63, 64, 100, 513, 17_001):
            x = test_numba.tensor(dtype, n, "normal", odd=0 if "scale" in name else 3)
            frame = bytes(codec.encode(x, ROWS[name], dtype=dtype))
            assert encode(library, x, ROWS[name], dtype) == frame, (dtype, n)
            assert decode(library, frame) == expected(frame, dtype), (dtype, n)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TRUNCATES)
def test_cut_mantissas(name, kind, library):
    for dtype in HALVES:
        for n in (513, 20_001) if kind == "mixed" else (513,):
            x = make(dtype, n, kind)
            how = test_numba.levels_by(TRUNCATES[name], n)
            frame = bytes(codec.encode(x, TRUNCATES[name], dtype=dtype, **how))
            assert encode(library, x, TRUNCATES[name], dtype, **how) == frame, (dtype, n)
            given = how if TRUNCATES[name].levels == "shared" else {}
            assert decode(library, frame, **how) == expected(frame, dtype, **given), (dtype, n)


BUCKET = [(0, (100, 90)), (9000, (130, 80)), (19_400, (7,)), (19_407, (5000,)), (25_000, (70, 1030))]


@pytest.mark.parametrize("name", ["lossless", *ROWS, *TRUNCATES])
def test_segments(name, library):
    """Parts of a bucket: models, rows and scales of their own."""
    spec = (test_numba.SPECS | ROWS)[name]
    for dtype in HALVES if name == "lossless" else [HALVES[len(name) % 3]]:
        x = test_numba.tensor(dtype, 100_000, "normal")
        how = test_numba.levels_by(spec, len(x))
        for segments in (BUCKET, BUCKET[1:]) if name == "lossless" else (BUCKET,):
            frame = bytes(codec.encode(x, spec, dtype=dtype, segments=segments, **how))
            ours = encode(library, x, spec, dtype, segments=segments, grid=3, **how)
            assert ours == frame, dtype


@pytest.mark.parametrize("dtype", ["float64", *HALVES])
def test_large_tensors(dtype, library):
    """Of one part whose best eighth of an octave is looked for, and of many."""
    n = 540_001
    x = make(dtype, n, "normal")
    y = np.where(np.arange(n) % 3 == 0, x.view(f"u{ITEMSIZE[dtype]}"), 0).astype(x.dtype)
    bucket = [(i * 9000 + i, (100, 90)) for i in range(50)]
    for values in (x, y):
        for model in ("auto", "flat"):
            for segments in (None, bucket) if model == "auto" else (None,):
                spec, how = codec.Lossless(model=model), {} if segments is None else {"segments": segments}
                frame = bytes(codec.encode(values, spec, dtype=dtype, **how))
                assert encode(library, values, spec, dtype, grid=5, **how) == frame, (model, segments is None)


def test_codebooks(library):
    """One that is agreed upon."""
    x, far = test_numba.tensor("float32", 30_000, "normal"), test_numba.tensor("float32", 30_000, "wide", 3)
    for spec in (codec.Lossless(), codec.Lossless(model="flat"), codec.Truncate(1), TRUNCATES["truncate_coded"]):
        how = test_numba.levels_by(spec, len(x))
        book = codec.Codebook.from_tensors(x.view(F32), spec=spec, **how)
        for y in (x, far, x[:600]):
            how = test_numba.levels_by(spec, len(y))
            frame = bytes(codec.encode(y, spec, dtype="float32", codebook=book, **how))
            assert encode(library, y, spec, "float32", codebook=book, **how) == frame


@pytest.mark.parametrize("name", [*ROWS, *TRUNCATES])
def test_what_is_lost(name, library):
    """Without feedback and with it; of tensors that are stored, too; and untouched where encoding fails."""
    spec = (ROWS | TRUNCATES)[name]
    for dtype in HALVES:
        for n in (300, 5001):
            x = test_numba.tensor(dtype, n, "normal", odd=0 if "scale" in name else 3)
            how = test_numba.levels_by(spec, n)
            left, ours = (np.full(n, 1e-3, F32) for _ in range(2))
            for feedback in (False, True):
                asked = {"feedback": feedback, **how}
                try:
                    frame = bytes(codec.encode(x, spec, dtype=dtype, residual=left, **asked))
                except codec.CodecError as e:
                    with pytest.raises(Fault) as fault:
                        encode(library, x, spec, dtype, residual=ours, **asked)
                    assert fault.value.status == e.code  # noqa: PT017
                else:
                    assert encode(library, x, spec, dtype, residual=ours, **asked) == frame, (dtype, n, feedback)
                assert ours.tobytes() == left.tobytes(), (dtype, n, feedback)


@pytest.mark.parametrize("dtype", HALVES)
def test_metrics(dtype, library):
    """Groups of parameters with metrics of their own, states of any dtype; levels that are given."""
    n, sgd, adamw = 30_000, metrics.SGD(0.1), test_truncate.ADAMW
    x = test_truncate.gradient(n, dtype=dtype)
    arrays = test_truncate.state(n)
    arrays["theta"][100:109] = 0, -0.0, np.inf, np.nan, 1e-40, 3e38, -3e38, 1e-45, -np.inf
    with np.errstate(over="ignore"):
        halves = {k: a.astype(np.float16) for k, a in arrays.items()}
    brains = {k: a.astype(test_lossy.HALVES["bfloat16"]) for k, a in arrays.items()}
    groups = [(0, adamw), (1, sgd), (9_999, adamw), (29_999, sgd), (50_000, sgd)]
    for state in (arrays, halves, brains):
        for metric in (sgd, adamw, metrics.Momentum(0.1, momentum=0.9), metrics.SGD(0.1, maximize=True), groups):
            how = {"metric": metric, "state": state}
            frame = bytes(codec.encode(x, codec.Truncate(), **how))
            assert encode(library, x, codec.Truncate(), dtype, **how) == frame
    levels = np.random.default_rng(3).integers(0, 4, n, np.uint8)
    frame = bytes(codec.encode(x, TRUNCATES["truncate_plane"], metric=levels))
    assert encode(library, x, TRUNCATES["truncate_plane"], dtype, metric=levels) == frame
    levels[-1] = 4
    with pytest.raises(Fault) as fault:
        encode(library, x, TRUNCATES["truncate_plane"], dtype, metric=levels)
    assert fault.value.status == Status.BAD_ARGUMENT


def test_few_values(library):
    for name, spec in (test_numba.SPECS | ROWS).items():
        for n in (0, 1, 2, 7, 511):
            x = test_numba.tensor("bfloat16", n, "normal")
            how = test_numba.levels_by(spec, n)
            frame = bytes(codec.encode(x, spec, dtype="bfloat16", **how))
            assert encode(library, x, spec, "bfloat16", **how) == frame, (name, n)


def test_rows_of_few_values(library):
    """Whose scales take more than their codes."""
    x = test_numba.tensor("float32", 17_000, "normal").view(F32)
    for row in (1, 3, 100):
        for spec in (codec.Float8(row=row, entropy=True), codec.Float8(row=row), codec.Quantize(2, row)):
            frame = bytes(codec.encode(x, spec, stream=1 << 40))
            assert encode(library, x, spec, "float32", stream=1 << 40) == frame, (row, spec)


def test_what_cannot_be_encoded(library):
    """The same errors; a tensor that needs more room than there is is stored, if there is as much."""
    x = test_numba.tensor("float32", 100_000, "normal").view(F32)
    nan, inf = x.copy(), x.copy()
    nan[70_000], inf[99_999] = np.nan, np.inf

    def outcome(call):
        try:
            return bytes(call())
        except codec.CodecError as e:
            return e.code
        except Fault as e:
            return e.status

    for spec in ROWS.values():
        for bad in (nan, inf):
            native, ours = (
                outcome(call)
                for call in (lambda: codec.encode(bad, spec), lambda: encode(library, bad, spec, "float32"))  # noqa: B023
            )
            assert ours == native, spec
    for packing in ("2bit", "entropy"):
        with pytest.raises(Fault) as fault:
            encode(library, x, codec.Ternary(packing, scale=float(np.abs(x).max()) / 2), "float32")
        assert fault.value.status == Status.BAD_SCALE
    for spec in (codec.Lossless(), codec.Quantize(), codec.Float8(entropy=True)):
        with pytest.raises(Fault) as fault:
            encode(library, x, spec, "float32", capacity=16_000)
        assert fault.value.status == Status.SHORT_OUTPUT
    noise = np.random.default_rng(5).integers(0, 1 << 32, 100_000, np.uint32).view(F32)
    noise[:60_000] = x[:60_000]
    frame = bytes(codec.encode(noise))
    for capacity in (len(frame), noise.nbytes + 56):
        assert encode(library, noise, codec.Lossless(), "float32", capacity=capacity) == frame


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("spec", [codec.Lossless(), codec.Float8(), codec.Quantize(3), codec.Truncate(1)], ids=repr)
def test_sums(spec, dtype, library):
    """What is added, compared and divided."""
    n = 20_001
    frames = [codec.encode(test_numba.tensor(dtype, n, seed=i), spec, dtype=dtype) for i in range(3)]
    total = np.linspace(-1, 1, n, dtype=F32)
    ours = total.copy()
    codec.accumulate(frames[0], total, 0.3)
    decode(library, frames[0], into=ADD, weight=0.3, out=ours)
    assert ours.tobytes() == total.tobytes()
    for op, into in (("mean", ADD), ("max", MAXIMUM)):
        for i, frame in enumerate(frames):
            divide = 3.0 if op == "mean" and i == 2 else 0.0
            decode(library, frame, into=into if i else FLOAT32, divide=divide, out=ours)
        assert ours.tobytes() == codec.reduce(frames, op).tobytes()


def test_blocks_at_once(tmp_path):
    """What blocks of threads wait for is written by others, which may run meanwhile, or not yet."""
    at_once = build(tmp_path, options=["-DCUDA_ON_CPU_WORKERS=4"])
    x = test_numba.tensor("bfloat16", 200_000, "normal")
    y = make("float64", 100_000, "normal")
    how = test_numba.levels_by(codec.Truncate(), len(x))
    cases = [(x, codec.Lossless(), "bfloat16", {}), (x, codec.Lossless(), "bfloat16", {"segments": BUCKET})]
    cases += [(y, codec.Lossless(), "float64", {}), (x, codec.Truncate(), "bfloat16", how)]
    cases += [(x, spec, "bfloat16", {}) for spec in (codec.Ternary("entropy"), codec.Sign(), codec.Float8())]
    for values, spec, dtype, given in cases:
        frame = bytes(codec.encode(values, spec, dtype=dtype, **given))
        for grid in (3, 7):
            assert encode(at_once, values, spec, dtype, grid=grid, **given) == frame, (spec, grid)
            assert decode(at_once, frame, grid=grid) == expected(frame, dtype), (spec, grid)


@pytest.mark.parametrize("order", ["down", "3", "17"])
def test_order_of_threads(order, library, monkeypatch):
    """Between collectives threads may run in any order."""
    monkeypatch.setenv("CUDA_ON_CPU_ORDER", order)
    for name, (frame, dtype, _, how) in test_numba.HOSTILE.items():
        assert found(library, frame, **how) == expected(frame, dtype, **how), name


@pytest.mark.parametrize("name", test_numba.GOLDEN)
def test_golden_frames(name, library):
    frame, about = test_numba.GOLDEN_FRAMES[name], test_numba.GOLDEN[name]
    _, _, how = test_vectors.tensor(name)
    if "codebook" not in how:
        values = decode(library, frame, **how)
        assert hashlib.sha256(values).hexdigest() == about.get("values_sha256", about["tensor_sha256"])


@pytest.mark.parametrize("name", test_numba.HOSTILE)
def test_hostile_frames(name, library):
    """The same tensor or the same error."""
    frame, dtype, _, how = test_numba.HOSTILE[name]
    rng = np.random.default_rng(sorted(test_numba.HOSTILE).index(name))
    refused = 0
    for _ in range(int(os.environ.get("CUDA_ON_CPU_FRAMES", test_numba.EACH))):
        mutant = test_numba.damage(frame, rng)
        native = expected(mutant, dtype, max_nbytes=1 << 24, **how)
        try:
            info = codec.inspect(mutant)
        except codec.CodecError:
            continue
        if native is None or info.nbytes > 1 << 24:
            continue
        ours = found(library, mutant, **how)
        assert ours == native
        refused += isinstance(ours, int)
    assert refused


@pytest.mark.parametrize("case", test_numba.BY_HAND)
def test_frames_made_by_hand(case, library, monkeypatch):
    """All that no encoder writes and the format allows or forbids."""

    def outcomes(frame, **how):
        dtype = codec.core.DTYPE_NAMES[frame[6]]
        given = {k: v for k, v in how.items() if k in ("metric", "state")}
        native, ours = expected(frame, dtype, **how), found(library, frame, **given)
        assert ours == native
        return dict.fromkeys((1, 4), ours if isinstance(ours, bytes) else None)

    test, *arguments = test_numba.BY_HAND[case]
    monkeypatch.setattr(test_page, "outcomes", outcomes)
    test(*arguments)
