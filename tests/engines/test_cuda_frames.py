"""The CUDA engine on the CPU decodes golden, truncated, damaged and hand-made frames as the native engine does."""

import hashlib

import numpy as np
import pytest

import codec
from support.cuda_calls import ROWS, both_outcomes, by_cupy, bytes_of, decode, encode, outcome
from support.engine_comparison import unify_nan
from support.format_cases import HAND_MADE
from support.frame_builder import recompute_checksums
from support.golden_frames import GOLDEN, GOLDEN_FRAMES, golden_tensor
from support.sample_frames import FRAMES_TO_DAMAGE, damage
from support.tiers import N_DAMAGED

pytestmark = pytest.mark.usefixtures("device")


@by_cupy
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frames(name):
    frame, about = GOLDEN_FRAMES[name], GOLDEN[name]
    x, dtype, how = golden_tensor(name)
    given = {k: v for k, v in how.items() if k in ("optimizer", "state", "base")}
    if "codebook" in how:
        given["codebooks"] = how["codebook"]
    assert hashlib.sha256(decode(frame, **given)).hexdigest() == about.get("values_sha256", about["tensor_sha256"])
    assert encode(x, how.pop("spec", codec.Lossless()), dtype, **how) == frame


@pytest.mark.parametrize("name", [*GOLDEN][::3])
def test_truncated_golden_frames(name):
    """Golden frames cut at any byte give the native engine's error, with and without a matching size field."""
    frame = GOLDEN_FRAMES[name]
    for n in {0, 1, 47, *np.random.default_rng(len(frame)).integers(0, len(frame), 9).tolist()}:
        for cut in (frame[:n], recompute_checksums(frame[:16] + n.to_bytes(8, "little") + frame[24:n])):
            if cut is not None:
                ours, native = both_outcomes(cut, codec.inspect(frame).dtype)
                assert ours == native


def reduce_bits(frames, engine):
    """Return the bits of a reduction with all NaNs made equal, since NaN payloads differ between GPU and CPU."""
    return unify_nan(np.frombuffer(bytes_of(codec.reduce(frames, options=codec.options(engine=engine))), np.float32))


@pytest.mark.parametrize("name", FRAMES_TO_DAMAGE)
def test_hostile_frames(name):
    """Damaged frames give the native engine's tensor or error."""
    frame, dtype, _, how = FRAMES_TO_DAMAGE[name]
    rng = np.random.default_rng(sorted(FRAMES_TO_DAMAGE).index(name))
    refused = 0
    for _ in range(N_DAMAGED):
        mutant = damage(frame, rng)
        ours, native = both_outcomes(mutant, dtype, max_nbytes=1 << 22, **how)
        assert ours == native
        refused += isinstance(ours, int)
        if name in (*ROWS, "blocks_quantize_3_odd", "parts") and refused % 3 == 0:
            ours, native = (outcome(reduce_bits, [frame, mutant, frame], by) for by in ("cuda", "native"))
            assert ours == native
    assert refused


@pytest.mark.parametrize("case", HAND_MADE)
def test_frames_made_by_hand(case):
    """Hand-made frames decode to the native engine's values, or are rejected by both engines."""

    def compared(frame, **how):
        ours, native = both_outcomes(frame, codec._c.library.DTYPE_NAMES[frame[6]], **how)
        assert ours == native
        return dict.fromkeys((1, 4), ours if isinstance(ours, bytes) else None)

    check, *arguments = HAND_MADE[case]
    check(compared, *arguments)
