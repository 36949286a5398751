"""Rules of format.md, section 10: library and reference decoder agree on hand-made Delta frames."""

import struct

import numpy as np
import pytest

import codec
from codec._c.library import isas, use_isa
from reference import decoder as oracle
from support import flatcall
from support.decode_ways import decode_all_ways
from support.format_cases import check_case
from support.frame_builder import delta_frame, low_first, recompute_checksums, region

BFLOAT16, INT8, FLOAT64 = 3, 17, 2
# bfloat16 bits; with scale S = 126, exponents 127 and 128 are in class 1, 129 in class 2, both zeros in class 0
BASE = (0x3F85, 0x4005, 0x4085, 0x0000, 0x8000)
INTEGERS = (1, 2, 3, 253, 0)
S = 126


def rice(x, k):
    return "0" * (x >> k) + "1" + low_first(x & (1 << k) - 1, k)


def gamma(x):
    t = x.bit_length() - 1
    return "0" * t + "1" + low_first(x - (1 << t), t)


def coded(mode, field, changes, *codes, behind=b""):
    """Return a Delta region: a head with these fields, the bit stream of `codes`, and the bits `behind`."""
    bits = "".join(codes)
    stream = int("0" + bits[::-1], 2).to_bytes(-(-len(bits) // 8), "little")
    return region(struct.pack("<I", mode | field << 2 | changes - 1 << 14) + stream + behind)


def steps(changes, *codes, scale=S, quiet=True):
    """Return a Delta region in mode 1, of step codes. ``quiet``: begin with codes for the two unchanged zeros."""
    return coded(1, scale + 16, changes, *[rice(0, 14)] * (2 * quiet), *codes)


def raw(values, changes, field=0, behind=b""):
    return region(struct.pack("<I", 2 | field << 2 | changes - 1 << 14) + struct.pack("<5H", *values) + behind)


def changed(**by_name):
    """Return BASE with some values replaced; `v0` replaces the first value."""
    return [by_name.get(f"v{i}", x) for i, x in enumerate(BASE)]


PLUS, MINUS, NONE = "0", "1", gamma(1)
NAN = 0x7FC1
ONE = gamma(2), rice(1, 2), PLUS, NONE  # codes for: the first value of class 1 moves one step up
PATCH = rice(1, 3) + low_first(0x4005 ^ NAN, 16)
CASES = {
    "a step": (steps(1, *ONE), changed(v0=0x3F86)),
    "a step of the second value": (steps(1, gamma(2), rice(2, 2), MINUS, NONE), changed(v1=0x4004)),
    "two values": (steps(2, gamma(3), rice(1, 2), PLUS, rice(1, 2), MINUS, NONE), changed(v0=0x3F86, v1=0x4004)),
    "a value of class 2": (steps(1, NONE, gamma(2), rice(1, 4), PLUS), changed(v2=0x4086)),
    "three steps": (steps(1, gamma(4), rice(1, 2), PLUS, rice(0, 2), rice(0, 2), NONE), changed(v0=0x3F88)),
    "nine steps": (steps(1, gamma(10), rice(1, 2), PLUS, rice(0, 2) * 8, gamma(1), NONE), changed(v0=0x3F8E)),
    "20 steps": (steps(1, gamma(10), rice(1, 2), MINUS, rice(0, 2) * 8, gamma(12), NONE), changed(v0=0x3F71)),
    "2^15 steps": (
        steps(1, gamma(10), rice(1, 2), PLUS, rice(0, 2) * 8, gamma(2**15 - 8), NONE),
        changed(v0=0x3F85 ^ 0xFFFF),
    ),
    "2^15 + 1 steps": (
        steps(1, gamma(10), rice(1, 2), PLUS, rice(0, 2) * 8, gamma(2**15 - 7), NONE),
        "size of a step",
    ),
    "2^63 steps": (steps(1, gamma(10), rice(1, 2), PLUS, rice(0, 2) * 8, gamma(2**63), NONE), "size of a step"),
    "2^64 steps": (steps(1, gamma(10), rice(1, 2), PLUS, rice(0, 2) * 8, gamma(2**64), NONE), "gamma code"),
    "a ninth code 0": (
        steps(1, gamma(11), rice(1, 2), PLUS, rice(0, 2) * 8, gamma(1), rice(0, 2), gamma(1), NONE),
        "code 0",
    ),
    "a first code 0": (steps(1, gamma(3), rice(0, 2), rice(1, 2), PLUS, NONE), "code 0"),
    "a gap to the end": (steps(1, gamma(2), rice(3, 2), PLUS, NONE), "gap"),
    "a long gap": (steps(1, gamma(2), rice(60, 2), PLUS, NONE), "gap"),
    "an escaped gap": (steps(1, gamma(2), "0" * 24 + low_first(2, 20), PLUS, NONE), changed(v1=0x4006)),
    "an escaped gap to the end": (steps(1, gamma(2), "0" * 24 + low_first(3, 20), PLUS, NONE), "gap"),
    "more codes than bits": (steps(1, gamma(1000), rice(1, 2), PLUS), "stream is too short"),
    "-0 from 0": (steps(1, rice(1, 14), rice(0, 14), NONE, NONE, quiet=False), changed(v3=0x8000)),
    "0 from -0": (steps(1, rice(0, 14), rice(2, 14), NONE, NONE, quiet=False), changed(v4=0x0000)),
    "an escaped step": (
        steps(1, "0" * 24 + low_first(0xFFFF, 16), rice(0, 14), NONE, NONE, quiet=False),
        changed(v3=0xFFFF),
    ),
    "a step of 2^16": (steps(1, rice(4 << 14, 14), rice(0, 14), NONE, NONE, quiet=False), "number of a Rice code"),
    "all of class 0": (
        coded(1, 129 + 16, 1, rice(0, 2), rice(5, 1), rice(0, 0), rice(0, 14) * 2),
        changed(v1=0x4002),
    ),
    "the largest scale": (coded(1, 255 + 14 + 16, 1, rice(2, 14), rice(0, 14) * 4), changed(v0=0x3F86)),
    "a larger scale": (coded(1, 255 + 14 + 17, 1, rice(2, 14), rice(0, 14) * 4), "scale"),
    # with S = -16 all values are in class 8, also the zeros, which have exponent 1
    "the least scale": (coded(1, 0, 1, *[NONE] * 7, gamma(2), rice(4, 16), PLUS), changed(v3=0x0001)),
    "a code of a class that is missing": (coded(1, 0, 1, gamma(2), rice(1, 2), PLUS, *[NONE] * 7), "gap"),
    "too few changes": (steps(2, *ONE), "number of changes"),
    "too many changes": (steps(1, gamma(3), rice(1, 2), PLUS, rice(1, 2), MINUS, NONE), "number of changes"),
    "more changes than values": (steps(6, *ONE), "number of changes"),
    "a short stream": (steps(1, gamma(2)), "code 0"),
    "a one behind the end": (steps(1, *ONE, "01"), "end of a stream"),
    "64 bits behind the end": (coded(1, S + 16, 1, rice(0, 14) * 2, *ONE, behind=bytes(8)), "end of a stream"),
    "no change": (region(bytes(8)), list(BASE)),
    "no change, with a scale": (region(struct.pack("<II", 1 << 2, 0)), "same"),
    "no change, with a stream": (region(struct.pack("<II", 0, 1)), "same"),
    "no change, too long": (region(bytes(16)), "same"),
    "raw": (raw(changed(v0=NAN), 1), changed(v0=NAN)),
    "raw, with a scale": (raw(changed(v0=NAN), 1, field=1), "raw"),
    "raw, with a wrong number": (raw(changed(v0=NAN), 2), "number of changes"),
    "raw, too short": (region(raw(changed(v0=NAN), 1)[:8]), "raw"),
    "raw, too long": (raw(changed(v0=NAN), 1, behind=bytes(8)), "padding"),
    "raw, with a one behind": (raw(changed(v0=NAN), 1, behind=b"\0\1"), "padding"),
    "a patch": (coded(3, 3, 1, PATCH), changed(v1=NAN)),
    "two patches": (coded(3, 3, 2, PATCH, rice(0, 3), low_first(1, 16)), changed(v1=NAN, v2=0x4084)),
    "a patch that changes nothing": (coded(3, 3, 1, rice(0, 3), low_first(0, 16)), "number of changes"),
    "a patch behind the end": (coded(3, 3, 1, rice(5, 3), low_first(1, 16)), "gap"),
    "a patch of k = 18": (coded(3, 18, 1, rice(0, 18), low_first(1, 16)), changed(v0=0x3F84)),
    "a patch of k = 19": (coded(3, 19, 1, rice(0, 19), low_first(1, 16)), "k"),
    "a patch, escaped": (coded(3, 3, 1, "0" * 24 + low_first(4, 20), low_first(1, 16)), changed(v4=0x8001)),
    "a patch, too short": (coded(3, 3, 2, PATCH, rice(0, 3)), "stream is too short"),
    "patches, too short": (coded(3, 3, 5, PATCH), "stream is too short"),
}


def check(dtype, base, region_, values):
    """Check a frame of one block; `values`: the decoded values, or the reason for which it is rejected."""
    kind = np.dtype(f"<u{oracle.DTYPES[dtype][1]}")
    old = np.array(base, kind)
    new = None if isinstance(values, str) else np.array(values, kind)
    frame = delta_frame(dtype, old.tobytes(), [region_], (old if new is None else new).tobytes())
    if new is not None and (new == old).all():
        assert oracle.decode(frame, None, None, old.tobytes())[2] == new.tobytes()
    check_case(decode_all_ways, frame, values if new is None else new.tobytes(), base=old)


@pytest.mark.parametrize("name", CASES)
def test_region(name):
    """Library and reference decoder agree on regions (section 10.3)."""
    check(BFLOAT16, BASE, *CASES[name])


INTEGER_CASES = {
    "a step": (coded(1, 2, 1, rice(1, 2), PLUS, gamma(1)), [1, 3, 3, 253, 0]),
    "a step down, around": (coded(1, 2, 1, rice(4, 2), MINUS, gamma(1)), [1, 2, 3, 253, 255]),
    "steps": (coded(1, 2, 2, rice(1, 2), PLUS, gamma(5), rice(0, 2), MINUS, gamma(3)), [1, 7, 0, 253, 0]),
    "128 steps": (coded(1, 0, 1, rice(0, 0), PLUS, gamma(128)), [129, 2, 3, 253, 0]),
    "129 steps": (coded(1, 0, 1, rice(0, 0), PLUS, gamma(129)), "size of a step"),
    "k = 19": (coded(1, 19, 1, rice(1, 19), PLUS, gamma(1)), "k"),
    "a patch": (coded(3, 0, 1, rice(3, 0), low_first(0xF0, 8)), [1, 2, 3, 253 ^ 0xF0, 0]),
}


@pytest.mark.parametrize("name", INTEGER_CASES)
def test_region_of_integers(name):
    """Regions of integers, which have no exponents, store gaps and steps in mode 1 (section 10.3)."""
    check(INT8, INTEGERS, *INTEGER_CASES[name])


def test_long_codes_of_float64():
    """Codes of float64 may be numbers of 64 bits, with Rice parameters up to 62 (section 10.3)."""
    base = [0x3FF0_0000_0000_0000, 0, 0x4000_0000_0000_0000]
    z = 2 * 12345678901234567
    new = [base[0] + 12345678901234567, 1 << 63, base[2] + 1]
    stream = coded(1, 1024 + 50 + 16, 3, rice(z, 51), "0" * 24 + low_first(1, 64), rice(2, 50))
    check(FLOAT64, base, stream, new)


FRAMES = {
    "blocks of 2^9": ({"log2": 9}, "blocks of delta"),
    "blocks of 2^19": ({"log2": 19}, "blocks of delta"),
    "two blocks": ({"blocks": 2}, "nblocks"),
    "no block, but block_log2": ({"blocks": 0}, "blocks of delta"),
    "layout 0": ({"layout": 0}, "fields of delta"),
    "a flag": ({"flags": 1}, "fields of delta"),
    "a coded plane": ({"coded": 1}, "fields of delta"),
    "a fixed plane": ({"fixed": 1}, "fields of delta"),
    "a side section of 24": ({"side": 24}, "fields of delta"),
    "a variant": ({"params": b"\1"}, "params"),
    "a code length": ({"params": b"\0\0\0\x08"}, "params"),
    "a group size": ({"params": bytes(4) + b"\1"}, "row of delta"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_header(name):
    """A Delta frame with a header field of other codecs is rejected (section 2)."""
    fields, reason = FRAMES[name]
    base = np.array(BASE, "<u2")
    new = np.array(changed(v0=0x3F86), "<u2").tobytes()
    frame = delta_frame(BFLOAT16, base.tobytes(), [steps(1, *ONE)], new, **fields)
    check_case(decode_all_ways, frame, reason, base=base)


def test_frame_without_blocks():
    """A frame without blocks decodes to the base; both digests are that of the base (section 10.1)."""
    base = np.array(BASE, "<u2")
    frame = delta_frame(BFLOAT16, base.tobytes(), [], base.tobytes(), log2=0)
    assert len(frame) == 72
    check_case(decode_all_ways, frame, base.tobytes(), base=base)
    other = np.array(changed(v0=1), "<u2").tobytes()
    check_case(decode_all_ways, delta_frame(BFLOAT16, base.tobytes(), [], other, log2=0), "another result", base=base)
    longer = bytearray(frame + bytes(8))
    struct.pack_into("<Q", longer, 16, len(longer))
    check_case(decode_all_ways, recompute_checksums(longer), "nblocks", base=base)
    nothing = np.zeros(0, "<u2")
    empty = delta_frame(BFLOAT16, b"", [], b"", log2=0)
    check_case(decode_all_ways, empty, b"", base=nothing)


def test_result_of_another_digest():
    """A frame whose result does not have the stored digest is rejected (section 10.1)."""
    base = np.array(BASE, "<u2")
    frame = delta_frame(BFLOAT16, base.tobytes(), [steps(1, *ONE)], np.array(changed(v0=7), "<u2").tobytes())
    check_case(decode_all_ways, frame, "another result", base=base)


def test_base_of_another_digest():
    """A wrong base is reported as such, whether or not the stream is valid with it (section 10.1)."""
    base, new = np.array(BASE, "<u2"), np.array(changed(v0=0x3F86), "<u2")
    frame = delta_frame(BFLOAT16, base.tobytes(), [steps(1, *ONE)], new.tobytes())
    for i in range(len(BASE)):
        for bit in range(16):
            wrong = base.copy()
            wrong[i] ^= 1 << bit
            status = "ALREADY_APPLIED" if (wrong == new).all() else "OTHER_BASE"
            with pytest.raises(oracle.Bad, match="another base"):
                oracle.decode(frame, None, None, wrong.tobytes())
            for isa in isas():
                with use_isa(isa), pytest.raises(codec.StateError) as e:
                    flatcall.decode(frame, base=wrong, like=base)
                assert e.value.code.name == status


def test_huge_shape_needs_a_base_of_its_size():
    """A frame without blocks may declare a huge shape, but decodes only with a base of that size (section 12)."""
    frame = bytearray(delta_frame(BFLOAT16, b"", [], b"", log2=0))
    struct.pack_into("<Q", frame, 48, 1 << 59)
    frame = recompute_checksums(frame)
    with pytest.raises(codec.LimitError):
        codec.decode(frame)
    with pytest.raises(codec.ArgumentError, match="base= must be bfloat16 of shape"):
        codec.decode(frame, base=np.zeros(5, np.uint16))
