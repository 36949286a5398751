"""Delta in libcodec_cuda's C interface gives the frames, values and statuses of the native engine."""

import numpy as np
import pytest

import codec
from codec.errors import Status
from support import cuda_c, device, flatcall
from support.cuda_c import Decode, Encode
from support.format_cases import u64
from support.sample_frames import damage
from support.tensors import ALL_DTYPES, random_bits
from support.tiers import N_DAMAGED, every
from support.weights import frames_with_invalid_changes

SMALL = codec.Delta(1024)
VERIFY = 2  # CODEC_VERIFY_FIRST
BAD_SPEC, BAD_ARGUMENT = 11, 10


@pytest.fixture(scope="module")
def cuda():
    fake = cuda_c.driver(device.build()._name, str(cuda_c.kernels()))
    return cuda_c.Cuda(fake, cuda_c.library())


def pair(dtype, n, every_nth=40, seed=0):
    """Return bits of a base, and of a tensor in which every `every_nth` value differs by a small step."""
    base = random_bits(dtype, n, "normal", seed)
    new = base.copy()
    new[::every_nth] += base.dtype.type(1)
    new[3 :: 7 * every_nth] -= base.dtype.type(3)
    return base, new


def native_frame(base, new, dtype, spec=SMALL):
    return bytes(flatcall.encode(new, spec, dtype=dtype, base=base))


def native_status(frame, base):
    """Decode a frame in place by the native engine; return the values, or the status of the error."""
    weights = base.copy()
    try:
        return flatcall.decode(frame, base=weights, out=weights).tobytes()
    except codec.CodecError as e:
        return e.code


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_every_dtype(cuda, dtype):
    """Frames of every dtype equal the native engine's, and decode in place or not, with or without VERIFY_FIRST."""
    for n in every(2, (0, 1, 1025, 5000)):
        for nth in every(2, (1, 40, 10_000)):
            base, new = pair(dtype, n, nth)
            frame = native_frame(base, new, dtype)
            [(result, ours)] = cuda.encode(Encode(new, SMALL, dtype, base=base))
            assert (result, ours) == ((len(frame), 0, 0), frame)
            for flags in (0, VERIFY):
                [(result, back), (_, there)] = cuda.decode(
                    Decode(frame, SMALL, dtype, base.shape, base=base),
                    Decode(frame, SMALL, dtype, base.shape, before=base),
                    flags=flags,
                )
                assert result == (len(frame), 0, 0)
                assert back == there == new.tobytes()


def test_update_in_place_waits_for_the_verdict(cuda):
    """A decode in place with a wrong base, a second one, or one of a damaged frame leaves the tensor unchanged."""
    base, new = pair("bfloat16", 5000)
    frame = native_frame(base, new, "bfloat16")
    other = base.copy()
    other[4000] ^= 1
    for before, status in ((new, Status.ALREADY_APPLIED), (other, Status.OTHER_BASE)):
        [(result, back)] = cuda.decode(Decode(frame, SMALL, "bfloat16", base.shape, before=before), flags=VERIFY)
        assert result == (0, status, 0)
        assert back == before.tobytes()
    same = native_frame(base, base, "bfloat16")
    assert codec.inspect(same).nblocks == 0
    for before, status in ((base, 0), (other, Status.OTHER_BASE)):
        [(result, back)] = cuda.decode(Decode(same, SMALL, "bfloat16", base.shape, before=before), flags=VERIFY)
        assert result.status == status
        assert back == before.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int16"])
def test_hostile_frames(cuda, dtype):
    base, new = pair(dtype, 2500)
    frame = native_frame(base, new, dtype)
    rng = np.random.default_rng(len(frame))
    statuses = set()
    for _ in range(N_DAMAGED):
        mutant = damage(frame, rng)
        [(result, back)] = cuda.decode(Decode(mutant, SMALL, dtype, base.shape, before=base), flags=VERIFY)
        statuses.add(result.status)
        # Mismatches with the plan are reported before other errors
        if result.status not in (Status.SHAPE_MISMATCH, BAD_SPEC):
            assert native_status(mutant, base) == (result.status or back)
        assert not result.status or back == base.tobytes()
    assert len(statuses) > 3


def test_headers_of_other_block_sizes(cuda):
    """A frame with smaller blocks than the plan's is decoded; one with larger blocks is an error."""
    base, new = pair("bfloat16", 5000)
    small, large = (native_frame(base, new, "bfloat16", codec.Delta(size)) for size in (1024, 4096))
    for frame, spec, status in ((small, codec.Delta(4096), 0), (large, codec.Delta(1024), BAD_SPEC)):
        [(result, back)] = cuda.decode(Decode(frame, spec, "bfloat16", base.shape, base=base))
        assert result.status == status
        assert status or back == new.tobytes()


def test_arguments(cuda):
    base, new = pair("float32", 3000)
    for asked, call in (
        (Encode(new, SMALL, "float32"), cuda.encode),
        (Encode(new, SMALL, "float32", base=base, residual=np.zeros(3000, np.float32)), cuda.encode),
        (Decode(native_frame(base, new, "float32"), SMALL, "float32", base.shape, base=base, into=1), cuda.decode),
    ):
        with pytest.raises(cuda_c.Failed) as e:
            call(asked)
        assert e.value.status in (Status.MISSING_BASE, BAD_ARGUMENT)


def test_digests_of_frames_without_blocks_are_equal(cuda):
    base, _ = pair("bfloat16", 100)
    frame = bytearray(native_frame(base, base, "bfloat16"))
    frame[-8:] = u64(7)
    [(result, _)] = cuda.decode(Decode(bytes(frame), SMALL, "bfloat16", base.shape, base=base))
    assert result.status == native_status(bytes(frame), base) == Status.BAD_SIDE


@pytest.mark.parametrize("flags", [0, VERIFY])
def test_first_error_is_reported(cuda, flags):
    for frame, base, status in frames_with_invalid_changes():
        [(result, _)] = cuda.decode(Decode(frame, SMALL, "bfloat16", base.shape, before=base), flags=flags)
        assert result.status == status
