# pyright: basic
"""Gaps: empty quad rows, whose values are all 0, are left out of a block's planes (docs/spec/format.md, section 6).

``rows`` has a byte for each quad row of a block: 1 if the row is in the region, 0 if it is left out.
"""

from codec.engines.numba.jit import jit
from codec.engines.numba.lanes import ROW
from codec.engines.numba.region import BAD_REGION, BLOCK, OK, bad
from codec.engines.numba.scans import largest
from codec.engines.numba.words import U8

GAPS = 1 << 17  # flag in a region's head
MOST_ROWS = BLOCK // ROW


@jit
def find_gaps(values, m, size, rows):
    """Find the empty quad rows of ``m`` values of ``size`` bytes; return the number of values in the other rows.

    Return m if no row is empty, or if all are: the block has no gaps.
    """
    kept = 0
    for q in range((m + ROW - 1) // ROW):
        first, end = ROW * q, min(m, ROW * q + ROW)
        rows[q] = largest(values[size * first : size * end]) != 0
        kept += (end - first) * rows[q]
    return kept or m


@jit
def pack_rows(rows, m, values):
    """Move the values of the rows in the region together, in place."""
    to = 0
    for q in range((m + ROW - 1) // ROW):
        for i in range(ROW * q, min(m, ROW * q + ROW) if rows[q] else 0):
            values[to] = values[i]
            to += 1


@jit
def expand_rows(rows, m, kept, plane):
    """Undo :func:`pack_rows`: move ``kept`` bytes to the positions of their values, and set all other bytes to 0."""
    for q in range((m + ROW - 1) // ROW - 1, -1, -1):
        for i in range(min(m, ROW * q + ROW) - 1, ROW * q - 1, -1):
            kept -= rows[q]
            plane[i] = plane[kept] if rows[q] else U8(0)


@jit
def put_bitmap(rows, m, region, at):
    """Write the bitmap of a block of ``m`` values, and return its end in ``region``."""
    end = at + (m + 32 * ROW - 1) // (32 * ROW) * 4
    region[at:end] = U8(0)
    for q in range((m + ROW - 1) // ROW):
        region[at + q // 8] |= U8(rows[q] << q % 8)
    return end


@jit
def get_bitmap(frame, m, rows, c, fault):
    """Read the bitmap of a block of ``m`` values; return a status and the number of values in the region."""
    at, nrows = c[0], (m + ROW - 1) // ROW
    nbytes = (nrows + 31) // 32 * 4
    if c[1] - at < nbytes:
        return bad(fault, BAD_REGION, at, c[1] - at, nbytes), 0
    kept, some = 0, 0
    for q in range(8 * nbytes):
        bit = frame[at + q // 8] >> U8(q % 8) & U8(1)
        if q >= nrows:
            if bit:
                return bad(fault, BAD_REGION, at + q // 8, frame[at + q // 8], 0), 0
            continue
        rows[q] = bit
        some += bit
        kept += bit * min(ROW, m - ROW * q)
    if some in (0, nrows):
        return bad(fault, BAD_REGION, at, some, nrows - 1), 0
    c[0] += nbytes
    return OK, kept
