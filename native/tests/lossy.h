/* lossy.h - specs of lossy codecs, and tensors to test them. */
#ifndef CODEC_TESTS_LOSSY_H
#define CODEC_TESTS_LOSSY_H

#include <string.h>

#include "codec/codec.h"
#include "job/api.h"
#include "guard.h"

static const codec_spec SPECS[] = {
	{.codec = CODEC_SIGN},
	{.codec = CODEC_SIGN, .variant = CODEC_SIGN_TWO_MEAN, .group_size = 100},
	{.codec = CODEC_SIGN, .variant = CODEC_SIGN_L2, .group_size = CODEC_GROUP_SIZE_ROW},
	{.codec = CODEC_TERNARY, .seed = 1},
	{.codec = CODEC_TERNARY, .variant = CODEC_TERNARY_BASE3, .clip = 2.5f},
	{.codec = CODEC_TERNARY, .variant = CODEC_TERNARY_ENTROPY, .scale = 9},
	{.codec = CODEC_FLOAT8},
	{.codec = CODEC_FLOAT8, .variant = CODEC_E5M2, .group_size = 7, .options = CODEC_OPTION_STOCHASTIC},
	{.codec = CODEC_FLOAT8, .options = CODEC_OPTION_ENTROPY},
	{.codec = CODEC_FLOAT8, .variant = CODEC_MXFP8_E4M3},
	{.codec = CODEC_FLOAT8, .variant = CODEC_MXFP8_E5M2, .options = CODEC_OPTION_STOCHASTIC},
	{.codec = CODEC_FLOAT4, .options = CODEC_OPTION_STOCHASTIC},
	{.codec = CODEC_FLOAT4, .variant = CODEC_FLOAT4_MXFP4},
	{.codec = CODEC_QUANTIZE, .options = CODEC_OPTION_STOCHASTIC},
	{.codec = CODEC_QUANTIZE, .bits = 3, .variant = CODEC_LEVELS_ODD, .group_size = 3000},
	{.codec = CODEC_QUANTIZE, .bits = 7, .group_size = 17000},
	{.codec = CODEC_QUANTIZE, .variant = CODEC_LEVELS_AFFINE, .options = CODEC_OPTION_STOCHASTIC},
	{.codec = CODEC_QUANTIZE, .bits = 8, .variant = CODEC_LEVELS_AFFINE, .group_size = 17000},
	{.codec = CODEC_TOPK},
	{.codec = CODEC_TOPK, .bits = 8, .group_size = 64, .kept = 16, .options = CODEC_OPTION_STOCHASTIC},
	{.codec = CODEC_TRUNCATE, .variant = CODEC_LEVEL_CODING_FIXED, .bits = 2},
	{.codec = CODEC_TRUNCATE, .variant = CODEC_LEVEL_CODING_PLANE, .guard = -8},
	{.codec = CODEC_TRUNCATE, .variant = CODEC_LEVEL_CODING_CODED, .guard = -8},
	{.codec = CODEC_TRUNCATE, .variant = CODEC_LEVEL_CODING_SHARED, .guard = -8},
	{.codec = CODEC_TRUNCATE, .variant = CODEC_LEVEL_CODING_SHARED, .guard = -8, .options = CODEC_OPTION_BITS},
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

/* Return 1 for row codecs, which accept CODEC_DIFFERENCE and whose frames depend on segments. */
static inline int is_rows(uint32_t codec)
{
	return codec != CODEC_TRUNCATE && codec != CODEC_TOPK;
}

#endif
