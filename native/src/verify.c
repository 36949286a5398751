/* verify.c - what can be said of a frame without decoding it: header, sections, directory, checksums. */
#include "rows.h"

/* Header, side section and the directory's last entry: all that is checked before a tensor is touched. */
codec_status frame_open(const uint8_t *frame, size_t nbytes, const codec_context *with, struct header *h)
{
	codec_fault *f = with->fault;

	if (!frame && nbytes)
		return CODEC_BAD_ARGUMENT;
	TRY(header_read(frame, nbytes, h, f));
	if (h->frame_nbytes > nbytes)
		return fault(f, CODEC_TRUNCATED, nbytes, nbytes, h->frame_nbytes);
	if (h->frame_nbytes < nbytes && !(with->flags & CODEC_ALLOW_SLACK))
		return fault(f, CODEC_TRAILING, h->frame_nbytes, nbytes, h->frame_nbytes);
	if (with->max_nbytes && h->n > with->max_nbytes / dtype_of(h->dtype)->nbytes)
		return fault(f, CODEC_LIMIT, WIRE_AT_SHAPE, h->n * dtype_of(h->dtype)->nbytes, with->max_nbytes);
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

/* Block b's region is frame[*at, *end). */
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

static uint64_t digest_block(const uint8_t *frame, const struct header *h, const struct kernels *k, uint64_t b,
			     uint64_t at, uint64_t end)
{
	uint64_t digest = k->digest(frame + at, end - at, WIRE_SEED_REGION), section = h->planes_at;
	uint64_t first = b * h->block, m = MIN(h->block, h->n - first);

	for (uint32_t p = 0; p < WIRE_MAX_PLANES; p++)
		if (h->fixed >> p & 1) {
			digest += k->digest(frame + section + first, m, WIRE_SEED_PLANE + p);
			section += h->plane_stride;
		}
	return seal_block(digest, b);
}

/* Digest block b and compare it with the directory. */
codec_status frame_check_block(const uint8_t *frame, const struct header *h, const struct kernels *k, uint64_t b,
			       uint64_t at, uint64_t end, uint64_t *seal, codec_fault *f)
{
	uint64_t entry = h->directory_at + WIRE_DIRECTORY_ENTRY * b + 4;
	uint64_t sealed = digest_block(frame, h, k, b, at, end);

	if (load32(frame + entry) != seal_short(sealed))
		return fault(f, CODEC_CHECKSUM, entry, load32(frame + entry), seal_short(sealed));
	*seal += sealed;
	return CODEC_OK;
}

/* The checksum less the blocks' part. */
uint64_t frame_seal(const uint8_t *frame, const struct header *h, const struct kernels *k)
{
	uint64_t seal = header_seal(h, k, frame + h->side_at);

	if (h->layout == WIRE_LAYOUT_STORED)
		return seal +
		       seal_block(k->digest(frame + h->side_at, h->frame_nbytes - h->side_at, WIRE_SEED_REGION), 0);
	return seal + k->digest(frame + h->directory_at, WIRE_DIRECTORY_ENTRY * h->nblocks, WIRE_SEED_DIRECTORY);
}

codec_status frame_check_seal(const struct header *h, uint64_t seal, codec_fault *f)
{
	if (seal != h->checksum)
		return fault(f, CODEC_CHECKSUM, WIRE_AT_CHECKSUM, h->checksum, seal);
	return CODEC_OK;
}

codec_status frame_verify(const uint8_t *frame, const struct header *h, const struct kernels *k, codec_fault *f)
{
	uint64_t seal = frame_seal(frame, h, k), at, end;

	for (uint64_t b = 0; b < h->nblocks; b++) {
		TRY(frame_region(frame, h, b, &at, &end, f));
		TRY(frame_check_block(frame, h, k, b, at, end, &seal, f));
	}
	return frame_check_seal(h, seal, f);
}

codec_status codec_verify(const void *frame, size_t nbytes)
{
	const codec_context none = {0};
	struct header h;

	TRY(frame_open(frame, nbytes, &none, &h));
	return frame_verify(frame, &h, kernels_for(NULL), NULL);
}

/* What the side section says, as far as it makes sense: decoding checks it, this only looks. */
static void inspect_side(const uint8_t *frame, const struct header *h, codec_info *out)
{
	uint64_t at = h->side_at, end = h->directory_at;
	codebook b;

	if (h->flags & WIRE_FLAG_WINDOW) {
		if (end - at < 8)
			return;
		at += 8;
	}
	if (h->flags & WIRE_FLAG_PRIOR) {
		if (end - at < 8)
			return;
		out->codebook_id = load64(frame + at);
		at += 8;
	}
	for (int p = 0; p < WIRE_MAX_PLANES; p++)
		if (h->coded >> p & 1 && !(p == 0 && h->flags & WIRE_FLAG_PRIOR)) {
			int n = book_unpack(&b, frame + at, end - at);

			if (!n)
				return;
			at += (uint64_t)n;
		}
	if (h->flags & WIRE_FLAG_SEGMENTS && end - at >= 4)
		out->nsegments = load32(frame + at); /* parts have 8 bytes for theirs, the upper ones 0 */
}

codec_status codec_inspect(const void *frame, size_t nbytes, codec_info *info)
{
	codec_info out = {0};
	codec_status status;
	struct header h;

	if ((!frame && nbytes) || !info || info->struct_nbytes < sizeof(uint32_t))
		return CODEC_BAD_ARGUMENT;
	status = header_read(frame, nbytes, &h, &out.fault);
	out.struct_nbytes = info->struct_nbytes;
	out.version = WIRE_VERSION;
	out.dtype = h.dtype;
	out.rank = h.rank;
	memcpy(out.shape, h.shape, sizeof out.shape);
	params_spec(&h, &out.spec);
	out.stored = h.layout == WIRE_LAYOUT_STORED;
	out.block_nvalues = (uint32_t)h.block;
	out.nblocks = h.nblocks;
	out.n = h.n;
	out.tensor_nbytes = h.n * codec_dtype_nbytes(h.dtype);
	out.frame_nbytes = h.frame_nbytes;
	out.checksum = h.checksum;
	out.side_offset = h.side_at;
	out.side_nbytes = h.side_nbytes;
	out.directory_offset = h.directory_at;
	out.directory_nbytes = h.planes_at - h.directory_at;
	out.planes_offset = h.planes_at;
	out.planes_nbytes = h.regions_at - h.planes_at;
	out.regions_offset = h.regions_at;
	out.regions_nbytes = h.frame_nbytes - h.regions_at;
	out.fixed_planes = h.fixed;
	out.coded_planes = h.coded;
	if (status == CODEC_OK && h.side_nbytes <= nbytes - h.side_at)
		inspect_side(frame, &h, &out);
	memcpy(info, &out, MIN(info->struct_nbytes, sizeof out));
	return status;
}
