/* wire.h - the constants of the format (docs/format.md), and nothing else. C, C++ and NVRTC. */
#ifndef CODEC_WIRE_H
#define CODEC_WIRE_H

#define WIRE_MAGIC 0x43444f43u /* "CODC" */
#define WIRE_VERSION 1

/* Header: 48 bytes, then 8 a dimension. */
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
#define WIRE_AT_HALVED 44
#define WIRE_AT_RESERVED 45 /* 3 bytes */
#define WIRE_AT_SHAPE 48
#define WIRE_MAX_RANK 8
#define WIRE_MAX_HEADER (WIRE_AT_SHAPE + 8 * WIRE_MAX_RANK)

#define WIRE_CODEC_LOSSLESS 1

#define WIRE_LAYOUT_STORED 0
#define WIRE_LAYOUT_BLOCKS 1

#define WIRE_FLAG_PRIOR 1u    /* plane 0 is coded with a codebook named by id */
#define WIRE_FLAG_SEGMENTS 2u /* the side section holds a scale model */
#define WIRE_FLAG_WINDOW 4u   /* 64-bit floats: the side section starts with the exponent window */
#define WIRE_FLAGS_KNOWN 7u

#define WIRE_MODEL_AUTO 0
#define WIRE_MODEL_FLAT 1
#define WIRE_MODEL_SEPARABLE 2

#define WIRE_ALIGN 8 /* sections and regions start at multiples of this */
#define WIRE_DIRECTORY_ENTRY 8
#define WIRE_MIN_CODED 512 /* fewer values are stored */
#define WIRE_MIN_BLOCK_LOG2 9
#define WIRE_MAX_BLOCK_LOG2 14
#define WIRE_MAX_PLANES 8

/*
 * The pattern of a float is the 15 bits below its sign. Those below `zero` (a dtype's first non-zero exponent byte)
 * stay as they are under the scale model; the others move around a circle of WIRE_CIRCLE(zero).
 */
#define WIRE_PATTERNS 0x8000
#define WIRE_ZERO64 16 /* of float64; others have 128 */
#define WIRE_CIRCLE(zero) (WIRE_PATTERNS - (zero))

/* Lane coder. */
#define WIRE_LANES 32
#define WIRE_ROW 128 /* values in a quad row: 32 lanes of 4 */
#define WIRE_MAX_CAP 8
#define WIRE_ESCAPE 256 /* the escape's place in canonical order */

/* Region: u32 head = 2 bits of mode a plane, then flags. */
#define WIRE_MODE_CONSTANT 0u
#define WIRE_MODE_RAW 1u
#define WIRE_MODE_CODED 2u
#define WIRE_MODE_ROWS 3u
#define WIRE_REGION_PRUNED (1u << 16)
#define WIRE_REGION_KNOWN 0x1ffffu

/* Scale model: a record a segment, then nibbles. */
#define WIRE_SEGMENT_NBYTES 16
#define WIRE_SEGMENT_ROWS 1u
#define WIRE_SEGMENT_COLS 2u
#define WIRE_MAX_SHIFT 3      /* offsets are nibble << shift eighths of an octave */
#define WIRE_FLAT_COLS 512    /* a segment without columns has an offset for each run of this many values */
#define WIRE_MATRIX_MIN 64    /* the shorter side of a matrix that gets offsets */
#define WIRE_SEGMENT_MIN 8192 /* runs of smaller segments are one flat segment */
#define WIRE_MODEL_MIN 4096   /* fewer values have no scale model */
#define WIRE_MAX_SEGMENTS(n) (2 * ((n) / WIRE_SEGMENT_MIN) + 1)

/* Seal. */
#define WIRE_CHUNK_WORDS 256
#define WIRE_SEED_HEADER 0x100u
#define WIRE_SEED_SIDE 0x101u
#define WIRE_SEED_DIRECTORY 0x200u
#define WIRE_SEED_REGION 0x300u
#define WIRE_SEED_PLANE 0x400u /* + plane */

#endif
