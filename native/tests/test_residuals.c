/*
 * test_residuals.c - test residuals of lossy codecs between guard pages: residuals are added or subtracted, replaced by
 * the new ones, and unchanged by errors.
 */
#include <stdlib.h>
#include <string.h>

#include "codec/codec_engine.h"
#include "lossy.h"

/*
 * Encode a frame in steps with three ranges of blocks, the last range first, the second range to a buffer.
 * with->residual may be a residual to add.
 */
static codec_status encode_steps(const codec_spec *spec, const codec_tensor *t, uint8_t *dst, size_t capacity,
				 size_t *written, const codec_context *with)
{
	codec_range ranges[3] = {0};
	size_t job_nbytes, work_nbytes;
	codec_status status;
	codec_plan plan;
	void *job, *work, *buffer = NULL;

	assert_int_equal(codec_job_nbytes(spec, t, &job_nbytes, &work_nbytes), CODEC_OK);
	job = malloc(job_nbytes);
	work = malloc(work_nbytes);
	status = codec_encode_open(spec, t, dst, capacity, with, job, job_nbytes, &plan);
	if (status == CODEC_OK && plan.nscans) {
		for (uint64_t i = plan.nscans; i-- > 0 && status == CODEC_OK;)
			status = codec_encode_scan(t, with, job, i, 1);
		if (status == CODEC_OK)
			status = codec_encode_start(t, dst, capacity, with, job, &plan);
	}
	for (uint64_t i = 3; i-- > 0 && status == CODEC_OK;) {
		uint64_t first = i * plan.nblocks / 3;
		size_t end = capacity;

		ranges[i].first = first;
		ranges[i].count = (i + 1) * plan.nblocks / 3 - first;
		ranges[i].at = plan.regions_at + first * plan.region_bound;
		if (i == 1) {
			end = ranges[i].at + ranges[i].count * plan.region_bound;
			ranges[i].buffer = buffer = malloc(end - ranges[i].at);
		}
		if (ranges[i].count)
			status = codec_encode_blocks(t, dst, end, with, job, ranges + i, work, work_nbytes);
	}
	if (status == CODEC_OK)
		status = codec_encode_close(t, dst, capacity, with, job, ranges, 3, written);
	free(buffer);
	free(job);
	free(work);
	return status;
}

/*
 * CODEC_FEEDBACK gives the frame that encoding tensor + residual gives, CODEC_DIFFERENCE the frame of tensor -
 * residual, bit-identical in float32. The new residual is the encoding error of the sums, or the old residual plus the
 * decoded values.
 */
static void residual_is_read(uint32_t flag, codec_spec spec, uint32_t dtype, uint64_t n, uint32_t isa)
{
	uint32_t size = codec_dtype_nbytes(dtype);
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = dtype, .rank = 1, .shape = {n}, .nbytes = n * size},
		     theta, y;
	codec_metric metric = {.struct_nbytes = sizeof metric, .theta_term = 30, .theta = &theta};
	codec_context with = {.struct_nbytes = sizeof with, .isa = isa, .stream = 5, .metric = &metric};
	float *x = malloc(4 * n + 1), *e = malloc(4 * n + 1), *left = malloc(4 * n + 1), *sum = malloc(4 * n + 1);
	size_t bound, room, need, written, again;
	uint8_t *frame, *other, *back = malloc(4 * n + 1), *scratch;

	spec.struct_nbytes = sizeof spec;
	fill((uint8_t *)x, dtype, n);
	fill((uint8_t *)e, CODEC_FLOAT32, n);
	theta = y = t;
	theta.dtype = CODEC_FLOAT32;
	theta.nbytes = 4 * n;
	theta.data = calloc(n + 1, 4);
	fill(theta.data, CODEC_FLOAT32, n);
	for (uint64_t i = 0; i < n; i++)
		sum[i] = widened((uint8_t *)x, dtype, i) + (flag == CODEC_DIFFERENCE ? -e[i] : e[i]);
	assert_int_equal(codec_bound(&spec, &t, &bound), CODEC_OK);
	room = 2 * bound + (1 << 16); /* capacity with room for gaps between ranges */
	assert_int_equal(codec_scratch(&spec, &t, &need), CODEC_OK);
	frame = malloc(bound);
	other = malloc(room);
	scratch = malloc(need);
	t.data = x;
	with.flags = flag | CODEC_VERIFY_FIRST;
	memcpy(left, e, 4 * n);
	assert_int_equal(codec_encode(&spec, &t, frame, bound, &written, left, &with, scratch, need), CODEC_OK);
	y.data = back;
	assert_int_equal(codec_decode(frame, written, &y, &with, scratch, need), CODEC_OK);
	for (uint64_t i = 0; i < n; i++)
		assert_true(left[i] == (flag == CODEC_DIFFERENCE ? e[i] + widened(back, dtype, i)
								 : sum[i] - widened(back, dtype, i)));
	/* encode with the exact capacity; then with one byte less, which must leave the residual unchanged */
	memcpy(sum, e, 4 * n);
	assert_int_equal(codec_encode(&spec, &t, other, written - 1, &again, sum, &with, scratch, need),
			 CODEC_SHORT_OUTPUT);
	assert_memory_equal(sum, e, 4 * n);
	assert_int_equal(codec_encode(&spec, &t, other, written, &again, sum, &with, scratch, need), CODEC_OK);
	assert_true(again == written && memcmp(other, frame, written) == 0 && memcmp(sum, left, 4 * n) == 0);
	memcpy(sum, e, 4 * n);
	with.residual = sum;
	assert_int_equal(encode_steps(&spec, &t, other, room, &again, &with), CODEC_OK);
	assert_true(again == written && memcmp(other, frame, written) == 0 && memcmp(sum, left, 4 * n) == 0);
	with.flags = 0;
	with.residual = NULL;
	if (dtype == CODEC_FLOAT32) {
		for (uint64_t i = 0; i < n; i++)
			sum[i] = flag == CODEC_DIFFERENCE ? x[i] - e[i] : x[i] + e[i];
		t.data = sum;
		assert_int_equal(codec_encode(&spec, &t, other, bound, &again, sum, &with, scratch, need), CODEC_OK);
		assert_true(again == written && memcmp(other, frame, written) == 0);
		assert_true(flag == CODEC_DIFFERENCE || memcmp(sum, left, 4 * n) == 0);
	}
	free(x);
	free(e);
	free(left);
	free(sum);
	free(frame);
	free(other);
	free(back);
	free(scratch);
	free(theta.data);
}

static void test_residual_is_added_or_subtracted(void **unused)
{
	static const uint64_t SIZES[] = {0, 1, 100, 513, 2561, 16385, 22500, 90001};

	(void)unused;
	for (uint32_t isa = 0; codec_isa_name(isa); isa++)
		for (size_t s = 0; s < NSPECS && codec_isa_usable(isa); s++)
			for (size_t i = 0; i < 3 * sizeof SIZES / sizeof *SIZES; i++)
				for (int f = 0; f < 1 + codec_is_rows(SPECS[s].codec); f++)
					residual_is_read(f ? CODEC_DIFFERENCE : CODEC_FEEDBACK, SPECS[s], DTYPES[i % 3],
							 SIZES[i / 3], 1 + isa);
}

/*
 * CODEC_DIFFERENCE with NaN: frames are equal for all NaN payloads in the residual and for all instruction sets. The
 * new residual is NaN where the tensor or the old residual is NaN, and bit-identical elsewhere.
 */
static void test_delta_of_nan_depends_on_no_payload(void **unused)
{
	enum { N = 4999 };
	static const uint32_t PAYLOADS[] = {0x7fc00000, 0xffc00000, 0x7f800001, 0xffabcdef, 0x7fffffff};
	codec_spec spec = {.struct_nbytes = sizeof spec, .codec = CODEC_FLOAT8, .options = CODEC_OPTION_PROPAGATE};
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = CODEC_FLOAT32, .rank = 1, .shape = {N}, .nbytes = 4 * N};
	uint32_t *x = malloc(4 * N), *e = malloc(4 * N), *sum = malloc(4 * N), *first = malloc(4 * N);
	size_t bound, need, written, nbytes = 0;
	uint8_t *frame, *other, *scratch;

	(void)unused;
	fill((uint8_t *)x, CODEC_FLOAT32, N);
	fill((uint8_t *)e, CODEC_FLOAT32, N);
	for (uint64_t i = 3; i < N; i += 11)
		x[i] = 0xff812345;
	t.data = x;
	assert_int_equal(codec_bound(&spec, &t, &bound), CODEC_OK);
	assert_int_equal(codec_scratch(&spec, &t, &need), CODEC_OK);
	frame = malloc(bound);
	other = malloc(bound);
	scratch = malloc(need);
	for (uint32_t isa = 0; codec_isa_name(isa); isa++)
		for (size_t p = 0; p < sizeof PAYLOADS / sizeof *PAYLOADS && codec_isa_usable(isa); p++) {
			codec_context with = {.struct_nbytes = sizeof with, .isa = 1 + isa, .flags = CODEC_DIFFERENCE};

			for (uint64_t i = 0; i < N; i += 7)
				e[i] = PAYLOADS[p];
			memcpy(sum, e, 4 * N);
			assert_int_equal(
				codec_encode(&spec, &t, other, bound, &written, (float *)sum, &with, scratch, need),
				CODEC_OK);
			if (!nbytes) {
				nbytes = written;
				memcpy(frame, other, nbytes);
				memcpy(first, sum, 4 * N);
			}
			assert_true(written == nbytes && memcmp(frame, other, nbytes) == 0);
			for (uint64_t i = 0; i < N; i++)
				if (i % 7 == 0 || i % 11 == 3)
					assert_true((sum[i] & ROUND_ABS) > ROUND_INF);
				else
					assert_int_equal(sum[i], first[i]);
		}
	free(x);
	free(e);
	free(sum);
	free(first);
	free(frame);
	free(other);
	free(scratch);
}

/*
 * Error feedback with invalid arguments, or with sums that cannot be encoded, is rejected and leaves the residual
 * unchanged.
 */
static void test_feedback_rejects_wrong_calls(void **unused)
{
	enum { N = 5000 };
	float *x = calloc(N, 4), *e = calloc(N, 4);
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = CODEC_FLOAT32, .rank = 1, .shape = {N}, .nbytes = 4 * N};
	codec_context with = {.struct_nbytes = sizeof with, .flags = CODEC_FEEDBACK | CODEC_VERIFY_FIRST};
	codec_spec spec = {.struct_nbytes = sizeof spec, .codec = CODEC_LOSSLESS};
	size_t capacity = 8 * N, need, written;
	uint8_t *frame = malloc(capacity), *scratch, *job;
	codec_plan plan;

	(void)unused;
	t.data = x;
	codec_scratch(&spec, &t, &need);
	scratch = malloc(need += 1 << 20);
	assert_int_equal(codec_encode(&spec, &t, frame, capacity, &written, e, &with, scratch, need),
			 CODEC_BAD_ARGUMENT);
	spec.codec = CODEC_SIGN;
	assert_int_equal(codec_encode(&spec, &t, frame, capacity, &written, NULL, &with, scratch, need),
			 CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_encode(&spec, &t, frame, capacity, &written, x, &with, scratch, need),
			 CODEC_BAD_ARGUMENT);
	/* tensor + residual is Inf, though neither operand is Inf */
	x[N - 1] = e[N - 1] = 3e38f;
	x[0] = 1;
	assert_int_equal(codec_encode(&spec, &t, frame, capacity, &written, e, &with, scratch, need), CODEC_NONFINITE);
	assert_true(e[N - 1] == 3e38f && e[0] == 0);
	/* tensor + residual exceeds the given scale, though neither operand does */
	spec = (codec_spec){.struct_nbytes = sizeof spec, .codec = CODEC_TERNARY, .scale = 4};
	x[N - 1] = e[N - 1] = 3;
	assert_int_equal(codec_encode(&spec, &t, frame, capacity, &written, e, &with, scratch, need), CODEC_BAD_SCALE);
	assert_true(e[N - 1] == 3 && e[0] == 0);
	/* TRUNCATE rejects CODEC_DIFFERENCE, and no codec accepts it with CODEC_FEEDBACK */
	with.flags = CODEC_DIFFERENCE;
	spec = (codec_spec){.struct_nbytes = sizeof spec, .codec = CODEC_TRUNCATE};
	assert_int_equal(codec_encode(&spec, &t, frame, capacity, &written, e, &with, scratch, need),
			 CODEC_BAD_ARGUMENT);
	spec.codec = CODEC_TERNARY;
	assert_int_equal(codec_encode(&spec, &t, frame, capacity, &written, x, &with, scratch, need),
			 CODEC_BAD_ARGUMENT);
	with.flags = CODEC_DIFFERENCE | CODEC_FEEDBACK;
	assert_int_equal(codec_encode(&spec, &t, frame, capacity, &written, e, &with, scratch, need),
			 CODEC_BAD_ARGUMENT);
	with.flags = CODEC_FEEDBACK | CODEC_VERIFY_FIRST;
	/* all steps of a job must have CODEC_FEEDBACK, or none */
	spec.scale = 8;
	with.residual = e;
	job = scratch;
	for (int i = 0; i < 2; i++, with.flags ^= CODEC_FEEDBACK) {
		assert_int_equal(codec_encode_open(&spec, &t, frame, capacity, &with, job, need, &plan), CODEC_OK);
		with.flags ^= CODEC_FEEDBACK;
		assert_int_equal(codec_encode_scan(&t, &with, job, 0, plan.nscans), CODEC_BAD_ARGUMENT);
		with.flags ^= CODEC_FEEDBACK;
		assert_int_equal(codec_encode_scan(&t, &with, job, 0, plan.nscans), CODEC_OK);
		with.flags ^= CODEC_FEEDBACK;
		assert_int_equal(codec_encode_start(&t, frame, capacity, &with, job, &plan), CODEC_BAD_ARGUMENT);
		with.flags ^= CODEC_FEEDBACK;
	}
	/* tensor + residual exceeds float16's range: the excess remains in the residual */
	spec = (codec_spec){.struct_nbytes = sizeof spec, .codec = CODEC_TERNARY};
	t.dtype = CODEC_FLOAT16;
	t.nbytes = 2 * N;
	memset(x, 0, 4 * N);
	memset(e, 0, 4 * N);
	*(uint16_t *)x = 0x7bff;
	e[0] = 1000;
	assert_int_equal(codec_encode(&spec, &t, frame, capacity, &written, e, &with, scratch, need), CODEC_OK);
	assert_true(e[0] == 1000);
	free(x);
	free(e);
	free(frame);
	free(scratch);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_residual_is_added_or_subtracted),
		cmocka_unit_test(test_delta_of_nan_depends_on_no_payload),
		cmocka_unit_test(test_feedback_rejects_wrong_calls),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
