/*
 * encode.c - encode a tensor: open (sample, choose), encode blocks. close.c completes the frame.
 *
 * One file: codec_encode calls the same steps and shares their checks.
 */
#include "api.h"

/*
 * Check CODEC_FEEDBACK and CODEC_DIFFERENCE: each needs a residual and a lossy codec, and CODEC_DIFFERENCE needs a row
 * codec.
 */
static codec_status check_residual(const struct header *h, const codec_context *with)
{
	int usable;

	switch (with->flags & READS_RESIDUAL) {
	case 0: return CODEC_OK;
	case CODEC_FEEDBACK: usable = h->codec != CODEC_LOSSLESS && !codec_is_delta(h->codec); break;
	case CODEC_DIFFERENCE: usable = codec_is_rows(h->codec); break;
	default: usable = 0;
	}
	return usable && (with->residual || !h->n) ? CODEC_OK : CODEC_BAD_ARGUMENT;
}

/*
 * Return 1 if an output overlaps an input in a way that is not allowed. The residual may be exactly a state array, or
 * the tensor itself unless the residual is also an input.
 */
static int outputs_overlap(const struct header *h, const codec_tensor *src, const void *dst, size_t capacity,
			   const codec_context *with)
{
	uint64_t nbytes = with->residual ? sizeof(float) * h->n : 0;
	int in_place = with->residual == src->data && src->nbytes == nbytes && !(with->flags & READS_RESIDUAL);

	if (spans_overlap(dst, capacity, src->data, src->nbytes) ||
	    spans_overlap(dst, capacity, with->residual, nbytes) ||
	    (!in_place && spans_overlap(with->residual, nbytes, src->data, src->nbytes)))
		return 1;
	return family_reads(h, with, 1, dst, capacity, 0) || family_reads(h, with, 1, with->residual, nbytes, 1);
}

/* Return 1 if the tensor is stored raw, because a frame of blocks would exceed the capacity or save no bytes. */
static int stays_stored(const struct job *j, size_t capacity)
{
	return j->h.side_nbytes > UINT32_MAX || j->h.regions_at > capacity ||
	       choose_stored(j->h.regions_at + WIRE_ALIGN * j->h.nblocks, stored_nbytes(&j->h)) ||
	       j->h.fixed == (1 << dtype_of(j->h.dtype)->nbytes) - 1;
}

/* Return 1 if the sizes of regions depend on the tensor's values. */
static int regions_vary(const struct header *h)
{
	return !codec_is_rows(h->codec) || h->coded;
}

/*
 * For codecs that are never stored, decide when the residual is written: with the blocks if the largest possible frame
 * fits the capacity, else after them. If region sizes do not depend on values, the frame must fit, else return
 * CODEC_SHORT_OUTPUT.
 */
static codec_status fit_blocks(struct job *j, size_t capacity)
{
	uint64_t most = j->h.regions_at + family_of(&j->h)->regions_bound(j, 0, j->h.nblocks);

	if (j->h.side_nbytes > UINT32_MAX || most / WIRE_ALIGN > UINT32_MAX)
		return CODEC_LIMIT;
	if ((regions_vary(&j->h) ? j->h.regions_at : most) > capacity)
		return CODEC_SHORT_OUTPUT;
	if (j->residual)
		j->residual = most > capacity ? RESIDUAL_LAST : RESIDUAL_WITH_BLOCKS;
	return CODEC_OK;
}

/* Make all choices for the sections before the directory. Called after all pieces were scanned. */
static codec_status start(struct job *j, const struct source *src, size_t capacity, const codec_context *with)
{
	const struct header asked = j->h;

	if (j->h.layout == WIRE_LAYOUT_BLOCKS) {
		TRY(family_of(&j->h)->choose(j, kernels_for(with), src, with));
		j->h.side_nbytes = side_write(j, NULL);
		TRY(header_derive(&j->h));
		if (codec_never_stored(j->h.codec))
			TRY(fit_blocks(j, capacity));
		else if (codec_is_delta(j->h.codec) && j->h.regions_at > capacity)
			return CODEC_SHORT_OUTPUT;
		else if (codec_may_store(j->h.codec) && stays_stored(j, capacity))
			TRY(header_store(&j->h, &asked));
	}
	j->state = JOB_READY;
	return CODEC_OK;
}

static codec_status encode_open(const codec_spec *spec, const codec_tensor *src, uint8_t *dst, size_t capacity,
				const codec_context *with, void *memory, size_t job_nbytes, struct job **out)
{
	struct source values;
	codec_spec s = {0};
	struct header h;
	codec_tensor t;
	struct job *j;

	TRY(request(spec, src, 1, &h, &t));
	memcpy(&s, spec, sizeof s);
	TRY(check_residual(&h, with));
	if ((!dst && capacity) || with->ncodebooks > 1)
		return CODEC_BAD_ARGUMENT;
	TRY(segments_check(with, h.n));
	TRY(family_check_state(&h, with, 1));
	if (outputs_overlap(&h, &t, dst, capacity, with))
		return CODEC_BAD_ARGUMENT;
	TRY(job_open(memory, job_nbytes, &h, JOB_ENCODE, &j));
	*out = j;
	j->reads_residual = with->flags & READS_RESIDUAL;
	j->verify_first = (with->flags & CODEC_VERIFY_FIRST) != 0;
	TRY(family_of(&h)->begin(j, &s, with));
	values = source_of(&t, with);
	if (j->h.layout == WIRE_LAYOUT_BLOCKS && family_of(&h)->sample)
		j->nscans = family_of(&h)->sample(j, kernels_for(with), &values, with);
	if (j->nscans) {
		j->state = JOB_SCANNING;
		return CODEC_OK;
	}
	return start(j, &values, capacity, with);
}

/*
 * Codecs that may store the tensor raw: return 1 if a frame in blocks that ends at `end` or before cannot fail, nor be
 * replaced by a stored frame, for which a residual that is also an input must be unchanged.
 */
static int fits_surely(const struct job *j, uint64_t end, uint64_t capacity)
{
	return end <= capacity && end / WIRE_ALIGN <= UINT32_MAX && !choose_stored(end, stored_nbytes(&j->h));
}

static codec_status encode_blocks(const struct source *src, uint8_t *dst, size_t capacity, const codec_context *with,
				  struct job *j, codec_range *range, void *work)
{
	const struct kernels *k = kernels_for(with);
	const struct family *family = family_of(&j->h);
	/* region sizes that do not depend on values need no region buffer */
	int has_buffer = regions_vary(&j->h);
	uint64_t most = region_bound(j), at = range->at;
	uint8_t *to = range->buffer ? range->buffer : dst + at, *buffer;
	struct work w;

	work_place(&j->h, work, &w);
	buffer = w.region;
	range->checksum = 0;
	range->end = at;
	for (uint64_t b = range->first; b < range->first + range->count; b++) {
		uint8_t *entry = dst + j->h.directory_at + WIRE_DIRECTORY_ENTRY * b;
		uint64_t digest = 0, own, nbytes;

		if (family->regions_bound)
			most = family->regions_bound(j, b, 1);
		if (capacity - at < most && !has_buffer)
			return CODEC_SHORT_OUTPUT;
		w.region = capacity - at < most ? buffer : to; /* encode in place if every region fits */
		if (j->blocks_leave && fits_surely(j, at + (j->h.nblocks - b) * most, capacity)) {
			w.residual = with->residual;
			j->nleft++;
		}
		TRY(family->encode_block(j, k, with, src, b, dst, &w, &digest, &nbytes));
		if (nbytes > capacity - at)
			return CODEC_SHORT_OUTPUT;
		if (w.region == buffer)
			memcpy(to, buffer, nbytes);
		if (j->residual == RESIDUAL_WITH_BLOCKS)
			TRY(family->block_leave(j, k, src, to, b, with->residual, &w));
		own = checksum_of_block(digest + k->digest(to, nbytes, WIRE_SEED_REGION), b);
		range->checksum += own;
		at += nbytes;
		to += nbytes;
		if (at / WIRE_ALIGN > UINT32_MAX)
			return CODEC_LIMIT;
		store32(entry, (uint32_t)(at / WIRE_ALIGN));
		store32(entry + 4, checksum_short(own));
		range->end = at;
	}
	return CODEC_OK;
}

/* Return 1 if `src` has the dtype and size of the tensor with which the job was opened. */
static int fits_tensor(const struct job *j, const codec_tensor *src)
{
	return src && src->struct_nbytes >= sizeof *src && src->dtype == j->h.dtype &&
	       src->nbytes == j->h.n * dtype_of(j->h.dtype)->nbytes && (src->data || !src->nbytes);
}

/* Return 1 if CODEC_FEEDBACK and CODEC_DIFFERENCE are set as when the job was opened. */
static int fits_residual(const struct job *j, const codec_context *with)
{
	return (with->flags & READS_RESIDUAL) == j->reads_residual && check_residual(&j->h, with) == CODEC_OK;
}

/* Check the arguments of a step against those with which the job was opened: tensor, capacity, residual, metric. */
static codec_status check_step(const struct job *j, const codec_tensor *src, const void *dst, size_t capacity,
			       const codec_context *with)
{
	if (!j || !fits_tensor(j, src) || !fits_residual(j, with) || (!dst && capacity) ||
	    (codec_never_stored(j->h.codec) && !with->residual != (j->residual == RESIDUAL_NONE)))
		return CODEC_BAD_ARGUMENT;
	TRY(family_check_state(&j->h, with, 1));
	return outputs_overlap(&j->h, src, dst, capacity, with) ? CODEC_BAD_ARGUMENT : CODEC_OK;
}

/*
 * Return CODEC_SHORT_OUTPUT unless the residual is written with the blocks, because steps cannot encode blocks a second
 * time. The caller may repeat the step with more capacity; no other step may follow.
 */
static codec_status require_stepwise(struct job *j)
{
	if (j->state != JOB_READY || j->residual != RESIDUAL_LAST)
		return CODEC_OK;
	j->residual = RESIDUAL_WITH_BLOCKS;
	j->state = j->nscans ? JOB_SCANNING : JOB_OPEN;
	return CODEC_SHORT_OUTPUT;
}

/*
 * Return the bytes of dst to reserve per block if ranges are encoded concurrently: the upper bound of a region or, if
 * the capacity is smaller, an equal share of the capacity. Return 0 if one range must encode all blocks: if the share
 * is so far below the size of the values in a region that a useful frame may exceed it, or if the residual is written
 * with the blocks, possibly over the tensor, so that a range that does not fit could not be encoded again.
 */
static uint64_t range_room(const struct job *j, size_t capacity)
{
	uint64_t most = j->plan.region_bound, nblocks = j->h.nblocks, each, values;

	if (!nblocks || capacity < j->h.regions_at)
		return 0;
	each = (capacity - j->h.regions_at) / nblocks;
	if (most <= each)
		return most;
	if (j->residual)
		return 0;
	if ((nblocks - 1) * most < capacity - j->h.regions_at)
		return most;
	each &= ~(uint64_t)(WIRE_ALIGN - 1);
	values = MIN(most, j->h.n * dtype_of(j->h.dtype)->nbytes / nblocks);
	return 8 * each < 7 * values ? 0 : each;
}

static void plan_ranges(struct job *j, size_t capacity, codec_plan *plan)
{
	job_plan(j, NULL);
	j->plan.room = range_room(j, capacity);
	if (plan)
		*plan = j->plan;
}

codec_status codec_encode_open(const codec_spec *spec, const codec_tensor *src, void *dst, size_t capacity,
			       const codec_context *with, void *job, size_t job_nbytes, codec_plan *plan)
{
	codec_status status;
	codec_context c;
	uint64_t saved;
	struct job *j;

	TRY(context_read(with, &c));
	saved = call_enter();
	status = encode_open(spec, src, dst, capacity, &c, job, job_nbytes, &j);
	call_leave(saved);
	TRY(status);
	plan_ranges(j, capacity, plan);
	return require_stepwise(j);
}

codec_status codec_encode_scan(const codec_tensor *src, const codec_context *with, void *job, uint64_t first,
			       uint64_t count)
{
	struct job *j = job_at(job, JOB_ENCODE, JOB_SCANNING);
	struct source values;
	uint64_t saved;
	codec_context c;

	TRY(context_read(with, &c));
	if (!j || !fits_tensor(j, src) || !fits_residual(j, &c) || first > j->nscans || count > j->nscans - first)
		return CODEC_BAD_ARGUMENT;
	values = source_of(src, &c);
	saved = call_enter();
	family_of(&j->h)->scan(j, kernels_for(&c), &values, first, count);
	call_leave(saved);
	return CODEC_OK;
}

codec_status codec_encode_start(const codec_tensor *src, void *dst, size_t capacity, const codec_context *with,
				void *job, codec_plan *plan)
{
	struct job *j = job_at(job, JOB_ENCODE, JOB_SCANNING);
	codec_status status;
	codec_context c;
	struct source values;
	uint64_t saved;

	TRY(context_read(with, &c));
	TRY(check_step(j, src, dst, capacity, &c));
	values = source_of(src, &c);
	saved = call_enter();
	status = start(j, &values, capacity, &c);
	call_leave(saved);
	TRY(status);
	plan_ranges(j, capacity, plan);
	return require_stepwise(j);
}

codec_status codec_encode_blocks(const codec_tensor *src, void *dst, size_t capacity, const codec_context *with,
				 void *job, codec_range *range, void *work, size_t work_nbytes)
{
	struct job *j = job_at(job, JOB_ENCODE, JOB_READY);
	codec_status status;
	codec_context c;
	struct source values;
	codec_range r;
	uint64_t saved;

	TRY(context_read(with, &c));
	TRY(check_step(j, src, dst, capacity, &c));
	if (!range || !work)
		return CODEC_BAD_ARGUMENT;
	r = *range;
	if (!has_blocks(&j->h, &r) || r.at % WIRE_ALIGN || r.at < j->h.regions_at || r.at > capacity)
		return CODEC_BAD_ARGUMENT;
	if (work_nbytes < j->plan.work_nbytes)
		return CODEC_SHORT_SCRATCH;
	if (j->residual && family_of(&j->h)->regions_bound(j, r.first, r.count) > capacity - r.at)
		return CODEC_SHORT_OUTPUT;
	values = source_of(src, &c);
	saved = call_enter();
	status = encode_blocks(&values, dst, capacity, &c, j, &r, work);
	call_leave(saved);
	range->end = r.end;
	range->checksum = r.checksum;
	return status;
}

codec_status codec_encode_move(const void *job, void *dst, size_t capacity, codec_range *range, uint64_t to)
{
	const struct job *j = job_at(job, JOB_ENCODE, JOB_READY);
	codec_range r;
	uint64_t end;

	if (!j || !dst || !range)
		return CODEC_BAD_ARGUMENT;
	r = *range;
	if (!r.count || !has_blocks(&j->h, &r) || (r.at | to) % WIRE_ALIGN || to < j->h.regions_at ||
	    capacity < j->h.regions_at)
		return CODEC_BAD_ARGUMENT;
	end = encode_move(&j->h, dst, capacity, &r, to);
	if (!end)
		return CODEC_BAD_ARGUMENT;
	range->at = to;
	range->end = end;
	range->buffer = NULL;
	return CODEC_OK;
}

codec_status codec_encode_close(const codec_tensor *src, void *dst, size_t capacity, const codec_context *with,
				void *job, const codec_range *ranges, size_t nranges, size_t *written)
{
	struct job *j = job_at(job, JOB_ENCODE, JOB_READY);
	codec_status status;
	codec_context c;
	struct source values;
	uint64_t saved;

	TRY(context_read(with, &c));
	TRY(check_step(j, src, dst, capacity, &c));
	if (!written || (nranges && !ranges))
		return CODEC_BAD_ARGUMENT;
	*written = 0;
	if (j->h.nblocks && capacity < j->h.regions_at)
		return CODEC_BAD_ARGUMENT;
	values = source_of(src, &c);
	saved = call_enter();
	status = encode_finish(&values, dst, capacity, &c, j, ranges, nranges, written);
	if (status == CODEC_OK)
		status = encode_leave(j, &values, dst, &c, NULL);
	call_leave(saved);
	if (status != CODEC_BAD_ARGUMENT)
		j->state = JOB_CLOSED;
	return status;
}

static codec_status encode(const codec_spec *spec, const codec_tensor *src, void *dst, size_t capacity, size_t *written,
			   const codec_context *with, void *scratch, size_t scratch_nbytes)
{
	const struct kernels *k = kernels_for(with);
	const struct family *family;
	struct source values;
	codec_range all = {0};
	codec_status status;
	struct job *j;
	void *work;

	TRY(encode_open(spec, src, dst, capacity, with, scratch, scratch_nbytes, &j));
	if (scratch_nbytes < job_scratch(&j->h))
		return CODEC_SHORT_SCRATCH;
	family = family_of(&j->h);
	values = source_of(src, with);
	if (j->nscans) {
		j->blocks_scan = (uint8_t)(family->blocks_can_scan && family->blocks_can_scan(j));
		if (!j->blocks_scan)
			family->scan(j, k, &values, 0, j->nscans);
		TRY(start(j, &values, capacity, with));
	}
	job_plan(j, NULL);
	work = job_work(j, scratch);
	/* levels from the caller may be invalid in any block */
	j->blocks_leave = with->residual && codec_may_store(j->h.codec) && family->leave && !with->levels;
	all.count = j->h.nblocks;
	all.at = j->h.regions_at;
	if (j->h.nblocks) {
		status = encode_blocks(&values, dst, capacity, with, j, &all, work);
		if ((status == CODEC_SHORT_OUTPUT || status == CODEC_LIMIT) && codec_may_store(j->h.codec)) {
			TRY(encode_store(&values, k, j->h, dst, capacity, written)); /* a stored frame may fit */
			return encode_leave(j, &values, dst, with, work);
		}
		TRY(status);
	}
	if (j->blocks_scan)
		TRY(family->scanned(j));
	TRY(encode_finish(&values, dst, capacity, with, j, &all, 1, written));
	return encode_leave(j, &values, dst, with, work);
}

codec_status codec_encode(const codec_spec *spec, const codec_tensor *src, void *dst, size_t capacity, size_t *written,
			  float *residual, const codec_context *with, void *scratch, size_t scratch_nbytes)
{
	codec_status status;
	codec_context c;
	uint64_t saved;

	if (!written)
		return CODEC_BAD_ARGUMENT;
	*written = 0;
	TRY(context_read(with, &c));
	c.residual = residual ? residual : c.residual;
	saved = call_enter();
	status = encode(spec, src, dst, capacity, written, &c, scratch, scratch_nbytes);
	call_leave(saved);
	if (status != CODEC_OK)
		*written = 0;
	return status;
}

codec_status codec_count(const codec_spec *spec, const codec_tensor *src, uint64_t counts[256],
			 const codec_context *with, void *scratch, size_t scratch_nbytes)
{
	codec_status status = CODEC_OK;
	struct header h;
	codec_context c;
	codec_tensor t;
	struct source values;
	uint64_t saved;
	struct job *j;

	if (!counts)
		return CODEC_BAD_ARGUMENT;
	TRY(context_read(with, &c));
	TRY(request(spec, src, 1, &h, &t));
	TRY(has_exponents(&h));
	TRY(check_residual(&h, &c));
	TRY(segments_check(&c, h.n));
	TRY(family_check_state(&h, &c, 1));
	TRY(job_open(scratch, scratch_nbytes, &h, JOB_ENCODE, &j));
	if (!h.n)
		return CODEC_OK;
	values = source_of(&t, &c);
	c.ncodebooks = 0;
	saved = call_enter();
	status = family_of(&h)->begin(j, spec, &c);
	if (status == CODEC_OK)
		status = family_of(&h)->choose(j, kernels_for(&c), &values, &c);
	call_leave(saved);
	for (int i = 0; i < 256 && status == CODEC_OK; i++)
		counts[i] += j->sample.counts[0][i];
	return status;
}
