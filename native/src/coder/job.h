/* job.h - a job: all choices made for a tensor, or read from a frame. */
#ifndef CODEC_JOB_H
#define CODEC_JOB_H

#include "codec/codec_engine.h"
#include "exact/choose.h"
#include "frame/family.h"
#include "isa/cpu.h"

/* Part of the scale model. The offset of a value is the sum of a base and the offsets of its row and column. */
struct segment {
	uint64_t start, count;
	uint32_t row;         /* number of values per row; 0: part of kind 0 */
	uint32_t nibbles_at;  /* bytes from records to nibbles of rows, then columns; half an index into offsets */
	uint16_t base;        /* in eighths of an octave (an octave is a factor of 2), as all offsets */
	uint16_t mean;        /* encode: mean pattern of the rows */
	uint8_t kind, shifts; /* as in the segment's record in the frame */
};

/* Encode: a range of values for which row offsets were computed. */
struct fitted {
	uint64_t from; /* first value of the range; a row that begins before it has the offset `row` */
	int8_t row;
};

struct model {
	uint64_t nsegments;               /* 0: all offsets are 0 */
	uint64_t segments_at, offsets_at; /* offsets in bytes from the job's start */
	uint64_t nibbles;                 /* size in bytes of the nibbles of all segments */
};

/*
 * Part of a frame of a row codec (rows/parts.c): values [start, start + count). Blocks and rows do not extend across
 * parts.
 */
struct part {
	uint64_t start, count, first_block;
	uint32_t first_sum;
	uint32_t group_size; /* number of values that share a scale; 0: all */
	float scale[2];
};

/*
 * Counts of the symbols of patterns in a part of a segment's sample, and as many more bins that fit.c needs. raw:
 * before offsets are subtracted; lowered: afterwards. empty: number of values in empty quad rows, which are not
 * counted.
 */
struct symbol_counts {
	uint32_t raw[512], lowered[512];
	uint64_t empty;
};

#define SAMPLE_PIECES 8 /* maximum number of parts of a sample, which threads count */

/* Statistics of a sample of the tensor. */
struct sample {
	/* of bytes, by plane; float8 with a scale model: [0] with the model, [1] without, and so for bits below */
	uint32_t counts[WIRE_MAX_PLANES][256];
	uint64_t nzeros, nvalues; /* values, also those of empty quad rows, which the counts do not have */
	uint8_t has_empty_row;    /* 1: all values of a sampled quad row are 0 */
	uint8_t has_zero_run; /* bit p: a sampled run of 128 bytes of plane p is all zero, not those of an empty row */
	uint8_t is_constant;  /* bit p: all sampled bytes of plane p are equal */
	struct symbol_counts piece[SAMPLE_PIECES]; /* of one segment; [0]: in the end of the whole sample */
};

/* DELTA: a block's contribution to the digests of base and result, and the state of its list of changes. */
enum { DELTA_UNKNOWN, DELTA_CHECKED, DELTA_LISTED };
struct delta_block {
	uint64_t base, result;
	uint32_t changes;
	uint32_t state;  /* decode: DELTA_UNKNOWN, ...; DELTA_LISTED: the changes are in the job's list */
	uint64_t list;   /* index of the first change in the list */
	uint64_t origin; /* first block of the range in which the block was checked */
};

/* Direction of a job. Encode steps of a decode job return CODEC_BAD_ARGUMENT, and vice versa. */
enum { JOB_ENCODE = 0x4a454e43, JOB_DECODE = 0x4a444543 };
/* Progress of a job. JOB_PLANNED: opened without a frame or destination; another engine processes the blocks. */
enum { JOB_OPEN, JOB_SCANNING, JOB_READY, JOB_CLOSED, JOB_PLANNED };

/*
 * Codecs that are never stored: when the residual is written. RESIDUAL_LAST: after all blocks, because the frame may
 * turn out not to fit its buffer, and errors must leave the residual unchanged.
 */
enum residual { RESIDUAL_NONE, RESIDUAL_WITH_BLOCKS, RESIDUAL_LAST };

/* A job: plain memory without pointers, followed by segments and offsets, or by parts and sums. */
struct job {
	codec_plan plan;
	uint32_t kind, state;
	struct header h;
	struct model model;
	uint64_t nparts, nsums, nscans, parts_at, sums_at,
		work_at;  /* for row codecs; *_at: offset in bytes from the job's start */
	uint64_t kept_at; /* decode: memory in which a check keeps the symbols of plane 0; 0: none */
	struct philox key;
	float scale, clip;       /* codec_spec.scale and clip; 0: none; scale -1: the caller's scale is 0 */
	uint8_t residual;        /* codecs that are never stored: enum residual */
	uint8_t blocks_leave;    /* TRUNCATE, encode: blocks write the residual as soon as the frame certainly fits */
	uint64_t nleft;          /* TRUNCATE, encode: number of last blocks that have written their residual */
	uint8_t verify_first;    /* encode: CODEC_VERIFY_FIRST is set */
	uint8_t blocks_scan;     /* encode: encoding the blocks replaces the scan */
	uint64_t outer_checksum; /* decode: the frame's checksum minus the checksums of its blocks */
	uint64_t codebook_id;
	uint64_t base_digest, result_digest; /* DELTA, decode: digests in the side section */
	uint32_t reads_residual;             /* encode: the flag CODEC_FEEDBACK or CODEC_DIFFERENCE, or 0 */
	uint8_t checked;                     /* decode: the checksum is verified, or CODEC_NO_CHECKSUM is set */
	codebook books[WIRE_MAX_PLANES];
	union {
		struct { /* encode */
			struct sample sample;
			book_codes codes[WIRE_MAX_PLANES];
		};
		book_lookup lookup[WIRE_MAX_PLANES]; /* decode */
	};
};

static inline struct segment *job_segments(const struct job *j)
{
	return (struct segment *)((char *)j + j->model.segments_at);
}

static inline uint64_t segment_rows(const struct segment *s)
{
	return s->kind & WIRE_SEGMENT_ROWS ? (s->count + s->row - 1) / s->row : 0;
}

static inline uint64_t segment_cols(const struct segment *s)
{
	return s->kind & WIRE_SEGMENT_COLS ? s->row : 0;
}

/* Return a segment's offsets of rows, or of columns, in eighths of an octave. */
static inline int8_t *segment_row_offsets(const struct job *j, const struct segment *s)
{
	return (int8_t *)j + j->model.offsets_at + 2 * (uint64_t)s->nibbles_at;
}

static inline int8_t *segment_col_offsets(const struct job *j, const struct segment *s)
{
	return segment_row_offsets(j, s) + (segment_rows(s) + 1) / 2 * 2;
}

/* DELTA: return the array of blocks' records. Decoding a block writes its record, although steps get a const job. */
static inline struct delta_block *job_delta_blocks(const struct job *j)
{
	return (struct delta_block *)((char *)j + j->parts_at);
}

/* Return the job in a caller's memory: the first aligned address. */
static inline struct job *job_place(void *memory)
{
	return (struct job *)ALIGN8((uintptr_t)memory);
}

/* Maximum number of values of a tensor whose symbols are kept: 64 MiB of memory. */
#define KEPT_NVALUES (1ull << 26)

/*
 * Return the size in bytes of the memory in which a check of a LOSSLESS frame keeps the symbols of plane 0, so that
 * decoding need not repeat their decoding; 0: it does not keep them. It is 8 bytes for alignment, and for each block 8
 * bytes, the symbols, and the 64 bytes that kernels may write past a plane.
 */
static inline uint64_t kept_nbytes(uint32_t codec, uint64_t n, uint64_t block, uint64_t nblocks)
{
	return codec == CODEC_LOSSLESS && nblocks > 1 && n <= KEPT_NVALUES ? 8 + nblocks * (8 + block + 64) : 0;
}

/*
 * Return an array with a number for each block: the size in bytes of its region up to the end of plane 0 if a check has
 * kept the symbols of this plane, else 0. Checking a block writes its number, although steps get a const job.
 */
static inline uint64_t *job_kept_nbytes(const struct job *j)
{
	return (uint64_t *)((char *)j + j->kept_at);
}

static inline uint8_t *job_kept_symbols(const struct job *j, uint64_t b)
{
	return (uint8_t *)(job_kept_nbytes(j) + j->h.nblocks) + b * (j->h.block + 64);
}

static inline struct part *job_parts(const struct job *j)
{
	return (struct part *)((char *)j + j->parts_at);
}

static inline struct row_sums *job_sums(const struct job *j)
{
	return (struct row_sums *)((char *)j + j->sums_at);
}

/*
 * Find the region of block b, frame[*at, *end). Verify the block's checksum unless that was done before, and add the
 * checksum to *checksum.
 */
codec_status job_block(const struct job *j, const uint8_t *frame, const codec_context *with, uint64_t b, uint64_t *at,
		       uint64_t *end, uint64_t *checksum);

#endif
