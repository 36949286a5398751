"""Frames for each rule of docs/spec/format.md that an implementer could misread, and what they must decode to.

A case is a hand-made frame, with the bytes of its values or with the reason for which the reference decoder rejects it.

One file: the cases follow the sections of the specification.
"""

import struct

import numpy as np
import pytest

import codec
from reference import decoder as oracle
from reference.decoder import ESCAPE
from support import flatcall
from support.frame_builder import Blocks, book, coded, region

F32 = np.float32
FLOAT32, FLOAT64, BFLOAT16, FLOAT16, E4M3, E5M2, E8M0, BOOL, UINT8 = 1, 2, 3, 4, 5, 6, 9, 16, 21
CONSTANT, RAW, CODED, ROWS, PRUNED, GAPS = 0, 1, 2, 3, 1 << 16, 1 << 17
SIGN, TERNARY, FLOAT8, FLOAT4, QUANTIZE, TRUNCATE = range(2, 8)


def u32(*x):
    """Pack integers as little-endian 32-bit words."""
    return struct.pack(f"<{len(x)}I", *x)


def f32(*x):
    """Pack numbers as little-endian float32 values."""
    return struct.pack(f"<{len(x)}f", *x)


def u64(*x):
    """Pack integers as little-endian 64-bit words."""
    return struct.pack(f"<{len(x)}Q", *x)


def check_case(decode, frame, values, a_exponents=None, **how):
    """Check a frame with the reference decoder and with `decode`.

    Parameters
    ----------
    decode : callable
        Decodes the frame in several ways; returns a dict of the values' bytes for each, None for a rejected frame.
    values : bytes or str
        Expected bytes of the values. A string: the reason for which the reference decoder rejects the frame.
    """
    base = how["base"].tobytes() if "base" in how else None
    if isinstance(values, str):
        with pytest.raises(oracle.Bad, match=f"^{values}$"):
            oracle.decode(frame, None, a_exponents, base)
        values = None
    else:
        assert oracle.decode(frame, None, a_exponents, base)[2] == values
    assert {way: got for way, got in decode(frame, **how).items() if got != values} == {}


def head(*modes, flags=0):
    """Return the head of a region: the mode of each plane, and the flags."""
    return u32(sum(mode << 2 * p for p, mode in enumerate(modes)) | flags)


SEVEN = {7: 1, ESCAPE: 1}
FEW = {127: 1, 0: 2, ESCAPE: 2}
LONG = {7: 1, 8: 2, 9: 3, ESCAPE: 3}  # code lengths of a codebook that takes an odd number of bytes


def u8(symbols, lengths, literals=b"", **how):
    """Return a frame of uint8 with one coded plane."""
    return Blocks(
        UINT8,
        len(symbols),
        [region(head(CODED) + coded(symbols, lengths, literals, **how))],
        side=book(lengths),
        coded=1,
    )


def side_of(*side):
    """Return a frame that stores the codebook `side` but has no coded plane."""
    return Blocks(UINT8, 1, [region(head(RAW) + b"\5")], side=bytes(side), coded=1)


def halved(symbols, high, literals=b"", lengths=SEVEN):
    """Return a frame of uint8 with a halved plane: low nibbles are coded, and `high` stores the high nibbles."""
    body = head(CODED) + coded(symbols, lengths, literals) + high
    return Blocks(UINT8, len(symbols), [region(body)], side=book(lengths), coded=1, halved=1)


def raw8(symbols, bits, halved, literals=b"", lengths=SEVEN, dtype=E4M3):
    """Return a frame of float8 with a coded plane, whose raw bits are `bits`."""
    body = head(CODED) + coded(symbols, lengths, literals) + bits
    return Blocks(dtype, len(symbols), [region(body)], side=book(lengths), coded=1, halved=halved)


def model8(kind, shifts, base, nibbles, dtype=E4M3):
    """Return a frame of float8 zeros with a scale model of one part."""
    record = struct.pack("<QIBBH", 4096, 512 if kind else 0, kind, shifts, base)
    side = book(SEVEN) + u32(1) + record + nibbles
    return Blocks(dtype, 4096, [region(head(CONSTANT) + b"\0")] * 8, side=side, coded=1, flags=2)


def pruned(symbols, rest, literals=b"", lengths=FEW, modes=(CODED, RAW, CONSTANT, CONSTANT), gaps=None, n=None, **more):
    """Return a frame of float32 in which plane 0 is coded, and zero values are pruned from the other planes.

    ``gaps``: bitmap of a block with gaps, which has ``n`` values.
    """
    flags = PRUNED | (GAPS if gaps else 0)
    body = head(*modes, flags=flags) + (u32(gaps) if gaps else b"") + coded(symbols, lengths, literals) + rest
    return Blocks(FLOAT32, n or len(symbols), [region(body)], side=book(lengths), coded=1, **more)


def gaps(n, bitmap, body, mode=RAW, lengths=SEVEN, **more):
    """Return a frame of n uint8 values whose block has gaps; ``bitmap``: its words."""
    coded_plane = {"side": book(lengths), "coded": 1} if mode == CODED else {}
    return Blocks(UINT8, n, [region(head(mode, flags=GAPS) + u32(*bitmap) + body)], **coded_plane, **more)


def wide(plane0, plane1, modes=(RAW, RAW), **more):
    """Return a frame of float64 with the given planes 0 and 1, and zeros in planes 2 to 7."""
    side = b"".join(book(SEVEN) for p in range(2) if modes[p] == CODED)
    coded_planes = sum(1 << p for p in range(2) if modes[p] == CODED)
    body = head(*modes, **more) + plane0 + plane1 + bytes(6)
    return Blocks(FLOAT64, 2, [region(body)], side=side, coded=coded_planes)


def float64s(*bits):
    """Return the float64 values whose upper 16 bits are given, and whose other bits are 0."""
    return u64(*(b << 48 for b in bits))


LOSSLESS_CASES = {
    # cases for format.md, section 2
    "a block of one value": (Blocks(UINT8, 1, [region(head(RAW) + b"\5")]), b"\5"),
    "cap does not bind": (Blocks(UINT8, 1, [region(head(RAW) + b"\5")], params=b"\2\0\0\2"), b"\5"),
    "codes longer than cap": (
        Blocks(
            UINT8,
            2,
            [region(head(CODED) + coded([7, 9], LONG))],
            params=b"\0\0\0\2",
            side=book(LONG),
            coded=1,
        ),
        b"\7\x09",
    ),
    "cap of 9": (Blocks(UINT8, 1, [region(head(RAW) + b"\5")], params=b"\0\0\0\x09"), "params"),
    "model of 3": (Blocks(UINT8, 1, [region(head(RAW) + b"\5")], params=b"\3\0\0\x08"), "params"),
    "params go on": (Blocks(UINT8, 1, [region(head(RAW) + b"\5")], params=b"\0\0\0\x08\1"), "row of lossless"),
    "plane 1 of a dtype with one, fixed": (Blocks(UINT8, 1, [region(head(RAW) + b"\5")], fixed={1: b"\5"}), "planes"),
    "fixed and coded": (
        Blocks(UINT8, 1, [region(head(CONSTANT))], side=book(SEVEN), coded=1, fixed={0: b"\5"}),
        "planes",
    ),
    "halved and not coded": (Blocks(UINT8, 1, [region(head(RAW) + b"\5")], halved=1), "halved"),
    "plane 0 of floats, halved": (
        Blocks(
            BFLOAT16, 1, [region(head(CODED, RAW) + coded([7], SEVEN) + b"\0\0")], side=book(SEVEN), coded=1, halved=1
        ),
        "halved",
    ),
    "flag 4": (Blocks(FLOAT32, 1, [region(head() + bytes(4))], flags=4), "reserved"),
    "flag 4 of float64": (Blocks(FLOAT64, 1, [region(head() + bytes(8))], side=u64(1023), flags=4), "reserved"),
    "a model for bytes": (
        Blocks(UINT8, 4096, [region(head() + b"\0")], side=book(SEVEN) + u32(1), coded=1, flags=2, log2=12),
        "flags",
    ),
    # cases for format.md, section 3
    "bool of any bytes": (Blocks(BOOL, 4, [region(head(RAW) + b"\0\1\2\xff")]), b"\0\1\2\xff"),
    "float64, planes 0 and 1": (wide(b"\xff\x34", b"\x7f\xae"), float64s(0xBFFF, 0x534E)),
    "float64, exponent 0 of a byte that is not 0": (wide(b"\x01\0", b"\0\0"), float64s(0x0010, 0)),
    "float64, an exponent that is a multiple of 256": (wide(b"\0\0", b"\x80\x70"), float64s(0x4000, 0xB000)),
    "float64, plane 0 fixed": (
        Blocks(FLOAT64, 2, [region(head(CONSTANT, RAW) + b"\x60\x70" + bytes(6))], fixed={0: b"\xff\xff"}),
        float64s(0x3FF0, 0xBFF0),
    ),
    "float64, plane 0 of runs": (wide(b"\1\5\7", b"\x60\x70", (ROWS, RAW)), float64s(0x3050, 0xB070)),
    # cases for format.md, section 5.1
    "the escape's code is the first": (u8([7, 8, ESCAPE], {7: 2, 8: 2, ESCAPE: 1}, b"\x09"), b"\7\x08\x09"),
    "a codebook of value 0 alone": (u8([0, ESCAPE], {0: 1, ESCAPE: 1}, b"\5"), b"\0\5"),
    "first is 0": (side_of(1 | 1 << 4, 0, 0), "first or last"),
    "first is 0, with nibbles": (side_of(2 | 2 << 4, 0, 1, 1 << 4), "first or last"),
    "first is 2, last is 1": (side_of(1 | 1 << 4, 2, 1), "first or last"),
    "first is 1, last is 1, of length 0": (side_of(1 | 1 << 4, 1, 1, 0), "first or last without a code"),
    "the last length is 0": (side_of(1, 7, 8, 1), "first or last without a code"),
    "lengths that leave codes over": (
        Blocks(UINT8, 1, [region(head(RAW) + b"\5")], side=book({7: 2, ESCAPE: 1}), coded=1),
        "Kraft sum",
    ),
    # cases for format.md, section 6
    "a run of zeros whose bit is 1": (Blocks(UINT8, 130, [region(head(ROWS) + b"\3" + bytes(130))]), bytes(130)),
    "a run that is left out": (Blocks(UINT8, 130, [region(head(ROWS) + b"\2\5\6")]), bytes(128) + b"\5\6"),
    "a bit for no run": (Blocks(UINT8, 130, [region(head(ROWS) + b"\6\5\6")]), "bitmap padding"),
    "planes by number, whatever their modes": (
        Blocks(
            FLOAT32,
            2,
            [region(head(ROWS, CODED, CONSTANT, RAW) + b"\1\x7f\x3f" + coded([ESCAPE, 7], SEVEN, b"\x88") + b"\5\1\2")],
            side=book(SEVEN),
            coded=2,
        ),
        u32(0xBF880501, 0x1F870502),
    ),
    "a region that ends with 8 zeros": (Blocks(UINT8, 4, [region(head(RAW) + bytes(4)) + bytes(8)]), "padding"),
    "a region that does not end with zeros": (Blocks(UINT8, 1, [region(head(RAW) + b"\5\0\0\1")]), "padding"),
    "mode of a plane that is not there": (Blocks(UINT8, 2, [region(head(RAW, RAW) + b"\5\6")]), "region head"),
    "coded without a codebook": (Blocks(UINT8, 1, [region(head(CODED) + coded([7], SEVEN))]), "no codebook"),
    "pruned": (pruned([127, 0, 127], b"\x11\x22\0\0"), u32(0x3F910000, 0, 0x3FA20000)),
    "pruned, an escaped 0": (
        pruned([127, ESCAPE, 127], b"\x11\x22\0\0", b"\0"),
        u32(0x3F910000, 0, 0x3FA20000),
    ),
    "pruned to nothing": (pruned([0], bytes(3), modes=(CODED,)), "pruned to nothing"),
    "pruned to nothing, then a coded plane": (
        Blocks(
            FLOAT32,
            1,
            [region(head(CODED, CODED, flags=PRUNED) + coded([0], FEW) + coded([], FEW) + bytes(2))],
            side=book(FEW) * 2,
            coded=3,
        ),
        "pruned to nothing",
    ),
    "pruned to nothing, by an escape": (pruned([0, ESCAPE], b"\0\0\0", b"\0"), "pruned to nothing"),
    "pruned, fixed plane": (
        pruned([127, 0], b"\x11\0", modes=(CODED, RAW), fixed={3: b"\3\0"}),
        u32(0x3F910003, 0),
    ),
    "pruned, fixed plane not 0": (
        pruned([127, 0], b"\x11\0", modes=(CODED, RAW), fixed={3: b"\3\1"}),
        "a pruned value's byte in a fixed plane",
    ),
    "pruned, fixed plane not 0 under an escaped 0": (
        pruned([127, ESCAPE], b"\x11\0", b"\0", modes=(CODED, RAW), fixed={3: b"\3\1"}),
        "a pruned value's byte in a fixed plane",
    ),
    "pruned, plane 0 raw": (
        Blocks(FLOAT32, 2, [region(head(RAW, RAW, flags=PRUNED) + b"\x7f\0\x11\0\0")], side=book(FEW), coded=1),
        "pruned",
    ),
    "pruned, plane 0 constant though it has a codebook": (
        Blocks(FLOAT32, 2, [region(head(CONSTANT, RAW, flags=PRUNED) + b"\1\2\x7f\0\0")], side=book(FEW), coded=1),
        "pruned",
    ),
    "pruned bytes": (
        Blocks(UINT8, 1, [region(head(CODED, flags=PRUNED) + coded([7], SEVEN))], side=book(SEVEN), coded=1),
        "pruned",
    ),
    "float64, pruned": (
        wide(coded([7, ESCAPE], SEVEN, b"\0"), b"\x7f", (CODED, RAW), flags=PRUNED),
        float64s(0xB07F, 0),
    ),
    "float64, pruned, all bytes of plane 0 are 0": (
        wide(coded([ESCAPE, ESCAPE], SEVEN, b"\0\0"), b"\x80", (CODED, RAW), flags=PRUNED),
        "pruned to nothing",
    ),
    "gaps": (gaps(130, [2], b"\5\6"), bytes(128) + b"\5\6"),
    "gaps, the last quad row": (gaps(130, [1], bytes(range(128))), bytes(range(128)) + bytes(2)),
    "gaps, a quad row of zeros whose bit is 1": (gaps(130, [2], b"\0\0"), bytes(130)),
    "gaps, constant": (gaps(300, [5], b"\7", CONSTANT), b"\7" * 128 + bytes(128) + b"\7" * 44),
    "gaps, coded": (gaps(130, [2], coded([7, ESCAPE], SEVEN, b"\5"), CODED), bytes(128) + b"\7\5"),
    "gaps, coded, more than a quad row": (
        gaps(300, [6], coded([7, ESCAPE] * 86, SEVEN, bytes(range(86))), CODED),
        bytes(128) + b"".join(bytes([7, i]) for i in range(86)),
    ),
    "gaps, coded, symbols of all values": (gaps(130, [2], coded([7] * 130, SEVEN), CODED), "lanes do not end on 32 .*"),
    "gaps, halved": (
        gaps(130, [2], coded([7, ESCAPE], SEVEN, b"\x0f") + b"\x21", CODED, halved=1),
        bytes(128) + b"\x17\x2f",
    ),
    "gaps, rows": (gaps(300, [5], b"\2" + b"\5" * 44, ROWS), bytes(256) + b"\5" * 44),
    "gaps, rows, a bit for no run": (gaps(300, [5], b"\4" + b"\5" * 44, ROWS), "bitmap padding"),
    "gaps, no quad row": (gaps(130, [0], b""), "bitmap"),
    "gaps, every quad row": (gaps(130, [3], bytes(130)), "bitmap"),
    "gaps, one quad row": (gaps(2, [1], b"\5\6"), "bitmap"),
    "gaps, a bit for no quad row": (gaps(130, [6], b"\5\6"), "bitmap padding"),
    "gaps, a byte for no quad row": (gaps(130, [0x102], b"\5\6"), "bitmap padding"),
    "gaps, the last bit of the bitmap": (gaps(130, [0x80000002], b"\5\6"), "bitmap padding"),
    "gaps, all bits": (gaps(130, [0xFFFFFFFF], bytes(130)), "bitmap padding"),
    "gaps, a bitmap of two words": (gaps(4100, [0, 1], b"\5\6\7\x08", log2=13), bytes(4096) + b"\5\6\7\x08"),
    "gaps, two full words": (gaps(8192, [0xFFFFFFFF] * 2, b"\5", CONSTANT, log2=13), "bitmap"),
    "gaps, half a bitmap": (
        Blocks(UINT8, 4100, [region(head(RAW, flags=GAPS) + u32(1))], log2=13),
        "section is too short",
    ),
    "gaps, too few bytes": (gaps(300, [1], bytes(100)), "section is too short"),
    "gaps, bytes of all values": (gaps(300, [1], b"\5" * 300), "padding"),
    "gaps, several planes": (
        Blocks(
            FLOAT32,
            130,
            [
                region(
                    head(RAW, CODED, CONSTANT, RAW, flags=GAPS)
                    + u32(2)
                    + b"\x7f\x7e"
                    + coded([7, 7], SEVEN)
                    + b"\1\2\3"
                )
            ],
            side=book(SEVEN),
            coded=2,
        ),
        bytes(512) + u32(0x3F870102, 0x3F070103),
    ),
    "gaps, pruned": (
        pruned([127, 0, 127], b"\x11\x22\0\0", gaps=2, n=131),
        bytes(512) + u32(0x3F910000, 0, 0x3FA20000),
    ),
    "gaps, pruned to nothing": (pruned([0, 0], bytes(3), gaps=2, n=130, modes=(CODED,)), "pruned to nothing"),
    "gaps, fixed plane": (
        pruned([127, 0], b"\x11\0", gaps=2, n=130, modes=(CODED, RAW), fixed={3: bytes(130)}),
        "gaps",
    ),
    "a flag after gaps": (Blocks(UINT8, 1, [region(head(RAW, flags=1 << 18) + b"\5")]), "region head"),
    # cases for format.md, section 7
    "more than a quad row": (
        u8([7, ESCAPE] * 100, SEVEN, bytes(range(100))),
        b"".join(bytes([7, i]) for i in range(100)),
    ),
    "another value fills up the row": (u8([7, 8], {7: 1, 8: 2, ESCAPE: 2}, pad=8), "padding symbols"),
    "an escape fills up the row": (u8([7, 8], {7: 1, 8: 2, ESCAPE: 2}, pad=ESCAPE), "padding symbols"),
    "a value, not the escape, fills up the row": (u8([7], {7: 2, 8: 2, ESCAPE: 1}, pad=7), "padding symbols"),
    "halved": (halved([7, ESCAPE, 7], b"\x21\x03", b"\x0f"), b"\x17\x3f\x27"),
    "halved, missing nibble not 0": (halved([7, ESCAPE, 7], b"\x21\x13", b"\x0f"), "nibble padding"),
    "halved, literal of 16": (halved([7, ESCAPE, 7], b"\x21\x03", b"\x10"), "literal of a plane with raw bits"),
    "halved, a code for 16": (
        halved([7], b"\1", lengths={7: 1, 16: 2, ESCAPE: 2}),
        "codebook of a plane with raw bits",
    ),
    "float8, signs raw": (raw8([7, ESCAPE, 7], b"\x05", 2, b"\x7f"), b"\x87\x7f\x87"),
    "float8, signs raw, nine values": (raw8([7] * 9, b"\x81\1", 2), b"\x87" + b"\7" * 6 + b"\x87" * 2),
    "float8, signs and last bits raw": (raw8([7, ESCAPE, 7, 7], b"\xe4", 4, b"\x3f"), b"\x0e\xfe\x0f\x8f"),
    "float8, signs and last bits raw, five values": (raw8([7] * 5, b"\xe4\3", 4), b"\x0e\x8e\x0f\x8f\x8f"),
    "float8, low nibbles coded": (raw8([7, ESCAPE, 7], b"\x21\x03", 1, b"\x0f"), b"\x17\x3f\x27"),
    "float8, missing sign not 0": (raw8([7, 7], b"\x04", 2), "padding of raw bits"),
    "float8, missing last bit not 0": (raw8([7] * 3, b"\x40", 4), "padding of raw bits"),
    "float8, no raw bits": (raw8([7] * 200, b"", 2), "section is too short"),
    "float8, literal of 128 without sign": (raw8([7, ESCAPE], b"\1", 2, b"\x80"), "literal of a plane with raw bits"),
    "float8, literal of 64 without last bit": (
        raw8([7, ESCAPE], b"\1", 4, b"\x40"),
        "literal of a plane with raw bits",
    ),
    "float8, a code for 128": (
        raw8([7], b"\1", 2, lengths={7: 1, 128: 2, ESCAPE: 2}),
        "codebook of a plane with raw bits",
    ),
    "float8, a code for 127": (raw8([7, 127], b"\2", 2, lengths={7: 1, 127: 2, ESCAPE: 2}), b"\7\xff"),
    "float8, a code for 64": (
        raw8([7], b"\1", 4, lengths={7: 1, 64: 2, ESCAPE: 2}),
        "codebook of a plane with raw bits",
    ),
    "float8, halved 3": (raw8([7], b"\1", 3), "halved"),
    "float8, halved 6": (raw8([7], b"\1", 6), "halved"),
    "float8, halved 8": (raw8([7], b"\1", 8), "halved"),
    "float8, raw bits and not coded": (Blocks(E4M3, 1, [region(head(RAW) + b"\5")], halved=2), "halved"),
    "e8m0, signs raw": (raw8([7], b"\1", 2, dtype=E8M0), "halved"),
    "uint8, signs raw": (raw8([7], b"\1", 2, dtype=UINT8), "halved"),
    "float8, pruned": (
        Blocks(E4M3, 1, [region(head(CODED, flags=PRUNED) + coded([7], SEVEN))], side=book(SEVEN), coded=1),
        "pruned",
    ),
    "float8, agreed codebook": (Blocks(E4M3, 1, [region(head(CODED))], side=u64(5), coded=1, flags=1), "flags"),
    "a model for e8m0": (Blocks(E8M0, 1, [region(head(RAW) + b"\5")], side=book(SEVEN), coded=1, flags=2), "flags"),
    "a model for float8, not coded": (Blocks(E5M2, 1, [region(head(RAW) + b"\5")], flags=2), "flags"),
    "a model for float8, base 119": (model8(0, 0, 119, b""), bytes(4096)),
    "a model for float8, base 120": (model8(0, 0, 120, b""), "base"),
    "a model for e5m2, base 123": (model8(0, 0, 123, b"", E5M2), bytes(4096)),
    "a model for e5m2, base 124": (model8(0, 0, 124, b"", E5M2), "base"),
    "a model for float8, shift 2": (model8(1, 2, 0, bytes(4)), bytes(4096)),
    "a model for float8, shift 3": (model8(1, 3, 0, bytes(4)), "shift"),
    "escaped though it has a code": (u8([7, ESCAPE], SEVEN, b"\7"), b"\7\7"),
    "no byte left for an escape": (u8([ESCAPE] * 9, SEVEN, b""), "section is too short"),
    "float64, literal": (wide(coded([ESCAPE, 7], SEVEN, b"\xff"), b"\x7f\x60", (CODED, RAW)), float64s(0xBFFF, 0x3070)),
}


def behind(lead, blocks, values):
    """Return the expected bytes, after the zeros of the leading block if `lead`."""
    return values if isinstance(values, str) else bytes(lead * 512 * oracle.DTYPES[blocks.dtype][1]) + values


def check_lossless(decode, name, lead):
    """Check a case of sections 2 to 7. `lead`: after an inserted block of zeros; decoders process blocks in pairs."""
    blocks, values = LOSSLESS_CASES[name]
    lead = lead and blocks.log2 == 9  # the leading block has 512 values
    lead = lead and not blocks.flags & 2  # a scale model fixes the number of values, so no block can be added
    check_case(decode, blocks.frame(lead), behind(lead, blocks, values))


def model(kind, shifts, base, nibbles, codec=TRUNCATE):
    """Return a frame of zeros with a scale model of one part."""
    record = struct.pack("<QIBBH", 4096, 512 if kind else 0, kind, shifts, base)
    zeros = region(u32(0) + (b"\0" if codec == TRUNCATE else bytes(4)))
    params = bytes([3, 0, 0, 8, 128]) if codec == TRUNCATE else b"\0\0\0\x08"
    side = book(SEVEN) + u32(1) + record + nibbles
    return Blocks(FLOAT32, 4096, [zeros] * 8, codec, params, side, coded=1, flags=2)


def flat(count):
    """Return the record of a part with `count` values and without offsets of rows and columns."""
    return struct.pack("<QIBBH", count, 0, 0, 0, 0), b""


def square(row, nrows, left=0):
    """Return the record of a matrix with an offset for each row and each column; `left`: values after the last row."""
    nibbles = bytes([0x21] * (nrows // 2) + [1] * (nrows % 2) + [0xE1] * (row // 2) + [1] * (row % 2))
    return struct.pack("<QIBBH", row * nrows + left, row, 3, 0, 0), nibbles


def parts(n, *parts):
    """Return a frame of n zeros with a scale model of the given parts."""
    side = book(SEVEN) + u32(len(parts)) + b"".join(record for record, _ in parts) + b"".join(x for _, x in parts)
    return Blocks(FLOAT32, n, [region(bytes(8))] * -(-n // 512), side=side, coded=1, flags=2)


PART_CASES = {
    "of one value": (1, [flat(1)]),
    "too many for one value": (1, [flat(1), flat(1)], "number of parts"),
    "none": (1, [], "number of parts"),
    "as many as may be": (4096, [flat(4094), flat(1), flat(1)]),
    "one more": (4096, [flat(4093), flat(1), flat(1), flat(1)], "number of parts"),
    "one of no values": (4096, [flat(4096), flat(0)], "segment"),
    "too few values": (4097, [flat(4096)], "segments do not add up"),
    "too many values": (4095, [flat(4096)], "segment"),
    "the smallest matrix": (4096, [square(64, 64)]),
    "the smallest matrices, as many parts as may be": (8194, [square(64, 64), flat(1), square(64, 64), flat(1)]),
    "63 columns": (4095, [square(63, 65)], "matrix"),
    "63 rows": (4095, [square(65, 63)], "matrix"),
    "not whole rows": (4160, [square(64, 64, 1), flat(63)], "matrix"),
    "odd sides": (4485, [square(69, 65)]),
}


def check_parts(decode, name):
    """Check a case of section 5.2: the number and sizes of a scale model's parts."""
    n, records, *reason = PART_CASES[name]
    check_case(decode, parts(n, *records).frame(), *reason or [bytes(4 * n)])


OFFSET_CASES = {  # dtype, octave and s of section 3; nibble of all offsets that are not 0; number of rows and columns
    f"{dtype} {name}": (number, octave, s, *how)
    for dtype, number, octave, s in (
        ("float32", FLOAT32, 128, 7),
        ("bfloat16", BFLOAT16, 128, 7),
        ("float16", FLOAT16, 1024, 7),
        ("float64", FLOAT64, 16, 4),
        ("e4m3", E4M3, 2048, 8),
        ("e5m2", E5M2, 1024, 8),
    )
    for name, how in (
        ("smallest", (-8, 65, 132)),
        ("largest", (7, 65, 132)),
        ("largest, columns no multiple of four", (7, 65, 69)),
    )
}
FIVE = {0: 3, 1: 2, 127: 2, 255: 2, ESCAPE: 3}


def check_offsets(decode, name):
    """Check a case of section 5.2: base and offsets are the smallest or the largest, so that patterns wrap around."""
    dtype, octave, s, nibble, nrows, row = OFFSET_CASES[name]
    n, size, rng = nrows * row, oracle.DTYPES[dtype][1], np.random.default_rng(len(name))
    zero, grain, shift = (octave, 256, 2) if size == 1 else (1 << s, octave // 8, 3)
    base = 0 if nibble < 0 else (32768 - zero) // grain - 1
    symbols, planes = rng.choice([0, 1, 127, 255], n), rng.integers(0, 256, (size, n), np.uint8)
    two = nibble & 15 | (nibble & 15) << 4
    nibbles = bytes([two] * (nrows // 2) + [two & 15] * (nrows % 2) + [two & 15] * (-(-row // 2)))  # every other column
    side = book(FIVE) + u32(1) + struct.pack("<QIBBH", n, row, 3, 0x11 * shift, base) + nibbles
    body = region(head(CODED) + coded(symbols.tolist(), FIVE))
    fixed = {p: planes[p].tobytes() for p in range(1, size)}
    frame = Blocks(dtype, n, [body], side=side, fixed=fixed, coded=1, flags=2, log2=14).frame()
    rest = planes[1].astype(int) if size > 1 else symbols >> 7 << s
    pattern = rest >> s + 1 << s + 8 | symbols << s & 0x7FFF | rest & (1 << s) - 1
    offset = grain * (base + (nibble << shift) * (1 + (np.arange(n) % row % 2 == 0)))
    moved = zero + (pattern - zero + offset) % (32768 - zero)
    top = np.where(pattern < zero, pattern, moved) | (rest >> s & 1) << 15
    values = np.column_stack([*planes[:1:-1], *[top & 255][: size - 1], top >> 8]).astype(np.uint8)
    check_case(decode, frame, values.tobytes())


def row_params(variant=0, options=0, bits=0, row=0):
    """Return the params of a row codec."""
    return struct.pack("<BBBBI", variant, options, bits, 0, row)


def rows(codec, n, body, params, side=b"", dtype=FLOAT32, **more):
    """Return a frame of a row codec with one block."""
    return Blocks(dtype, n, [region(body)], codec, params, side, log2=0, **more)


def zero_point(ends, codes, dtype=FLOAT32):
    """Return a frame of three values that Quantize encodes with 4 bits and a zero point."""
    return rows(QUANTIZE, 3, ends + codes, row_params(2, bits=4, row=64), dtype=dtype)


def float8(codes, scale, dtype=FLOAT32, variant=0, options=0, row=100):
    """Return a Float8 frame of one row."""
    return rows(FLOAT8, len(codes), f32(scale) + codes, row_params(variant, options, row=row), dtype=dtype)


def mxfp8(codes, e, variant=2, dtype=FLOAT32, row=32, options=0):
    """Return an MXFP8 frame of one row with exponent e."""
    return rows(FLOAT8, len(codes), bytes([e]) + codes, row_params(variant, options, row=row), dtype=dtype)


def entropy8(body=b"\0\0\x80\x40\0\0\0\0\x38", n=2, record=(2, 1024, 0, 0, 0), row=0, more=b""):
    """Return an entropy-coded Float8 frame with one part, whose record starts at an odd byte."""
    side = book(LONG) + u32(1) + struct.pack("<QIBBH", *record) + more
    return rows(FLOAT8, n, body, row_params(options=4, row=row), side, coded=1, flags=2)


def nvfp4(code, t, e):
    """Return an NVFP4 frame of two values with tensor scale t and block scale e."""
    return rows(FLOAT4, 2, bytes([e, code]), row_params(row=16), f32(t, 0))


def ternary(body, n=1, s=(2.0, 0.0), variant=0, dtype=FLOAT32, **more):
    """Return a Ternary frame of n values."""
    return rows(TERNARY, n, body, row_params(variant), f32(*s), dtype, **more)


def ternary_part(s, dtype=FLOAT16):
    """Return a Ternary frame whose scale is stored in the record of a part."""
    side = u32(1) + u64(1, 0) + f32(s, 0)
    return rows(TERNARY, 1, b"\1", row_params(), side, dtype, flags=2)


def sign_parts(side):
    """Return a Sign frame of two parts of 4,096 values: the first has one scale, the second has a scale per row."""
    blocks = Blocks(FLOAT32, 8192, [], SIGN, row_params(), u32(2) + side, log2=0, flags=2)
    blocks.regions = [region(bytes(512)), region(f32(3, 5) + b"\xff" * 512)]
    return blocks


def many_parts(*counts):
    """Return a Sign frame of parts without rows. All values are positive; the scale of part i is i + 1."""
    records = b"".join(struct.pack("<QII", count, 0, 0) for count in counts)
    scales = b"".join(f32(i + 1, 0) for i in range(len(counts)))
    blocks = Blocks(FLOAT32, sum(counts), [], SIGN, row_params(), u32(len(counts)) + records + scales, log2=0, flags=2)
    blocks.regions = [region(((1 << count) - 1).to_bytes(-(-count // 8), "little")) for count in counts]
    return blocks


def halves(*bits):
    """Pack integers as little-endian 16-bit words."""
    return struct.pack(f"<{len(bits)}H", *bits)


NEAR = 1 + 2.0**-20  # a float32 number that half precision cannot represent
ROW_CASES = {
    # cases for format.md, section 2
    "block_log2": (
        Blocks(FLOAT32, 8, [region(b"\xff")], SIGN, row_params(), f32(1, 0), log2=9),
        "planes of a codec of rows",
    ),
    "coded without an entropy stage": (
        rows(SIGN, 8, b"\xff", row_params(), book(SEVEN) + f32(1, 0), coded=1),
        "coded or flags",
    ),
    "flag 1": (rows(SIGN, 8, b"\xff", row_params(), u64(1) + f32(1, 0), flags=1), "coded or flags"),
    "float64": (rows(SIGN, 8, b"\xff", row_params(), f32(1, 0), FLOAT64), "dtype or layout of a codec"),
    # cases for format.md, sections 8.1 to 8.3
    "a reserved byte of params": (rows(SIGN, 8, b"\xff", b"\0\0\0\1", f32(1, 0)), "params"),
    "an option that is another codec's": (rows(SIGN, 8, b"\xff", row_params(options=1), f32(1, 0)), "params"),
    "ternary with rows": (rows(TERNARY, 1, f32(2) + b"\1", row_params(row=1)), "row"),
    "scale of the first kind, not used": (rows(SIGN, 8, b"\xff", row_params(), f32(1, 1)), "unused scale"),
    "part without scales has some": (entropy8(more=f32(1, 0)), "padding"),
    "scale is -0": (rows(SIGN, 8, b"\xff", row_params(), f32(-0.0, 0)), "scale"),
    "scale of a row is -0": (rows(QUANTIZE, 1, f32(-0.0) + b"\1", row_params(bits=4, row=64)), "scale"),
    "scale of a row is NaN": (rows(SIGN, 1, f32(np.nan) + b"\1", row_params(row=1)), "scale"),
    "scale is negative": (rows(SIGN, 8, b"\xff", row_params(), f32(-1, 0)), "scale"),
    "float8's scale is 0": (float8(b"\x38", 0.0), "scale 0"),
    "positive scale first, row by row": (
        rows(SIGN, 4, f32(2, 3, 5, 7) + b"\x05", row_params(2, row=2)),
        f32(2, -3, 5, -7),
    ),
    "positive scale of a part first": (rows(SIGN, 2, b"\1", row_params(2), f32(2, 3)), f32(2, -3)),
    "floats behind a codebook of odd size": (
        rows(TERNARY, 5, u32(0) + b"\xf2", row_params(2), book(LONG) + f32(2, 0), coded=1),
        f32(-2, -2, -2, -2, -2),
    ),
    "a record behind a codebook of odd size": (entropy8(), f32(0.25, 0.25)),
    "row of a record above 16,384": (entropy8(record=(2, 16385, 0, 0, 0)), "row"),
    "row of params above 16,384": (
        rows(FLOAT8, 2, f32(4) + u32(0) + b"\x38", row_params(options=4, row=16385), book(LONG), coded=1),
        "row",
    ),
    "row of a record is 0": (entropy8(record=(2, 0, 0, 0, 0)), "row"),
    "row of params and of a record": (entropy8(row=1024), "row"),
    "row is 0": (rows(FLOAT8, 1, f32(1) + b"\0", row_params()), "row"),
    "row above 2^31": (rows(FLOAT8, 1, f32(1) + b"\0", row_params(row=(1 << 31) + 1)), "row"),
    "row of 2^31": (float8(b"\x38", 4.0, row=1 << 31), f32(0.25)),
    "row of 2^32 - 1": (rows(SIGN, 8, b"\xff", row_params(row=(1 << 32) - 1), f32(1, 0)), "row"),
    "kind of a record": (entropy8(record=(2, 1024, 1, 0, 0)), "part"),
    "shifts of a record": (entropy8(record=(2, 1024, 0, 1, 0)), "part"),
    "base of a record": (entropy8(record=(2, 1024, 0, 0, 1)), "part"),
    "no record": (rows(SIGN, 8, b"\xff", row_params(), u32(0), flags=2), "nparts"),
    "as many parts as may be": (many_parts(8, 8, 16), f32(*[1] * 8, *[2] * 8, *[3] * 16)),
    "one part more": (many_parts(8, 8, 8, 8), "nparts"),
    "scales of the part that has one": (
        sign_parts(struct.pack("<QIIQII", 4096, 0, 0, 4096, 2048, 0) + f32(2, 0)),
        f32(-2) * 4096 + f32(3) * 2048 + f32(5) * 2048,
    ),
    "scales of the part that has none": (
        sign_parts(struct.pack("<QIIQII", 4096, 0, 0, 4096, 2048, 0) + f32(2, 0, 1, 0)),
        "padding",
    ),
    "no scales of the part that has some": (
        sign_parts(struct.pack("<QIIQII", 4096, 0, 0, 4096, 2048, 0)),
        "section is too short",
    ),
    "ternary's scale in bfloat16": (ternary(b"\x01", dtype=BFLOAT16), halves(0x4000)),
    "ternary's scale is no bfloat16": (ternary(b"\x01", s=(NEAR, 0), dtype=BFLOAT16), "scale of another dtype"),
    "ternary's scale is no float16": (ternary(b"\x01", s=(65536.0, 0), dtype=FLOAT16), "scale of another dtype"),
    "ternary's scale is a subnormal float16": (ternary(b"\x01", s=(2.0**-24, 0), dtype=FLOAT16), halves(1)),
    "ternary's scale is below float16": (ternary(b"\x01", s=(2.0**-25, 0), dtype=FLOAT16), "scale of another dtype"),
    "ternary's scale in a record": (ternary_part(2.0), halves(0x4000)),
    "ternary's scale in a record is no float16": (ternary_part(NEAR), "scale of another dtype"),
    # cases for format.md, section 8.4
    "ternary": (ternary(b"\x24\x02", 5), f32(0, 2, -2, 0, -2)),
    "ternary, filled up with 1": (ternary(b"\x55"), "padding"),
    "ternary, code 3": (ternary(b"\x03"), "code 3"),
    "ternary, base 3": (ternary(b"\x79\xa2", 6, variant=1), f32(*[2] * 5, -2)),
    "ternary, base 3, 243": (ternary(b"\xf3", 5, variant=1), "base 3"),
    "ternary, base 3, filled up with 1": (ternary(b"\xf2\x79", 6, variant=1), "padding"),
    "sign, filled up with 1": (rows(SIGN, 7, b"\xff", row_params(), f32(1, 0)), "padding"),
    "quantize, code above 2 L": (rows(QUANTIZE, 2, f32(3) + b"\x70", row_params(1, bits=4, row=64)), f32(-3, 0)),
    "quantize, code of 2 L + 1": (rows(QUANTIZE, 2, f32(3) + b"\xf0", row_params(1, bits=4, row=64)), "code"),
    "zero point": (zero_point(f32(-1, 6.5), b"\x0f\x02"), f32(6.5, -1, 0)),
    "zero point, one number": (zero_point(f32(5, 5), b"\x0f\x02"), f32(5, 5, 5)),
    "zero point in bfloat16": (zero_point(halves(0xBF80, 0x40D0), b"\x0f\x02", BFLOAT16), halves(0x40D0, 0xBF80, 0)),
    "zero point, low above high": (zero_point(f32(1, -1), b"\0\0"), "numbers of a row"),
    "zero point, high is NaN": (zero_point(f32(1, np.nan), b"\0\0"), "numbers of a row"),
    "zero point, low is NaN": (zero_point(f32(np.nan, 1), b"\0\0"), "numbers of a row"),
    "zero point, low is -Inf": (zero_point(f32(-np.inf, 1), b"\0\0"), "numbers of a row"),
    "zero point, high is Inf": (zero_point(halves(0, 0x7C00), b"\0\0", FLOAT16), "numbers of a row"),
    "zero point, low is -0": (zero_point(f32(-0.0, 1), b"\0\0"), "-0"),
    "zero point, high is -0": (zero_point(f32(-1, -0.0), b"\0\0"), "-0"),
    "zero point, the largest range": (
        zero_point(u32(0xFF7FFFFF, 0x7F7FFFFF), b"\xf0\x08"),
        u32(0xFF7FFFFF, 0x7F7FFFFF) + f32(F32(np.finfo(F32).max) * (F32(1) / F32(15))),
    ),
    "zero point, filled up with 1": (zero_point(f32(-1, 1), b"\0\x10"), "padding"),
    "zero point, levels of 3": (rows(QUANTIZE, 2, f32(3) + b"\0", row_params(3, bits=4, row=64)), "params"),
    "mxfp4's exponent of 253": (rows(FLOAT4, 2, b"\xfd\0", row_params(1, row=32)), "scale"),
    "mxfp4's exponent of 0": (
        rows(FLOAT4, 2, b"\0\x26", row_params(1, row=32)),
        struct.pack("<II", 0x01000000, 0x00400000),
    ),
    "mxfp8's exponent of 0": (mxfp8(b"\x01\xfe", 0), struct.pack("<If", 0x00002000, -448 * 2.0**-127)),
    "mxfp8's exponent of 246": (mxfp8(b"\x01\x7e", 246), f32(2.0**110, 448 * 2.0**119)),
    "mxfp8's exponent of 247": (mxfp8(b"\x01\x7e", 247), "scale"),
    "mxfp8's scale of NaN": (mxfp8(b"\x01\x7e", 255), "scale"),
    "mxfp8_e5m2's exponent of 0": (mxfp8(b"\x01\x7b", 0, 3), struct.pack("<If", 0x00000040, 57344 * 2.0**-127)),
    "mxfp8_e5m2's exponent of 239": (mxfp8(b"\x01\xfb", 239, 3), f32(2.0**96, -57344 * 2.0**112)),
    "mxfp8_e5m2's exponent of 240": (mxfp8(b"\x01\xfb", 240, 3), "scale"),
    "mxfp8 with option 128": (mxfp8(b"\x38", 127, options=128), f32(1)),
    "mxfp8 with options 1 and 128": (mxfp8(b"\x38", 127, options=129), "option 128"),
    "float8 with option 128": (float8(b"\x38", 1.0, options=128), "option 128"),
    "mxfp8 in rows of 64": (mxfp8(b"\x01\x7e", 127, row=64), "row"),
    "nvfp4's scale of 127": (nvfp4(0x22, 1, 127), "scale"),
    "nvfp4's scale with a sign": (nvfp4(0x22, 1, 0x80), "scale"),
    "entropy stage of mode 3": (entropy8(f32(4) + u32(3) + b"\x38"), "mode"),
    # cases for format.md, section 8.5
    "ternary, a scale of 0": (ternary(b"\x24", 3, s=(0, 0)), u32(0, 0, 0x80000000)),
    "sign of a scale of 0": (rows(SIGN, 2, b"\1", row_params(), f32(0, 0)), bytes(8)),
    "float8, -0": (float8(b"\x80\0", 3.0), u32(0x80000000, 0)),
    "float8, NaN without option 2": (float8(b"\x7f\xff\x38", 1.0), u32(0x7FC00000, 0xFFC00000, 0x3F800000)),
    "float8, NaN in bfloat16": (float8(b"\x7f\xff", 1.0, BFLOAT16), halves(0x7FC0, 0xFFC0)),
    "float8, NaN in float16": (float8(b"\x7f\xff", 1.0, FLOAT16), halves(0x7E00, 0xFE00)),
    "e5m2, NaN from 7c on": (float8(b"\x7b\x7c\xfd", 1.0, variant=1), u32(0x47600000, 0x7FC00000, 0xFFC00000)),
    "float8 beyond float32": (
        float8(b"\x7e\xfe\x01\x7f", 1e-38),
        u32(0x7F7FFFFF, 0xFF7FFFFF) + f32(F32(2**-9) / F32(1e-38)) + u32(0x7FC00000),
    ),
    "float8 beyond bfloat16": (float8(b"\x7e\xfe", 1e-38, BFLOAT16), halves(0x7F7F, 0xFF7F)),
    "float8 beyond float16": (float8(b"\x7e\xfe", 1e-5, FLOAT16), halves(0x7BFF, 0xFBFF)),
    "mxfp8, NaN and -0": (mxfp8(b"\x7f\x80", 0), u32(0x7FC00000, 0x80000000)),
    "mxfp8 beyond float16": (mxfp8(b"\x7e\xfe", 137, dtype=FLOAT16), halves(0x7BFF, 0xFBFF)),
    "nvfp4 beyond float32": (nvfp4(0xF7, 2.0**124, 0x48), u32(0x7F7FFFFF, 0xFF7FFFFF)),
    "nvfp4, d is Inf": (nvfp4(0x80, 2.0**124, 0x7E), "product of scales"),
    "nvfp4, d is 0": (nvfp4(0xF7, 2.0**124, 0), u32(0, 0x80000000)),
    "quantize, amax of 0": (rows(QUANTIZE, 2, f32(0) + b"\xf0", row_params(bits=4, row=64)), bytes(8)),
}


def check_rows(decode, name):
    """Check a case of section 8: codecs of rows."""
    blocks, values = ROW_CASES[name]
    check_case(decode, blocks.frame(), values)


def cut(dtype, n, body, levels, level=0, options=0, guard=0, lengths=SEVEN, **more):
    """Return a Truncate frame of one block."""
    params = bytes([levels, options, level, 8, guard + 128])
    return Blocks(dtype, n, [region(body)], TRUNCATE, params, book(lengths), coded=1, **more)


PLANE, JOINT, SHARED, FIXED = range(4)
FOUR = {4 * (103 - 96): 1, ESCAPE: 1}
TRUNCATE_CASES = {
    # cases for format.md, section 9.1
    "level without fixed levels": (cut(FLOAT32, 1, u32(0) + b"\0", PLANE, level=1), "level"),
    "guard with fixed levels": (cut(FLOAT32, 1, u32(0) + b"\0", FIXED, guard=1), "guard"),
    "any number of bits with fixed levels": (cut(FLOAT32, 1, u32(0) + b"\0", FIXED, options=8), "option 8"),
    "codes longer than cap": (
        Blocks(FLOAT32, 1, [region(u32(0xF02) + coded([9], LONG))], TRUNCATE, b"\3\0\0\2\x80", book(LONG), coded=1),
        u32(9 << 23),
    ),
    # cases for format.md, section 9.2
    "a model of whole octaves": (model(1, 3, 8, bytes(4)), bytes(4 * 4096)),
    "a model with finer shifts": (model(1, 0, 8, bytes(4)), "not whole octaves"),
    "a model with a shift for nothing": (model(0, 3, 8, b""), "shift"),
    "a model of half octaves": (model(0, 0, 4, b""), "not whole octaves"),
    "a lossless model of half octaves": (model(0, 0, 4, b"", codec=1), bytes(4 * 4096)),
    "float16, exponent 31": (cut(FLOAT16, 1, u32(0xF00) + b"\x1f", FIXED), halves(0x7C00)),
    "float16, exponent 32": (cut(FLOAT16, 1, u32(0xF00) + b"\x20", FIXED), "exponent"),
    "float16, raw exponent 32": (cut(FLOAT16, 1, u32(0xF01) + b"\x20", FIXED), "exponent"),
    "float16, literal 31": (cut(FLOAT16, 1, u32(0xF02) + coded([ESCAPE], SEVEN, b"\x1f"), FIXED), halves(0x7C00)),
    "float16, literal 32": (cut(FLOAT16, 1, u32(0xF02) + coded([ESCAPE], SEVEN, b"\x20"), FIXED), "exponent"),
    "float16, symbol of exponent 31": (cut(FLOAT16, 1, u32(0xF00) + b"\x7c", JOINT), halves(0x7C00)),
    "float16, symbol of exponent 32": (cut(FLOAT16, 1, u32(0xF00) + b"\x80", JOINT), "exponent"),
    "float16, literal of 31 and level": (
        cut(FLOAT16, 1, u32(0xF02) + coded([ESCAPE], SEVEN, b"\x7c\0"), JOINT),
        halves(0x7C00),
    ),
    "float16, literal of 32 and level": (
        cut(FLOAT16, 1, u32(0xF02) + coded([ESCAPE], SEVEN, b"\x80\0"), JOINT),
        "exponent",
    ),
    "literal of 255 and level": (
        cut(FLOAT32, 1, u32(0xF02) + coded([ESCAPE], SEVEN, b"\xfc\3"), JOINT),
        u32(0x7F800000),
    ),
    "literal of 256": (cut(FLOAT32, 1, u32(0xF02) + coded([ESCAPE], SEVEN, b"\0\4"), JOINT), "exponent"),
    "literal of 0": (cut(FLOAT32, 1, u32(0xF02) + coded([ESCAPE], SEVEN, b"\0\0"), JOINT), bytes(4)),
    "literal of 0 with a level": (cut(FLOAT32, 1, u32(0xF02) + coded([ESCAPE], SEVEN, b"\1\0"), JOINT), "symbol"),
    "symbol of 0 with a level": (cut(FLOAT32, 1, u32(0xF00) + b"\3", JOINT), "symbol"),
    "raw symbols with levels": (cut(FLOAT32, 1, u32(0xF01) + b"\x7c", JOINT), "raw symbols with levels"),
    "literal that has a code": (
        cut(FLOAT32, 1, u32(0xF02) + coded([ESCAPE], FOUR, b"\x9c\1"), JOINT, lengths=FOUR),
        u32(103 << 23),
    ),
    # cases for format.md, section 9.3
    "Inf of level 0": (cut(FLOAT32, 2, u32(0xF01) + b"\x7f\xff\3", PLANE), u32(0x3F800000, 0x7F800000)),
    "Inf of level 1": (cut(FLOAT32, 2, u32(0xF01) + b"\x7f\xff\7", PLANE), "level of Inf or NaN"),
    "Inf of level 1 in a symbol": (cut(FLOAT16, 1, u32(0xF00) + b"\x7d", JOINT), "level of Inf or NaN"),
    "Inf of level 1 in a literal": (
        cut(FLOAT32, 1, u32(0xF02) + coded([ESCAPE], SEVEN, b"\xfd\3"), JOINT),
        "level of Inf or NaN",
    ),
    "NaN under fixed levels": (
        cut(FLOAT32, 2, u32(0xB01) + b"\x7f\xff" + b"\5", FIXED, level=3),  # the NaN keeps a third piece
        u32(0x3F800000, 0x7F800000 | 5 << 6),
    ),
    # cases for format.md, section 9.4
    "gaps": (cut(FLOAT32, 130, u32(0xF01 | GAPS, 2) + b"\x7f\0", FIXED), bytes(512) + u32(0x3F800000, 0)),
    "gaps, the last quad row": (cut(FLOAT16, 130, u32(0xF00 | GAPS, 1) + b"\7", FIXED), halves(*[7 << 10] * 128, 0, 0)),
    "gaps, coded": (
        cut(BFLOAT16, 130, u32(0xF02 | GAPS, 2) + coded([7, ESCAPE], SEVEN, b"\x7f"), FIXED),
        bytes(256) + halves(7 << 7, 127 << 7),
    ),
    "gaps, levels in symbols": (
        cut(FLOAT32, 130, u32(0xF02 | GAPS, 2) + coded([28, ESCAPE], FOUR, b"\xfc\1"), JOINT, lengths=FOUR),
        bytes(512) + u32(103 << 23, 127 << 23),
    ),
    "gaps, levels in a plane": (
        cut(FLOAT32, 130, u32(0xE01 | GAPS, 2) + b"\x7f\x7f" + b"\x0c" + b"\x20\x08", PLANE),
        bytes(512) + u32(0xBF800000, 0xBF800000),
    ),
    "gaps, no quad row": (cut(FLOAT32, 130, u32(0xF01 | GAPS, 0), FIXED), "bitmap"),
    "gaps, every quad row": (cut(FLOAT32, 130, u32(0xF01 | GAPS, 3) + bytes(130), FIXED), "bitmap"),
    "gaps, a bit for no quad row": (cut(FLOAT32, 130, u32(0xF01 | GAPS, 6) + b"\x7f\0", FIXED), "bitmap padding"),
    "gaps, exponent too large": (cut(FLOAT16, 130, u32(0xF01 | GAPS, 2) + b"\x7f\0", FIXED), "exponent"),
    "a piece of zeros that is kept": (cut(FLOAT32, 1, u32(0xE00) + b"\x7f\0", FIXED), u32(0x3F800000)),
    "symbols of mode 3": (cut(FLOAT32, 1, u32(0xF03) + b"\0", FIXED), "head"),
    "a reserved bit of the head": (cut(FLOAT32, 1, u32(0x1F00) + b"\0", FIXED), "head"),
}


def check_truncate(decode, name, lead):
    """Check a case of section 9: Truncate."""
    blocks, values = TRUNCATE_CASES[name]
    lead = lead and not blocks.flags & 2  # a scale model fixes the number of values, so no block can be added
    check_case(decode, blocks.frame(lead), behind(lead, blocks, values))


# (theta, exponent field of A, number of the 24 bits that Truncate keeps of a value near 1.0)
SHARED_LEVEL_CASES = {
    "as much as there is": (np.inf, 255, 6),
    "none, a subnormal": (1e-45, 0, 24),
    "none, a zero": (0.0, 0, 24),
    "none, a NaN": (np.nan, 0, 24),
    "twelve": (2.0**12, 127 + 12, 12),
}


def check_shared_levels(decode, name, by_bit):
    """Check a case of section 9.3: shared levels if A is not a normal number. Inf and NaN keep all bits."""
    theta, a, keeps = SHARED_LEVEL_CASES[name]
    keeps += (by_bit != 0) * (keeps == 6) * -5  # option 8 drops 23 bits here: only the sign is left
    widths = (keeps, 24)
    fields = [(1 << 24) - (1 << 24 - w) for w in widths]
    if by_bit:
        pieces = [[(f >> 24 - w, w) for f, w in zip(fields, widths, strict=True)]]
    else:
        pieces = [[(63, 6) for w in widths if w >= 6 * i + 6] for i in range(4)]
    body = b"\x7f\xff"
    for piece in pieces:
        total = at = 0
        for value, w in piece:
            total |= value << at
            at += w
        body += total.to_bytes(-(-at // 8), "little")
    values = u32(*(f >> 23 << 31 | e << 23 | f & 0x7FFFFF for f, e in zip(fields, (127, 255), strict=True)))
    exponents = np.full(2, a)
    name_of_state = oracle.digest(bytes([a, a]), 0x500) & 0xFFFFFFFF
    how = {"optimizer": codec.optimizers.SGD(1.0), "state": {"theta": np.full(2, theta, F32)}}
    frame = cut(FLOAT32, 2, u32(1, name_of_state) + body, SHARED, options=by_bit).frame()
    check_case(decode, frame, values, exponents, **how)
    other = cut(FLOAT32, 2, u32(1, name_of_state ^ 1) + body, SHARED, options=by_bit).frame()
    with pytest.raises(oracle.Bad, match="state"):
        oracle.decode(other, None, exponents)
    with pytest.raises(codec.StateError):
        flatcall.decode(other, **how)
    for t, powers in ((24, u32(0x3F800000, 0x7F800000)), (25, "head")) if by_bit else ():
        tail = cut(FLOAT32, 2, u32(1 | t << 8, name_of_state) + b"\x7f\xff", SHARED, options=8).frame()
        check_case(decode, tail, powers, exponents, **how)


# check function and arguments of each case, called as check(decode, *arguments)
HAND_MADE = {
    f"{check.__name__[6:]}-{name}-{way}": (check, name, *([] if way is None else [way]))
    for check, names, ways in (
        (check_lossless, LOSSLESS_CASES, (False, True)),
        (check_parts, PART_CASES, (None,)),
        (check_offsets, OFFSET_CASES, (None,)),
        (check_truncate, TRUNCATE_CASES, (False, True)),
        (check_shared_levels, SHARED_LEVEL_CASES, (0, 8)),
        (check_rows, ROW_CASES, (None,)),
    )
    for name in names
    for way in ways
}
