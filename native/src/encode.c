/* encode.c - a tensor to a frame: open (sample, choose), blocks, close (move together, seal). */
#include "truncate.h"

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

/* Codecs of rows: the book for codes, from a sample of the blocks. */
static codec_status sample_codes(struct job *j, const struct kernels *k, const codec_tensor *src)
{
	uint64_t take = MIN(j->h.nblocks, 16);
	uint32_t counts[256] = {0};
	struct work w;

	work_place(&j->h, (char *)j + j->work_at, &w);

	for (uint64_t i = 0; i < take; i++) {
		uint64_t n;

		TRY(rows_codes(j, k, src, i * j->h.nblocks / take, &n, &w));
		for (uint64_t v = 0; v < n; v++)
			counts[w.plane[0][v]]++;
	}
	choose_bytes(j, counts);
	return CODEC_OK;
}

/* Codecs of rows: after the scan, all that precedes the directory. */
static codec_status start_rows(struct job *j, const struct kernels *k, const codec_tensor *src, uint8_t *dst,
			       size_t capacity)
{
	TRY(rows_finish(j));
	if (rows_entropy(&j->h))
		TRY(sample_codes(j, k, src));
	j->h.side_nbytes = side_write(j, NULL);
	TRY(header_derive(&j->h));
	if (j->h.side_nbytes > UINT32_MAX || j->h.nblocks > UINT32_MAX)
		return CODEC_LIMIT;
	if (j->h.regions_at > capacity)
		return CODEC_SHORT_OUTPUT;
	side_write(j, dst + j->h.side_at);
	return CODEC_OK;
}

static codec_status open_rows(const codec_spec *spec, struct job *j, const struct kernels *k, const codec_tensor *src,
			      uint8_t *dst, size_t capacity, const codec_context *with)
{
	codec_spec s = {0};

	memcpy(&s, spec, MIN(spec->struct_nbytes, sizeof s));
	if (!j->h.n)
		return CODEC_OK;
	j->h.layout = WIRE_LAYOUT_BLOCKS;
	j->key = (struct philox){s.seed, (uint32_t)with->stream, (uint32_t)(with->stream >> 32)};
	j->scale = j->h.codec == CODEC_TERNARY ? rows_round_scale(&j->h, s.scale) : s.scale;
	if (s.scale > 0 && !(j->scale > 0 && round_bits(j->scale) < ROUND_INF))
		return CODEC_BAD_SPEC;
	j->clip = s.clip;
	j->residual = with->residual != NULL;
	TRY(rows_cut(j, with));
	j->nscans = rows_scan_count(j);
	return j->nscans ? CODEC_OK : start_rows(j, k, src, dst, capacity);
}

/* With what dtypes add: a gradient of few bits tells less of parameters of many. */
static int8_t guard_for(const struct header *h, const codec_metric *metric)
{
	uint32_t theta = metric->theta_dtype ? metric->theta_dtype
			 : metric->theta     ? metric->theta->dtype
					     : CODEC_FLOAT32;
	struct header of = {.codec = CODEC_TRUNCATE, .dtype = (uint8_t)theta};
	struct truncate_kind p, g;
	int guard;

	truncate_kind_of(&of, &p);
	truncate_kind_of(h, &g);
	guard = h->guard + p.mbits - g.mbits;
	return (int8_t)MAX(MIN(guard, INT8_MAX), INT8_MIN);
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
	if (codec_is_rows(h.codec))
		return open_rows(spec, j, k, &t, dst, capacity, with);
	if (h.codec == CODEC_TRUNCATE) {
		TRY(truncate_check(&h, with, 1));
		if (h.variant != WIRE_LEVELS_FIXED && !with->levels)
			j->h.guard = h.guard = guard_for(&h, with->metric);
	}
	if (h.n < WIRE_MIN_CODED)
		return CODEC_OK;
	j->h.layout = WIRE_LAYOUT_BLOCKS;
	j->h.block_log2 = block_log2_for(h.n);
	TRY(model_choose(&t, with, k, j, &j->sample));
	if (h.codec == CODEC_TRUNCATE) {
		TRY(truncate_choose(j, k, &t, with));
		TRY(choose_symbols(with, j));
	} else {
		TRY(choose_planes(with, j, &j->sample));
	}
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

	work_place(&j->h, work, &w);
	*seal = 0;
	*end = at;
	for (uint64_t b = first; b < first + count; b++) {
		uint8_t *entry = dst + j->h.directory_at + WIRE_DIRECTORY_ENTRY * b;
		uint64_t digest = 0, sealed, nbytes;

		if (codec_is_rows(j->h.codec)) {
			TRY(rows_encode_block(j, k, src, b, dst + at, capacity - at, &nbytes, &w));
			if (with->residual)
				TRY(rows_residual(j, k, src, dst, b, at, with->residual, &w));
		} else {
			if (j->h.codec == CODEC_TRUNCATE)
				TRY(truncate_encode_block(j, k, with, src, b, &w, &nbytes));
			else
				nbytes = encode_block(j, k, src, dst, b, &w, &digest);
			if (nbytes > capacity - at)
				return CODEC_SHORT_OUTPUT;
			memcpy(dst + at, w.region, nbytes);
		}
		sealed = seal_block(digest + k->digest(dst + at, nbytes, WIRE_SEED_REGION), b);
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
	if (to >= stored_nbytes(&h) && !codec_is_rows(h.codec))
		return store(src, k, h, dst, capacity, written);
	h.frame_nbytes = to;
	h.checksum = header_seal(&h, k, dst + h.side_at) +
		     k->digest(directory, WIRE_DIRECTORY_ENTRY * h.nblocks, WIRE_SEED_DIRECTORY) + seal;
	header_write(&h, dst);
	*written = to;
	return CODEC_OK;
}

/* Is this the tensor, and is there the room, that the job was opened with? */
static int fits_job(const struct job *j, const codec_tensor *src, const void *dst, size_t capacity)
{
	return src->struct_nbytes >= sizeof *src && src->dtype == j->h.dtype &&
	       src->nbytes == j->h.n * dtype_of(j->h.dtype)->nbytes && (src->data || !src->nbytes) &&
	       (dst || !capacity) && j->h.regions_at <= capacity;
}

codec_status codec_encode_open(const codec_spec *spec, const codec_tensor *src, void *dst, size_t capacity,
			       const codec_context *with, void *job, size_t job_nbytes, codec_plan *plan)
{
	codec_status status;
	codec_context c;
	uint64_t saved;
	struct job *j;

	TRY(context_read(with, &c));
	saved = call_enter();
	status = open_frame(spec, src, dst, capacity, &c, job, job_nbytes, &j);
	call_leave(saved);
	TRY(status);
	job_plan(j, plan);
	return CODEC_OK;
}

codec_status codec_encode_scan(const codec_tensor *src, const codec_context *with, void *job, uint64_t first,
			       uint64_t count)
{
	struct job *j = job_place(job);
	uint64_t saved;
	codec_context c;

	TRY(context_read(with, &c));
	if (!src || !job || !fits_job(j, src, job, SIZE_MAX) || first > j->nscans || count > j->nscans - first)
		return CODEC_BAD_ARGUMENT;
	saved = call_enter();
	rows_scan(j, kernels_for(&c), src, first, count);
	call_leave(saved);
	return CODEC_OK;
}

codec_status codec_encode_start(const codec_tensor *src, void *dst, size_t capacity, const codec_context *with,
				void *job, codec_plan *plan)
{
	struct job *j = job_place(job);
	codec_status status;
	codec_context c;
	uint64_t saved;

	TRY(context_read(with, &c));
	if (!src || !job || !fits_job(j, src, dst, capacity) || !j->nscans)
		return CODEC_BAD_ARGUMENT;
	saved = call_enter();
	status = start_rows(j, kernels_for(&c), src, dst, capacity);
	call_leave(saved);
	TRY(status);
	job_plan(j, plan);
	return CODEC_OK;
}

codec_status codec_encode_blocks(const codec_tensor *src, void *dst, size_t capacity, const codec_context *with,
				 const void *job, uint64_t first, uint64_t count, uint64_t at, uint64_t *end,
				 uint64_t *seal, void *work, size_t work_nbytes)
{
	const struct job *j = job_place((void *)job);
	codec_status status;
	codec_context c;
	uint64_t saved;

	TRY(context_read(with, &c));
	if (!src || !job || !end || !seal || !work || !fits_job(j, src, dst, capacity) || at % WIRE_ALIGN ||
	    at < j->h.regions_at || at > capacity || first > j->h.nblocks || count > j->h.nblocks - first)
		return CODEC_BAD_ARGUMENT;
	if (work_nbytes < j->plan.work_nbytes)
		return CODEC_SHORT_SCRATCH;
	saved = call_enter();
	status = blocks(src, dst, capacity, &c, j, first, count, at, end, seal, work);
	call_leave(saved);
	return status;
}

/* What a codec that may store leaves behind, written last, since it may be the tensor. */
static codec_status leave(const struct job *j, const codec_tensor *src, const uint8_t *frame, const codec_context *with)
{
	if (!with->residual || codec_is_rows(j->h.codec))
		return CODEC_OK;
	if (j->h.codec == CODEC_TRUNCATE && frame[WIRE_AT_LAYOUT] == WIRE_LAYOUT_BLOCKS)
		return truncate_residual(j, kernels_for(with), with, src);
	memset(with->residual, 0, sizeof(float) * j->h.n);
	return CODEC_OK;
}

codec_status codec_encode_close(const codec_tensor *src, void *dst, size_t capacity, const codec_context *with,
				const void *job, const uint64_t *counts, const uint64_t *ats, size_t nranges,
				uint64_t seal, size_t *written)
{
	const struct job *j = job_place((void *)job);
	codec_status status;
	codec_context c;
	uint64_t saved;

	TRY(context_read(with, &c));
	if (!src || !job || !written || (nranges && (!counts || !ats)))
		return CODEC_BAD_ARGUMENT;
	*written = 0;
	if (j->h.nblocks && !fits_job(j, src, dst, capacity))
		return CODEC_BAD_ARGUMENT;
	TRY(close_frame(src, dst, capacity, &c, j, counts, ats, nranges, seal, written));
	saved = call_enter();
	status = leave(job_place((void *)job), src, dst, &c);
	call_leave(saved);
	return status;
}

static codec_status encode(const codec_spec *spec, const codec_tensor *src, void *dst, size_t capacity, size_t *written,
			   const codec_context *with, void *scratch, size_t scratch_nbytes)
{
	const struct kernels *k = kernels_for(with);
	uint64_t at, end, seal = 0;
	codec_status status;
	struct job *j;

	TRY(open_frame(spec, src, dst, capacity, with, scratch, scratch_nbytes, &j));
	if (j->nscans) {
		rows_scan(j, k, src, 0, j->nscans);
		TRY(start_rows(j, k, src, dst, capacity));
	}
	job_plan(j, NULL);
	if (scratch_nbytes < job_scratch(&j->h))
		return CODEC_SHORT_SCRATCH;
	at = j->h.regions_at;
	if (j->h.nblocks) {
		status = blocks(src, dst, capacity, with, j, 0, j->h.nblocks, at, &end, &seal, job_work(j, scratch));
		if ((status == CODEC_SHORT_OUTPUT || status == CODEC_LIMIT) && !codec_is_rows(j->h.codec)) {
			TRY(store(src, k, j->h, dst, capacity, written)); /* perhaps it fits as it is */
			return leave(j, src, dst, with);
		}
		TRY(status);
	}
	TRY(close_frame(src, dst, capacity, with, j, &j->h.nblocks, &at, 1, seal, written));
	return leave(j, src, dst, with);
}

codec_status codec_encode(const codec_spec *spec, const codec_tensor *src, void *dst, size_t capacity, size_t *written,
			  float *residual, const codec_context *with, void *scratch, size_t scratch_nbytes)
{
	codec_status status;
	codec_context c;
	uint64_t saved;

	if (!written)
		return CODEC_BAD_ARGUMENT;
	*written = 0;
	TRY(context_read(with, &c));
	c.residual = residual ? residual : c.residual;
	saved = call_enter();
	status = encode(spec, src, dst, capacity, written, &c, scratch, scratch_nbytes);
	call_leave(saved);
	return status;
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
