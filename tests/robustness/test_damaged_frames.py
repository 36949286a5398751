"""Damaged and hostile frames decode to a tensor of the declared shape or are rejected, and change no memory."""

import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import codec
from codec._c.library import ITEMSIZE, isas, use_isa
from reference import decoder as oracle
from support import flatcall
from support.frame_builder import recompute_checksums
from support.sample_frames import SMALL_FRAMES, TRUNCATE_HOW
from support.specs import LOSSY, TOPKS
from support.tensors import ALL_DTYPES, KINDS, random_bits
from support.tiers import NIGHTLY, every

STORED = {"float32-100-normal"}


def test_samples_have_the_expected_layout():
    assert {name for name, (frame, _, _) in SMALL_FRAMES.items() if codec.inspect(frame).stored} == STORED


def decode_bits(frame, dtype, n, **kw):
    """Decode a sample frame to unsigned integers."""
    return flatcall.decode(frame, like=np.empty(0, f"u{ITEMSIZE[dtype]}"), **TRUNCATE_HOW if n == 600 else {}, **kw)


@pytest.mark.parametrize("name", SMALL_FRAMES)
def test_recomputed_checksums_of_a_whole_frame_are_unchanged(name):
    frame = SMALL_FRAMES[name][0]
    assert recompute_checksums(frame) == frame


@pytest.mark.parametrize("name", SMALL_FRAMES)
def test_every_truncation_is_rejected(name):
    frame, dtype, n = SMALL_FRAMES[name]
    for length in range(len(frame)):
        with pytest.raises(codec.FrameError) as caught:
            decode_bits(frame[:length], dtype, n)
        assert caught.value.code in range(30, 60)
        with pytest.raises(codec.FrameError):
            codec.verify(frame[:length])


@pytest.mark.parametrize("name", SMALL_FRAMES)
def test_every_flipped_bit_is_rejected(name):
    """A frame with one flipped bit in any byte (nightly: any bit) is rejected."""
    frame, dtype, n = SMALL_FRAMES[name]
    damaged, names = bytearray(frame), isas()
    for byte in range(len(frame)):
        for bit in range(8) if NIGHTLY else (byte * 5 % 8,):
            damaged[byte] ^= 1 << bit
            with use_isa(names[(byte + bit) % len(names)]):
                with pytest.raises(codec.FrameError):
                    decode_bits(damaged, dtype, n)
                with pytest.raises(codec.FrameError):
                    codec.verify(damaged)
            damaged[byte] ^= 1 << bit
    assert damaged == frame


@pytest.mark.parametrize("name", SMALL_FRAMES)
def test_verify_and_decode_report_the_same_error(name):
    frame, dtype, n = SMALL_FRAMES[name]
    for damaged in (frame[:-1], frame[:60], b"", frame + b"?", b"?" + frame[1:], frame[:-1] + bytes([frame[-1] ^ 1])):
        errors = []
        for call in (codec.verify, lambda f: decode_bits(f, dtype, n)):
            with pytest.raises(codec.FrameError) as caught:
                call(damaged)
            errors.append((str(caught.value), vars(caught.value)))
        assert errors[0] == errors[1]
        assert caught.value.expected


@pytest.mark.parametrize("name", SMALL_FRAMES)
def test_trailing_bytes_are_rejected(name):
    frame, dtype, n = SMALL_FRAMES[name]
    with pytest.raises(codec.FrameError, match="bytes follow the end of the frame"):
        decode_bits(frame + b"\0", dtype, n)


def check_mutant(frame, dtype, n):
    """Check that a mutant gives the reference decoder's tensor, or a FrameError if the reference rejects it."""
    try:
        # exponent field of A = theta / lr, with lr = 1/10
        expected = oracle.decode(
            frame, None, (TRUNCATE_HOW["state"]["theta"] * np.float32(10)).view(np.uint32) >> 23 & 255
        )
    except (oracle.Bad, struct.error, KeyError, OverflowError, MemoryError):
        expected = None
    results = []
    for isa in isas():
        with use_isa(isa):
            try:
                y = (
                    codec.decode(frame, max_nbytes=1 << 24, options=codec.options(threads=1))
                    if dtype is None
                    else decode_bits(frame, dtype, n)
                )
                results.append((y.shape, y.tobytes()))
            except (codec.FrameError, codec.StateError):
                results.append(None)
    assert all(r == results[0] for r in results)
    if results[0] is not None:
        assert results[0][0] == codec.inspect(frame).shape
    assert (expected is None) == (results[0] is None)
    if expected is not None:
        assert results[0] == (expected[1], expected[2])


@given(st.sampled_from(sorted(SMALL_FRAMES)), st.data())
def test_mutants_with_valid_checksums(name, data):
    """Mutants with recomputed checksums, which reach the checks of structure, are decoded safely."""
    frame, dtype, n = SMALL_FRAMES[name]
    mutant = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 3))):
        i = data.draw(st.integers(0, min(len(mutant) - 1, data.draw(st.sampled_from([48, 200, len(mutant) - 1])))))
        mutant[i] = data.draw(st.integers(0, 255))
    valid = recompute_checksums(mutant)
    if valid is not None and valid[6] == frame[6] and valid[7] == frame[7] and valid[48:56] == frame[48:56]:
        check_mutant(valid, dtype, n)


def test_changed_bytes_with_valid_checksums():
    """With any byte after the header changed and checksums valid, library and reference decoder agree."""
    for name in ("bfloat16-1000-mixed", "float64-600-mixed", "model"):
        frame, dtype, n = SMALL_FRAMES[name]
        info = codec.inspect(frame)
        begin, end = info.sections["side"][0], info.sections["regions"][0] + 400
        for i in every(11, range(begin, min(end, len(frame)), 3)):
            for value in (0, 1, 0x7F, 0xFF):
                mutant = bytearray(frame)
                mutant[i] = value
                valid = recompute_checksums(mutant)
                if valid is not None:
                    check_mutant(valid, dtype, n)


@given(st.binary(max_size=300))
def test_random_bytes_are_rejected(data):
    for frame in (data, SMALL_FRAMES["float32-520-normal"][0][:48] + data):
        with pytest.raises(codec.FrameError):
            codec.decode(frame)


def test_side_section_too_short_for_its_flags():
    """inspect() rejects a side section that is shorter than the flags and `coded` require."""
    frame = bytearray(SMALL_FRAMES["float64-600-mixed"][0])
    struct.pack_into("<I", frame, 12, 0)
    codec.inspect(bytes(frame))
    for length in range(56, len(frame)):
        codec.inspect(bytes(frame[:length]))
    with pytest.raises(codec.FrameError):
        codec.decode(frame)


def test_huge_declared_sizes_are_rejected_before_allocation():
    frame = bytearray(SMALL_FRAMES["float32-100-normal"][0])
    struct.pack_into("<Q", frame, 48, 1 << 50)
    struct.pack_into("<Q", frame, 16, 56 + (1 << 52))
    with pytest.raises(codec.FrameError):
        codec.decode(bytes(frame))
    frame = codec.encode(np.zeros(1 << 20, np.float32))
    with pytest.raises(codec.LimitError):
        codec.decode(frame, max_nbytes=(1 << 22) - 1)
    assert codec.decode(frame, max_nbytes=1 << 22).shape == (1 << 20,)


@pytest.mark.parametrize("threads", [1, 4])
def test_damage_leaves_out_unchanged(threads):
    x = random_bits("float32", 100_000, "normal").view(np.float32)
    frame = bytearray(codec.encode(x))
    frame[-10] ^= 1
    out = np.full_like(x, 7)
    with pytest.raises(codec.ChecksumError):
        codec.decode(frame, out=out, options=codec.options(threads=threads))
    assert (out == 7).all()
    with pytest.raises(codec.ChecksumError):
        codec.decode(frame, options=codec.options(threads=threads))
    with pytest.raises(codec.ArgumentError, match="shape"):
        codec.decode(codec.encode(x), out=out[:-1])


def test_errors_report_offset_and_value():
    frame = bytearray(SMALL_FRAMES["float32-520-normal"][0])
    frame[6] = 99
    with pytest.raises(codec.FrameError, match=r"byte 6: found 0x63") as caught:
        codec.decode(frame)
    assert (caught.value.offset, caught.value.found) == (6, 99)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.offset, again.code, str(again)) == (6, caught.value.code, str(caught.value))
    frame = bytearray(SMALL_FRAMES["float32-520-normal"][0])
    frame[4] = 2
    with pytest.raises(codec.UnsupportedError):
        codec.decode(frame)


def test_inspect_reports_how_many_bytes_are_needed():
    """inspect() of a prefix reports the bytes needed: 48 for the header's size, the header for the frame's size."""
    frame = codec.encode(np.arange(5000.0).reshape(5, 1000))
    for have, needed in ((0, 48), (47, 48), (48, 64), (63, 64)):
        with pytest.raises(codec.FrameError, match=rf"\({have} bytes, {needed} are needed\)") as caught:
            codec.inspect(frame[:have])
        assert (caught.value.code, caught.value.expected) == (codec.Status.TRUNCATED, needed)
    assert codec.inspect(frame[:64]).nbytes == len(frame)
    with pytest.raises(codec.FrameError, match=f"{len(frame) - 1} bytes, {len(frame)} are needed"):
        codec.decode(frame[:-1])


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_bound_holds_for_adversarial_tensors(dtype):
    """The bound holds for uniform bytes, Fibonacci counts and escapes only; `out` may not be smaller than the frame."""
    u = np.dtype(f"u{ITEMSIZE[dtype]}")
    fibonacci = [1, 1]
    while len(fibonacci) < 22:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    counts = np.repeat(np.arange(22), fibonacci)
    tensors = [random_bits(dtype, n, k) for k in KINDS for n in (0, 511, 513, 4097, 16385)]
    tensors.append(
        (
            np.random.default_rng(0).permutation(counts).astype(np.uint64)
            << (8 * u.itemsize - 9 if u.itemsize > 1 else 0)
        ).astype(u)
    )
    late = np.zeros(40000, u)  # the last values differ, which sampling misses
    late[1::2] = random_bits(dtype, 20000, "noise")
    tensors.append(late)
    for x in tensors:
        limit = codec.bound(x.shape, dtype)
        assert limit <= x.nbytes * (1 + 1 / 256) + 128
        frame = codec.encode(codec.view(x, dtype))
        assert len(frame) <= limit
        memory = np.full(len(frame) + 64, 0xA5, np.uint8)
        assert codec.encode(codec.view(x, dtype), out=memory[: len(frame)]) == frame
        assert (memory[len(frame) :] == 0xA5).all()
        with pytest.raises(codec.ArgumentError, match="too few"):
            codec.encode(codec.view(x, dtype), out=memory[: len(frame) - 1])
        assert (memory[len(frame) :] == 0xA5).all()


def test_more_values_than_bytes_can_hold_are_rejected():
    """inspect() rejects a header that declares more values than the frame's bytes can encode."""
    for name, spec in (LOSSY | TOPKS).items():
        frame = bytearray(codec.encode(np.ones(1000, np.float32), spec))
        struct.pack_into("<Q", frame, 48, 1 << 27)
        with pytest.raises(codec.FrameError, match="header"):
            codec.inspect(frame)
        assert name


def test_wrong_arguments_are_rejected():
    x = np.zeros((4, 4), np.float32)
    for bad in (
        lambda: codec.Lossless(max_code_length=1),
        lambda: codec.Lossless(max_code_length=True),
        lambda: codec.Lossless(model="other"),
        lambda: codec.encode(x, object()),
    ):
        with pytest.raises(codec.SpecError):
            bad()
    for bad in (
        lambda: codec.encode(object()),
        lambda: codec.encode(np.zeros(3, complex)),
        lambda: codec.encode(np.array(["a"])),
        lambda: codec.encode(np.zeros((1,) * 9)),
        lambda: codec.encode(codec.view(x, "float16")),
        lambda: codec.encode(codec.view(x, "float3")),
        lambda: codec.encode(x, options=codec.options(threads=0)),
        lambda: codec.encode(x, out=bytes(1000)),
        lambda: codec.encode(codec.view(np.zeros(9000, np.float32), segments=[(0, (100, 80)), (50, (10,))])),
        lambda: codec.encode(codec.view(np.zeros(9000, np.float32), segments=[(0, (100, 91))])),
        lambda: codec.encode(codec.view(np.zeros(9000, np.float32), segments=[(-1, (10,))])),
        lambda: codec.encode(codec.view(np.zeros(9000, np.float32), segments=[(0, (1,) * 9)])),
        lambda: codec.encode(codec.view(np.zeros(9000, np.float32), segments=[(0, (1.5,))])),
        lambda: codec.encode(codec.view(np.zeros(9000, np.float32), segments=[(1 << 64, (1,))])),
        lambda: codec.decode(codec.encode(x), out=np.zeros((4, 4))),
        lambda: codec.decode(codec.encode(x), out=np.zeros((4, 8), np.float32)[:, ::2]),
        lambda: codec.bound((3,), "complex64"),
    ):
        with pytest.raises(codec.ArgumentError):
            bad()
    with pytest.raises(codec.EngineError):
        codec.encode(x, options=codec.options(engine="abacus"))
    with pytest.raises(codec.EngineError):
        use_isa("mmx")
