/* lossy.h - specs of all lossy codecs, and tensors to test them. */
#ifndef CODEC_TESTS_LOSSY_H
#define CODEC_TESTS_LOSSY_H

#include <string.h>

#include "codec/codec.h"
#include "job/api.h"
#include "examples.h"
#include "guard.h"

static const codec_spec SPECS[] = {
	LOSSY_EXAMPLES(EXAMPLE_SPEC){.codec = CODEC_TERNARY, .variant = CODEC_TERNARY_ENTROPY, .scale = 9},
};
#define NSPECS (sizeof SPECS / sizeof *SPECS)

static const uint32_t DTYPES[] = {CODEC_FLOAT32, CODEC_BFLOAT16, CODEC_FLOAT16};

static inline float value(void)
{
	int e = __builtin_popcountll(next_random()) - 40;

	return next_random() % 9 ? round_float((uint32_t)(next_random() & 0x807fffff) | (uint32_t)(120 + e / 2) << 23)
				 : 0;
}

static inline void fill(uint8_t *p, uint32_t dtype, uint64_t n)
{
	for (uint64_t i = 0; i < n; i++) {
		uint32_t u = round_bits(value());
		uint16_t half = dtype == CODEC_BFLOAT16 ? round_to_bfloat16(u) : round_to_float16(u);

		if (dtype == CODEC_FLOAT32)
			memcpy(p + 4 * i, &u, 4);
		else
			memcpy(p + 2 * i, &half, 2);
	}
}

static inline float widened(const uint8_t *p, uint32_t dtype, uint64_t i)
{
	uint16_t half;
	float x;

	if (dtype == CODEC_FLOAT32) {
		memcpy(&x, p + 4 * i, 4);
		return x;
	}
	memcpy(&half, p + 2 * i, 2);
	return round_float(dtype == CODEC_BFLOAT16 ? round_from_bfloat16(half) : round_from_float16(half));
}

#endif
