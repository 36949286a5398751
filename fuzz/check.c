/*
 * check.c - decode a frame with all instruction sets, flags and destinations, at once and in steps; compare the
 * results.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "codec/codec_engine.h"
#include "exact/round.h"
#include "exact/wire.h"
#include "subject.h"

#define ISAS 8

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
		shift = 0; /* malloc(0) may return NULL, a valid address of an empty span */
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

/*
 * Decode in the way `w`, and check that the status, and on success the bytes, equal those of `plain`, decoding without
 * options.
 */
static void agree(const struct subject *f, const struct result *plain, struct way w)
{
	struct result r;

	w.isa = check_some_isa(f->s);
	r = decode_in(f, w);
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
	 * Check that decoding without checksums gives the same result, except for errors that only checksums detect,
	 * and errors for wrong arguments, which are reported only if the frame's checksums are correct.
	 */
	w.flags |= one_in(f->s, 4) && !w.steps ? CODEC_VERIFY_FIRST : 0;
	r = decode_in(f, w);
	if (plain->status != r.status)
		CHECK(plain->status == CODEC_CHECKSUM || (verified != CODEC_OK && (r.status < 30 || r.status >= 60)),
		      plain->status, r.status);
	else if (r.status == CODEC_OK)
		CHECK(!r.out.n || !memcmp(r.out.p, plain->out.p, r.out.n), w.flags, w.steps);
	exact_free(&r.out);
}

/*
 * Decode without codebook and metric, and with other metrics: for an intact frame, the error must be the one for the
 * missing argument; for a damaged frame, the one for the damage.
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
	r = decode_in(&bare, (struct way){.isa = check_some_isa(f->s), .flags = CODEC_VERIFY_FIRST});
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
	r = decode_in(&bare, (struct way){.isa = check_some_isa(f->s), .flags = CODEC_VERIFY_FIRST});
	if (plain->status == CODEC_OK)
		CHECK(r.status == CODEC_OK || r.status == CODEC_OTHER_STATE, plain->status, r.status);
	exact_free(&r.out);
}

/* Decode to float32, and compare with values decoded in the frame's dtype and converted here. */
static void check_floats(const struct subject *f, const struct result *plain)
{
	struct way w = {.into = 1 + (uint32_t)below(f->s, 3), .steps = below(f->s, 3)};
	int ternary = f->info.spec.codec == CODEC_TERNARY;
	struct result r;

	w.flags = !w.steps && below(f->s, 2) ? CODEC_VERIFY_FIRST : 0;
	w.flags |= below(f->s, 2) ? CODEC_NONTEMPORAL : 0;
	w.weight = below(f->s, 2) ? 1 : round_float((uint32_t)noise(f->s) >> 2);
	w.divide = one_in(f->s, 3) ? 3 : 0;
	if (ternary && one_in(f->s, 3) && !w.divide)
		w.into = CODEC_INTO_CODES + (uint32_t)below(f->s, 3);
	if (!is_float(f->info.dtype)) {
		r = decode_in(f, w);
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
		if (w.into >= CODEC_INTO_CODES) {
			if (y == 0 || w.into != CODEC_INTO_CODES)
				continue; /* with a scale of 0, values do not show the codes */
			y = y > 0 ? 1 : -1;
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

/* Check that dividing needs a float32 destination that holds values, not codes. */
static void check_results(const struct subject *f)
{
	static const uint32_t INTO[] = {CODEC_INTO_STORE, CODEC_INTO_CODES, CODEC_INTO_ADD_CODES};
	struct way w = {
		.into = INTO[below(f->s, 3)], .steps = below(f->s, 3), .isa = check_some_isa(f->s), .divide = 3};
	struct result r;

	r = decode_in(f, w);
	CHECK(r.status == CODEC_BAD_ARGUMENT && r.untouched, r.status, w.flags);
	exact_free(&r.out);
}

/* Check that CODEC_CHECK_ONLY gives the status of decoding and writes nothing, and that steps reject the flag. */
static void check_only(const struct subject *f, const struct result *plain)
{
	struct way w = {.flags = CODEC_CHECK_ONLY, .steps = below(f->s, 2), .isa = check_some_isa(f->s)};
	struct result r = decode_in(f, w);

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
	r = decode_in(&more, (struct way){.isa = check_some_isa(f->s)});
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
	struct result r = decode_in(f, w);
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
 * Check that scratch that is too small, a max_nbytes below the tensor's size, or a destination of another shape or
 * dtype returns the specified error and leaves the destination unchanged.
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
	/* the destination has another shape of the same size, or another dtype */
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

/*
 * Check that a frame that is accepted has no more parts than the format allows, because jobs have room only for these.
 */
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
		if (f->info.spec.codec == CODEC_DELTA) { /* this fuzzer has no base; fuzz_delta.c decodes with a base */
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

				/* one call passes a single metric and codebook for all frames */
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
