/*
 * test_contract.c - test codec.h: specs, metrics, codebooks and buffers. Calls with wrong arguments must leave outputs
 * unchanged.
 */
#include <math.h>

#include "contract.h"

/* An output may be exactly an input array that codec.h allows; any other overlap with an input is rejected. */
static void test_rejects_overlapping_buffers(void **unused)
{
	codec_spec spec = spec_of(CODEC_TRUNCATE);
	codec_tensor t = tensor(x, N), state = tensor(theta, N), to = tensor(out, N);
	codec_metric metric = {.struct_nbytes = sizeof metric, .theta_term = 3, .theta = &state};
	codec_context with = context();
	size_t written, n, nbytes[2];
	uint8_t levels[N] = {0};
	const void *frames[2];

	(void)unused;
	fill();
	spec.variant = CODEC_LEVEL_CODING_SHARED;
	with.metric = &metric;
	assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
	assert_int_equal(ENCODE(x + 100, sizeof x - 400, NULL), CODEC_BAD_ARGUMENT);
	assert_int_equal(ENCODE(theta, sizeof theta, NULL), CODEC_BAD_ARGUMENT);
	assert_int_equal(ENCODE(theta, 4 * N, NULL), CODEC_BAD_ARGUMENT); /* encoding would overwrite theta */
	assert_int_equal(ENCODE(residual, sizeof residual, residual), CODEC_BAD_ARGUMENT);
	t = tensor(x + 1, N - 1);
	state = tensor(theta + 1, N - 1);
	assert_int_equal(ENCODE(frame, sizeof frame, x), CODEC_BAD_ARGUMENT);
	assert_int_equal(ENCODE(frame, sizeof frame, theta), CODEC_BAD_ARGUMENT);
	t.dtype = CODEC_BFLOAT16;
	t.nbytes = 2 * (N - 1);
	assert_int_equal(ENCODE(frame, sizeof frame, x + 1), CODEC_BAD_ARGUMENT);
	spec.variant = CODEC_LEVEL_CODING_CODED;
	with.levels = levels;
	assert_int_equal(ENCODE(levels, sizeof levels, NULL), CODEC_BAD_ARGUMENT);
	with.levels = NULL;
	spec.variant = CODEC_LEVEL_CODING_SHARED;
	t = tensor(x, N);
	state = tensor(theta, N);
	fill();
	/* the residual replaces the tensor, the result replaces the state: both are allowed */
	assert_int_equal(ENCODE(frame, sizeof frame, residual), CODEC_OK);
	n = written;
	assert_int_equal(codec_decode(frame, n, &to, &with, scratch, sizeof scratch), CODEC_OK);
	assert_int_equal(ENCODE(other, sizeof other, x), CODEC_OK);
	assert_memory_equal(other, frame, n);
	assert_memory_equal(x, residual, sizeof x);
	for (int i = 0; i < N; i++)
		assert_true(theta[i] == 8 * (x[i] + out[i]));
	state.data = theta;
	for (int i = 0; i < 2; i++) {
		frames[i] = frame;
		nbytes[i] = n;
	}
	memcpy(x, theta, sizeof x);
	assert_int_equal(codec_reduce(frames, nbytes, 2, CODEC_REDUCE_SUM, &state, &with, scratch, sizeof scratch),
			 CODEC_BAD_ARGUMENT);
	assert_memory_equal(x, theta, sizeof x);
	assert_int_equal(codec_decode(frame, n, &state, &with, scratch, sizeof scratch), CODEC_OK);
	assert_memory_equal(theta, out, sizeof out);
	to.data = theta + 1; /* dst overlaps the state array theta */
	assert_int_equal(codec_decode(frame, n, &to, &with, scratch, sizeof scratch), CODEC_BAD_ARGUMENT);
	to.data = frame + 16;
	assert_int_equal(codec_decode(frame, n, &to, &with, scratch, sizeof scratch), CODEC_BAD_ARGUMENT);
}

/*
 * theta_dtype must be a supported dtype. The parameter group whose dtype has the most mantissa bits determines the
 * frame's guard.
 */
static void test_finest_theta_dtype_sets_guard(void **unused)
{
	codec_spec spec = spec_of(CODEC_TRUNCATE);
	codec_tensor t = tensor(x, N), state = tensor(theta, N), half = tensor(theta, N);
	codec_metric last = {.struct_nbytes = sizeof last, .theta_term = 3, .theta = &state};
	codec_metric first = {
		.struct_nbytes = sizeof first, .theta_term = 3, .theta = &half, .until = 100, .next = &last};
	codec_context with = context();
	size_t written, fine;

	(void)unused;
	fill();
	spec.variant = CODEC_LEVEL_CODING_PLANE;
	spec.guard = -8;
	with.metric = &last;
	assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
	fine = written;
	for (uint32_t dtype = 1; dtype < 1100; dtype += dtype < 30 ? 1 : 97) {
		int takes = dtype == CODEC_FLOAT32 || dtype == CODEC_BFLOAT16 || dtype == CODEC_FLOAT16;

		last.theta_dtype = dtype;
		assert_int_equal(ENCODE(frame, sizeof frame, NULL), takes ? CODEC_OK : CODEC_BAD_ARGUMENT);
	}
	last.theta_dtype = CODEC_BFLOAT16;
	assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
	assert_true(written < fine);
	last.theta_dtype = 0;
	half.dtype = CODEC_BFLOAT16;
	half.nbytes = 2 * N;
	with.metric = &first;
	assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
	assert_int_equal(frame[36], 128 - 8); /* guard is not 16 less, because theta is float32 in one group */
}

/*
 * Each value is truncated by the metric of its parameter group. Several groups with equal metrics give the same frame
 * as a single group.
 */
static void test_each_group_uses_its_metric(void **unused)
{
	enum { MOST = 4000 };
	static const uint64_t EACH[] = {10, 513, 16384, 20000};
	static codec_metric groups[MOST];
	codec_spec spec = spec_of(CODEC_TRUNCATE);
	codec_tensor t = tensor(x, N), state = tensor(theta, N), to = tensor(out, N);
	codec_context with = context();
	codec_metric one = {.struct_nbytes = sizeof one, .theta_term = 3, .theta = &state};
	static float left[N], values[N];
	size_t n, written;

	(void)unused;
	fill();
	spec.variant = CODEC_LEVEL_CODING_SHARED;
	with.metric = &one;
	assert_int_equal(ENCODE(frame, sizeof frame, left), CODEC_OK);
	n = written;
	assert_int_equal(DECODE(n), CODEC_OK);
	memcpy(values, out, sizeof values);
	for (int i = 0; i < 8; i++) {
		uint64_t each = EACH[i % 4], count = (N + each - 1) / each;

		for (uint64_t g = 0; g < count; g++) {
			groups[g] = one;
			groups[g].theta_term = i < 4 || g % 2 ? 3 : 0.01f;
			groups[g].until = g + 1 < count ? (g + 1) * each : 0;
			groups[g].next = groups + g + 1;
		}
		with.metric = groups;
		assert_int_equal(ENCODE(other, sizeof other, residual), CODEC_OK);
		assert_int_equal(codec_decode(other, written, &to, &with, scratch, sizeof scratch), CODEC_OK);
		if (i < 4) {
			assert_int_equal(written, n);
			assert_memory_equal(other, frame, n);
			assert_memory_equal(residual, left, sizeof left);
		}
		for (uint64_t v = 0; v < N; v++) {
			assert_true(out[v] == (i < 4 || v / each % 2 ? values[v] : x[v] - residual[v]));
			assert_true(i < 4 || v / each % 2 || fabsf(residual[v]) <= fabsf(left[v]));
		}
	}
}

/* A spec accepts guards of -128 to 126 with either rounding, and the spec read from any frame is valid. */
static void test_guard_range(void **unused)
{
	codec_tensor t = tensor(x, 600), state = tensor(theta, 600);
	codec_metric metric = {.struct_nbytes = sizeof metric, .theta_term = 3, .theta = &state};
	codec_context with = context();
	codec_info info = {.struct_nbytes = sizeof info};
	size_t written, need;

	(void)unused;
	memset(x, 0, sizeof x);
	memset(theta, 0, sizeof theta);
	with.metric = &metric;
	for (int i = 0; i < 8; i++)
		for (int guard = -130; guard < 130; guard++) {
			codec_spec spec = spec_of(CODEC_TRUNCATE);
			int good = guard >= -128 && guard <= 126;

			spec.guard = guard;
			spec.options = i % 2 ? CODEC_OPTION_CUT : 0;
			metric.theta_dtype = i & 2 ? CODEC_BFLOAT16 : CODEC_FLOAT32;
			t.dtype = i & 4 ? CODEC_BFLOAT16 : CODEC_FLOAT32;
			t.nbytes = i & 4 ? 1200 : 2400;
			assert_int_equal(ENCODE(frame, sizeof frame, NULL), good ? CODEC_OK : CODEC_BAD_SPEC);
			if (!good)
				continue;
			assert_int_equal(codec_inspect(frame, written, &info), CODEC_OK);
			assert_int_equal(codec_scratch(&info.spec, &t, &need), CODEC_OK);
			if (metric.theta_dtype == t.dtype)
				assert_int_equal(info.spec.guard, guard);
		}
}

/* A codebook with a wrong id, wrong lengths or wrong symbols is rejected. */
static void test_rejects_inconsistent_codebooks(void **unused)
{
	codec_spec spec = spec_of(CODEC_LOSSLESS);
	codec_tensor t = tensor(x, N);
	codec_context with = context();
	uint64_t counts[256] = {0};
	codec_codebook book, wrong;
	size_t written;

	(void)unused;
	fill();
	assert_int_equal(codec_count(&spec, &t, counts, &with, scratch, sizeof scratch), CODEC_OK);
	assert_int_equal(codec_codebook_build(&spec, CODEC_FLOAT32, counts, &book), CODEC_OK);
	assert_int_equal(codec_codebook_check(&book), CODEC_OK);
	with.codebooks = &wrong;
	with.ncodebooks = 1;
	for (int i = 0; i < 8; i++) {
		wrong = book;
		switch (i) {
		case 0: wrong.id ^= 1; break;
		case 1: wrong.id = 0; break;
		case 2: wrong.length[128] ^= 1; break;
		case 3: wrong.escape_length = 0; break;
		case 4: wrong.symbols = CODEC_SYMBOLS_EXPONENT; break;
		case 5: wrong.reserved[5] = 1; break;
		case 6: memset(wrong.length, 8, sizeof wrong.length); break;
		default: wrong.symbols = 77;
		}
		assert_int_equal(codec_codebook_check(&wrong), CODEC_BAD_CODEBOOK);
		assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_BAD_CODEBOOK);
	}
	assert_int_equal(codec_codebook_build(&spec, CODEC_INT32, counts, &book), CODEC_BAD_DTYPE);
	spec.codec = CODEC_SIGN;
	assert_int_equal(codec_codebook_build(&spec, CODEC_FLOAT32, counts, &book), CODEC_BAD_SPEC);
	assert_int_equal(codec_count(&spec, &t, counts, NULL, scratch, sizeof scratch), CODEC_BAD_SPEC);
	spec.codec = CODEC_TRUNCATE;
	assert_int_equal(codec_count(&spec, &t, counts, NULL, scratch, sizeof scratch), CODEC_MISSING_STATE);
}

/* NULL with capacity 0 is a valid, empty destination: every codec returns CODEC_SHORT_OUTPUT. */
static void test_null_destination_is_short_output(void **unused)
{
	codec_tensor t = tensor(x, N);
	codec_context with = context();
	size_t written;

	(void)unused;
	fill();
	for (uint32_t codec = CODEC_LOSSLESS; codec <= CODEC_TRUNCATE; codec++) {
		codec_spec spec = spec_of(codec);

		if (codec == CODEC_TRUNCATE)
			spec.variant = CODEC_LEVEL_CODING_FIXED;
		assert_int_equal(ENCODE(NULL, 0, residual), CODEC_SHORT_OUTPUT);
		assert_true(all_seven(residual));
		assert_int_equal(ENCODE(NULL, 1, NULL), CODEC_BAD_ARGUMENT);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_rejects_overlapping_buffers),
		cmocka_unit_test(test_finest_theta_dtype_sets_guard),
		cmocka_unit_test(test_rejects_inconsistent_codebooks),
		cmocka_unit_test(test_null_destination_is_short_output),
		cmocka_unit_test(test_each_group_uses_its_metric),
		cmocka_unit_test(test_guard_range),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
