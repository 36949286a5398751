/* test_lossy.c - lossy codecs of the C interface between guard pages: sizes, residuals, sums, noise. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codec/codec.h"
#include "codec/codec_engine.h"
#include "job/api.h"
#include "environment.h"
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

static float value(void)
{
	int e = __builtin_popcountll(next_random()) - 40;

	return next_random() % 9 ? round_float((uint32_t)(next_random() & 0x807fffff) | (uint32_t)(120 + e / 2) << 23)
				 : 0;
}

static void fill(uint8_t *p, uint32_t dtype, uint64_t n)
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

static float widened(const uint8_t *p, uint32_t dtype, uint64_t i)
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
	/* damaged anywhere, without checking the checksum */
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

/* Encode a frame in three ranges of blocks, the last one first. with->residual may hold a residual to add. */
static codec_status encode_steps(const codec_spec *spec, const codec_tensor *t, uint8_t *dst, size_t capacity,
				 size_t *written, const codec_context *with)
{
	codec_range ranges[3] = {0};
	size_t job_nbytes, work_nbytes;
	codec_status status;
	codec_plan plan;
	void *job, *work;

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

		ranges[i].first = first;
		ranges[i].count = (i + 1) * plan.nblocks / 3 - first;
		ranges[i].at = plan.regions_at + first * plan.region_bound;
		if (ranges[i].count)
			status = codec_encode_blocks(t, dst, capacity, with, job, ranges + i, work, work_nbytes);
	}
	if (status == CODEC_OK)
		status = codec_encode_close(t, dst, capacity, with, job, ranges, 3, written);
	free(job);
	free(work);
	return status;
}

/*
 * CODEC_FEEDBACK equals encoding the sums, CODEC_DIFFERENCE the differences: bit-identical in float32. The residual
 * becomes the error of the sums, or the sum of the residual and the decoded values.
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
	room = 2 * bound + (1 << 16); /* leaves gaps between ranges */
	assert_int_equal(codec_scratch(&spec, &t, &need), CODEC_OK);
	frame = malloc(bound);
	other = malloc(room);
	scratch = malloc(need);
	t.data = x;
	with.flags = flag;
	memcpy(left, e, 4 * n);
	assert_int_equal(codec_encode(&spec, &t, frame, bound, &written, left, &with, scratch, need), CODEC_OK);
	y.data = back;
	assert_int_equal(codec_decode(frame, written, &y, &with, scratch, need), CODEC_OK);
	for (uint64_t i = 0; i < n; i++)
		assert_true(left[i] == (flag == CODEC_DIFFERENCE ? e[i] + widened(back, dtype, i)
								 : sum[i] - widened(back, dtype, i)));
	/* exact capacity; one byte short, which leaves the residual unchanged */
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

/* Return 1 for codecs of rows: frames may hold differences to the residual, and follow segments. */
static int is_rows(uint32_t codec)
{
	return codec != CODEC_TRUNCATE && codec != CODEC_TOPK;
}

static void test_residual_is_added_or_subtracted(void **unused)
{
	static const uint64_t SIZES[] = {0, 1, 100, 513, 2561, 16385, 22500, 90001};

	(void)unused;
	for (uint32_t isa = 0; codec_isa_name(isa); isa++)
		for (size_t s = 0; s < NSPECS && codec_isa_usable(isa); s++)
			for (size_t i = 0; i < 3 * sizeof SIZES / sizeof *SIZES; i++)
				for (int f = 0; f < 1 + is_rows(SPECS[s].codec); f++)
					residual_is_read(f ? CODEC_DIFFERENCE : CODEC_FEEDBACK, SPECS[s], DTYPES[i % 3],
							 SIZES[i / 3], 1 + isa);
}

/*
 * CODEC_DIFFERENCE with NaN: frames are equal for all payloads in the residual and all instruction sets. The new
 * residual is NaN where the tensor or the residual is, and else bit-identical.
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

/* Error feedback with invalid arguments or sums is rejected, and the residual is unchanged. */
static void test_feedback_rejects_wrong_calls(void **unused)
{
	enum { N = 5000 };
	float *x = calloc(N, 4), *e = calloc(N, 4);
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = CODEC_FLOAT32, .rank = 1, .shape = {N}, .nbytes = 4 * N};
	codec_context with = {.struct_nbytes = sizeof with, .flags = CODEC_FEEDBACK};
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
	/* the sum is Inf, though neither operand is */
	x[N - 1] = e[N - 1] = 3e38f;
	x[0] = 1;
	assert_int_equal(codec_encode(&spec, &t, frame, capacity, &written, e, &with, scratch, need), CODEC_NONFINITE);
	assert_true(e[N - 1] == 3e38f && e[0] == 0);
	/* the sum exceeds the given scale, though neither operand does */
	spec = (codec_spec){.struct_nbytes = sizeof spec, .codec = CODEC_TERNARY, .scale = 4};
	x[N - 1] = e[N - 1] = 3;
	assert_int_equal(codec_encode(&spec, &t, frame, capacity, &written, e, &with, scratch, need), CODEC_BAD_SCALE);
	assert_true(e[N - 1] == 3 && e[0] == 0);
	/* TRUNCATE has no deltas, and a residual is either added or subtracted */
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
	with.flags = CODEC_FEEDBACK;
	/* CODEC_FEEDBACK must match in all steps of a job */
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
	/* the sum exceeds float16's range: the excess remains in the residual */
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

/* Encode a vector into memory of the bound for its segments, which is exact without an entropy stage. */
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
		for (size_t i = 0; i < 3 && is_rows(SPECS[s].codec); i++)
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

/* CODEC_REDUCE_CODES gives integers that equal `sum` / scale, in each integer dtype that holds them, if frames add up.
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

/* codec_reduce equals decoding and adding in order. */
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
		/* codes with equal scales are added first: 3 times the scale may round differently */
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
	feclearexcept(FE_ALL_EXCEPT); /* flags raised by the tests' own arithmetic */
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
#if !defined(__SANITIZE_ADDRESS__)
	assert_true(stack_of(use_stack) < stack_of(use_no_stack) + 16384);
#else
	(void)stack_of;
	(void)use_stack;
	(void)use_no_stack;
#endif
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

/* Vectorized multiplication equals the format's division, for every mantissa of a scale and every number of levels. */
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
		for (int i = 0; i < 16; i++) /* all mantissas, also of subnormals */
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

/* Vectorized conversions between half types and float32 equal the scalar functions. */
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
			for (int run = 0; run < 64; run++) { /* values in between: near ties, or random */
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

/* Random bits equal philox_half where the lower word of the block counter wraps around. */
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
		cmocka_unit_test(test_round_trip_between_guard_pages),
		cmocka_unit_test(test_residual_is_added_or_subtracted),
		cmocka_unit_test(test_delta_of_nan_depends_on_no_payload),
		cmocka_unit_test(test_feedback_rejects_wrong_calls),
		cmocka_unit_test(test_bound_of_segments_is_exact_without_entropy_stage),
		cmocka_unit_test(test_bound_of_segments_rejects_wrong_arguments),
		cmocka_unit_test(test_reduce_equals_decode_and_add),
		cmocka_unit_test(test_environment_is_restored),
		cmocka_unit_test(test_stack_use_is_limited),
		cmocka_unit_test(test_rejects_wrong_specs),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
