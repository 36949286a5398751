"""Rules of docs/spec/format.md that are easy to misread: library and reference decoder agree on hand-made frames."""

import struct

import numpy as np
import pytest

import codec
from codec._c.library import isas, use_isa
from reference import decoder as oracle
from reference.decoder import ESCAPE
from support import flatcall
from support.decode_ways import decode_all_ways
from support.format_cases import (
    BOOL,
    F32,
    FLOAT8,
    FLOAT32,
    LOSSLESS_CASES,
    OFFSET_CASES,
    PART_CASES,
    RAW,
    ROW_CASES,
    SEVEN,
    SHARED_LEVEL_CASES,
    TRUNCATE,
    TRUNCATE_CASES,
    UINT8,
    check_case,
    check_lossless,
    check_offsets,
    check_parts,
    check_rows,
    check_shared_levels,
    check_truncate,
    head,
    row_params,
    u8,
    u32,
    u64,
)
from support.frame_builder import Blocks, recompute_checksums, region, stored

LEADS = pytest.mark.parametrize("lead", [False, True], ids=["alone", "behind a block"])


@LEADS
@pytest.mark.parametrize("name", LOSSLESS_CASES)
def test_lossless(name, lead):
    """Library and reference decoder agree on lossless frames (sections 2 to 7)."""
    check_lossless(decode_all_ways, name, lead)


@pytest.mark.parametrize("name", PART_CASES)
def test_parts(name):
    """Library and reference decoder agree on the number and sizes of a scale model's parts (section 5.2)."""
    check_parts(decode_all_ways, name)


@pytest.mark.parametrize("name", OFFSET_CASES)
def test_offsets(name):
    """Library and reference decoder agree on the smallest and largest offsets (section 5.2)."""
    check_offsets(decode_all_ways, name)


@pytest.mark.parametrize("name", ROW_CASES)
def test_rows(name):
    """Library and reference decoder agree on row codecs (section 8)."""
    check_rows(decode_all_ways, name)


@LEADS
@pytest.mark.parametrize("name", TRUNCATE_CASES)
def test_truncate(name, lead):
    """Library and reference decoder agree on Truncate (section 9)."""
    check_truncate(decode_all_ways, name, lead)


@pytest.mark.parametrize("name", SHARED_LEVEL_CASES)
@pytest.mark.parametrize("by_bit", [0, 8])
def test_shared_levels(name, by_bit):
    """Library and reference decoder agree on shared levels (section 9.3)."""
    check_shared_levels(decode_all_ways, name, by_bit)


STORED = {
    "of 1,000 values": (stored(UINT8, (10, 100), bytes(range(250)) * 4), bytes(range(250)) * 4),
    "of float8 without values": (stored(FLOAT32, (0, 5), b"", FLOAT8, row_params()), b""),
    "of float8 with a row": (stored(FLOAT32, (0, 5), b"", FLOAT8, row_params(row=9)), "row"),
    "of float8 with values": (stored(FLOAT32, (1,), bytes(4), FLOAT8, row_params(row=9)), "dtype or layout of a codec"),
    "of truncate with values": (stored(FLOAT32, (1,), u32(5), TRUNCATE, b"\0\0\0\x08\x80"), u32(5)),
    "with another size": (stored(FLOAT32, (1,), bytes(8)), "size"),
    "with params of no variant": (stored(FLOAT32, (0,), b"", FLOAT8, row_params(4)), "params"),
    "with params of no cap": (stored(FLOAT32, (1,), bytes(4), params=b""), "params"),
    "with a flag": (stored(FLOAT32, (1,), bytes(4), flags=2), "stored"),
    "with block_log2": (stored(FLOAT32, (1,), bytes(4), log2=9), "stored"),
    "with a side section": (stored(FLOAT32, (1,), bytes(4), side=8), "stored"),
    "with a coded plane": (stored(FLOAT32, (1,), bytes(4), coded=1), "stored"),
    "with a block": (stored(FLOAT32, (1,), bytes(4), blocks=1), "stored"),
    "of bools": (stored(BOOL, (2,), b"\2\xff"), b"\2\xff"),
    "with sides of 2^59 and 0": (stored(UINT8, (1 << 59, 0), b""), b""),
    "with sides of 2^60 and 0": (stored(UINT8, (0, 1 << 60), b""), "shape"),
    "with sides that make 2^60 and 0": (stored(UINT8, (1 << 30, 0, 1 << 30), b""), "shape"),
    "with sides of 0 and 2^63": (stored(UINT8, (0, 1 << 63), b""), "shape"),
    "with sides that make 2^64 and 0": (stored(UINT8, (1 << 32, 1 << 32, 0), b""), "shape"),
}


@pytest.mark.parametrize("name", STORED)
def test_stored(name):
    """Library and reference decoder agree on stored frames and on shapes (section 2)."""
    check_case(decode_all_ways, *STORED[name])


def test_codebook_id_is_a_digest_of_lengths_and_symbols():
    """A codebook's id is the specified digest of its lengths and symbols (section 5.1)."""
    counts = np.zeros(256, int)
    counts[115:135] = np.arange(1, 21)
    mine = codec.Codebook.from_counts(counts)
    lengths = [*mine.lengths, mine.escape_length]
    assert mine.id == oracle.codebook_id(lengths, 0)
    assert len({oracle.codebook_id(lengths, symbols) for symbols in range(4)}) == 4
    x = np.random.default_rng(0).standard_normal(600).astype(F32)
    frame = bytearray(codec.encode(x, codebook=mine))
    assert frame[40] & 1
    assert oracle.decode(bytes(frame), {mine.id: lengths})[2] == x.tobytes()
    struct.pack_into("<Q", frame, 56, mine.id ^ 1)
    with pytest.raises(oracle.Bad, match="name"):
        oracle.decode(recompute_checksums(frame), {mine.id ^ 1: lengths})
    with pytest.raises(codec.ArgumentError):
        codec.Codebook(mine.lengths, mine.escape_length, mine.id ^ 1)


@pytest.mark.parametrize(
    ("spec", "dtype", "symbols"),
    [
        (codec.Truncate(), "float32", 2),
        (codec.Truncate(), "float16", 3),
        (codec.Truncate(2), "float32", 1),
        (codec.Truncate(2), "float16", 1),
        (codec.Truncate(level_coding="plane"), "float32", 1),
    ],
)
def test_codebook_id_depends_on_the_kind_of_symbols(spec, dtype, symbols):
    """Decoding a Truncate frame rejects a codebook of equal lengths for other symbols (section 5.1)."""
    x = np.random.default_rng(0).standard_normal(3000).astype(dtype)
    how = {}
    if spec.fixed_level is None:
        how = {"optimizer": codec.optimizers.SGD(1.0), "state": {"theta": x.astype(F32)}}
    mine = flatcall.codebook(x, spec=spec, **how)
    lengths = [*mine.lengths, mine.escape_length]
    assert mine.id == oracle.codebook_id(lengths, symbols)
    frame = bytearray(flatcall.encode(x, spec, codebook=mine, **how))
    assert frame[40] & 1
    assert oracle.decode(bytes(frame), {mine.id: lengths})[2] == codec.decode(frame, codebooks=mine).tobytes()
    for wrong in {0, 1, 2, 3} - {symbols}:
        ident = oracle.codebook_id(lengths, wrong)
        struct.pack_into("<Q", frame, 56, ident)
        valid = recompute_checksums(frame)
        with pytest.raises(oracle.Bad, match="name"):
            oracle.decode(valid, {ident: lengths})
        with pytest.raises(codec.CodecError):
            codec.decode(valid, codebooks=codec.Codebook(mine.lengths, mine.escape_length, ident, wrong))


def test_shared_codebook_needs_a_float_dtype():
    """A uint8 frame with flag 1, shared codebook, is rejected even if the codebook is given (section 2)."""
    lengths = [1 if i in (7, ESCAPE) else 0 for i in range(257)]
    ident = oracle.codebook_id(lengths, 0)
    frame = u8([7, 7], SEVEN)
    frame.side, frame.flags = u64(ident), 1
    with pytest.raises(oracle.Bad, match="flags"):
        oracle.decode(frame.frame(), {ident: lengths})
    with pytest.raises(codec.FrameError):
        codec.decode(frame.frame(), codebooks=codec.Codebook(bytes(lengths[:256]), 1, ident))


def test_lowest_damaged_block_is_reported():
    """The lowest damaged block is reported, checksum before structure, for any threads and `out` (section 12)."""
    good, bad = region(head(RAW) + bytes(512)), region(head(RAW) + bytes(511) + bytes(9))
    for malformed, damaged, expected in (
        (1, 2, codec.FrameError),
        (2, 1, codec.ChecksumError),
        (1, 1, codec.ChecksumError),
    ):
        regions = [bad if b == malformed else good for b in range(4)]
        frame = bytearray(Blocks(UINT8, 4 * 512, regions).frame())
        frame[8 * struct.unpack_from("<I", frame, 56 + 8 * (damaged - 1))[0] + 100] ^= 1
        found = set()
        for isa in isas():
            with use_isa(isa):
                for threads in (1, 2, 4):
                    for out in (None, np.zeros(2048, np.uint8)):
                        with pytest.raises(codec.FrameError) as caught:
                            codec.decode(frame, out=out, options=codec.options(threads=threads))
                        assert type(caught.value) is expected
                        found.add((caught.value.code, caught.value.offset))
        assert len(found) == 1


def test_damage_is_reported_before_wrong_arguments():
    """Damage is reported before a wrong `out` or a missing codebook (section 12)."""
    x = np.random.default_rng(0).standard_normal(600).astype(F32)
    counts = np.bincount(x.view(np.uint32) >> 23 & 255, minlength=256)
    for how in ({}, {"codebook": codec.Codebook.from_counts(counts)}):
        frame = bytearray(flatcall.encode(x, **how))
        with pytest.raises(codec.StateError if how else codec.ArgumentError):
            codec.decode(frame, out=None if how else np.empty(599, F32))
        frame[-20] ^= 1
        with pytest.raises(codec.ChecksumError):
            codec.decode(frame, out=None if how else np.empty(599, F32))
