# pyright: basic
"""Row codecs, in which values share scales: Sign, Ternary, Float8, Float4, Quantize (format.md, 8; encoder.md, 7).

A block is processed in runs, which are whole rows or a piece of one row, so that intermediate values of a run stay in
the L1 cache. The scale is copied for each value of the run, so that the same loop works for rows of any length.

One file: encoding and decoding of a run of rows share buffers and the order of parts.
"""

from typing import Any, NamedTuple

import numpy as np

from codec.engines.numba.codes import (
    affine_codes,
    float4_codes,
    float8_codes,
    largest_code,
    level_codes,
    resolve_ties,
    ternary_codes,
    values,
)
from codec.engines.numba.floats import FLOAT32, NOWHERE, STORE, from_floats, load, put, to_floats
from codec.engines.numba.jit import enter_floats, jit, kernel, leave_floats
from codec.engines.numba.packing import pack, pack_trits, unpack, unpack_trits
from codec.engines.numba.parts import (
    BAD_SCALE,
    FLOAT8,
    LANES,
    LEAF,
    MIN_CODED,
    NONFINITE,
    ODD,
    QUANTIZE,
    ROW_BLOCK,
    RUN,
    SIGN,
    STOCHASTIC,
    TERNARY,
    TILE,
    code_bits,
    codes_nbytes,
    has_entropy,
    is_affine,
    locate_block,
    run_length,
    scale_nbytes,
)
from codec.engines.numba.philox import ROUNDS, fill_keys, fill_random
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
    get_coded,
    get_literals,
    load32,
    open_block,
    put_coded,
    store32,
)
from codec.engines.numba.scales import magnitude, read_scales, spread, store_scales, store_sign_scales, sum_leaf
from codec.engines.numba.scans import first_above, is_constant, largest
from codec.engines.numba.words import ABS, F32, I64, INF, U8, U16, U32, U64, bits_of, copy, minus, over_of


class RowWork(NamedTuple):
    """Buffers of one thread that encodes or decodes blocks of row codecs."""

    coder: Any
    codes: Any  # packed codes before or after the entropy coder
    code: Any  # codes, a byte for each value
    region: Any
    x: Any
    y: Any
    scale: Any  # scale of each value
    other: Any  # second scale or factor of each value
    row_scale: Any
    row_other: Any
    middle: Any  # Quantize with zero points: middle of the row, for each value
    row_middle: Any  # Quantize with zero points: middle of each row
    ends: Any  # smallest and largest value of a row
    half: Any  # 16 random bits for each value
    keys: Any  # keys of the random generator Philox
    sums: Any  # partial sums in float32
    sums64: Any  # partial sums in float64
    levels: Any  # pairwise summation tree: sums of 2^i leaves
    total: Any
    c: Any  # read position in a region, and end of the region
    fault: Any
    floats: Any  # saved floating-point environment of the thread


def work_of(job):
    """Allocate one thread's buffers for the blocks of a row codec's job, and compute the random generator's keys."""
    most = 16 + 8 * ROW_BLOCK + ROW_BLOCK * 2
    work = RowWork(
        coder_room(job, ROW_BLOCK),
        np.empty(ROW_BLOCK + 128, U8),
        np.empty(ROW_BLOCK + 64, U8),
        np.empty(most, U8),
        np.empty(LEAF, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(RUN, F32),
        np.empty(2, F32),
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
def scan(job, work, data, feedback, first, count):
    """Sum the values of each leaf (4,096 values) into ``job.row_sums``, from which the C library computes scales."""
    enter_floats(work.floats)
    feedback_values = feedback.view(F32)
    for i in range(first, first + count):
        p = len(job.row_parts) - 1
        while I64(job.row_parts[p].first_sum) > i:
            p -= 1
        part = job.row_parts[p]
        at = (i - I64(part.first_sum)) * LEAF
        negative, most = sum_leaf(
            job, work, data, feedback_values, I64(part.start) + at, min(LEAF, I64(part.count) - at), work.total
        )
        sums = job.row_sums[i]
        sums.sum0, sums.sum1 = work.total[0], work.total[1]
        sums.negative, sums.max = U32(negative), most
    leave_floats(work.floats)


@jit
def _refuse_given(job, work, data, feedback):
    """Return the status of a tensor that has a value above the scale given by the user.

    The status is NONFINITE if any value of the tensor is NaN or Inf, otherwise BAD_SCALE.
    """
    for at in range(0, job.n, RUN):
        some = work.y[: min(RUN, job.n - at)]
        load(job.dtype, data, feedback, at, some)
        if magnitude(some, U32(ABS + U32(1))) >= INF:
            return NONFINITE
    return BAD_SCALE


@jit
def _encode_run(job, work, data, feedback, part, first, i, n, m, region, code):
    """Quantize values [i, i + n) of a block to ``code``, and write the scales of the rows that begin in this range."""
    half, row, direct = work.half, I64(part.group_size), job.dtype == FLOAT32 and not len(feedback)
    x = data[4 * (first + i) : 4 * (first + i + n)].view(F32) if direct else work.x[:n]
    random = job.codec == TERNARY or job.options & STOCHASTIC != 0
    if random:
        half = half[fill_random(work.keys, first + i, n, half) :]
    else:
        half[:n] = U16(0x8000)
    if not direct:
        load(job.dtype, data, feedback, first + i, x)
    if row:
        status = store_scales(job, work, data, feedback, part, first, i, n, m, x, region)
        if status:
            return status
    if job.codec == TERNARY:
        if not part.scale > F32(0):
            code[:] = U8(0)
            return OK
        ternary_codes(x, part.scale, half, code)
        given = job.scale > F32(0) and not job.clip > F32(0)
        if given and magnitude(x, U32(ABS + U32(1))) > bits_of(part.scale):
            return _refuse_given(job, work, data, feedback)
        resolve_ties(work.keys, first + i, x, part.scale, code)
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
        if is_affine(job):
            middle = work.middle[:n]
            spread(work.row_middle, row, middle)
            affine_codes(job.bits, x, other, scale, middle, half, code)
            return OK
        odd = job.variant == ODD
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
def _encode_codes(job, work, data, feedback, part, first, m, region, codes):
    """Quantize a whole block, pack the codes into ``codes``, and write the row scales to the region."""
    row, bits = I64(part.group_size), code_bits(job)
    if job.codec == SIGN:
        if row:
            status = store_sign_scales(job, work, data, feedback, first, m, row, region)
            if status:
                return status
        for i in range(0, m, RUN):
            n = min(RUN, m - i)
            direct = job.dtype == FLOAT32 and not len(feedback)
            x = data[4 * (first + i) : 4 * (first + i + n)].view(F32) if direct else work.x[:n]
            if not direct:
                load(job.dtype, data, feedback, first + i, x)
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
            status = _encode_run(job, work, data, feedback, part, first, i, n, m, region, work.code[i - t : i - t + n])
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
    """Entropy-code ``n`` bytes of codes to ``out[at]``, and return the offset of the end."""
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
def encode_blocks(job, work, data, feedback, residual, frame, limit, first, count, result):
    """Encode blocks [first, first + count) to regions from frame[result[0]] on.

    result[0] is set to the end of the regions, and the blocks' checksums are added to result[1]. Residuals are written
    to ``residual`` unless it is empty.
    """
    enter_floats(work.floats)
    status, feedback_values, entropy = OK, feedback.view(F32), has_entropy(job)
    for b in range(first, first + count):
        p, start, m = locate_block(job, b)
        part, at = job.row_parts[p], I64(result[0])
        nscales = (m + I64(part.group_size) - 1) // I64(part.group_size) * scale_nbytes(job) if part.group_size else 0
        ncodes = codes_nbytes(job, m)
        bound = (nscales + ncodes + (4 if entropy else 0) + 7) // 8 * 8
        fits = limit - at >= bound
        if not fits and not entropy:
            status = SHORT_OUTPUT
            break
        region = frame[at:limit] if fits else work.region
        codes = work.codes if entropy else region[nscales : nscales + ncodes]
        status = _encode_codes(job, work, data, feedback_values, part, start, m, region, codes)
        if status:
            break
        size = close_region(region, _put_bytes(job, work, ncodes, region, nscales) if entropy else nscales + ncodes)
        status = close_block(frame, job, b, region, size, fits, limit, U64(0), result)
        if status:
            break
        if len(residual):
            _store_residuals(job, work, data, feedback_values, residual, part, start, m, frame[at : at + size], codes)
    leave_floats(work.floats)
    return status


@jit
def _open_codes(job, work, codes, codes_at, t, end, checking, fault):
    """Unpack codes [t, end) of a block to ``work.code``, and check that codes and padding bits are valid.

    If ``checking`` is set, codes are unpacked only if some of them can be invalid.
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
    all_valid = job.codec == SIGN or most >= (1 << bits) - 1
    if not (checking and all_valid):
        unpack(codes[t * bits // 8 :], n, bits, work.code)
    if not all_valid and largest(work.code[:n]) > most:
        i = first_above(work.code[:n], most)
        return bad(fault, BAD_REGION, codes_at + (t + i) * bits // 8, work.code[i], most)
    return OK


@jit
def _round_to(job, y, native):
    """Round float32 values in place to the job's dtype, as decoding does; ``native`` is a buffer."""
    from_floats(job.dtype, y, native, 0)
    to_floats(job.dtype, native, 0, y)


@jit
def _store_residuals(job, work, data, feedback, residual, part, first, m, region, codes):
    """Dequantize a block that has just been encoded, and store the residuals of its values."""
    row = I64(part.group_size)
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
            load(job.dtype, data, feedback, first + i, x)
            left = residual[4 * (first + i) : 4 * (first + i + n)].view(F32)
            for k in range(n):
                left[k] = minus(x[k], y[k])
            i += n


@jit
def _get_bytes(job, work, frame, n, c, fault):
    """Decode the entropy-coded bytes of a block's packed codes to ``work.codes``."""
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
    """Decode a block to ``sink``, or only validate it if ``sink.into`` is NOWHERE."""
    c, row, nbytes = work.c, I64(part.group_size), scale_nbytes(job)
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
                direct = sink.into == STORE and job.dtype == FLOAT32
                y = sink.data[4 * (first + i) : 4 * (first + i + n)].view(F32) if direct else work.y[:n]
                values(job, work, part, sink.unscaled, work.code[i - t : i - t + n], y)
                if rounds:
                    _round_to(job, y, work.region)
                if direct:
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
def decode_blocks(job, work, frame, checks, first, count, sink, checksum, fault):
    """Decode blocks [first, first + count) to ``sink``; if ``sink.into`` is NOWHERE, only validate them."""
    enter_floats(work.floats)
    status = OK
    for b in range(first, first + count):
        status = open_block(frame, job, b, checks, work.c, checksum, fault)
        if not status:
            p, start, m = locate_block(job, b)
            status = _decode_block(job, work, frame, job.row_parts[p], start, m, sink, fault)
        if status:
            break
    leave_floats(work.floats)
    return status
