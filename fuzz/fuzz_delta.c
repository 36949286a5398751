/*
 * fuzz_delta.c - libFuzzer: decode DELTA frames against their bases, in all ways and with all instruction sets. Frames
 * without a planted fault must decode to their result. Every error must leave the destination unchanged, also when
 * decoding in place.
 */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "codec/codec_engine.h"
#include "make_delta.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum way { APART, IN_PLACE, STEPS, STEPS_IN_PLACE, WAYS };

static codec_tensor tensor(const struct delta_case *c, void *values)
{
	return (codec_tensor){.struct_nbytes = sizeof(codec_tensor),
			      .dtype = c->dtype,
			      .rank = 1,
			      .shape = {c->n},
			      .data = values,
			      .nbytes = c->n * c->item};
}

/* Copy the changes of a checked frame, and apply them to the base: this must give the result. */
static void list_changes(const struct delta_case *c, const void *job, struct source *s)
{
	uint32_t *at = malloc(c->n / 8 * sizeof *at); /* aligned, as for its type */
	struct exact values = exact(c->n / 8 * c->item, s);
	uint8_t *now = malloc(c->n * c->item);
	size_t count;
	codec_status status = codec_decode_changes(job, at, values.p, c->n / 8, &count);

	CHECK(status == CODEC_OK || status == CODEC_SHORT_OUTPUT, status, 0);
	if (c->n)
		memcpy(now, c->base, c->n * c->item);
	for (size_t i = 0; i < count && status == CODEC_OK; i++) {
		CHECK(at[i] < c->n, at[i], c->n);
		memcpy(now + at[i] * c->item, values.p + i * c->item, c->item);
	}
	if (status == CODEC_OK && c->n && c->fault <= DELTA_WRONG_CODE)
		CHECK(memcmp(now, c->result, c->n * c->item) == 0, count, c->n);
	free(now);
	free(at);
	exact_free(&values);
}

/* Check all blocks in two ranges, compare the checksum, and decode the blocks, perhaps in other ranges. */
static codec_status decode_steps(const struct delta_case *c, codec_tensor *dst, codec_context *with, size_t job_nbytes,
				 size_t work_nbytes, struct source *s)
{
	struct exact job = exact(job_nbytes, s), work = exact(work_nbytes, s);
	codec_plan plan = {0};
	codec_status status;
	uint64_t cut, sum = 0;

	status = codec_decode_open(c->frame, c->nbytes, dst, with, job.p, job.n, &plan);
	cut = below(s, plan.nblocks + 1);
	for (int i = 0; i < 2 && status == CODEC_OK && plan.nblocks; i++) {
		codec_range r = {.first = i ? cut : 0, .count = i ? plan.nblocks - cut : cut};

		status = codec_decode_check(c->frame, c->nbytes, with, job.p, &r, work.p, work.n);
		sum += r.checksum;
	}
	if (status == CODEC_OK && plan.nblocks)
		status = codec_decode_close(with, job.p, sum);
	if (status == CODEC_OK && plan.nblocks)
		list_changes(c, job.p, s);
	if (status == CODEC_OK && plan.nblocks && one_in(s, 3)) { /* check a part again; lists must remain valid */
		codec_range r = {.first = below(s, plan.nblocks), .count = 1};

		CHECK(codec_decode_check(c->frame, c->nbytes, with, job.p, &r, work.p, work.n) == CODEC_OK, r.first, 0);
	}
	with->flags |= CODEC_NO_CHECKSUM;
	cut = below(s, plan.nblocks + 1);
	for (int i = 0; i < 2 && status == CODEC_OK && plan.nblocks; i++) {
		codec_range r = {.first = i ? cut : 0, .count = i ? plan.nblocks - cut : cut};

		status = codec_decode_blocks(c->frame, c->nbytes, dst, with, job.p, &r, work.p, work.n);
		CHECK(status == CODEC_OK, status, c->fault);
	}
	exact_free(&job);
	exact_free(&work);
	return status;
}

/*
 * Decode in the way `way`, and return the status. On success check the result, else check that the destination is
 * unchanged.
 */
static codec_status decode(const struct delta_case *c, uint32_t isa, enum way way, struct source *s)
{
	codec_context with = {.struct_nbytes = sizeof with, .isa = isa, .flags = CODEC_VERIFY_FIRST};
	struct exact base = exact(c->n * c->item, s), out = exact(c->n * c->item, s), scratch;
	codec_spec spec = {.struct_nbytes = sizeof spec, .codec = CODEC_DELTA};
	int in_place = way == IN_PLACE || way == STEPS_IN_PLACE;
	codec_info info = {.struct_nbytes = sizeof info};
	size_t need = 0, job_nbytes = 0, work_nbytes = 0;
	codec_tensor old, dst;
	codec_status status;

	if (c->n) {
		memcpy(base.p, c->base, base.n);
		memset(out.p, 0x5a, out.n);
	}
	old = tensor(c, base.p);
	dst = in_place ? old : tensor(c, out.p);
	with.base = &old;
	if (codec_inspect(c->frame, c->nbytes, &info) == CODEC_OK && info.spec.codec == CODEC_DELTA)
		spec = info.spec;
	CHECK(codec_scratch(&spec, &dst, &need) == CODEC_OK, spec.group_size, 0);
	CHECK(codec_job_nbytes(&spec, &dst, &job_nbytes, &work_nbytes) == CODEC_OK, spec.group_size, 0);
	scratch = exact(need, s);
	if (way >= STEPS) {
		with.flags = 0;
		status = decode_steps(c, &dst, &with, job_nbytes, work_nbytes, s);
	} else {
		status = codec_decode(c->frame, c->nbytes, &dst, &with, scratch.p, need);
	}
	if (c->n) {
		if (!in_place || status != CODEC_OK)
			CHECK(memcmp(base.p, c->base, base.n) == 0, status, way);
		if (status == CODEC_OK && c->fault <= DELTA_WRONG_CODE)
			CHECK(memcmp(dst.data, c->result, out.n) == 0, isa, way);
		for (size_t i = 0; i < out.n && (in_place || status != CODEC_OK); i++)
			CHECK(out.p[i] == 0x5a, status, i);
	}
	exact_free(&base);
	exact_free(&out);
	exact_free(&scratch);
	return status;
}

/* Decode a range of blocks with codec_decode_part: the values must equal those of decoding the whole tensor. */
static void decode_part(const struct delta_case *c, uint32_t isa, struct source *s)
{
	codec_context with = {.struct_nbytes = sizeof with, .isa = isa};
	codec_info info = {.struct_nbytes = sizeof info};
	codec_tensor whole = tensor(c, NULL);
	struct exact part, scratch;
	uint64_t first, count, at, end, block, nblocks;
	size_t need;

	CHECK(codec_inspect(c->frame, c->nbytes, &info) == CODEC_OK, 0, 0);
	nblocks = info.nblocks ? info.nblocks : c->n > 0;
	block = info.nblocks ? info.block_nvalues : c->n;
	first = below(s, nblocks + 1);
	count = below(s, nblocks - first + 1);
	at = first * block < c->n ? first * block : c->n;
	end = (first + count) * block < c->n ? (first + count) * block : c->n;
	CHECK(codec_scratch(&info.spec, &whole, &need) == CODEC_OK, 0, 0);
	part = exact((end - at) * c->item, s);
	scratch = exact(need, s);
	if (part.n)
		memcpy(part.p, c->base + at * c->item, part.n);
	CHECK(codec_decode_part(c->frame, c->nbytes, first, count, part.p, part.p, part.n, &with, scratch.p, need) ==
		      CODEC_OK,
	      first, count);
	if (part.n)
		CHECK(memcmp(part.p, c->result + at * c->item, part.n) == 0, first, count);
	exact_free(&part);
	exact_free(&scratch);
}

/*
 * Encode the result against the base, with exactly the required capacity. Check that all instruction sets give equal
 * frames, and that these frames decode to the result.
 */
static void encode(const struct delta_case *c, struct source *s)
{
	codec_spec spec = {.struct_nbytes = sizeof spec, .codec = CODEC_DELTA};
	codec_tensor old = tensor(c, c->base), now = tensor(c, c->result);
	struct delta_case again = *c;
	size_t bound = 0, need = 0, written, first = 0;
	struct exact frame[2], scratch;

	spec.group_size = below(s, 2) ? 1u << between(s, 10, 13) : 0;
	CHECK(codec_bound(&spec, &now, &bound) == CODEC_OK, 0, 0);
	CHECK(codec_scratch(&spec, &now, &need) == CODEC_OK, 0, 0);
	scratch = exact(need, s);
	for (int i = 0; i < 2; i++)
		frame[i] = exact(bound, s);
	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		codec_context with = {.struct_nbytes = sizeof with, .isa = isa + 1, .base = &old};

		if (!check_usable(isa))
			continue;
		CHECK(codec_encode(&spec, &now, frame[isa > 0].p, bound, &written, NULL, &with, scratch.p, need) ==
			      CODEC_OK,
		      isa, bound);
		if (isa)
			CHECK(written == first && memcmp(frame[0].p, frame[1].p, written) == 0, written, first);
		first = written;
	}
	again.frame = frame[0].p;
	again.nbytes = first;
	again.fault = DELTA_RIGHT;
	CHECK(decode(&again, 0, IN_PLACE, s) == CODEC_OK, 0, 0);
	for (int i = 0; i < 2; i++)
		exact_free(frame + i);
	exact_free(&scratch);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct source s = source_open(data, size);
	codec_status first = CODEC_OK;
	struct delta_case c;

	delta_make(&c, &s);
	for (uint32_t isa = 0; codec_isa_name(isa); isa++)
		for (int way = 0; way < WAYS && check_usable(isa); way++) {
			codec_status status = decode(&c, isa + 1, (enum way)way, &s);

			if (c.fault == DELTA_RIGHT)
				CHECK(status == CODEC_OK, status, way);
			if (c.fault == DELTA_WRONG_BASE && c.n)
				CHECK(status == CODEC_OTHER_BASE || status == CODEC_ALREADY_APPLIED, status, way);
			CHECK((isa == 0 && way == 0) || status == first, status, first);
			first = status;
		}
	if (c.fault == DELTA_RIGHT) {
		for (uint32_t isa = 0; codec_isa_name(isa); isa++)
			if (check_usable(isa))
				decode_part(&c, isa + 1, &s);
		encode(&c, &s);
	}
	delta_free(&c);
	return 0;
}
