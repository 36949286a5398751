/* encode.c - a tensor to a frame: open (sample, choose), blocks, close (move together, seal). */
#include "core.h"

/* Write a stored frame over whatever is there. */
static codec_status store(const codec_tensor *src, const struct kernels *k, struct header h, uint8_t *dst,
			  size_t capacity, size_t *written)
{
	h.layout = WIRE_LAYOUT_STORED;
	h.block_log2 = h.fixed = h.coded = h.halved = h.flags = 0;
	h.side_nbytes = 0;
	TRY(header_derive(&h));
	h.frame_nbytes = stored_nbytes(&h);
	if (h.frame_nbytes > capacity)
		return CODEC_SHORT_OUTPUT;
	if (src->nbytes)
		memcpy(dst + h.side_at, src->data, src->nbytes);
#if CODEC_BIG_ENDIAN
	swap_bytes(dst + h.side_at, src->nbytes, dtype_of(h.dtype)->nbytes);
#endif
	h.checksum = header_seal(&h, k, dst) + seal_block(k->digest(dst + h.side_at, src->nbytes, WIRE_SEED_REGION), 0);
	header_write(&h, dst);
	*written = h.frame_nbytes;
	return CODEC_OK;
}

static codec_status open_frame(const codec_spec *spec, const codec_tensor *src, uint8_t *dst, size_t capacity,
			       const codec_context *with, void *memory, size_t job_nbytes, struct job **out)
{
	const struct kernels *k = kernels_for(with);
	struct header h;
	codec_tensor t;
	struct job *j;

	TRY(request(spec, src, 1, &h, &t));
	if ((!dst && capacity) || with->ncodebooks > 1)
		return CODEC_BAD_ARGUMENT;
	TRY(job_open(memory, job_nbytes, &h, &j));
	*out = j;
	if (h.n < WIRE_MIN_CODED)
		return CODEC_OK;
	j->h.layout = WIRE_LAYOUT_BLOCKS;
	j->h.block_log2 = block_log2_for(h.n);
	TRY(model_choose(&t, with, k, j, &j->sample));
	TRY(choose_planes(with, j, &j->sample));
	j->h.side_nbytes = side_write(j, NULL);
	TRY(header_derive(&j->h));
	/* no room for it, or nothing to gain: stored */
	if (j->h.side_nbytes > UINT32_MAX || j->h.regions_at + WIRE_ALIGN * j->h.nblocks > stored_nbytes(&h) ||
	    j->h.regions_at > capacity || j->h.fixed == (1 << dtype_of(h.dtype)->nbytes) - 1) {
		j->h = h;
		return CODEC_OK;
	}
	side_write(j, dst + j->h.side_at);
	return CODEC_OK;
}

static codec_status blocks(const codec_tensor *src, uint8_t *dst, size_t capacity, const codec_context *with,
			   const struct job *j, uint64_t first, uint64_t count, uint64_t at, uint64_t *end,
			   uint64_t *seal, void *work)
{
	const struct kernels *k = kernels_for(with);
	struct work w;

	work_place(dtype_of(j->h.dtype), j->h.n, work, &w);
	*seal = 0;
	*end = at;
	for (uint64_t b = first; b < first + count; b++) {
		uint64_t digest, sealed, nbytes = encode_block(j, k, src, dst, b, &w, &digest);
		uint8_t *entry = dst + j->h.directory_at + WIRE_DIRECTORY_ENTRY * b;

		if (nbytes > capacity - at)
			return CODEC_SHORT_OUTPUT;
		memcpy(dst + at, w.region, nbytes);
		sealed = seal_block(digest + k->digest(w.region, nbytes, WIRE_SEED_REGION), b);
		*seal += sealed;
		at += nbytes;
		if (at / WIRE_ALIGN > UINT32_MAX)
			return CODEC_LIMIT;
		store32(entry, (uint32_t)(at / WIRE_ALIGN));
		store32(entry + 4, seal_short(sealed));
		*end = at;
	}
	return CODEC_OK;
}

static codec_status close_frame(const codec_tensor *src, uint8_t *dst, size_t capacity, const codec_context *with,
				const struct job *j, const uint64_t *counts, const uint64_t *ats, size_t nranges,
				uint64_t seal, size_t *written)
{
	const struct kernels *k = kernels_for(with);
	uint64_t to = j->h.regions_at, b = 0;
	struct header h = j->h;
	uint8_t *directory = dst + h.directory_at;

	if (h.nblocks == 0)
		return store(src, k, h, dst, capacity, written);
	for (size_t i = 0; i < nranges; i++) {
		uint64_t end;

		if (!counts[i])
			continue;
		if (counts[i] > h.nblocks - b)
			return CODEC_BAD_ARGUMENT;
		end = (uint64_t)WIRE_ALIGN * load32(directory + WIRE_DIRECTORY_ENTRY * (b + counts[i] - 1));
		if (ats[i] < to || end < ats[i] || end > capacity)
			return CODEC_BAD_ARGUMENT;
		if (ats[i] != to) {
			memmove(dst + to, dst + ats[i], end - ats[i]);
			for (uint64_t e = b; e < b + counts[i]; e++)
				store32(directory + WIRE_DIRECTORY_ENTRY * e,
					load32(directory + WIRE_DIRECTORY_ENTRY * e) -
						(uint32_t)((ats[i] - to) / WIRE_ALIGN));
		}
		to += end - ats[i];
		b += counts[i];
	}
	if (b != h.nblocks)
		return CODEC_BAD_ARGUMENT;
	if (to >= stored_nbytes(&h))
		return store(src, k, h, dst, capacity, written);
	h.frame_nbytes = to;
	h.checksum = header_seal(&h, k, dst + h.side_at) +
		     k->digest(directory, WIRE_DIRECTORY_ENTRY * h.nblocks, WIRE_SEED_DIRECTORY) + seal;
	header_write(&h, dst);
	*written = to;
	return CODEC_OK;
}

codec_status codec_encode_open(const codec_spec *spec, const codec_tensor *src, void *dst, size_t capacity,
			       const codec_context *with, void *job, size_t job_nbytes, codec_plan *plan)
{
	codec_context c;
	struct job *j;

	TRY(context_read(with, &c));
	TRY(open_frame(spec, src, dst, capacity, &c, job, job_nbytes, &j));
	job_plan(j, plan);
	return CODEC_OK;
}

/* Is this the tensor, and is there the room, that the job was opened with? */
static int fits_job(const struct job *j, const codec_tensor *src, const void *dst, size_t capacity)
{
	return src->struct_nbytes >= sizeof *src && src->dtype == j->h.dtype &&
	       src->nbytes == j->h.n * dtype_of(j->h.dtype)->nbytes && (src->data || !src->nbytes) &&
	       (dst || !capacity) && j->h.regions_at <= capacity;
}

codec_status codec_encode_blocks(const codec_tensor *src, void *dst, size_t capacity, const codec_context *with,
				 const void *job, uint64_t first, uint64_t count, uint64_t at, uint64_t *end,
				 uint64_t *seal, void *work, size_t work_nbytes)
{
	const struct job *j = job_place((void *)job);
	codec_context c;

	TRY(context_read(with, &c));
	if (!src || !job || !end || !seal || !work || !fits_job(j, src, dst, capacity) || at % WIRE_ALIGN ||
	    at < j->h.regions_at || at > capacity || first > j->h.nblocks || count > j->h.nblocks - first)
		return CODEC_BAD_ARGUMENT;
	if (work_nbytes < j->plan.work_nbytes)
		return CODEC_SHORT_SCRATCH;
	return blocks(src, dst, capacity, &c, j, first, count, at, end, seal, work);
}

codec_status codec_encode_close(const codec_tensor *src, void *dst, size_t capacity, const codec_context *with,
				const void *job, const uint64_t *counts, const uint64_t *ats, size_t nranges,
				uint64_t seal, size_t *written)
{
	const struct job *j = job_place((void *)job);
	codec_context c;

	TRY(context_read(with, &c));
	if (!src || !job || !written || (nranges && (!counts || !ats)))
		return CODEC_BAD_ARGUMENT;
	*written = 0;
	if (j->h.nblocks && !fits_job(j, src, dst, capacity))
		return CODEC_BAD_ARGUMENT;
	return close_frame(src, dst, capacity, &c, j, counts, ats, nranges, seal, written);
}

codec_status codec_encode(const codec_spec *spec, const codec_tensor *src, void *dst, size_t capacity, size_t *written,
			  float *residual, const codec_context *with, void *scratch, size_t scratch_nbytes)
{
	uint64_t at, end, seal = 0;
	codec_status status;
	codec_context c;
	struct job *j;

	if (!written || residual)
		return CODEC_BAD_ARGUMENT;
	*written = 0;
	TRY(context_read(with, &c));
	TRY(open_frame(spec, src, dst, capacity, &c, scratch, scratch_nbytes, &j));
	job_plan(j, NULL);
	if (scratch_nbytes < j->plan.job_nbytes + j->plan.work_nbytes)
		return CODEC_SHORT_SCRATCH;
	at = j->h.regions_at;
	if (j->h.nblocks) {
		status = blocks(src, dst, capacity, &c, j, 0, j->h.nblocks, at, &end, &seal,
				(char *)scratch + j->plan.job_nbytes);
		if (status == CODEC_SHORT_OUTPUT || status == CODEC_LIMIT) /* perhaps it fits as it is */
			return store(src, kernels_for(&c), j->h, dst, capacity, written);
		TRY(status);
	}
	return close_frame(src, dst, capacity, &c, j, &j->h.nblocks, &at, 1, seal, written);
}

codec_status codec_count(const codec_spec *spec, const codec_tensor *src, uint64_t counts[256],
			 const codec_context *with, void *scratch, size_t scratch_nbytes)
{
	struct header h;
	codec_context c;
	codec_tensor t;
	struct job *j;

	if (!counts)
		return CODEC_BAD_ARGUMENT;
	TRY(context_read(with, &c));
	TRY(request(spec, src, 1, &h, &t));
	TRY(job_open(scratch, scratch_nbytes, &h, &j));
	if (!h.n)
		return CODEC_OK;
	TRY(model_choose(&t, &c, kernels_for(&c), j, &j->sample));
	for (int i = 0; i < 256; i++)
		counts[i] += j->sample.counts[0][i];
	return CODEC_OK;
}
