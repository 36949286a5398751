"""libcodec_cuda decodes golden, damaged, truncated and hand-made frames as the native engine does."""

import numpy as np
import pytest

import codec
from codec._c.library import ITEMSIZE
from codec.errors import Status
from support.cuda_c import Decode
from support.cuda_c_calls import BAD_SPEC, MISMATCH, SLACK, USABLE, VERIFY, native_frame, values
from support.format_cases import HAND_MADE
from support.frame_builder import recompute_checksums
from support.golden_frames import GOLDEN, GOLDEN_FRAMES, golden_tensor
from support.sample_frames import FRAMES_TO_DAMAGE, damage
from support.tiers import N_DAMAGED, every

F32 = np.float32


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames(cuda, name):
    frame = GOLDEN_FRAMES[name]
    info = codec.inspect(frame)
    if info.codebook_id:
        expected = int(Status.UNKNOWN_CODEBOOK)
    elif getattr(info.spec, "level_coding", "") == "shared" and info.nblocks:
        expected = int(Status.MISSING_STATE)
    else:
        expected = 0
    spec = info.spec if expected != Status.MISSING_STATE else codec.Truncate(0)
    base = golden_tensor(name)[2].get("base")
    [(result, back)] = cuda.decode(Decode(frame, spec, info.dtype, info.shape, base=base))
    assert result.status == expected
    if not expected:
        assert back == codec.decode(frame, like=np.empty(0, f"u{ITEMSIZE[info.dtype]}"), base=base).tobytes()


def native_outcome(frame, dtype):
    """Return the native engine's values, or its status."""
    try:
        return np.ascontiguousarray(codec.decode(frame, like=np.empty(0, f"u{ITEMSIZE[dtype]}"))).tobytes()
    except codec.CodecError as e:
        return e.code


def is_like(frame, spec, dtype, shape):
    """Return True if a frame's header has the given codec, dtype, shape and use of an entropy stage."""
    try:
        info = codec.inspect(frame)
    except codec.CodecError:
        return False
    entropy = [getattr(s, "entropy", getattr(s, "packing", "") == "entropy") for s in (info.spec, spec)]
    return (type(info.spec), info.dtype, info.shape) == (type(spec), dtype, shape) and entropy[0] == entropy[1]


def check_outcome(cuda, frame, spec, dtype, shape, flags=0):
    """Check that a frame has the outcome of the native engine, and return the status."""
    before = np.full(shape, 0xA5, f"u{ITEMSIZE[dtype]}")
    [(result, back)] = cuda.decode(Decode(frame, spec, dtype, shape, before=before), flags=flags)
    if result.status in MISMATCH:  # mismatches with the plan are reported before other errors
        assert not is_like(frame, spec, dtype, shape)
    else:
        assert native_outcome(frame, dtype) == (result.status or back)
    if result.status and flags & VERIFY:
        assert back == before.tobytes()
    return result.status


@pytest.mark.parametrize("name", FRAMES_TO_DAMAGE)
def test_hostile_frames(cuda, name):
    """Damaged frames give the native engine's values or status; with VERIFY_FIRST errors leave the tensor unchanged."""
    frame = FRAMES_TO_DAMAGE[name][0]
    info = codec.inspect(frame)
    if getattr(info.spec, "level_coding", "") == "shared":
        return
    rng = np.random.default_rng(sorted(FRAMES_TO_DAMAGE).index(name))
    statuses = [
        check_outcome(cuda, damage(frame, rng), info.spec, info.dtype, info.shape, flags)
        for flags in (0, VERIFY)
        for _ in range(N_DAMAGED // 4)
    ]
    assert any(statuses)


@pytest.mark.parametrize("name", ["model", "parts", "float8_entropy", "uint8-1500-sparse", "sign_two_mean"])
def test_every_damaged_byte_of_headers_and_side_sections(cuda, name):
    """Each damaged byte gives the native status, also with checksums recomputed so that later checks are reached."""
    frame = FRAMES_TO_DAMAGE[name][0]
    info = codec.inspect(frame)
    rng = np.random.default_rng(0)
    for i in every(3, range(48 + 8 * len(info.shape) + int.from_bytes(frame[12:16], "little"))):
        mutant = bytearray(frame)
        mutant[i] ^= 1 << int(rng.integers(8))
        recomputed = recompute_checksums(bytes(mutant))
        check_outcome(cuda, bytes(mutant) if recomputed is None else recomputed, info.spec, info.dtype, info.shape)


@pytest.mark.parametrize("name", [*GOLDEN][::11])
def test_truncated_frames(cuda, name):
    frame = GOLDEN_FRAMES[name]
    info = codec.inspect(frame)
    for n in (0, 3, 4, 47, 48, 60, len(frame) // 2, len(frame) - 1):
        [(result, _)] = cuda.decode(Decode(frame[:n], codec.Lossless(), info.dtype, info.shape))
        assert result.status in (Status.TRUNCATED, BAD_SPEC), n  # BAD_SPEC: the frame's codec is not the plan's
        assert result.nbytes == 0


@pytest.mark.parametrize("case", HAND_MADE)
def test_frames_made_by_hand(cuda, case):
    """Hand-made frames decode to the native engine's values, or give its status."""

    def compared(frame, **how):
        if how:  # decoding needs optimizer state, which the C interface does not accept
            return None
        try:
            info = codec.inspect(frame)
        except codec.CodecError:
            return dict.fromkeys((1, 4))
        status = Status.MISSING_STATE
        if getattr(info.spec, "level_coding", "") != "shared":
            status = check_outcome(cuda, frame, info.spec, info.dtype, info.shape)
        return dict.fromkeys((1, 4), None if status else native_outcome(frame, info.dtype))

    check, *arguments = HAND_MADE[case]
    if "shared" not in case and "state" not in case:
        check(compared, *arguments)


@pytest.mark.parametrize("name", ["quantize_4", "ternary_2bit", "truncate_fixed", "lossless"])
def test_decoding_into_float32(cuda, name):
    spec = USABLE[name]
    x, before = values((30, 700), "bfloat16"), values((30, 700), seed=5).view(F32)
    frame = native_frame(x, spec, "bfloat16")
    plain = codec.decode(frame, like=np.empty(0, np.uint16)).astype(np.uint32) << 16
    plain = plain.view(F32)
    for into, weight, divide, expected in (
        (1, 0.5, 0, before + F32(0.5) * plain),
        (2, 1, 0, np.maximum(before, plain)),
        (3, 1, 0, plain),
        (3, 1, 3, plain / F32(3)),
    ):
        asked = Decode(frame, spec, "bfloat16", x.shape, before=before.copy(), into=into, weight=weight, divide=divide)
        [(result, back)] = cuda.decode(asked, flags=VERIFY)
        assert result.status == 0
        assert (np.frombuffer(back, F32) == expected.reshape(-1)).all(), into


def test_size_of_the_frame_on_the_device(cuda):
    """A frame in a larger buffer is decoded if the device reads its size, or if trailing bytes are allowed."""
    x, spec = values((30, 700)), codec.Lossless()
    frame = native_frame(x, spec, "float32")
    [(result, back)] = cuda.decode(Decode(frame, spec, "float32", x.shape, sized=True))
    assert (result, back) == ((len(frame), 0, 0), x.tobytes())
    longer = Decode(frame + bytes(64), spec, "float32", x.shape)
    [(result, _)] = cuda.decode(longer)
    assert result == (0, Status.TRAILING, 0)
    [(result, back)] = cuda.decode(longer, flags=SLACK)
    assert (result, back) == ((len(frame), 0, 0), x.tobytes())
    short = Decode(frame, spec, "float32", x.shape, sized=True)
    short.nbytes.bytes[:] = 255  # the size on the device exceeds frame_nbytes
    [(result, _)] = cuda.decode(short)
    assert result == (0, Status.TRUNCATED, 0)


def test_frames_of_other_tensors_are_rejected(cuda):
    frame = native_frame(values((30, 700)), codec.Quantize(4), "float32")
    for spec, dtype, shape, status in (
        (codec.Quantize(4), "float32", (30, 701), Status.SHAPE_MISMATCH),
        (codec.Quantize(4), "float32", (21_000,), Status.SHAPE_MISMATCH),
        (codec.Quantize(4), "float16", (30, 700), Status.SHAPE_MISMATCH),
        (codec.Float8(), "float32", (30, 700), BAD_SPEC),
        (codec.Quantize(8, 100), "float32", (30, 700), 0),  # decoding uses the frame's parameters, not the plan's
    ):
        [(result, _)] = cuda.decode(Decode(frame, spec, dtype, shape))
        assert result.status == status
    frame = native_frame(values((30, 700)), codec.Float8(entropy=True), "float32")
    [(result, _)] = cuda.decode(Decode(frame, codec.Float8(), "float32", (30, 700)))
    assert result.status == BAD_SPEC
