/* decode.c - a frame to a tensor: open (check, build tables), blocks, close (checksum); inspect and verify. */
#include "core.h"

/* Header, side section and the directory's last entry: all that is checked before a tensor is touched. */
static codec_status open_frame(const uint8_t *frame, size_t nbytes, const codec_context *with, struct header *h)
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
static codec_status find_region(const uint8_t *frame, const struct header *h, uint64_t b, uint64_t *at, uint64_t *end,
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
static codec_status check_block(const uint8_t *frame, const struct header *h, const struct kernels *k, uint64_t b,
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
static uint64_t frame_seal(const uint8_t *frame, const struct header *h, const struct kernels *k)
{
	uint64_t seal = header_seal(h, k, frame + h->side_at);

	if (h->layout == WIRE_LAYOUT_STORED)
		return seal +
		       seal_block(k->digest(frame + h->side_at, h->frame_nbytes - h->side_at, WIRE_SEED_REGION), 0);
	return seal + k->digest(frame + h->directory_at, WIRE_DIRECTORY_ENTRY * h->nblocks, WIRE_SEED_DIRECTORY);
}

static codec_status check_seal(const struct header *h, uint64_t seal, codec_fault *f)
{
	if (seal != h->checksum)
		return fault(f, CODEC_CHECKSUM, WIRE_AT_CHECKSUM, h->checksum, seal);
	return CODEC_OK;
}

static codec_status verify(const uint8_t *frame, const struct header *h, const struct kernels *k, codec_fault *f)
{
	uint64_t seal = frame_seal(frame, h, k), at, end;

	for (uint64_t b = 0; b < h->nblocks; b++) {
		TRY(find_region(frame, h, b, &at, &end, f));
		TRY(check_block(frame, h, k, b, at, end, &seal, f));
	}
	return check_seal(h, seal, f);
}

/* The destination's dtype and shape must be the frame's. */
static codec_status check_destination(const struct header *h, const codec_tensor *dst, codec_fault *f)
{
	if (!dst || dst->struct_nbytes < sizeof *dst)
		return CODEC_BAD_ARGUMENT;
	if (dst->dtype != h->dtype)
		return fault(f, CODEC_SHAPE_MISMATCH, WIRE_AT_DTYPE, h->dtype, dst->dtype);
	if (dst->rank != h->rank)
		return fault(f, CODEC_SHAPE_MISMATCH, WIRE_AT_RANK, h->rank, dst->rank);
	for (uint32_t i = 0; i < h->rank; i++)
		if (dst->shape[i] != h->shape[i])
			return fault(f, CODEC_SHAPE_MISMATCH, WIRE_AT_SHAPE + 8 * i, h->shape[i], dst->shape[i]);
	if (dst->nbytes != h->n * dtype_of(h->dtype)->nbytes || (dst->nbytes && !dst->data))
		return CODEC_BAD_ARGUMENT;
	return CODEC_OK;
}

static codec_status open_job(const uint8_t *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
			     void *memory, size_t job_nbytes, struct job **out)
{
	const struct kernels *k = kernels_for(with);
	codec_status status;
	struct header h;
	struct job *j;

	TRY(open_frame(frame, nbytes, with, &h));
	TRY(check_destination(&h, dst, with->fault));
	TRY(job_open(memory, job_nbytes, &h, &j));
	*out = j;
	j->checked = (with->flags & CODEC_NO_CHECKSUM) != 0;
	status = side_read(frame, with, j);
	if (status == CODEC_UNKNOWN_CODEBOOK && !j->checked) {
		/* or a damaged frame that seems to name one */
		codec_fault unknown = with->fault ? *with->fault : (codec_fault){0};

		TRY(verify(frame, &h, k, with->fault));
		return fault(with->fault, status, unknown.offset, unknown.found, unknown.expected);
	}
	TRY(status);
	if (with->flags & CODEC_VERIFY_FIRST && !j->checked) {
		TRY(verify(frame, &h, k, with->fault));
		j->checked = 1;
	}
	if (!j->checked)
		j->seal = frame_seal(frame, &h, k);
	if (h.layout == WIRE_LAYOUT_STORED) {
		if (!j->checked)
			TRY(check_seal(&h, j->seal, with->fault));
		if (dst->nbytes)
			memcpy(dst->data, frame + h.side_at, dst->nbytes);
#if CODEC_BIG_ENDIAN
		swap_bytes(dst->data, dst->nbytes, dtype_of(h.dtype)->nbytes);
#endif
	}
	return CODEC_OK;
}

static codec_status blocks(const uint8_t *frame, codec_tensor *dst, const codec_context *with, const struct job *j,
			   uint64_t first, uint64_t count, uint64_t *seal, void *work)
{
	const struct kernels *k = kernels_for(with);
	struct work w;

	work_place(dtype_of(j->h.dtype), j->h.n, work, &w);
	*seal = 0;
	for (uint64_t b = first; b < first + count; b += 2) {
		int n = b + 1 < first + count ? 2 : 1;
		struct block open[2];

		for (int i = 0; i < n; i++) {
			uint64_t at, end;

			TRY(find_region(frame, &j->h, b + (uint64_t)i, &at, &end, with->fault));
			if (!j->checked)
				TRY(check_block(frame, &j->h, k, b + (uint64_t)i, at, end, seal, with->fault));
			TRY(block_open(j, frame, b + (uint64_t)i, at, end, w.top + i, open + i, with->fault));
		}
		block_decode_top(j, k, open, n, &w);
		for (int i = 0; i < n; i++)
			TRY(block_close(j, k, open + i, dst, &w, with->fault));
	}
	return CODEC_OK;
}

codec_status codec_decode_open(const void *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
			       void *job, size_t job_nbytes, codec_plan *plan)
{
	codec_context c;
	struct job *j;

	TRY(context_read(with, &c));
	TRY(open_job(frame, nbytes, dst, &c, job, job_nbytes, &j));
	job_plan(j, plan);
	return CODEC_OK;
}

codec_status codec_decode_blocks(const void *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
				 const void *job, uint64_t first, uint64_t count, uint64_t *seal, void *work,
				 size_t work_nbytes)
{
	const struct job *j = job_place((void *)job);
	codec_context c;

	TRY(context_read(with, &c));
	if (!frame || !job || !seal || !work || first > j->h.nblocks || count > j->h.nblocks - first ||
	    nbytes < j->h.frame_nbytes)
		return CODEC_BAD_ARGUMENT;
	TRY(check_destination(&j->h, dst, c.fault));
	if (work_nbytes < j->plan.work_nbytes)
		return CODEC_SHORT_SCRATCH;
	return blocks(frame, dst, &c, j, first, count, seal, work);
}

codec_status codec_decode_close(const codec_context *with, const void *job, uint64_t seal)
{
	const struct job *j = job_place((void *)job);
	codec_context c;

	TRY(context_read(with, &c));
	if (!job)
		return CODEC_BAD_ARGUMENT;
	return j->checked || !j->h.nblocks ? CODEC_OK : check_seal(&j->h, j->seal + seal, c.fault);
}

codec_status codec_decode(const void *frame, size_t nbytes, codec_tensor *dst, const codec_context *with, void *scratch,
			  size_t scratch_nbytes)
{
	uint64_t seal = 0;
	codec_context c;
	struct job *j;

	TRY(context_read(with, &c));
	TRY(open_job(frame, nbytes, dst, &c, scratch, scratch_nbytes, &j));
	job_plan(j, NULL);
	if (!j->h.nblocks)
		return CODEC_OK;
	if (scratch_nbytes < j->plan.job_nbytes + j->plan.work_nbytes)
		return CODEC_SHORT_SCRATCH;
	TRY(blocks(frame, dst, &c, j, 0, j->h.nblocks, &seal, (char *)scratch + j->plan.job_nbytes));
	return j->checked ? CODEC_OK : check_seal(&j->h, j->seal + seal, c.fault);
}

codec_status codec_verify(const void *frame, size_t nbytes)
{
	const codec_context none = {0};
	struct header h;

	TRY(open_frame(frame, nbytes, &none, &h));
	return verify(frame, &h, kernels_for(NULL), NULL);
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
		out->nsegments = load32(frame + at);
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
	out.spec = (codec_spec){sizeof(codec_spec), h.codec, h.cap, h.model};
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
