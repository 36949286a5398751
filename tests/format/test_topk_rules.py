"""Rules of format.md, section 11: library and reference decoder agree on hand-made TopK frames."""

import struct

import numpy as np
import pytest

import codec
from support.decode_ways import decode_all_ways
from support.format_cases import check_case
from support.frame_builder import Blocks, low_first, region, stored

FLOAT32, FLOAT64, BFLOAT16, FLOAT16 = 1, 2, 3, 4
F32 = np.float32
ONE, TWO, THREE, LARGEST, INF = 0x3F80, 0x4000, 0x4040, 0x7F7F, 0x7F80
NONE = (0, 0)  # both scales of a chunk without codes are 0


def kept(gap, minus=0, level=0, k=4, bits=2):
    """Return the code of a kept value: its gap, sign and level."""
    return "0" * (gap >> k) + "1" + low_first(gap & (1 << k) - 1, k) + str(minus) + low_first(level, bits - 1)


def escaped(gap, minus=0, level=0, bits=2):
    return "0" * 24 + low_first(gap, 20) + str(minus) + low_first(level, bits - 1)


def topk(scales, *codes, n=64, count=2, log2=6, bits=2, dtype=FLOAT32, behind=b"", **fields):
    """Return a TopK frame of one block, which keeps 2 values in 64, with Rice parameter k = 4."""
    text = "".join(codes)
    stream = int("0" + text[::-1], 2).to_bytes(-(-len(text) // 8), "little")
    body = struct.pack(f"<{len(scales)}H", *scales) + stream + behind
    params = fields.pop("params", struct.pack("<BBBBI", 0, 0, bits, 0, 6 << 16 | count))
    return Blocks(dtype, n, [region(body)], codec=9, params=params, log2=log2, **fields)


def values(n=64, **by_name):
    """Return zeros with some values replaced; `v3` replaces the fourth value."""
    x = np.zeros(n, F32)
    for name, v in by_name.items():
        x[int(name[1:])] = v
    return x


SCALES = (ONE, THREE)
TWO_KEPT = kept(0), kept(3, 1, 1)
CASES = {
    "two values": (topk(SCALES, *TWO_KEPT), values(v0=1, v4=-3)),
    "the last value": (topk(SCALES, kept(62), kept(0, 1)), values(v62=1, v63=-1)),
    "a gap beyond the chunk": (topk(SCALES, kept(62), kept(1)), "gap"),
    "a first gap beyond the chunk": (topk(SCALES, kept(64), kept(0)), "gap"),
    "escaped": (topk(SCALES, escaped(5), kept(0)), values(v5=1, v6=1)),
    "escaped beyond the chunk": (topk(SCALES, escaped(1 << 19), kept(0)), "gap"),
    "one code is missing": (topk(SCALES, kept(0)), "gap|stream is too short"),
    "a code too many": (topk(SCALES, *TWO_KEPT, kept(0)), "end of a stream"),
    "a bit behind the codes": (topk(SCALES, *TWO_KEPT, "01"), "end of a stream"),
    "8 zero bytes behind the codes": (topk(SCALES, *TWO_KEPT, behind=bytes(8)), "end of a stream"),
    "the same scale twice": (topk((TWO, TWO), kept(1, 0, 1), kept(0)), values(v1=2, v2=2)),
    "scales that descend": (topk((THREE, ONE), *TWO_KEPT), "scales"),
    "a scale of Inf": (topk((ONE, INF), *TWO_KEPT), "scale"),
    "a scale of NaN": (topk((0x7FC0, 0x7FC1), *TWO_KEPT), "scale"),
    "a negative scale": (topk((ONE | 0x8000, ONE), *TWO_KEPT), "scale"),
    "a scale of -0": (topk((0x8000, ONE), *TWO_KEPT), "scale"),
    "no codes": (topk(NONE), values()),
    "codes of a chunk that has none": (topk(NONE, *TWO_KEPT), "end of a stream"),
    "a level of 0 is +0": (topk((0, ONE), kept(0, 1, 0), kept(0, 1, 1)), values(v1=-1)),
    "one bit": (topk((TWO,), kept(7, 1, bits=1), kept(0, bits=1), bits=1), values(v7=-2, v8=2)),
    "one bit, no codes": (topk((0,), bits=1), values()),
    "three bits": (
        topk((ONE, 0x4080), kept(0, 0, 3, bits=3), kept(0, 1, 1, bits=3), bits=3),
        values(v0=4, v1=-(F32(1) + F32(3) * (F32(1) / F32(3)))),
    ),
    "the largest scales": (topk((ONE, LARGEST), kept(0, 1, 1), kept(0)), values(v0=-(2**128 - 2**120), v1=1)),
    "eight bits": (
        topk((ONE, TWO), kept(0, 0, 127, bits=8), kept(0, 0, 64, bits=8), bits=8),
        values(v0=2, v1=F32(1) + F32(64) / F32(127)),
    ),
    # rules about chunks
    "two chunks, the first without codes": (
        topk((*NONE, *SCALES), *TWO_KEPT, n=128, log2=7),
        values(128, v64=1, v68=-3),
    ),
    "a gap does not reach the next chunk": (
        topk((*SCALES, *SCALES), kept(0), kept(63), *TWO_KEPT, n=128, log2=7),
        "gap",
    ),
    "a short chunk keeps its share, rounded up": (topk(SCALES, kept(9), n=10), values(10, v9=1)),
    "a short chunk of 33 values keeps 2": (topk(SCALES, *TWO_KEPT, n=33), values(33, v0=1, v4=-3)),
    "a short chunk behind a whole one": (
        topk((*SCALES, TWO, TWO), *TWO_KEPT, kept(0), n=65, log2=7),
        values(65, v0=1, v4=-3, v64=2),
    ),
    "half of the values": (
        topk(SCALES, *[kept(1, k=0)] * 32, count=32),
        values(**{f"v{i}": 1 for i in range(1, 64, 2)}),
    ),
    # rules about header fields
    "bits of 0": (topk(SCALES, *TWO_KEPT, params=struct.pack("<BBBBI", 0, 0, 0, 0, 6 << 16 | 2)), "bits"),
    "bits of 9": (topk(SCALES, *TWO_KEPT, params=struct.pack("<BBBBI", 0, 0, 9, 0, 6 << 16 | 2)), "params"),
    "variant": (topk(SCALES, *TWO_KEPT, params=struct.pack("<BBBBI", 1, 0, 2, 0, 6 << 16 | 2)), "params"),
    "option of an encoder": (
        topk(SCALES, *TWO_KEPT, params=struct.pack("<BBBBI", 0, 1, 2, 0, 6 << 16 | 2)),
        values(v0=1, v4=-3),
    ),
    "option 2": (topk(SCALES, *TWO_KEPT, params=struct.pack("<BBBBI", 0, 2, 2, 0, 6 << 16 | 2)), "params"),
    "max_code_length": (topk(SCALES, *TWO_KEPT, params=struct.pack("<BBBBI", 0, 0, 2, 8, 6 << 16 | 2)), "params"),
    "no group_size": (topk(SCALES, *TWO_KEPT, params=b"\0\0\2\0"), "chunk or kept"),
    "chunk of 32": (topk(SCALES, params=struct.pack("<BBBBI", 0, 0, 2, 0, 5 << 16 | 2)), "chunk or kept"),
    "chunk of 2^17": (
        topk(SCALES, log2=17, params=struct.pack("<BBBBI", 0, 0, 2, 0, 17 << 16 | 2)),
        "chunk or kept",
    ),
    "none kept": (topk(SCALES, params=struct.pack("<BBBBI", 0, 0, 2, 0, 6 << 16)), "chunk or kept"),
    "more than half kept": (topk(SCALES, params=struct.pack("<BBBBI", 0, 0, 2, 0, 6 << 16 | 33)), "chunk or kept"),
    "a block smaller than a chunk": (
        topk(SCALES, *TWO_KEPT, log2=6, params=struct.pack("<BBBBI", 0, 0, 2, 0, 7 << 16 | 4)),
        "blocks of topk",
    ),
    "a block of 2^17": (topk(SCALES, *TWO_KEPT, log2=17), "blocks of topk"),
    "flags": (topk(SCALES, *TWO_KEPT, flags=2), "fields of topk"),
    "coded": (topk(SCALES, *TWO_KEPT, coded=1), "fields of topk"),
    "a fixed plane": (topk(SCALES, *TWO_KEPT, fixed={0: bytes(64)}), "fields of topk"),
    "a side section": (topk(SCALES, *TWO_KEPT, side=bytes(8)), "fields of topk"),
    "float64": (topk(SCALES, *TWO_KEPT, dtype=FLOAT64), "dtype or layout of a codec"),
}


@pytest.mark.parametrize("name", CASES)
def test_frames(name):
    frame, expected = CASES[name]
    check_case(decode_all_ways, frame.frame(), expected if isinstance(expected, str) else expected.tobytes())


def test_values_are_rounded_to_the_dtype():
    """Decoded values are rounded to the dtype, saturate at its largest number, and are +0 for zero."""
    codes = kept(0, 0, 1, bits=3), kept(0, 1, 0, bits=3)
    for dtype, third, one in ((BFLOAT16, 0x3FAB, 0xBF80), (FLOAT16, 0x3D55, 0xBC00)):
        x = np.zeros(64, "<u2")
        x[:2] = third, one
        check_case(decode_all_ways, topk((ONE, TWO), *codes, bits=3, dtype=dtype).frame(), x.tobytes())
    x = np.zeros(64, "<u2")
    x[:2] = 0xFBFF, 0
    frame = topk((0x0001, LARGEST), kept(0, 1, 1), kept(0, 1, 0), dtype=FLOAT16).frame()
    check_case(decode_all_ways, frame, x.tobytes())


def test_only_empty_tensors_are_stored():
    check_case(decode_all_ways, stored(FLOAT32, (0,), b"", codec=9, params=b"\0\0\2\0"), b"")
    reasons = {
        "dtype or layout of a codec": stored(FLOAT32, (1,), bytes(4), codec=9, params=b"\0\0\2\0"),
        "group_size of a stored frame": stored(FLOAT32, (0,), b"", codec=9, params=b"\0\0\2\0\2\0\6\0"),
    }
    for reason, frame in reasons.items():
        check_case(decode_all_ways, frame, reason)


def test_blocks_may_be_smaller_than_those_of_the_encoder():
    """Frames may have smaller blocks than the encoder's; memory for decoding depends on spec and shape only."""
    text = kept(0, bits=1) + kept(3, 1, bits=1)
    one = region(struct.pack("<H", ONE) + int(text[::-1], 2).to_bytes(-(-len(text) // 8), "little"))
    params = struct.pack("<BBBBI", 0, 0, 1, 0, 6 << 16 | 2)
    frame = Blocks(FLOAT32, 64 * 40, [one] * 40, codec=9, params=params, log2=6).frame()
    x = np.zeros((40, 64), F32)
    x[:, 0], x[:, 4] = 1, -1
    check_case(decode_all_ways, frame, x.tobytes())
    assert (codec.reduce([frame, frame], op="sum") == 2 * x.ravel()).all()
