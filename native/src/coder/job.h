/* job.h - a job's memory: what was decided about a tensor, or read from a frame. Plain data, without pointers. */
#ifndef CODEC_JOB_H
#define CODEC_JOB_H

#include "codec/codec_engine.h"
#include "exact/choose.h"
#include "frame/family.h"
#include "isa/cpu.h"

/* A part of the scale model: an offset for every value, the sum of a base and those of its row and column. */
struct segment {
	uint64_t start, count;
	uint32_t row;         /* values of a row; 0: of kind 0 */
	uint32_t nibbles_at;  /* bytes behind the records: those of rows, then of columns. Twice that in job_offsets */
	uint16_t base;        /* in eighths of an octave, as those of rows and columns */
	uint16_t mean;        /* encode: the mean pattern of its rows */
	uint8_t kind, shifts; /* as in the record */
};

/* Encoding: offsets of rows that were found for a run of values. */
struct fitted {
	uint64_t from; /* the first of these values: a row that begins before has the offset `row` */
	int8_t row;
};

struct model {
	uint64_t nsegments;               /* 0: all offsets are 0 */
	uint64_t segments_at, offsets_at; /* bytes from the job's start */
	uint64_t nibbles;                 /* bytes of all segments */
};

/* Part of a row codec (rows/parts.c): values [start, start + count). Blocks and rows do not cross its ends. */
struct part {
	uint64_t start, count, first_block;
	uint32_t first_sum;
	uint32_t row; /* values that share a scale; 0: all do */
	float scale[2];
};

/* What a sample of the tensor says. */
struct sample {
	uint32_t counts[WIRE_MAX_PLANES][256];
	uint64_t nzeros, nvalues;
	uint8_t has_zero_run; /* bit p: some run of 128 of plane p is all zero */
	uint8_t is_constant;  /* bit p */
	/* plane 0's symbols in bins (choose.h): of a segment's values as they are, and lowered; of all as they will be
	 */
	uint32_t raw[CHOOSE_BINS], lowered[CHOOSE_BINS], all[CHOOSE_BINS];
};

/* What a job is for, and how far it is: steps out of order, or of the other direction, are refused. */
enum { JOB_ENCODE = 0x4a454e43, JOB_DECODE = 0x4a444543 };
/* PLANNED: without a frame or destination; blocks are done by others. */
enum { JOB_OPEN, JOB_SCANNING, JOB_READY, JOB_CLOSED, JOB_PLANNED };

/* Codecs of rows: when what decoding will miss is written. LAST: the frame may turn out too large for its buffer. */
enum residual { RESIDUAL_NONE, RESIDUAL_WITH_BLOCKS, RESIDUAL_LAST };

/* A job: plain memory without pointers. Segments and offsets follow it. */
struct job {
	codec_plan plan;
	uint32_t kind, state;
	struct header h;
	struct model model;
	uint64_t nparts, nsums, nscans, parts_at, sums_at, work_at; /* codecs of rows; bytes from the job's start */
	struct philox key;
	float scale, clip;
	uint8_t residual;    /* codecs of rows: enum residual */
	uint8_t feedback;    /* encode: CODEC_FEEDBACK */
	uint8_t one_pass;    /* encode: CODEC_ONE_PASS */
	uint8_t blocks_scan; /* encode: what scans would find is found with the blocks */
	uint64_t seal;       /* decode: of all but the blocks */
	uint64_t codebook_id;
	uint8_t checked; /* decode: the checksum has been verified already, or must not be */
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

/* Offsets of a segment's rows and columns, in eighths of an octave. */
static inline int8_t *segment_row_offsets(const struct job *j, const struct segment *s)
{
	return (int8_t *)j + j->model.offsets_at + 2 * (uint64_t)s->nibbles_at;
}

static inline int8_t *segment_col_offsets(const struct job *j, const struct segment *s)
{
	return segment_row_offsets(j, s) + (segment_rows(s) + 1) / 2 * 2;
}

/* The job in the caller's memory, aligned. */
static inline struct job *job_place(void *memory)
{
	return (struct job *)ALIGN8((uintptr_t)memory);
}

static inline struct part *job_parts(const struct job *j)
{
	return (struct part *)((char *)j + j->parts_at);
}

static inline struct row_sums *job_sums(const struct job *j)
{
	return (struct row_sums *)((char *)j + j->sums_at);
}

/* Block b's region, frame[*at, *end); its digest is checked unless that was done, and added to the seal. */
codec_status job_block(const struct job *j, const uint8_t *frame, const codec_context *with, uint64_t b, uint64_t *at,
		       uint64_t *end, uint64_t *seal);

#endif
