"""Errors leave outputs, residuals, tensors and state unchanged, for every codec, error, call and thread count."""

import subprocess
import sys

import numpy as np
import pytest

import codec
from codec._c.library import isas, use_isa
from support import flatcall
from support.frame_builder import recompute_checksums
from support.specs import LOSSY, TOPKS, TRUNCATES

N = 120_003  # number of values: several blocks, the last one with padding
THREADS = [1, 4]
SPECS = {"lossless": codec.Lossless(), **LOSSY, **TOPKS, **TRUNCATES}
SGD = codec.optimizers.SGD(1 / 10)


def values(seed=0, n=N):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) * np.exp(rng.standard_normal(n))).astype(np.float32) * np.float32(1e-3)


PYTHON = [sys.executable, "-P", "-c"]
X, THETA = values(), values(1)
OTHER = THETA.copy()
OTHER[-1] *= 1024  # another state, whose digest differs in the last block


def how(spec, theta=THETA):
    """Return the arguments that a spec needs besides the tensor."""
    if isinstance(spec, codec.Truncate) and spec.fixed_level is None:
        return {"optimizer": SGD, "state": {"theta": theta}}
    return {}


def damaged_last_block(frame):
    """Return the frame with an invalid last block but valid checksums; None if any bytes are valid there."""
    info = codec.inspect(frame)
    begin = info.sections["directory"][0] + 8 * (info.nblocks - 2)
    start = 8 * int.from_bytes(frame[begin : begin + 4], "little")
    places = [*range(start, start + 8), *range(len(frame) - 1, len(frame) - 9, -1), (start + len(frame)) // 2]
    for at in places:
        for byte in (0xFF, 0x80, 0x01):
            mutant = bytearray(frame)
            mutant[at] ^= byte
            valid = recompute_checksums(mutant)
            try:
                flatcall.decode(valid, **how(info.spec))
            except codec.ChecksumError as e:
                raise AssertionError("recompute_checksums() did not") from e
            except (codec.FrameError, codec.StateError):
                return valid
    return None


FRAMES = {name: bytes(flatcall.encode(X, spec, **how(spec))) for name, spec in SPECS.items()}
DAMAGED = {name: damaged_last_block(frame) for name, frame in FRAMES.items()}


def test_every_codec_has_an_invalid_last_block():
    """For every codec, a frame with an invalid last block exists, so the tests of this file cover all codecs."""
    assert not [name for name, frame in DAMAGED.items() if frame is None]


def bad_frames(name):
    """Yield faulty frames: name of the fault, the frame's bytes, and arguments to change."""
    frame, spec = FRAMES[name], SPECS[name]

    def flipped(i):
        out = bytearray(frame)
        out[i] ^= 1
        return bytes(out)

    yield "cut off", frame[:-1], {}
    yield "bytes behind it", frame + b"\0", {}
    yield "a shape that is damaged", flipped(48), {}
    yield "a first block that is damaged", flipped(codec.inspect(frame).sections["regions"][0]), {}
    yield "a last byte that is damaged", flipped(len(frame) - 1), {}
    yield "a checksum that is damaged", flipped(24), {}
    yield "a last block that makes no sense", DAMAGED[name], {}
    if isinstance(spec, codec.Truncate) and spec.level_coding == "shared":
        yield "made with another state", frame, how(spec, OTHER)
        yield "no state", frame, {"optimizer": None, "state": None}


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("name", SPECS)
def test_decoding_errors_change_nothing(name, threads):
    """decode(out=), accumulate and reduce(out=) leave `out` and the state unchanged."""
    good, spec = FRAMES[name], SPECS[name]
    stored = codec.encode(X, codec.Lossless(model="flat")) if name == "lossless" else good
    for what, frame, other in bad_frames(name):
        keywords = {**how(spec), **other, "threads": threads}
        state = (keywords.get("state") or {}).get("theta")
        before = None if state is None else state.copy()
        out = np.full(N, 7, np.float32)
        for call, given in (
            (flatcall.decode, [frame]),
            (flatcall.accumulate, [frame]),
            (flatcall.reduce, [[frame, good]]),
            (flatcall.reduce, [[good, frame]]),
            (flatcall.reduce, [[good, stored, frame], "max"]),
        ):
            with pytest.raises((codec.FrameError, codec.StateError)) as caught:
                call(*given, out=out, **keywords)
            assert (out == 7).all(), what
            if what.endswith("damaged"):
                assert isinstance(caught.value, codec.FrameError), what
            with pytest.raises((codec.FrameError, codec.StateError)) as unchecked:
                call(*given, out=np.zeros(N, np.float32), verify_first=False, **keywords)
            assert (unchecked.type, unchecked.value.code) == (caught.type, caught.value.code), what
        if state is not None:
            assert (state == before).all(), what


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("name", SPECS)
def test_one_pass_decoding_gives_the_same_values(name, threads):
    """verify_first=False gives the same values for valid frames."""
    frame, keywords = FRAMES[name], {**how(SPECS[name]), "threads": threads}
    for call, given in (
        (flatcall.decode, [frame]),
        (flatcall.accumulate, [frame]),
        (flatcall.reduce, [[frame, frame]]),
    ):
        a, b = np.full(N, 7, np.float32), np.full(N, 7, np.float32)
        call(*given, out=a, **keywords)
        call(*given, out=b, verify_first=False, **keywords)
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("small", [100, 5000])
def test_reduce_checks_all_frames_before_it_writes(small, threads):
    """reduce() checks all frames before it writes, also if frames have different blocks."""
    x = values(2, small)
    noise = np.random.default_rng(3).integers(0, 2**31, small, dtype=np.int32).view(np.float32)
    noise[~np.isfinite(noise)] = 1
    first, second = bytes(codec.encode(noise)), bytearray(codec.encode(x, codec.Sign()))
    second[-1] ^= 1
    out = np.full(small, 7, np.float32)
    for frames in ((first, second), (second, first), (first, bytes(second)[:-8], first)):
        with pytest.raises(codec.FrameError):
            codec.reduce(frames, out=out, options=codec.options(threads=threads))
        assert (out == 7).all()


@pytest.mark.parametrize("name", [*SPECS])
def test_errors_do_not_depend_on_threads(name):
    """Errors report the lowest faulty block, for any thread count, instruction set and destination."""
    frame, keywords = bytearray(DAMAGED[name]), how(SPECS[name])
    info = codec.inspect(bytes(frame))
    entries = info.sections["directory"][0]
    ends = [8 * int.from_bytes(frame[entries + 8 * b :][:4], "little") for b in range(info.nblocks)]
    both = bytearray(frame)
    both[ends[0]] ^= 1  # block 1 has a wrong checksum, and the last block is invalid
    later = bytearray(recompute_checksums(bytes(both)) or b"")
    variants = [bytes(frame), bytes(both)]
    if later:
        later[ends[-2]] ^= 2  # block 1 may be invalid, and the last block has a wrong checksum
        variants.append(bytes(later))
    for bad in variants:
        seen = set()
        for isa in isas():
            with use_isa(isa):
                for threads in (1, 2, 3, 8):
                    for kind in ({}, {"out": np.empty(N, np.float32)}):
                        with pytest.raises((codec.FrameError, codec.StateError)) as caught:
                            flatcall.decode(bad, threads=threads, **keywords, **kind)
                        seen.add((type(caught.value), str(caught.value)))
        assert len(seen) == 1, seen


def test_damage_is_reported_before_a_wrong_state():
    """Damage is reported before a wrong state, because a flipped bit in the guard would require other levels."""
    spec = TRUNCATES["truncate_bit"]
    frame = bytearray(FRAMES["truncate_bit"])
    frame[36] ^= 1
    for threads in THREADS:
        with pytest.raises(codec.ChecksumError):
            flatcall.decode(frame, **how(spec, OTHER[::-1].copy()), threads=threads)


def encode_errors(name):
    """Yield encoding errors that are detected late: name, tensor, spec and keyword arguments."""
    spec = SPECS[name]
    size = len(FRAMES[name])
    for capacity in (0, 50, size // 2, size - 8, size - 1):
        yield f"{capacity} bytes of {size}", X.copy(), spec, {"out": np.zeros(capacity, np.uint8)}
    if name in LOSSY | TOPKS and not (isinstance(spec, codec.Float8) and spec.nonfinite == "propagate"):
        for bad in (np.nan, np.inf):
            x = X.copy()
            x[-1] = bad
            yield f"{bad} at the end", x, spec, {}
    yield "segments that overlap", X.copy(), spec, {"segments": [(0, (N,)), (N - 1, (1,))]}
    if isinstance(spec, codec.Ternary) and spec.clip is None:
        x = X.copy()
        x[-1] = 1e3
        yield "a value above the scale", x, codec.Ternary(spec.packing, scale=1.0), {}


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("name", SPECS)
def test_encoding_errors_change_nothing(name, threads):
    """Encoding errors change neither the residual, in place or not, nor the tensor or the state."""
    for what, x, spec, other in encode_errors(name):
        keywords = {**how(spec), **other, "threads": threads}
        before, residual, theta = x.tobytes(), np.full(N, 7, np.float32), THETA.tobytes()
        for r in (residual, x):
            with pytest.raises(codec.SpecError if "scale" in what else codec.ArgumentError):
                flatcall.encode(x, spec, residual=r, **keywords)
            assert x.tobytes() == before, what
            assert (residual == 7).all(), what
            assert THETA.tobytes() == theta


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("name", SPECS)
def test_residual_is_written_when_the_frame_just_fits(name, threads):
    """If a frame fits only because of the entropy stage, the residual is still written, in place too."""
    spec, frame = SPECS[name], FRAMES[name]
    keywords = {**how(spec), "threads": threads}
    expected = X - flatcall.decode(frame, **how(spec))
    for in_place in (False, True):
        x = X.copy()
        r = x if in_place else np.full(N, 7, np.float32)
        out = np.zeros(len(frame), np.uint8)
        assert flatcall.encode(x, spec, residual=r, out=out, **keywords) == frame
        assert r.tobytes() == expected.tobytes() or name == "lossless"
        assert (r == expected).all()


def test_bound_holds_with_segments():
    """With any segments, no frame exceeds bound(), and an `out` of that size is always accepted."""
    rng = np.random.default_rng(0)
    for n in (1, 2, 63, 64, 1000, 4095, 4096, 4097, 20_000):
        x = rng.standard_normal(n).astype(np.float32)
        for spec in [*LOSSY.values(), codec.Sign("two_mean", 1), codec.Float8(group_size=1), codec.Quantize(1, 1)]:
            room = codec.bound(n, "float32", spec)
            for segments in (None, [(0, (n,))], [(n - 1, (1,))], [(0, (n // 2,)), (n // 2, (n - n // 2,))], [(0, ())]):
                out = np.zeros(room, np.uint8)
                assert (
                    len(codec.encode(codec.view(x, segments=segments), spec, out=out, residual=np.empty_like(x)))
                    <= room
                )


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "float16"])
@pytest.mark.parametrize("n", [10, 1000, 5000, 100_000])
def test_wrong_segments_are_rejected_for_every_dtype_and_size(dtype, n):
    """Invalid segments are rejected also for small tensors and integers, whose encoding ignores segments."""
    x = np.ones(n, dtype)
    for segments in ([(0, (n + 1,))], [(1, (n,))], [(5, (2,)), (0, (2,))], [(0, (3,)), (2, (2,))], [(n + 1, (0,))]):
        with pytest.raises(codec.ArgumentError, match="segments"):
            codec.encode(codec.view(x, segments=segments))


def test_damaged_frame_allocates_less_than_a_megabyte():
    """A frame that declares 0.5 GB of zeros and is damaged in its last block allocates less than a megabyte."""
    code = """
import ctypes
import numpy as np, codec
PR_SET_THP_DISABLE = 41  # with huge pages, one byte written to a large mapping counts as 2 MB
assert ctypes.CDLL(None, use_errno=True).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
one = codec.options(threads=1)
frame = bytearray(codec.encode(np.zeros(1 << 27, np.float32), codec.Ternary("entropy"), options=one))
frame[-1] ^= 1
codec.decode(codec.encode(np.ones(100_000, np.float32)), options=one)
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")
peak = lambda: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
start = peak()
for threads in (1, 2):
    try:
        codec.decode(bytes(frame), options=codec.options(threads=threads))
    except codec.ChecksumError:
        print(peak() - start)
"""
    done = subprocess.run([*PYTHON, code], capture_output=True, check=True, text=True)
    grown = [int(line) for line in done.stdout.split()]
    assert len(grown) == 2
    assert max(grown) < 1 << 10, grown  # KiB by which peak memory grew
