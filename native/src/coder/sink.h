/* sink.h - load values to encode and store decoded values: tensors of any float dtype, at any address. */
#ifndef CODEC_SINK_H
#define CODEC_SINK_H

#include "frame/dtype.h"

/*
 * Return 1 if stores to dst should be non-temporal. Storing a large tensor through the caches would evict them, and
 * each line would be read before it is overwritten, which takes longer than writing it.
 */
static inline int is_nontemporal(const codec_context *with, const codec_tensor *dst)
{
	return with->flags & CODEC_NONTEMPORAL || dst->nbytes >= CODEC_UNCACHED_NBYTES;
}

/* Load values [first, first + n) of an array as float32. Returns a pointer into the array or to `buffer`. */
static inline const float_any *load_floats(const struct kernels *k, uint32_t dtype, const void *data, uint64_t first,
					   uint64_t n, float *buffer)
{
	const char *at = (const char *)data + first * dtype_of(dtype)->nbytes;

	if (dtype == CODEC_FLOAT32)
		return (const float_any *)at;
	k->to_float[dtype == CODEC_FLOAT16](at, n, buffer);
	return buffer;
}

/* Flags of codec_context with which `residual` is also an input. */
#define READS_RESIDUAL (CODEC_FEEDBACK | CODEC_DIFFERENCE)

/*
 * Values to encode: a tensor, plus the residual if CODEC_FEEDBACK is set, or minus the residual if CODEC_DIFFERENCE is
 * set.
 */
struct source {
	uint32_t dtype;
	const void *data;
	uint64_t nbytes;
	const float_any *error; /* residual of each value; NULL: none */
	int minus;              /* 1: subtract `error` */
};

static inline struct source source_of(const codec_tensor *t, const codec_context *with)
{
	return (struct source){t->dtype, t->data, t->nbytes, with->flags & READS_RESIDUAL ? with->residual : NULL,
			       (with->flags & CODEC_DIFFERENCE) != 0};
}

/*
 * Load values [first, first + n) as float32, with the residual added or subtracted, and rounded. Returns a pointer into
 * the tensor or to `buffer`.
 */
static inline const float_any *load_values(const struct kernels *k, const struct source *s, uint64_t first, uint64_t n,
					   float *buffer)
{
	const float_any *x = load_floats(k, s->dtype, s->data, first, n, buffer);

	if (!s->error)
		return x;
	if (s->minus)
		k->minus(x, s->error + first, n, buffer);
	else
		k->plus(x, s->error + first, n, buffer);
	return buffer;
}

/*
 * Load values [first, first + n) in the tensor's dtype. The residual is added, and sums are rounded to that dtype.
 * Returns a pointer into the tensor or to `buffer`; either may be unaligned.
 */
const void *load_native(const struct kernels *k, const struct source *s, uint64_t first, uint64_t n, void *buffer);

/*
 * Destination of decoded values y. `into` is one of three: a CODEC_INTO_*, as returned by sink_into(); SINK_RESIDUAL,
 * which stores the encoding error x - y; or SINK_NONE, which stores nothing and is used to check codes and scales.
 */
struct sink {
	int into;
	float weight;
	float scale, divide;   /* scale: factor if `rescale` is set; divide: codec_context.divide */
	int unscaled, rescale; /* unscaled: y is a code of TERNARY; rescale: CODEC_INTO_SCALE_CODES */
	int nontemporal;       /* 1: use non-temporal stores */
	const codec_tensor *dst;
	const struct source *src; /* SINK_RESIDUAL: source of x */
};
#define SINK_RESIDUAL 100
#define SINK_NONE 101

/*
 * Return a pointer into dst if a kernel may store float32 values there directly, or add to the values there; NULL: use
 * a temporary buffer. `adds`: the kernel can accumulate. `streams`: the kernel can do non-temporal stores at multiples
 * of 16 bytes.
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
	return adds || (stores && (!s->nontemporal || streams)) ? there : NULL;
}

/* Return codec_context.into for a sink: codes are stored or added in float32 like other values, or as integers. */
static inline int sink_into(uint32_t into, uint32_t dtype)
{
	if (into < CODEC_INTO_CODES || dtype != CODEC_FLOAT32)
		return (int)into;
	return into == CODEC_INTO_CODES ? CODEC_INTO_FLOAT32 : CODEC_INTO_ADD;
}

/* Return 1 if the destination receives TERNARY's codes as integers, by sink_put_codes. */
static inline int sink_takes_codes(const struct sink *s)
{
	return s->into == CODEC_INTO_CODES || s->into == CODEC_INTO_ADD_CODES;
}

static inline void sink_put_codes(const struct kernels *k, const struct sink *s, uint64_t first, uint64_t n,
				  const uint8_t *code)
{
	uint64_t nbytes = dtype_of(s->dst->dtype)->nbytes;

	k->sum_codes(code, n, s->into == CODEC_INTO_ADD_CODES, nbytes, (char *)s->dst->data + first * nbytes);
}

/*
 * Store or accumulate n decoded values y. y NULL: the kernel has already stored or added the values at the address from
 * sink_room().
 */
void sink_put(const struct kernels *k, const struct sink *s, uint64_t first, uint64_t n, const float *y);

/*
 * Convert n values of `dtype` to float32, and store or accumulate them at dst[first], as with->into specifies. Not for
 * CODEC_INTO_STORE. `wire`: the values are in the frame's byte order.
 */
void sink_values(const struct kernels *k, uint32_t dtype, const void *values, int wire, uint64_t first, uint64_t n,
		 const codec_context *with, const codec_tensor *dst);

#endif
