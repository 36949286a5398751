/*
 * test_step_ranges.c - test codec_engine.h: sizes of jobs, ranges of blocks, checks without output, encoding in one
 * pass.
 */
#include <fenv.h>
#include <stdlib.h>

#include "contract.h"

/* A job fits in plan.job_nbytes. A decode job is smaller if the encode job of the same spec includes a work buffer. */
static void test_job_size_of_plan_suffices(void **unused)
{
	static const codec_spec SPECS[] = {
		{.codec = CODEC_LOSSLESS},
		{.codec = CODEC_SIGN},
		{.codec = CODEC_TERNARY, .variant = CODEC_TERNARY_ENTROPY},
		{.codec = CODEC_FLOAT8, .options = CODEC_OPTION_ENTROPY},
		{.codec = CODEC_TRUNCATE, .variant = CODEC_LEVEL_CODING_FIXED, .bits = 2},
	};
	codec_tensor t = tensor(x, N), to = tensor(out, N);
	codec_context with = context();
	void *work = malloc(SCRATCH);

	(void)unused;
	fill();
	for (int i = 0; i < 5; i++) {
		size_t written, most, work_nbytes, both, short_of;
		codec_spec spec = SPECS[i];
		codec_range all = {0};
		codec_plan plan;
		struct guarded g;

		spec.struct_nbytes = sizeof spec;
		assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
		assert_int_equal(codec_job_nbytes(&spec, &t, &most, &work_nbytes), CODEC_OK);
		assert_int_equal(codec_scratch(&spec, &t, &both), CODEC_OK);
		assert_int_equal(codec_decode_open(frame, written, &to, &with, scratch, sizeof scratch, &plan),
				 CODEC_OK);
		assert_true(i < 2 ? plan.job_nbytes == most : plan.job_nbytes + work_nbytes <= most);
		assert_true(plan.job_nbytes + work_nbytes <= both);
		g = guard(plan.job_nbytes);
		short_of = plan.job_nbytes - 1;
		assert_int_equal(codec_decode_open(frame, written, &to, &with, g.p + 1, short_of, NULL),
				 CODEC_SHORT_SCRATCH);
		assert_int_equal(codec_decode_open(frame, written, &to, &with, g.p, plan.job_nbytes, NULL), CODEC_OK);
		all.count = plan.nblocks;
		assert_int_equal(codec_decode_blocks(frame, written, &to, &with, g.p, &all, work, work_nbytes),
				 CODEC_OK);
		assert_int_equal(codec_decode_close(&with, g.p, all.checksum), CODEC_OK);
		unguard(g);
	}
	free(work);
}

/* One-call functions write nothing with CODEC_CHECK_ONLY. Steps reject the flag. */
static void test_check_only_writes_nothing(void **unused)
{
	static const uint32_t FLAGS[] = {CODEC_CHECK_ONLY, CODEC_VERIFY_FIRST, CODEC_CHECK_ONLY | CODEC_VERIFY_FIRST};

	(void)unused;
	for (int i = 0; i < 6; i++) {
		codec_spec spec = spec_of(i % 3 == 2 ? CODEC_QUANTIZE : CODEC_LOSSLESS);
		uint64_t n = i % 3 ? N : 100, checksum; /* 100 values give a stored frame */
		codec_tensor t = tensor(x, n), to = tensor(out, n);
		codec_context with = context();
		const void *frames[] = {frame, i < 3 ? frame : other}, *jobs[1];
		size_t written, nbytes[2];
		const codec_reduction one = {frames, nbytes, jobs, 1, CODEC_REDUCE_SUM};
		codec_range range = {.count = 1};
		codec_plan plan;
		void *job, *work = malloc(SCRATCH);

		fill();
		assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
		nbytes[0] = written;
		spec.codec = CODEC_SIGN; /* blocks of SIGN have other sizes than those of the first frame */
		if (i >= 3)
			assert_int_equal(ENCODE(other, sizeof other, NULL), CODEC_OK);
		nbytes[1] = written;
		with.flags = CODEC_CHECK_ONLY;
#define ADD() codec_accumulate(frame, nbytes[0], 1, &to, &with, scratch, sizeof scratch)
#define REDUCE() codec_reduce(frames, nbytes, 2, CODEC_REDUCE_SUM, &to, &with, scratch, sizeof scratch)
		assert_int_equal(DECODE(nbytes[0]), CODEC_OK);
		assert_int_equal(ADD(), CODEC_OK);
		assert_int_equal(REDUCE(), CODEC_OK);
		frame[nbytes[0] - 20] ^= 1;
		assert_int_equal(DECODE(nbytes[0]), CODEC_CHECKSUM);
		assert_int_equal(REDUCE(), CODEC_CHECKSUM);
		frame[nbytes[0] - 20] ^= 1;
		jobs[0] = job = malloc(SCRATCH);
		with.into = CODEC_INTO_FLOAT32;
		for (int k = 0; k < 3; k++) {
			with.flags = FLAGS[k];
			assert_int_equal(codec_decode_open(frame, nbytes[0], &to, &with, job, SCRATCH, &plan),
					 CODEC_BAD_ARGUMENT);
		}
		assert_true(all_seven(out));
		if (n == N) {
			with.flags = 0;
			assert_int_equal(codec_decode_open(frame, nbytes[0], &to, &with, job, SCRATCH, &plan),
					 CODEC_OK);
			for (int k = 0; k < 3; k++) {
				with.flags = FLAGS[k];
				assert_int_equal(
					codec_decode_check(frame, nbytes[0], &with, job, &range, work, SCRATCH),
					CODEC_BAD_ARGUMENT);
				assert_int_equal(
					codec_decode_blocks(frame, nbytes[0], &to, &with, job, &range, work, SCRATCH),
					CODEC_BAD_ARGUMENT);
				assert_int_equal(
					codec_reduce_blocks(&one, &to, &with, &range, &checksum, work, SCRATCH),
					CODEC_BAD_ARGUMENT);
			}
			assert_true(all_seven(out));
		}
		free(job);
		free(work);
	}
}

/* Ranges past the last block are rejected, also if first + count overflows. */
static void test_rejects_ranges_beyond_blocks(void **unused)
{
	codec_spec spec = spec_of(CODEC_QUANTIZE);
	codec_tensor t = tensor(x, N), to = tensor(out, N);
	codec_context with = context();
	void *job = malloc(SCRATCH), *work = malloc(SCRATCH);
	const void *frames[] = {frame}, *jobs[] = {job};
	size_t written;
	const codec_reduction one = {frames, &written, jobs, 1, CODEC_REDUCE_SUM};
	uint64_t checksum;
	codec_plan plan;

	(void)unused;
	fill();
	assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
	with.into = CODEC_INTO_FLOAT32;
	assert_int_equal(codec_decode_open(frame, written, &to, &with, job, SCRATCH, &plan), CODEC_OK);
#define SOME(from, n)                                                                                                  \
	codec_reduce_blocks(&one, &to, &with, &(codec_range){.first = from, .count = n}, &checksum, work, SCRATCH)
	assert_int_equal(SOME(2, UINT64_MAX), CODEC_BAD_ARGUMENT);
	assert_int_equal(SOME(0, plan.nblocks + 1), CODEC_BAD_ARGUMENT);
	assert_int_equal(SOME(plan.nblocks + 1, 0), CODEC_BAD_ARGUMENT);
	assert_true(all_seven(out));
	assert_int_equal(SOME(plan.nblocks, 0), CODEC_OK);
	assert_int_equal(SOME(0, plan.nblocks), CODEC_OK);
	free(job);
	free(work);
}

/* codec_encode_plan does not depend on the caller's rounding mode, and restores it. */
static void test_plans_ignore_rounding_mode(void **unused)
{
	static const int MODES[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
	codec_spec spec = spec_of(CODEC_TERNARY);
	codec_tensor t = tensor(x, N);
	codec_context with = context();
	size_t written;
	codec_plan plan;
	float scale = 0;

	(void)unused;
	memset(x, 0, sizeof x);
	spec.scale = 1.3e-7f; /* a scale between two subnormals of float16 */
	t.dtype = CODEC_FLOAT16;
	t.nbytes = 2 * N;
	assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
	for (int i = 0; i < 4; i++) {
		codec_view view = {.struct_nbytes = sizeof view};
		codec_status planned, read;

		assert_int_equal(fesetround(MODES[i]), 0);
		planned = codec_encode_plan(&spec, &t, &with, scratch, sizeof scratch, &plan);
		codec_job_view(scratch, &view);
		read = codec_decode_plan(frame, 200, written, &with, scratch, sizeof scratch, &plan);
		assert_int_equal(fegetround(), MODES[i]);
		fesetround(FE_TONEAREST);
		assert_int_equal(planned, CODEC_OK);
		assert_int_equal(read, CODEC_OK);
		assert_true(view.scale > 0 && (!i || view.scale == scale));
		scale = view.scale;
	}
}

/* A scan precedes the first block with CODEC_VERIFY_FIRST, or if scales are computed from the scan. */
static void test_one_pass_saves_scan(void **unused)
{
	static const uint32_t codec_ids[] = {CODEC_FLOAT8, CODEC_QUANTIZE, CODEC_SIGN};
	codec_tensor t = tensor(x, N);
	codec_context with = context();
	codec_plan plan;

	(void)unused;
	fill();
	with.residual = residual;
	for (int i = 0; i < 3; i++) {
		codec_spec spec = spec_of(codec_ids[i]);

		for (uint32_t flags = 0; flags <= CODEC_VERIFY_FIRST; flags += CODEC_VERIFY_FIRST) {
			int scans = flags || spec.codec == CODEC_SIGN; /* SIGN's scale needs the whole tensor */

			with.flags = flags;
			assert_int_equal(codec_encode_open(&spec, &t, frame, sizeof frame, &with, scratch,
							   sizeof scratch, &plan),
					 CODEC_OK);
			assert_int_equal(plan.nscans > 0, scans);
		}
	}
}

/*
 * DELTA: blocks can be checked in some ranges and then decoded in place in different ranges, or their changes copied if
 * they are few. Each step requires the base.
 */
static void test_delta_is_decoded_in_place_by_ranges(void **unused)
{
	static const codec_range CHECKS[] = {{.count = 25}, {.first = 25, .count = 15}};
	static const codec_range WRITES[] = {{.first = 30, .count = 10}, {.count = 1}, {.first = 1, .count = 29}};
	codec_spec spec = spec_of(CODEC_DELTA);
	codec_tensor t = tensor(x, N), base = tensor(theta, N), to = tensor(theta, N);
	codec_context with = context(), none = context();
	void *job = malloc(SCRATCH), *work = malloc(SCRATCH);
	const size_t work_nbytes = SCRATCH;
	codec_range range = {.count = 1};
	uint32_t *at = malloc(N * sizeof *at);
	size_t written, count = 0;
	codec_plan plan;

	(void)unused;
	spec.group_size = 1024;
	with.base = &base;
	for (int i = 0; i < 3; i++) { /* checking lists few changes; if there are many, decoding reads them again */
		uint64_t sum = 0;

		fill();
		memcpy(theta, x, sizeof x);
		for (int v = 3; v < N; v += i == 0 ? 501 : i == 1 ? 2 : 1 + v / 40)
			x[v] *= 1.000001f;
		assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
		assert_int_equal(codec_decode_open(frame, written, &to, &none, job, SCRATCH, &plan),
				 CODEC_MISSING_BASE);
		assert_int_equal(codec_decode_open(frame, written, &to, &with, job, SCRATCH, &plan), CODEC_OK);
		assert_int_equal(plan.nblocks, 40);
		assert_int_equal(codec_decode_check(frame, written, &none, job, &range, work, SCRATCH),
				 CODEC_MISSING_BASE);
		for (int k = 0; k < 2; k++) {
			assert_int_equal(codec_decode_changes(job, at, out, N, &count), CODEC_SHORT_OUTPUT);
			range = CHECKS[k];
			assert_int_equal(CHECK(), CODEC_OK);
			sum += range.checksum;
		}
		assert_int_equal(codec_decode_close(&with, job, sum), CODEC_OK);
		assert_int_equal(codec_decode_changes(job, at, out, N, &count), i ? CODEC_SHORT_OUTPUT : CODEC_OK);
		if (!i) {
			assert_int_equal(count, 80);
			for (size_t v = 0; v < count; v++)
				assert_true(at[v] == 3 + 501 * v && out[v] == x[at[v]]);
			assert_int_equal(codec_decode_changes(job, at, out, 79, &count), CODEC_SHORT_OUTPUT);
			assert_int_equal(codec_decode_changes(job, NULL, out, N, &count), CODEC_BAD_ARGUMENT);
			assert_int_equal(codec_decode_changes(job, at, out, N, NULL), CODEC_BAD_ARGUMENT);
			assert_int_equal(codec_decode_changes(NULL, at, out, N, &count), CODEC_BAD_ARGUMENT);
		}
		for (int k = 0; k < 3; k++) {
			range = WRITES[k];
			assert_int_equal(DECODE_BLOCKS(&to), CODEC_OK);
			sum -= range.checksum;
		}
		assert_int_equal(sum, 0);
		assert_memory_equal(theta, x, sizeof x);
	}
	assert_int_equal(codec_decode_open(frame, written, &to, &with, job, SCRATCH, &plan), CODEC_OK);
	range = (codec_range){.count = 40};
	{
		codec_status status = CHECK(); /* with the result as base, bit streams may be invalid */

		if (status == CODEC_OK)
			status = codec_decode_close(&with, job, range.checksum);
		assert_int_equal(status, CODEC_ALREADY_APPLIED);
	}
	free(at);
	free(job);
	free(work);
}

/*
 * With the memory of codec_keep_nbytes, decoding uses the symbols of the check: it neither needs nor trusts the coded
 * bytes again. Blocks that were not checked are decoded as without this memory.
 */
static void test_check_keeps_symbols(void **unused)
{
	static const codec_range CHECKS[] = {{2, 1, 0, 0, 0}, {0, 1, 0, 0, 0}};
	codec_spec spec = spec_of(CODEC_LOSSLESS);
	codec_tensor t = tensor(x, N), to = tensor(out, N);
	codec_context with = context(), unchecked = context();
	codec_info info = {.struct_nbytes = sizeof info};
	size_t written, job_nbytes, work_nbytes, kept, need;
	codec_range range, all = {0};
	codec_plan plan;
	uint8_t *changed;
	void *job, *work;

	(void)unused;
	fill();
	unchecked.flags |= CODEC_NO_CHECKSUM;
	assert_int_equal(ENCODE(frame, sizeof frame, NULL), CODEC_OK);
	assert_int_equal(codec_inspect(frame, written, &info), CODEC_OK);
	assert_int_equal(codec_keep_nbytes(NULL, &kept), CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_keep_nbytes(&info, NULL), CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_keep_nbytes(&info, &kept), CODEC_OK);
	assert_true(kept >= N);
	assert_int_equal(codec_job_nbytes(&spec, &t, &job_nbytes, &work_nbytes), CODEC_OK);
	job = malloc(job_nbytes + kept);
	work = malloc(work_nbytes);
	changed = malloc(written);
	memcpy(changed, frame, written);
	assert_int_equal(codec_decode_open(frame, written, &to, &with, job, job_nbytes + kept, &plan), CODEC_OK);
	assert_int_equal(plan.nblocks, 3);
	for (int k = 0; k < 2; k++) {
		range = CHECKS[k];
		assert_int_equal(codec_decode_check(frame, written, &with, job, &range, work, work_nbytes), CODEC_OK);
	}
	/* words of the last block */
	memset(changed + info.regions_offset + (written - info.regions_offset) * 5 / 6, 0x5a, 64);
	all.count = plan.nblocks;
	assert_int_equal(codec_decode_blocks(changed, written, &to, &unchecked, job, &all, work, work_nbytes),
			 CODEC_OK);
	assert_memory_equal(out, x, sizeof x);
	assert_int_equal(codec_decode_changes(job, NULL, NULL, 0, &need), CODEC_BAD_ARGUMENT); /* only of DELTA */
	/* a directory in which the first region is shorter than what was checked */
	for (int i = 0; i < 4; i++)
		changed[info.directory_offset + i] = (uint8_t)((info.regions_offset / 8 + 2) >> 8 * i);
	assert_int_equal(codec_decode_blocks(changed, written, &to, &unchecked, job, &all, work, work_nbytes),
			 CODEC_BAD_REGION);
	free(job);
	/* one call */
	assert_int_equal(codec_scratch(&spec, &t, &need), CODEC_OK);
	job = malloc(need + kept);
	memset(out, 0, sizeof out);
	with.flags |= CODEC_VERIFY_FIRST;
	assert_int_equal(codec_decode(frame, written, &to, &with, job, need + kept), CODEC_OK);
	assert_memory_equal(out, x, sizeof x);
	free(job);
	free(work);
	free(changed);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_check_only_writes_nothing),
		cmocka_unit_test(test_rejects_ranges_beyond_blocks),
		cmocka_unit_test(test_plans_ignore_rounding_mode),
		cmocka_unit_test(test_job_size_of_plan_suffices),
		cmocka_unit_test(test_one_pass_saves_scan),
		cmocka_unit_test(test_delta_is_decoded_in_place_by_ranges),
		cmocka_unit_test(test_check_keeps_symbols),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
