/* core.h - what the files of the core share: the header in memory, the scale model, a job, and one thread's buffers. */
#ifndef CODEC_CORE_H
#define CODEC_CORE_H

#include "codec/codec.h"
#include "codec/codec_engine.h"
#include "kernels.h"

#define ALIGN8(x) (((uint64_t)(x) + 7) & ~(uint64_t)7)
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define TRY(call)                                                                                                      \
	do {                                                                                                           \
		codec_status status_ = (call);                                                                         \
		if (status_ != CODEC_OK)                                                                               \
			return status_;                                                                                \
	} while (0)

#if CODEC_BIG_ENDIAN
static inline void swap_bytes(uint8_t *p, uint64_t nbytes, uint64_t size)
{
	for (; nbytes; p += size, nbytes -= size)
		for (uint64_t a = 0, b = size - 1; a < b; a++, b--) {
			uint8_t t = p[a];

			p[a] = p[b];
			p[b] = t;
		}
}
#endif

/* dtypes.c: what each dtype is to the coder. */
struct dtype {
	uint8_t nbytes;
	uint8_t form;    /* enum form */
	uint16_t octave; /* patterns from one power of two to the next; 0: no exponent, no scale model */
};

/* The first pattern that takes part in the scale model: below it, plane 0 (of float64: the exponent) is 0. */
static inline uint16_t dtype_zero(const struct dtype *d)
{
	return d->form == FORM_FLOAT8 ? WIRE_ZERO64 : 128;
}

const struct dtype *dtype_of(uint32_t number);

static inline int is_constant(const uint8_t *p, uint64_t n)
{
	return n < 2 || (p[0] == p[n - 1] && memcmp(p, p + 1, n - 1) == 0);
}

/* Where and why a frame is refused: returns the status. */
static inline codec_status fault(codec_fault *f, codec_status status, uint64_t offset, uint64_t found,
				 uint64_t expected)
{
	if (f)
		*f = (codec_fault){offset, found, expected};
	return status;
}

/* segments.c */
codec_status shape_product(uint32_t rank, const uint64_t *shape, uint64_t *n);
uint64_t segment_count(const codec_segment *s);
codec_status segments_check(const codec_context *with, uint64_t n);

/* frame.c: the header as read once, checked whole; nothing else reads or writes a header field. */
struct header {
	uint8_t codec, dtype, rank, layout, block_log2, fixed, coded, halved, flags;
	uint8_t cap, model;             /* LOSSLESS */
	uint8_t variant, options, bits; /* codecs of rows; TRUNCATE: how levels are sent, options, the level if fixed */
	int8_t guard;                   /* TRUNCATE */
	uint32_t row;
	uint64_t shape[CODEC_MAX_RANK];
	uint64_t frame_nbytes, checksum;
	/* derived */
	uint64_t n, block, nblocks;
	uint64_t side_at, side_nbytes, directory_at, planes_at, plane_stride, regions_at;
};

/* codecs.c */
int codec_known(uint32_t id);
int codec_takes(uint32_t id, uint32_t dtype);
int codec_is_rows(uint32_t id);
int params_fault(const struct header *h);
void params_read(struct header *h, const uint8_t *params);
void params_write(const struct header *h, uint8_t *params);
codec_status params_ask(const codec_spec *s, struct header *h);
void params_spec(const struct header *h, codec_spec *s);

codec_status header_derive(struct header *h);
codec_status header_read(const uint8_t *frame, size_t nbytes, struct header *h, codec_fault *f);
void header_write(const struct header *h, uint8_t *frame);
uint64_t header_seal(const struct header *h, const struct kernels *k, const uint8_t *side);

/* model.c: an offset for every value, in patterns; those of rows and columns in eighths of an octave. */
struct segment {
	uint64_t start, count, cols;
	uint64_t rows_at, cols_at; /* into model.offsets */
	int32_t base; /* a pattern: the mean one while offsets are chosen, then the offset of row and column 0 */
	uint8_t kind, row_shift, col_shift;
};

struct model {
	uint64_t nsegments;               /* 0: all offsets are 0 */
	uint64_t segments_at, offsets_at; /* bytes from the job's start */
	uint64_t noffsets;
	uint32_t window; /* of 64-bit exponents */
};

/* rows.c: values [start, start + count) whose blocks and rows are their own. */
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
};

/*
 * Too even for a codebook to save 2%? The sum of squared counts says so much faster than a book: near the uniform
 * distribution it exceeds its least value by 2 ln 2 times the bits that could be saved, and by values / total by chance
 * alone.
 */
static inline int near_uniform(const uint32_t counts[256], uint64_t values)
{
	uint64_t squares = 0, total = 0;

	for (int i = 0; i < 256; i++) {
		squares += (uint64_t)counts[i] * counts[i];
		total += counts[i];
	}
	return squares * values <= total * total + (values - 1) * total + total * total / 7;
}

/* What a job is for, and how far it is: steps out of order, or of the other direction, are refused. */
enum { JOB_ENCODE = 0x4a454e43, JOB_DECODE = 0x4a444543 };
enum { JOB_OPEN, JOB_SCANNING, JOB_READY, JOB_CLOSED };

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
	uint8_t residual; /* codecs of rows: enum residual */
	uint64_t seal;    /* decode: of all but the blocks */
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

static inline int8_t *job_offsets(const struct job *j)
{
	return (int8_t *)j + j->model.offsets_at;
}

static inline struct part *job_parts(const struct job *j)
{
	return (struct part *)((char *)j + j->parts_at);
}

static inline struct row_sums *job_sums(const struct job *j)
{
	return (struct row_sums *)((char *)j + j->sums_at);
}

/* Where the scale model begins: TRUNCATE moves exponents alone, and float16's zero exponent is 1024 patterns. */
static inline uint16_t model_zero(const struct header *h, const struct dtype *d)
{
	return h->codec == CODEC_TRUNCATE && d->octave == 1024 ? 1024 : dtype_zero(d);
}

uint64_t model_nbytes(const struct dtype *d, uint64_t n);
void model_choose(const codec_tensor *src, const codec_context *with, const struct kernels *k, struct job *j,
		  struct sample *s);
uint64_t model_side_nbytes(const struct job *j);
void model_write(const struct job *j, uint8_t *dst);
codec_status model_read(const uint8_t *frame, uint64_t at, uint64_t end, struct job *j, uint64_t *used, codec_fault *f);
void model_offsets(const struct job *j, const struct kernels *k, uint64_t first, uint64_t n, uint16_t *offset);

/* Values whose offsets are worked out at once: they stay in the first-level cache. */
#define OFFSETS 4096

/* work.c, block_encode.c, block_decode.c: one block to its region and back. */
struct work {
	uint8_t *plane[WIRE_MAX_PLANES];
	uint8_t *symbol, *high, *region, *escapes;
	uint16_t *offset;   /* of OFFSETS values */
	uint16_t *exponent; /* float64 */
	/* codecs of rows: a chunk's values, scales and draws; codes of a tile */
	float *x, *y, *scale, *scale_below;
	uint32_t *max;
	uint16_t *half;
	uint8_t *code;
	uint64_t nescapes;
	/* TRUNCATE: a block's patterns, fields or their pieces; exponents, those of A, bits dropped, kept; levels */
	uint32_t *patterns, *fields;
	uint8_t *piece[4], *e, *ea, *drop, *width, *level;
	char *values; /* of a block that is not decoded into its tensor: lies where encoding has its region */
	uint32_t *words, *words_end;
	struct stream top[2]; /* memory for plane 0 of two blocks; plane[0] is the first's */
	struct ahead ahead;
};

/* Where a region is read: its bytes lie in frame[at, end); escapes are taken from end downwards. */
struct cursor {
	const uint8_t *frame;
	uint64_t at, end;
};

uint64_t encode_plane(const book_codes *codes, const struct kernels *k, struct work *w, uint8_t *symbol, uint64_t m,
		      const uint8_t *literal, const uint16_t *exponent, uint64_t most, uint8_t *dst, uint8_t *escapes,
		      uint64_t *nescapes);
codec_status decode_plane(const book_lookup *lookup, const struct kernels *k, struct work *w, struct cursor *c,
			  uint64_t m, uint8_t *symbol, codec_fault *f);
codec_status read_escapes(const uint32_t *escaped, struct cursor *c, uint8_t *out, uint64_t n, codec_fault *f);
uint64_t encode_bytes(const struct job *j, const struct kernels *k, struct work *w, uint64_t n, uint8_t *dst);
codec_status decode_bytes(const struct job *j, const struct kernels *k, struct work *w, struct cursor *c, uint64_t n,
			  const uint8_t **bytes, codec_fault *f);
uint64_t work_nbytes(const struct header *h);
void work_place(const struct header *h, void *memory, struct work *w);

/* Where decoded values go: what codec_context's `into` says, or x - y, or nowhere: codes and scales are only checked.
 */
struct sink {
	int into;
	float weight;
	float scale, divide; /* of the result; 0: not */
	int unscaled, rescale;
	const codec_tensor *dst, *src;
};
#define SINK_RESIDUAL 100
#define SINK_NONE 101

void sink_put(const struct kernels *k, const struct sink *s, uint64_t first, uint64_t n, const float *y);
uint64_t region_bound(const struct job *j);
uint64_t encode_block(const struct job *j, const struct kernels *k, const codec_tensor *src, uint8_t *dst, uint64_t b,
		      struct work *w, uint64_t *planes_digest);
/* A block being decoded. Two may be open at once, each with its own memory for plane 0. */
struct block {
	struct cursor c;
	struct stream top;
	uint64_t b, m;
	uint32_t head;
	uint8_t mode[WIRE_MAX_PLANES];
};

codec_status block_open(const struct job *j, const uint8_t *frame, uint64_t b, uint64_t at, uint64_t end,
			const struct stream *top, struct block *o, codec_fault *f);
void block_decode_top(const struct job *j, const struct kernels *k, struct block *o, int count, struct work *w);
codec_status block_close(const struct job *j, const struct kernels *k, struct block *o, char *values, int past,
			 struct work *w, codec_fault *f);

/* verify.c: what can be said of a frame without decoding it. */
codec_status frame_open(const uint8_t *frame, size_t nbytes, const codec_context *with, struct header *h);
codec_status frame_region(const uint8_t *frame, const struct header *h, uint64_t b, uint64_t *at, uint64_t *end,
			  codec_fault *f);
codec_status frame_check_block(const uint8_t *frame, const struct header *h, const struct kernels *k, uint64_t b,
			       uint64_t at, uint64_t end, uint64_t *seal, codec_fault *f);
uint64_t frame_seal(const uint8_t *frame, const struct header *h, const struct kernels *k);
codec_status frame_check_seal(const struct header *h, uint64_t seal, codec_fault *f);
codec_status frame_verify(const uint8_t *frame, const struct header *h, const struct kernels *k, codec_fault *f);

/* decode.c: a frame's jobs, for codec_reduce as well. */
codec_status decode_open(const uint8_t *frame, size_t nbytes, const codec_tensor *dst, const codec_context *with,
			 void *memory, size_t job_nbytes, struct job **out);
codec_status decode_check(const uint8_t *frame, const codec_context *with, struct job *j, void *work);
codec_status decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
			   const struct job *j, uint64_t first, uint64_t count, uint64_t *seal, void *work);
codec_status decode_values(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
			   const struct job *j, void *work);
codec_status decode_close(const codec_context *with, const struct job *j, uint64_t seal);

/* codebook.c */
codec_status has_exponents(const struct header *h);
codec_status codebook_load(const codec_codebook *c, const struct header *h, codebook *b);

/* side.c */
codec_status choose_planes(const codec_context *with, struct job *j, const struct sample *s);
codec_status choose_symbols(const codec_context *with, struct job *j);
void choose_bytes(struct job *j, const uint32_t counts[256]);
uint64_t side_write(const struct job *j, uint8_t *dst);
codec_status side_read(const uint8_t *frame, const codec_context *with, struct job *j);

/* api.c */
codec_status context_read(const codec_context *with, codec_context *copy);
codec_status request(const codec_spec *spec, const codec_tensor *like, int with_data, struct header *h,
		     codec_tensor *copy);
uint64_t stored_nbytes(const struct header *h);
uint8_t block_log2_for(uint64_t n);
uint64_t job_room(const struct header *h);
uint64_t job_scratch(const struct header *h);
void *job_work(const struct job *j, void *scratch);
/* Around a call's work: the floating-point environment that the format is written for, and back; stores in order
 * (cpu.c). */
uint64_t call_enter(void);
void call_leave(uint64_t saved);
struct job *job_place(void *memory);
struct job *job_at(const void *memory, uint32_t kind, uint32_t state);
int spans_overlap(const void *a, uint64_t a_nbytes, const void *b, uint64_t b_nbytes);
codec_status job_open(void *memory, size_t nbytes, const struct header *h, struct job **out);
void job_plan(struct job *j, codec_plan *plan);

/* cpu.c */
const struct kernels *kernels_for(const codec_context *with);

#endif
