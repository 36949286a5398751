/* sink.h - where values come from and go to: tensors of any float dtype, at any address. */
#ifndef CODEC_SINK_H
#define CODEC_SINK_H

#include "frame/dtype.h"

/*
 * What is written to a large tensor goes past the caches: it would only sweep them out, and be read before it is
 * overwritten. From memory, reading takes longer than writing.
 */
static inline int past_caches(const codec_context *with, const codec_tensor *dst)
{
	return with->flags & CODEC_NONTEMPORAL || dst->nbytes >= CODEC_UNCACHED_NBYTES;
}

/* Values [first, first + n) of an array as float32: where they lie, or in `buffer`. */
static inline const float_any *load_floats(const struct kernels *k, uint32_t dtype, const void *data, uint64_t first,
					   uint64_t n, float *buffer)
{
	const char *at = (const char *)data + first * dtype_of(dtype)->nbytes;

	if (dtype == CODEC_FLOAT32)
		return (const float_any *)at;
	k->to_float[dtype == CODEC_FLOAT16](at, n, buffer);
	return buffer;
}

/* What is encoded: the values of a tensor, plus what was lost of earlier ones under CODEC_FEEDBACK. */
struct source {
	uint32_t dtype;
	const void *data;
	uint64_t nbytes;
	const float_any *error; /* one for each value; NULL: none */
};

static inline struct source source_of(const codec_tensor *t, const codec_context *with)
{
	return (struct source){t->dtype, t->data, t->nbytes, with->flags & CODEC_FEEDBACK ? with->residual : NULL};
}

/* Its values as float32, sums rounded to that: where they lie, or in `buffer`. */
static inline const float_any *load_values(const struct kernels *k, const struct source *s, uint64_t first, uint64_t n,
					   float *buffer)
{
	const float_any *x = load_floats(k, s->dtype, s->data, first, n, buffer);

	if (!s->error)
		return x;
	k->plus(x, s->error + first, n, buffer);
	return buffer;
}

/* The same, rounded to the tensor's dtype: where they lie, or in `buffer`, at any address. */
const void *load_native(const struct kernels *k, const struct source *s, uint64_t first, uint64_t n, void *buffer);

/* Where decoded values go: what codec_context's `into` says, or x - y, or nowhere: codes and scales are only checked.
 */
struct sink {
	int into;
	float weight;
	float scale, divide; /* of the result; 0: not */
	int unscaled, rescale;
	int past; /* past the caches, what is stored */
	const codec_tensor *dst;
	const struct source *src; /* SINK_RESIDUAL: x */
};
#define SINK_RESIDUAL 100
#define SINK_NONE 101

/*
 * Where values can be made: where they belong, if they go there as they are, or are added as they are; else NULL.
 * `adds`, `streams`: by who can add, and who can store at multiples of 16 bytes past the caches.
 */
static inline float_any *sink_room(const struct sink *s, uint64_t first, int adds, int streams)
{
	int stores = s->into == CODEC_INTO_STORE || s->into == CODEC_INTO_FLOAT32;
	float_any *there;

	if (s->dst->dtype != CODEC_FLOAT32)
		return NULL;
	there = (float_any *)s->dst->data + first;
	streams = streams && (uintptr_t)there % 16 == 0 && !(s->divide > 0);
	adds = adds && s->into == CODEC_INTO_ADD && s->weight == 1;
	return adds || (stores && (!s->past || streams)) ? there : NULL;
}

/* y: NULL if they were made in sink_room(), or added there. */
void sink_put(const struct kernels *k, const struct sink *s, uint64_t first, uint64_t n, const float *y);

/* Values as they were in a tensor (`wire`: in a frame) to where `with` says: not to a tensor of their own dtype. */
void sink_values(const struct kernels *k, uint32_t dtype, const void *values, int wire, uint64_t first, uint64_t n,
		 const codec_context *with, const codec_tensor *dst);

#endif
