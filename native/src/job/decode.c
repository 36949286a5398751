/*
 * decode.c - decode a frame: open (check, build tables), decode blocks, close (compare the checksum).
 *
 * One file: codec_decode and codec_decode_part call the same steps and share their checks.
 */
#include "api.h"

#define VERIFY_FLAGS                                                                                                   \
	(CODEC_VERIFY_FIRST | CODEC_CHECK_ONLY) /* one-call functions only; callers of steps use codec_decode_check */

/* Return 1 if `into` allows a division: the result is complete, and float32. */
static int divides(uint32_t into)
{
	return into != CODEC_INTO_STORE && into != CODEC_INTO_CODES && into != CODEC_INTO_ADD_CODES;
}

/* Return the dtype of the destination that `into` requires for a frame, or 0 if the frame does not allow `into`. */
static uint32_t dtype_into(const struct header *h, uint32_t into, uint32_t given)
{
	const int integer = given == CODEC_INT8 || given == CODEC_INT16 || given == CODEC_INT32;

	if (into == CODEC_INTO_STORE)
		return h->dtype;
	if (codec_is_delta(h->codec)) /* frames of DELTA hold changes, which cannot be summed */
		return 0;
	if (into < CODEC_INTO_CODES)
		return CODEC_FLOAT32;
	if (!(header_traits(h) & CODEC_TRAIT_SUMS) || (given != CODEC_FLOAT32 && !integer))
		return 0;
	return into == CODEC_INTO_SCALE_CODES ? CODEC_FLOAT32 : given;
}

/* Check, without the frame, that the destination is a valid tensor. */
static codec_status read_destination(const codec_tensor *dst, const codec_context *with, codec_tensor *copy)
{
	if (!dst || dst->struct_nbytes < sizeof *dst || (with->divide > 0 && !divides(with->into)))
		return CODEC_BAD_ARGUMENT;
	*copy = *dst;
	return copy->nbytes && !copy->data ? CODEC_BAD_ARGUMENT : CODEC_OK;
}

/* Check that the destination has the frame's dtype and shape. */
static codec_status check_destination(const struct header *h, const codec_tensor *dst, uint32_t into, codec_fault *f)
{
	uint32_t dtype = dtype_into(h, into, dst->dtype);

	if (!dtype)
		return CODEC_BAD_ARGUMENT;
	if (into != CODEC_INTO_STORE && !codec_takes(CODEC_SIGN, h->dtype))
		return fault(f, CODEC_BAD_DTYPE, WIRE_AT_DTYPE, h->dtype, CODEC_FLOAT32);
	if (dst->dtype != dtype)
		return fault(f, CODEC_SHAPE_MISMATCH, WIRE_AT_DTYPE, dtype, dst->dtype);
	if (dst->rank != h->rank)
		return fault(f, CODEC_SHAPE_MISMATCH, WIRE_AT_RANK, h->rank, dst->rank);
	for (uint32_t i = 0; i < h->rank; i++)
		if (dst->shape[i] != h->shape[i])
			return fault(f, CODEC_SHAPE_MISMATCH, WIRE_AT_SHAPE + 8 * i, h->shape[i], dst->shape[i]);
	return dst->nbytes == h->n * dtype_of(dtype)->nbytes ? CODEC_OK : CODEC_BAD_ARGUMENT;
}

/* Store or accumulate the values of a stored frame whose checksum has been verified. */
static void put_stored(const uint8_t *frame, const codec_tensor *dst, const codec_context *with, const struct header *h)
{
	if (with->into != CODEC_INTO_STORE) {
		sink_values(kernels_for(with), h->dtype, frame + h->side_at, 1, 0, h->n, with, dst);
		return;
	}
	if (dst->nbytes)
		memcpy(dst->data, frame + h->side_at, dst->nbytes);
#if CODEC_BIG_ENDIAN
	swap_bytes(dst->data, dst->nbytes, dtype_of(h->dtype)->nbytes);
#endif
}

/*
 * Return frame_verify's error if the frame is damaged, else `status`. `status` is a mismatch between the frame and the
 * caller's destination, state or codebooks, which damage may have caused.
 */
static codec_status damage_or(codec_status status, const uint8_t *frame, const struct header *h,
			      const codec_context *with)
{
	codec_fault found = with->fault ? *with->fault : (codec_fault){0};

	if (status == CODEC_OK || (status >= CODEC_TRUNCATED && status < CODEC_UNKNOWN_CODEBOOK) ||
	    with->flags & CODEC_NO_CHECKSUM)
		return status;
	TRY(frame_verify(frame, h, kernels_for(with), with->fault));
	return fault(with->fault, status, found.offset, found.found, found.expected);
}

/*
 * Check that the caller supplied the state that decoding needs, and that the destination, unless NULL, overlaps no
 * input.
 */
static codec_status check_caller(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				 const struct header *h)
{
	TRY(family_check_state(h, with, 0));
	return dst && (spans_overlap(dst->data, dst->nbytes, frame, h->frame_nbytes) ||
		       family_reads(h, with, 0, dst->data, dst->nbytes, 1))
		       ? CODEC_BAD_ARGUMENT
		       : CODEC_OK;
}

/* Create a job for a frame with header h, and read the frame's side section. */
static codec_status open_job(const uint8_t *frame, const struct header *h, const codec_context *with, void *memory,
			     size_t job_nbytes, struct job **out)
{
	TRY(job_open(memory, job_nbytes, h, JOB_DECODE, out));
	(*out)->checked = (with->flags & CODEC_NO_CHECKSUM) != 0;
	TRY(side_read(frame, with, *out));
	job_plan(*out, NULL);
	return CODEC_OK;
}

/*
 * Perform all checks that precede decoding the first block, and set up the job. Nothing but the job is written. The
 * checksum of a stored frame is verified here.
 */
codec_status decode_open(const uint8_t *frame, size_t nbytes, const codec_tensor *dst, const codec_context *with,
			 void *memory, size_t job_nbytes, struct job **out)
{
	codec_tensor t;
	struct header h;
	struct job *j;

	TRY(read_destination(dst, with, &t));
	TRY(frame_open(frame, nbytes, with, &h));
	TRY(damage_or(check_destination(&h, &t, with->into, with->fault), frame, &h, with));
	TRY(damage_or(check_caller(frame, &t, with, &h), frame, &h, with));
	TRY(damage_or(open_job(frame, &h, with, memory, job_nbytes, &j), frame, &h, with));
	*out = j;
	if (!j->checked)
		j->outer_checksum = frame_outer_checksum(frame, &h, kernels_for(with));
	if (!h.nblocks && !j->checked) {
		TRY(frame_compare_checksum(&h, j->outer_checksum, with->fault));
		if (codec_is_delta(h.codec))
			TRY(delta_open(j, with));
	}
	j->state = JOB_READY;
	return CODEC_OK;
}

/*
 * Decode a range of blocks to dst, or only check them if dst is NULL. Set range->checksum to the sum of their
 * checksums.
 */
codec_status decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
			   const struct job *j, codec_range *range, void *work)
{
	codec_status status;
	struct work w;

	work_place(&j->h, work, &w);
	range->checksum = 0;
	status = family_of(&j->h)->decode_blocks(frame, dst, with, j, range, &w);
	/* damage in a later block may have caused a state mismatch in this one */
	return j->checked ? status : damage_or(status, frame, &j->h, with);
}

codec_status decode_close(const codec_context *with, const struct job *j, uint64_t checksum)
{
	if (j->checked || !j->h.nblocks)
		return CODEC_OK;
	TRY(frame_compare_checksum(&j->h, j->outer_checksum + checksum, with->fault));
	return codec_is_delta(j->h.codec) ? delta_close(j, with) : CODEC_OK;
}

/* Check all blocks and the checksum of an opened frame, before the destination is written. */
codec_status decode_check(const uint8_t *frame, const codec_context *with, struct job *j, void *work)
{
	codec_range all = {.count = j->h.nblocks};

	if (j->h.nblocks) {
		TRY(decode_blocks(frame, NULL, with, j, &all, work));
		TRY(decode_close(with, j, all.checksum));
	}
	j->checked = 1;
	return CODEC_OK;
}

/* Decode all values of an opened frame. */
codec_status decode_values(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
			   const struct job *j, void *work)
{
	codec_range all = {.count = j->h.nblocks};

	if (j->h.nblocks) {
		TRY(decode_blocks(frame, dst, with, j, &all, work));
		return decode_close(with, j, all.checksum);
	}
	if (codec_is_delta(j->h.codec))
		delta_copy(j, with, dst);
	else
		put_stored(frame, dst, with, &j->h);
	return CODEC_OK;
}

/*
 * Let a check of all blocks keep the symbols of plane 0 in the memory of the job, if its `nbytes` bytes suffice. Return
 * the number of bytes that this takes.
 */
static uint64_t keep_symbols(struct job *j, uint64_t nbytes)
{
	uint64_t room = job_room(&j->h, JOB_DECODE);
	uint64_t kept = kept_nbytes(j->h.codec, j->h.n, j->h.block, j->h.nblocks);

	if (!kept || nbytes < room + kept)
		return 0;
	j->kept_at = room;
	memset(job_kept_nbytes(j), 0, 8 * j->h.nblocks);
	return kept;
}

codec_status codec_decode_open(const void *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
			       void *job, size_t job_nbytes, codec_plan *plan)
{
	codec_status status;
	codec_context c;
	uint64_t saved;
	struct job *j;

	TRY(context_read(with, &c));
	if (c.flags & VERIFY_FLAGS)
		return CODEC_BAD_ARGUMENT;
	saved = call_enter();
	status = decode_open(frame, nbytes, dst, &c, job, job_nbytes, &j);
	if (status == CODEC_OK && !j->h.nblocks)
		status = decode_values(frame, dst, &c, j, NULL);
	call_leave(saved);
	TRY(status);
	keep_symbols(j, job_nbytes);
	job_plan(j, plan);
	return CODEC_OK;
}

codec_status codec_decode_plan(const void *head, size_t head_nbytes, size_t nbytes, const codec_context *with,
			       void *job, size_t job_nbytes, codec_plan *plan)
{
	codec_status status;
	codec_context c;
	struct header h;
	uint64_t saved;
	struct job *j;

	TRY(context_read(with, &c));
	TRY(frame_head(head, head_nbytes, nbytes, &c, &h));
	if (head_nbytes < h.directory_at)
		return fault(c.fault, CODEC_TRUNCATED, head_nbytes, head_nbytes, h.directory_at);
	saved = call_enter();
	status = open_job(head, &h, &c, job, job_nbytes, &j);
	call_leave(saved);
	TRY(status);
	if (!j->checked)
		j->outer_checksum = head_checksum(&h, kernels_for(&c), (const uint8_t *)head + h.side_at);
	j->state = JOB_PLANNED;
	job_plan(j, plan);
	return CODEC_OK;
}

/*
 * Check the arguments of a step that decodes a range of blocks. Copy the destination's struct, unless NULL, to *copy.
 */
codec_status decode_step(const uint8_t *frame, size_t nbytes, const codec_tensor *dst, const codec_context *with,
			 const void *job, const codec_range *range, const void *work, size_t work_nbytes,
			 codec_tensor *copy)
{
	const struct job *j = job_at(job, JOB_DECODE, JOB_READY);

	if (with->flags & VERIFY_FLAGS || !frame || !j || !work || !has_blocks(&j->h, range) ||
	    nbytes < j->h.frame_nbytes)
		return CODEC_BAD_ARGUMENT;
	if (dst) {
		TRY(read_destination(dst, with, copy));
		TRY(check_destination(&j->h, copy, with->into, with->fault));
	}
	TRY(check_caller(frame, dst ? copy : NULL, with, &j->h));
	return work_nbytes < j->plan.work_nbytes ? CODEC_SHORT_SCRATCH : CODEC_OK;
}

static codec_status step(const uint8_t *frame, size_t nbytes, const codec_tensor *dst, const codec_context *with,
			 const void *job, codec_range *range, void *work, size_t work_nbytes)
{
	codec_status status;
	codec_context c;
	codec_tensor t;
	codec_range r;
	uint64_t saved;

	TRY(context_read(with, &c));
	if (!range)
		return CODEC_BAD_ARGUMENT;
	r = *range;
	TRY(decode_step(frame, nbytes, dst, &c, job, &r, work, work_nbytes, &t));
	saved = call_enter();
	status = decode_blocks(frame, dst ? &t : NULL, &c, job_place((void *)job), &r, work);
	call_leave(saved);
	range->checksum = r.checksum;
	return status;
}

codec_status codec_decode_check(const void *frame, size_t nbytes, const codec_context *with, const void *job,
				codec_range *range, void *work, size_t work_nbytes)
{
	return step(frame, nbytes, NULL, with, job, range, work, work_nbytes);
}

codec_status codec_decode_blocks(const void *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
				 const void *job, codec_range *range, void *work, size_t work_nbytes)
{
	return dst ? step(frame, nbytes, dst, with, job, range, work, work_nbytes) : CODEC_BAD_ARGUMENT;
}

codec_status codec_decode_changes(const void *job, uint32_t *at, void *values, size_t room, size_t *count)
{
	const struct job *j = job_at(job, JOB_DECODE, JOB_READY);

	if (!j || !count || !codec_is_delta(j->h.codec) || (room && (!at || !values)))
		return CODEC_BAD_ARGUMENT;
	return delta_changes(j, at, values, room, count);
}

codec_status codec_decode_close(const codec_context *with, const void *job, uint64_t checksum)
{
	const struct job *j = job_at(job, JOB_DECODE, JOB_READY), *planned = job_at(job, JOB_DECODE, JOB_PLANNED);
	codec_context c;

	TRY(context_read(with, &c));
	if (planned && !planned->checked)
		return frame_compare_checksum(&planned->h, planned->outer_checksum + checksum, c.fault);
	return planned ? CODEC_OK : j ? decode_close(&c, j, checksum) : CODEC_BAD_ARGUMENT;
}

/*
 * Return 1 if the caller demands that dst is written only after all checks, and the frame has a single block, so that
 * all its values fit into a work buffer.
 */
static int fits_buffer(const struct job *j, const codec_context *with)
{
	return with->flags & CODEC_VERIFY_FIRST && !(with->flags & CODEC_CHECK_ONLY) &&
	       with->into == CODEC_INTO_STORE && j->h.nblocks == 1 && codec_may_store(j->h.codec);
}

/* Decode a frame of one block into the work buffer, then copy to dst. This is faster than checking, then decoding. */
static codec_status decode_via_buffer(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				      const struct job *j, void *work)
{
	codec_tensor block = *dst;
	struct work w;

	work_place(&j->h, work, &w);
	block.data = w.values;
	TRY(decode_values(frame, &block, with, j, work));
	memcpy(dst->data, w.values, j->h.n * dtype_of(j->h.dtype)->nbytes);
	return CODEC_OK;
}

static codec_status decode(const uint8_t *frame, size_t nbytes, const codec_tensor *dst, const codec_context *with,
			   void *scratch, size_t scratch_nbytes)
{
	struct job *j;
	char *work;

	TRY(decode_open(frame, nbytes, dst, with, scratch, scratch_nbytes, &j));
	if (scratch_nbytes < job_scratch(&j->h))
		return CODEC_SHORT_SCRATCH;
	work = job_work(j, scratch);
	if (fits_buffer(j, with))
		return decode_via_buffer(frame, dst, with, j, work);
	if ((with->flags & VERIFY_FLAGS) == CODEC_VERIFY_FIRST)
		work += keep_symbols(j, scratch_nbytes - work_nbytes(&j->h));
	if (with->flags & VERIFY_FLAGS)
		TRY(decode_check(frame, with, j, work));
	return with->flags & CODEC_CHECK_ONLY ? CODEC_OK : decode_values(frame, dst, with, j, work);
}

codec_status codec_decode(const void *frame, size_t nbytes, codec_tensor *dst, const codec_context *with, void *scratch,
			  size_t scratch_nbytes)
{
	codec_status status;
	codec_context c;
	uint64_t saved;

	TRY(context_read(with, &c));
	saved = call_enter();
	status = decode(frame, nbytes, dst, &c, scratch, scratch_nbytes);
	call_leave(saved);
	return status;
}

/*
 * Return a tensor whose byte `at` is at the address `part`, so that code can index a part as if it were the whole
 * tensor. Only bytes of the part may be accessed.
 */
static codec_tensor around(const struct header *h, const void *part, uint64_t at)
{
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = h->dtype, .rank = h->rank};

	memcpy(t.shape, h->shape, sizeof t.shape);
	t.data = (void *)((uintptr_t)part - at);
	t.nbytes = h->n * dtype_of(h->dtype)->nbytes;
	return t;
}

/* Check that a DELTA frame has the blocks of *range, and that the part has their size. *at: the part's byte offset in
 * the tensor.
 */
static codec_status check_part(const struct header *h, const codec_range *range, const void *base, const void *dst,
			       uint64_t part_nbytes, uint64_t *at)
{
	uint64_t nblocks = h->nblocks ? h->nblocks : h->n > 0, block = h->nblocks ? h->block : h->n, first, end;

	if (!codec_is_delta(h->codec) || range->first > nblocks || range->count > nblocks - range->first ||
	    (part_nbytes && (!base || !dst)))
		return CODEC_BAD_ARGUMENT;
	first = MIN(range->first * block, h->n);
	end = MIN((range->first + range->count) * block, h->n);
	*at = first * dtype_of(h->dtype)->nbytes;
	return part_nbytes == (end - first) * dtype_of(h->dtype)->nbytes ? CODEC_OK : CODEC_SHAPE_MISMATCH;
}

static codec_status decode_part(const uint8_t *frame, const struct header *h, codec_range *range,
				const codec_tensor *dst, const codec_context *with, void *scratch,
				size_t scratch_nbytes)
{
	struct job *j;

	TRY(open_job(frame, h, with, scratch, scratch_nbytes, &j));
	if (scratch_nbytes < job_scratch(h))
		return CODEC_SHORT_SCRATCH;
	TRY(decode_blocks(frame, NULL, with, j, range, job_work(j, scratch)));
	return decode_blocks(frame, dst, with, j, range, job_work(j, scratch));
}

codec_status codec_decode_part(const void *frame, size_t nbytes, uint64_t first, uint64_t count, const void *base,
			       void *dst, size_t part_nbytes, const codec_context *with, void *scratch,
			       size_t scratch_nbytes)
{
	codec_range range = {.first = first, .count = count};
	codec_tensor values, result;
	codec_status status;
	struct header h;
	codec_context c;
	uint64_t saved, at;

	TRY(context_read(with, &c));
	TRY(frame_open(frame, nbytes, &c, &h));
	if (!(c.flags & CODEC_NO_CHECKSUM))
		TRY(frame_verify(frame, &h, kernels_for(&c), c.fault));
	TRY(check_part(&h, &range, base, dst, part_nbytes, &at));
	if (spans_overlap(dst, part_nbytes, frame, nbytes) ||
	    (base != dst && spans_overlap(dst, part_nbytes, base, part_nbytes)) || c.into != CODEC_INTO_STORE)
		return CODEC_BAD_ARGUMENT;
	if (!h.nblocks) {
		if (part_nbytes && base != dst)
			memcpy(dst, base, part_nbytes);
		return CODEC_OK;
	}
	values = around(&h, base, at);
	result = around(&h, dst, at);
	c.base = &values;
	c.flags |= CODEC_NO_CHECKSUM;
	saved = call_enter();
	status = decode_part(frame, &h, &range, &result, &c, scratch, scratch_nbytes);
	call_leave(saved);
	return status;
}

codec_status codec_accumulate(const void *frame, size_t nbytes, float weight, codec_tensor *dst,
			      const codec_context *with, void *scratch, size_t scratch_nbytes)
{
	codec_context c;

	TRY(context_read(with, &c));
	c.struct_nbytes = sizeof c;
	c.into = CODEC_INTO_ADD;
	c.weight = weight;
	c.flags |= CODEC_VERIFY_FIRST;
	return codec_decode(frame, nbytes, dst, &c, scratch, scratch_nbytes);
}
