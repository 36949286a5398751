/*
 * examples.h - specs of every codec, which all tests in C and C++ use: add an example for each variant of a codec.
 *
 * EXAMPLES(X) and its two parts expand to X(largest relative error after one encoding, codec, fields of codec_spec in
 * their order).
 */
#ifndef CODEC_TESTS_EXAMPLES_H
#define CODEC_TESTS_EXAMPLES_H

#include "codec/codec.h"

#define EXACT_EXAMPLES(X)                                                                                              \
	X(0, LOSSLESS, .model = CODEC_MODEL_AUTO)                                                                      \
	X(0, LOSSLESS, .max_code_length = 5, .model = CODEC_MODEL_FLAT)                                                \
	X(0, LOSSLESS, .model = CODEC_MODEL_SEPARABLE)                                                                 \
	X(0, DELTA, .group_size = 4096)

#define LOSSY_EXAMPLES(X)                                                                                              \
	X(1.2, SIGN, .variant = CODEC_SIGN_L1)                                                                         \
	X(1.2, SIGN, .variant = CODEC_SIGN_TWO_MEAN, .group_size = 100)                                                \
	X(1.2, SIGN, .variant = CODEC_SIGN_L2, .group_size = CODEC_GROUP_SIZE_ROW)                                     \
	X(9, TERNARY, .variant = CODEC_TERNARY_2BIT, .seed = 1)                                                        \
	X(9, TERNARY, .variant = CODEC_TERNARY_BASE3, .clip = 2.5f)                                                    \
	X(9, TERNARY, .variant = CODEC_TERNARY_ENTROPY)                                                                \
	X(0.06, FLOAT8, .variant = CODEC_E4M3FN)                                                                       \
	X(0.2, FLOAT8, .variant = CODEC_E5M2, .options = CODEC_OPTION_STOCHASTIC, .group_size = 7)                     \
	X(0.06, FLOAT8, .options = CODEC_OPTION_ENTROPY)                                                               \
	X(0.06, FLOAT8, .options = CODEC_OPTION_PROPAGATE, .group_size = 128)                                          \
	X(0.13, FLOAT8, .variant = CODEC_MXFP8_E4M3)                                                                   \
	X(0.3, FLOAT8, .variant = CODEC_MXFP8_E5M2, .options = CODEC_OPTION_STOCHASTIC)                                \
	X(0.3, FLOAT4, .variant = CODEC_FLOAT4_NVFP4)                                                                  \
	X(0.5, FLOAT4, .variant = CODEC_FLOAT4_MXFP4, .options = CODEC_OPTION_STOCHASTIC)                              \
	X(1.5, QUANTIZE, .bits = 1, .group_size = 40)                                                                  \
	X(0.2, QUANTIZE, .options = CODEC_OPTION_STOCHASTIC)                                                           \
	X(0.4, QUANTIZE, .variant = CODEC_LEVELS_ODD, .bits = 3, .group_size = 120)                                    \
	X(0.1, QUANTIZE, .bits = 7, .group_size = 17000)                                                               \
	X(0.2, QUANTIZE, .variant = CODEC_LEVELS_AFFINE, .options = CODEC_OPTION_STOCHASTIC)                           \
	X(0.1, QUANTIZE, .variant = CODEC_LEVELS_AFFINE, .bits = 8, .group_size = 17000)                               \
	X(1, TOPK, .kept = 0)                                                                                          \
	X(1, TOPK, .options = CODEC_OPTION_STOCHASTIC, .bits = 8, .group_size = 64, .kept = 16)                        \
	X(0.3, TRUNCATE, .variant = CODEC_LEVEL_CODING_FIXED, .bits = 3)                                               \
	X(0.02, TRUNCATE, .variant = CODEC_LEVEL_CODING_FIXED, .options = CODEC_OPTION_CUT, .bits = 1)                 \
	X(1, TRUNCATE, .variant = CODEC_LEVEL_CODING_PLANE, .guard = -8)                                               \
	X(1, TRUNCATE, .variant = CODEC_LEVEL_CODING_CODED, .guard = -8)                                               \
	X(1, TRUNCATE, .variant = CODEC_LEVEL_CODING_SHARED, .guard = -8)                                              \
	X(1, TRUNCATE, .variant = CODEC_LEVEL_CODING_SHARED, .options = CODEC_OPTION_BITS, .guard = -8)

#define EXAMPLES(X) EXACT_EXAMPLES(X) LOSSY_EXAMPLES(X)

/* Initializer of a codec_spec: {EXAMPLES(EXAMPLE_SPEC)} initializes an array of all of them. */
#define EXAMPLE_SPEC(limit, name, ...) {.struct_nbytes = sizeof(codec_spec), .codec = CODEC_##name, __VA_ARGS__},

/* Return 1 if a spec has all of the properties `traits` (CODEC_TRAIT_*). */
static inline int example_has(const codec_spec *spec, uint32_t traits)
{
	uint32_t found = 0;

	return codec_traits(spec, &found) == CODEC_OK && (found & traits) == traits;
}

#endif
