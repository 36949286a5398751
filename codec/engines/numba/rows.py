# pyright: basic
"""Sign, ternary, float8, float4, quantize: values share scales (docs/format.md, section 8; docs/encoder.md, 7).

A block is gone through a run of whole rows, or a piece of one, at a time: what a run becomes stays in the first-level
cache. Its values get their scale each, so that one long loop does rows of any length.
"""

from typing import Any, NamedTuple

import numpy as np

from codec.engines.numba.codes import (
    float4_codes,
    float8_codes,
    largest_code,
    level_codes,
    settle_ties,
    ternary_codes,
    values,
)
from codec.engines.numba.draws import ROUNDS, draw, fill_keys
from codec.engines.numba.floats import FLOAT32, NOWHERE, STORE, from_floats, load, put, to_floats
from codec.engines.numba.jit import enter_floats, jit, kernel, leave_floats
from codec.engines.numba.packing import pack, pack_trits, unpack, unpack_trits
from codec.engines.numba.parts import (
    BAD_SCALE,
    FLOAT8,
    LANES,
    MIN_CODED,
    NONFINITE,
    QUANTIZE,
    ROW_BLOCK,
    RUN,
    SIGN,
    STOCHASTIC,
    TERNARY,
    TILE,
    TREE,
    block_place,
    code_bits,
    codes_nbytes,
    has_entropy,
    run_length,
    scale_nbytes,
)
from codec.engines.numba.region import (
    BAD_REGION,
    CODED,
    CONSTANT,
    OK,
    RAW,
    SHORT_OUTPUT,
    bad,
    close_block,
    close_region,
    coder_room,
    end_region,
    first_above,
    get_coded,
    get_literals,
    is_constant,
    largest,
    load32,
    open_block,
    put_coded,
    store32,
)
from codec.engines.numba.scales import find_scales, magnitude, piece, read_scales, sign_scales, spread
from codec.engines.numba.words import ABS, F32, I64, INF, U8, U16, U32, U64, bits_of, copy, minus, over_of


class Work(NamedTuple):
    """Memory of one thread."""

    coder: Any
    codes: Any  # bytes, packed, on their way through the coder
    code: Any  # a byte each
    region: Any
    x: Any
    y: Any
    scale: Any  # of each value; and a second one
    other: Any
    row_scale: Any
    row_other: Any
    half: Any  # draws
    keys: Any
    sums: Any  # float32 lanes, float64 lanes
    sums64: Any
    levels: Any  # sums of 2^i pieces
    total: Any
    c: Any
    fault: Any
    floats: Any  # the thread's way with floats


def work_of(job):
    """Memory for a job's blocks."""
    most = 16 + 8 * ROW_BLOCK + ROW_BLOCK * 2
    work = Work(
        coder_room(job, ROW_BLOCK),
        np.empty(ROW_BLOCK + 128, U8),
        np.empty(ROW_BLOCK + 64, U8),
        np.empty(most, U8),
        np.empty(TREE, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN + 16, U16),
        np.empty(2 * ROUNDS + 1, U32),
        np.empty((2, LANES), F32),
        np.empty((2, LANES), np.float64),
        np.empty((2, 64), np.float64),
        np.empty(4, np.float64),
        np.empty(2, I64),
        np.empty(3, U64),
        np.empty(64, U8),
    )
    fill_keys(job.seed, job.stream, work.keys)
    return work


@kernel
def scan(job, work, data, error, first, count):
    """Pieces of 4,096 values of parts: what the C library makes scales of."""
    enter_floats(work.floats)
    lost = error.view(F32)
    for i in range(first, first + count):
        p = len(job.row_parts) - 1
        while I64(job.row_parts[p].first_sum) > i:
            p -= 1
        part = job.row_parts[p]
        at = (i - I64(part.first_sum)) * TREE
        negative, most = piece(job, work, data, lost, I64(part.start) + at, min(TREE, I64(part.count) - at), work.total)
        sums = job.row_sums[i]
        sums.sum0, sums.sum1 = work.total[0], work.total[1]
        sums.negative, sums.max = U32(negative), most
    leave_floats(work.floats)


@jit
def _refuse_given(job, work, data, error):
    """What is wrong with a tensor that has a value above the scale given: that, or some value is NaN or Inf."""
    for at in range(0, job.n, RUN):
        some = work.y[: min(RUN, job.n - at)]
        load(job.dtype, data, error, at, some)
        if magnitude(some, U32(ABS + U32(1))) >= INF:
            return NONFINITE
    return BAD_SCALE


@jit
def _encode_run(job, work, data, error, part, first, i, n, m, region, code):
    """Codes of values [i, i + n) of a block, a byte each; scales of rows that begin there."""
    half, row, direct = work.half, I64(part.row), job.dtype == FLOAT32 and not len(error)
    x = data[4 * (first + i) : 4 * (first + i + n)].view(F32) if direct else work.x[:n]
    random = job.codec == TERNARY or job.options & STOCHASTIC != 0
    if random:
        half = half[draw(work.keys, first + i, n, half) :]
    else:
        half[:n] = U16(0x8000)
    if not direct:
        load(job.dtype, data, error, first + i, x)
    if row:
        status = find_scales(job, work, data, error, part, first, i, n, m, x, region)
        if status:
            return status
    if job.codec == TERNARY:
        if not part.scale > F32(0):
            code[:] = U8(0)
            return OK
        ternary_codes(x, part.scale, half, code)
        given = job.scale > F32(0) and not job.clip > F32(0)
        if given and magnitude(x, U32(ABS + U32(1))) > bits_of(part.scale):
            return _refuse_given(job, work, data, error)
        settle_ties(work.keys, first + i, x, part.scale, code)
        return OK
    scale, other = work.scale[:n], work.other[:n]
    if job.codec == QUANTIZE:
        for r in range(1 if row > RUN else (n + row - 1) // row):
            amax = work.row_scale[r]
            if amax > F32(0):
                work.row_other[r], work.y[r] = over_of(amax, F32(1))
            else:
                work.row_other[r], work.y[r] = F32(1), F32(0)
        spread(work.row_other, row, other)
        spread(work.y, row, scale)
        odd = job.variant == 1
        levels = (1 << (job.bits - 1)) - 1 if odd else (1 << job.bits) - 1
        level_codes(odd, levels, x, other, scale, half, code)
        return OK
    spread(work.row_scale, row, scale)
    if job.codec == FLOAT8:
        float8_codes(job.variant, x, scale, random, half, code)
    else:
        float4_codes(x, scale, random, half, code)
    return OK


@jit
def _encode_codes(job, work, data, error, part, first, m, region, codes):
    """Codes of a whole block, packed, to `codes`; its rows' scales to the region."""
    row, bits = I64(part.row), code_bits(job)
    if job.codec == SIGN:
        if row:
            status = sign_scales(job, work, data, error, first, m, row, region)
            if status:
                return status
        for i in range(0, m, RUN):
            n = min(RUN, m - i)
            direct = job.dtype == FLOAT32 and not len(error)
            x = data[4 * (first + i) : 4 * (first + i + n)].view(F32) if direct else work.x[:n]
            if not direct:
                load(job.dtype, data, error, first + i, x)
            u = x.view(U32)
            for k in range(n):
                work.code[k] = U8(u[k] <= ABS)
            pack(work.code, n, 1, codes[i // 8 :])
        return OK
    tile = m if row and row <= ROW_BLOCK else TILE
    for t in range(0, m, tile):
        end = min(t + tile, m)
        i = t
        while i < end:
            n = run_length(row, i, end)
            status = _encode_run(job, work, data, error, part, first, i, n, m, region, work.code[i - t : i - t + n])
            if status:
                return status
            i += n
        if bits:
            pack(work.code, end - t, bits, codes[t * bits // 8 :])
        else:
            pack_trits(work.code, end - t, codes[t // 5 :])
    return OK


@jit
def _put_bytes(job, work, n, out, at):
    """Code bytes through the entropy stage: where they end."""
    codes = work.codes
    if is_constant(codes[:n]):
        store32(out, at, CONSTANT)
        out[at + 4] = codes[0]
        return at + 5
    end = put_coded(job, 0, codes, n, work.coder.none, n - 1, work.coder, out, at + 4) if n >= MIN_CODED else 0
    store32(out, at, CODED if end else RAW)
    if end:
        return end
    copy(out[at + 4 :], codes[:n])
    return at + 4 + n


@kernel
def encode_blocks(job, work, data, error, residual, frame, limit, first, count, result):
    """Blocks [first, first + count) to regions from frame[result[0]] on; result becomes their end and seal.

    `residual` gets what a decoder will miss, unless it is empty.
    """
    enter_floats(work.floats)
    status, lost, entropy = OK, error.view(F32), has_entropy(job)
    for b in range(first, first + count):
        p, start, m = block_place(job, b)
        part, at = job.row_parts[p], I64(result[0])
        nscales = (m + I64(part.row) - 1) // I64(part.row) * scale_nbytes(job) if part.row else 0
        ncodes = codes_nbytes(job, m)
        most = (nscales + ncodes + (4 if entropy else 0) + 7) // 8 * 8
        fits = limit - at >= most
        if not fits and not entropy:
            status = SHORT_OUTPUT
            break
        region = frame[at:limit] if fits else work.region
        codes = work.codes if entropy else region[nscales : nscales + ncodes]
        status = _encode_codes(job, work, data, lost, part, start, m, region, codes)
        if status:
            break
        size = close_region(region, _put_bytes(job, work, ncodes, region, nscales) if entropy else nscales + ncodes)
        status = close_block(frame, job, b, region, size, fits, limit, U64(0), result)
        if status:
            break
        if len(residual):
            _leave(job, work, data, lost, residual, part, start, m, frame[at : at + size], codes)
    leave_floats(work.floats)
    return status


@jit
def _open_codes(job, work, codes, codes_at, t, end, checking, fault):
    """Codes [t, end) of a block, a byte each, to work.code: none is larger than there are, what is left over is 0.

    `checking`: those of which no more is to be known may be left out.
    """
    bits, n = code_bits(job), end - t
    if bits == 0:
        nbytes = (n + 4) // 5
        some = codes[t // 5 : t // 5 + nbytes]
        if largest(some) > 242:
            i = first_above(some, 242)
            return bad(fault, BAD_REGION, codes_at + (0 if has_entropy(job) else t // 5 + i), some[i], 242)
        from_ = nbytes - 1 if checking else 0
        unpack_trits(some[from_:], n - 5 * from_, work.code[5 * from_ :])
        for i in range(n, 5 * nbytes):
            if work.code[i]:
                last = 0 if has_entropy(job) else t // 5 + nbytes - 1
                return bad(fault, BAD_REGION, codes_at + last, work.code[i], 0)
        return OK
    nbits = n * bits
    at = (t * bits + nbits) // 8
    if nbits % 8 and codes[at] >> U8(nbits % 8):
        return bad(fault, BAD_REGION, codes_at + at, codes[at] >> U8(nbits % 8), 0)
    most = largest_code(job)
    all_are = job.codec == SIGN or most >= (1 << bits) - 1
    if not (checking and all_are):
        unpack(codes[t * bits // 8 :], n, bits, work.code)
    if not all_are and largest(work.code[:n]) > most:
        i = first_above(work.code[:n], most)
        return bad(fault, BAD_REGION, codes_at + (t + i) * bits // 8, work.code[i], most)
    return OK


@jit
def _round_to(job, y, native):
    """Float32 values as decoding to the dtype gives them."""
    from_floats(job.dtype, y, native, 0)
    to_floats(job.dtype, native, 0, y)


@jit
def _leave(job, work, data, error, residual, part, first, m, region, codes):
    """What a block, just encoded, leaves of its values."""
    row = I64(part.row)
    tile, nbytes = (m if row and row <= ROW_BLOCK else TILE), scale_nbytes(job)
    for t in range(0, m, tile):
        end = min(t + tile, m)
        _open_codes(job, work, codes, 0, t, end, False, work.fault)
        i = t
        while i < end:
            n = run_length(row, i, end)
            if row and (row <= RUN or i % row == 0):
                read_scales(job, region, i // row * nbytes, part, n if row <= RUN else 1, work, work.fault)
            y, x = work.y[:n], work.x[:n]
            values(job, work, part, False, work.code[i - t : i - t + n], y)
            if job.dtype != FLOAT32:
                _round_to(job, y, work.region)
            load(job.dtype, data, error, first + i, x)
            left = residual[4 * (first + i) : 4 * (first + i + n)].view(F32)
            for k in range(n):
                left[k] = minus(x[k], y[k])
            i += n


@jit
def _get_bytes(job, work, frame, n, c, fault):
    """Code bytes from behind the entropy stage, to work.codes."""
    mode = load32(frame, c[0])
    c[0] += 4
    codes = work.codes
    if mode == CODED:
        status = get_coded(frame, job, 0, n, work.coder, True, codes, c, fault)
        return (
            status
            if status
            else get_literals(frame, job.tables[0, 512], work.coder.escaped, n, codes, work.coder.none, c, fault)
        )
    if mode > CODED:
        return bad(fault, BAD_REGION, c[0] - 4, mode, CODED)
    nbytes = n if mode == RAW else 1
    if c[1] - c[0] < nbytes:
        return bad(fault, BAD_REGION, c[0], c[1] - c[0], nbytes)
    if mode == RAW:
        copy(codes, frame[c[0] : c[0] + n])
    else:
        codes[:n] = frame[c[0]]
    c[0] += nbytes
    return OK


@jit
def _decode_block(job, work, frame, part, first, m, sink, fault):
    c, row, nbytes = work.c, I64(part.row), scale_nbytes(job)
    at, end_at = c[0], c[1]
    nscales = (m + row - 1) // row * nbytes if row else 0
    ncodes, codes_at = codes_nbytes(job, m), at + nscales
    entropy = has_entropy(job)
    if entropy:
        if end_at - at < nscales + 4:
            return bad(fault, BAD_REGION, at, end_at - at, nscales + 4)
        c[0] = codes_at
        status = _get_bytes(job, work, frame, ncodes, c, fault)
        if not status:
            status = end_region(frame, c, fault)
        if status:
            return status
    else:
        size = (nscales + ncodes + 7) // 8 * 8
        if end_at - at != size:
            return bad(fault, BAD_REGION, at, end_at - at, size)
        for i in range(codes_at + ncodes, end_at):
            if frame[i]:
                return bad(fault, BAD_REGION, i, frame[i], 0)
    codes = work.codes[:ncodes] if entropy else frame[codes_at : codes_at + ncodes]
    tile = m if row and row <= ROW_BLOCK else TILE
    rounds = job.dtype != FLOAT32 and sink.into != STORE and not sink.unscaled
    for t in range(0, m, tile):
        end = min(t + tile, m)
        status = _open_codes(job, work, codes, codes_at, t, end, sink.into == NOWHERE, fault)
        i = t
        while i < end and not status:
            n = run_length(row, i, end)
            if row and (row <= RUN or i % row == 0):
                status = read_scales(job, frame, at + i // row * nbytes, part, n if row <= RUN else 1, work, fault)
            if not status and sink.into != NOWHERE:
                at_once = sink.into == STORE and job.dtype == FLOAT32
                y = sink.data[4 * (first + i) : 4 * (first + i + n)].view(F32) if at_once else work.y[:n]
                values(job, work, part, sink.unscaled, work.code[i - t : i - t + n], y)
                if rounds:
                    _round_to(job, y, work.region)
                if at_once:
                    pass
                elif sink.into == STORE:
                    from_floats(job.dtype, y, sink.data, first + i)
                else:
                    put(sink, part.scale, y, first + i)
            i += n
        if status:
            return status
    return OK


@kernel
def decode_blocks(job, work, frame, checks, first, count, sink, seal, fault):
    """Blocks [first, first + count) to their values; or, if there is no sink, only their checks."""
    enter_floats(work.floats)
    status = OK
    for b in range(first, first + count):
        status = open_block(frame, job, b, checks, work.c, seal, fault)
        if not status:
            p, start, m = block_place(job, b)
            status = _decode_block(job, work, frame, job.row_parts[p], start, m, sink, fault)
        if status:
            break
    leave_floats(work.floats)
    return status
