/* frame.c - check a frame without decoding it: header, sections, directory, checksums. */
#include "frame.h"

#include "isa/cpu.h"

/* Read and check the header of a frame of `nbytes` bytes, given the first `head_nbytes` bytes. */
codec_status frame_head(const uint8_t *head, size_t head_nbytes, uint64_t nbytes, const codec_context *with,
			struct header *h)
{
	codec_fault *f = with->fault;

	if (!head && head_nbytes)
		return CODEC_BAD_ARGUMENT;
	TRY(header_read(head, head_nbytes, h, f));
	if (h->frame_nbytes > nbytes)
		return fault(f, CODEC_TRUNCATED, nbytes, nbytes, h->frame_nbytes);
	if (h->frame_nbytes < nbytes && !(with->flags & CODEC_ALLOW_SLACK))
		return fault(f, CODEC_TRAILING, h->frame_nbytes, nbytes, h->frame_nbytes);
	if (with->max_nbytes && h->n > with->max_nbytes / dtype_of(h->dtype)->nbytes)
		return fault(f, CODEC_LIMIT, WIRE_AT_SHAPE, h->n * dtype_of(h->dtype)->nbytes, with->max_nbytes);
	return CODEC_OK;
}

/*
 * Check the parts of a frame that must be valid before a job is opened: the header, the directory's last entry and the
 * padding of fixed planes.
 */
codec_status frame_open(const uint8_t *frame, size_t nbytes, const codec_context *with, struct header *h)
{
	codec_fault *f = with->fault;

	TRY(frame_head(frame, nbytes, nbytes, with, h));
	if (h->nblocks) {
		uint64_t last = h->directory_at + WIRE_DIRECTORY_ENTRY * (h->nblocks - 1);
		uint64_t end = (uint64_t)WIRE_ALIGN * load32(frame + last);

		if (end != h->frame_nbytes)
			return fault(f, CODEC_BAD_DIRECTORY, last, end, h->frame_nbytes);
	}
	for (uint64_t p = h->planes_at; p < h->regions_at; p += h->plane_stride)
		for (uint64_t i = p + h->n; i < p + h->plane_stride; i++)
			if (frame[i])
				return fault(f, CODEC_BAD_HEADER, i, frame[i], 0);
	return CODEC_OK;
}

/* Find the region of block b, frame[*at, *end), and check its directory entry. */
codec_status frame_region(const uint8_t *frame, const struct header *h, uint64_t b, uint64_t *at, uint64_t *end,
			  codec_fault *f)
{
	uint64_t entry = h->directory_at + WIRE_DIRECTORY_ENTRY * b;

	*at = b ? (uint64_t)WIRE_ALIGN * load32(frame + entry - WIRE_DIRECTORY_ENTRY) : h->regions_at;
	*end = (uint64_t)WIRE_ALIGN * load32(frame + entry);
	if (*at < h->regions_at || *end <= *at || *end > h->frame_nbytes)
		return fault(f, CODEC_BAD_DIRECTORY, entry, *end, *at);
	return CODEC_OK;
}

static uint64_t block_checksum(const uint8_t *frame, const struct header *h, const struct kernels *k, uint64_t b,
			       uint64_t at, uint64_t end)
{
	uint64_t digest = k->digest(frame + at, end - at, WIRE_SEED_REGION), section = h->planes_at;
	uint64_t first = b * h->block, m = MIN(h->block, h->n - first);

	for (uint32_t p = 0; p < WIRE_MAX_PLANES; p++)
		if (h->fixed >> p & 1) {
			digest += k->digest(frame + section + first, m, WIRE_SEED_PLANE + p);
			section += h->plane_stride;
		}
	return checksum_of_block(digest, b);
}

/* Compute the checksum of block b, compare it with the block's directory entry, and add it to *checksum. */
codec_status frame_check_block(const uint8_t *frame, const struct header *h, const struct kernels *k, uint64_t b,
			       uint64_t at, uint64_t end, uint64_t *checksum, codec_fault *f)
{
	uint64_t entry = h->directory_at + WIRE_DIRECTORY_ENTRY * b + 4;
	uint64_t own = block_checksum(frame, h, k, b, at, end);

	if (load32(frame + entry) != checksum_short(own))
		return fault(f, CODEC_CHECKSUM, entry, load32(frame + entry), checksum_short(own));
	*checksum += own;
	return CODEC_OK;
}

/* Return the frame's checksum minus the checksums of its blocks. */
uint64_t frame_outer_checksum(const uint8_t *frame, const struct header *h, const struct kernels *k)
{
	uint64_t checksum = head_checksum(h, k, frame + h->side_at);

	if (h->layout == WIRE_LAYOUT_STORED)
		return checksum +
		       checksum_of_block(k->digest(frame + h->side_at, h->frame_nbytes - h->side_at, WIRE_SEED_REGION),
					 0);
	return checksum + k->digest(frame + h->directory_at, WIRE_DIRECTORY_ENTRY * h->nblocks, WIRE_SEED_DIRECTORY);
}

codec_status frame_compare_checksum(const struct header *h, uint64_t checksum, codec_fault *f)
{
	if (checksum != h->checksum)
		return fault(f, CODEC_CHECKSUM, WIRE_AT_CHECKSUM, h->checksum, checksum);
	return CODEC_OK;
}

codec_status frame_verify(const uint8_t *frame, const struct header *h, const struct kernels *k, codec_fault *f)
{
	uint64_t checksum = frame_outer_checksum(frame, h, k), at, end;

	for (uint64_t b = 0; b < h->nblocks; b++) {
		TRY(frame_region(frame, h, b, &at, &end, f));
		TRY(frame_check_block(frame, h, k, b, at, end, &checksum, f));
	}
	return frame_compare_checksum(h, checksum, f);
}
