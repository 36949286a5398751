/* reduce.c - reduce frames of one shape to their sum, mean or maximum, block by block, writing the result once. */
#include "api.h"

#define TILE                                                                                                           \
	WIRE_TRITS_BLOCK /* values per tile: at least one block, unless rows are long; a tile fits in the L2 cache */

/*
 * Set the context for decoding frame i of `count`. The mean of a single frame is not divided by 1, which could change a
 * NaN.
 */
static void set_context(codec_context *c, size_t i, size_t count, uint32_t op, int unscaled)
{
	if (op == CODEC_REDUCE_CODES || unscaled)
		c->into = i == 0                       ? CODEC_INTO_CODES
			  : unscaled && i == count - 1 ? CODEC_INTO_SCALE_CODES
						       : CODEC_INTO_ADD_CODES;
	else
		c->into = i == 0 ? CODEC_INTO_FLOAT32 : op == CODEC_REDUCE_MAX ? CODEC_INTO_MAX : CODEC_INTO_ADD;
	c->weight = 1;
	c->divide = op == CODEC_REDUCE_MEAN && count > 1 && i == count - 1 ? (float)count : 0;
}

static int same_parts(const struct job *a, const struct job *b, int *same_scale)
{
	if (!codec_is_rows(a->h.codec))
		return 1;
	if (a->nparts != b->nparts)
		return 0;
	for (uint64_t i = 0; i < a->nparts; i++) {
		const struct part *p = job_parts(a) + i, *q = job_parts(b) + i;

		if (p->count != q->count || p->group_size != q->group_size)
			return 0;
		*same_scale &= round_bits(p->scale[0]) == round_bits(q->scale[0]);
	}
	return 1;
}

/*
 * CODEC_REDUCE_CODES: return 1 if all TERNARY frames have the same scale, so that codes can be added, and the dtype of
 * `dst` can hold any sum.
 */
static int codes_add_up(const void *const *jobs, size_t count, const codec_tensor *dst)
{
	size_t most = dst->dtype == CODEC_INT8    ? INT8_MAX
		      : dst->dtype == CODEC_INT16 ? INT16_MAX
		      : dst->dtype == CODEC_INT32 ? INT32_MAX
						  : 0;
	const struct part *first = NULL;

	for (size_t i = 0; i < count; i++) {
		const struct job *j = job_place((void *)jobs[i]);
		const struct part *parts = job_parts(j);

		if (!(header_traits(&j->h) & CODEC_TRAIT_SUMS))
			return 0;
		for (uint64_t p = 0; p < j->nparts; p++) {
			first = first ? first : parts;
			if (round_bits(parts[p].scale[0]) != round_bits(first->scale[0]))
				return 0;
		}
	}
	return count <= most;
}

/*
 * Return 1 if block b of every opened job covers the same values, so that frames can be reduced block by block. Set
 * *unscaled to 1 if TERNARY's codes can be summed as integers and then scaled.
 */
static int side_by_side(const void *const *jobs, size_t count, uint32_t op, int *unscaled)
{
	const struct job *a = job_at(jobs[0], JOB_DECODE, JOB_READY);

	*unscaled = a && count > 1 && header_traits(&a->h) & CODEC_TRAIT_SUMS && op <= CODEC_REDUCE_MEAN;
	for (size_t i = 0; i < count; i++) {
		const struct job *b = job_at(jobs[i], JOB_DECODE, JOB_READY);

		if (!a || !b || !b->h.nblocks || a->h.codec != b->h.codec || a->h.nblocks != b->h.nblocks ||
		    a->h.block != b->h.block || a->h.variant != b->h.variant || !same_parts(a, b, unscaled))
			return *unscaled = 0;
	}
	return 1;
}

/*
 * Check the state (metrics) in the context. With more than one frame the destination must not be an array of the state,
 * because decoding later frames would read the partial result as state.
 */
static codec_status check_state(const void *const *jobs, size_t count, const codec_tensor *dst,
				const codec_context *with)
{
	for (size_t i = 0; i < count && count > 1; i++) {
		const struct header *h = &job_place((void *)jobs[i])->h;

		TRY(family_check_state(h, with, 0));
		if (!dst || dst->struct_nbytes < sizeof *dst || family_reads(h, with, 0, dst->data, dst->nbytes, 0))
			return CODEC_BAD_ARGUMENT;
	}
	return CODEC_OK;
}

/* Return the index of the first value of block b, or the tensor's number of values if b is the number of blocks. */
static uint64_t first_value(const struct job *j, uint64_t b)
{
	if (b == j->h.nblocks)
		return j->h.n;
	return codec_is_rows(j->h.codec) ? rows_place(j, b).first : b * j->h.block;
}

/* A reduction of frames with matching blocks. */
struct sum {
	const void *const *frames, *const *jobs;
	size_t count;
	uint32_t op;
	int unscaled;
	const codec_tensor *dst;
	const codec_context *with;
	void *work;
	float *tile;   /* buffer for results, copied to dst with non-temporal stores; NULL: compute in dst */
	uint64_t room; /* capacity of the tile in values; checked later, because headers may change */
};

/*
 * Decode a range of blocks, values [at, at + n), of every frame, and accumulate them at `there`. Add the blocks'
 * checksums to `checksums`.
 */
static codec_status accumulate_frames(const struct sum *s, codec_range range, uint64_t at, uint64_t n, void *there,
				      uint64_t *checksums)
{
	const uint64_t size = dtype_of(s->dst->dtype)->nbytes;
	const int tiled = there == s->tile;
	codec_tensor part = *s->dst;
	codec_context turn = *s->with;

	part.data = (void *)((uintptr_t)there - size * at); /* decoding adds the offset `at` */
	part.nbytes = size * n;
	turn.flags &= ~CODEC_NONTEMPORAL; /* decoding the next frame reads these values */
	turn.flags |= s->count == 1 && is_nontemporal(s->with, s->dst) ? CODEC_NONTEMPORAL : 0;
	for (size_t i = 0; i < s->count; i++) {
		set_context(&turn, i, s->count, s->op, s->unscaled);
		turn.divide = tiled ? 0 : turn.divide;
		TRY(decode_blocks(s->frames[i], &part, &turn, job_place((void *)s->jobs[i]), &range, s->work));
		checksums[i] += range.checksum;
	}
	return CODEC_OK;
}

/* Reduce a range of blocks of all frames, a few blocks at a time: results stay in a cache from frame to frame. */
static codec_status sum_blocks(const struct sum *s, const codec_range *range, uint64_t *checksums)
{
	const struct kernels *k = kernels_for(s->with);
	const struct job *j = job_place((void *)s->jobs[0]);
	const uint64_t once = codec_never_stored(j->h.codec) ? 1 : 2;
	const float by = s->op == CODEC_REDUCE_MEAN ? (float)s->count : 0;
	const uint64_t end = range->first + range->count;
	int signs = s->count > 1 && s->op <= CODEC_REDUCE_MEAN;
	struct work w;

	for (size_t i = 0; i < s->count && signs; i++)
		signs = rows_sums_signs(job_place((void *)s->jobs[i]));
	work_place(&j->h, s->work, &w);
	memset(checksums, 0, s->count * sizeof *checksums);
	for (uint64_t b = range->first, n; b < end; b += n) {
		codec_range some = {.first = b};
		float_any *there, *place;
		uint64_t at, m;
		uint32_t most;

		some.count = n = MIN(once, end - b);
		at = first_value(j, b);
		m = first_value(j, b + n) - at;
		if (s->op == CODEC_REDUCE_CODES) {
			char *codes = (char *)s->dst->data + dtype_of(s->dst->dtype)->nbytes * at;

			TRY(accumulate_frames(s, some, at, m, codes, checksums));
			continue;
		}
		place = (float_any *)s->dst->data + at;
		there = s->tile && m <= s->room ? (float_any *)s->tile : place;
		if (signs)
			TRY(rows_sum_signs(s->frames, s->jobs, s->count, s->with, b, there == place ? by : 0, there,
					   checksums, &w));
		else
			TRY(accumulate_frames(s, some, at, m, there, checksums));
		if (there != place)
			most = k->settle(there, m, by, place);
		else if (s->with->flags & CODEC_FINITE)
			k->abs_max(there, m, m, ROUND_ABS + 1, &most);
		else
			continue;
		if (s->with->flags & CODEC_FINITE && most >= ROUND_INF)
			return CODEC_NONFINITE;
	}
	return CODEC_OK;
}

codec_status codec_reduce_blocks(const codec_reduction *reduction, codec_tensor *dst, const codec_context *with,
				 const codec_range *range, uint64_t *checksums, void *work, size_t work_nbytes)
{
	codec_context c, turn;
	codec_reduction f;
	codec_status status;
	codec_tensor t;
	codec_range r;
	uint64_t saved;
	int unscaled;

	TRY(context_read(with, &c));
	if (!reduction || !range || !checksums)
		return CODEC_BAD_ARGUMENT;
	f = *reduction;
	r = *range;
	if (!f.frames || !f.nbytes || !f.jobs || !f.count || f.op > CODEC_REDUCE_CODES ||
	    !side_by_side(f.jobs, f.count, f.op, &unscaled))
		return CODEC_BAD_ARGUMENT;
	TRY(check_state(f.jobs, f.count, dst, &c));
	for (size_t i = 0; i < f.count; i++) {
		turn = c;
		set_context(&turn, i, f.count, f.op, unscaled);
		TRY(decode_step(f.frames[i], f.nbytes[i], dst, &turn, f.jobs[i], &r, work, work_nbytes, &t));
	}
	if (f.op == CODEC_REDUCE_CODES && !codes_add_up(f.jobs, f.count, &t))
		return CODEC_BAD_ARGUMENT;
	saved = call_enter();
	status = sum_blocks(&(struct sum){f.frames, f.jobs, f.count, f.op, unscaled, &t, &c, work, NULL, 0}, &r,
			    checksums);
	call_leave(saved);
	return status;
}

/*
 * Layout of a reduction's scratch: pointers to jobs, checksum sums, the jobs, one work buffer, the tile. Sizes are
 * computed from the headers once. Opening a job reads its header again, which another thread may have changed, and
 * checks that the job fits the size computed here.
 */
struct layout {
	size_t each, work, tile, total;
};

static codec_status lay_out(const void *const *frames, const size_t *nbytes, size_t count, const codec_context *with,
			    struct layout *l)
{
	*l = (struct layout){0};
	if (!frames || !nbytes || !count)
		return CODEC_BAD_ARGUMENT;
	for (size_t i = 0; i < count; i++) {
		struct header h;

		TRY(frame_open(frames[i], nbytes[i], with, &h));
		l->each = MAX(l->each, ALIGN8(job_room(&h, JOB_DECODE)));
		l->work = MAX(l->work, ALIGN8(work_nbytes(&h)));
		l->tile = count > 1 ? sizeof(float) * (size_t)MIN(h.n, TILE) : 0;
	}
	if (__builtin_mul_overflow(count, l->each + sizeof(void *) + sizeof(uint64_t), &l->total) ||
	    __builtin_add_overflow(l->total, l->work + l->tile + 8, &l->total))
		return CODEC_LIMIT;
	return CODEC_OK;
}

codec_status codec_reduce_scratch(const void *const *frames, const size_t *nbytes, size_t count, size_t *scratch)
{
	const codec_context slack = {.flags = CODEC_ALLOW_SLACK};
	struct layout l;

	if (!scratch)
		return CODEC_BAD_ARGUMENT;
	TRY(lay_out(frames, nbytes, count, &slack, &l));
	*scratch = l.total;
	return CODEC_OK;
}

/* Return the error of the first invalid frame among frames 0 to count - 1, or `status` if all of them are valid. */
static codec_status first_fault(codec_status status, const void *const *frames, size_t count, const codec_context *with,
				struct job *const *jobs, void *work)
{
	codec_fault found = with->fault ? *with->fault : (codec_fault){0};

	for (size_t i = 0; i < count; i++)
		TRY(decode_check(frames[i], with, jobs[i], work));
	return status == CODEC_OK ? CODEC_OK : fault(with->fault, status, found.offset, found.found, found.expected);
}

/*
 * Reduce frames whose blocks do not match: decode the frames one after the other, each with a pass over the whole
 * result.
 */
static codec_status one_by_one(const void *const *frames, size_t count, uint32_t op, const codec_tensor *dst,
			       const codec_context *with, struct job *const *jobs, void *work)
{
	uint32_t most = 0;

	for (size_t i = 0; i < count; i++) {
		codec_context turn = *with;

		set_context(&turn, i, count, op, 0);
		turn.flags &= count > 1 ? ~CODEC_NONTEMPORAL : ~0u;
		TRY(decode_values(frames[i], dst, &turn, jobs[i], work));
	}
	if (with->flags & CODEC_FINITE && jobs[0]->h.n && op != CODEC_REDUCE_CODES)
		kernels_for(with)->abs_max(dst->data, jobs[0]->h.n, jobs[0]->h.n, ROUND_ABS + 1, &most);
	return most < ROUND_INF ? CODEC_OK : CODEC_NONFINITE;
}

static codec_status reduce(const void *const *frames, const size_t *nbytes, size_t count, uint32_t op,
			   codec_tensor *dst, const codec_context *with, void *scratch, const struct layout *l)
{
	struct job **jobs = (struct job **)ALIGN8((uintptr_t)scratch);
	uint64_t *checksums = (uint64_t *)(jobs + count);
	char *memory = (char *)(checksums + count), *work = memory + count * l->each;
	codec_context turn = *with;
	codec_status status;
	struct sum sum;
	int unscaled;

	turn.struct_nbytes = sizeof turn;
	for (size_t i = 0; i < count; i++) {
		set_context(&turn, i, count, op, 0);
		status = decode_open(frames[i], nbytes[i], dst, &turn, memory + i * l->each, l->each, jobs + i);
		if (status != CODEC_OK)
			return first_fault(status, frames, i, with, jobs, work);
		if (jobs[i]->plan.work_nbytes > l->work)
			return CODEC_SHORT_SCRATCH;
	}
	TRY(check_state((const void *const *)jobs, count, dst, with));
	if (op == CODEC_REDUCE_CODES && !codes_add_up((const void *const *)jobs, count, dst))
		return first_fault(CODEC_BAD_ARGUMENT, frames, count, with, jobs, work);
	if (with->flags & (CODEC_VERIFY_FIRST | CODEC_CHECK_ONLY))
		TRY(first_fault(CODEC_OK, frames, count, with, jobs, work));
	if (with->flags & CODEC_CHECK_ONLY)
		return CODEC_OK;
	if (!side_by_side((const void *const *)jobs, count, op, &unscaled))
		return one_by_one(frames, count, op, dst, with, jobs, work);
	sum = (struct sum){frames, (const void *const *)jobs, count, op, unscaled, dst, with, work, NULL, 0};
	if (count > 1 && op != CODEC_REDUCE_CODES && is_nontemporal(with, dst)) {
		sum.tile = (float *)(work + l->work);
		sum.room = l->tile / sizeof *sum.tile;
	}
	status = sum_blocks(&sum, &(codec_range){.count = jobs[0]->h.nblocks}, checksums);
	for (size_t i = 0; i < count && status == CODEC_OK; i++)
		status = decode_close(with, jobs[i], checksums[i]);
	/* blocks of all frames were interleaved, so find the first faulty frame */
	return status == CODEC_OK ? CODEC_OK : first_fault(status, frames, count, with, jobs, work);
}

codec_status codec_reduce(const void *const *frames, const size_t *nbytes, size_t count, uint32_t op, codec_tensor *dst,
			  const codec_context *with, void *scratch, size_t scratch_nbytes)
{
	codec_status status;
	codec_context c;
	struct layout l;
	uint64_t saved;

	TRY(context_read(with, &c));
	if (op > CODEC_REDUCE_CODES || !scratch)
		return CODEC_BAD_ARGUMENT;
	TRY(lay_out(frames, nbytes, count, &c, &l));
	if (scratch_nbytes < l.total)
		return CODEC_SHORT_SCRATCH;
	saved = call_enter();
	status = reduce(frames, nbytes, count, op, dst, &c, scratch, &l);
	call_leave(saved);
	return status;
}
