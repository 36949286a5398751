/* decode.c - decode the changes of a block against its base. Safe for any bytes: they give values or an error. */
#include "delta.h"

#define BAD(where, found, expected) return fault(f, CODEC_BAD_REGION, where, found, expected)

/* State of decoding a block. */
struct changes {
	struct delta_kind q;
	uint64_t first, m, at, end; /* the block has values [first, first + m), and its region is frame[at, end) */
	const char *base;
	uint32_t mode, field, count;
	struct delta_list list; /* changes, unless the mode is RAW */
	uint64_t summed;        /* number of the base's chunks whose checksum sums were computed */
};

static codec_status read_head(const uint8_t *frame, const struct header *h, uint64_t b, struct changes *c,
			      codec_fault *f)
{
	uint32_t head = load32(frame + c->at);
	uint64_t raw;

	c->first = delta_span(h, b, &c->m);
	c->mode = head & 3;
	c->field = head >> WIRE_DELTA_SCALE_AT & WIRE_DELTA_SCALE;
	c->count = (head >> WIRE_DELTA_CHANGES_AT) + 1;
	raw = delta_raw_nbytes(h, c->m);
	if (c->mode == WIRE_DELTA_SAME) {
		c->count = 0;
		if (head || c->end - c->at != WIRE_ALIGN || load32(frame + c->at + 4))
			BAD(c->at, head, 0);
		return CODEC_OK;
	}
	if (c->count > c->m)
		BAD(c->at, c->count, c->m);
	if (c->mode == WIRE_DELTA_RAW) {
		if (c->field)
			BAD(c->at, c->field, 0);
		if (c->end - c->at != raw)
			BAD(c->at, c->end - c->at, raw);
		for (uint64_t i = c->at + 4 + c->m * c->q.item; i < c->end; i++)
			if (frame[i])
				BAD(i, frame[i], 0);
	} else if (c->mode == WIRE_DELTA_STEPS && c->q.last) {
		if ((int)c->field - WIRE_DELTA_BIAS > delta_most_scale(&c->q))
			BAD(c->at, c->field, delta_most_scale(&c->q) + WIRE_DELTA_BIAS);
	} else if (c->field > WIRE_DELTA_MAX_GAP_K) {
		BAD(c->at, c->field, WIRE_DELTA_MAX_GAP_K);
	}
	return CODEC_OK;
}

/* Copy the block's raw values from the frame, in this machine's byte order. */
static void copy_raw(const uint8_t *frame, const struct changes *c, char *dst)
{
	memcpy(dst, frame + c->at + 4, c->m * c->q.item);
#if CODEC_BIG_ENDIAN
	swap_bytes((uint8_t *)dst, c->m * c->q.item, c->q.item);
#endif
}

/*
 * Read the changes of a block into c->list, which has room for as many as the region's head declares. `sums`: the
 * caller needs the checksum sums of the base's chunks; if it is cheaper here, compute them, and set c->summed.
 */
static codec_status read_changes(const uint8_t *frame, const struct kernels *k, struct changes *c, int sums,
				 struct work *w, codec_fault *f)
{
	const uint8_t *stream = frame + c->at + 4;
	uint64_t nbytes = c->end - c->at - 4;
	int good = 1;

	c->list.count = 0;
	c->summed = 0;
	if (c->mode == WIRE_DELTA_RAW) {
		copy_raw(frame, c, w->values);
		if (k->differences(c->base, w->values, c->m, c->q.item, w->delta.changed) != c->count)
			BAD(c->at, c->count, 0);
		return CODEC_OK;
	}
	c->list.room = c->count;
	if (c->mode == WIRE_DELTA_STEPS && c->q.last) {
		c->summed = sums ? delta_whole_chunks(c->m * c->q.item) : 0;
		good = k->delta_decode(&c->q, c->base, c->m, (int)c->field - WIRE_DELTA_BIAS, &w->delta, stream, nbytes,
				       &c->list, c->summed ? w->sums[0] : NULL);
	} else if (c->mode != WIRE_DELTA_SAME) {
		good = k->delta_patches(&c->q, c->base, c->m, c->field, c->mode == WIRE_DELTA_STEPS, stream, nbytes,
					&c->list);
	}
	if (!good || c->list.count != c->count)
		BAD(c->at + 4, c->list.count, c->count);
	return CODEC_OK;
}

/* Compute the contribution of the block of `c` to the digests of base and result, and store it in *block. */
static void take_digests(const struct kernels *k, const struct changes *c, const struct work *w,
			 struct delta_block *block)
{
	uint64_t nbytes = c->m * c->q.item, chunk = c->first * c->q.item / DELTA_CHUNK;
	uint64_t at = c->summed * DELTA_CHUNK;

	delta_sums(k, c->base + at, nbytes - at, c->q.item, w->sums[0] + c->summed);
	block->base = block->result = delta_digest_of(w->sums[0], nbytes, chunk);
	if (c->mode == WIRE_DELTA_SAME)
		return;
	if (c->mode == WIRE_DELTA_RAW)
		delta_sums(k, w->values, nbytes, c->q.item, w->sums[0]);
	else
		k->change_sums(c->base, &c->list, c->q.item, w->sums[0]);
	block->result = delta_digest_of(w->sums[0], nbytes, chunk);
}

static void write_values(const uint8_t *frame, const struct kernels *k, const struct changes *c, char *dst)
{
	if (c->mode == WIRE_DELTA_RAW) {
		copy_raw(frame, c, dst);
		return;
	}
	if (dst != c->base)
		memcpy(dst, c->base, c->m * c->q.item);
	k->put_changes(&c->list, c->q.item, dst);
}

/*
 * Return the status to report if a block's changes are invalid: the frame is damaged, the base is not the one that the
 * frame was encoded against, or else `status`, because the frame is invalid although its checksums are correct.
 */
static codec_status explain(const uint8_t *frame, const struct job *j, const codec_context *with, codec_status status)
{
	codec_fault found = with->fault ? *with->fault : (codec_fault){0};
	codec_status base;

	if (status != CODEC_BAD_REGION || with->flags & CODEC_NO_CHECKSUM)
		return status;
	base = delta_check_base(j, with);
	if (base == CODEC_OK)
		return fault(with->fault, status, found.offset, found.found, found.expected);
	found = with->fault ? *with->fault : found;
	TRY(frame_verify(frame, &j->h, kernels_for(with), with->fault));
	return fault(with->fault, base, found.offset, found.found, found.expected);
}

/*
 * Decode the block of `c` to a list of changes, c->list, and set the block's record. The list is stored at `kept`, in
 * the job, if it has room, else in the work buffer.
 */
static codec_status decode_block(const uint8_t *frame, const struct kernels *k, const codec_context *with,
				 const struct job *j, struct changes *c, const struct delta_list *kept, struct work *w,
				 struct delta_block *block)
{
	const int digests = !j->checked && !(with->flags & CODEC_NO_CHECKSUM);
	codec_status status;

	c->list = (struct delta_list){.at = w->delta.at, .value = w->values};
	if (kept && c->mode != WIRE_DELTA_RAW && c->count <= kept->room)
		c->list = *kept;
	status = read_changes(frame, k, c, digests, w, with->fault);
	if (status != CODEC_OK)
		return explain(frame, j, with, status);
	if (digests)
		take_digests(k, c, w, block);
	block->changes = c->count;
	delta_set_state(block, kept && c->list.at == kept->at ? DELTA_LISTED : DELTA_CHECKED);
	return CODEC_OK;
}

codec_status delta_decode_blocks(const uint8_t *frame, const codec_tensor *dst, const codec_context *with,
				 const struct job *j, codec_range *range, struct work *w)
{
	const struct kernels *k = kernels_for(with);
	struct delta_block *blocks = job_delta_blocks(j), *first = blocks + range->first;
	struct changes c = {.q = delta_kind(&j->h)};
	uint64_t index = delta_list_first(j, range->first);
	/*
	 * if this range begins inside a range that was checked before, the list entries after its first block may
	 * belong to blocks after this range
	 */
	int lists = !dst && range->count && (first->state == DELTA_UNKNOWN || first->origin == range->first);

	for (uint64_t b = range->first; b < range->first + range->count; b++) {
		struct delta_block *block = blocks + b;
		struct delta_list kept;

		TRY(job_block(j, frame, with, b, &c.at, &c.end, &range->checksum));
		TRY(read_head(frame, &j->h, b, &c, with->fault));
		c.base = (const char *)with->base->data + c.first * c.q.item;
		if (dst && block->state == DELTA_LISTED && block->changes == c.count) {
			delta_list_at(j, block->list, &c.list);
			c.list.count = c.count;
		} else {
			delta_list_at(j, index, &kept);
			TRY(decode_block(frame, k, with, j, &c, lists ? &kept : NULL, w, block));
			if (lists) {
				block->origin = range->first;
				block->list = index;
				index += block->state == DELTA_LISTED ? c.count : 0;
			}
		}
		if (dst)
			write_values(frame, k, &c, (char *)dst->data + c.first * c.q.item);
	}
	return CODEC_OK;
}

codec_status delta_changes(const struct job *j, uint32_t *at, char *values, uint64_t room, size_t *count)
{
	const struct delta_block *block = job_delta_blocks(j), *end = block + j->h.nblocks;
	const uint64_t item = dtype_of(j->h.dtype)->nbytes;
	uint64_t n = 0, first = 0;

	if (j->h.n >> 32)
		return CODEC_SHORT_OUTPUT;
	for (; block < end; block++, first += j->h.block) {
		struct delta_list list;

		if (block->state != DELTA_LISTED || block->changes > room - n)
			return CODEC_SHORT_OUTPUT;
		delta_list_at(j, block->list, &list);
		if (block->changes)
			memcpy(values + n * item, list.value, block->changes * item);
		for (uint32_t i = 0; i < block->changes; i++)
			at[n++] = (uint32_t)first + list.at[i];
	}
	*count = n;
	return CODEC_OK;
}
