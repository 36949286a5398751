/* inspect.c - inspect and verify a frame without decoding it. */
#include "api.h"

codec_status codec_verify(const void *frame, size_t nbytes)
{
	const codec_context none = {0};
	struct header h;

	TRY(frame_open(frame, nbytes, &none, &h));
	return frame_verify(frame, &h, kernels_for(NULL), NULL);
}

/*
 * Return the row length that all parts share, from their records at frame[at, end). If parts differ, return
 * CODEC_GROUP_SIZE_ROW for codecs whose row length may follow the shape, else 0. If the records are invalid, return 0,
 * which any spec may request.
 */
static uint32_t row_of_parts(const struct header *h, const uint8_t *frame, uint64_t at, uint64_t end, uint64_t nparts)
{
	struct row_kind q = header_kind(h);
	int chosen = h->codec == CODEC_SIGN || h->codec == CODEC_FLOAT8;
	uint32_t row = 0;

	for (uint64_t i = 0; i < MIN(nparts, (end - at) / WIRE_SEGMENT_NBYTES); i++) {
		uint32_t next = load32(frame + at + WIRE_SEGMENT_NBYTES * i + 8);

		if (!row_allowed(q, next))
			return 0;
		if (i && next != row)
			return chosen ? CODEC_GROUP_SIZE_ROW : 0;
		row = next;
	}
	return row;
}

/* Return the scale that all `nparts` parts share, or -1 if they differ. frame[at, end) holds the parts' scales. */
static float scale_of_parts(const uint8_t *frame, uint64_t at, uint64_t end, uint64_t nparts)
{
	uint32_t scale = load32(frame + at);

	if (!nparts || nparts > (end - at) / 8 || scale >= ROUND_INF)
		return -1;
	for (uint64_t i = 1; i < nparts; i++)
		if (load32(frame + at + 8 * i) != scale)
			return -1;
	return round_float(scale);
}

/* Copy fields of the side section to *out, as far as it is valid. Report no error: decoding checks the section. */
static void inspect_side(const uint8_t *frame, const struct header *h, codec_info *out)
{
	uint64_t at = h->side_at, end = h->directory_at;
	codebook b;

	if (codec_is_delta(h->codec) && end - at == WIRE_DELTA_SIDE_NBYTES) {
		out->base_digest = load64(frame + at);
		out->result_digest = load64(frame + at + 8);
		return;
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
	if (h->flags & WIRE_FLAG_SEGMENTS && end - at >= 4) {
		out->nsegments = load32(frame + at);
		if (codec_is_rows(h->codec))
			out->spec.group_size = row_of_parts(h, frame, at + 4, end, out->nsegments);
		at += 4 + WIRE_SEGMENT_NBYTES * out->nsegments;
	}
	if (h->codec == CODEC_TERNARY && end > at && end - at >= 8)
		out->scale = scale_of_parts(frame, at, end, h->flags & WIRE_FLAG_SEGMENTS ? out->nsegments : 1);
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
	out.version = CODEC_FORMAT_VERSION;
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
	out.clipped = (h.options & WIRE_OPTION_CLIPPED) != 0;
	out.scale = -1;
	if (status == CODEC_OK && h.side_nbytes <= nbytes - h.side_at)
		inspect_side(frame, &h, &out);
	memcpy(info, &out, MIN(info->struct_nbytes, sizeof out));
	return status;
}
