/* sink.c - load values to encode, and store decoded values. */
#include "sink.h"

static void store_floats(const struct kernels *k, int nontemporal, uint8_t *at, const float *y, uint64_t n)
{
	if (nontemporal)
		k->stream(at, (const uint8_t *)y, 4 * n);
	else
		memcpy(at, y, 4 * n);
}

static void store_halves(const struct kernels *k, const struct sink *s, uint8_t *at, const float *y, uint64_t n)
{
	int half = s->dst->dtype == CODEC_FLOAT16;
	uint16_t buffer[512];

	if (!s->nontemporal) {
		k->from_float[half](y, n, at);
		return;
	}
	for (uint64_t i = 0, m; i < n; i += m) {
		m = MIN(512, n - i);
		k->from_float[half](y + i, m, buffer);
		k->stream(at + 2 * i, (const uint8_t *)buffer, 2 * m);
	}
}

const void *load_native(const struct kernels *k, const struct source *s, uint64_t first, uint64_t n, void *buffer)
{
	uint64_t size = dtype_of(s->dtype)->nbytes;
	uint8_t *to = buffer;
	float sum[512];

	if (!s->error)
		return (const char *)s->data + first * size;
	if (s->dtype == CODEC_FLOAT32)
		return load_values(k, s, first, n, buffer);
	for (uint64_t i = 0, m; i < n; i += m, to += m * size) {
		m = MIN(512, n - i);
		load_values(k, s, first + i, m, sum);
		k->from_float[s->dtype == CODEC_FLOAT16](sum, m, to);
		for (uint64_t v = 0; v < m; v++) { /* from_float has clamped Inf to the largest finite value */
			uint32_t u = round_bits(sum[v]);
			uint16_t inf = (uint16_t)(u >> 16 & 0x8000) | (s->dtype == CODEC_FLOAT16 ? 0x7c00 : 0x7f80);

			if ((u & ROUND_ABS) == ROUND_INF)
				memcpy(to + 2 * v, &inf, 2);
		}
	}
	return buffer;
}

/* Store n decoded values y at `first`, or accumulate them, as s->into specifies. */
void sink_put(const struct kernels *k, const struct sink *s, uint64_t first, uint64_t n, const float *y)
{
	uint8_t *at = (uint8_t *)s->dst->data + first * dtype_of(s->dst->dtype)->nbytes;

	switch (s->into) {
	case CODEC_INTO_ADD:
		if (y)
			k->add(y, n, s->weight, (float_any *)at);
		break;
	case CODEC_INTO_MAX: k->maximum(y, n, (float_any *)at); break;
	case SINK_RESIDUAL: {
		float buffer[512];

		for (uint64_t i = 0, m; i < n; i += m) {
			m = MIN(512, n - i);
			k->subtract(load_values(k, s->src, first + i, m, buffer), y + i, m, (float_any *)buffer);
			store_floats(k, s->dst->nbytes >= CODEC_UNCACHED_NBYTES, at + 4 * i, buffer, m);
		}
		break;
	}
	default:
		if (!y)
			break;
		if (s->dst->dtype != CODEC_FLOAT32)
			store_halves(k, s, at, y, n);
		else
			store_floats(k, s->nontemporal, at, y, n);
	}
	if (s->rescale)
		k->multiply((float_any *)at, n, s->scale);
	if (s->divide > 0)
		k->divide((float_any *)at, n, s->divide);
}

/*
 * Convert n values of `dtype` to float32, and store or accumulate them at dst[first], as with->into specifies. `wire`:
 * the values are in the frame's byte order.
 */
void sink_values(const struct kernels *k, uint32_t dtype, const void *values, int wire, uint64_t first, uint64_t n,
		 const codec_context *with, const codec_tensor *dst)
{
	const struct sink sink = {.into = (int)with->into,
				  .weight = with->weight,
				  .divide = with->divide,
				  .nontemporal = is_nontemporal(with, dst),
				  .dst = dst};
	const void *from = values;
	float buffer[512], aligned[512];

	for (uint64_t i = 0; i < n; i += 512) {
		uint64_t m = MIN(512, n - i), at = i;
#if CODEC_BIG_ENDIAN
		uint64_t size = dtype_of(dtype)->nbytes;
		uint8_t native[4 * 512];

		if (wire) {
			memcpy(native, (const char *)values + i * size, m * size);
			swap_bytes(native, m * size, size);
			from = native;
			at = 0;
		}
#endif
		memcpy(aligned, load_floats(k, dtype, from, at, m, buffer), sizeof(float) * m);
		sink_put(k, &sink, first + i, m, aligned);
	}
	(void)wire;
}
