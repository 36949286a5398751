/*
 * wire.h - constants of the format (docs/spec/format.md) that codec.h does not define. C, C++ and NVRTC.
 */
#ifndef CODEC_WIRE_H
#define CODEC_WIRE_H

#include "codec/codec.h"

#define WIRE_MAGIC 0x43444f43u /* "CODC" */

/* Header: 48 bytes, then 8 bytes per dimension. */
#define WIRE_AT_VERSION 4
#define WIRE_AT_CODEC 5
#define WIRE_AT_DTYPE 6
#define WIRE_AT_RANK 7
#define WIRE_AT_LAYOUT 8
#define WIRE_AT_BLOCK_LOG2 9
#define WIRE_AT_FIXED 10
#define WIRE_AT_CODED 11
#define WIRE_AT_SIDE_NBYTES 12
#define WIRE_AT_FRAME_NBYTES 16
#define WIRE_AT_CHECKSUM 24
#define WIRE_AT_PARAMS 32
#define WIRE_AT_FLAGS 40
#define WIRE_AT_HALVED 41
#define WIRE_AT_RESERVED 42 /* 2 bytes */
#define WIRE_AT_NBLOCKS 44
#define WIRE_AT_SHAPE 48

/* Sets of dtypes: bit d stands for dtype d. */
#define WIRE_DTYPES_LOSSY (1u << CODEC_FLOAT32 | 1u << CODEC_BFLOAT16 | 1u << CODEC_FLOAT16)
#define WIRE_DTYPES_ALL 0xffffffffu

/* Parameters: byte offsets relative to WIRE_AT_PARAMS. A codec stores 0 for a parameter that it does not have. */
#define WIRE_PARAM_VARIANT 0 /* LOSSLESS: model; TRUNCATE: level coding */
#define WIRE_PARAM_OPTIONS 1
#define WIRE_PARAM_BITS 2 /* TRUNCATE: level of all values */
#define WIRE_PARAM_MAX_CODE_LENGTH 3
#define WIRE_PARAM_GROUP_SIZE                                                                                          \
	4 /* u32: number of values that share a scale, 0: all of a part; TRUNCATE: guard + WIRE_GUARD;                 \
	    TOPK: chunk_log2 << WIRE_TOPK_CHUNK_AT | kept */
#define WIRE_PARAMS_NBYTES 8
#define WIRE_GUARD 128

#define WIRE_OPTION_CLIPPED 32u /* TERNARY: values were clipped before their scale was computed; not in a spec */

/*
 * Table of codecs. X(name, family, dtypes, variants, options, largest `bits`, least max_code_length); least
 * max_code_length is 0 if the codec has no such parameter.
 */
#define WIRE_CODECS(X)                                                                                                 \
	X(LOSSLESS, lossless, WIRE_DTYPES_ALL, 3, 0, 0, WIRE_LEAST_MAX_CODE_LENGTH)                                    \
	X(SIGN, rows, WIRE_DTYPES_LOSSY, 3, 0, 0, 0)                                                                   \
	X(TERNARY, rows, WIRE_DTYPES_LOSSY, 3, WIRE_OPTION_CLIPPED, 0, 0)                                              \
	X(FLOAT8, rows, WIRE_DTYPES_LOSSY, 4,                                                                          \
	  CODEC_OPTION_STOCHASTIC | CODEC_OPTION_PROPAGATE | CODEC_OPTION_ENTROPY | CODEC_OPTION_RCEIL, 0, 0)          \
	X(FLOAT4, rows, WIRE_DTYPES_LOSSY, 2, CODEC_OPTION_STOCHASTIC, 0, 0)                                           \
	X(QUANTIZE, rows, WIRE_DTYPES_LOSSY, 3, CODEC_OPTION_STOCHASTIC, 8, 0)                                         \
	X(TRUNCATE, truncate, WIRE_DTYPES_LOSSY, 4, CODEC_OPTION_BITS | CODEC_OPTION_CUT, 3,                           \
	  WIRE_LEAST_MAX_CODE_LENGTH)                                                                                  \
	X(DELTA, delta, WIRE_DTYPES_ALL, 1, 0, 0, 0)                                                                   \
	X(TOPK, topk, WIRE_DTYPES_LOSSY, 1, CODEC_OPTION_STOCHASTIC, 8, 0)

/*
 * LOSSLESS: number of bits of each value that follow the symbols of coded plane p raw: 4 if the plane is halved, 1 or 2
 * for float8. halved: field of the header; size: bytes per value.
 */
#define WIRE_RAW_BITS(halved, p, size) ((halved) >> (p) & 1 ? 4 : (size) == 1 ? (int)((halved) >> 1) : 0)
#define WIRE_HALVED(raw_bits, p) ((raw_bits) == 4 ? 1u << (p) : 2u * (uint32_t)(raw_bits)) /* the inverse */
/* LOSSLESS: 1 if regions contain only plane 0, and plane 0 has no raw bits. */
#define WIRE_ONLY_PLANE_0(fixed, halved, size) ((fixed) == (1u << (size)) - 2 && !WIRE_RAW_BITS(halved, 0, size))

#define WIRE_PIECE_ZERO (1u << 8) /* region: piece 0 of all mantissas is 0 and omitted; << i: piece i */
#define WIRE_TAIL_AT 8 /* region head, CODEC_OPTION_BITS: trailing zero bits omitted from all fields; 5 bits */
#define WIRE_TAIL 31u
/*
 * WIRE_DROPS_*: mantissa bits dropped at levels 0 to 3. WIRE_PIECES_*: bits of the pieces into which a field is cut,
 * most significant first.
 */
#define WIRE_DROPS_FLOAT32 {0, 6, 12, 18}
#define WIRE_DROPS_BFLOAT16 {0, 2, 4, 6}
#define WIRE_DROPS_FLOAT16 {0, 3, 5, 8}
#define WIRE_PIECES_FLOAT32 {6, 6, 6, 6}
#define WIRE_PIECES_BFLOAT16 {2, 2, 2, 2}
#define WIRE_PIECES_FLOAT16 {3, 3, 2, 3}
#define WIRE_JOINT_BASE 96 /* joint symbols of exponent and level: exponents 97..159, float16 1..31 */

#define WIRE_ROW_BLOCK 16384   /* maximum number of values per block, if rows are shorter */
#define WIRE_TRITS_BLOCK 81920 /* maximum number of values per block, if 5 values are packed per byte */
#define WIRE_PART_MIN 4096     /* a segment of at least this many values is a part of its own */
#define WIRE_MAX_PARTS(n) (2 * ((n) / WIRE_PART_MIN) + 1)
/* Row codecs: up to 64 more parts, so that small segments, and remainders of cut segments, have separate scales. */
#define WIRE_MAX_ROW_PARTS(n) (WIRE_MAX_PARTS(n) + ((n) < 1024 ? (n) / 16 : 64))
#define WIRE_MAX_ROW 0x80000000u
#define WIRE_MAX_NVFP4 126 /* largest byte of a row's scale: e4m3fn without sign and NaN */
/* largest stored exponent of a row's scale: the scale times the largest element, 6, 448 or 57344, is finite */
#define WIRE_MAX_MXFP4 252
#define WIRE_MAX_MXFP8_E4M3 246
#define WIRE_MAX_MXFP8_E5M2 239
#define WIRE_TREE 4096 /* number of values summed in float32 lanes; the results are added pairwise in float64 */

#define WIRE_LAYOUT_STORED 0
#define WIRE_LAYOUT_BLOCKS 1

#define WIRE_FLAG_PRIOR 1u    /* plane 0 is coded with an agreed codebook; the frame has its id */
#define WIRE_FLAG_SEGMENTS 2u /* the side section holds a scale model */
#define WIRE_FLAGS_KNOWN 3u

#define WIRE_ALIGN 8 /* sections and regions begin at multiples of this */
#define WIRE_DIRECTORY_ENTRY 8
#define WIRE_MIN_CODED 512 /* frames of fewer values are stored */
#define WIRE_MIN_BLOCK_LOG2 9
#define WIRE_MAX_BLOCK_LOG2 14
#define WIRE_MAX_PLANES 8

/*
 * The pattern of a float is the 15 bits below its sign. `zero` is the smallest pattern whose plane 0 is not 0. The
 * scale model leaves patterns below `zero` unchanged. It adds offsets to the other WIRE_CIRCLE(zero) patterns, modulo
 * their number.
 */
#define WIRE_PATTERNS 0x8000
#define WIRE_CIRCLE(zero) (WIRE_PATTERNS - (zero))

/* Lane coder: 32 interleaved entropy-coded streams. */
#define WIRE_LANES 32
#define WIRE_ROW 128 /* symbols in a quad row of the lane coder: a quad (4 symbols) per lane */
#define WIRE_LEAST_MAX_CODE_LENGTH 2
#define WIRE_MAX_CODE_LENGTH 8
#define WIRE_ESCAPE 256 /* index of the escape, the last code of its length in canonical order */

/* A region begins with a u32 head: 2 bits of mode per plane, then flags. */
#define WIRE_MODE_CONSTANT 0u
#define WIRE_MODE_RAW 1u
#define WIRE_MODE_CODED 2u
#define WIRE_MODE_ROWS 3u
#define WIRE_REGION_PRUNED (1u << 16)
#define WIRE_REGION_GAPS (1u << 17) /* a bitmap follows the head; empty quad rows have no bytes in the planes */
#define WIRE_GAPS_NBYTES(m) (((m) + 32 * WIRE_ROW - 1) / (32 * WIRE_ROW) * 4) /* size of the bitmap of m values */

/* DELTA: sizes of blocks, the head of a region, and the codes in it. */
#define WIRE_DELTA_MIN_BLOCK_LOG2 10 /* a block is a whole number of the digest's chunks of 1 KiB */
#define WIRE_DELTA_MAX_BLOCK_LOG2 18
#define WIRE_DELTA_BLOCK_LOG2 17 /* default of encoders */
#define WIRE_DELTA_SIDE_NBYTES 16
#define WIRE_DELTA_SAME 0u
#define WIRE_DELTA_STEPS 1u
#define WIRE_DELTA_RAW 2u
#define WIRE_DELTA_PATCHES 3u
#define WIRE_DELTA_SCALE_AT 2 /* head: bits 2..13 are the scale, bits 14..31 the number of changes - 1 */
#define WIRE_DELTA_SCALE 0xfffu
#define WIRE_DELTA_CHANGES_AT 14
#define WIRE_DELTA_BIAS 16 /* the head's scale field is the scale S + 16 */
#define WIRE_DELTA_CLASSES 8
#define WIRE_DELTA_MORE 8 /* number of consecutive codes 0 before a gamma code */
#define WIRE_DELTA_MAX_GAP_K 18
/* Rice codes: number of zeros that begin an escape, and bits of an escaped gap. */
#define WIRE_RICE_LONGEST 24
#define WIRE_RICE_GAP_BITS 20

/* TOPK: values per chunk, values kept per whole chunk, values per block. */
#define WIRE_TOPK_KEPT 0xffffu
#define WIRE_TOPK_CHUNK_AT 16
#define WIRE_TOPK_MIN_CHUNK_LOG2 6
#define WIRE_TOPK_MAX_BLOCK_LOG2 16

/* Scale model: one record per segment, then nibbles. Parts of row codecs use the same record. */
#define WIRE_SEGMENT_NBYTES 16 /* bytes per record; at most WIRE_MAX_PARTS or WIRE_MAX_ROW_PARTS records */
#define WIRE_SEGMENT_ROWS 1u
#define WIRE_SEGMENT_COLS 2u
#define WIRE_MAX_SHIFT 3   /* offsets are nibble << shift, in grains: eighths of an octave, float8: whole numbers */
#define WIRE_MAX_SHIFT8 2  /* float8: base and offsets of row and column add up to less than two circles */
#define WIRE_FLAT_ROW 512  /* number of consecutive values that share an offset in a part without columns */
#define WIRE_MATRIX_MIN 64 /* minimum length of the shorter side of a matrix with offsets of rows and columns */

/* Checksum: words per chunk, and seeds of digests. */
#define WIRE_CHUNK_WORDS 256
#define WIRE_SEED_HEADER 0x100u
#define WIRE_SEED_SIDE 0x101u
#define WIRE_SEED_DIRECTORY 0x200u
#define WIRE_SEED_REGION 0x300u
#define WIRE_SEED_PLANE 0x400u  /* + plane */
#define WIRE_SEED_STATE 0x500u  /* exponents of TRUNCATE's metric A; a region has their digest */
#define WIRE_SEED_VALUES 0x600u /* DELTA: values of the base, and of the result */

#endif
