"""Golden frames in tests/vectors, and the tensors that they encode.

``PYTHONPATH=tests python -m support.golden_frames --write NAME...`` writes new ones. Every later version
of the library must decode them. When an encoder improves, frames of the former encoder move to ``vectors/older``.

Integer formulas in this file compute the tensors, so that no change in another library can alter them.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

import codec
from codec import optimizers
from codec._c.library import ITEMSIZE
from reference import decoder as oracle
from support import flatcall
from support.specs import LOSSY, TOPKS, TRUNCATES

FOLDER = Path(__file__).parents[1] / "vectors"
INDEX_FILE = FOLDER / "index.json"
OLDER_FRAMES = sorted((FOLDER / "older").glob("*.codec"))
GOLDEN = json.loads(INDEX_FILE.read_text())
GOLDEN_FRAMES = {name: (FOLDER / f"{name}.codec").read_bytes() for name in GOLDEN}


def hashed(n, salt):
    """Return n pseudorandom 64-bit words: splitmix64 of index and salt."""
    with np.errstate(over="ignore"):
        x = (np.arange(n, dtype=np.uint64) + np.uint64(salt * 1_000_003 + 1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ x >> np.uint64(shift)) * np.uint64(factor)
        return x ^ x >> np.uint64(31)


def ones(words):
    """Count the one bits of each uint64 of a vector, as np.bitwise_count of numpy 2 does."""
    return np.unpackbits(words[:, None].view(np.uint8), axis=1).sum(axis=1)


MANTISSAS = {  # number of mantissa bits, exponent bias
    **{"float32": (23, 127), "float64": (52, 1023), "bfloat16": (7, 127), "float16": (10, 15)},
    **{"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15), "float8_e4m3fnuz": (3, 8), "float8_e5m2fnuz": (2, 16)},
}


def floats(dtype, n, salt, wide=0):
    """Return bits of floats with random signs and mantissas, and binomial exponents around 1."""
    x = hashed(n, salt)
    heads = ones(hashed(n, salt + 1) & np.uint64(0xFFFF)).astype(np.int64)
    mantissa, middle = MANTISSAS[dtype]
    e = np.clip(middle + (heads - 8) * (1 + wide) // (1 if middle > 15 else 2), 0, 2 * middle)
    size = ITEMSIZE[dtype]
    sign = x >> np.uint64(63)
    bits = sign << np.uint64(8 * size - 1) | e.astype(np.uint64) << np.uint64(mantissa)
    bits |= x & np.uint64((1 << mantissa) - 1)
    return bits.astype(f"u{size}")


def only_rows(x, step):
    """Return x with zeros in all quad rows but each `step`th; 1 value in 16 of these rows is 0, too."""
    zero = (np.arange(len(x)) // 128 % step != 1) | (hashed(len(x), 28) % np.uint64(16) == 0)
    return np.where(zero, 0, x).astype(x.dtype)


def golden_tensor(name):
    """Return the bits, the dtype and the other arguments of encode for a golden frame."""
    dtype, kind, *more = name.split("-")
    u, size = np.dtype(f"u{ITEMSIZE[dtype]}"), ITEMSIZE[dtype]
    if kind == "stored":
        return hashed(100, 1).astype(u).reshape(4, 25), dtype, {}
    if kind == "empty":
        return np.zeros((3, 0, 2), u), dtype, {}
    if kind == "scalar":
        return hashed(1, 2).astype(u).reshape(()), dtype, {}
    if kind == "plain":
        return floats(dtype, 3000, 3).reshape(30, 100), dtype, {}
    if kind == "wide":
        return floats(dtype, 2000, 4, wide=60), dtype, {}
    if kind == "zeros":
        x = floats(dtype, 5000, 5)
        x[hashed(5000, 6) % np.uint64(3) == 0] = 0
        return x, dtype, {}
    if kind == "model":
        x = floats(dtype, 130 * 160, 7).reshape(130, 160)
        step, shift = u.type(1 << MANTISSAS[dtype][0]), np.arange(130)[:, None] % 5 + np.arange(160)[None] % 4
        if size == 1:  # the range of exponents is small
            return x + (np.arange(130)[:, None] % 3 + np.arange(160)[None] % 2).astype(u) * step, dtype, {}
        shift = shift.astype(u)
        return (x - shift * step if dtype != "float16" else x + shift % u.type(2) * step), dtype, {}
    if kind == "bucket":
        segments = [(0, (90, 100)), (9000, (700,)), (10000, (80, 120)), (19600, (3, 3))]
        x = floats(dtype, 20000, 8)
        x[:9000] -= u.type(5 << 23)
        return x, dtype, {"segments": segments, "spec": codec.Lossless(model="separable")}
    if kind == "blocks":
        return floats(dtype, 40000, 9), dtype, {}
    if kind == "gated":  # the signs of values depend on their magnitudes
        x = floats(dtype, 6000, 10)
        return np.where(x & u.type(0x7F) > np.uint8(0x38), x & u.type(0x7F), x | u.type(0x80)), dtype, {}
    if kind == "halves":  # the lowest bits are always 0
        return floats(dtype, 6000, 10) & u.type(0xFE), dtype, {}
    if kind == "even":  # the lowest bits are often 0, so that the encoder halves the plane of the low byte
        x = floats(dtype, 6000, 10)
        drop = ones(hashed(6000, 11) & np.uint64(7)).astype(u)
        return x >> drop << drop, dtype, {}
    if kind == "rows":
        x = floats(dtype, 4000, 12)
        x[: 4000 - 600] &= u.type(0xFFFF0000)
        return x, dtype, {}
    if kind == "gaps":
        x = (
            floats(dtype, 3000, 27)
            if dtype in ("float32", "float64", "bfloat16", "float16")
            else hashed(3000, 27) >> 58
        )
        return only_rows(x.astype(u), 5), dtype, {}
    if kind == "constant":
        return np.full(1000, 0x40490FDB, u), dtype, {}
    if kind == "cap":
        return floats(dtype, 1500, 13), dtype, {"spec": codec.Lossless(max_code_length=3)}
    if kind == "prior":
        counts = np.zeros(256, int)
        counts[115:135] = np.arange(1, 21)
        return floats(dtype, 1500, 14), dtype, {"codebook": codec.Codebook.from_counts(counts)}
    if kind in LOSSY | TOPKS:
        x = floats(dtype, 3000, 16)
        x[hashed(3000, 17) % np.uint64(9) == 0] = 0
        x[300:400] = 0
        return x.reshape(30, 100), dtype, {"spec": (LOSSY | TOPKS)[kind], "stream": 3}
    if kind in TRUNCATES:
        theta = floats("float32", 3000, 20, wide=2)
        theta[::50] = 0x7F800000, *[0] * 59  # one Inf and 59 zeros among the levels' state
        state = {"theta": theta.view(np.float32).reshape(30, 100)}
        metric = optimizers.SGD(0.125) if TRUNCATES[kind].fixed_level is None else None
        how = {"optimizer": metric, "state": state} if metric else {}
        x = floats(dtype, 3000, 19)
        x &= ~u.type(0xFFFF if "narrow" in more else 0)  # float32 values that bfloat16 can represent
        x = only_rows(x, 5) if "gaps" in more else x
        return x.reshape(30, 100), dtype, {"spec": TRUNCATES[kind], **how}
    if kind == "parts":
        segments = [(0, (50, 100)), (5000, (700,)), (6000, (70, 80))]
        return floats(dtype, 12000, 18), dtype, {"segments": segments, "spec": codec.Sign("l1", "row")}
    if kind == "small_parts":
        segments = [
            (0, (3, 100)),
            (300, (7,)),
            (307, (2, 128)),
            (563, (4, 8)),
            (700, (10, 10)),
            (800, (96,)),
            (896, ()),
        ]
        return floats(dtype, 1000, 18), dtype, {"segments": segments, "spec": codec.Float8()}
    if kind.startswith("delta"):
        return golden_delta(dtype, kind)
    x = ones(hashed(2000, 15)).astype(np.int64) - 32
    return (x.astype(f"i{size}").view(u) if kind == "small" else (x * x * x).astype(f"i{size}").view(u)), dtype, {}


def golden_delta(dtype, kind):
    """Return a tensor and its base. One value in 64 differs by a small step; `kind` selects further differences."""
    n, u = 3000, np.dtype(f"u{ITEMSIZE[dtype]}")
    has_exponent = dtype in ("float32", "float64", "bfloat16", "float16")
    base = floats(dtype, n, 21) if has_exponent else hashed(n, 21).astype(u)
    step = (ones(hashed(n, 22) & np.uint64(0xFFF)).astype(np.int64) - 6).astype(u)
    changed = hashed(n, 23) % np.uint64(64) == 0
    if kind == "delta_same":
        changed[:] = False
    if kind == "delta_dense":
        changed[:] = True
        step = (hashed(n, 24) % np.uint64(4001)).astype(u) - u.type(2000)
    if kind == "delta_far":
        step = hashed(n, 25).astype(u)
    if kind == "delta_raw":
        base = np.zeros(n, u)
        changed[:] = True
        step = hashed(n, 26).astype(u)
    x = np.where(changed, base + step, base).astype(u)
    spec = codec.Delta(1024) if kind == "delta_blocks" else codec.Delta()
    return x.reshape(30, 100), dtype, {"spec": spec, "base": base.reshape(30, 100)}


NAMES = [
    *(f"{d}-{k}" for d in ("float32", "float64", "bfloat16", "float16") for k in ("plain", "wide", "zeros", "model")),
    *(f"float32-{k}" for k in ("stored", "empty", "scalar", "bucket", "blocks", "even", "rows", "constant")),
    "float32-cap",
    "float32-prior",
    *(f"{d}-small" for d in ("int8", "int16", "int32", "int64", "uint8", "bool", "float8_e4m3fn")),
    *(f"{d}-{k}" for d in ("float8_e4m3fn", "float8_e5m2") for k in ("plain", "wide", "zeros", "model", "gated")),
    *(f"{d}-model" for d in ("float8_e4m3fnuz", "float8_e5m2fnuz")),
    "float8_e5m2-halves",
    *(f"{d}-cubes" for d in ("int32", "uint64")),
    *(f"float32-{k}" for k in LOSSY),
    *(f"{d}-{k}" for d in ("bfloat16", "float16") for k in ("sign_l1", "ternary_base3", "float8_e4m3fn", "quantize_4")),
    *(f"float32-{k}" for k in TOPKS),
    *(f"{d}-topk_2" for d in ("bfloat16", "float16")),
    "float32-parts",
    "float32-small_parts",
    *(f"{d}-{k}" for d in ("float32", "bfloat16", "float16") for k in TRUNCATES),
    *(f"{d}-delta" for d in ("float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "int8", "int32", "uint64")),
    *(f"bfloat16-delta_{k}" for k in ("same", "dense", "far", "raw", "blocks")),
    "float32-delta_dense",
    "uint8-delta_far",
    "bool-delta_same",
    "float32-truncate_bit-narrow",
    "float32-truncate_coded-narrow",
    *(f"{d}-gaps" for d in ("float32", "float64", "bfloat16", "float16", "int32", "uint8")),
    *(f"{d}-gaps" for d in ("float32-truncate_bit", "bfloat16-truncate_coded", "float16-truncate_plane")),
    *(f"{d}-quantize_4_zero" for d in ("bfloat16", "float16")),
]  # fmt: skip


def a_exponents(how):
    """Return the exponent fields of A = theta / lr for shared levels."""
    if "state" not in how:
        return None
    return (how["state"]["theta"] * np.float32(8)).view(np.uint32).ravel() >> 23 & 255


def decoded(frame, lengths, how):
    """Return the values that the reference decoder decodes from a frame."""
    base = how.get("base")
    return oracle.decode(frame, lengths, a_exponents(how), None if base is None else base.tobytes())


if __name__ == "__main__" and sys.argv[1] == "--write":
    for name in sys.argv[2:] or NAMES:
        if name in GOLDEN:
            raise SystemExit(f"{name} exists; golden frames never change")
        x, dtype, how = golden_tensor(name)
        frame = bytes(flatcall.encode(x, dtype=dtype, **how))
        (FOLDER / f"{name}.codec").write_bytes(frame)
        GOLDEN[name] = {"tensor_sha256": hashlib.sha256(x.tobytes()).hexdigest()}
        book = how.get("codebook")
        lengths = {book.id: [*book.lengths, book.escape_length]} if book else None
        values = hashlib.sha256(decoded(frame, lengths, how)[2]).hexdigest()
        if values != GOLDEN[name]["tensor_sha256"]:  # a lossy codec: store the hash of the decoded values, too
            GOLDEN[name]["values_sha256"] = values
    INDEX_FILE.write_text(json.dumps(GOLDEN, indent=1) + "\n")
