/*
 * test_steps.c - test codec_engine.h: order of steps, and arguments that each step requires. Wrong calls must return
 * errors and write nothing.
 */
#include <stdlib.h>

#include "examples.h"
#include "contract.h"

/*
 * Check the offsets of fields that other engines read in a job's memory. abidiff does not check these structs, because
 * no function has a parameter of their types.
 */
#define PLACE(type, field, at) _Static_assert(offsetof(type, field) == (at), #field)
PLACE(codec_model_part, start, 0);
PLACE(codec_model_part, count, 8);
PLACE(codec_model_part, row, 16);
PLACE(codec_model_part, nibbles_at, 20);
PLACE(codec_model_part, base, 24);
PLACE(codec_model_part, mean, 26);
PLACE(codec_model_part, kind, 28);
PLACE(codec_model_part, shifts, 29);
PLACE(codec_row_part, start, 0);
PLACE(codec_row_part, count, 8);
PLACE(codec_row_part, first_block, 16);
PLACE(codec_row_part, first_sum, 24);
PLACE(codec_row_part, group_size, 28);
PLACE(codec_row_part, scale, 32);
_Static_assert(sizeof(codec_model_part) == 32 && sizeof(codec_row_part) == 40, "arrays of them");

/*
 * codec_encode_close rejects ranges that overlap or do not contain all blocks. `all`: an encoded range of all blocks.
 */
static void assert_rejects_other_ranges(const codec_tensor *t, const codec_context *with, void *job, codec_range all)
{
	const codec_range later = {.first = 1, .count = all.count - 1, .at = all.at};
	const codec_range fewer = {.count = all.count - 1, .at = all.at}, twice[] = {fewer, all};
	size_t written;

	assert_int_equal(codec_encode_close(t, frame, sizeof frame, with, job, &later, 1, &written),
			 CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_encode_close(t, frame, sizeof frame, with, job, &fewer, 1, &written),
			 CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_encode_close(t, frame, sizeof frame, with, job, twice, 2, &written), CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_encode_close(t, frame, sizeof frame, with, job, NULL, 1, &written), CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_encode_close(t, frame, sizeof frame, with, job, NULL, 0, &written), CODEC_BAD_ARGUMENT);
}

/*
 * A step is rejected if it is out of order, if it is a decode step of an encode job or vice versa, or if its arguments
 * differ from those with which the job was opened.
 */
static void test_rejects_steps_out_of_order(void **unused)
{
	codec_spec spec = spec_of(CODEC_SIGN);
	codec_tensor t = tensor(x, N), to = tensor(out, N);
	codec_context with = context();
	codec_range range = {0}, one = {.count = 1};
	size_t job_nbytes, work_nbytes, written;
	codec_plan plan;
	void *job, *work;
	uint64_t end;

	(void)unused;
	fill();
	assert_int_equal(codec_job_nbytes(&spec, &t, &job_nbytes, &work_nbytes), CODEC_OK);
	job = calloc(1, job_nbytes);
	work = malloc(work_nbytes);
#define SCAN() codec_encode_scan(&t, &with, job, 0, plan.nscans)
#define START() codec_encode_start(&t, frame, sizeof frame, &with, job, &plan)
#define BLOCKS() codec_encode_blocks(&t, frame, sizeof frame, &with, job, &range, work, work_nbytes)
#define MOVE(n, from, to) codec_encode_move(job, frame, sizeof frame, &(codec_range){.count = n, .at = from}, to)
#define CLOSE() codec_encode_close(&t, frame, sizeof frame, &with, job, &range, 1, &written)
	plan.nscans = 0;
	assert_int_equal(SCAN(), CODEC_BAD_ARGUMENT); /* the memory holds no job */
	assert_int_equal(CLOSE(), CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_decode_close(&with, job, 0), CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_encode_open(&spec, &t, frame, sizeof frame, &with, job, job_nbytes, &plan), CODEC_OK);
	assert_true(plan.nscans > 0);
	range.count = plan.nblocks;
	range.at = plan.regions_at;
	assert_int_equal(BLOCKS(), CODEC_BAD_ARGUMENT); /* blocks cannot be encoded before the scales are computed */
	assert_int_equal(MOVE(range.count, range.at, range.at), CODEC_BAD_ARGUMENT);
	assert_int_equal(CLOSE(), CODEC_BAD_ARGUMENT);
	assert_int_equal(SCAN(), CODEC_OK);
	assert_int_equal(codec_encode_start(&t, frame, 60, &with, job, &plan), CODEC_SHORT_OUTPUT);
	assert_int_equal(START(), CODEC_OK); /* a failed step may be repeated */
	assert_int_equal(START(), CODEC_BAD_ARGUMENT);
	assert_int_equal(SCAN(), CODEC_BAD_ARGUMENT);
	range.at = plan.regions_at;
	assert_int_equal(codec_decode_blocks(frame, sizeof frame, &to, &with, job, &one, work, work_nbytes),
			 CODEC_BAD_ARGUMENT);
	with.residual = residual;
	assert_int_equal(BLOCKS(),
			 CODEC_BAD_ARGUMENT); /* opened without residual: values were not checked for NaN and Inf */
	with.residual = NULL;
	assert_int_equal(BLOCKS(), CODEC_OK);
	range.at += 64;
	assert_int_equal(BLOCKS(), CODEC_OK);
	assert_int_equal(MOVE(range.count, range.at, range.at + 8),
			 CODEC_BAD_ARGUMENT); /* regions cannot be moved to a higher offset */
	assert_int_equal(MOVE(range.count, range.at, plan.regions_at + 4), CODEC_BAD_ARGUMENT);
	assert_int_equal(MOVE(range.count, range.at, plan.regions_at - 8), CODEC_BAD_ARGUMENT);
	assert_int_equal(MOVE(range.count, range.end + 8, range.at),
			 CODEC_BAD_ARGUMENT); /* nothing lies at this offset */
	assert_int_equal(MOVE(0, range.at, range.at), CODEC_BAD_ARGUMENT);
	assert_int_equal(MOVE(range.count + 1, range.at, range.at), CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_encode_move(job, frame, range.end - 8, &range, range.at), CODEC_BAD_ARGUMENT);
	assert_int_equal(codec_encode_move(job, frame, sizeof frame, NULL, range.at), CODEC_BAD_ARGUMENT);
	end = range.end;
	assert_int_equal(codec_encode_move(job, frame, sizeof frame, &range, plan.regions_at), CODEC_OK);
	assert_int_equal(range.at, plan.regions_at);
	assert_int_equal(range.end, end - 64);
	assert_rejects_other_ranges(&t, &with, job, range);
	assert_int_equal(CLOSE(), CODEC_OK);
	assert_int_equal(CLOSE(), CODEC_BAD_ARGUMENT);
	assert_int_equal(BLOCKS(), CODEC_BAD_ARGUMENT);

	with.flags = CODEC_VERIFY_FIRST;
	assert_int_equal(codec_decode_open(frame, written, &to, &with, job, job_nbytes, &plan), CODEC_BAD_ARGUMENT);
	with.flags = 0;
	assert_int_equal(codec_decode_open(frame, written, &to, &with, job, job_nbytes, &plan), CODEC_OK);
	assert_int_equal(BLOCKS(), CODEC_BAD_ARGUMENT);
	assert_int_equal(CHECK(), CODEC_OK);
	assert_int_equal(codec_decode_close(&with, job, range.checksum), CODEC_OK);
	assert_true(all_seven(out));
	assert_int_equal(DECODE_BLOCKS(NULL), CODEC_BAD_ARGUMENT);
	assert_int_equal(DECODE_BLOCKS(&to), CODEC_OK);
	assert_int_equal(codec_decode_close(&with, job, range.checksum), CODEC_OK);
	assert_int_equal(codec_decode_close(&with, job, range.checksum + 1), CODEC_CHECKSUM);
	free(job);
	free(work);
}

/* Every step that needs a metric rejects a context without one. */
static void test_steps_require_metric(void **unused)
{
	codec_spec spec = spec_of(CODEC_TRUNCATE);
	codec_tensor t = tensor(x, N), state = tensor(theta, N), to = tensor(out, N);
	codec_metric metric = {.struct_nbytes = sizeof metric, .theta_term = 3, .theta = &state};
	codec_context with = context();
	codec_range range = {0};
	size_t written;
	codec_plan plan;
	void *job = malloc(SCRATCH), *work = malloc(SCRATCH);
	const size_t job_nbytes = SCRATCH, work_nbytes = SCRATCH;

	(void)unused;
	fill();
	spec.variant = CODEC_LEVEL_CODING_SHARED;
	with.metric = &metric;
	assert_int_equal(codec_encode_open(&spec, &t, frame, sizeof frame, &with, job, job_nbytes, &plan), CODEC_OK);
	range.count = plan.nblocks;
	range.at = plan.regions_at;
	with.metric = NULL;
	assert_int_equal(BLOCKS(), CODEC_MISSING_STATE);
	with.metric = &metric;
	assert_int_equal(BLOCKS(), CODEC_OK);
	with.metric = NULL;
	with.residual = residual;
	assert_int_equal(CLOSE(), CODEC_MISSING_STATE);
	assert_true(all_seven(residual));
	with.metric = &metric;
	assert_int_equal(CLOSE(), CODEC_OK);
	with.residual = NULL;
	assert_int_equal(codec_decode_open(frame, written, &to, &with, job, job_nbytes, NULL), CODEC_OK);
	with.metric = NULL;
	assert_int_equal(CHECK(), CODEC_MISSING_STATE);
	assert_int_equal(DECODE_BLOCKS(&to), CODEC_MISSING_STATE);
	assert_true(all_seven(out));
	free(job);
	free(work);
}

/* If the capacity is below the largest possible frame, steps with a residual fail before the residual is written. */
static void test_steps_with_residual_require_bound(void **unused)
{
	static const codec_spec SPECS[] = {LOSSY_EXAMPLES(EXAMPLE_SPEC)};
	codec_tensor t = tensor(x, N);
	codec_context with = context();
	size_t job_nbytes, work_nbytes, bound;

	(void)unused;
	fill();
	with.flags = CODEC_VERIFY_FIRST;
	with.residual = residual;
	for (size_t i = 0; i < sizeof SPECS / sizeof *SPECS; i++) {
		const codec_spec spec = SPECS[i];
		codec_status status;
		codec_plan plan;
		void *job, *work;

		if (!example_has(&spec, CODEC_TRAIT_ROWS)) /* the others may store the tensor, in fewer bytes */
			continue;
		codec_bound(&spec, &t, &bound);
		codec_job_nbytes(&spec, &t, &job_nbytes, &work_nbytes);
		job = malloc(job_nbytes);
		work = malloc(work_nbytes);
		for (size_t room = bound; room > bound / 4; room -= bound / 7) {
			status = codec_encode_open(&spec, &t, frame, room, &with, job, job_nbytes, &plan);
			if (status == CODEC_OK) {
				assert_int_equal(codec_encode_scan(&t, &with, job, 0, plan.nscans), CODEC_OK);
				status = codec_encode_start(&t, frame, room, &with, job, &plan);
			}
			if (status == CODEC_OK) {
				codec_range all = {.count = plan.nblocks, .at = plan.regions_at};

				status = codec_encode_blocks(&t, frame, plan.regions_at + plan.region_bound - 8, &with,
							     job, &all, work, work_nbytes);
			}
			assert_int_equal(status, CODEC_SHORT_OUTPUT);
			assert_true(all_seven(residual));
		}
		free(job);
		free(work);
	}
}

/*
 * If a step fails because the capacity is below the largest possible frame, no other step may follow, but the same step
 * may be repeated with a larger capacity.
 */
static void test_step_can_be_repeated_with_more_room(void **unused)
{
	codec_tensor t = tensor(x, N);
	codec_context with = context(), plain = context();
	void *job = malloc(SCRATCH), *work = malloc(SCRATCH);
	const size_t work_nbytes = SCRATCH;
	codec_range range;

	(void)unused;
	for (int i = 0; i < 2; i++) {
		codec_spec spec = spec_of(i ? CODEC_FLOAT8 : CODEC_TERNARY);
		codec_status status;
		size_t written, room;
		codec_plan plan;

		fill();
		spec.variant = i ? 0 : CODEC_TERNARY_ENTROPY;
		spec.options = i ? CODEC_OPTION_ENTROPY : 0;
		assert_int_equal(
			codec_encode(&spec, &t, other, sizeof other, &room, NULL, &plain, scratch, sizeof scratch),
			CODEC_OK);
		with.residual = residual;
		memset(frame, 0xff, sizeof frame);
		status = codec_encode_open(&spec, &t, frame, room, &with, job, SCRATCH, &plan);
		assert_true(plan.nscans || status == CODEC_SHORT_OUTPUT);
		if (plan.nscans) {
			assert_int_equal(SCAN(), CODEC_OK);
			status = codec_encode_start(&t, frame, room, &with, job, &plan);
		}
		assert_int_equal(status, CODEC_SHORT_OUTPUT);
		range = (codec_range){.count = plan.nblocks, .at = plan.regions_at};
		assert_int_equal(BLOCKS(), CODEC_BAD_ARGUMENT);
		assert_int_equal(MOVE(range.count, range.at, range.at), CODEC_BAD_ARGUMENT);
		assert_int_equal(CLOSE(), CODEC_BAD_ARGUMENT);
		assert_true(all_seven(residual));
		if (plan.nscans)
			assert_int_equal(START(), CODEC_OK);
		else
			assert_int_equal(codec_encode_open(&spec, &t, frame, sizeof frame, &with, job, SCRATCH, &plan),
					 CODEC_OK);
		assert_int_equal(BLOCKS(), CODEC_OK);
		assert_int_equal(CLOSE(), CODEC_OK);
		assert_int_equal(written, room);
		assert_memory_equal(frame, other, written);
	}
	free(job);
	free(work);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_rejects_steps_out_of_order),
		cmocka_unit_test(test_steps_require_metric),
		cmocka_unit_test(test_steps_with_residual_require_bound),
		cmocka_unit_test(test_step_can_be_repeated_with_more_room),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
