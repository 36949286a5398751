/*
 * close.c - complete a frame: join the regions and write the checksum, or store the tensor raw; then write the
 * residual.
 */
#include "api.h"

/* Write a stored frame over the contents of dst. */
codec_status encode_store(const struct source *src, const struct kernels *k, struct header h, uint8_t *dst,
			  size_t capacity, size_t *written)
{
	h.layout = WIRE_LAYOUT_STORED;
	h.block_log2 = h.fixed = h.coded = h.halved = h.flags = 0;
	h.side_nbytes = 0;
	TRY(header_derive(&h));
	h.frame_nbytes = stored_nbytes(&h);
	if (h.frame_nbytes > capacity)
		return CODEC_SHORT_OUTPUT;
	if (src->nbytes) {
		const void *values = load_native(k, src, 0, h.n, dst + h.side_at);

		if (values != dst + h.side_at) /* tensor + residual was computed into a buffer */
			memcpy(dst + h.side_at, values, src->nbytes);
	}
#if CODEC_BIG_ENDIAN
	swap_bytes(dst + h.side_at, src->nbytes, dtype_of(h.dtype)->nbytes);
#endif
	h.checksum = head_checksum(&h, k, dst) +
		     checksum_of_block(k->digest(dst + h.side_at, src->nbytes, WIRE_SEED_REGION), 0);
	header_write(&h, dst);
	*written = h.frame_nbytes;
	return CODEC_OK;
}

/* Move or copy the regions of a range of blocks to dst[to]. Return their new end, or 0 if the arguments are
 * inconsistent. */
uint64_t encode_move(const struct header *h, uint8_t *dst, size_t capacity, const codec_range *range, uint64_t to)
{
	uint8_t *entries = dst + h->directory_at + WIRE_DIRECTORY_ENTRY * range->first;
	uint64_t end = (uint64_t)WIRE_ALIGN * load32(entries + WIRE_DIRECTORY_ENTRY * (range->count - 1));
	uint64_t at = range->at;

	if (at < to || end < at || end > capacity)
		return 0;
	if (at > to || range->buffer) {
		memmove(dst + to, range->buffer ? range->buffer : dst + at, end - at);
		for (uint64_t i = 0; i < range->count; i++)
			store32(entries + WIRE_DIRECTORY_ENTRY * i,
				load32(entries + WIRE_DIRECTORY_ENTRY * i) - (uint32_t)((at - to) / WIRE_ALIGN));
	}
	return to + end - at;
}

/* DELTA: write the frame of a tensor that equals its base, which has only the header and the digests. */
static codec_status encode_unchanged(const struct job *j, const struct kernels *k, uint8_t *dst, size_t capacity,
				     size_t *written)
{
	struct header h = j->h;

	h.block_log2 = 0;
	h.nblocks = 0;
	TRY(header_derive(&h));
	h.frame_nbytes = h.regions_at;
	if (h.frame_nbytes > capacity)
		return CODEC_SHORT_OUTPUT;
	side_write(j, dst + h.side_at);
	h.checksum = head_checksum(&h, k, dst + h.side_at);
	header_write(&h, dst);
	*written = h.frame_nbytes;
	return CODEC_OK;
}

codec_status encode_finish(const struct source *src, uint8_t *dst, size_t capacity, const codec_context *with,
			   const struct job *j, const codec_range *ranges, size_t nranges, size_t *written)
{
	const struct kernels *k = kernels_for(with);
	uint64_t to = j->h.regions_at, b = 0, checksum = 0;
	struct header h = j->h;
	uint8_t *directory;

	if (h.nblocks == 0)
		return codec_is_delta(h.codec) ? encode_unchanged(j, k, dst, capacity, written)
					       : encode_store(src, k, h, dst, capacity, written);
	directory = dst + h.directory_at;
	for (size_t i = 0; i < nranges; i++) {
		const codec_range r = ranges[i];

		if (!r.count)
			continue;
		if (r.first != b || !has_blocks(&h, &r))
			return CODEC_BAD_ARGUMENT;
		to = encode_move(&h, dst, capacity, &r, to);
		if (!to)
			return CODEC_BAD_ARGUMENT;
		b += r.count;
		checksum += r.checksum;
	}
	if (b != h.nblocks)
		return CODEC_BAD_ARGUMENT;
	if (codec_is_delta(h.codec) && delta_is_unchanged(j))
		return encode_unchanged(j, k, dst, capacity, written);
	if (codec_may_store(h.codec) && choose_stored(to, stored_nbytes(&h)))
		return encode_store(src, k, h, dst, capacity, written);
	checksum += k->digest(directory, WIRE_DIRECTORY_ENTRY * h.nblocks, WIRE_SEED_DIRECTORY);
	head_write(j, to, checksum, dst);
	*written = to;
	return CODEC_OK;
}

/* Error feedback, stored frame: write the residual, the error of rounding tensor + residual to the tensor's dtype. */
static void stored_residual(const struct job *j, const struct kernels *k, const struct source *src, float *residual)
{
	const codec_tensor dst = {.dtype = CODEC_FLOAT32, .data = residual, .nbytes = sizeof(float) * j->h.n};
	const struct sink sink = {.into = SINK_RESIDUAL, .dst = &dst, .src = src};
	float sums[512], seen[512];

	for (uint64_t i = 0, m; i < j->h.n; i += m) {
		m = MIN(512, j->h.n - i);
		load_native(k, src, i, m, sums);
		sink_put(k, &sink, i, m, (const float *)load_floats(k, src->dtype, sums, 0, m, seen));
	}
}

/* Write the residual, unless it was written with the blocks. */
codec_status encode_leave(const struct job *j, const struct source *src, const uint8_t *frame,
			  const codec_context *with, void *work)
{
	const struct kernels *k = kernels_for(with);

	if (!with->residual)
		return CODEC_OK;
	if (frame[WIRE_AT_LAYOUT] == WIRE_LAYOUT_BLOCKS && family_of(&j->h)->leave)
		return family_of(&j->h)->leave(j, k, with, src, work);
	if (j->reads_residual)
		stored_residual(j, k, src, with->residual);
	else
		memset(with->residual, 0, sizeof(float) * j->h.n);
	return CODEC_OK;
}
