/*
 * test_conversions.c - test scales, 16-bit floats and random bits: vector kernels give the same bits as the functions
 * of exact/round.h.
 */
#include <stdlib.h>

#include "job/api.h"
#include "guard.h"

/*
 * Vector kernels, which multiply by an inverse, give the results of the division that the format specifies, for every
 * mantissa of a scale and every number of levels.
 */
static void test_multiplication_equals_division(void **unused)
{
	const struct row_kind float8 = {.codec = CODEC_FLOAT8, .bits = 8};
	uint8_t code[256];
	float y[256];

	(void)unused;
	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		codec_context with = {.struct_nbytes = sizeof with, .isa = 1 + isa};
		const struct kernels *k;

		if (!codec_isa_usable(isa))
			continue;
		k = kernels_for(&with);
		for (int i = 0; i < 16; i++) /* all mantissas, including subnormals */
			code[i] = (uint8_t)(i < 8 ? i : 0x30 + i);
		for (uint32_t mantissa = 0; mantissa < 1u << 23; mantissa++) {
			float scale = round_float(mantissa % 254 + 1 << 23 | mantissa);
			int wrong = 0;

			k->decode_rows(&float8, code, 16, 16, &scale, NULL, y);
			for (int i = 0; i < 16; i++)
				wrong |= y[i] != round_float(round_small_value(code[i], 3, 7)) / scale;
			if (wrong)
				fail_msg("%s: scale %a", k->name, (double)scale);
		}
		for (int i = 0; i < 256; i++)
			code[i] = (uint8_t)i;
		for (int bits = 5; bits <= 8; bits++)
			for (int odd = 0; odd < 2; odd++) {
				int levels = odd ? (1 << (bits - 1)) - 1 : (1 << bits) - 1;
				const struct row_kind q = {
					.codec = CODEC_QUANTIZE, .bits = (uint8_t)bits, .odd = odd, .levels = levels};
				float amax = 0.7f;

				k->decode_rows(&q, code, 256, 256, &amax, NULL, y);
				for (int c = 0; c <= (odd ? 2 * levels : levels); c++)
					assert_true(y[c] == round_level(odd ? c - levels : 2 * c - levels,
									(float)levels, amax));
			}
	}
}

/* Vectorized conversions between 16-bit floats and float32 give the bits of the scalar functions. */
static void test_conversions_equal_scalar_functions(void **unused)
{
	enum { N = 1 << 16 };
	uint16_t *half = malloc(2 * N), *back = malloc(2 * N);
	uint32_t *x = malloc(4 * N);

	(void)unused;
	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		codec_context with = {.struct_nbytes = sizeof with, .isa = 1 + isa};
		const struct kernels *k;

		if (!codec_isa_usable(isa))
			continue;
		k = kernels_for(&with);
		for (int t = 0; t < 2; t++) {
			for (uint32_t i = 0; i < N; i++)
				half[i] = (uint16_t)i;
			k->to_float[t](half, N, (float *)x);
			for (uint32_t i = 0; i < N; i++) {
				uint32_t want = t ? round_from_float16(half[i]) : round_from_bfloat16(half[i]);
				int nan = (want & ROUND_ABS) > ROUND_INF;

				assert_true(x[i] == want || (nan && (x[i] & ROUND_ABS) > ROUND_INF));
			}
			k->from_float[t]((float *)x, N, back);
			for (uint32_t i = 0; i < N; i++)
				assert_int_equal(back[i], t ? round_to_float16(x[i]) : round_to_bfloat16(x[i]));
			for (int run = 0; run < 64; run++) { /* values between 16-bit floats: near ties, or random */
				for (uint32_t i = 0; i < N; i++) {
					uint32_t r = (uint32_t)next_random(),
						 near = r % 5 - 2 + (r & 64 ? 1u << 15 : 1u << 12);

					x[i] = run % 2 ? (r & (t ? 0xffffe000u : 0xffff0000u)) + near : r;
				}
				k->from_float[t]((float *)x, N - 3, back);
				for (uint32_t i = 0; i < N - 3; i++)
					if (back[i] != (t ? round_to_float16(x[i]) : round_to_bfloat16(x[i])))
						fail_msg("%s: %08x", k->name, (unsigned)x[i]);
			}
		}
	}
	free(half);
	free(back);
	free(x);
}

/* Vectorized random bits equal philox_half, also where the lower word of the block counter wraps around. */
static void test_random_bits_across_counter_words(void **unused)
{
	static const uint64_t FROM[] = {0, 1, 5, UINT32_MAX - 40, UINT32_MAX, (1ull << 32) + 3, (7ull << 32) - 200};
	const struct philox key = {0x12345678, 0x9abcdef0, 0xfedcba98};
	uint16_t h[8 * 331];

	(void)unused;
	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		codec_context with = {.struct_nbytes = sizeof with, .isa = 1 + isa};

		for (size_t f = 0; f < sizeof FROM / sizeof *FROM && codec_isa_usable(isa); f++)
			for (size_t n = 1; n <= 331; n += 66) {
				kernels_for(&with)->halves(key, FROM[f], n, h);
				for (uint64_t i = 0; i < 8 * n; i++)
					assert_int_equal(h[i], philox_half(key, 8 * FROM[f] + i, 0));
			}
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_multiplication_equals_division),
		cmocka_unit_test(test_random_bits_across_counter_words),
		cmocka_unit_test(test_conversions_equal_scalar_functions),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
