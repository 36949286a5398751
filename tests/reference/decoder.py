"""Reference decoder of frames: slow, simple, and written from docs/spec/format.md alone with numpy and struct.

The decoder shares no code with the library. One file: it is read beside the specification, section by section.

``python tests/reference/decoder.py FRAME`` dumps a frame; ``--example`` dumps the example of section 0.
"""

import struct
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15

# (name, byte planes, octave, s) by dtype number; octave and s are 0 for dtypes without a pattern (section 3). s of
# float8 is the position of the lowest bit of its pattern that can be set.
DTYPES = {
    1: ("float32", 4, 128, 7),
    2: ("float64", 8, 16, 4),
    3: ("bfloat16", 2, 128, 7),
    4: ("float16", 2, 1024, 7),
    5: ("float8_e4m3fn", 1, 2048, 8),
    6: ("float8_e5m2", 1, 1024, 8),
    7: ("float8_e4m3fnuz", 1, 2048, 8),
    8: ("float8_e5m2fnuz", 1, 1024, 8),
    9: ("float8_e8m0fnu", 1, 0, 0),
    16: ("bool", 1, 0, 0),
    **{17 + i: (f"int{8 << i}", 1 << i, 0, 0) for i in range(4)},
    **{21 + i: (f"uint{8 << i}", 1 << i, 0, 0) for i in range(4)},
}


def zero_of(dtype: int) -> int:
    """Return the smallest pattern that a lossless scale model lowers (section 3)."""
    _, nplanes, octave, s = DTYPES[dtype]
    return octave if nplanes == 1 else 1 << s


def grain_of(dtype: int) -> int:
    """Return the number of patterns of which offsets are multiples (section 3)."""
    _, nplanes, octave, _ = DTYPES[dtype]
    return 256 if nplanes == 1 else octave // 8


class Bad(Exception):
    """Raised for an invalid frame; the message names the violated rule."""


def need(condition: Any, what: str) -> None:
    """Raise Bad(what) if `condition` is false."""
    if not condition:
        raise Bad(what)


# by codec: number of variants, mask of allowed options, largest `bits`, least and largest max_code_length
PARAMS = {
    1: (3, 0, 0, 2, 8),
    2: (3, 0, 0, 0, 0),
    3: (3, 32, 0, 0, 0),
    4: (4, 135, 0, 0, 0),
    5: (2, 1, 0, 0, 0),
    6: (3, 1, 8, 0, 0),
    7: (4, 24, 3, 2, 8),
    8: (1, 0, 0, 0, 0),
    9: (1, 1, 8, 0, 0),
}


def check_params(codec: int, variant: int, options: int, bits: int, max_code_length: int, row: int) -> None:
    """Check the header's params by the rules of section 2. Class Rows checks `row` for codecs 2 to 6."""
    variants, allowed, most, *caps = PARAMS[codec]
    need(
        variant < variants and not options & ~allowed and bits <= most and caps[0] <= max_code_length <= caps[1],
        "params",
    )
    need(codec != 1 or row == 0, "row of lossless")
    need(codec != 8 or row == 0, "row of delta")
    need(codec != 6 or bits >= (2 if variant == 1 else 1), "bits")
    need(codec != 4 or not options & 128 or (variant >= 2 and not options & 1), "option 128")
    need(codec != 9 or bits, "bits")
    if codec == 7:
        need(not options & 8 or variant == 2, "option 8")
        need(variant == 3 or bits == 0, "level")
        need(row == 128 if variant == 3 else row <= 255, "guard")


def mix(x: int) -> int:
    """Mix a 64-bit word with the finalizer of splitmix64 (section 13)."""
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK64
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def key(i: int) -> int:
    """Return word i of the key of the digest (section 13)."""
    x = i + 1
    x ^= x >> 16
    x = x * 0x85EBCA6B & 0xFFFFFFFF
    x ^= x >> 13
    x = x * 0xC2B2AE35 & 0xFFFFFFFF
    return (x ^ x >> 16) | 1


KEYS = np.array([key(i) for i in range(256)], np.uint64)


def digest(data: bytes, seed: int) -> int:
    """Return the 64-bit digest of `data` with a seed (section 13)."""
    total = 0
    for c in range(0, len(data), 1024):
        words = np.frombuffer(data[c : c + 1024].ljust(1024, b"\0"), "<u4").astype(np.uint64)
        s = int((words * KEYS).sum(dtype=np.uint64))  # numpy wraps around modulo 2^64
        total += mix((s + ((seed << 40) + c // 1024) * GOLDEN) & MASK64)
    return total & MASK64


@dataclass
class Segment:
    """Part of the scale model: its range of values, and the offsets of its rows and columns in grains."""

    start: int
    count: int
    cols: int
    kind: int
    base: int
    shifts: tuple[int, int]
    rows_q: list[int] = field(default_factory=list)
    cols_q: list[int] = field(default_factory=list)


ESCAPE = 256


class Codebook:
    """Codebook with the code lengths in bits of the byte values 0 to 255 and, at index 256, of the escape."""

    def __init__(self, lengths: list[int]) -> None:
        codes = [i for i in range(257) if lengths[i]]
        need(lengths[ESCAPE] and all(0 <= x <= 8 for x in lengths), "code length")
        need(2 <= len(codes) <= 256 and sum(1 << (8 - lengths[i]) for i in codes) == 256, "Kraft sum")
        self.lengths = lengths
        self.table: list[tuple[int, int]] = []  # (value, code length) for each value of the next 8 bits
        for i in sorted(codes, key=lambda i: (lengths[i], i)):
            self.table += [(i, lengths[i])] * (1 << (8 - lengths[i]))
        self.first = self.table[0][0]


def codebook_id(lengths: list[int], symbols: int) -> int:
    """Return the id of a shared codebook, a digest of its code lengths and kind of symbols."""
    return digest(bytes([*lengths, symbols]), 0x101) or 1


class Reader:
    """Cursor over a section of a frame; a read beyond the section's end raises Bad."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self.data, self.at, self.end = data, at, end

    def take(self, n: int) -> bytes:
        need(n <= self.end - self.at, "section is too short")
        self.at += n
        return self.data[self.at - n : self.at]

    def ints(self, fmt: str) -> tuple[int, ...]:
        return struct.unpack("<" + fmt, self.take(struct.calcsize("<" + fmt)))

    def zeros(self, limit: int) -> None:
        """Check that the rest of the section is padding: zero bytes, fewer than `limit`."""
        rest = self.take(self.end - self.at)
        need(len(rest) < limit and not any(rest), "padding")


def nibbles(r: Reader, n: int) -> list[int]:
    """Read n 4-bit numbers, low nibble first."""
    data = r.take((n + 1) // 2)
    out = [data[i // 2] >> 4 * (i % 2) & 15 for i in range(2 * len(data))]
    need(not any(out[n:]), "nibble padding")
    return out[:n]


def read_codebook(r: Reader) -> Codebook:
    """Read a stored codebook (section 5.1)."""
    head, first, last = r.ints("BBB")
    need(1 <= first <= last or (first, last) == (1, 0), "first or last")
    lengths = [0] * 257
    lengths[first : last + 1] = nibbles(r, last - first + 1)
    need(last == 0 or (lengths[first] and lengths[last]), "first or last without a code")
    lengths[0], lengths[ESCAPE] = head >> 4, head & 15
    return Codebook(lengths)


def read_segments(r: Reader, n: int, grain: int, zero: int) -> list[Segment]:
    """Read the parts of the scale model (section 5.2)."""
    most = 2 if grain == 256 else 3
    (nparts,) = r.ints("I")
    need(1 <= nparts <= 2 * (n // 4096) + 1, "number of parts")
    segments, start = [], 0
    for _ in range(nparts):
        count, cols, kind, shift, base = r.ints("QIBBH")
        need(1 <= count <= n - start and kind in (0, 1, 3), "segment")
        need(base < (32768 - zero) // grain, "base")
        need(kind == 3 or cols == (0, 512)[kind], "cols")
        if kind == 3:
            need(cols >= 64 and count % cols == 0 and count // cols >= 64, "matrix")
        need((shift & 15) <= (most if kind & 1 else 0) and (shift >> 4) <= (most if kind & 2 else 0), "shift")
        segments.append(Segment(start, count, cols, kind, base, (shift & 15, shift >> 4)))
        start += count
    need(start == n, "segments do not add up")
    signed = lambda v: (v ^ 8) - 8
    for s in segments:
        if s.kind & 1:
            s.rows_q = [signed(v) << s.shifts[0] for v in nibbles(r, -(-s.count // s.cols))]
        if s.kind & 2:
            s.cols_q = [signed(v) << s.shifts[1] for v in nibbles(r, s.cols)]
    return segments


def offsets(segments: list[Segment], grain: int, first: int, m: int) -> np.ndarray[Any, Any]:
    """Return the offset, in units of patterns, of each value from index `first` to `first + m`."""
    out = np.zeros(m, np.int64)
    for s in segments:
        lo, hi = max(first, s.start), min(first + m, s.start + s.count)
        if lo >= hi:
            continue
        i = np.arange(lo, hi) - s.start
        q = np.full(hi - lo, s.base)
        if s.kind & 1:
            q += np.array(s.rows_q)[i // s.cols]
        if s.kind & 2:
            q += np.array(s.cols_q)[i % s.cols]
        out[lo - first : hi - first] = grain * q
    return out


def raised(u: np.ndarray[Any, Any], off: np.ndarray[Any, Any], zero: int) -> np.ndarray[Any, Any]:
    """Undo the lowering: add the offsets to patterns, modulo the range above `zero`."""
    return np.where(u < zero, u, zero + (u - zero + off) % (32768 - zero))


def decode_lanes(book: Codebook, r: Reader, k: int, wide: bool = False) -> tuple[list[int], list[int]]:
    """Decode a coded plane; return its k symbols, escapes replaced by literals, and the indices of escapes."""
    begin = r.at
    (nwords,) = r.ints("H")
    bits = "".join(f"{b:08b}" for b in r.take(20))
    tails = [int(bits[5 * i : 5 * i + 5], 2) for i in range(32)]
    total = sum(tails)
    bits = "".join(f"{b:08b}" for b in r.take((total + 7) // 8))
    need("1" not in bits[total:], "tail padding")
    while (r.at - begin) % 4:
        need(r.take(1) == b"\0", "padding to 4 bytes")
    words = list(r.ints(f"{nwords}I"))
    need(not words or words[-1], "last word is 0")
    words += [0] * 32
    lanes, at = [], 0
    for i in range(32):
        lanes.append(f"{words[i]:032b}" + bits[at : at + tails[i]])
        at += tails[i]
    taken, out = 32, []
    for _ in range(-(-k // 128)):
        for i in range(32):
            for _ in range(4):
                value, length = book.table[int(lanes[i][:8].ljust(8, "0"), 2)]
                lanes[i] = lanes[i][length:]
                out.append(value)
            if len(lanes[i]) < 32:
                lanes[i] += f"{words[taken] if taken < len(words) else 0:032b}"
                taken += 1
    need(all(lane == "0" * 32 for lane in lanes), "lanes do not end on 32 zero bits")
    need(taken >= nwords, "words are left over")
    need(all(v == book.first for v in out[k:]), "padding symbols")
    escaped = [i for i, v in enumerate(out[:k]) if v == ESCAPE]
    for i in escaped:
        (out[i],) = r.ints("H" if wide else "B")
    return out[:k], escaped


def decode(
    frame: bytes,
    codebooks: dict[int, list[int]] | None = None,
    a_exponents: np.ndarray[Any, Any] | None = None,
    base: bytes | None = None,
) -> tuple[str, tuple[int, ...], bytes]:
    """Decode a frame; return the dtype's name, the shape, and the values' little-endian bytes.

    ``codebooks``: codebook id -> 257 code lengths, of byte values 0 to 255 and then of the escape.
    ``a_exponents``: exponent field of the float32 number A of each value (section 9.3), needed for shared levels.
    ``base``: little-endian bytes of the base tensor of a Delta frame.
    """
    need(len(frame) >= 48, "truncated")
    magic, version, codec, dtype, rank, layout, block_log2, fixed, coded, side_nbytes = struct.unpack_from(
        "<4sBBBBBBBBI", frame
    )
    frame_nbytes, checksum, *params = struct.unpack_from("<QQBBBBI", frame, 16)
    flags, halved, reserved, nblocks = struct.unpack_from("<BBHI", frame, 40)
    need(magic == b"CODC" and version == 1 and 1 <= codec <= 9, "magic, version or codec")
    need(dtype in DTYPES and rank <= 8 and layout <= 1, "dtype, rank or layout")
    need(reserved == 0 and flags <= 3, "reserved")
    check_params(codec, *params)
    name, nplanes, octave, _ = DTYPES[dtype]
    need(len(frame) >= 48 + 8 * rank, "truncated")
    shape = struct.unpack_from(f"<{rank}Q", frame, 48)
    n = 1
    for s in shape:
        n *= s or 1
    need(n < 1 << 60, "shape")
    n *= 0 not in shape
    need(len(frame) == frame_nbytes, "size")
    header_nbytes = 48 + 8 * rank
    computed = digest(frame[:24] + bytes(8) + frame[32:header_nbytes], 0x100)
    truncate = Truncate(params, dtype, a_exponents) if codec == 7 else None
    rows = Rows(codec, params, n, flags) if 1 < codec < 7 else None
    if 1 < codec < 8 or codec == 9:
        need(dtype in (1, 3, 4) and (codec == 7 or (layout == 1) == (n > 0)), "dtype or layout of a codec")
    if codec == 8:
        need(layout == 1 and not any((fixed, coded, halved, flags)) and side_nbytes == 16, "fields of delta")
        need(10 <= block_log2 <= 18 if nblocks else block_log2 == 0, "blocks of delta")
        need(len(frame) % 8 == 0 and len(frame) // 8 < 1 << 32, "sizes")
        values = Delta(dtype, n, base).decode(frame, header_nbytes, 1 << block_log2, nblocks, computed, checksum)
        return name, shape, values
    if layout == 0:
        need(not any((block_log2, fixed, coded, halved, side_nbytes, flags, nblocks)), "stored")
        need(codec != 9 or not params[4], "group_size of a stored frame")
        values = frame[header_nbytes:]
        need(len(values) == n * nplanes, "size")
        need((computed + digest(b"", 0x101) + mix(digest(values, 0x300) ^ GOLDEN)) & MASK64 == checksum, "checksum")
        return name, shape, values

    if rows:
        need(not any((block_log2, fixed, halved)), "planes of a codec of rows")
        need(coded == rows.entropy and flags in (0, 2), "coded or flags")
        values = rows.decode(frame, dtype, header_nbytes, side_nbytes, nblocks, computed, checksum)
        return name, shape, narrow(values, dtype)
    if codec == 9:
        need(not any((fixed, coded, halved, flags, side_nbytes)), "fields of topk")
        topk = TopK(params[2], params[4], n)
        need(topk.c <= block_log2 <= 16 and nblocks == -(-n // (1 << block_log2)), "blocks of topk")
        values = topk.decode(frame, header_nbytes, 1 << block_log2, nblocks, computed, checksum)
        return name, shape, narrow(narrowed(values, dtype) + F32(0), dtype)  # + 0 turns -0 into +0
    planes_mask = (1 << nplanes) - 1
    need(n and 9 <= block_log2 <= 14 and not (fixed | coded) & ~planes_mask and not fixed & coded, "planes")
    if octave and nplanes == 1:
        need(halved in (0, 1, 2, 4) and (coded or not halved), "halved")
    else:
        need(not halved & ~coded and not (octave and halved & 1), "halved")
    need(side_nbytes % 8 == 0 and frame_nbytes % 8 == 0 and frame_nbytes // 8 < 1 << 32, "sizes")
    need(not flags or (coded & 1 and octave and (nplanes > 1 or flags == 2)), "flags")
    if truncate:
        need(coded == 1 and not fixed and not halved, "planes of truncate")
    block = 1 << block_log2
    need(nblocks == -(-n // block), "nblocks")
    r = Reader(frame, header_nbytes, header_nbytes + side_nbytes)
    need(r.end <= len(frame), "side section")
    books: dict[int, Codebook] = {}
    if flags & 1:
        (ident,) = r.ints("Q")
        need(ident, "codebook id 0")
        books[0] = Codebook((codebooks or {})[ident])
        symbols = truncate.symbols if truncate else 0
        need(codebook_id(books[0].lengths, symbols) == ident, "codebook of another name")
    for p in range(nplanes):
        if coded >> p & 1 and p not in books:
            books[p] = read_codebook(r)
            symbols = 1 << 8 - raw_bits(halved, p, nplanes)
            need(not any(books[p].lengths[symbols:ESCAPE]), "codebook of a plane with raw bits")
    zero, grain = 1024 if truncate and dtype == 4 else zero_of(dtype), grain_of(dtype)
    segments = read_segments(r, n, grain, zero) if flags & 2 else []
    for g in segments if truncate else []:
        need(g.base % 8 == 0 and g.shifts == tuple(3 if g.kind & k else 0 for k in (1, 2)), "not whole octaves")
    r.zeros(8)
    computed += digest(frame[header_nbytes : r.end], 0x101)
    directory_at = r.end
    directory = frame[directory_at : directory_at + 8 * nblocks]
    need(len(directory) == 8 * nblocks, "directory")
    computed += digest(directory, 0x200)
    at = directory_at + 8 * nblocks
    fixed_at = {}
    for p in range(nplanes):
        if fixed >> p & 1:
            fixed_at[p] = at
            at += -(-n // 8) * 8
            need(not any(frame[fixed_at[p] + n : at]), "fixed plane padding")
    bits = np.zeros(n, np.uint64)
    for b in range(nblocks):
        end, short = struct.unpack_from("<II", directory, 8 * b)
        end *= 8
        need(at < end <= len(frame), "directory")
        first = b * block
        m = min(block, n - first)
        slices = {p: frame[a + first : a + first + m] for p, a in fixed_at.items()}
        d = digest(frame[at:end], 0x300) + sum(digest(x, 0x400 + p) for p, x in slices.items())
        s = mix((d & MASK64) ^ ((b + 1) * GOLDEN & MASK64))
        need(s >> 32 == short, "block digest")
        computed += s
        off = offsets(segments, grain, first, m)
        if truncate:
            bits[first : first + m] = truncate.block(Reader(frame, at, end), first, m, books[0], off)
            at = end
            continue
        bits[first : first + m] = decode_region(frame, at, end, m, dtype, fixed, coded, halved, books, slices, off)
        at = end
    need(at == frame_nbytes, "last region")
    need(computed & MASK64 == checksum, "checksum")
    return name, shape, bits.astype(f"<u{nplanes}").tobytes()


def read_bitmap(r: Reader, m: int) -> np.ndarray[Any, Any]:
    """Read the bitmap of a block with gaps; return for each of its m values if its quad row is in the region."""
    nrows = -(-m // 128)
    bits = np.unpackbits(np.frombuffer(r.take(-(-nrows // 32) * 4), np.uint8), bitorder="little")
    need(not bits[nrows:].any(), "bitmap padding")
    need(0 < bits.sum() < nrows, "bitmap")
    return np.repeat(bits, 128)[:m] != 0


def decode_region(
    frame: bytes,
    at: int,
    end: int,
    m: int,
    dtype: int,
    fixed: int,
    coded: int,
    halved: int,
    books: dict[int, Codebook],
    slices: dict[int, bytes],
    off: np.ndarray[Any, Any],
) -> np.ndarray[Any, Any]:
    """Decode the region of a lossless block into the bits of its m values (sections 6 and 7)."""
    _, nplanes, _, shift = DTYPES[dtype]
    (head,) = struct.unpack_from("<I", frame, at)
    r = Reader(frame, at + 4, end)
    need(not head & ~((1 << 2 * nplanes) - 1 | 3 << 16), "region head")
    modes = [head >> 2 * p & 3 for p in range(nplanes)]
    pruned, gaps = head >> 16 & 1, head >> 17 & 1
    need(not pruned or (shift and nplanes > 1 and modes[0] == 2), "pruned")
    need(not gaps or not fixed, "gaps")
    there = read_bitmap(r, m) if gaps else np.ones(m, bool)
    planes: list[Any] = [None] * nplanes
    j = k = int(there.sum())
    nonzero = np.ones(j, bool)
    for p, data in slices.items():
        need(modes[p] == 0, "mode of a fixed plane")
        planes[p] = np.frombuffer(data, np.uint8).astype(np.int64)

    for p in range(nplanes):
        if fixed >> p & 1:
            continue
        mode, count = modes[p], k if p else j
        if mode == 2:
            need(coded >> p & 1, "no codebook")
            out = np.array(decode_lanes(books[p], r, count)[0], np.int64)
            out = with_raw_bits(out, raw_bits(halved, p, nplanes), r)
        elif mode == 1:
            out = np.frombuffer(r.take(count), np.uint8).astype(np.int64)
        elif mode == 3:
            nruns = -(-count // 128)
            bitmap = np.unpackbits(np.frombuffer(r.take((nruns + 7) // 8), np.uint8), bitorder="little")
            need(not bitmap[nruns:].any(), "bitmap padding")
            out = np.zeros(count, np.int64)
            for i in range(nruns):
                if bitmap[i]:
                    run = min(128, count - 128 * i)
                    out[128 * i : 128 * i + run] = np.frombuffer(r.take(run), np.uint8)
        else:
            out = np.full(count, r.take(1)[0], np.int64)
        if p == 0 and pruned:
            nonzero = out != 0
            k = int(nonzero.sum())
            need(k, "pruned to nothing")
        elif pruned:
            full = np.zeros(j, np.int64)
            full[nonzero] = out
            out = full
        planes[p] = out
    r.zeros(8)
    for p in range(nplanes):
        if gaps:
            full = np.zeros(m, np.int64)
            full[there] = planes[p]
            planes[p] = full
    need(all(not planes[p][~nonzero].any() for p in slices), "a pruned value's byte in a fixed plane")
    u = [x.astype(np.uint64) for x in planes]
    width = 8 * nplanes
    out = np.zeros(m, np.uint64)
    first_plane = 0
    if shift and nplanes == 1:
        out = (planes[0] & 128 | raised((planes[0] & 127) << 8, off, zero_of(dtype)) >> 8).astype(np.uint64)
        first_plane = 1
    elif shift:
        above, sign, below = planes[1] >> shift + 1, planes[1] >> shift & 1, planes[1] & (1 << shift) - 1
        pattern = raised(above << shift + 8 | planes[0] << shift | below, off, 1 << shift)
        out = (sign << 15 | pattern).astype(np.uint64) << np.uint64(width - 16)
        first_plane = 2
    for p in range(first_plane, nplanes):
        out |= u[p] << np.uint64(width - 8 * (p + 1))
    return out


def raw_bits(halved: int, p: int, nplanes: int) -> int:
    """Return the number of raw bits that a value has in plane p if the plane is coded (section 7)."""
    if halved >> p & 1:
        return 4
    return halved >> 1 if nplanes == 1 else 0


def with_raw_bits(symbols: np.ndarray[Any, Any], bits: int, r: Reader) -> np.ndarray[Any, Any]:
    """Read the raw bits that follow a coded plane, and return the bytes of the plane (section 7)."""
    k = len(symbols)
    need((symbols < 1 << 8 - bits).all(), "literal of a plane with raw bits")
    raw = np.frombuffer(r.take((k * bits + 7) // 8), np.uint8)
    if bits == 4:
        both = np.concatenate([raw & 15, raw >> 4]).astype(np.int64)
        need(not both[k:].any(), "nibble padding")
        return symbols | both[:k] << 4
    flat = np.unpackbits(raw, bitorder="little").astype(np.int64)
    need(not flat[k * bits :].any(), "padding of raw bits")
    codes = flat[: k * bits].reshape(k, bits)
    if bits == 2:
        return codes[:, 0] << 7 | symbols << 1 | codes[:, 1]
    return codes[:, 0] << 7 | symbols if bits else symbols


class Truncate:
    """Decoder of Truncate's blocks (section 9)."""

    def __init__(self, params: list[int], dtype: int, a: np.ndarray[Any, Any] | None) -> None:
        self.sent, self.options, self.level, _, guard = params
        need(dtype in (1, 3, 4), "dtype")
        self.guard, self.a = guard - 128, a
        self.symbols = 1 if self.sent != 1 else 3 if dtype == 4 else 2
        self.p, self.bias, self.last, self.drops, self.widths, self.octave = {
            1: (23, 127, 255, (0, 6, 12, 18), (6, 6, 6, 6), 128),
            3: (7, 127, 255, (0, 2, 4, 6), (2, 2, 2, 2), 128),
            4: (10, 15, 31, (0, 3, 5, 8), (3, 3, 2, 3), 1024),
        }[dtype]

    def packed(self, r: Reader, widths: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Read packed numbers of the given widths in bits, starting at the lowest bit of the first byte."""
        total = int(widths.sum())
        flat = np.unpackbits(np.frombuffer(r.take(-(-total // 8)), np.uint8), bitorder="little").astype(np.int64)
        need(not flat[total:].any(), "padding")
        ends = np.cumsum(widths)
        out = np.zeros(len(widths), np.int64)
        for bit in range(int(widths.max(initial=0))):
            some = widths > bit
            out[some] |= flat[(ends - widths + bit)[some]] << bit
        return out

    def block(self, r: Reader, first: int, m: int, book: Codebook, off: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        (head,) = r.ints("I")
        mode = head & 3
        need(mode < 3 and not head & ~(3 | (0x1F00 if self.options & 8 else 0xF00) | 1 << 17), "head")
        tail = head >> 8 & 0x1F
        need(not self.options & 8 or tail <= self.p + 1, "head")
        digest32 = r.ints("I")[0] if self.sent == 2 else 0
        there = read_bitmap(r, m) if head >> 17 else np.ones(m, bool)
        j = int(there.sum())
        joint = self.sent == 1
        escaped: list[int] = []
        if mode == 2:
            values, escaped = decode_lanes(book, r, j, joint)
            s = np.array(values, np.int64)
        else:
            need(mode == 0 or not joint, "raw symbols with levels")
            s = np.frombuffer(r.take(j), np.uint8).astype(np.int64) if mode else np.full(j, r.take(1)[0], np.int64)
        level = np.zeros(j, np.int64)
        if joint:
            base = 0 if self.last == 31 else 96
            need(((s == 0) | (s >= 4)).all(), "symbol")
            base_of = np.where(np.isin(np.arange(j), escaped), 0, base)
            level, s = np.where(s == 0, 0, s & 3), np.where(s == 0, 0, (s >> 2) + base_of)
        need((s <= self.last).all(), "exponent")
        full = np.zeros((2, m), np.int64)
        full[:, there] = s, level
        s, level = full
        e = raised(s * self.octave, off, self.octave) // self.octave
        some = e > 0
        drops = np.array(self.drops)
        if self.sent == 2:
            need(self.a is not None, "no A")
            a: Any = self.a[first : first + m]  # type: ignore[index]
            need(digest(a.astype(np.uint8).tobytes(), 0x500) & 0xFFFFFFFF == digest32, "another state")
            d = np.where(a == 255, 1000, (a.astype(np.int64) - 127) - (e - self.bias) - self.guard)
            d = np.where((a == 0) | (e == self.last), -1000, d)
            if self.options & 8:
                k = np.clip(d, 0, self.p)
            else:
                k = drops[sum((d >= x for x in self.drops[1:]), np.zeros(m, np.int64))]
        else:
            if self.sent == 0:
                level[some] = self.packed(r, np.full(int(some.sum()), 2))
            elif self.sent == 3:
                level[:] = np.where(e == self.last, 0, self.level)
            k = drops[level]
            need(not k[e == self.last].any(), "level of Inf or NaN")
        field = np.zeros(m, np.int64)
        if self.options & 8:
            left_out = np.maximum(k, tail)
            field[some] = self.packed(r, (self.p + 1 - left_out)[some]) << left_out[some]
        else:
            rest = self.p + 1
            for i, width in enumerate(self.widths):
                rest -= width
                keep = some & (k <= rest)
                if not head >> 8 + i & 1:
                    field[keep] |= self.packed(r, np.full(int(keep.sum()), width)) << rest
        r.zeros(8)
        sign = 15 if self.p != 23 else 31
        value = field >> self.p << sign | e << self.p | field & (1 << self.p) - 1
        return np.where(some, value, 0).astype(np.uint64)


class Bits:
    """Cursor over a bit stream (section 10.3)."""

    def __init__(self, data: bytes) -> None:
        self.word, self.left = int.from_bytes(data, "little"), 8 * len(data)

    def take(self, n: int) -> int:
        need(n <= self.left, "stream is too short")
        x, self.word = self.word & (1 << n) - 1, self.word >> n
        self.left -= n
        return x

    def zeros(self, most: int) -> int:
        """Read zero bits up to and including a one bit, at most `most` zeros; return the number of zeros."""
        for n in range(most):
            if self.take(1):
                return n
        return most

    def rice(self, k: int, b: int) -> int:
        q = self.zeros(24)
        x = self.take(b) if q == 24 else q << k | self.take(k)
        need(x < 1 << b, "number of a Rice code")
        return x

    def gamma(self) -> int:
        t = self.zeros(64)
        need(t < 64, "gamma code")
        return 1 << t | self.take(t)

    def end(self) -> None:
        need(self.left < 64 and not self.word, "end of a stream")


class Delta:
    """Decoder of Delta frames (section 10)."""

    def __init__(self, dtype: int, n: int, base: bytes | None) -> None:
        self.size = DTYPES[dtype][1]
        self.w = w = 8 * self.size
        self.mbits, self.last = {1: (23, 255), 2: (52, 2047), 3: (7, 255), 4: (10, 31)}.get(
            dtype, ((3, 15), (2, 31), (3, 15), (2, 31))[dtype - 5] if 5 <= dtype <= 8 else (0, 0)
        )
        need(base is not None or not n, "no base")
        self.base = base or b""
        need(len(self.base) == n * self.size, "size of the base")
        self.mask, self.half = (1 << w) - 1, 1 << (w - 1)

    def rank(self, x: int) -> int:
        """Convert the bits of a value to its rank in numeric order, or a rank to bits: the map is its own inverse."""
        return x ^ (self.half - 1) if self.last and x & self.half else x

    def moved(self, x: int, size: int, negative: int) -> int:
        """Return the bits of the value `size` ranks above x, or below x if `negative`."""
        return self.rank((self.rank(x) + (-size if negative else size)) & self.mask)

    def exponent(self, x: int) -> int:
        return (x >> self.mbits & self.last) or 1

    def decode(self, frame: bytes, at: int, block: int, nblocks: int, computed: int, checksum: int) -> bytes:
        base_digest, result_digest = struct.unpack_from("<QQ", frame, at)
        directory = frame[at + 16 : at + 16 + 8 * nblocks]
        n, out = len(self.base) // self.size, b""
        need(nblocks == -(-n // block) if nblocks else len(frame) == at + 16, "nblocks")
        need(len(directory) == 8 * nblocks, "directory")
        computed += digest(frame[at : at + 16], 0x101) + digest(directory, 0x200)
        at += 16 + 8 * nblocks
        regions = []
        for b in range(nblocks):
            end, short = struct.unpack_from("<II", directory, 8 * b)
            need(at < 8 * end <= len(frame), "directory")
            regions.append(frame[at : 8 * end])
            at = 8 * end
            s = mix(digest(regions[-1], 0x300) ^ ((b + 1) * GOLDEN & MASK64))
            need(s >> 32 == short, "block digest")
            computed += s
        need(at == len(frame), "last region")
        need(computed & MASK64 == checksum, "checksum")
        need(digest(self.base, 0x600) == base_digest, "another base")
        for b, region in enumerate(regions):
            part = self.base[b * block * self.size : (b + 1) * block * self.size]
            values = [int(x) for x in np.frombuffer(part, f"<u{self.size}")]
            out += np.array(self.region(region, values), f"<u{self.size}").tobytes()
        out = out if nblocks else self.base
        need(digest(out, 0x600) == result_digest, "another result")
        return out

    def region(self, region: bytes, base: list[int]) -> list[int]:
        """Decode the region of a block; return the bits of its new values."""
        head, m, new = int.from_bytes(region[:4], "little"), len(base), list(base)
        mode, scale, changes = head & 3, head >> 2 & 0xFFF, (head >> 14) + 1
        if mode == 0:
            need(region == bytes(8), "same")
            return new
        need(changes <= m, "number of changes")
        if mode == 2:
            raw = region[4 : 4 + m * self.size]
            need(scale == 0 and len(raw) == m * self.size, "raw")
            need(len(region) == -(-(4 + len(raw)) // 8) * 8 and not any(region[4 + len(raw) :]), "padding")
            new = [int(x) for x in np.frombuffer(raw, f"<u{self.size}")]
        else:
            bits = Bits(region[4:])
            if mode == 1 and self.last:
                need(scale <= self.last + self.w - 2 + 16, "scale")
                self.steps(bits, base, new, scale - 16)
            else:
                need(scale <= 18, "k")
                self.patches(bits, base, new, scale, changes, mode == 1)
            bits.end()
        need(sum(x != y for x, y in zip(base, new, strict=True)) == changes, "number of changes")
        return new

    def patches(self, bits: Bits, base: list[int], new: list[int], k: int, changes: int, steps: bool) -> None:
        i = 0
        for _ in range(changes):
            i += bits.rice(k, 20)
            need(i < len(base), "gap")
            if steps:
                negative, size = bits.take(1), bits.gamma()
                need(size <= self.half, "size of a step")
                new[i] = self.moved(base[i], size, negative)
            else:
                new[i] = base[i] ^ bits.take(self.w)
            i += 1

    def steps(self, bits: Bits, base: list[int], new: list[int], scale: int) -> None:
        members: list[list[int]] = [[] for _ in range(9)]
        for i, x in enumerate(base):
            above = self.exponent(x) - scale
            members[min((above + 1) // 2, 8) if above > 0 else 0].append(i)
        for i in members[0]:
            z = bits.rice(min(scale - self.exponent(base[i]), self.w - 2), self.w)
            new[i] = self.moved(base[i], (z + 1) // 2, z & 1)
        top = max(r for r in range(9) if members[r])
        for r in range(1, top + 1):
            self.steps_of_class(bits, base, new, members[r], r)

    def steps_of_class(self, bits: Bits, base: list[int], new: list[int], members: list[int], r: int) -> None:
        # Run: zero codes since the last change; 8 at first, because the first code must not be 0
        at, run, i, negative = -1, 8, 0, 0
        for _ in range(bits.gamma() - 1):
            x = bits.rice(2 * r, 20)
            if x == 0:
                need(run < 8, "code 0")
                run += 1
                size = 8 + bits.gamma() if run == 8 else run + 1
                need(size <= self.half, "size of a step")
            else:
                at += x
                need(at < len(members), "gap")
                run, i, negative, size = 0, members[at], bits.take(1), 1
            new[i] = self.moved(base[i], size, negative)


F32 = np.float32


def narrow(x: np.ndarray[Any, Any], dtype: int) -> bytes:
    """Round float32 to the dtype, to nearest even, saturating at its largest number; return the bytes."""
    most = np.finfo(F32).max
    x = np.clip(x, -most, most)
    if dtype == 1:
        return x.astype("<f4").tobytes()
    if dtype == 4:
        y = np.clip(x, -65504, 65504).astype("<f2").view("<u2")
        return np.where(np.isnan(x), x.view(np.uint32) >> 16 & 0x8000 | 0x7E00, y).astype("<u2").tobytes()
    u = x.view(np.uint32).astype(np.uint64)
    y = u + 0x7FFF + (u >> np.uint64(16) & np.uint64(1)) >> np.uint64(16)
    y = np.where(y & np.uint64(0x7FFF) > 0x7F7F, y & np.uint64(0x8000) | np.uint64(0x7F7F), y)
    return np.where(np.isnan(x), u >> np.uint64(16) & np.uint64(0x8000) | np.uint64(0x7FC0), y).astype("<u2").tobytes()


def narrowed(x: np.ndarray[Any, Any], dtype: int) -> np.ndarray[Any, Any]:
    """Round float32 to the frame's dtype, and convert the result back to float32."""
    u = np.frombuffer(narrow(x, dtype), "<u4" if dtype == 1 else "<u2")
    return (
        u.view("<f4")
        if dtype == 1
        else u.view("<f2").astype("<f4")
        if dtype == 4
        else (u.astype("<u4") << 16).view("<f4")
    )


def small_floats(mbits: int, bias: int, last: int) -> np.ndarray[Any, Any]:
    """Return the value of each code of a small float format, without the sign bit; NaN for codes above `last`."""
    codes = np.arange(1 << 7 if mbits > 1 else 8)
    e, m = codes >> mbits, codes & (1 << mbits) - 1
    values = np.where(e > 0, (1 + m / 2**mbits) * 2.0 ** (e - bias), m / 2**mbits * 2.0 ** (1 - bias))
    return np.where(codes <= last, values, np.nan).astype(F32)


E4M3, E5M2, E2M1 = small_floats(3, 7, 126), small_floats(2, 15, 123), small_floats(1, 1, 7)


def finite(r: Reader, count: int) -> np.ndarray[Any, Any]:
    """Read float32 scales; Bad if one is negative, -0, Inf or NaN."""
    data = r.take(4 * count)
    need((np.frombuffer(data, "<u4") < 0x7F800000).all(), "scale")
    return np.frombuffer(data, "<f4")


def row_ends(r: Reader, nrows: int, dtype: int) -> tuple[Any, Any]:
    """Read the minimum and maximum of each row, in the frame's dtype; return half their distance, and the middle."""
    data = r.take(nrows * (8 if dtype == 1 else 4))
    if dtype == 3:
        ends = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(F32)
    else:
        ends = np.frombuffer(data, "<f4" if dtype == 1 else "<f2").astype(F32)
    low, high = ends[::2], ends[1::2]
    need(np.isfinite(ends).all() and (low <= high).all(), "numbers of a row")
    need(not (np.signbit(ends) & (ends == 0)).any(), "-0")
    half = high * F32(0.5) - low * F32(0.5)
    return half, low + half


class Rows:
    """Decoder of the row codecs' blocks (section 8)."""

    def __init__(self, codec: int, params: list[int], n: int, flags: int) -> None:
        self.codec, self.n, self.flags = codec, n, flags
        self.variant, self.options, self.b, _, self.row = params
        self.entropy = (codec == 3 and self.variant == 2) or self.options & 4 != 0
        need(self.row == 0 if flags & 2 or not n else self.fits(self.row), "row")

    def fits(self, row: int) -> bool:
        most = 16384 if self.entropy else 1 << 31
        if self.codec == 4 and self.variant >= 2:
            return row == 32
        return {2: row <= most, 3: row == 0, 5: row == 16 << self.variant}.get(self.codec, 1 <= row <= most)

    def read_parts(self, r: Reader, dtype: int) -> list[tuple[int, int, np.ndarray[Any, Any]]]:
        parts = [(self.n, self.row)]
        if self.flags & 2:
            (nparts,) = r.ints("I")
            need(1 <= nparts <= 2 * (self.n // 4096) + 1 + min(self.n // 16, 64), "nparts")
            parts = []
            for _ in range(nparts):
                count, row, zero = r.ints("QII")
                need(count >= 1 and zero == 0, "part")
                need(self.fits(row), "row")
                parts.append((count, row))
            need(sum(p[0] for p in parts) == self.n, "counts")
        return [(count, row, self.part_scales(r, row, dtype)) for count, row in parts]

    def part_scales(self, r: Reader, row: int, dtype: int) -> np.ndarray[Any, Any]:
        if row and not (self.codec == 5 and self.variant == 0):
            return np.zeros(2, F32)
        scales = finite(r, 2)
        need(self.codec != 3 or narrowed(scales, dtype).tobytes() == scales.tobytes(), "scale of another dtype")
        need((self.codec == 2 and self.variant == 2) or not scales[1:].view(np.uint32).any(), "unused scale")
        return scales

    def decode(
        self, frame: bytes, dtype: int, side_at: int, side_nbytes: int, nblocks: int, computed: int, checksum: int
    ) -> np.ndarray[Any, Any]:
        need(side_nbytes % 8 == 0 and len(frame) % 8 == 0 and side_at + side_nbytes <= len(frame), "side section")
        r = Reader(frame, side_at, side_at + side_nbytes)
        book = read_codebook(r) if self.entropy else None
        parts = self.read_parts(r, dtype)
        r.zeros(8)
        computed += digest(frame[side_at : r.end], 0x101)
        directory = frame[r.end : r.end + 8 * nblocks]
        need(len(directory) == 8 * nblocks, "directory")
        computed += digest(directory, 0x200)
        at, b, out = r.end + 8 * nblocks, 0, []
        for count, row, scales in parts:
            block = (81920 if self.codec == 3 and self.variant else 16384) if not row else row * max(1, 16384 // row)
            for first in range(0, count, block):
                need(b < nblocks, "nblocks")
                end, short = struct.unpack_from("<II", directory, 8 * b)
                end *= 8
                need(at < end <= len(frame), "directory")
                s = mix(digest(frame[at:end], 0x300) ^ ((b + 1) * GOLDEN & MASK64))
                need(s >> 32 == short, "block digest")
                computed += s
                out.append(self.block(Reader(frame, at, end), min(block, count - first), row, scales, book, dtype))
                at, b = end, b + 1
        need(b == nblocks and at == len(frame) and computed & MASK64 == checksum, "nblocks, size or checksum")
        return np.concatenate(out)

    def codes(self, r: Reader, m: int, book: Codebook | None) -> np.ndarray[Any, Any]:
        bits = {2: 1, 3: 0 if self.variant else 2, 4: 8, 5: 4, 6: self.b}[self.codec]
        nbytes = -(-m * bits // 8) if bits else -(-m // 5)
        if book is None:
            data = r.take(nbytes)
        else:
            (mode,) = r.ints("I")
            need(mode <= 2, "mode")
            if mode == 2:
                data = bytes(decode_lanes(book, r, nbytes)[0])
            else:
                data = r.take(nbytes) if mode else r.take(1) * nbytes
        r.zeros(8)
        raw = np.frombuffer(data, np.uint8)
        if not bits:
            need((raw <= 242).all(), "base 3")
            codes = (raw[:, None] // np.array([81, 27, 9, 3, 1]) % 3).ravel()
            need(not codes[m:].any(), "padding")
            return codes[:m]
        flat = np.unpackbits(raw, bitorder="little")
        whole = flat[: len(flat) // bits * bits].reshape(-1, bits).astype(np.int64)
        codes = (whole << np.arange(bits)).sum(1)
        need(not flat[m * bits :].any(), "padding")
        return codes[:m]

    @np.errstate(all="ignore")
    def block(
        self, r: Reader, m: int, row: int, scales: np.ndarray[Any, Any], book: Codebook | None, dtype: int
    ) -> np.ndarray[Any, Any]:
        index = np.arange(m) // row if row else np.zeros(m, np.int64)
        nrows = int(index[-1]) + 1
        below: Any = None
        if self.codec == 5:
            stored = np.frombuffer(r.take(nrows), np.uint8)
            need((stored <= (252 if self.variant else 126)).all(), "scale")
            scale = np.ldexp(F32(1), stored.astype(int) - 127) if self.variant else E4M3[stored % 128] * scales[0]
            need(np.isfinite(scale).all(), "product of scales")
        elif self.codec == 4 and self.variant >= 2:
            stored = np.frombuffer(r.take(nrows), np.uint8)
            need((stored <= (239 if self.variant == 3 else 246)).all(), "scale")
            scale = np.ldexp(F32(1), 127 - stored.astype(int))
        elif self.codec == 2 and self.variant == 2:
            both = finite(r, 2 * nrows).reshape(-1, 2) if row else scales[None]
            scale, below = both[:, 0], both[:, 1]
        elif self.codec == 6 and self.variant == 2:
            scale, below = row_ends(r, nrows, dtype)
        else:
            scale = finite(r, nrows) if row else scales[:1]
        codes = self.codes(r, m, book)
        s = scale.astype(F32)[index]
        if self.codec == 2:
            low = below[index] if below is not None else s
            return np.where(codes == 1, s, np.where(low == 0, F32(0), -low)).astype(F32)
        if self.codec == 3:
            need((codes <= 2).all(), "code 3")
            return np.where(codes == 0, F32(0), np.where(codes == 1, s, -s)).astype(F32)
        if self.codec == 4:
            need((scale != 0).all(), "scale 0")
            v = (E5M2 if self.variant % 2 else E4M3)[codes & 127] / s
            return np.where(codes & 128, -v, v).astype(F32)
        if self.codec == 5:
            v = E2M1[codes & 7] * s
            return np.where(codes & 8, -v, v).astype(F32)
        odd = self.variant == 1
        n = 2 ** (self.b - 1) - 1 if odd else 2**self.b - 1
        need((codes <= (2 * n if odd else n)).all(), "code")
        c = codes - n if odd else 2 * codes - n
        if below is not None:
            most = np.finfo(F32).max
            return np.clip(below[index] + s * (c.astype(F32) / F32(n)), -most, most)
        return np.where(s > 0, s * (c.astype(F32) / F32(n)), F32(0)).astype(F32)


class TopK:
    """Decoder of TopK frames (section 11)."""

    def __init__(self, bits: int, group: int, n: int) -> None:
        self.b, self.c, self.kept, self.n = bits, group >> 16, group & 0xFFFF, n
        need(6 <= self.c <= 16 and 1 <= self.kept <= 1 << (self.c - 1), "chunk or kept")
        self.r = max(k for k in range(17) if k == 0 or 3 * self.kept << k <= 2 << self.c)

    def decode(
        self, frame: bytes, at: int, block: int, nblocks: int, computed: int, checksum: int
    ) -> np.ndarray[Any, Any]:
        need(len(frame) % 8 == 0 and len(frame) // 8 < 1 << 32, "sizes")
        directory = frame[at : at + 8 * nblocks]
        need(len(directory) == 8 * nblocks, "directory")
        computed += digest(directory, 0x200)
        at += 8 * nblocks
        out = np.zeros(self.n, F32)
        for b in range(nblocks):
            end, short = struct.unpack_from("<II", directory, 8 * b)
            end *= 8
            need(at < end <= len(frame), "directory")
            s = mix(digest(frame[at:end], 0x300) ^ ((b + 1) * GOLDEN & MASK64))
            need(s >> 32 == short, "block digest")
            computed += s
            self.region(frame[at:end], out[b * block : (b + 1) * block])
            at = end
        need(at == len(frame), "last region")
        need(computed & MASK64 == checksum, "checksum")
        return out

    def region(self, region: bytes, out: np.ndarray[Any, Any]) -> None:
        """Decode the region of a block into `out`, which is zero-filled before."""
        chunks = -(-len(out) // (1 << self.c))
        r = Reader(region, 0, len(region))
        each = 1 if self.b == 1 else 2
        scales = np.frombuffer(r.take(2 * each * chunks), "<u2")
        need((scales < 0x7F80).all(), "scale")
        levels = (scales.astype(np.uint32) << 16).view(F32).reshape(-1, each)
        need((levels[:, 0] <= levels[:, -1]).all(), "scales")
        bits = Bits(region[2 * each * chunks :])
        for i in range(chunks):
            low, high = levels[i, 0], levels[i, -1]
            if high:
                self.chunk(bits, low, high, out[i << self.c : (i + 1) << self.c])
        bits.end()

    def chunk(self, bits: Bits, low: Any, high: Any, out: np.ndarray[Any, Any]) -> None:
        steps, i = (1 << (self.b - 1)) - 1, 0
        for _ in range(-(-len(out) * self.kept // (1 << self.c))):
            i += bits.rice(self.r, 20)
            need(i < len(out), "gap")
            minus, level = bits.take(1), bits.take(self.b - 1)
            v = low + (high - low) * (F32(level) / F32(steps)) if level else low
            out[i] = -v if minus else v
            i += 1


def example() -> bytes:
    """Encode the specification's example (section 0) with the library."""
    import codec

    x = np.ones(512, np.float32)
    x[3] = -1.5
    return bytes(codec.encode(x))


def dump(frame: bytes) -> str:
    """Return a hex dump of a frame, with the meaning of the bytes on each line."""
    side = struct.unpack_from("<I", frame, 12)[0]
    rank = frame[7]
    parts = [
        (0, 4, "magic"),
        (4, 8, "version, codec, dtype, rank"),
        (8, 12, "layout, block_log2, fixed, coded"),
        (12, 16, "side_nbytes"),
        (16, 24, "frame_nbytes"),
        (24, 32, "checksum"),
        (32, 40, "params: max_code_length"),
        (40, 48, "flags, halved, reserved, nblocks"),
        (48, 48 + 8 * rank, "shape"),
        (48 + 8 * rank, 48 + 8 * rank + side, "side section"),
        (48 + 8 * rank + side, 56 + 8 * rank + side, "directory: end / 8, digest"),
    ]
    at = 56 + 8 * rank + side
    parts.append((at, at + 4, "region: head"))
    parts.append((at + 4, len(frame), "region: the rest"))
    lines = []
    for a, b, what in parts:
        for i in range(a, b, 16):
            lines.append(f"    {i:4d}  {frame[i : min(b, i + 16)].hex(' '):48s} {what if i == a else ''}".rstrip())
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--example"]:
        print(dump(example()), end="")
    else:
        with open(sys.argv[1], "rb") as file:
            got = decode(file.read())
        print(got[0], got[1], len(got[2]), "bytes")
