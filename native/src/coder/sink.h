/* sink.h - where values come from and go to: tensors of any float dtype, at any address. */
#ifndef CODEC_SINK_H
#define CODEC_SINK_H

#include "frame/dtype.h"

/* Results this large go past the caches: they would only sweep them out, and be read before they are overwritten. */
#define STREAM_NBYTES (8u << 20)

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

/* Values [first, first + n) as float32: where they lie, or in `buffer`. */
static inline const float_any *load_floats(const struct kernels *k, const codec_tensor *t, uint64_t first, uint64_t n,
					   float *buffer)
{
	const char *at = (const char *)t->data + first * dtype_of(t->dtype)->nbytes;

	if (t->dtype == CODEC_FLOAT32)
		return (const float_any *)at;
	k->to_float[t->dtype == CODEC_FLOAT16](at, n, buffer);
	return buffer;
}

#endif
