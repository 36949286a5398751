/* check.c - decode a frame in all ways, and compare the results. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "codec/codec_engine.h"
#include "exact/round.h"
#include "exact/wire.h"

#define ISAS 8
#define FRAMES 4

void check_failed(const char *file, int line, const char *what, int64_t a, int64_t b)
{
	static int seen[4096];

	if (!getenv("FUZZ_GO_ON") || !seen[line & 4095]++)
		fprintf(stderr, "%s:%d: broken: %s (%lld, %lld)\n", file, line, what, (long long)a, (long long)b);
	if (!getenv("FUZZ_GO_ON"))
		abort();
}

struct exact exact(size_t n, struct source *s)
{
	size_t shift = noise(s) & 7;
	struct exact e = {.n = n, .base = malloc(n + shift)};

	if (!e.base)
		shift = 0; /* malloc(0) may return NULL: an empty span */
	e.p = e.base ? (uint8_t *)e.base + shift : NULL;
	return e;
}

void exact_free(struct exact *e)
{
	free(e->base);
	e->base = NULL;
}

int check_usable(uint32_t isa)
{
	static int limit = -1;

	if (limit < 0)
		limit = getenv("FUZZ_ISAS") ? atoi(getenv("FUZZ_ISAS")) : ISAS;
	return isa < (uint32_t)limit && codec_isa_name(isa) && codec_isa_usable(isa);
}

uint32_t check_some_isa(struct source *s)
{
	uint32_t isa;

	do
		isa = (uint32_t)below(s, ISAS);
	while (!check_usable(isa));
	return isa + 1;
}

float check_widen(const void *values, uint32_t dtype, uint64_t i)
{
	uint32_t u = 0;

	if (dtype == CODEC_FLOAT32)
		memcpy(&u, (const char *)values + 4 * i, 4);
	else
		memcpy(&u, (const char *)values + 2 * i, 2);
	if (dtype == CODEC_FLOAT16)
		u = round_from_float16((uint16_t)u);
	return round_float(dtype == CODEC_BFLOAT16 ? u << 16 : u);
}

static int same(float a, float b)
{
	return a == b || (a != a && b != b);
}

static int is_float(uint32_t dtype)
{
	return dtype == CODEC_FLOAT32 || dtype == CODEC_BFLOAT16 || dtype == CODEC_FLOAT16;
}

/* A way to decode. */
struct way {
	uint32_t flags, into, isa; /* isa: 1 + index */
	float weight, divide;
	enum { AT_ONCE, STEPS, CHECKED_STEPS } steps;
};

/* Result of decoding in one way. */
struct result {
	codec_status status;
	codec_fault fault;
	struct exact out;
	int untouched; /* 1: the destination is unchanged */
};

/* A frame and its properties. */
struct subject {
	struct given g;
	codec_info info;
	struct source *s;
	struct exact frame;
};

static void tensor_like(const codec_info *info, uint32_t dtype, codec_tensor *t)
{
	*t = (codec_tensor){.struct_nbytes = sizeof *t, .dtype = dtype, .rank = info->rank};
	memcpy(t->shape, info->shape, sizeof t->shape);
	t->nbytes = info->n * codec_dtype_nbytes(dtype);
}

/* Initialize a destination with float32 values for which sums are ordinary numbers. */
static void fill(uint8_t *p, size_t nbytes)
{
	for (size_t i = 0; i < nbytes; i++)
		p[i] = (uint8_t)(i % 4 == 3 ? 0x3f | (i >> 3 & 0x80) : i * 37);
}

static int is_filled(const uint8_t *p, size_t nbytes)
{
	for (size_t i = 0; i < nbytes; i++)
		if (p[i] != (uint8_t)(i % 4 == 3 ? 0x3f | (i >> 3 & 0x80) : i * 37))
			return 0;
	return 1;
}

static float filled(uint64_t i)
{
	uint8_t b[4];
	float x;

	for (size_t k = 0; k < 4; k++)
		b[k] = (uint8_t)(k == 3 ? 0x3f | ((4 * i + k) >> 3 & 0x80) : (4 * i + k) * 37);
	memcpy(&x, b, 4);
	return x;
}

static codec_context context_of(const struct subject *f, const struct way *w, codec_fault *fault)
{
	return (codec_context){.struct_nbytes = sizeof(codec_context),
			       .flags = w->flags,
			       .isa = w->isa,
			       .into = w->into,
			       .weight = w->weight,
			       .divide = w->divide,
			       .max_nbytes = TENSOR_LIMIT,
			       .codebooks = f->g.book,
			       .ncodebooks = f->g.book != NULL,
			       .metric = f->g.metric,
			       .fault = fault};
}

/* Operation of a step on blocks. */
enum { CHECK_BLOCKS, DECODE_BLOCKS };

/* Process blocks in ranges of any size, in any order. Returns the status of the lowest failing range. */
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

/* Decode in steps: open, blocks, close. `check`: check all blocks before decoding them. */
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
	job = exact(job_nbytes, f->s);
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

static struct result decode(const struct subject *f, struct way w)
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
		scratch = exact(need, f->s);
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

/* Decode with every instruction set, and check that status, fault and bytes are equal. */
static struct result decode_everywhere(const struct subject *f, struct way w)
{
	struct result first = {0};

	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		struct result r;

		if (!check_usable(isa))
			continue;
		w.isa = isa + 1;
		r = decode(f, w);
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

/* Decode in another way, and check that the status is equal, and on success the bytes. */
static void agree(const struct subject *f, const struct result *plain, struct way w)
{
	struct result r;

	w.isa = check_some_isa(f->s);
	r = decode(f, w);
	CHECK(r.status == plain->status, plain->status, r.status);
	if (r.status == CODEC_OK && plain->status == CODEC_OK)
		CHECK(!r.out.n || !memcmp(r.out.p, plain->out.p, r.out.n), w.flags, w.steps);
	exact_free(&r.out);
}

static void check_flags(const struct subject *f, const struct result *plain)
{
	struct way w = {
		.flags = CODEC_NO_CHECKSUM, .isa = check_some_isa(f->s), .steps = below(f->s, 2) ? STEPS : AT_ONCE};
	codec_status verified = codec_verify(f->frame.p, f->frame.n);
	struct result r;

	CHECK(plain->status != CODEC_OK || verified == CODEC_OK, plain->status, verified);
	if (plain->status >= CODEC_UNKNOWN_CODEBOOK)
		CHECK(verified == CODEC_OK, plain->status, verified);
	agree(f, plain, (struct way){.flags = CODEC_VERIFY_FIRST});
	agree(f, plain, (struct way){.flags = CODEC_NONTEMPORAL, .isa = w.isa, .steps = w.steps});
	agree(f, plain, (struct way){.steps = STEPS});
	agree(f, plain, (struct way){.steps = CHECKED_STEPS});
	/*
	 * Without checksums the result is equal, except for errors that only checksums detect, or that are the caller's
	 * if the frame is not damaged.
	 */
	w.flags |= one_in(f->s, 4) && !w.steps ? CODEC_VERIFY_FIRST : 0;
	r = decode(f, w);
	if (plain->status != r.status)
		CHECK(plain->status == CODEC_CHECKSUM || (verified != CODEC_OK && (r.status < 30 || r.status >= 60)),
		      plain->status, r.status);
	else if (r.status == CODEC_OK)
		CHECK(!r.out.n || !memcmp(r.out.p, plain->out.p, r.out.n), w.flags, w.steps);
	exact_free(&r.out);
}

/*
 * Decode without codebook and metric, and with other metrics: an intact frame gives the error for what is missing, a
 * damaged frame that of the damage.
 */
static void check_missing(const struct subject *f, const struct result *plain)
{
	codec_status verified = codec_verify(f->frame.p, f->frame.n);
	codec_metric other[8], *last = other;
	struct subject bare = *f;
	struct result r;
	int nothing;

	bare.g.book = NULL;
	bare.g.metric = NULL;
	r = decode(&bare, (struct way){.isa = check_some_isa(f->s), .flags = CODEC_VERIFY_FIRST});
	nothing = f->info.codebook_id == 0 && !(f->info.spec.codec == CODEC_TRUNCATE &&
						f->info.spec.variant == CODEC_LEVEL_CODING_SHARED && !f->info.stored);
	if (plain->status == CODEC_OK)
		CHECK(nothing ? r.status == CODEC_OK
			      : r.status == CODEC_UNKNOWN_CODEBOOK || r.status == CODEC_MISSING_STATE,
		      nothing, r.status);
	else
		CHECK(r.status != CODEC_OK, plain->status, r.status);
	if (verified != CODEC_OK)
		CHECK(r.status >= 30 && r.status < CODEC_UNKNOWN_CODEBOOK, verified, r.status);
	exact_free(&r.out);
	if (!f->g.metric)
		return;
	for (const codec_metric *t = f->g.metric; t; t = t->next, last++) {
		*last = *t;
		last->theta_term *= 64;
		last->m_term *= 0.0625f;
		last->next = t->next ? last + 1 : NULL;
	}
	bare = *f;
	bare.g.metric = other;
	r = decode(&bare, (struct way){.isa = check_some_isa(f->s), .flags = CODEC_VERIFY_FIRST});
	if (plain->status == CODEC_OK)
		CHECK(r.status == CODEC_OK || r.status == CODEC_OTHER_STATE, plain->status, r.status);
	exact_free(&r.out);
}

/* Decode to float32, and compare with values computed from the frame's dtype. */
static void check_floats(const struct subject *f, const struct result *plain)
{
	struct way w = {.into = 1 + (uint32_t)below(f->s, 3), .steps = below(f->s, 3)};
	int ternary = f->info.spec.codec == CODEC_TERNARY;
	struct result r;

	w.flags = !w.steps && below(f->s, 2) ? CODEC_VERIFY_FIRST : 0;
	w.flags |= below(f->s, 2) ? CODEC_NONTEMPORAL : 0;
	w.weight = below(f->s, 2) ? 1 : round_float((uint32_t)noise(f->s) >> 2);
	w.divide = one_in(f->s, 3) ? 3 : 0;
	if (one_in(f->s, 3) && !w.divide)
		w.flags |= CODEC_UNSCALED | (one_in(f->s, 2) ? CODEC_RESCALE : 0);
	if (!is_float(f->info.dtype)) {
		r = decode(f, w);
		CHECK(plain->status == CODEC_OK ? r.status == CODEC_BAD_DTYPE : r.status != CODEC_OK, plain->status,
		      r.status);
		exact_free(&r.out);
		return;
	}
	r = decode_everywhere(f, w);
	CHECK(r.status == plain->status, plain->status, r.status);
	for (uint64_t i = 0; i < f->info.n && r.status == CODEC_OK && plain->status == CODEC_OK; i++) {
		float y = check_widen(plain->out.p, f->info.dtype, i), got, was = filled(i);

		memcpy(&got, r.out.p + 4 * i, 4);
		if (ternary && w.flags & CODEC_UNSCALED && !f->info.stored) {
			if (y == 0 || w.into != CODEC_INTO_FLOAT32)
				continue; /* a scale of 0 hides the codes */
			y = w.flags & CODEC_RESCALE ? y : y > 0 ? 1 : -1;
		}
		if (w.into == CODEC_INTO_ADD) {
			y = w.weight * y;
			y = was + y;
		} else if (w.into == CODEC_INTO_MAX) {
			y = y != y || was != was ? NAN : y > was ? y : was;
		}
		y = w.divide > 0 ? y / w.divide : y;
		CHECK(same(y, got), w.into, i);
		if (!same(y, got))
			break;
	}
	exact_free(&r.out);
}

/* Check that dividing and rescaling need a float32 destination. */
static void check_results(const struct subject *f)
{
	struct way w = {.steps = below(f->s, 3), .isa = check_some_isa(f->s), .divide = one_in(f->s, 2) ? 3 : 0};
	struct result r;

	w.flags = w.divide > 0 ? 0 : CODEC_RESCALE | (one_in(f->s, 2) ? CODEC_UNSCALED : 0);
	r = decode(f, w);
	CHECK(r.status == CODEC_BAD_ARGUMENT && r.untouched, r.status, w.flags);
	exact_free(&r.out);
}

/* Check that CODEC_CHECK_ONLY gives the status of decoding and writes nothing. Steps reject it. */
static void check_only(const struct subject *f, const struct result *plain)
{
	struct way w = {.flags = CODEC_CHECK_ONLY, .steps = below(f->s, 2), .isa = check_some_isa(f->s)};
	struct result r = decode(f, w);

	CHECK(r.status == (w.steps ? CODEC_BAD_ARGUMENT : plain->status) && r.untouched, plain->status, r.status);
	exact_free(&r.out);
}

/* Check that bytes after a frame are rejected, or ignored with CODEC_ALLOW_SLACK. */
static void check_slack(const struct subject *f, const struct result *plain)
{
	struct subject more = *f;
	struct result r;

	more.frame = exact(f->frame.n + 1 + below(f->s, 100), f->s);
	memset(more.frame.p, 0x11, more.frame.n);
	memcpy(more.frame.p, f->frame.p, f->frame.n);
	r = decode(&more, (struct way){.isa = check_some_isa(f->s)});
	CHECK(r.status == (plain->status == CODEC_OK ? CODEC_TRAILING : r.status) && r.status, plain->status, r.status);
	exact_free(&r.out);
	if (f->info.frame_nbytes == f->frame.n)
		agree(&more, plain, (struct way){.flags = CODEC_ALLOW_SLACK, .steps = below(f->s, 3)});
	exact_free(&more.frame);
}

/* Check that codec_accumulate equals decoding with CODEC_INTO_ADD. */
static void check_accumulate(const struct subject *f)
{
	struct way w = {.isa = check_some_isa(f->s), .into = CODEC_INTO_ADD, .flags = CODEC_VERIFY_FIRST, .weight = 3};
	struct result r = decode(f, w);
	struct exact out = exact(r.out.n, f->s), scratch;
	codec_context with = context_of(f, &w, NULL);
	codec_tensor t, like;
	codec_status status;
	size_t need;

	with.flags = 0;
	with.into = CODEC_INTO_STORE;
	tensor_like(&f->info, CODEC_FLOAT32, &t);
	tensor_like(&f->info, f->info.dtype, &like);
	fill(out.p, out.n);
	t.data = out.p;
	codec_scratch(&f->info.spec, &like, &need);
	scratch = exact(need, f->s);
	status = codec_accumulate(f->frame.p, f->frame.n, w.weight, &t, &with, scratch.p, scratch.n);
	CHECK(status == r.status && !memcmp(out.p, r.out.p, out.n), r.status, status);
	exact_free(&scratch);
	exact_free(&out);
	exact_free(&r.out);
}

/*
 * Check that short scratch, a lower max_nbytes or another destination gives the right error and leaves the destination
 * unchanged.
 */
static void check_room(const struct subject *f, const struct result *plain)
{
	struct way w = {.isa = check_some_isa(f->s)};
	codec_status status, verified = codec_verify(f->frame.p, f->frame.n);
	codec_context with = context_of(f, &w, NULL);
	struct exact out = exact(f->info.tensor_nbytes + 8, f->s), scratch;
	codec_tensor t, like;
	codec_plan plan;
	size_t need, job_nbytes, work_nbytes;

	tensor_like(&f->info, f->info.dtype, &t);
	like = t;
	fill(out.p, out.n);
	t.data = out.p;
	codec_scratch(&f->info.spec, &like, &need);
	scratch = exact(need - 1, f->s);
	status = codec_decode(f->frame.p, f->frame.n, &t, &with, scratch.p, scratch.n);
	if (plain->status == CODEC_OK && !f->info.stored)
		CHECK(status == CODEC_SHORT_SCRATCH && is_filled(out.p, out.n), status, need);
	exact_free(&scratch);
	codec_job_nbytes(&f->info.spec, &like, &job_nbytes, &work_nbytes);
	scratch = exact(job_nbytes, f->s);
	if (codec_decode_open(f->frame.p, f->frame.n, &t, &with, scratch.p, scratch.n, &plan) == CODEC_OK)
		job_nbytes = plan.job_nbytes;
	exact_free(&scratch);
	scratch = exact(job_nbytes - 1, f->s);
	fill(out.p, out.n);
	status = codec_decode_open(f->frame.p, f->frame.n, &t, &with, scratch.p, scratch.n, &plan);
	if (plain->status == CODEC_OK && !f->info.stored)
		CHECK(status == CODEC_SHORT_SCRATCH && is_filled(out.p, out.n), status, job_nbytes);
	exact_free(&scratch);
	scratch = exact(need, f->s);
	fill(out.p, out.n);
	if (f->info.tensor_nbytes > 1) {
		with.max_nbytes = f->info.tensor_nbytes - 1;
		status = codec_decode(f->frame.p, f->frame.n, &t, &with, scratch.p, scratch.n);
		CHECK(plain->status != CODEC_OK || (status == CODEC_LIMIT && is_filled(out.p, out.n)), plain->status,
		      status);
		with.max_nbytes = TENSOR_LIMIT;
	}
	/* another shape of the same size, or another dtype */
	if (t.rank && t.rank < CODEC_MAX_RANK && below(f->s, 2))
		t.shape[t.rank++] = 1;
	else if (t.rank == CODEC_MAX_RANK || below(f->s, 2))
		t.dtype = t.dtype == CODEC_INT8 ? CODEC_UINT8 : t.dtype == CODEC_UINT16 ? CODEC_FLOAT16 : CODEC_INT8;
	else
		t.shape[t.rank++] = 1;
	fill(out.p, out.n);
	status = codec_decode(f->frame.p, f->frame.n, &t, &with, scratch.p, scratch.n);
	CHECK(is_filled(out.p, out.n), status, 0);
	if (plain->status == CODEC_OK)
		CHECK(status == CODEC_SHAPE_MISMATCH, status, 0);
	else
		CHECK(status != CODEC_OK, plain->status, status);
	if (verified != CODEC_OK)
		CHECK(status >= 30, verified, status);
	exact_free(&scratch);
	exact_free(&out);
}

/* Reduce in steps, as threads do. */
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

/* Check that reducing up to four frames equals decoding them to float32 and combining the values in order. */
static void check_reduce(const struct subject *f, size_t count)
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
		one[i] = decode(f + i, w);
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
		if (ternary && !(fabsf(y) < INFINITY)) /* integer codes can be summed where float values overflow */
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

/*
 * Check that the sums of the codes of up to four frames equal the sums of the signs of decoded values, and that frames
 * that are not TERNARY or have several scales are rejected. A scale of 0 hides the codes from decoded values.
 */
static void check_reduce_codes(const struct subject *f, size_t count)
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
		one[i] = decode(f + i, w);
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

/*
 * Open a frame in memory of its exact size. Returns 0 if its header is rejected or its tensor is too large, after
 * checking that decoding rejects it, too.
 */
static int subject_open(struct subject *f, const struct given *given, struct source *s)
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

/* Check that a frame that was accepted has no more parts than the format allows: jobs have room for so many. */
static void check_parts(const struct subject *f, codec_status status)
{
	uint32_t codec = f->info.spec.codec;
	uint64_t n = f->info.n;
	int rows = codec != CODEC_LOSSLESS && codec != CODEC_TRUNCATE;

	if (status == CODEC_OK)
		CHECK(f->info.nsegments <= (rows ? WIRE_MAX_ROW_PARTS(n) : WIRE_MAX_PARTS(n)), f->info.nsegments, n);
}

codec_status check_frame(const struct given *given, const struct given *others, size_t nothers, struct source *s)
{
	codec_status status = CODEC_BAD_HEADER;
	struct subject f[FRAMES];
	struct result plain;
	size_t count = 1;

	if (subject_open(f, given, s)) {
		plain = decode_everywhere(f, (struct way){0});
		status = plain.status;
		check_parts(f, status);
		if (f->info.spec.codec == CODEC_DELTA) { /* without a base: fuzz_delta.c has frames with theirs */
			CHECK(status == CODEC_MISSING_BASE || (status >= 30 && status < 60) || !f->info.n, status, 0);
			exact_free(&plain.out);
			exact_free(&f->frame);
			return status;
		}
		check_flags(f, &plain);
		check_missing(f, &plain);
		check_floats(f, &plain);
		check_results(f);
		check_only(f, &plain);
		if (one_in(s, 2)) {
			check_room(f, &plain);
			check_slack(f, &plain);
			check_accumulate(f);
		}
		if (is_float(f->info.dtype) && one_in(s, 2)) {
			for (uint64_t more = below(s, FRAMES); more; more--) {
				const struct given *other = nothers && below(s, 3) ? others + below(s, nothers) : given;
				int fits = subject_open(f + count, other, s) && f[count].info.rank == f->info.rank &&
					   is_float(f[count].info.dtype) &&
					   !memcmp(f[count].info.shape, f->info.shape, sizeof f->info.shape);

				/* metric and codebook are common to all frames */
				fits &= other == given || (!f[count].g.metric && !f[count].g.book);
				f[count].g.metric = f->g.metric;
				f[count].g.book = f->g.book;
				if (fits)
					count++;
				else
					exact_free(&f[count].frame);
			}
			check_reduce(f, count);
			check_reduce_codes(f, count);
		}
		exact_free(&plain.out);
	}
	for (size_t i = 0; i < count; i++)
		exact_free(&f[i].frame);
	return status;
}
