/* check_reduce.c - reduce frames, and compare the results with decoding each frame and adding the values. */
#include <math.h>
#include <string.h>

#include "codec/codec_engine.h"
#include "subject.h"

/* Reduce `count` frames with the steps of codec_engine.h, as callers with several threads do. */
static codec_status reduce_steps(const struct subject *f, size_t count, uint32_t op, codec_tensor *t, uint32_t isa)
{
	struct way w = {.isa = isa, .into = op == CODEC_REDUCE_CODES ? CODEC_INTO_CODES : CODEC_INTO_FLOAT32};
	const void *frames[FRAMES], *jobs[FRAMES];
	struct exact job[FRAMES] = {0}, work;
	size_t nbytes[FRAMES], job_nbytes, work_nbytes, most = 0;
	const codec_reduction all = {frames, nbytes, jobs, count, op};
	uint64_t checksums[FRAMES], total[FRAMES] = {0}, blocks = UINT64_MAX, half;
	codec_context with = context_of(f, &w, NULL);
	codec_status status = CODEC_OK;
	codec_plan plan;

	for (size_t i = 0; i < count && status == CODEC_OK; i++) {
		codec_tensor like;

		tensor_like(&f[i].info, f[i].info.dtype, &like);
		codec_job_nbytes(&f[i].info.spec, &like, &job_nbytes, &work_nbytes);
		job[i] = exact(job_nbytes, f->s);
		frames[i] = f[i].frame.p;
		nbytes[i] = f[i].frame.n;
		jobs[i] = job[i].p;
		with = context_of(f + i, &w, NULL);
		status = codec_decode_open(frames[i], nbytes[i], t, &with, job[i].p, job[i].n, &plan);
		blocks = plan.nblocks < blocks ? plan.nblocks : blocks;
		most = work_nbytes > most ? work_nbytes : most;
	}
	if (status == CODEC_OK) {
		work = exact(most, f->s);
		with = context_of(f, &w, NULL);
		half = below(f->s, blocks + 1);
		for (int part = 0; part < 2 && status == CODEC_OK; part++) {
			codec_range range = {.first = part ? half : 0, .count = part ? blocks - half : half};

			status = codec_reduce_blocks(&all, t, &with, &range, checksums, work.p, work.n);
			for (size_t i = 0; i < count && status == CODEC_OK; i++)
				total[i] += checksums[i];
		}
		for (size_t i = 0; i < count && status == CODEC_OK; i++)
			status = codec_decode_close(&with, jobs[i], total[i]);
		exact_free(&work);
	}
	for (size_t i = 0; i < count; i++)
		exact_free(job + i);
	return status;
}

/* Return 1 if n floats are finite. */
static int are_numbers(const uint8_t *p, uint64_t n)
{
	float x = 0;

	for (uint64_t i = 0; i < n && fabsf(x) < INFINITY; i++)
		memcpy(&x, p + 4 * i, 4);
	return fabsf(x) < INFINITY;
}

void check_reduce(const struct subject *f, size_t count)
{
	struct way w = {.isa = check_some_isa(f->s), .into = CODEC_INTO_FLOAT32, .flags = CODEC_VERIFY_FIRST};
	uint32_t op = (uint32_t)below(f->s, 3);
	const void *frames[FRAMES];
	struct exact out, scratch, again;
	struct result one[FRAMES];
	size_t nbytes[FRAMES], need = 0;
	codec_context with = context_of(f, &w, NULL);
	codec_status status, step, first = CODEC_OK;
	int all = 1, ternary = 1;
	codec_tensor t;

	for (size_t i = 0; i < count; i++) {
		one[i] = decode_in(f + i, w);
		all &= one[i].status == CODEC_OK;
		ternary &= f[i].info.spec.codec == CODEC_TERNARY;
		frames[i] = f[i].frame.p;
		nbytes[i] = f[i].frame.n;
	}
	tensor_like(&f->info, CODEC_FLOAT32, &t);
	out = exact(t.nbytes, f->s);
	fill(out.p, out.n);
	t.data = out.p;
	for (size_t i = 0; i < count && first == CODEC_OK; i++)
		first = one[i].status;
	status = codec_reduce_scratch(frames, nbytes, count, &need);
	CHECK(status == CODEC_OK || first != CODEC_OK, status, first);
	if (status == CODEC_OK) {
		scratch = exact(need, f->s);
		status = codec_reduce(frames, nbytes, count, op, &t, &with, scratch.p, scratch.n);
		CHECK(status == first, first, status);
		exact_free(&scratch);
		if (status == CODEC_OK) {
			scratch = exact(need - 1, f->s);
			again = exact(t.nbytes, f->s);
			fill(again.p, again.n);
			t.data = again.p;
			step = codec_reduce(frames, nbytes, count, op, &t, &with, scratch.p, scratch.n);
			CHECK(step == CODEC_SHORT_SCRATCH && is_filled(again.p, again.n), step, need);
			exact_free(&scratch);
			scratch = exact(need, f->s);
			with.flags |= CODEC_CHECK_ONLY;
			step = codec_reduce(frames, nbytes, count, op, &t, &with, scratch.p, scratch.n);
			CHECK(step == CODEC_OK && is_filled(again.p, again.n), step, op);
			with.flags = CODEC_NONTEMPORAL | CODEC_FINITE;
			step = codec_reduce(frames, nbytes, count, op, &t, &with, scratch.p, scratch.n);
			if (are_numbers(out.p, f->info.n))
				CHECK(step == CODEC_OK && (!out.n || !memcmp(out.p, again.p, out.n)), step, op);
			else
				CHECK(step == CODEC_NONFINITE, step, op);
			step = reduce_steps(f, count, op, &t, w.isa);
			if (step != CODEC_BAD_ARGUMENT)
				CHECK(step == CODEC_OK && (!out.n || !memcmp(out.p, again.p, out.n)), step, op);
			exact_free(&again);
			exact_free(&scratch);
		}
	}
	if (status != CODEC_OK)
		CHECK(is_filled(out.p, out.n), status, count);
	for (uint64_t i = 0; all && status == CODEC_OK && i < f->info.n; i++) {
		float y = 0, got;

		for (size_t k = 0; k < count; k++) {
			float x;

			memcpy(&x, one[k].out.p + 4 * i, 4);
			if (k && op == CODEC_REDUCE_MAX)
				y = x != x || y != y ? NAN : x > y ? x : y;
			else
				y = k ? y + x : x;
		}
		y = op == CODEC_REDUCE_MEAN ? y / (float)count : y;
		memcpy(&got, out.p + 4 * i, 4);
		if (ternary && !(fabsf(y) < INFINITY)) /* sums of integer codes exist where floats overflow */
			continue;
		CHECK(same(y, got), op, i);
		if (!same(y, got))
			break;
	}
	exact_free(&out);
	for (size_t i = 0; i < count; i++)
		exact_free(&one[i].out);
}

/* Return integer i of a tensor of int8, int16 or int32. */
static int32_t integer_at(const codec_tensor *t, uint64_t i)
{
	const char *p = (const char *)t->data + i * codec_dtype_nbytes(t->dtype);
	int16_t half;
	int32_t x;

	if (t->dtype == CODEC_INT8)
		return *(const int8_t *)p;
	memcpy(&half, p, sizeof half);
	if (t->dtype == CODEC_INT16)
		return half;
	memcpy(&x, p, sizeof x);
	return x;
}

void check_reduce_codes(const struct subject *f, size_t count)
{
	const uint32_t dtypes[] = {CODEC_INT8, CODEC_INT16, CODEC_INT32};
	struct way w = {.isa = check_some_isa(f->s), .into = CODEC_INTO_FLOAT32};
	codec_context with = context_of(f, &w, NULL);
	codec_status status, first = CODEC_OK;
	struct result one[FRAMES];
	const void *frames[FRAMES];
	size_t nbytes[FRAMES], need;
	struct exact out, scratch;
	int same_scale = 1;
	codec_tensor t;

	for (size_t i = 0; i < count; i++) {
		one[i] = decode_in(f + i, w);
		first = first == CODEC_OK ? one[i].status : first;
		same_scale &= f[i].info.spec.codec == CODEC_TERNARY &&
			      (!f->info.n || (f[i].info.scale >= 0 && f[i].info.scale == f->info.scale));
		frames[i] = f[i].frame.p;
		nbytes[i] = f[i].frame.n;
	}
	tensor_like(&f->info, dtypes[below(f->s, 3)], &t);
	out = exact(t.nbytes, f->s);
	fill(out.p, out.n);
	t.data = out.p;
	if (codec_reduce_scratch(frames, nbytes, count, &need) == CODEC_OK) {
		with.into = CODEC_INTO_STORE;
		with.flags = CODEC_VERIFY_FIRST;
		scratch = exact(need, f->s);
		status = codec_reduce(frames, nbytes, count, CODEC_REDUCE_CODES, &t, &with, scratch.p, scratch.n);
		exact_free(&scratch);
		CHECK((status == CODEC_OK) == (first == CODEC_OK && same_scale), status, first);
		if (status != CODEC_OK)
			CHECK(is_filled(out.p, out.n), status, count);
		for (int again = 0; again < 2 && status == CODEC_OK; again++) {
			for (uint64_t i = 0; i < f->info.n && f->info.scale > 0; i++) {
				int32_t sum = 0;

				for (size_t k = 0; k < count; k++) {
					float x;

					memcpy(&x, one[k].out.p + 4 * i, 4);
					sum += (x > 0) - (x < 0);
				}
				CHECK(integer_at(&t, i) == sum, again, i);
			}
			fill(out.p, out.n);
			if (!again)
				status = reduce_steps(f, count, CODEC_REDUCE_CODES, &t, w.isa);
			CHECK(status == CODEC_OK || status == CODEC_BAD_ARGUMENT, status, again);
		}
	}
	exact_free(&out);
	for (size_t i = 0; i < count; i++)
		exact_free(&one[i].out);
}
