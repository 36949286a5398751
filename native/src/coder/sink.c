/* sink.c - decoded values to where they go. */
#include "sink.h"

static void store_floats(const struct kernels *k, const codec_tensor *dst, uint8_t *at, const float *y, uint64_t n)
{
	if (dst->nbytes >= STREAM_NBYTES)
		k->stream(at, (const uint8_t *)y, 4 * n);
	else
		memcpy(at, y, 4 * n);
}

const void *load_native(const struct kernels *k, const struct source *s, uint64_t first, uint64_t n, void *buffer)
{
	uint64_t size = dtype_of(s->dtype)->nbytes;
	uint8_t *to = buffer;
	float sum[512];

	if (!s->error)
		return (const char *)s->data + first * size;
	for (uint64_t i = 0, m; i < n; i += m, to += m * size) {
		m = MIN(512, n - i);
		load_values(k, s, first + i, m, sum);
		if (s->dtype == CODEC_FLOAT32) {
			memcpy(to, sum, m * size);
			continue;
		}
		k->from_float[s->dtype == CODEC_FLOAT16](sum, m, to);
		for (uint64_t v = 0; v < m; v++) { /* which made a number of it */
			uint32_t u = round_bits(sum[v]);
			uint16_t inf = (uint16_t)(u >> 16 & 0x8000) | (s->dtype == CODEC_FLOAT16 ? 0x7c00 : 0x7f80);

			if ((u & ROUND_ABS) == ROUND_INF)
				memcpy(to + 2 * v, &inf, 2);
		}
	}
	return buffer;
}

/* Values to where they belong. */
void sink_put(const struct kernels *k, const struct sink *s, uint64_t first, uint64_t n, const float *y)
{
	uint8_t *at = (uint8_t *)s->dst->data + first * dtype_of(s->dst->dtype)->nbytes;

	switch (s->into) {
	case CODEC_INTO_ADD: k->add(y, n, s->weight, (float_any *)at); break;
	case CODEC_INTO_MAX: k->maximum(y, n, (float_any *)at); break;
	case SINK_RESIDUAL: {
		float buffer[512];

		for (uint64_t i = 0, m; i < n; i += m) {
			m = MIN(512, n - i);
			k->subtract(load_values(k, s->src, first + i, m, buffer), y + i, m, (float_any *)buffer);
			store_floats(k, s->dst, at + 4 * i, buffer, m);
		}
		break;
	}
	default:
		if (s->dst->dtype != CODEC_FLOAT32)
			k->from_float[s->dst->dtype == CODEC_FLOAT16](y, n, at);
		else
			store_floats(k, s->dst, at, y, n);
	}
	if (s->rescale)
		k->multiply((float_any *)at, n, s->scale);
	if (s->divide > 0)
		k->divide((float_any *)at, n, s->divide);
}
