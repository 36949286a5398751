"""Build frames from the elements of docs/spec/format.md, also such that no encoder writes."""

import struct
from dataclasses import dataclass, field

import numpy as np

from reference import decoder as oracle
from reference.decoder import ESCAPE


def recompute_checksums(frame):
    """Return a damaged frame with its checksums recomputed; None if the header does not locate the checksums."""
    try:
        side, frame_nbytes = struct.unpack_from("<I", frame, 12)[0], struct.unpack_from("<Q", frame, 16)[0]
        rank, layout, log2, fixed, dtype = frame[7], frame[8], frame[9], frame[10], frame[6]
        shape = struct.unpack_from(f"<{rank}Q", frame, 48)
        n = int(np.prod([min(s, 1 << 40) for s in shape], dtype=object))
        header = 48 + 8 * rank
        nplanes = oracle.DTYPES[dtype][1]
        checksum = oracle.digest(bytes(frame[:24]) + bytes(8) + bytes(frame[32:header]), 0x100)
        out = bytearray(frame)
        if layout == 0:
            checksum += oracle.digest(b"", 0x101) + oracle.mix(
                oracle.digest(bytes(frame[header:]), 0x300) ^ oracle.GOLDEN
            )
        else:
            (nblocks,) = struct.unpack_from("<I", frame, 44)
            directory, at = header + side, header + side + 8 * nblocks
            if frame_nbytes != len(frame) or nblocks > 64:
                return None
            planes = [p for p in range(nplanes) if fixed >> p & 1]
            regions = at + len(planes) * (-(-n // 8) * 8)
            begin = regions
            for b in range(nblocks):
                end = 8 * struct.unpack_from("<I", frame, directory + 8 * b)[0]
                m = min(1 << log2, n - (b << log2))
                d = oracle.digest(bytes(frame[begin:end]), 0x300)
                for i, p in enumerate(planes):
                    a = at + i * (-(-n // 8) * 8) + (b << log2)
                    d += oracle.digest(bytes(frame[a : a + m]), 0x400 + p)
                s = oracle.mix((d & oracle.MASK64) ^ ((b + 1) * oracle.GOLDEN & oracle.MASK64))
                struct.pack_into("<I", out, directory + 8 * b + 4, s >> 32)
                checksum += s
                begin = end
            checksum += oracle.digest(bytes(frame[header : header + side]), 0x101)
            checksum += oracle.digest(bytes(out[directory : directory + 8 * nblocks]), 0x200)
        struct.pack_into("<Q", out, 24, checksum & oracle.MASK64)
        return bytes(out)
    except (struct.error, IndexError, KeyError, OverflowError):
        return None


def header(
    codec, dtype, shape, params, layout=0, log2=0, fixed=0, coded=0, side=0, nbytes=0, flags=0, halved=0, blocks=0
):
    """Return a header with a checksum of 0."""
    return struct.pack(
        f"<4s8BIQQ8s4BI{len(shape)}Q",
        *(b"CODC", 1, codec, dtype, len(shape), layout, log2, fixed, coded, side, nbytes, 0),
        *(params.ljust(8, b"\0"), flags, halved, 0, 0, blocks, *shape),
    )


def stored(dtype, shape, values, codec=1, params=b"\0\0\0\x08", **fields):
    """Return a frame of layout 0, which stores values uncompressed."""
    nbytes = 48 + 8 * len(shape) + len(values)
    return recompute_checksums(header(codec, dtype, shape, params, nbytes=nbytes, **fields) + values)


@dataclass
class Blocks:
    """Frame of layout 1 with a shape of one dimension, built from regions that :func:`region` returns."""

    dtype: int
    n: int
    regions: list[bytes]
    codec: int = 1
    params: bytes = b"\0\0\0\x08"
    side: bytes = b""
    fixed: dict[int, bytes] = field(default_factory=dict)
    coded: int = 0
    halved: int = 0
    flags: int = 0
    log2: int = 9

    def frame(self, lead=False):
        """Return the frame's bytes. ``lead``: add a block of 512 zeros before the first block."""
        nplanes = oracle.DTYPES[self.dtype][1]
        zeros = region(bytes(5 if self.codec == 7 else 4 + nplanes - len(self.fixed)))
        regions = [zeros] * lead + self.regions
        n = 512 * lead + self.n
        side = self.side + bytes(-len(self.side) % 8)
        planes = b"".join((bytes(512 * lead) + self.fixed[p]).ljust(-(-n // 8) * 8, b"\0") for p in sorted(self.fixed))
        ends = np.cumsum([56 + len(side) + 8 * len(regions) + len(planes), *map(len, regions)])[1:] // 8
        head = header(
            *(self.codec, self.dtype, (n,), self.params, 1, self.log2, sum(1 << p for p in self.fixed), self.coded),
            *(len(side), 8 * int(ends[-1]), self.flags, self.halved, len(regions)),
        )
        directory = b"".join(struct.pack("<II", end, 0) for end in ends)
        return recompute_checksums(head + side + directory + planes + b"".join(regions))


def delta_frame(dtype, base, regions, result, log2=10, **fields):
    """Return a Delta frame, given the bytes of the base and of the result, and one region per block."""
    n = len(base) // oracle.DTYPES[dtype][1]
    side = struct.pack("<QQ", oracle.digest(base, 0x600), oracle.digest(result, 0x600))
    ends = np.cumsum([72 + 8 * len(regions), *map(len, regions)])
    how = {"codec": 8, "dtype": dtype, "shape": (n,), "params": b"", "layout": 1, "log2": log2, "side": 16}
    how |= {"nbytes": int(ends[-1]), "blocks": len(regions)} | fields
    directory = b"".join(struct.pack("<II", end // 8, 0) for end in ends[1:])
    return recompute_checksums(header(**how) + side + directory + b"".join(regions))


def region(body):
    """Pad the bytes of a region to a multiple of 8."""
    return body + bytes(-len(body) % 8)


def ordered(lengths):
    """Return the symbols in the order of their canonical codes."""
    return sorted(lengths, key=lambda v: (lengths[v], v))


def book(lengths):
    """Return the stored form of a codebook, given its code lengths by symbol."""
    values = [v for v in lengths if 0 < v < ESCAPE]
    first, last = min(values, default=1), max(values, default=0)
    nibbles = [lengths.get(v, 0) for v in range(first, last + 1)] + [0]
    return bytes(
        [
            lengths[ESCAPE] | lengths.get(0, 0) << 4,
            first,
            last,
            *(nibbles[i] | nibbles[i + 1] << 4 for i in range(0, last - first + 1, 2)),
        ]
    )


def coded(symbols, lengths, literals=b"", pad=None):
    """Return a coded plane of symbols, each a byte or ESCAPE. ``pad`` is the symbol that fills the last quad row."""
    code, at = {}, 0
    for v in ordered(lengths):
        code[v] = f"{at:08b}"[: lengths[v]]
        at += 256 >> lengths[v]
    fill = ordered(lengths)[0] if pad is None else pad
    symbols = [*symbols, *[fill] * (-len(symbols) % 128)]
    lanes, words = ["0" * 32] * 32, []
    for q in reversed(range(0, len(symbols), 128)):
        for i in reversed(range(32)):
            quad = "".join(code[v] for v in symbols[q + 4 * i : q + 4 * i + 4])
            if len(quad + lanes[i]) >= 64:
                words.append(int(lanes[i][-32:], 2))
                lanes[i] = lanes[i][:-32]
            lanes[i] = quad + lanes[i]
    words = [int(lane[:32], 2) for lane in lanes] + words[::-1]
    while words and not words[-1]:
        words.pop()
    bits = "".join(f"{len(lane) - 32:05b}" for lane in lanes) + "".join(lane[32:] for lane in lanes)
    bits += "0" * (-len(bits) % 8)
    out = struct.pack("<H", len(words)) + int(bits, 2).to_bytes(len(bits) // 8, "big")
    return out + bytes(-len(out) % 4) + struct.pack(f"<{len(words)}I", *words) + literals


def low_first(x, n):
    """Return n bits of a number, the lowest one first."""
    return f"{x:0{n}b}"[::-1] if n else ""
