/*
 * test_lossy.c - test lossy codecs through the C interface, between guard pages: round trips, bounds, sums, wrong
 * specs.
 */
#include <stdlib.h>
#include <string.h>

#include "environment.h"
#include "lossy.h"

static void round_trip(codec_spec spec, uint32_t dtype, uint64_t n, uint32_t isa)
{
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = dtype, .rank = 1, .shape = {n}}, out, theta;
	codec_metric metric = {.struct_nbytes = sizeof metric, .theta_term = 30, .theta = &theta};
	codec_context with = {.struct_nbytes = sizeof with, .isa = isa, .stream = 5, .metric = &metric};
	struct guarded src, residual, dst, scratch, frame, back, sum, state;
	size_t bound, need, written, again;

	spec.struct_nbytes = sizeof spec;
	if (n && n % 100 == 0) {
		t.rank = 2;
		t.shape[0] = n / 100;
		t.shape[1] = 100;
	}
	t.nbytes = n * codec_dtype_nbytes(dtype);
	out = theta = t;
	out.dtype = theta.dtype = CODEC_FLOAT32;
	out.nbytes = theta.nbytes = 4 * n;
	src = guard(t.nbytes);
	back = guard(t.nbytes);
	residual = guard(4 * n);
	sum = guard(4 * n);
	state = guard(4 * n);
	fill(src.p, dtype, n);
	fill(state.p, CODEC_FLOAT32, n);
	theta.data = state.p;
	assert_int_equal(codec_bound(&spec, &t, &bound), CODEC_OK);
	assert_int_equal(codec_scratch(&spec, &t, &need), CODEC_OK);
	dst = guard(bound);
	scratch = guard(need);
	t.data = src.p;
	assert_int_equal(codec_encode(&spec, &t, dst.p, bound, &written, (float *)residual.p, &with, scratch.p, need),
			 CODEC_OK);
	frame = guard(written);
	assert_int_equal(codec_encode(&spec, &t, frame.p, written, &again, NULL, &with, scratch.p, need), CODEC_OK);
	assert_int_equal(again, written);
	assert_memory_equal(frame.p, dst.p, written);
	assert_int_equal(codec_encode(&spec, &t, frame.p + 1, written - 1, &again, NULL, &with, scratch.p, need),
			 CODEC_SHORT_OUTPUT);
	memcpy(frame.p, dst.p, written);
	t.data = back.p;
	assert_int_equal(codec_verify(frame.p, written), CODEC_OK);
	assert_int_equal(codec_decode(frame.p, written, &t, &with, scratch.p, need), CODEC_OK);
	out.data = sum.p;
	memcpy(sum.p, residual.p, 4 * n);
	assert_int_equal(codec_accumulate(frame.p, written, 1, &out, &with, scratch.p, need), CODEC_OK);
	for (uint64_t i = 0; i < n; i++) {
		float x = widened(src.p, dtype, i), y = widened(back.p, dtype, i),
		      r = widened(residual.p, CODEC_FLOAT32, i);

		assert_true(r == x - y);
		assert_true(widened(sum.p, CODEC_FLOAT32, i) == r + y);
	}
	/* damage random bytes, and decode without checking checksums */
	with.flags = CODEC_NO_CHECKSUM;
	for (int round = 0; round < 20 && written; round++) {
		size_t at = next_random() % written;

		frame.p[at] = (uint8_t)next_random();
		codec_decode(frame.p, written, &t, &with, scratch.p, need);
		codec_accumulate(frame.p, written, 1, &out, &with, scratch.p, need);
		if (round % 4 == 3)
			memcpy(frame.p, dst.p, written);
	}
	unguard(src);
	unguard(residual);
	unguard(dst);
	unguard(scratch);
	unguard(frame);
	unguard(back);
	unguard(sum);
	unguard(state);
}

static void test_round_trip_between_guard_pages(void **unused)
{
	static const uint64_t SIZES[] = {0, 1, 5, 100, 513, 2561, 16384, 16385, 22500, 90001};

	(void)unused;
	for (uint32_t isa = 0; codec_isa_name(isa); isa++)
		for (size_t s = 0; s < NSPECS && codec_isa_usable(isa); s++)
			for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++)
				round_trip(SPECS[s], DTYPES[i % 3], SIZES[i], 1 + isa);
}

/*
 * Encode n values into a buffer of codec_bound_segments bytes, which must be the frame's size unless there is an
 * entropy stage.
 */
static void encode_bounded(codec_spec spec, uint32_t dtype, uint64_t n, const codec_segment *segments, uint64_t count)
{
	uint64_t nbytes = n * codec_dtype_nbytes(dtype);
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = dtype, .rank = 1, .shape = {n}, .nbytes = nbytes};
	codec_context with = {.struct_nbytes = sizeof with, .segments = segments, .nsegments = count};
	struct guarded src = guard(nbytes), dst, scratch;
	int entropy = spec.options & CODEC_OPTION_ENTROPY ||
		      (spec.codec == CODEC_TERNARY && spec.variant == CODEC_TERNARY_ENTROPY);
	size_t bound, any, need, written, again;

	spec.struct_nbytes = sizeof spec;
	fill(src.p, dtype, n);
	assert_int_equal(codec_bound(&spec, &t, &any), CODEC_OK);
	assert_int_equal(codec_bound_segments(&spec, &t, segments, count, &bound), CODEC_OK);
	assert_true(bound <= any);
	assert_int_equal(codec_scratch(&spec, &t, &need), CODEC_OK);
	dst = guard(bound);
	scratch = guard(need);
	t.data = src.p;
	assert_int_equal(codec_encode(&spec, &t, dst.p, bound, &written, NULL, &with, scratch.p, need), CODEC_OK);
	assert_true(entropy || written == bound);
	if (!entropy)
		assert_int_equal(codec_encode(&spec, &t, dst.p, bound - 1, &again, NULL, &with, scratch.p, need),
				 CODEC_SHORT_OUTPUT);
	unguard(src);
	unguard(dst);
	unguard(scratch);
}

static void test_bound_of_segments_is_exact_without_entropy_stage(void **unused)
{
	static const codec_segment segments[] = {
		{.offset = 0, .rank = 2, .shape = {3, 100}},
		{.offset = 300, .rank = 1, .shape = {7}},
		{.offset = 310, .rank = 2, .shape = {0, 9}},
		{.offset = 310, .rank = 2, .shape = {5, 64}},
		{.offset = 700, .rank = 0},
		{.offset = 701, .rank = 2, .shape = {60, 300}},
		{.offset = 19000, .rank = 3, .shape = {2, 3, 5}},
	};

	(void)unused;
	for (size_t s = 0; s < NSPECS; s++)
		for (size_t i = 0; i < 3 && codec_is_rows(SPECS[s].codec); i++)
			for (uint64_t count = 0; count <= sizeof segments / sizeof *segments; count++) {
				encode_bounded(SPECS[s], DTYPES[i], 19030, segments, count);
				encode_bounded(SPECS[s], DTYPES[i], 90001, segments, count);
				if (!count)
					encode_bounded(SPECS[s], DTYPES[i], 0, segments, count);
			}
}

static void test_bound_of_segments_rejects_wrong_arguments(void **unused)
{
	codec_segment segments[] = {{.offset = 4, .rank = 1, .shape = {4}}, {.offset = 8, .rank = 1, .shape = {2}}};
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = CODEC_FLOAT32, .rank = 1, .shape = {10}};
	codec_spec spec = {.struct_nbytes = sizeof spec, .codec = CODEC_FLOAT8};
	size_t nbytes;

	(void)unused;
	assert_int_equal(codec_bound_segments(&spec, &t, segments, 2, &nbytes), CODEC_OK);
	assert_int_equal(codec_bound_segments(&spec, &t, segments, 2, NULL), CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_bound_segments(&spec, &t, NULL, 2, &nbytes), CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_bound_segments(&spec, &t, NULL, 0, &nbytes), CODEC_OK);
	assert_int_equal(codec_bound_segments(NULL, &t, segments, 2, &nbytes), CODEC_BAD_ARGUMENT);
	segments[1].offset = 7;
	assert_int_equal(codec_bound_segments(&spec, &t, segments, 2, &nbytes), CODEC_BAD_SEGMENTS);
	segments[1].offset = 9;
	assert_int_equal(codec_bound_segments(&spec, &t, segments, 2, &nbytes), CODEC_BAD_SEGMENTS);
	spec.codec = CODEC_LOSSLESS;
	assert_int_equal(codec_bound_segments(&spec, &t, segments, 2, &nbytes), CODEC_BAD_SEGMENTS);
	t.dtype = CODEC_INT8;
	spec.codec = CODEC_SIGN;
	assert_int_equal(codec_bound_segments(&spec, &t, NULL, 0, &nbytes), CODEC_BAD_DTYPE);
}

/* CODEC_REDUCE_CODES gives the integers `sum` / scale, in each integer dtype that can hold them, if the frames' scales
 * are equal.
 */
static void check_sums_of_codes(const void *const *frames, const size_t *nbytes, size_t count, float scale,
				const float *sum, codec_tensor t, uint8_t *scratch, size_t need)
{
	const uint32_t dtypes[] = {CODEC_INT8, CODEC_INT16, CODEC_INT32};
	const uint64_t n = t.shape[0];

	for (uint32_t d = 0; d < 3; d++) {
		codec_status status;

		t.dtype = dtypes[d];
		t.nbytes = n << d;
		t.data = malloc(t.nbytes);
		memset(t.data, 0x55, t.nbytes);
		status = codec_reduce(frames, nbytes, count, CODEC_REDUCE_CODES, &t, NULL, scratch, need);
		assert_int_equal(status, scale > 0 ? CODEC_OK : CODEC_BAD_ARGUMENT);
		for (uint64_t v = 0; v < t.nbytes && scale == 0; v++)
			assert_int_equal(((uint8_t *)t.data)[v], 0x55);
		for (uint64_t v = 0; v < n && scale > 0; v++) {
			int32_t got = d == 0   ? ((int8_t *)t.data)[v]
				      : d == 1 ? ((int16_t *)t.data)[v]
					       : ((int32_t *)t.data)[v];

			assert_int_equal(got, sum[v] / scale);
		}
		free(t.data);
	}
}

/* codec_reduce gives the same bits as decoding the frames and adding them in order. */
static void test_reduce_equals_decode_and_add(void **unused)
{
	enum { N = 40000, COUNT = 3 };
	float *sum = malloc(4 * N), *out = malloc(4 * N), *x = malloc(4 * N);
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = CODEC_FLOAT32, .rank = 1, .shape = {N}, .nbytes = 4 * N};

	(void)unused;
	for (size_t s = 0; s < NSPECS; s++) {
		const void *frames[COUNT];
		size_t nbytes[COUNT], bound, need;
		codec_spec spec = SPECS[s];
		uint8_t *scratch;

		if (spec.codec == CODEC_TRUNCATE && spec.variant != CODEC_LEVEL_CODING_FIXED)
			continue;
		spec.struct_nbytes = sizeof spec;
		for (int i = 0; i < COUNT; i++) {
			codec_context with = {.struct_nbytes = sizeof with, .stream = (uint64_t)i};
			uint8_t *frame;

			fill((uint8_t *)x, CODEC_FLOAT32, N);
			t.data = x;
			codec_bound(&spec, &t, &bound);
			codec_scratch(&spec, &t, &need);
			frame = malloc(bound);
			scratch = malloc(need);
			assert_int_equal(codec_encode(&spec, &t, frame, bound, nbytes + i, NULL, &with, scratch, need),
					 CODEC_OK);
			t.data = i ? out : sum;
			assert_int_equal(codec_decode(frame, nbytes[i], &t, NULL, scratch, need), CODEC_OK);
			for (int v = 0; v < N && i; v++)
				sum[v] = sum[v] + out[v];
			frames[i] = frame;
			free(scratch);
		}
		assert_int_equal(codec_reduce_scratch(frames, nbytes, COUNT, &need), CODEC_OK);
		scratch = malloc(need);
		t.data = out;
		assert_int_equal(codec_reduce(frames, nbytes, COUNT, CODEC_REDUCE_SUM, &t, NULL, scratch, need),
				 CODEC_OK);
		/*
		 * if scales are equal, codes are added before scaling: 3 * scale may differ from scale + scale + scale
		 */
		for (int v = 0; v < N; v++)
			assert_true(spec.scale > 0 ? out[v] == sum[v]
						   : memcmp(out + v, sum + v, 4) == 0 || out[v] == sum[v]);
		assert_int_equal(codec_reduce(frames, nbytes, COUNT, CODEC_REDUCE_SUM, &t, NULL, scratch, need - 1),
				 CODEC_SHORT_SCRATCH);
		assert_int_equal(codec_reduce(frames, nbytes, COUNT, 9, &t, NULL, scratch, need), CODEC_BAD_ARGUMENT);
		check_sums_of_codes(frames, nbytes, COUNT, spec.codec == CODEC_TERNARY ? spec.scale : 0, out, t,
				    scratch, need);
		free(scratch);
		for (int i = 0; i < COUNT; i++)
			free((void *)frames[i]);
	}
	free(sum);
	free(out);
	free(x);
}

static void test_environment_is_restored(void **unused)
{
	fenv_t before, after;

	(void)unused;
	feclearexcept(FE_ALL_EXCEPT);
	before = environment();
	for (size_t s = 0; s < NSPECS; s++)
		round_trip(SPECS[s], CODEC_FLOAT32, 22500, 0);
	feclearexcept(FE_ALL_EXCEPT); /* clear flags that the test's own arithmetic raised */
	after = environment();
	assert_memory_equal(&before, &after, sizeof before);
}

static void *use_stack(void *unused)
{
	for (size_t s = 0; s < NSPECS; s++)
		for (int d = 0; d < 3; d++)
			round_trip(SPECS[s], DTYPES[d], 22500, 0);
	return unused;
}

static void *use_no_stack(void *unused)
{
	round_trip(SPECS[0], CODEC_FLOAT32, 0, 0);
	return unused;
}

static void test_stack_use_is_limited(void **unused)
{
	(void)unused;
	check_stack_use(use_stack, use_no_stack);
}

static void test_rejects_wrong_specs(void **unused)
{
	static const codec_spec BAD[] = {
		{.codec = 10},
		{.codec = CODEC_DELTA, .group_size = 512},
		{.codec = CODEC_DELTA, .group_size = 3000},
		{.codec = CODEC_DELTA, .group_size = 1u << 19},
		{.codec = CODEC_DELTA, .bits = 1},
		{.codec = CODEC_DELTA, .variant = 1},
		{.codec = CODEC_DELTA, .seed = 1},
		{.codec = CODEC_SIGN, .variant = 3},
		{.codec = CODEC_SIGN, .options = CODEC_OPTION_STOCHASTIC},
		{.codec = CODEC_SIGN, .max_code_length = 8},
		{.codec = CODEC_TERNARY, .group_size = 64},
		{.codec = CODEC_TERNARY, .scale = -1},
		{.codec = CODEC_TERNARY, .clip = -1},
		{.codec = CODEC_FLOAT8, .variant = 4},
		{.codec = CODEC_FLOAT8, .variant = CODEC_MXFP8_E4M3, .group_size = 64},
		{.codec = CODEC_FLOAT8, .variant = CODEC_MXFP8_E4M3, .group_size = CODEC_GROUP_SIZE_ROW},
		{.codec = CODEC_FLOAT8, .variant = CODEC_MXFP8_E5M2, .scale = 1},
		{.codec = CODEC_FLOAT8, .variant = CODEC_E5M2, .options = CODEC_OPTION_RCEIL},
		{.codec = CODEC_FLOAT8,
		 .variant = CODEC_MXFP8_E5M2,
		 .options = CODEC_OPTION_RCEIL | CODEC_OPTION_STOCHASTIC},
		{.codec = CODEC_FLOAT8, .group_size = 0x80000001u},
		{.codec = CODEC_FLOAT4, .group_size = 64},
		{.codec = CODEC_FLOAT4, .scale = 1},
		{.codec = CODEC_QUANTIZE, .bits = 9},
		{.codec = CODEC_QUANTIZE, .bits = 1, .variant = CODEC_LEVELS_ODD},
		{.codec = CODEC_QUANTIZE, .group_size = CODEC_GROUP_SIZE_ROW},
		{.codec = CODEC_TOPK, .bits = 9},
		{.codec = CODEC_TOPK, .group_size = 100},
		{.codec = CODEC_TOPK, .group_size = 32},
		{.codec = CODEC_TOPK, .group_size = 64, .kept = 33},
		{.codec = CODEC_TOPK, .scale = 1},
		{.codec = CODEC_TRUNCATE, .variant = 4},
		{.codec = CODEC_TRUNCATE, .bits = 4, .variant = CODEC_LEVEL_CODING_FIXED},
		{.codec = CODEC_TRUNCATE, .bits = 1},
		{.codec = CODEC_TRUNCATE, .guard = 128},
		{.codec = CODEC_TRUNCATE, .options = CODEC_OPTION_BITS},
		{.codec = CODEC_LOSSLESS, .guard = 1},
		{.codec = CODEC_LOSSLESS, .seed = 1},
	};
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = CODEC_FLOAT32, .rank = 1, .shape = {1000}};
	size_t n;

	(void)unused;
	for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
		codec_spec spec = BAD[i];

		spec.struct_nbytes = sizeof spec;
		assert_int_equal(codec_bound(&spec, &t, &n), CODEC_BAD_SPEC);
	}
	t.dtype = CODEC_FLOAT64;
	for (size_t s = 0; s < NSPECS; s++) {
		codec_spec spec = SPECS[s];

		spec.struct_nbytes = sizeof spec;
		assert_int_equal(codec_bound(&spec, &t, &n), CODEC_BAD_DTYPE);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_round_trip_between_guard_pages),
		cmocka_unit_test(test_bound_of_segments_is_exact_without_entropy_stage),
		cmocka_unit_test(test_bound_of_segments_rejects_wrong_arguments),
		cmocka_unit_test(test_reduce_equals_decode_and_add),
		cmocka_unit_test(test_environment_is_restored),
		cmocka_unit_test(test_stack_use_is_limited),
		cmocka_unit_test(test_rejects_wrong_specs),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
