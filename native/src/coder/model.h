/* model.h - the scale model: an offset for every value, so that one codebook suits the whole frame. */
#ifndef CODEC_MODEL_H
#define CODEC_MODEL_H

#include "job.h"
#include "sink.h"

/* Number of values whose offsets are computed at once; these offsets fit the first-level cache. */
#define OFFSETS 4096

/* Return log2 of the number of patterns in the unit of offsets: an eighth of an octave, for float8 a number of the
 * type. */
static inline int eighth_log2(const struct dtype *d)
{
	return dtype_is_float8(d) ? FORM_SHIFT8 : __builtin_ctz(d->octave) - 3;
}

static inline int model_asked(const struct header *h)
{
	return family_of(h)->whole_octaves ? CODEC_MODEL_AUTO : h->variant;
}

/* Return the smallest pattern that the model changes: the first one whose plane 0 (TRUNCATE: exponent) is not 0. */
static inline uint16_t model_zero(const struct header *h, const struct dtype *d)
{
	return family_of(h)->whole_octaves ? d->octave : dtype_zero(d);
}

/* model.c */
codec_status model_begin(struct job *j, const codec_context *with);
uint64_t model_job_nbytes(const struct header *h);
void model_add(struct job *j, struct segment *s);
const struct segment *model_segment_at(const struct job *j, uint64_t first);
/*
 * Compute the offsets, in patterns, of values [first, first + n). Encode: the values must lie in the range for which
 * model_fit computed *f. Decode: f is NULL.
 */
void model_offsets(const struct job *j, const struct kernels *k, const struct fitted *f, uint64_t first, uint64_t n,
		   uint16_t *offset);
uint64_t model_side_nbytes(const struct job *j);
void model_write(const struct job *j, uint8_t *dst);
codec_status model_read(const uint8_t *frame, uint64_t at, uint64_t end, struct job *j, uint64_t *used, codec_fault *f);

/* fit.c. Cut the tensor into segments, by shapes only. If that gives no segments, the frame has no scale model. */
void model_cut(struct job *j, const codec_context *with);
/*
 * Fit the scale model, and return the number of pieces of its sample, which model_scan counts before model_choose is
 * called. Return 0 if the sample is too small for several threads, or of several segments: then model_choose does
 * everything.
 */
uint64_t model_sample(const struct source *src, const codec_context *with, const struct kernels *k, struct job *j,
		      struct sample *s);
void model_scan(const struct source *src, const struct kernels *k, struct job *j, uint64_t first, uint64_t count,
		struct sample *s);
/* Choose the scale model, and count the symbols of all planes. */
void model_choose(const struct source *src, const codec_context *with, const struct kernels *k, struct job *j,
		  struct sample *s);
/*
 * Compute the offsets of the rows of values [first, first + n). Offsets of rows that begin in this range are stored in
 * the job, so no other thread may process the same values.
 */
void model_fit(const struct source *src, const struct kernels *k, struct job *j, uint64_t first, uint64_t n,
	       struct fitted *f);

#endif
