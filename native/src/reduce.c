/* reduce.c - frames of one shape to their sum, mean or maximum, block by block: the result is written once. */
#include "rows.h"

/* How frame i of `count` goes into the result. */
static void turn_of(codec_context *c, size_t i, size_t count, uint32_t op, int unscaled)
{
	c->into = i == 0 ? CODEC_INTO_FLOAT32 : op == CODEC_REDUCE_MAX ? CODEC_INTO_MAX : CODEC_INTO_ADD;
	c->weight = 1;
	c->divide = op == CODEC_REDUCE_MEAN && i == count - 1 ? (float)count : 0;
	c->flags |= unscaled ? CODEC_UNSCALED : 0;
	c->flags |= unscaled && i == count - 1 ? CODEC_RESCALE : 0;
}

static int same_parts(const struct job *a, const struct job *b, int *same_scale)
{
	if (!codec_is_rows(a->h.codec))
		return 1;
	if (a->nparts != b->nparts)
		return 0;
	for (uint64_t i = 0; i < a->nparts; i++) {
		const struct part *p = job_parts(a) + i, *q = job_parts(b) + i;

		if (p->count != q->count || p->row != q->row)
			return 0;
		*same_scale &= round_bits(p->scale[0]) == round_bits(q->scale[0]);
	}
	return 1;
}

/* Opened jobs: can their blocks be done side by side, and do TERNARY's codes add up? */
static int side_by_side(const void *const *jobs, size_t count, int *unscaled)
{
	const struct job *a = job_place((void *)jobs[0]);

	*unscaled = a->h.codec == CODEC_TERNARY;
	for (size_t i = 0; i < count; i++) {
		const struct job *b = job_place((void *)jobs[i]);

		if (!b->h.nblocks || a->h.codec != b->h.codec || a->h.nblocks != b->h.nblocks ||
		    a->h.block != b->h.block || a->h.variant != b->h.variant || !same_parts(a, b, unscaled))
			return *unscaled = 0;
	}
	return 1;
}

codec_status codec_reduce_blocks(const void *const *frames, const size_t *nbytes, size_t count, uint32_t op,
				 codec_tensor *dst, const codec_context *with, const void *const *jobs, uint64_t first,
				 uint64_t nblocks, uint64_t *seals, void *work, size_t work_nbytes)
{
	codec_context c;
	int unscaled;

	TRY(context_read(with, &c));
	if (!frames || !nbytes || !jobs || !seals || !count || op > CODEC_REDUCE_MAX)
		return CODEC_BAD_ARGUMENT;
	if (!side_by_side(jobs, count, &unscaled))
		return CODEC_BAD_ARGUMENT;
	unscaled &= op != CODEC_REDUCE_MAX;
	for (size_t i = 0; i < count; i++)
		seals[i] = 0;
	for (uint64_t b = first; b < first + nblocks; b += 2)
		for (size_t i = 0; i < count; i++) {
			codec_context turn = c;
			uint64_t seal;

			turn.struct_nbytes = sizeof turn;
			turn_of(&turn, i, count, op, unscaled);
			TRY(codec_decode_blocks(frames[i], nbytes[i], dst, &turn, jobs[i], b,
						MIN(2, first + nblocks - b), &seal, work, work_nbytes));
			seals[i] += seal;
		}
	return CODEC_OK;
}

/* One frame after the other: each passes over the whole result. */
static codec_status one_by_one(const void *const *frames, const size_t *nbytes, size_t count, uint32_t op,
			       codec_tensor *dst, const codec_context *c, void *scratch, size_t scratch_nbytes)
{
	for (size_t i = 0; i < count; i++) {
		codec_context turn = *c;

		turn.struct_nbytes = sizeof turn;
		turn_of(&turn, i, count, op, 0);
		TRY(codec_decode(frames[i], nbytes[i], dst, &turn, scratch, scratch_nbytes));
	}
	return CODEC_OK;
}

/* Header i; all have the first one's shape, or decoding will say so. */
static codec_status read_headers(const void *const *frames, const size_t *nbytes, size_t count, struct header *largest,
				 size_t *each, int *stored, codec_fault *f)
{
	*each = *stored = 0;
	for (size_t i = 0; i < count; i++) {
		struct header h;

		TRY(header_read(frames[i], nbytes[i], &h, f));
		*stored |= h.layout == WIRE_LAYOUT_STORED;
		*each = MAX(*each, job_room(&h));
		if (i == 0 || work_nbytes(&h) > work_nbytes(largest))
			*largest = h;
	}
	return CODEC_OK;
}

codec_status codec_reduce_scratch(const void *const *frames, const size_t *nbytes, size_t count, size_t *scratch)
{
	struct header largest;
	size_t each;
	int stored;

	if (!frames || !nbytes || !count || !scratch)
		return CODEC_BAD_ARGUMENT;
	TRY(read_headers(frames, nbytes, count, &largest, &each, &stored, NULL));
	*scratch = count * (each + sizeof(void *) + sizeof(uint64_t)) + work_nbytes(&largest);
	return CODEC_OK;
}

codec_status codec_reduce(const void *const *frames, const size_t *nbytes, size_t count, uint32_t op, codec_tensor *dst,
			  const codec_context *with, void *scratch, size_t scratch_nbytes)
{
	struct header largest;
	uint64_t *seals, nblocks;
	size_t each, need;
	codec_context c;
	void **jobs;
	int stored, unscaled;
	char *p;

	TRY(context_read(with, &c));
	TRY(codec_reduce_scratch(frames, nbytes, count, &need));
	if (op > CODEC_REDUCE_MAX || !scratch)
		return CODEC_BAD_ARGUMENT;
	if (scratch_nbytes < need)
		return CODEC_SHORT_SCRATCH;
	TRY(read_headers(frames, nbytes, count, &largest, &each, &stored, c.fault));
	if (stored)
		return one_by_one(frames, nbytes, count, op, dst, &c, scratch, scratch_nbytes);
	jobs = scratch;
	seals = (uint64_t *)(jobs + count);
	p = (char *)(seals + count);
	c.struct_nbytes = sizeof c;
	for (size_t i = 0; i < count; i++, p += each) {
		codec_context turn = c;
		codec_plan plan;

		turn_of(&turn, i, count, op, 0);
		jobs[i] = p;
		TRY(codec_decode_open(frames[i], nbytes[i], dst, &turn, p, each, &plan));
	}
	if (!side_by_side((const void *const *)jobs, count, &unscaled))
		return one_by_one(frames, nbytes, count, op, dst, &c, scratch, scratch_nbytes);
	nblocks = job_place(jobs[0])->h.nblocks;
	TRY(codec_reduce_blocks(frames, nbytes, count, op, dst, &c, (const void *const *)jobs, 0, nblocks, seals, p,
				work_nbytes(&largest)));
	for (size_t i = 0; i < count; i++)
		TRY(codec_decode_close(&c, jobs[i], seals[i]));
	return CODEC_OK;
}
