/* encode.c - encode the changes of a block. */
#include "delta.h"

codec_status delta_begin(struct job *j, const codec_spec *s, const codec_context *with)
{
	(void)s, (void)with;
	j->h.block_log2 = delta_block_log2(&j->h);
	j->h.layout = WIRE_LAYOUT_BLOCKS;
	j->h.side_nbytes = WIRE_DELTA_SIDE_NBYTES;
	TRY(header_derive(&j->h));
	memset(job_delta_blocks(j), 0, j->h.nblocks * sizeof(struct delta_block));
	return CODEC_OK;
}

codec_status delta_choose(struct job *j, const struct kernels *k, const struct source *src, const codec_context *with)
{
	(void)j, (void)k, (void)src, (void)with;
	return CODEC_OK;
}

int delta_is_unchanged(const struct job *j)
{
	const struct delta_block *block = job_delta_blocks(j);

	for (uint64_t b = 0; b < j->h.nblocks; b++)
		if (block[b].changes)
			return 0;
	return 1;
}

/*
 * Find the changes of a block of m values, and compute the block's contribution to the digests. Return the number of
 * changes.
 */
static uint64_t compare(const struct kernels *k, const char *base, const char *values, uint64_t m, uint64_t item,
			uint64_t first, struct work *w, struct delta_block *block)
{
	uint64_t nbytes = m * item, chunk = first * item / DELTA_CHUNK, whole = delta_whole_chunks(nbytes);
	uint64_t at = whole * DELTA_CHUNK, changes;

	changes = k->compare_chunks(base, values, whole, (uint32_t)item, w->delta.changed, w->sums[0], w->sums[1]);
	changes += k->differences(base + at, values + at, (nbytes - at) / item, (uint32_t)item,
				  w->delta.changed + at / item / 64);
	delta_sums(k, base + at, nbytes - at, item, w->sums[0] + whole);
	delta_sums(k, values + at, nbytes - at, item, w->sums[1] + whole);
	block->base = delta_digest_of(w->sums[0], nbytes, chunk);
	block->result = delta_digest_of(w->sums[1], nbytes, chunk);
	block->changes = (uint32_t)changes;
	return changes;
}

/*
 * Return the size in bits of `count` patches in which each change is a gap and a mask of the bits to flip. *steps: the
 * size if each change is a gap, a sign and a step instead.
 */
static uint64_t patch_bits(const struct delta_kind *q, const char *base, const char *values, const uint32_t *at,
			   uint64_t count, uint32_t k, uint64_t *steps)
{
	uint64_t gaps = 0, sizes = 0, from = 0;

	for (uint64_t c = 0; c < count; c++) {
		uint64_t gap = at[c] - from, x = 0, y = 0;

		from = at[c] + 1ull;
		gaps += gap >> k < WIRE_RICE_LONGEST ? (gap >> k) + 1 + k : WIRE_RICE_LONGEST + WIRE_RICE_GAP_BITS;
		if (!q->last) {
			memcpy((char *)&x + CODEC_BIG_ENDIAN * (8 - q->item), base + q->item * (uint64_t)at[c],
			       q->item);
			memcpy((char *)&y + CODEC_BIG_ENDIAN * (8 - q->item), values + q->item * (uint64_t)at[c],
			       q->item);
			sizes += 2 * delta_length(delta_magnitude(delta_step(q, x, y), q->item));
		}
	}
	*steps = gaps + sizes;
	return gaps + count * 8 * q->item;
}

static void put_raw(uint8_t *region, const char *values, uint64_t m, uint64_t item)
{
	memcpy(region + 4, values, m * item);
#if CODEC_BIG_ENDIAN
	swap_bytes(region + 4, m * item, item);
#endif
}

/*
 * Encode the changes at region + 4, in the mode that needs fewest bytes. Return the size in bytes, and set *head to the
 * region's head.
 */
static uint64_t put_changes(const struct kernels *k, const struct delta_kind *q, const char *base, const char *values,
			    uint64_t m, struct work *w, uint64_t changes, uint32_t *head)
{
	uint32_t gap_k = delta_gap_k(m, changes), mode = WIRE_DELTA_STEPS, field = gap_k;
	uint64_t room = m * q->item, steps = 0, size, patches;
	uint8_t *to = w->region + 4;
	int scale;

	k->list_changes(w->delta.changed, m, w->delta.at);
	if (q->last) {
		size = k->delta_encode(q, base, values, m, &w->delta, changes, &scale, to, room);
		field = (uint32_t)(scale + WIRE_DELTA_BIAS);
		patches = changes * (8 * q->item + 1) / 8; /* lower bound in bytes */
		if (!size || patches < size)
			patches = (patch_bits(q, base, values, w->delta.at, changes, gap_k, &steps) + 7) / 8;
	} else {
		patches = (patch_bits(q, base, values, w->delta.at, changes, gap_k, &steps) + 7) / 8;
		size = (steps + 7) / 8;
		if (size <= patches && size < room)
			size = k->delta_encode_patches(q, base, values, w->delta.at, changes, gap_k, 1, to, room);
	}
	if (!size || patches < size) {
		size = patches;
		mode = WIRE_DELTA_PATCHES;
		field = gap_k;
		if (patches < room)
			k->delta_encode_patches(q, base, values, w->delta.at, changes, gap_k, 0, to, room);
	}
	if (ALIGN8(4 + size) >= ALIGN8(4 + room)) {
		mode = WIRE_DELTA_RAW;
		field = 0;
		size = room;
		put_raw(w->region, values, m, q->item);
	}
	*head = mode | field << WIRE_DELTA_SCALE_AT | (uint32_t)(changes - 1) << WIRE_DELTA_CHANGES_AT;
	return size;
}

codec_status delta_encode_block(struct job *j, const struct kernels *k, const codec_context *with,
				const struct source *src, uint64_t b, uint8_t *frame, struct work *w, uint64_t *digest,
				uint64_t *nbytes)
{
	const struct delta_kind q = delta_kind(&j->h);
	uint64_t m, first = delta_span(&j->h, b, &m), changes, size;
	const char *base = (const char *)with->base->data + first * q.item;
	const char *values = (const char *)src->data + first * q.item;
	uint32_t head;

	(void)frame;
	*digest = 0;
	changes = compare(k, base, values, m, q.item, first, w, job_delta_blocks(j) + b);
	*nbytes = WIRE_ALIGN;
	if (!changes) {
		store64(w->region, WIRE_DELTA_SAME);
		return CODEC_OK;
	}
	size = put_changes(k, &q, base, values, m, w, changes, &head);
	store32(w->region, head);
	for (*nbytes = 4 + size; *nbytes % WIRE_ALIGN; ++*nbytes)
		w->region[*nbytes] = 0;
	return CODEC_OK;
}
