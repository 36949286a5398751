"""Reference encoder of frames: slow, simple, and written from format.md and encoder.md alone with numpy.

The encoder shares no code with the library, and writes the same bytes. One file: it is read beside the specification,
section by section. decoder.py has the checksum, the table of dtypes and the conversions of float32. Section numbers
refer to docs/spec/encoder.md.
"""

import heapq
import struct
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reference.decoder import (
    DTYPES,
    E2M1,
    E4M3,
    E5M2,
    ESCAPE,
    F32,
    GOLDEN,
    MASK64,
    Delta,
    codebook_id,
    digest,
    grain_of,
    mix,
    narrow,
    narrowed,
    zero_of,
)

Array = np.ndarray[Any, Any]
BY_SHAPE = -1  # group size derived from the tensor's shape


@dataclass
class Ask:
    """Arguments of an encode call; codec, variant, options and bits are numbers as in the frame's params."""

    codec: int
    variant: int = 0
    options: int = 0
    bits: int = 0  # Quantize and TopK: bits per value; Truncate: the fixed level
    row: int | None = None
    scale: float | None = None
    clip: float | None = None
    seed: int = 0
    max_code_length: int = 0
    guard: int = 0
    # arguments that are not part of the spec
    segments: Any = None  # (first value, shape) of each segment
    book: Any = None  # shared codebook: code lengths of 256 byte values and the escape
    stream: int = 0
    groups: Any = None  # parameter groups: (first value, (theta_term, theta_v_term, v_term, eps, m_term))
    state: Any = None  # optimizer state: theta and, if used, v and m, as float32 arrays
    p: int = 23  # mantissa bits of the parameters' dtype
    levels: Any = None  # Truncate: level of each value
    error: Any = None  # float32 residual that is added before encoding
    base: Any = None  # Delta: bits of the base tensor
    block_log2: int = 17  # Delta: log2 of the number of values of a block
    chunk_log2: int = 12  # TopK: log2 of the number of values of a chunk
    kept: int = 64  # TopK: number of values kept per chunk


def pad8(data: bytes) -> bytes:
    """Pad bytes with zeros to a multiple of 8."""
    return data + bytes(-len(data) % 8)


def blocks_of(n: int, size: int) -> list[tuple[int, int]]:
    """Return (first value, number of values) of each block of `size` values."""
    return [(first, min(size, n - first)) for first in range(0, n, size)]


def cut_blocks(n: int) -> tuple[int, list[tuple[int, int]]]:
    """Cut n values into blocks; return block_log2, and (first value, number of values) of each block."""
    log2 = next((k for k in range(9, 14) if 1 << k >= n), 14)
    return log2, blocks_of(n, 1 << log2)


# ---- Assembly of frames (section 2)


@dataclass
class Frame:
    """Fields of a frame's header, and methods that assemble the frame (section 2 of the format)."""

    ask: Ask
    dtype: int
    shape: tuple[int, ...]
    options: int = 0
    row: int = 0

    def params(self, options: int, row: int) -> None:
        self.options, self.row = options, row

    def header(self, layout: int, nbytes: int, checksum: int, *fields: int) -> bytes:
        log2, fixed, coded, side, flags, halved, nblocks = fields or (0,) * 7
        params = (self.ask.variant, self.options, self.ask.bits, self.ask.max_code_length, self.row)
        return struct.pack(
            f"<4s8BIQQ4BI4BI{len(self.shape)}Q",
            *(b"CODC", 1, self.ask.codec, self.dtype, len(self.shape), layout, log2, fixed, coded, side, nbytes),
            *(checksum, *params, flags, halved, 0, 0, nblocks, *self.shape),
        )

    def stored(self, values: bytes) -> bytes:
        nbytes = 48 + 8 * len(self.shape) + len(values)
        checksum = digest(self.header(0, nbytes, 0), 0x100) + mix(digest(values, 0x300) ^ GOLDEN)
        return self.header(0, nbytes, checksum & MASK64) + values

    def blocks(
        self,
        side: bytes,
        regions: list[bytes],
        log2: int = 0,
        coded: int = 0,
        flags: int = 0,
        halved: int = 0,
        planes: dict[int, Array] | None = None,
    ) -> bytes:
        """Assemble a frame of layout 1; ``planes``: fixed planes by plane number."""
        planes = planes or {}
        middle = b"".join(pad8(planes[p].tobytes()) for p in sorted(planes))
        at = 48 + 8 * len(self.shape) + len(side) + 8 * len(regions) + len(middle)
        directory, checksum = b"", digest(side, 0x101)
        for b, region in enumerate(regions):
            at += len(region)
            d = digest(region, 0x300)
            for p, plane in planes.items():
                d += digest(plane[b << log2 : (b + 1) << log2].tobytes(), 0x400 + p)
            s = mix((d & MASK64) ^ ((b + 1) * GOLDEN & MASK64))
            checksum += s
            directory += struct.pack("<II", at // 8, s >> 32)
        fields = (log2, sum(1 << p for p in planes), coded, len(side), flags, halved, len(regions))
        checksum += digest(directory, 0x200) + digest(self.header(1, at, 0, *fields), 0x100)
        return self.header(1, at, checksum & MASK64, *fields) + side + directory + middle + b"".join(regions)


def cut_parts(ask: Ask, n: int, shape: tuple[int, ...]) -> list[tuple[int, int, Any]]:
    """Return (start, count, shape) of each part of the scale model (section 3); shape is None for a flat part."""
    if not ask.segments:
        return [(0, n, shape)]
    parts, flat = [], 0
    for start, dims in ask.segments:
        count = int(np.prod(dims, dtype=object))
        if count >= 8192:
            parts += [(flat, start - flat, None), (start, count, dims)]
            flat = start + count
    return [p for p in [*parts, (flat, n - flat, None)] if p[1]]


# ---- Codebooks (section 5.2) and coded planes (format.md, section 7)


def codebook(counts: Array, max_code_length: int) -> list[int]:
    """Return the 257 code lengths for counts of byte values (section 5.2); the escape's length is last."""
    c = [int(x) for x in counts]
    total = sum(c)
    shift = 0
    while total >> shift >= 1 << 24:
        shift += 1
    kept = sorted((max(x >> shift, 1), v) for v, x in enumerate(c) if 1280 * x > total)
    while len(kept) > (1 << max_code_length) - 1:
        lightest = kept[0][0]
        kept.remove(max(k for k in kept if k[0] == lightest))
    kept = kept or [(1, 0)]
    rest = total - sum(c[v] for _, v in kept)
    leaves = sorted([*kept, (max(rest >> shift, 1), ESCAPE)])
    level: list[tuple[int, int, Any]] = []
    for _ in range(max_code_length):
        packages = [(a[0] + b[0], 1, (a, b)) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = sorted([(w, 0, v) for w, v in leaves] + packages, key=lambda x: x[:2])
    lengths = [0] * 257

    def take(node: tuple[int, int, Any]) -> None:
        if node[1]:
            take(node[2][0])
            take(node[2][1])
        else:
            lengths[node[2]] += 1

    for node in level[: 2 * len(leaves) - 2]:
        take(node)
    return lengths


def book_bytes(lengths: list[int]) -> bytes:
    """Return the bytes of a codebook as a frame stores it."""
    some = [v for v in range(1, 256) if lengths[v]] or [1, 0]
    nibbles = [*lengths[some[0] : some[-1] + 1], 0]
    pairs = [nibbles[i] | nibbles[i + 1] << 4 for i in range(0, len(nibbles) - 1, 2)]
    return bytes([lengths[ESCAPE] | lengths[0] << 4, some[0], some[-1], *pairs])


def cost(lengths: list[int], counts: Array) -> int:
    """Return the number of bits of all symbols, coded with these lengths; escaped ones take 8 more for the literal."""
    return sum(int(c) * (lengths[v] or lengths[ESCAPE] + 8) for v, c in enumerate(counts))


def codes_of(lengths: list[int]) -> tuple[Array, Array, int]:
    """Return the code and its length of each value (the escape's if it has none), and the value with the first code."""
    code, at = [0] * 257, 0
    order = sorted((v for v in range(257) if lengths[v]), key=lambda v: (lengths[v], v))
    for v in order:
        code[v] = at >> (8 - lengths[v])
        at += 256 >> lengths[v]
    known = [v if lengths[v] else ESCAPE for v in range(257)]
    return (
        np.array([code[v] for v in known], np.uint64),
        np.array([lengths[v] for v in known], np.uint64),
        order[0],
    )


def coded_plane(lengths: list[int], symbols: Array, literals: Array) -> bytes:
    """Return the bytes of a coded plane. Symbols without a code, and ESCAPE, are escaped: their literals follow."""
    code, length, first = codes_of(lengths)
    escaped = np.array([*(x == 0 for x in lengths[:256]), True])[symbols]
    quads = np.concatenate([symbols, np.full(-len(symbols) % 128, first)]).reshape(-1, 32, 4)
    lanes, nbits, words = np.zeros(32, np.uint64), np.full(32, 32, np.uint64), []
    u32 = np.uint64(32)
    for row in quads[::-1]:
        quad, width = np.zeros(32, np.uint64), np.zeros(32, np.uint64)
        for i in range(4):
            quad = quad << length[row[:, i]] | code[row[:, i]]
            width = width + length[row[:, i]]
        full = nbits + width >= 64
        words.append(lanes[full] & np.uint64(0xFFFFFFFF))
        lanes, nbits = np.where(full, lanes >> u32, lanes), np.where(full, nbits - u32, nbits)
        lanes, nbits = lanes | quad << nbits, nbits + width
    tails = nbits - u32
    words = np.concatenate([lanes >> tails, *words[::-1]])
    some = np.flatnonzero(words)
    words = words[: some[-1] + 1 if len(some) else 0]
    bits = "".join(f"{int(t):05b}" for t in tails)
    bits += "".join(f"{int(lane):064b}"[64 - int(t) :] for lane, t in zip(lanes, tails, strict=True) if t)
    bits += "0" * (-len(bits) % 8)
    out = struct.pack("<H", len(words)) + int(bits, 2).to_bytes(len(bits) // 8, "big")
    return out + bytes(-len(out) % 4) + words.astype("<u4").tobytes() + literals[escaped].tobytes()


def packed(values: Array, widths: Any) -> bytes:
    """Pack numbers of the given widths in bits, starting at the lowest bit of the first byte."""
    widths = np.broadcast_to(widths, values.shape)
    bits = (values[:, None].astype(np.int64) >> np.arange(24)) & 1
    return np.packbits(bits[np.arange(24) < widths[:, None]].astype(np.uint8), bitorder="little").tobytes()


def histogram(values: Array) -> Array:
    """Return how often each of the 256 byte values occurs."""
    return np.bincount(values, minlength=256)


# ---- Codecs of rows: Sign, Ternary, Float8, Float4, Quantize (section 7)


def draws(ask: Ask, n: int, w: int) -> Array:
    """Return n random 16-bit words, from Philox (section 7.3); `w` selects the first or second word of each value."""
    i = np.arange(-(-n // 8), dtype=np.uint64)
    low, u32 = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1 = i & low, i >> u32
    c2, c3 = np.full(i.shape, w, np.uint64), np.full(i.shape, ask.stream >> 32, np.uint64)
    k0, k1 = ask.seed, ask.stream & 0xFFFFFFFF
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = b >> u32 ^ c1 ^ np.uint64(k0), b & low, a >> u32 ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    words = np.stack([c0, c1, c2, c3], 1)
    return np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], 2).ravel()[:n].astype(np.int64)


def run_sums(x: Array) -> float:
    """Return the sum of x, added in the order of section 7.2 and, within a run, in the dtype of x."""
    x = np.concatenate([x, np.zeros(-len(x) % 4096, x.dtype)]).reshape(-1, 128, 32)
    lanes = np.zeros((len(x), 32), x.dtype)
    for i in range(128):
        lanes = lanes + x[:, i]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sums = [float(s) for s in lanes[:, 0]]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)] + sums[len(sums) // 2 * 2 :]
    return sums[0]


def once(x: float, dtype: int) -> Any:
    """Round a mean or a square root to float32, at most the largest number of the tensor's dtype."""
    most = {1: float(np.finfo(F32).max), 3: float.fromhex("0x1.fep127"), 4: 65504.0}[dtype]
    return F32(min(x, most))


def largest(x: Array) -> Any:
    """Return the largest finite magnitude in x, 0 if there is none."""
    a = np.abs(x)
    return a[np.isfinite(a)].max(initial=F32(0))


def sign_scales(ask: Ask, x: Array, dtype: int) -> list[Any]:
    """Return the scales of Sign: one and 0, or the means of values without and with a sign bit (section 7.2)."""
    a, minus = np.abs(x), np.signbit(x)
    if ask.variant == 0:
        return [once(run_sums(a) / len(x), dtype), F32(0)]
    if ask.variant == 1:
        return [once(float(np.sqrt(run_sums(x.astype(np.float64) ** 2) / len(x))), dtype), F32(0)]
    sides = [(np.where(s, a, F32(0)), int(s.sum())) for s in (~minus, minus)]
    return [once(run_sums(y) / count, dtype) if count else F32(0) for y, count in sides]


def raised(s: Any, dtype: int) -> Any:
    """Round s up to a number of the dtype; return the dtype's largest number if s exceeds it."""
    near = narrowed(np.array([s], F32), dtype)[0]
    if near >= s or dtype == 1:
        return near
    u = np.frombuffer(narrow(np.array([near], F32), dtype), "<u2")[0]
    u = np.array([min(u + 1, 0x7F7F if dtype == 3 else 0x7BFF)], "<u2")
    return ((u.astype(np.uint32) << 16).view(F32) if dtype == 3 else u.view(np.float16).astype(F32))[0]


def ternary_scale(ask: Ask, x: Array, dtype: int) -> Any:
    """Return the scale of Ternary for x: given or the largest magnitude, limited by the clip."""
    s = narrowed(np.array([ask.scale], F32), dtype)[0] if ask.scale is not None else raised(largest(x), dtype)
    if ask.clip:
        v = x.astype(np.float64)
        mean, square = run_sums(v) / len(x), run_sums(v * v) / len(x)
        limit = once(float(F32(ask.clip)) * float(np.sqrt(max(square - mean * mean, 0.0))), dtype)
        s = min(s, narrowed(np.array([limit]), dtype)[0])
    return s


def steps(x: Array, h: Any) -> Array:
    return (np.floor(x.astype(np.float64) * 65536 + 0.5).astype(np.int64) + h) >> 16


def over(v: Array, s: Any, k: int) -> Array:
    """Return v / s * k in float32, in the order of operations that the specification fixes."""
    u = F32(2**64) if s < F32(2**-60) else F32(1)
    return (v * u) * (F32(k) / (s * u))


def small(y: Array, table: Array, mbits: int, bias: int, h: Any) -> Array:
    """Round magnitudes y to codes of the small float format `table`; h: random words, None: round to nearest."""
    y = np.minimum(y, np.nanmax(table))
    e = np.where(y > 0, np.maximum(np.frexp(y)[1] - 1, 1 - bias), 1 - bias)
    x = np.ldexp(y.astype(np.float64), mbits - e)
    c = np.rint(x).astype(np.int64) if h is None else steps(x, h)
    return c + (e - 1 + bias << mbits)


def row_ends(x: Array, dtype: int) -> tuple[Any, bytes]:
    """Return (half the range, middle) of a row with a zero point, and the bytes of its minimum and maximum."""
    low, high = ends = narrowed(np.array([x.min(), x.max()], F32), dtype) + F32(0)  # + 0 turns -0 into +0
    half = high * F32(0.5) - low * F32(0.5)
    return (half, low + half), narrow(ends, dtype)


@np.errstate(all="ignore")
def row_scale(ask: Ask, x: Array, t: Any, stochastic: bool, dtype: int) -> tuple[Any, bytes]:
    """Return the scale with which a row's codes are computed, and the bytes that are stored for it."""
    amax = largest(x)
    if ask.codec == 4 and ask.variant >= 2:
        e = int(amax.view(np.uint32)) >> 23
        e += (stochastic or ask.options & 128 != 0) and float(amax) > 1.75 * 2.0 ** (e - 127)
        e = min(max(e - 8, 0), 246) if ask.variant == 2 else min(max(e - 15, 0), 239)
        return F32(2.0 ** (127 - e)), bytes([e])
    if ask.codec == 4:
        scale = F32(ask.scale) if ask.scale else F32(57344 if ask.variant else 448) / amax
        scale = scale if np.isfinite(scale) else F32(1)
        return scale, struct.pack("<f", scale)
    if ask.codec == 6:
        return row_ends(x, dtype) if ask.variant == 2 else (amax, struct.pack("<f", amax))
    if ask.variant == 1:
        e = int(amax.view(np.uint32)) >> 23
        e += stochastic and float(amax) > 1.5 * 2.0 ** (e - 127)
        e = min(max(e - 2, 0), 252)
        return F32(2.0 ** (e - 127)), bytes([e])
    a = (amax / F32(6)) / t if t > 0 else F32(0)
    e = int(small(np.array([a]), E4M3, 3, 7, None)[0])
    e += stochastic and e < 126 and E4M3[e] < a
    return E4M3[e] * t, bytes([e])


@np.errstate(all="ignore")
def row_codes(ask: Ask, v: Array, s: Any, h: Array | None, h1: Array) -> Array:
    """Quantize the values v of a row with scale s to codes (section 7.4)."""
    a, minus = np.abs(v), np.signbit(v)
    if ask.codec == 3:
        if not s > 0:
            return np.zeros(len(v), np.int64)
        q = over(np.minimum(a, s), s, 65536).astype(np.float64)
        high = np.minimum(np.floor(q), 65535)
        keep = (a >= s) | (h < high) | ((h == high) & (h1 < np.floor((q - high) * 65536)))
        return np.where(keep, 1 + minus, 0)
    if ask.codec == 6:
        odd = ask.variant == 1
        levels = (1 << ask.bits - 1) - 1 if odd else (1 << ask.bits) - 1
        s, middle = s if ask.variant == 2 else (s, None)
        if not s > 0:
            return np.full(len(v), levels if odd else 0)
        draw: Any = 1 << 15 if h is None else h
        if ask.variant == 2:
            x = (over(v - middle, s, 1) + F32(1)) * F32(levels / 2)
            return steps(np.clip(x, F32(0), F32(levels)), draw)
        if not odd:
            return steps((over(v, s, 1) + F32(1)) * F32(levels / 2), draw)
        c = steps(over(a, s, 1) * F32(levels), draw)
        return levels + np.where(minus, -c, c)
    if ask.codec == 5:
        return small(a / s if s > 0 else a * 0, E2M1, 1, 1, h) | minus << 3
    table, mbits, bias = ((E4M3, 3, 7), (E5M2, 2, 15))[ask.variant % 2]
    some = np.isfinite(v)
    c = small(np.where(some, a, F32(0)) * s, table, mbits, bias, h)
    return np.where(some, c, 0x7F) | minus << 7


def packed_codes(ask: Ask, codes: Array) -> Array:
    """Pack codes to the bytes that a frame stores, before an entropy stage."""
    if ask.codec == 3 and ask.variant:
        five = np.concatenate([codes, np.zeros(-len(codes) % 5, np.int64)]).reshape(-1, 5)
        return (five @ np.array([81, 27, 9, 3, 1])).astype(np.uint8)
    width = {2: 1, 3: 2, 4: 8, 5: 4, 6: ask.bits}[ask.codec]
    return np.frombuffer(packed(codes, width), np.uint8)


def entropy_bytes(lengths: list[int], data: Array) -> bytes:
    """Entropy-code the bytes of a block, or store them if that is not smaller (section 7.5)."""
    if (data == data[0]).all():
        return struct.pack("<IB", 0, data[0])
    if len(data) >= 512:
        coded = coded_plane(lengths, data.astype(np.int64), data)
        if len(coded) < len(data):
            return struct.pack("<I", 2) + coded
    return struct.pack("<I", 1) + data.tobytes()


def row_of(ask: Ask, shape: Any, entropy: bool) -> int:
    """Return the number of values of a row, which share a scale; 0: one scale per part (section 7.1)."""
    default = {4: 32 if ask.variant >= 2 else BY_SHAPE, 5: 32 if ask.variant else 16, 6: 64}.get(ask.codec, 0)
    row = default if ask.row is None else ask.row
    if row == BY_SHAPE:
        row = 1024
        if shape is not None and len(shape) > 1:
            dims = list(shape)
            row = dims.pop()
            while row < 64 and dims:
                row *= dims.pop()
            row = 1024 if row > 1 << 31 else row
    return 1024 if entropy and row > 16384 else row


def row_parts(ask: Ask, n: int, shape: tuple[int, ...], entropy: bool) -> list[tuple[int, int, int]]:
    """Return (start, count, row length) of each part (section 7.1)."""
    if not ask.segments:
        return [(0, n, row_of(ask, shape, entropy))]
    by_shape = ask.row == BY_SHAPE or (ask.row is None and ask.codec == 4 and ask.variant < 2)
    # (start, count, row, large) of each segment and of each gap between segments
    pieces: list[tuple[int, int, int, bool]] = []
    end = 0
    for start, dims in [*ask.segments, (n, (0,))]:
        pieces.append((end, start - end, row_of(ask, None, entropy), False))
        row, count = row_of(ask, dims, entropy), int(np.prod(dims, dtype=object))
        pieces.append((start, count, max(row, 64) if by_shape else row, count >= 4096))
        end = start + count
    most = 2 * (n // 4096) + 1 + min(n // 16, 64)
    spare = most - (2 * sum(large for *_, large in pieces) + 1)
    parts: list[tuple[int, int, int]] = []
    open_part = False  # True if the last part consists of small pieces, to which more may be added
    for start, count, row, large in pieces:
        if not count:
            continue
        if not large and open_part:
            first, m, of_part = parts[-1]
            scaled = row == 0 or (ask.codec == 5 and ask.variant == 0)
            if not spare or (row == of_part and not scaled and m % row == 0):
                parts[-1] = first, m + count, of_part
                continue
            spare -= 1
        parts.append((start, count, row))
        open_part = not large
    return parts


def encode_rows(ask: Ask, frame: Frame, v: Array, dtype: int) -> bytes:
    """Return the frame of a row codec (section 7)."""
    n = len(v)
    entropy = (ask.codec == 3 and ask.variant == 2) or (ask.codec == 4 and ask.options & 4 != 0)
    stochastic = ask.options & 1 != 0
    parts = row_parts(ask, n, frame.shape, entropy)
    options = ask.options | (32 if ask.clip else 0)
    row = parts[0][2] if n and not ask.segments else 0
    frame.params(options, row)
    if not n:
        return frame.stored(b"")
    h = draws(ask, n, 0) if stochastic or ask.codec == 3 else None
    h1 = draws(ask, n, 1) if ask.codec == 3 else np.zeros(n)
    records, part_scales = struct.pack("<I", len(parts)), b""
    found: list[tuple[bytes, Array]] = []
    for start, count, row in parts:
        records += struct.pack("<QII", count, row, 0)
        part = v[start : start + count]
        t: Any = F32(0)
        if not row or (ask.codec == 5 and ask.variant == 0):
            t, below = F32(0), F32(0)
            if ask.codec == 2:
                t, below = sign_scales(ask, part, dtype)
            elif ask.codec == 3:
                t = ternary_scale(ask, part, dtype)
            else:
                t = largest(part) / F32(2688)
            part_scales += struct.pack("<ff", t, below)
        size = max(1, 16384 // row) * row if row else 81920 if ask.codec == 3 and ask.variant else 16384
        for first, m in blocks_of(count, size):
            scales, codes = b"", []
            for at, k in blocks_of(m, row or m):
                i = slice(start + first + at, start + first + at + k)
                if ask.codec == 2:
                    codes.append(1 - np.signbit(v[i]))
                    if row:
                        scales += struct.pack("<ff", *sign_scales(ask, v[i], dtype))[: 8 if ask.variant == 2 else 4]
                    continue
                s = t
                if row:
                    s, stored = row_scale(ask, v[i], t, stochastic, dtype)
                    scales += stored
                codes.append(row_codes(ask, v[i], s, None if h is None else h[i], h1[i]))
            found.append((scales, packed_codes(ask, np.concatenate(codes))))
    side = b""
    lengths: list[int] = []
    if entropy:
        take = min(len(found), 16)
        counts = sum(histogram(found[i * len(found) // take][1]) for i in range(take))
        lengths = codebook(np.asarray(counts), 8)
        side = book_bytes(lengths)
    side = pad8(side + (records if ask.segments else b"") + part_scales)
    regions = [pad8(s + (entropy_bytes(lengths, c) if entropy else c.tobytes())) for s, c in found]
    return frame.blocks(side, regions, coded=int(entropy), flags=2 if ask.segments else 0)


# ---- Samples of values, and the scale model (sections 1, 4 and 5.1)


def excess(c: Array, v: int) -> int:
    t = int(c.sum())
    return sum(int(x) ** 2 for x in c) * v - t * t - (v - 1) * t


def uneven(c: Array, v: int) -> bool:
    return excess(c, v) > int(c.sum()) ** 2 // 7


@dataclass
class Sample:
    """Statistics of sampled planes, by plane: counts of bytes; all equal; one of the sampled quad rows is all zero.

    Counts and zero runs are without empty quad rows; ``has_empty``: one of the sampled quad rows is empty.
    """

    counts: list[Array]
    constant: list[bool]
    zero_run: list[bool]
    has_empty: bool


def quad_rows(n: int, rows: Any) -> Array:
    """Return the indices of the values in the given quad rows, which are runs of 128 values."""
    i = (np.asarray(rows, np.int64)[:, None] * 128 + np.arange(128)).ravel()
    return i[i < n]


def empty(x: Array) -> Array:
    """Return for each value if its quad row is empty: all bits of its values are 0 (section 1)."""
    rows = np.append(x != 0, np.zeros(-len(x) % 128, bool)).reshape(-1, 128)
    return np.repeat(~rows.any(1), 128)[: len(x)]


def sample_planes(bits: Array, dtype: int, t: Any) -> Sample:
    """Sample quad rows of all planes (section 5.1)."""
    n, planes = len(bits), planes_of(bits, dtype, t)
    nrows = -(-n // 128)
    take = min(-(-nrows // 2), 256 if is_float8(dtype) else 64)
    rows = [i * nrows // take for i in range(take)]
    i = quad_rows(n, rows)
    constant = [bool((p[i] == p[i[0]]).all()) for p in planes]
    some = [r for r in rows if bits[128 * r : 128 * r + 128].any()]
    i = quad_rows(n, some)
    sample = Sample(
        [histogram(p[i]) for p in planes],
        constant,
        [any(not p[128 * r : 128 * r + 128].any() for r in some) for p in planes],
        len(some) < len(rows),
    )
    zero = planes[0][i] == 0
    if dtype == 2 and 64 * int(zero.sum()) >= len(i) and not any(p[i][zero].any() for p in planes):
        sample.counts[1][0] = 0
    return sample


def planes_of(bits: Array, dtype: int, t: Any) -> list[Array]:
    """Split values into byte planes (section 3 of the format); t: offsets by which patterns are lowered."""
    _, nplanes, octave, s = DTYPES[dtype]
    x = bits.astype(np.uint64)
    planes = [(x >> np.uint64(8 * (nplanes - 1 - p)) & np.uint64(255)).astype(np.uint8) for p in range(nplanes)]
    if is_float8(dtype):
        u = lowered(pattern_of(bits, dtype), t, zero_of(dtype))
        planes[0] = (planes[0] & 128 | u >> 8).astype(np.uint8)
    elif octave:
        upper = (x >> np.uint64(8 * nplanes - 16)).astype(np.int64)
        u = lowered(upper & 0x7FFF, t, 1 << s)
        planes[0] = (u >> s & 255).astype(np.uint8)
        planes[1] = (u >> s + 8 << s + 1 | upper >> 15 << s | u & (1 << s) - 1).astype(np.uint8)
    return planes


def is_float8(dtype: int) -> bool:
    _, nplanes, octave, _ = DTYPES[dtype]
    return nplanes == 1 and octave > 0


def pattern_of(bits: Array, dtype: int) -> Array:
    """Return the pattern of each value: 15 bits (section 3 of the format)."""
    if is_float8(dtype):
        return (bits.astype(np.int64) & 127) << 8
    return (bits.astype(np.uint64) >> np.uint64(8 * DTYPES[dtype][1] - 16)).astype(np.int64) & 0x7FFF


def lowered(p: Array, t: Any, zero: int) -> Array:
    """Subtract offsets t from patterns p that are at least `zero`; results wrap around within `zero` .. 32767."""
    return np.where(p < zero, p, zero + (p - zero - t) % (32768 - zero))


@dataclass
class Part:
    """Part of the scale model; offsets are in grains."""

    start: int
    count: int
    row: int
    kind: int
    base: int
    shifts: list[int]
    rows: Array
    cols: Array

    def offsets(self) -> Array:
        i = np.arange(self.count)
        q = np.full(self.count, self.base)
        if self.kind:
            q += self.rows[i // self.row]
        return q + self.cols[i % self.row] if self.kind == 3 else q


@dataclass
class Model:
    """Scale model of a tensor; ``offsets``: the offset of each value, in units of patterns."""

    parts: list[Part]
    grain: int

    @property
    def offsets(self) -> Array:
        return self.grain * np.concatenate([p.offsets() for p in self.parts])

    @property
    def side(self) -> bytes:
        out, nibbles = struct.pack("<I", len(self.parts)), b""
        for p in self.parts:
            shifts = p.shifts[0] | p.shifts[1] << 4
            out += struct.pack("<QIBBH", p.count, p.row if p.kind else 0, p.kind, shifts, p.base)
            for q, shift in zip((p.rows, p.cols), p.shifts, strict=True):
                x = np.concatenate([q >> shift & 15, np.zeros(len(q) % 2, np.int64)])
                nibbles += (x[::2] | x[1::2] << 4).astype(np.uint8).tobytes()
        return out + nibbles


def mean(s: Any, n: int) -> int:
    return (2 * int(s) + n) // (2 * n)


def clamp(x: int) -> int:
    return max(-127, min(127, x))


def spread(take: int, n: int) -> list[int]:
    return [i if take == n else (i * 0x9E3779B9 % 2**32) * n >> 32 for i in range(take)]


def stride_of(n: int) -> int:
    """Return the stride, in quad rows, at which n values are sampled."""
    nrows = -(-n // 128)
    return max(nrows // 2048, 1, min(16, nrows // 64))


def sampled(count: int, stride: int) -> Array:
    """Return the indices of the sampled values of a part or tensor with `count` values."""
    nrows = -(-count // 128)
    return quad_rows(count, spread(-(-nrows // stride), nrows))


def huffman(c: Array) -> int:
    """Estimate the number of bits after Huffman coding of symbols with these counts (section 4.5)."""
    total = int(c.sum())
    kept = [int(x) for x in c if 1280 * int(x) > total]
    rest = total - sum(kept)
    heap = [*kept, max(rest, 1)]
    heapq.heapify(heap)
    bits = 8 * rest
    while len(heap) > 1:
        pair = heapq.heappop(heap) + heapq.heappop(heap)
        heapq.heappush(heap, pair)
        bits += pair
    return bits


def pays(before: int, after: int, samples: int, count: int, bits: int) -> bool:
    """Return True if a model saves more than its own size of `bits`, extrapolated from samples to `count` values."""
    return before > after and (before - after << 16) // samples * count > bits << 16


def columns_of(shape: Any, n: int) -> int:
    """Return the number of columns if the shape is treated as a matrix, 0 otherwise (section 3)."""
    best, rows = (1, n), 1
    for dim in shape or ():
        rows *= dim
        if max(rows, n // rows) < max(best):
            best = (rows, n // rows)
    return best[1] if min(best) >= 64 and best[1] < 1 << 32 else 0


def nibbles_of(q: Array, shift: int) -> Array:
    return q + (1 << shift >> 1) >> shift


def shift_of(q: Array, shift: int, most: int) -> int:
    while shift < most and 32 * int((np.abs(2 * nibbles_of(q, shift) + 1) > 15).sum()) > len(q):
        shift += 1
    return shift


def offsets_of(q: Array, shift: int) -> Array:
    return np.clip(nibbles_of(q, shift), -8, 7) << shift


def row_mean(p: Array, zero: int, runs: int) -> int | None:
    """Return the mean pattern of a row, from at most `runs` runs; None if all are below `zero` (section 4.2)."""
    if len(p) > 32 * runs:
        p = np.concatenate([p[at : at + 32] for at in (i * (len(p) - 32) // (runs - 1) for i in range(runs))])
    live = p[p >= zero]
    return mean(live.sum(), len(live)) if len(live) else None


def fit_part(part: Part, p: Array, zero: int, grain: int, centre: int, finest: int) -> int:
    """Fit a part's row and column offsets to its patterns (sections 4.2 and 4.3); return the mean over rows."""
    float8 = grain == 256
    most = 2 if float8 else 3
    means = [row_mean(p[at : at + part.row], zero, 8 if float8 else 4) for at in range(0, part.count, part.row)]
    nrows = len(means)
    rows = spread(min(nrows, 1024), nrows)
    known = [m for r in rows if (m := means[r]) is not None]
    middle = mean(sum(known), len(known)) if known else centre
    q = np.array([0 if m is None else clamp(mean(m - middle, grain)) for m in means])
    part.shifts[0] = shift_of(q[rows], finest, most)
    part.rows = offsets_of(q, part.shifts[0])
    if part.kind == 3:
        r = spread(min(nrows, 512 if float8 else 128, max(64, nrows // 2)), nrows)
        some = p.reshape(nrows, -1)[r]
        live = some >= zero
        total = np.where(live, some - (middle + grain * part.rows[r, None]), 0).sum(0)
        left = [clamp(mean(t, int(c) * grain)) if c else 0 for t, c in zip(total, live.sum(0), strict=True)]
        part.shifts[1] = shift_of(np.array(left), finest, most)
        part.cols = offsets_of(np.array(left), part.shifts[1])
    return middle


def scale_model(
    ask: Ask,
    how: int,
    pattern: Array,
    bits: Array,
    shape: tuple[int, ...],
    zero: int,
    octave: int,
    grain: int,
    finest: int,
) -> tuple[Model | None, Array, int, int]:
    """Return the model of section 4 or None, counts of symbols, the number of sampled zeros, and of samples.

    ``bits``: bits of the values, which tell if a quad row is empty.
    """
    n, s = len(pattern), 4 if octave == 16 else 8 if grain == 256 else 7
    stride, circle = stride_of(n), (32768 - zero) // grain
    flat, based = how == 1 or n < 4096, octave == 16
    if flat and not based:
        i = sampled(n, stride)
        some = i[~empty(bits)[i]]
        plain = histogram(pattern[some] >> s & 255)
        return None, plain, int(plain[0]) + len(i) - len(some), len(i)
    centre = 0x4800 if octave == 16 else 0x4000
    cuts = cut_parts(replace(ask, segments=None) if flat else ask, n, shape if n >= 8192 else ())
    raw, zeros, values, parts, samples = np.zeros(256, np.int64), 0, 0, [], []
    for start, count, dims in cuts:
        row = columns_of(dims, count)
        none = np.zeros(0, np.int64)
        part = Part(start, count, row or 512, 3 if row else 1, 0, [0, 0], none, none)
        p = pattern[start : start + count]
        middle = fit_part(part, p, zero, grain, centre, finest)

        def base(unit: int, eighths: int = 7, middle: int = middle) -> int:
            return unit * mean(middle - centre - min(octave, 128) * eighths // 8, unit * grain) % circle

        part.base = base(1 << finest, 3 if part.kind == 1 and octave == 128 and finest < 3 else 7)
        if flat:
            part.kind, part.shifts, part.rows, part.cols, part.base = 0, [0, 0], none, none, base(8)
        i = sampled(count, stride)
        take = len(i)
        i = i[~empty(bits[start : start + count])[i]]
        raw = histogram(p[i] >> s & 255)
        fitted = histogram(lowered(p[i], grain * part.offsets()[i], zero) >> s & 255)
        zeros += int(fitted[0]) + take - len(i)
        values += take
        cost_of_nibbles = 4 * (len(part.rows) + len(part.cols)) + 64
        if not flat and how != 2 and not pays(huffman(raw), huffman(fitted), take, count, cost_of_nibbles):
            part.kind, part.shifts, part.rows, part.cols = 0, [0, 0], none, none
            part.base = base(1 if grain == 256 else 8)
        parts.append(part)
        samples.append((p[i], part.offsets()[i]))
    p, q = (np.concatenate(x) for x in zip(*samples, strict=True))
    if len(parts) == 1 and not parts[0].kind and not based:
        return None, raw, zeros, values
    return Model(parts, grain), histogram(lowered(p, grain * q, zero) >> s & 255), zeros, values


# ---- Lossless frames (sections 5 and 6)


def symbols_of_plane(plane: Array, bits: int) -> Array:
    """Return the symbols of a coded plane with the given number of raw bits (section 7 of the format)."""
    return plane & 15 if bits == 4 else plane >> (bits == 2) & (255 >> bits)


def raw_bytes(plane: Array, bits: int) -> bytes:
    """Return the raw bits that follow a coded plane (section 7 of the format)."""
    if bits == 4:
        high = np.concatenate([plane >> 4, np.zeros(len(plane) % 2, np.uint8)])
        return (high[: len(high) // 2] | high[len(high) // 2 :] << 4).tobytes()
    return packed(plane >> 7 | (plane & 1) << 1, np.minimum(bits, 2))


def put_plane(plane: Array, exponent: bool, lengths: list[int] | None, bits: int) -> tuple[int, bytes]:
    """Encode a plane of a block, with the given number of raw bits; return the mode number and the bytes."""
    n = len(plane)
    if (plane == plane[0]).all():
        return 0, plane[:1].tobytes()
    if lengths:
        symbols = symbols_of_plane(plane, bits)
        tried = symbols[np.arange(n) // 128 % 8 == 0]
        if exponent or 100 * cost(lengths, histogram(tried)) < 98 * (8 - bits) * len(tried):
            coded = coded_plane(lengths, symbols.astype(np.int64), symbols) + raw_bytes(plane, bits)
            if len(coded) < n:
                return 2, coded
    runs = [plane[i : i + 128] for i in range(0, n, 128)]
    some = [run.any() for run in runs]
    rows = np.packbits(some, bitorder="little").tobytes() + b"".join(
        r.tobytes() for r, any_ in zip(runs, some, strict=True) if any_
    )
    return (3, rows) if len(rows) < n else (1, plane.tobytes())


@dataclass
class Chosen:
    """Codebooks and numbers of raw bits by plane, and the set of fixed planes (section 5.3)."""

    books: dict[int, list[int]]
    raw: dict[int, int]
    fixed: set[int]

    def halved(self) -> int:
        """Return the header's field of this name."""
        return sum({0: 0, 1: 2, 2: 4, 4: 1 << p}[bits] for p, bits in self.raw.items())


def choose_planes(ask: Ask, dtype: int, n: int, sample: Sample, zeros: int, values: int) -> tuple[Chosen, int]:
    """Choose codebooks, raw bits and fixed planes from sampled counts (section 5); also return the last cost."""
    nplanes = DTYPES[dtype][1]
    chosen, bits = Chosen({}, {}, set()), 0
    for p in range(nplanes):
        c, top = sample.counts[p], p == 0 and has_top(dtype)
        total, raw, book = int(c.sum()), 0, None
        bits, is_uneven = 8 * total, not sample.constant[p] and uneven(c, 256)
        if top:
            book = ask.book or codebook(c, ask.max_code_length)
            bits = cost(book, c)
        elif is_uneven and excess(c, 256) > total**2 // 7 + 655 * total**2 // n:
            book = codebook(c, ask.max_code_length)
            bits = cost(book, c) + 8 * len(book_bytes(book)) * total // n
        for b in (4, 1, 2) if is_float8(dtype) else (4,):
            if is_uneven and not top:
                kept = np.zeros(256, np.int64)
                np.add.at(kept, symbols_of_plane(np.arange(256), b), c)
                symbols = codebook(kept, ask.max_code_length)
                less = cost(symbols, kept) + b * total + 8 * len(book_bytes(symbols)) * total // n
                if less < bits:
                    book, bits, raw = symbols, less, b
        pruned = has_top(dtype) and 64 * zeros >= values
        if book and 100 * bits < 98 * 8 * total:
            chosen.books[p], chosen.raw[p] = book, raw
        elif not (top or sample.constant[p] or sample.zero_run[p] or sample.has_empty or pruned):
            chosen.fixed |= {p}
    return chosen, bits


def has_top(dtype: int) -> bool:
    """Return True if plane 0 is `top`: part of the pattern, without the sign (section 5.3)."""
    _, nplanes, octave, _ = DTYPES[dtype]
    return nplanes > 1 and octave > 0


def gaps(void: Array) -> tuple[int, bytes, Array]:
    """Return the head's bit and the bitmap of a block, and for each value if the region has it (format.md, section 6).

    ``void``: for each value of the block if its quad row may be left out.
    """
    if void.all() or not void.any():
        return 0, b"", np.ones(len(void), bool)
    bitmap = np.packbits(~void[::128], bitorder="little").tobytes()
    return 1 << 17, bitmap + bytes(-len(bitmap) % 4), ~void


def region(dtype: int, chosen: Chosen, planes: list[Array]) -> bytes:
    """Encode the planes of a lossless block to its region (section 6)."""
    nplanes = DTYPES[dtype][1]
    head, body, there = gaps(empty(np.any(planes, axis=0)) & (not chosen.fixed))
    planes = [p[there] for p in planes]
    is_pruned, zero = False, planes[0] == 0
    for p in range(nplanes):
        if p in chosen.fixed:
            continue
        top = p == 0 and has_top(dtype)
        plane = planes[p][~zero] if p and is_pruned else planes[p]
        mode, contents = put_plane(plane, top, chosen.books.get(p), chosen.raw.get(p, 0))
        body += contents
        head |= mode << 2 * p
        if top and mode == 2 and len(chosen.fixed) < nplanes - 1:
            is_pruned = 64 * int(zero.sum()) >= len(zero) and not any(q[zero].any() for q in planes[1:])
            head |= is_pruned << 16
    return pad8(struct.pack("<I", head) + body)


def pattern_model(ask: Ask, shape: tuple[int, ...], bits: Array, dtype: int) -> tuple["Model | None", Array, int, int]:
    """Fit the scale model of a lossless tensor (section 4); return the results of scale_model()."""
    _, _, octave, s = DTYPES[dtype]
    pattern = pattern_of(bits, dtype)
    finest = 0
    if octave < 1024:
        plain = sample_planes(bits, dtype, 0)
        c = plain.counts[1].reshape(-1, 2 << s).sum(0)
        finest = 0 if not plain.constant[1] and not plain.zero_run[1] and not uneven(c, 2 << s) else 3
    return scale_model(ask, ask.variant, pattern, bits, shape, zero_of(dtype), octave, grain_of(dtype), finest)


def encode_lossless(ask: Ask, frame: Frame, bits: Array, dtype: int) -> bytes:
    """Encode a tensor to a lossless frame, stored if that is not larger."""
    _, nplanes, octave, _ = DTYPES[dtype]
    n = len(bits)
    frame.params(0, 0)
    stored = frame.stored(bits.astype(f"<u{nplanes}").tobytes())
    if n < 512:
        return stored
    model, counts, zeros, values = pattern_model(ask, frame.shape, bits, dtype) if octave else (None, None, 0, 0)
    sample = sample_planes(bits, dtype, model.offsets if model and dtype == 2 else 0)
    if counts is not None and has_top(dtype):
        sample.counts[0] = counts
    chosen, before = choose_planes(ask, dtype, n, sample, zeros, values)
    if is_float8(dtype) and model:
        moved = sample_planes(bits, dtype, model.offsets)
        lowered, after = choose_planes(ask, dtype, n, moved, zeros, values)
        cheaper = after + 8 * len(model.side) * int(moved.counts[0].sum()) // n < before
        if 0 in lowered.books and (ask.variant == 2 or cheaper):
            chosen = lowered
        else:
            model = None
    if len(chosen.fixed) == nplanes:
        return stored
    model = model if 0 in chosen.books else None
    planes = planes_of(bits, dtype, model.offsets if model else 0)
    prior = bool(ask.book and has_top(dtype) and 0 in chosen.books)
    side = struct.pack("<Q", codebook_id(ask.book, 0)) if prior else b""
    side += b"".join(book_bytes(chosen.books[p]) for p in sorted(chosen.books) if p or not prior)
    side = pad8(side + (model.side if model else b""))
    log2, blocks = cut_blocks(n)
    if 48 + 8 * len(frame.shape) + len(side) + 16 * len(blocks) + len(chosen.fixed) * (n + 7 & -8) >= len(stored):
        return stored
    regions = [region(dtype, chosen, [p[first : first + m] for p in planes]) for first, m in blocks]
    built = frame.blocks(
        *(side, regions, log2, sum(1 << p for p in chosen.books), prior | (2 if model else 0)),
        *(chosen.halved(), {p: planes[p] for p in chosen.fixed}),
    )
    return built if len(built) < len(stored) else stored


# ---- Truncate frames (section 8)

# By dtype number: mantissa bits, exponent bias, exponent field of Inf, number of mantissa bits dropped by each level,
# widths in bits of the mantissa's pieces, and patterns (upper 16 bits of a value) per octave.
TRUNCATED = {
    1: (23, 127, 255, (0, 6, 12, 18), (6, 6, 6, 6), 128),
    3: (7, 127, 255, (0, 2, 4, 6), (2, 2, 2, 2), 128),
    4: (10, 15, 31, (0, 3, 5, 8), (3, 3, 2, 3), 1024),
}


def a_exponents(ask: Ask, n: int) -> Array:
    """Return the exponent field of the float32 number A (section 8.1) for each value."""
    a = np.zeros(n, F32)
    starts = [start for start, _ in ask.groups]
    for (start, terms), end in zip(ask.groups, [*starts[1:], n], strict=True):
        theta_term, theta_v, v_term, eps, m_term = (F32(x) for x in terms)
        i = slice(start, end)
        factor: Any = theta_term
        if "v" in ask.state:
            factor = (np.sqrt(v_term * ask.state["v"][i]) + eps) * theta_v + theta_term
        a[i] = ask.state["theta"][i] * factor
        if "m" in ask.state:
            a[i] = a[i] + m_term * ask.state["m"][i]
    return np.where(np.isnan(a), 0, a.view(np.uint32) >> 23 & 255).astype(np.int64)


@dataclass
class Cut:
    """Truncated values x, exponent fields e, numbers of dropped bits k, and exponent fields ea of A (section 8.1)."""

    x: Array
    e: Array
    k: Array
    ea: Array

    def level(self, dtype: int) -> Array:
        return level_of(self.k, dtype)


def level_of(k: Array, dtype: int) -> Array:
    """Return the highest level that drops at most k bits."""
    return sum(((k >= y).astype(np.int64) for y in TRUNCATED[dtype][3][1:]), np.zeros(len(k), np.int64))


def cut(ask: Ask, x: Array, dtype: int, guard: int) -> Cut:
    """Choose the number of dropped bits of each value, and round (section 8.1)."""
    p, bias, last, drops, _, _ = TRUNCATED[dtype]
    nearest = not ask.options & 16
    ea = a_exponents(ask, len(x)) if ask.groups else np.zeros(len(x), np.int64)

    def dropped(e: Array) -> Array:
        if not ask.groups:
            return np.where(e == last, 0, np.array(drops)[ask.bits if ask.levels is None else ask.levels])
        d = np.where(ea == 255, 1000, ea - 127 - (e - bias) - guard)
        d = np.where((ea == 0) | (e == last), -1000, d)
        return np.clip(d, 0, p) if ask.options & 8 else np.array(drops)[level_of(d, dtype)]

    e = x >> p & last
    k = dropped(e)
    y = x + np.where((k > 0) & nearest, (1 << np.maximum(k - 1, 0)) - 1 + (x >> k & 1), 0) >> k << k
    x = np.where(e == 0, 0, np.where((y >> p & last) == last, x >> k << k, y))
    e = x >> p & last
    return Cut(x, e, dropped(e) if ask.variant == 2 else k, ea)


@dataclass
class Symbols:
    """Symbols and literals of truncated values, counts of the sampled symbols, and the scale model (section 8.2)."""

    values: Array  # symbol of each value; ESCAPE if it has none
    literals: Array
    counts: Array
    model: "Model | None"


def symbols_of(ask: Ask, shape: tuple[int, ...], x: Array, dtype: int, c: Cut) -> Symbols:
    """Map truncated values to symbols (section 8.2)."""
    octave = TRUNCATED[dtype][5]
    pattern = x >> (16 if dtype == 1 else 0) & 0x7FFF
    model = scale_model(ask, 0, pattern, x, shape, octave, octave, octave // 8, 3)[0]
    u = lowered(c.e * octave, model.offsets if model else 0, octave) // octave
    literals, values, outside = u.astype(np.uint8), u, np.zeros(len(u), bool)
    if ask.variant == 1:
        level, t = c.level(dtype), u - (0 if dtype == 4 else 96)
        outside = (u > 0) & ~((t > 0) & (t < 64))
        values = np.where(outside | (u == 0), 0, 4 * t + level)
        literals = np.where(u > 0, 4 * u + level, 0).astype("<u2")
    i = sampled(len(u), stride_of(len(u)))
    counts = histogram(values[i[~empty(u)[i]]])
    return Symbols(np.where(outside, ESCAPE, values), literals, counts, model)


def guard_of(ask: Ask, dtype: int) -> int:
    """Return the guard, adjusted for rounding mode and for the mantissas of gradient and parameter."""
    guard = ask.guard + (ask.options & 16 != 0)
    if ask.groups:
        guard = min(max(guard + ask.p - TRUNCATED[dtype][0], -128), 127)
    return 0 if ask.variant == 3 else guard


def put_fields(ask: Ask, dtype: int, c: Cut, i: slice) -> tuple[int, bytes]:
    """Return the region head's bits for a block's sign and mantissa pieces, and the packed pieces (section 8.3)."""
    p, _, _, _, widths, _ = TRUNCATED[dtype]
    x, k, some = c.x[i], c.k[i], c.e[i] > 0
    f = x >> (31 if p == 23 else 15) << p | x & (1 << p) - 1
    if ask.options & 8:
        zeros = int(np.bitwise_or.reduce(f)) | 1 << p + 1
        tail = (zeros & -zeros).bit_length() - 1
        left = np.maximum(k, tail)[some]
        return tail << 8, packed(f[some] >> left, p + 1 - left)
    head, body, rest = 0, b"", p + 1
    for j, width in enumerate(widths):
        rest -= width
        piece = f[some & (k <= rest)] >> rest & (1 << width) - 1
        if len(piece) and not piece.any():
            head |= 1 << 8 + j
        else:
            body += packed(piece, width)
    return head, body


def encode_truncate(ask: Ask, frame: Frame, x: Array, dtype: int) -> bytes:
    """Return a Truncate frame (section 8)."""
    n = len(x)
    guard = guard_of(ask, dtype)
    frame.params(ask.options, guard + 128)
    stored = frame.stored(x.astype("<u4" if dtype == 1 else "<u2").tobytes())
    if n < 512:
        return stored
    x = x.astype(np.int64)
    c = cut(ask, x, dtype, guard)
    s = symbols_of(ask, frame.shape, x, dtype, c)
    book = ask.book or codebook(s.counts, ask.max_code_length)
    name = 1 if ask.variant != 1 else 3 if dtype == 4 else 2
    side = struct.pack("<Q", codebook_id(ask.book, name)) if ask.book else book_bytes(book)
    side = pad8(side + (s.model.side if s.model else b""))
    log2, blocks = cut_blocks(n)
    if 48 + 8 * len(frame.shape) + len(side) + 16 * len(blocks) >= len(stored):
        return stored
    regions = []
    for first, m in blocks:
        i = slice(first, first + m)
        body = b""
        if ask.variant == 2:
            body += struct.pack("<I", digest(c.ea[i].astype(np.uint8).tobytes(), 0x500) & 0xFFFFFFFF)
        flag, bitmap, there = gaps(empty(c.e[i]))
        values = s.values[i][there]
        mode, part = 2, coded_plane(book, values, s.literals[i][there])
        if (values == values[0]).all() and values[0] != ESCAPE:
            mode, part = 0, bytes([values[0]])
        elif len(part) >= len(values) and ask.variant != 1:
            mode, part = 1, values.astype(np.uint8).tobytes()
        body += bitmap + part
        if ask.variant == 0:
            body += packed(c.level(dtype)[i][c.e[i] > 0], 2)
        head, pieces = put_fields(ask, dtype, c, i)
        regions.append(pad8(struct.pack("<I", mode | head | flag) + body + pieces))
    built = frame.blocks(side, regions, log2, 1, (1 if ask.book else 0) | (2 if s.model else 0))
    return built if len(built) < len(stored) else stored


# ---- Delta frames (section 10)


def put_rice(out: list[str], x: int, k: int, b: int) -> None:
    """Append the Rice code of x with parameter k, a string of 0 and 1 in stream order; b: bits of an escaped x."""
    q = x >> k
    out.append("0" * 24 + low_first(x, b) if q >= 24 else "0" * q + "1" + low_first(x - (q << k), k))


def put_gamma(out: list[str], x: int) -> None:
    t = x.bit_length() - 1
    out.append("0" * t + "1" + low_first(x - (1 << t), t))


def low_first(x: int, n: int) -> str:
    return f"{x:0{n}b}"[::-1] if n else ""


class DeltaBlock:
    """Changes of a block against its base; the bits of values are Python ints."""

    def __init__(self, dtype: int, base: list[int], new: list[int]) -> None:
        self.base, self.new = base, new
        self.d = Delta(dtype, 0, None)
        self.w = self.d.w
        self.changed = [i for i, (x, y) in enumerate(zip(base, new, strict=True)) if x != y]
        self.step = {i: (self.d.rank(new[i]) - self.d.rank(base[i])) & self.d.mask for i in self.changed}
        self.size = {i: min(s, (1 << self.w) - s) for i, s in self.step.items()}

    def negative(self, i: int) -> str:
        return "1" if self.step[i] & self.d.half else "0"

    def region(self) -> bytes:
        c, m, w = len(self.changed), len(self.base), self.w
        if not c:
            return bytes(8)
        k = max((k for k in range(19) if 3 * c << k <= 2 * m), default=0)
        by_steps, scale = self.steps() if self.d.last else (self.patches(k, True), k)
        mode, body = 1, by_steps
        patches = self.patches(k, False)
        if -(-len(patches) // 8) < -(-len(body) // 8):
            mode, body, scale = 3, patches, k
        data = int(body[::-1], 2).to_bytes(-(-len(body) // 8), "little")
        raw = b"".join(x.to_bytes(w // 8, "little") for x in self.new)
        if len(pad8(bytes(4) + data)) >= len(pad8(bytes(4) + raw)):
            mode, data, scale = 2, raw, 0
        return pad8(struct.pack("<I", mode | scale << 2 | (c - 1) << 14) + data)

    def patches(self, k: int, steps: bool) -> str:
        out: list[str] = []
        at = 0
        for i in self.changed:
            put_rice(out, i - at, k, 20)
            at = i + 1
            if steps:
                out.append(self.negative(i))
                put_gamma(out, self.size[i])
            else:
                out.append(low_first(self.base[i] ^ self.new[i], self.w))
        return "".join(out)

    def scale(self, e: list[int]) -> int:
        values, codes, total = Counter(e[::31]), Counter[int](), Counter[int]()
        for i in self.changed:
            codes[e[i]] += min(self.size[i], 9)
            total[e[i]] += min(self.size[i], 1 << 40)
        seen = sorted({*values, *codes})
        low, high = max(seen[0] - 16, -16), seen[-1] + self.w - 2

        def cost(s: int) -> int:
            bits = 0
            for x in (x for x in seen if x <= s):
                k = min(s - x, self.w - 2)
                bits += 31 * values[x] * (k + 1) + (2 * total[x] >> k)
            for r in range(1, 9):
                some = [x for x in seen if x > s and min((x - s + 1) // 2, 8) == r]
                bits += (2 * r + 2) * sum(codes[x] for x in some) + (31 * sum(values[x] for x in some) >> 2 * r)
            return bits

        best = min(range(low, high + 1, 8), key=cost)
        return min(range(max(low, best - 7), min(high, best + 7) + 1), key=cost)

    def steps(self) -> tuple[str, int]:
        """Return the bit stream of step codes, and the scale field of the region's head."""
        e = [self.d.exponent(x) for x in self.base]
        s = self.scale(e)
        out: list[str] = []
        classes = [min((x - s + 1) // 2, 8) if x > s else 0 for x in e]
        for i in (i for i, r in enumerate(classes) if r == 0):
            z = 2 * self.size.get(i, 0) - (i in self.step and self.negative(i) == "1")
            put_rice(out, z, min(s - e[i], self.w - 2), self.w)
        for r in range(1, max(classes) + 1):
            members = [i for i, x in enumerate(classes) if x == r]
            put_gamma(out, 1 + sum(min(self.size.get(i, 0), 9) for i in members))
            gap = 1
            for i in members:
                if i not in self.step:
                    gap += 1
                    continue
                put_rice(out, gap, 2 * r, 20)
                gap = 1
                out.append(self.negative(i))
                for _ in range(min(self.size[i], 9) - 1):
                    put_rice(out, 0, 2 * r, 20)
                if self.size[i] > 8:
                    put_gamma(out, self.size[i] - 8)
        return "".join(out), s + 16


def encode_delta(ask: Ask, frame: Frame, bits: Array, dtype: int) -> bytes:
    """Encode a tensor as a Delta frame against ``ask.base``."""
    base = ask.base.reshape(-1)
    little = lambda x: x.astype(f"<u{DTYPES[dtype][1]}").tobytes()
    side = struct.pack("<QQ", digest(little(base), 0x600), digest(little(bits), 0x600))
    if (base == bits).all():
        return frame.blocks(side, [])
    log2 = next((k for k in range(10, ask.block_log2) if 1 << k >= len(bits)), ask.block_log2)
    pairs = [(base[a : a + m].tolist(), bits[a : a + m].tolist()) for a, m in blocks_of(len(bits), 1 << log2)]
    return frame.blocks(side, [DeltaBlock(dtype, *pair).region() for pair in pairs], log2)


# ---- TopK frames (section 11)


def topk_chunk(ask: Ask, v: Array, h: Array | None, out: list[str]) -> bytes:
    """Encode a TopK chunk: return the bytes of its scales, and append its codes to `out`."""
    c, kept = ask.chunk_log2, ask.kept
    k, a = -(-len(v) * kept // (1 << c)), np.abs(v)
    at = np.sort(np.argsort(-a, kind="stable")[:k])
    if ask.bits == 1:
        total = 0.0
        for x in a[at]:
            total += float(x)
        scales = [F32(total / k)]
    else:
        scales = [a[at].min(), a[at].max()]
    stored = narrow(np.array(scales, F32), 3)
    levels = narrowed(np.array(scales, F32), 3)
    low, high, top = levels[0], levels[-1], (1 << (ask.bits - 1)) - 1
    if not high:
        return stored
    r = max(x for x in range(17) if x == 0 or 3 * kept << x <= 2 << c)
    d, last = high - low, -1
    for i in (int(i) for i in at):
        put_rice(out, i - last - 1, r, 20)
        last, level = i, 0
        if top and d > 0 and a[i] > low:
            x = over(np.array([min(a[i] - low, d)], F32), d, 1) * F32(top)
            level = int(steps(x, 0x8000 if h is None else h[i])[0])
        out.append(low_first(int(np.signbit(v[i])) | level << 1, ask.bits))
    return stored


def encode_topk(ask: Ask, frame: Frame, v: Array, dtype: int) -> bytes:
    n, c = len(v), ask.chunk_log2
    frame.params(ask.options, c << 16 | ask.kept if n else 0)
    if not n:
        return frame.stored(b"")
    log2 = next((k for k in range(c, 16) if 1 << k >= n), 16)
    h = draws(ask, n, 0) if ask.options & 1 else None
    regions: list[bytes] = []
    for first, m in blocks_of(n, 1 << log2):
        out: list[str] = []
        scales = b""
        for at, size in blocks_of(m, 1 << c):
            i = slice(first + at, first + at + size)
            scales += topk_chunk(ask, v[i], None if h is None else h[i], out)
        text = "".join(out)
        regions.append(pad8(scales + int("0" + text[::-1], 2).to_bytes(-(-len(text) // 8), "little")))
    return frame.blocks(b"", regions, log2)


# ---- Encode calls of all codecs


def floats(bits: Array, dtype: int) -> Array:
    """Convert the bits of values to float32."""
    if dtype == 1:
        return bits.astype(np.uint32).view(F32)
    return bits.view(np.float16).astype(F32) if dtype == 4 else (bits.astype(np.uint32) << 16).view(F32)


def with_error(bits: Array, dtype: int, error: Array) -> Array:
    """Add float32 residuals to values; every NaN becomes the same NaN (section 9)."""
    v = floats(bits, dtype) + error
    return np.where(np.isnan(v), F32("nan"), v)


def in_dtype(v: Array, dtype: int) -> Array:
    """Round float32 sums to the dtype as Truncate encodes them, keeping Inf; return the bits (section 9)."""
    u = np.frombuffer(narrow(v, dtype), "<u4" if dtype == 1 else "<u2")
    inf = {1: 0x7F800000, 3: 0x7F80, 4: 0x7C00}[dtype]
    return np.where(np.isinf(v), inf | np.signbit(v).astype(u.dtype) << 8 * u.itemsize - 1, u).astype(u.dtype)


@np.errstate(all="ignore")
def encode(bits: Array, dtype: int, shape: tuple[int, ...], ask: Ask) -> bytes:
    """Encode a tensor to a frame; `bits` are the values' bits as unsigned integers."""
    bits = bits.reshape(-1)
    frame = Frame(ask, dtype, shape)
    if ask.codec == 1:
        return encode_lossless(ask, frame, bits, dtype)
    if ask.codec == 8:
        return encode_delta(ask, frame, bits, dtype)
    error = np.zeros(len(bits), F32) if ask.error is None else ask.error
    if ask.codec == 7:
        bits = bits if ask.error is None else in_dtype(with_error(bits, dtype, error), dtype)
        return encode_truncate(ask, frame, bits, dtype)
    v = floats(bits, dtype) if ask.error is None else with_error(bits, dtype, error)
    if ask.codec == 9:
        return encode_topk(ask, frame, v, dtype)
    return encode_rows(ask, frame, v, dtype)


@np.errstate(all="ignore")
def count_symbols(bits: Array, dtype: int, shape: tuple[int, ...], ask: Ask) -> Array:
    """Count the sampled symbols of a tensor, from which a shared codebook is built (section 5.2)."""
    if ask.codec == 1:
        return pattern_model(ask, shape, bits, dtype)[1]
    x = bits.astype(np.int64)
    return symbols_of(ask, shape, x, dtype, cut(ask, x, dtype, guard_of(ask, dtype))).counts
