/* subject.c - decode a frame in one call or in steps, with any flags, into any destination. */
#include "codec/codec_engine.h"
#include "subject.h"

/* Operation that step_blocks performs on blocks. */
enum { CHECK_BLOCKS, DECODE_BLOCKS };

/*
 * Check or decode (`what`) all blocks, in ranges of random size and order. Return the status of the lowest range that
 * fails.
 */
static codec_status step_blocks(const struct subject *f, int what, codec_tensor *t, const codec_context *with,
				const void *job, const codec_plan *plan, uint64_t *checksum)
{
	uint64_t n = plan->nblocks, cut[17] = {0}, count = 1 + below(f->s, n < 16 ? n : 16), at = UINT64_MAX;
	codec_status status = CODEC_OK;

	for (uint64_t i = 1; i <= count; i++)
		cut[i] = i == count ? n : cut[i - 1] + below(f->s, n - cut[i - 1] + 1);
	*checksum = 0;
	for (uint64_t i = 0, step = below(f->s, 2) ? 1 : count - 1, r = below(f->s, count); i < count; i++, r += step) {
		struct exact work = exact(plan->work_nbytes, f->s);
		codec_range range = {.first = cut[r % count], .count = cut[r % count + 1] - cut[r % count]};
		codec_status got;

		if (what == CHECK_BLOCKS)
			got = codec_decode_check(f->frame.p, f->frame.n, with, job, &range, work.p, work.n);
		else
			got = codec_decode_blocks(f->frame.p, f->frame.n, t, with, job, &range, work.p, work.n);
		exact_free(&work);
		*checksum += range.checksum;
		if (got != CODEC_OK && r % count < at) {
			status = got;
			at = r % count;
		}
	}
	return status;
}

/* Return the memory with which a check keeps symbols, or 0. */
static size_t some_kept(const struct subject *f)
{
	size_t nbytes;
	codec_status status = codec_keep_nbytes(&f->info, &nbytes);

	CHECK(status == CODEC_OK, status, 0);
	return below(f->s, 2) ? nbytes : 0;
}

/* Decode in steps: open the job, decode the blocks, close the job. `check`: check all blocks before decoding them. */
static codec_status decode_steps(const struct subject *f, int check, codec_tensor *t, const codec_context *with)
{
	codec_context unchecked = *with;
	codec_tensor like;
	struct exact job;
	codec_status status;
	codec_plan plan;
	size_t job_nbytes, work_nbytes;
	uint64_t checksum = 0;

	tensor_like(&f->info, f->info.dtype, &like);
	status = codec_job_nbytes(&f->info.spec, &like, &job_nbytes, &work_nbytes);
	CHECK(status == CODEC_OK, status, 0);
	job = exact(job_nbytes + some_kept(f), f->s);
	status = codec_decode_open(f->frame.p, f->frame.n, t, with, job.p, job.n, &plan);
	if (status == CODEC_OK && plan.nblocks) {
		CHECK(plan.work_nbytes <= work_nbytes && plan.job_nbytes <= job_nbytes, plan.work_nbytes, work_nbytes);
		status = step_blocks(f, check ? CHECK_BLOCKS : DECODE_BLOCKS, t, with, job.p, &plan, &checksum);
		if (status == CODEC_OK)
			status = codec_decode_close(with, job.p, checksum);
		unchecked.flags |= CODEC_NO_CHECKSUM;
		if (check && status == CODEC_OK) {
			status = step_blocks(f, DECODE_BLOCKS, t, &unchecked, job.p, &plan, &checksum);
			CHECK(status == CODEC_OK, status, 0);
		}
	}
	exact_free(&job);
	return status;
}

struct result decode_in(const struct subject *f, struct way w)
{
	struct result r = {0};
	codec_context with = context_of(f, &w, &r.fault);
	struct exact scratch;
	codec_tensor t, like;
	size_t need = 0;

	tensor_like(&f->info, w.into ? CODEC_FLOAT32 : f->info.dtype, &t);
	tensor_like(&f->info, f->info.dtype, &like);
	r.out = exact(t.nbytes, f->s);
	fill(r.out.p, r.out.n);
	t.data = r.out.p;
	if (w.steps) {
		r.status = decode_steps(f, w.steps == CHECKED_STEPS, &t, &with);
	} else {
		codec_status got = codec_scratch(&f->info.spec, &like, &need);

		CHECK(got == CODEC_OK, got, 0);
		scratch = exact(need + some_kept(f), f->s);
		r.status = codec_decode(f->frame.p, f->frame.n, &t, &with, scratch.p, scratch.n);
		CHECK(r.status != CODEC_SHORT_SCRATCH && r.status != CODEC_SHORT_OUTPUT, r.status, need);
		exact_free(&scratch);
	}
	r.untouched = is_filled(r.out.p, r.out.n);
	if (r.status != CODEC_OK && r.status < 30)
		CHECK(r.untouched, r.status, w.flags);
	if (r.status != CODEC_OK && (w.flags & CODEC_VERIFY_FIRST || w.steps == CHECKED_STEPS))
		CHECK(r.untouched, r.status, w.into);
	return r;
}

struct result decode_everywhere(const struct subject *f, struct way w)
{
	struct result first = {0};

	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		struct result r;

		if (!check_usable(isa))
			continue;
		w.isa = isa + 1;
		r = decode_in(f, w);
		if (isa == 0) {
			first = r;
			continue;
		}
		CHECK(r.status == first.status, first.status, r.status);
		if (r.status == CODEC_OK && first.status == CODEC_OK)
			CHECK(!r.out.n || !memcmp(r.out.p, first.out.p, r.out.n), w.into, isa);
		if (r.status >= 30 && r.status == first.status && !w.steps)
			CHECK(!memcmp(&r.fault, &first.fault, sizeof r.fault), r.fault.offset, first.fault.offset);
		exact_free(&r.out);
	}
	return first;
}

int subject_open(struct subject *f, const struct given *given, struct source *s)
{
	codec_context with = {.struct_nbytes = sizeof with, .max_nbytes = TENSOR_LIMIT};
	codec_status status, verified;
	codec_tensor t = {.struct_nbytes = sizeof t};

	*f = (struct subject){.g = *given, .s = s, .info = {.struct_nbytes = sizeof f->info}};
	f->frame = exact(given->nbytes, s);
	if (given->nbytes)
		memcpy(f->frame.p, given->frame, given->nbytes);
	status = codec_inspect(f->frame.p, f->frame.n, &f->info);
	verified = codec_verify(f->frame.p, f->frame.n);
	if (status == CODEC_OK && f->info.tensor_nbytes <= TENSOR_LIMIT)
		return 1;
	if (status != CODEC_OK)
		CHECK(verified == status, status, verified);
	t.dtype = f->info.dtype;
	CHECK(codec_decode(f->frame.p, f->frame.n, &t, &with, NULL, 0) >= 30, status, verified);
	return 0;
}
