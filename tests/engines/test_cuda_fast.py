"""The kernels encode_lossless_fast and decode_lossless_fast, for bfloat16 and float16, agree with the native engine."""

import numpy as np
import pytest

import codec
from codec._c.library import DTYPES
from support import flatcall
from support.device import DeviceArray, Emulated, build, use
from support.engine_comparison import like, outcome
from support.format_cases import CODED, FEW, PRUNED, head
from support.frame_builder import Blocks, book, coded, region
from support.sample_frames import damage
from support.tiers import N_DAMAGED

F32 = np.float32


@pytest.fixture
def device(monkeypatch):
    device = Emulated(build())
    use(monkeypatch, device)
    return device


def bits_of(x, dtype):
    """Return float32 values as bits of a dtype: bfloat16 by truncation, float16, or float32."""
    if dtype == "float32":
        return x.view(np.uint32)
    bits = x.view(np.uint32) >> 16 if dtype == "bfloat16" else x.astype(np.float16).view(np.uint16)
    return bits.astype(np.uint16)


def check_outcome(frame, dtype):
    """Check that decoding has the outcome of the native engine; return the bytes, or type and code of the error."""

    def decode(engine):
        return flatcall.decode(frame, like=like(dtype), engine=engine).tobytes()

    ours, native = outcome(lambda: decode("cuda")), outcome(lambda: decode("native"))
    assert ours == native if isinstance(native, bytes) else ours[:2] == native[:2]
    return ours


def tensors():
    """Yield names, values and arguments of tensors that reach every branch of the loops."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(50_000, F32)
    scaled = rng.standard_normal((250, 200), F32) * np.ldexp(1, rng.integers(-3, 4, (250, 1))).astype(F32)
    yield "one offset, ragged", normal * F32(0.01), {}
    yield "no offsets", np.float32(2) * normal[: 3 << 14], {}
    yield "rows and columns", scaled * np.ldexp(1, rng.integers(-3, 4, 200)).astype(F32), {}
    yield "columns that are no multiple of four", scaled.reshape(-1)[: 330 * 150].reshape(330, 150), {}
    yield "short rows", scaled.reshape(-1)[: 700 * 64].reshape(700, 64), {}
    yield "parts", normal, {"segments": [(0, (40, 100)), (4100, (130, 80)), (20_000, (7,)), (20_007, (60, 400))]}
    yield "more words than shared memory holds", normal * np.exp2(rng.uniform(-9, 9, 50_000)).astype(F32), {}
    yield "many escapes", normal * np.where(rng.random(50_000) < 0.02, F32(2.0**-9), F32(1)), {}
    yield "blocks of equal exponents", np.where(np.arange(50_000) < 16_384, 1 + rng.random(50_000, F32), normal), {}


CASES = {name: (x, how) for name, x, how in tensors()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_frames_and_values_are_those_of_the_native_engine(name, dtype, device):
    x, how = CASES[name]
    x, rng = bits_of(x, dtype), np.random.default_rng(1)
    spec = codec.Lossless(model="flat" if name == "no offsets" else "auto")
    frame = bytes(flatcall.encode(x, spec, dtype=dtype, **how))
    assert bytes(flatcall.encode(x, spec, dtype=dtype, engine="cuda", **how)) == frame
    device.launched.clear()
    assert flatcall.decode(frame, like=like(dtype), engine="cuda").tobytes() == x.tobytes()
    assert set(device.launched) == {f"decode_lossless_fast<{x.itemsize}>"}
    for _ in range(N_DAMAGED // 20):
        check_outcome(damage(frame, rng), dtype)


PRUNED_REGIONS = {  # name: (symbols of plane 0, bytes of plane 1, True if the frame is valid)
    "zeros": ([127, 0] * 1000, [17, 0] * 1000, True),
    "no zeros": ([127] * 2000, [17] * 2000, True),
    "a byte of plane 1 below a zero": ([127, 0] * 1000, [17, 0] * 999 + [17, 1], False),
    "zeros only": ([0] * 1030, [0] * 1030, False),
}


@pytest.mark.parametrize("name", PRUNED_REGIONS)
def test_pruned_regions_of_plane_0_alone(name, device):
    """Decoders accept a pruned region that holds only plane 0, which no encoder writes, if the fixed plane 1 is 0 where
    plane 0 is 0, and some value is nonzero.
    """
    symbols, plane1, valid = PRUNED_REGIONS[name]
    body = head(CODED, flags=PRUNED) + coded(symbols, FEW)
    blocks = Blocks(DTYPES["bfloat16"], len(symbols), [region(body)], side=book(FEW), coded=1, log2=11)
    blocks.fixed = {1: bytes(plane1)}
    assert isinstance(check_outcome(blocks.frame(), "bfloat16"), bytes) == valid
    assert "decode_lossless_fast<2>" in device.launched


def test_other_tensors_take_the_general_kernel(device):
    """The general kernel serves unaligned destinations, other dtypes, and frames with other planes in regions."""
    x = bits_of(np.random.default_rng(3).standard_normal(20_000, F32), "bfloat16")
    frame = bytes(flatcall.encode(x, codec.Lossless(), dtype="bfloat16"))
    out = DeviceArray(np.zeros(x.size + 1, np.uint16)[1:])
    flatcall.decode(frame, out=out, engine="cuda")
    assert out.get().tobytes() == x.tobytes()
    total = np.zeros(x.size, F32)
    flatcall.accumulate(frame, total, 1.0, engine="cuda")
    assert (total.view(np.uint32) >> 16 == x).all()
    x[::3] = 0
    frame = bytes(flatcall.encode(x, codec.Lossless(), dtype="bfloat16", engine="cuda"))
    assert flatcall.decode(frame, like=like("bfloat16"), engine="cuda").tobytes() == x.tobytes()
    assert {name for name in device.launched if name.startswith("decode")} == {"decode_lossless<2>"}
