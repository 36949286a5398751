"""Small frames of every layout, mode and codec, and damaged copies of them."""

import numpy as np

import codec
from support import flatcall
from support.engine_comparison import level_arguments, sample_bits
from support.frame_builder import recompute_checksums
from support.specs import LOSSY, SPECS, TOPKS, TRUNCATES
from support.tensors import random_bits

TRUNCATE_HOW = {
    "optimizer": codec.optimizers.SGD(1 / 10),
    "state": {"theta": np.linspace(-0.01, 0.01, 600, dtype=np.float32)},
}


def small_frames():
    """Return small frames of every layout and mode by name: (frame, dtype, number of values)."""
    out = {}
    for dtype, n, kind in (
        ("float32", 100, "normal"),
        ("float32", 520, "normal"),
        ("float32", 700, "zeros"),
        ("bfloat16", 1000, "mixed"),
        ("bfloat16", 600, "constant"),
        ("float16", 600, "mixed"),
        ("float64", 600, "mixed"),
        ("int32", 600, "few"),
        ("uint8", 1500, "sparse"),
    ):
        out[f"{dtype}-{n}-{kind}"] = (bytes(codec.encode(codec.view(random_bits(dtype, n, kind), dtype))), dtype, n)
    x = random_bits("bfloat16", 8192, "sparse").reshape(64, 128)
    out["model"] = (bytes(codec.encode(codec.view(x, "bfloat16"), codec.Lossless(model="separable"))), "bfloat16", 8192)
    y = random_bits("float32", 8300, "normal").view(np.float32) * np.float32(0.01)
    for name, spec in (LOSSY | TOPKS).items():
        out[name] = (bytes(codec.encode(y[:300], spec)), "float32", 300)
    for name, spec in TRUNCATES.items():
        how = TRUNCATE_HOW if spec.fixed_level is None else {}
        out[name] = (bytes(flatcall.encode(y[:600], spec, **how)), "float32", 600)
    out["parts"] = (
        bytes(codec.encode(codec.view(y, segments=[(0, (41, 100))]), codec.Sign(group_size="row"))),
        "float32",
        8300,
    )
    out["bytes"] = (bytes(codec.encode(y[:8300], codec.Ternary("entropy"))), "float32", 8300)
    return out


SMALL_FRAMES = small_frames()


def frames_to_damage():
    """Return frames by name: (frame, dtype, number of values, arguments that decoding needs)."""
    frames = {
        name: (frame, dtype, n, TRUNCATE_HOW if n == 600 else {}) for name, (frame, dtype, n) in SMALL_FRAMES.items()
    }
    for name in (
        "lossless",
        "lossless_separable",
        "quantize_3_odd",
        "ternary_entropy",
        "float8_entropy",
        "truncate_bit",
    ):
        spec = SPECS[name]
        x, how = sample_bits("float16", 34_000, "zeros"), level_arguments(spec, 34_000)
        frames[f"blocks_{name}"] = (bytes(flatcall.encode(x, spec, dtype="float16", **how)), "float16", 34_000, how)
    x = sample_bits("float16", 34_000, "zeros")
    spec = codec.TopK(1 / 16, chunk=1 << 14)
    frames["blocks_topk"] = (bytes(flatcall.encode(x, spec, dtype="float16")), "float16", 34_000, {})
    x = sample_bits("float16", 1000, "wide")
    for name, spec in TRUNCATES.items():
        how = level_arguments(spec, 1000)
        frames[f"float16_{name}"] = (bytes(flatcall.encode(x, spec, dtype="float16", **how)), "float16", 1000, how)
    return frames


FRAMES_TO_DAMAGE = frames_to_damage()


def damage(frame, rng):
    """Return a copy of a frame with one to three changed bytes, mostly near the beginning of a section.

    In four of five copies, the checksums are recomputed.
    """
    info, mutant = codec.inspect(frame), bytearray(frame)
    sections = {"end": (len(frame) - 200, 200), "all": (0, len(frame)), **info.sections}
    for _ in range(rng.integers(1, 4)):
        begin, size = sections[rng.choice([*sections, "side", "regions", "all"])]
        i = max(begin, 0) + int(rng.integers(max(1, min(size, rng.choice([8, 60, 400, len(frame)])))))
        if i >= len(frame):
            continue
        mutant[i] = rng.choice([mutant[i] ^ 1 << int(rng.integers(8)), rng.integers(256), 0, 255, mutant[i] + 1 & 255])
    valid = recompute_checksums(bytes(mutant)) if rng.random() < 0.8 else None
    return valid or bytes(mutant)
