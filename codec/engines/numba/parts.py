# pyright: basic
"""Parts, rows and blocks of codecs whose values share scales (docs/spec/format.md, sections 8.1 to 8.4)."""

from codec._c.library import DTYPES, lib
from codec.engines.numba.jit import jit
from codec.engines.numba.words import I64
from codec.errors import Status

NONFINITE, BAD_SCALE = int(Status.NONFINITE), int(Status.BAD_SCALE)
SIGN, TERNARY, QUANTIZE = lib.CODEC_SIGN, lib.CODEC_TERNARY, lib.CODEC_QUANTIZE
FLOAT8, FLOAT4 = lib.CODEC_FLOAT8, lib.CODEC_FLOAT4
L1, L2, TWO_MEAN = lib.CODEC_SIGN_L1, lib.CODEC_SIGN_L2, lib.CODEC_SIGN_TWO_MEAN
NVFP4 = lib.CODEC_FLOAT4_NVFP4
E5M2, MXFP8_E4M3, MXFP8_E5M2 = lib.CODEC_E5M2, lib.CODEC_MXFP8_E4M3, lib.CODEC_MXFP8_E5M2
ODD, AFFINE = lib.CODEC_LEVELS_ODD, lib.CODEC_LEVELS_AFFINE
STOCHASTIC, PROPAGATE = lib.CODEC_OPTION_STOCHASTIC, lib.CODEC_OPTION_PROPAGATE
ENTROPY, RCEIL = lib.CODEC_TRAIT_ENTROPY, lib.CODEC_OPTION_RCEIL
FLOAT32 = DTYPES["float32"]
ROW_BLOCK, TRITS_BLOCK = 16384, 81920  # maximum number of values per block, for all codes and for packed trits
RUN, TILE = 2560, 10240  # values processed together; multiples of 40, so that codes of any width begin at a byte
LEAF, LANES = 4096, 32  # number of values per leaf of the pairwise sum, and of interleaved partial sums in a leaf
TIE = 3  # temporary ternary code: the first 16 random bits do not decide
MIN_CODED = 512  # a block's codes are entropy-coded only if they have at least this many bytes


@jit
def code_bits(job):
    """Return the number of bits of a code; 0 for trits, five of which are packed in a byte."""
    if job.codec == SIGN:
        return 1
    if job.codec == TERNARY:
        return 2 if job.variant == 0 else 0
    if job.codec == FLOAT8:
        return 8
    return 4 if job.codec == FLOAT4 else job.bits


@jit
def has_entropy(job):
    """Return True if the codes in a job's frame are entropy-coded."""
    return job.traits & ENTROPY != 0


@jit
def is_affine(job):
    """Return True for Quantize with zero points, whose rows store their smallest and largest value."""
    return job.codec == QUANTIZE and job.variant == AFFINE


@jit
def is_e5m2(variant):
    """Return True if the floats of a variant of Float8 are e5m2."""
    return variant in (E5M2, MXFP8_E5M2)


@jit
def scale_most(job):
    """Return the largest valid scale byte of a row; 0 if scales are float32."""
    if job.codec == FLOAT4:
        return 126 if job.variant == NVFP4 else 252
    if job.codec == FLOAT8 and job.variant >= MXFP8_E4M3:
        return 239 if is_e5m2(job.variant) else 246
    return 0


@jit
def scale_nbytes(job):
    """Return the size in bytes of a row's scales."""
    if scale_most(job):
        return 1
    if is_affine(job):
        return 8 if job.dtype == FLOAT32 else 4
    return 8 if job.codec == SIGN and job.variant == TWO_MEAN else 4


@jit
def codes_nbytes(job, m):
    """Return the size in bytes of ``m`` packed codes."""
    bits = code_bits(job)
    return (m * bits + 7) // 8 if bits else (m + 4) // 5


@jit
def locate_block(job, b):
    """Return the index of block ``b``'s part, the block's first value, and its number of values."""
    low, high = 0, len(job.row_parts)
    while high - low > 1:
        middle = (low + high) // 2
        if I64(job.row_parts[middle].first_block) <= b:
            low = middle
        else:
            high = middle
    part = job.row_parts[low]
    row = I64(part.group_size)
    if row:
        block = ROW_BLOCK // row * row if row <= ROW_BLOCK else row
    else:
        block = ROW_BLOCK if code_bits(job) else TRITS_BLOCK
    before = (b - I64(part.first_block)) * block
    return low, I64(part.start) + before, min(block, I64(part.count) - before)


@jit
def run_length(row, i, m):
    """Return the length of the run that begins at value ``i`` of ``m``: whole rows, or a piece of one row."""
    n = RUN
    if row and row <= RUN:
        n = RUN // row * row
    elif row:
        n = min(n, row - i % row)
    return min(n, m - i)
