/* decode.c - a frame to a tensor: open (check, build tables), blocks, close (checksum); inspect and verify. */
#include "truncate.h"

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
static codec_status check_destination(const struct header *h, const codec_tensor *dst, uint32_t into, codec_fault *f)
{
	uint32_t dtype = into == CODEC_INTO_STORE ? h->dtype : CODEC_FLOAT32;

	if (!dst || dst->struct_nbytes < sizeof *dst)
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
	if (dst->nbytes != h->n * dtype_of(dtype)->nbytes || (dst->nbytes && !dst->data))
		return CODEC_BAD_ARGUMENT;
	return CODEC_OK;
}

/* Decoded values, n of them from `first` on, to where they go other than their own dtype's tensor. */
static void put_values(const struct kernels *k, uint32_t dtype, const void *values, uint64_t first, uint64_t n,
		       const codec_context *with, const codec_tensor *dst)
{
	const struct sink sink = {.into = (int)with->into, .weight = with->weight, .divide = with->divide, .dst = dst};
	const codec_tensor from = {.dtype = dtype, .data = (void *)values};
	float buffer[512], aligned[512];

	for (uint64_t i = 0; i < n; i += 512) {
		uint64_t m = MIN(512, n - i);

		memcpy(aligned, rows_load(k, &from, i, m, buffer), sizeof(float) * m);
		sink_put(k, &sink, first + i, m, aligned);
	}
}

static codec_status open_job(const uint8_t *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
			     void *memory, size_t job_nbytes, struct job **out)
{
	const struct kernels *k = kernels_for(with);
	codec_status status;
	struct header h;
	struct job *j;

	TRY(open_frame(frame, nbytes, with, &h));
	TRY(check_destination(&h, dst, with->into, with->fault));
	TRY(job_open(memory, job_nbytes, &h, &j));
	*out = j;
	j->checked = (with->flags & CODEC_NO_CHECKSUM) != 0;
	status = h.codec == CODEC_TRUNCATE && h.layout == WIRE_LAYOUT_BLOCKS ? truncate_check(&h, with, 0) : CODEC_OK;
	status = status == CODEC_OK ? side_read(frame, with, j) : status;
	if (status >= CODEC_UNKNOWN_CODEBOOK && !j->checked) {
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
		if (with->into != CODEC_INTO_STORE) {
			put_values(k, h.dtype, frame + h.side_at, 0, h.n, with, dst);
			return CODEC_OK;
		}
		if (dst->nbytes)
			memcpy(dst->data, frame + h.side_at, dst->nbytes);
#if CODEC_BIG_ENDIAN
		swap_bytes(dst->data, dst->nbytes, dtype_of(h.dtype)->nbytes);
#endif
	}
	return CODEC_OK;
}

/* The last step of a block: its values to dst, or through w->values into it. */
static codec_status close_block(const struct job *j, const struct kernels *k, struct block *o, codec_tensor *dst,
				struct work *w, const codec_context *with)
{
	const struct dtype *d = dtype_of(j->h.dtype);
	uint64_t first = o->b * j->h.block;

	if (with->into == CODEC_INTO_STORE)
		return block_close(j, k, o, (char *)dst->data + first * d->nbytes, dst->nbytes >= STREAM_NBYTES, w,
				   with->fault);
	TRY(block_close(j, k, o, w->values, 0, w, with->fault));
	put_values(k, j->h.dtype, w->values, first, o->m, with, dst);
	return CODEC_OK;
}

/* TRUNCATE's blocks. */
static codec_status cut_blocks(const uint8_t *frame, codec_tensor *dst, const codec_context *with, const struct job *j,
			       uint64_t first, uint64_t count, uint64_t *seal, struct work *w)
{
	const struct kernels *k = kernels_for(with);

	for (uint64_t b = first; b < first + count; b++) {
		uint64_t at, end, from = b * j->h.block, m = MIN(j->h.block, j->h.n - from);
		char *values = with->into == CODEC_INTO_STORE ? (char *)dst->data + from * dtype_of(j->h.dtype)->nbytes
							      : w->values;

		TRY(find_region(frame, &j->h, b, &at, &end, with->fault));
		if (!j->checked)
			TRY(check_block(frame, &j->h, k, b, at, end, seal, with->fault));
		TRY(truncate_decode_block(j, k, with, frame, b, at, end, values, w));
		if (with->into != CODEC_INTO_STORE)
			put_values(k, j->h.dtype, values, from, m, with, dst);
	}
	return CODEC_OK;
}

static codec_status blocks(const uint8_t *frame, codec_tensor *dst, const codec_context *with, const struct job *j,
			   uint64_t first, uint64_t count, uint64_t *seal, void *work)
{
	const struct kernels *k = kernels_for(with);
	const struct sink sink = {.into = (int)with->into,
				  .weight = with->weight,
				  .rescale = (with->flags & CODEC_RESCALE) != 0,
				  .divide = with->divide,
				  .unscaled = (with->flags & CODEC_UNSCALED) != 0,
				  .dst = dst};
	struct work w;

	work_place(&j->h, work, &w);
	*seal = 0;
	if (codec_is_rows(j->h.codec)) {
		for (uint64_t b = first; b < first + count; b++) {
			uint64_t at, end;

			TRY(find_region(frame, &j->h, b, &at, &end, with->fault));
			if (!j->checked)
				TRY(check_block(frame, &j->h, k, b, at, end, seal, with->fault));
			TRY(rows_decode_block(j, k, frame, b, at, end, &sink, &w, with->fault));
		}
		return CODEC_OK;
	}
	if (j->h.codec == CODEC_TRUNCATE)
		return cut_blocks(frame, dst, with, j, first, count, seal, &w);
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
			TRY(close_block(j, k, open + i, dst, &w, with));
	}
	return CODEC_OK;
}

codec_status codec_decode_open(const void *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
			       void *job, size_t job_nbytes, codec_plan *plan)
{
	codec_status status;
	codec_context c;
	uint64_t saved;
	struct job *j;

	TRY(context_read(with, &c));
	saved = call_enter();
	status = open_job(frame, nbytes, dst, &c, job, job_nbytes, &j);
	call_leave(saved);
	TRY(status);
	job_plan(j, plan);
	return CODEC_OK;
}

codec_status codec_decode_blocks(const void *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
				 const void *job, uint64_t first, uint64_t count, uint64_t *seal, void *work,
				 size_t work_nbytes)
{
	const struct job *j = job_place((void *)job);
	codec_status status;
	codec_context c;
	uint64_t saved;

	TRY(context_read(with, &c));
	if (!frame || !job || !seal || !work || first > j->h.nblocks || count > j->h.nblocks - first ||
	    nbytes < j->h.frame_nbytes)
		return CODEC_BAD_ARGUMENT;
	TRY(check_destination(&j->h, dst, c.into, c.fault));
	if (work_nbytes < j->plan.work_nbytes)
		return CODEC_SHORT_SCRATCH;
	saved = call_enter();
	status = blocks(frame, dst, &c, j, first, count, seal, work);
	call_leave(saved);
	return status;
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

static codec_status decode(const uint8_t *frame, size_t nbytes, codec_tensor *dst, const codec_context *with,
			   void *scratch, size_t scratch_nbytes)
{
	codec_status status;
	uint64_t seal = 0;
	struct job *j;

	TRY(open_job(frame, nbytes, dst, with, scratch, scratch_nbytes, &j));
	job_plan(j, NULL);
	if (!j->h.nblocks)
		return CODEC_OK;
	if (scratch_nbytes < job_scratch(&j->h))
		return CODEC_SHORT_SCRATCH;
	status = blocks(frame, dst, with, j, 0, j->h.nblocks, &seal, job_work(j, scratch));
	if (status == CODEC_OTHER_STATE && !j->checked) /* or a damaged frame */
		TRY(verify(frame, &j->h, kernels_for(with), with->fault));
	TRY(status);
	return j->checked ? CODEC_OK : check_seal(&j->h, j->seal + seal, with->fault);
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

codec_status codec_accumulate(const void *frame, size_t nbytes, float weight, codec_tensor *dst,
			      const codec_context *with, void *scratch, size_t scratch_nbytes)
{
	codec_context c;

	TRY(context_read(with, &c));
	c.struct_nbytes = sizeof c;
	c.into = CODEC_INTO_ADD;
	c.weight = weight;
	c.flags |= c.flags & CODEC_NO_CHECKSUM ? 0 : CODEC_VERIFY_FIRST;
	return codec_decode(frame, nbytes, dst, &c, scratch, scratch_nbytes);
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
