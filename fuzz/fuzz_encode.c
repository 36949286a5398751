/*
 * fuzz_encode.c - libFuzzer: encode arbitrary values with arbitrary specs and optional arguments.
 *
 * All instruction sets must write the same frame, in one call and in steps, and it must not exceed codec_bound.
 * Lossless frames must decode to the input. Residuals must equal the encoding error. Calls that fail must leave inputs
 * unchanged. Fuzzer inputs are short: tensors are generated from a few decisions (scales of rows and columns, runs of
 * zeros).
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "codec/codec_engine.h"
#include "exact/round.h"
#include "exact/wire.h"
#include "task.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Result of encoding a task. */
struct result {
	codec_status status;
	struct exact frame, residual;
	size_t nbytes;
};

enum { NONE, APART, IN_PLACE, FEEDBACK, DELTA };

/*
 * Prepare buffers for encoding, with known contents in the residual. end() checks that a failed call left the residual
 * unchanged.
 */
static struct result begin(struct task *k, size_t capacity, int residual, float **at)
{
	struct result r = {.frame = exact(capacity, &k->s)};

	*at = NULL;
	k->with.flags = CODEC_VERIFY_FIRST;
	if (residual == APART) {
		r.residual = exact(4 * k->n, &k->s);
		memset(r.residual.p, 0x5a, r.residual.n);
		*at = (float *)r.residual.p;
	} else if (residual == FEEDBACK || residual == DELTA) {
		r.residual = exact(4 * k->n, &k->s);
		memcpy(r.residual.p, k->error.p, r.residual.n);
		*at = (float *)r.residual.p;
		k->with.flags |= residual == DELTA ? CODEC_DIFFERENCE : CODEC_FEEDBACK;
	} else if (residual == IN_PLACE) {
		r.residual = exact(k->t.nbytes, &k->s);
		if (k->t.nbytes)
			memcpy(r.residual.p, k->x.p, k->t.nbytes);
		*at = (float *)r.residual.p;
		k->t.data = r.residual.p;
	}
	return r;
}

static void end(struct task *k, const struct result *r, int residual)
{
	k->t.data = k->x.p;
	k->with.flags = 0;
	if (r->status == CODEC_OK || !r->residual.n)
		return;
	if (residual == FEEDBACK || residual == DELTA)
		CHECK(!memcmp(r->residual.p, k->error.p, r->residual.n), r->status, k->spec.codec);
	else if (residual == IN_PLACE)
		CHECK(!memcmp(r->residual.p, k->x.p, r->residual.n), r->status, k->spec.codec);
	else
		for (size_t i = 0; i < r->residual.n; i++)
			CHECK(r->residual.p[i] == 0x5a, r->status, k->spec.codec);
}

static struct result encode(struct task *k, uint32_t isa, size_t capacity, int residual, size_t short_of)
{
	float *at;
	struct result r = begin(k, capacity, residual, &at);
	struct exact scratch = exact(k->need - short_of, &k->s);
	size_t written = 1;

	k->with.isa = isa;
	r.status = codec_encode(&k->spec, &k->t, capacity ? r.frame.p : NULL, capacity, &written, at, &k->with,
				scratch.p, scratch.n);
	CHECK(r.status == CODEC_OK ? written <= capacity : written == 0, r.status, written);
	CHECK((r.status == CODEC_SHORT_SCRATCH) <= (short_of > 0), r.status, k->need);
	r.nbytes = written;
	end(k, &r, residual);
	exact_free(&scratch);
	return r;
}

/* Encode in steps, with ranges of pieces and of blocks in any order. */
static struct result encode_steps(struct task *k, uint32_t isa, int residual)
{
	codec_range ranges[8] = {0};
	struct exact buffers[8] = {0};
	uint64_t nranges = 1 + below(&k->s, 8);
	struct exact job = exact(k->job_nbytes, &k->s);
	size_t room = 2 * k->bound + (1 << 16), written = 0;
	codec_plan plan;
	float *at;
	struct result r = begin(k, room, residual, &at);

	k->with.isa = isa;
	k->with.residual = at;
	r.status = codec_encode_open(&k->spec, &k->t, r.frame.p, room, &k->with, job.p, job.n, &plan);
	if (r.status == CODEC_OK && plan.nscans) {
		uint64_t half = below(&k->s, plan.nscans + 1);

		r.status = codec_encode_scan(&k->t, &k->with, job.p, half, plan.nscans - half);
		if (r.status == CODEC_OK)
			r.status = codec_encode_scan(&k->t, &k->with, job.p, 0, half);
		if (r.status == CODEC_OK)
			r.status = codec_encode_start(&k->t, r.frame.p, room, &k->with, job.p, &plan);
	}
	CHECK(r.status != CODEC_OK || plan.work_nbytes <= k->work_nbytes, plan.work_nbytes, k->work_nbytes);
	if (r.status == CODEC_OK && plan.nblocks) {
		uint64_t need = plan.regions_at + plan.nblocks * plan.region_bound, where = plan.regions_at;

		nranges = need > room ? 1 : nranges;
		for (uint64_t i = 0, first = 0; i < nranges; i++) {
			uint64_t rest = plan.nblocks - first, count = i + 1 == nranges ? rest : below(&k->s, rest + 1);

			ranges[i] = (codec_range){.first = first, .count = count, .at = where};
			first += count;
			where += count * plan.region_bound;
		}
		for (uint64_t i = 0, q = below(&k->s, nranges); i < nranges && r.status == CODEC_OK; i++, q++) {
			struct exact work = exact(plan.work_nbytes, &k->s), *buffer = buffers + q % nranges;
			codec_range *one = ranges + q % nranges;
			size_t end = one->at + one->count * plan.region_bound;

			end = end > room ? room : end;
			if (below(&k->s, 2)) {
				*buffer = exact(end - one->at, &k->s);
				one->buffer = buffer->p;
			}
			r.status = codec_encode_blocks(&k->t, r.frame.p, end, &k->with, job.p, one, work.p, work.n);
			CHECK(r.status != CODEC_OK || one->end <= one->at + one->count * plan.region_bound, one->end,
			      one->at);
			exact_free(&work);
		}
		where = plan.regions_at;
		for (uint64_t i = 0, some = below(&k->s, nranges + 1); i < some && r.status == CODEC_OK; i++) {
			if (!ranges[i].count)
				continue;
			r.status = codec_encode_move(job.p, r.frame.p, room, ranges + i, where);
			where = ranges[i].end;
		}
	}
	if (r.status == CODEC_OK)
		r.status = codec_encode_close(&k->t, r.frame.p, room, &k->with, job.p, ranges,
					      plan.nblocks ? nranges : 0, &written);
	r.nbytes = written;
	k->with.residual = NULL;
	k->with.flags = 0;
	k->t.data = k->x.p;
	for (int i = 0; i < 8; i++)
		exact_free(buffers + i);
	exact_free(&job);
	return r;
}

/* Return 1 if residuals a and b have the same bits. With CODEC_DIFFERENCE, payloads of NaN may differ. */
static int same_residual(const struct exact *a, const struct exact *b, int residual)
{
	for (size_t i = 0; residual == DELTA && i < a->n; i += 4) {
		float x, y;

		memcpy(&x, a->p + i, 4);
		memcpy(&y, b->p + i, 4);
		if (memcmp(&x, &y, 4) && (x == x || y == y))
			return 0;
	}
	return residual == DELTA || !memcmp(a->p, b->p, a->n);
}

static void same_frame(const struct task *k, const struct result *a, const struct result *b, int residual)
{
	CHECK(a->status == b->status, a->status, b->status);
	if (a->status != CODEC_OK || b->status != CODEC_OK)
		return;
	CHECK(a->nbytes == b->nbytes && !memcmp(a->frame.p, b->frame.p, a->nbytes), k->spec.codec, k->t.dtype);
	if (a->residual.n && b->residual.n)
		CHECK(same_residual(&a->residual, &b->residual, residual), k->spec.codec, k->t.dtype);
}

static void result_free(struct result *r)
{
	exact_free(&r->frame);
	exact_free(&r->residual);
}

static void check_values(struct task *k, const struct result *r, int residual)
{
	struct exact out = exact(k->t.nbytes, &k->s), scratch = exact(k->need, &k->s);
	codec_tensor back = k->t;
	codec_status status;

	back.data = out.p;
	k->with.isa = check_some_isa(&k->s);
	CHECK(codec_verify(r->frame.p, r->nbytes) == CODEC_OK, k->spec.codec, k->t.dtype);
	status = codec_decode(r->frame.p, r->nbytes, &back, &k->with, scratch.p, scratch.n);
	CHECK(status == CODEC_OK, status, k->spec.codec);
	if (status == CODEC_OK && k->spec.codec == CODEC_LOSSLESS && out.n)
		CHECK(!memcmp(out.p, k->x.p, out.n), k->t.dtype, k->n);
	for (uint64_t i = 0; status == CODEC_OK && i < k->n && r->residual.n; i++) {
		float error = k->error.n ? check_widen(k->error.p, CODEC_FLOAT32, i) : 0;
		float left = 0, got;

		memcpy(&got, r->residual.p + 4 * i, 4);
		if (k->spec.codec != CODEC_LOSSLESS) {
			float x = check_widen(k->x.p, k->t.dtype, i) + error;
			float y = check_widen(out.p, k->t.dtype, i);

			left = residual == DELTA ? error + y : x - x == 0 ? x - y : 0;
		}
		CHECK(left == got || (left != left && got != got), k->spec.codec, i);
		if (left != got && (left == left || got == got))
			break;
	}
	exact_free(&out);
	exact_free(&scratch);
}

/*
 * Check encoding with a capacity of exactly the frame's size, with a smaller capacity, with too little scratch, and
 * with overlapping buffers.
 */
static void check_room(struct task *k, const struct result *r, int residual)
{
	size_t capacity = below(&k->s, 2) ? r->nbytes - 1 : below(&k->s, r->nbytes);
	uint32_t isa = k->with.isa;
	struct result more = encode(k, isa, r->nbytes, residual, 0);
	struct exact scratch = exact(k->need, &k->s);
	struct exact both = exact(8 * k->n + k->t.nbytes + 8, &k->s);
	codec_status status;
	size_t written;

	if (more.status != CODEC_SHORT_OUTPUT || !residual)
		same_frame(k, r, &more, residual);
	result_free(&more);
	more = encode(k, isa, one_in(&k->s, 4) ? 0 : capacity, residual, 0);
	CHECK(more.status == CODEC_SHORT_OUTPUT, more.status, capacity);
	result_free(&more);
	if (r->frame.p[8]) { /* the layout is "blocks", not "stored" */
		more = encode(k, isa, k->bound, residual, 1);
		CHECK(more.status == CODEC_SHORT_SCRATCH, more.status, k->need);
		result_free(&more);
	}
	if (k->n > 1) { /* the residual begins one value after the tensor */
		k->t.data = both.p;
		memcpy(both.p, k->x.p, k->t.nbytes);
		more.frame = exact(k->bound, &k->s);
		status = codec_encode(&k->spec, &k->t, more.frame.p, k->bound, &written,
				      (float *)(both.p + (k->t.nbytes / k->n)), &k->with, scratch.p, scratch.n);
		CHECK(status == CODEC_BAD_ARGUMENT && !memcmp(both.p, k->x.p, k->t.nbytes), status, written);
		k->t.data = k->x.p;
		exact_free(&more.frame);
	}
	exact_free(&both);
	exact_free(&scratch);
}

/* Call codec_bound_segments for the task's segments, and compare its status with that of codec_bound. */
static void bound_by_segments(struct task *k, codec_status bound_status)
{
	size_t nbytes = 0;
	codec_status status = codec_bound_segments(&k->spec, &k->t, k->with.segments, k->with.nsegments, &nbytes);

	if (bound_status == CODEC_OK && status == CODEC_BAD_SEGMENTS) {
		CHECK(k->with.nsegments && k->expected != CODEC_OK, k->with.nsegments, k->expected);
		return;
	}
	CHECK(status == bound_status && nbytes <= k->bound, status, nbytes);
	k->bound = nbytes;
}

/* Return 1 if the size of frames of this spec does not depend on values, so that codec_bound_segments is exact. */
static int fixed_rate(const codec_spec *p)
{
	switch (p->codec) {
	case CODEC_LOSSLESS:
	case CODEC_TOPK:
	case CODEC_TRUNCATE: return 0;
	case CODEC_TERNARY: return p->variant != CODEC_TERNARY_ENTROPY;
	default: return !(p->options & CODEC_OPTION_ENTROPY);
	}
}

static void check_encoder(struct task *k)
{
	int residual = one_in(&k->s, 3) && k->t.dtype == CODEC_FLOAT32 ? IN_PLACE : below(&k->s, 2) ? APART : NONE;
	struct result first = {0};
	struct given given;

	if (k->spec.codec != CODEC_LOSSLESS && one_in(&k->s, 4)) {
		residual = k->spec.codec != CODEC_TRUNCATE && k->spec.codec != CODEC_TOPK && one_in(&k->s, 3)
				   ? DELTA
				   : FEEDBACK;
		k->error = exact(4 * k->n, &k->s);
		make_values(k, k->error.p, CODEC_FLOAT32, one_in(&k->s, 2));
		k->expected = UNKNOWN; /* tensor plus or minus residual may be NaN or Inf, or exceed a scale */
	}

	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		struct result r;

		if (!check_usable(isa))
			continue;
		r = encode(k, isa + 1, k->bound, residual, 0);
		CHECK(r.status != CODEC_SHORT_OUTPUT, k->bound, k->spec.codec);
		if (isa == 0) {
			first = r;
			continue;
		}
		same_frame(k, &first, &r, residual);
		result_free(&r);
		if (one_in(&k->s, 2)) {
			r = encode_steps(k, isa + 1, residual);
			same_frame(k, &first, &r, residual);
			result_free(&r);
		}
	}
	if (k->expected != UNKNOWN && first.status != k->expected)
		CHECK((k->nonfinite && first.status == CODEC_NONFINITE) ||
			      (k->scaled && (first.status == CODEC_BAD_SCALE || first.status == CODEC_ROUNDED_SCALE ||
					     first.status == CODEC_BAD_SPEC)),
		      first.status, k->expected);
	if (first.status == CODEC_OK) {
		if (fixed_rate(&k->spec))
			CHECK(first.nbytes == k->bound, first.nbytes, k->bound);
		check_values(k, &first, residual);
		k->with.isa = check_some_isa(&k->s);
		if (one_in(&k->s, 2))
			check_room(k, &first, residual);
		if (one_in(&k->s, 6)) {
			given = (struct given){first.frame.p, first.nbytes, k->with.codebooks, k->with.metric};
			CHECK(check_frame(&given, NULL, 0, &k->s) == CODEC_OK || k->t.nbytes > TENSOR_LIMIT,
			      k->spec.codec, k->t.dtype);
		}
	}
	result_free(&first);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct task k;
	codec_status status;

	memset(&k, 0, sizeof k);
	k.s = source_open(data, size);
	k.with.struct_nbytes = sizeof k.with;
	pick_spec(&k);
	pick_tensor(&k);
	k.x = exact(k.t.nbytes, &k.s);
	k.t.data = k.x.p;
	make_values(&k, k.x.p, k.t.dtype, 0);
	pick_rest(&k);
	k.s.p = k.s.end;
	status = codec_bound(&k.spec, &k.t, &k.bound);
	bound_by_segments(&k, status);
	CHECK(codec_scratch(&k.spec, &k.t, &k.need) == status, status, 0);
	CHECK(codec_job_nbytes(&k.spec, &k.t, &k.job_nbytes, &k.work_nbytes) == status, status, 0);
	if (status == CODEC_OK) {
		check_encoder(&k);
	} else {
		uint8_t frame[64], scratch[64];
		size_t written;

		CHECK(codec_encode(&k.spec, &k.t, frame, sizeof frame, &written, NULL, &k.with, scratch,
				   sizeof scratch) != CODEC_OK,
		      status, 0);
	}
	exact_free(&k.x);
	exact_free(&k.error);
	exact_free(&k.levels);
	for (int i = 0; i < 3; i++)
		exact_free(k.state + i);
	free(k.a);
	return 0;
}
