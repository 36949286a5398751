/*
 * lossless/choose.cu - kernel that chooses the side section of lossless frames: the scale model, how each plane is
 * stored, and codebooks. docs/spec/encoder.md, sections 4 and 5.
 *
 * One launch: CTAs claim numbered tasks (common/cta.cuh). The first tasks sample planes, the others fit the scale
 * model. The CTA that finishes the last task completes the job.
 */
#include "coder/choose.cuh"
#include "frame/encode.cuh"

/* Shared memory of a CTA that runs choose_lossless; its tasks use the members one after the other. */
union choose_room {
	uint32_t bins[256 * WIRE_MAX_PLANES];
	model_room model;
	struct {
		uint32_t counts[256], kept[256];
		book_room book;
		uint8_t lengths[LEAVES], symbols[LEAVES], without[LEAVES];
	} plane;
};

/*
 * Return the packed size of a codebook in bits, scaled by total / n to compare it with the cost of a sample of `total`
 * of n values, as choose_price does.
 */
DEVICE uint64_t price_of(const uint8_t *lengths, uint64_t total, uint64_t n)
{
	return 8 * (uint64_t)ends_nbytes(cta_span(lengths)) * total / n;
}

/*
 * Choose from 256 symbol counts how a plane of n values is stored, as choose_plane does. Write the code lengths of a
 * codebook to room->plane.lengths. given: code lengths of an agreed codebook, used if s.given is set.
 */
DEVICE_CALL choose_result conclude_plane(const uint32_t *counts, choose_sample s, uint64_t n, uint32_t max_code_length,
					 const uint8_t *given, choose_room *room)
{
	uint8_t *lengths = room->plane.lengths;
	uint32_t *kept = room->plane.kept, i = threadIdx.x, mine = counts[i];
	uint64_t total, cost, excess = 0;
	bool uneven = false;
	int raw = 0;

	__syncthreads(); /* all threads have finished using room->plane for the previous plane */
	room->plane.counts[i] = mine;
	for (uint32_t k = i; s.given && k < LEAVES; k += CTA_THREADS)
		lengths[k] = given[k];
	total = cta_sum(mine); /* the barriers in cta_sum also order accesses to room->plane */
	cost = 8 * total;
	if (s.exponent) {
		if (!s.given)
			cta_book(room->plane.counts, max_code_length, lengths, &room->plane.book);
		cost = cta_cost(lengths, room->plane.counts, 8);
	} else if (!s.constant) {
		excess = choose_excess_of((uint32_t)cta_sum(mine * mine), 256, total);
		uneven = !choose_near_uniform(excess, total);
	}
	if (uneven && choose_may_pay(excess, total, n)) {
		cta_book(room->plane.counts, max_code_length, lengths, &room->plane.book);
		cost = cta_cost(lengths, room->plane.counts, 8) + price_of(lengths, total, n);
	}
	for (int bits = 4; uneven && bits; bits = !s.float8 || bits == 2 ? 0 : bits % 4 + 1) {
		__syncthreads();
		kept[i] = 0;
		__syncthreads();
		atomicAdd(kept + bits_symbol((uint8_t)i, bits), mine);
		__syncthreads();
		cta_book(kept, max_code_length, room->plane.symbols, &room->plane.book);
		uint64_t less = cta_cost(room->plane.symbols, kept, 8) + (uint64_t)bits * total +
				price_of(room->plane.symbols, total, n);

		for (uint32_t k = i; less < cost && k < LEAVES; k += CTA_THREADS)
			lengths[k] = room->plane.symbols[k];
		raw = less < cost ? bits : raw;
		cost = less < cost ? less : cost;
	}
	__syncthreads();
	return {choose_fate(cost, total, s), raw, cost};
}

/*
 * Count the bytes of planes again, under the scale model. float64: of all planes except plane 0, because the model
 * changes the exponent bits in plane 1. float8: of plane 0, which has the sign, too; the counts without the model, and
 * the bits of plane 0 in the masks zero_runs and varied, move to plane 1.
 */
DEVICE_CALL void sample_moved(const codec_view *v, uint8_t *memory, const uint8_t *values, uint32_t size,
			      codec_choice *c, uint32_t *bins)
{
	const uint32_t first = size > 1;
	const job &j = share_job(v, memory);

	if (!first)
		c->counts[1][threadIdx.x] = ((const volatile codec_choice *)c)->counts[0][threadIdx.x];
	__syncthreads();
	for (uint32_t i = 256 * first + threadIdx.x; i < 256 * size; i += CTA_THREADS)
		((uint32_t *)c->counts)[i] = 0;
	if (threadIdx.x == 0) {
		c->zero_runs = first ? 0 : ((const volatile codec_choice *)c)->zero_runs << 1;
		c->varied = first ? 0 : ((const volatile codec_choice *)c)->varied << 1;
		c->under = 0;
		c->zeros = c->sampled = 0;
	}
	__threadfence();
	__syncthreads();
	sample_planes(v, &j, memory, values, first, 0, 1, c, bins);
	__threadfence();
	__syncthreads();
	conclude_planes(v, c, bins);
	__syncthreads();
}

/* Properties of plane p of the sample. zeros: regions may omit zeros. name: id of an agreed codebook, or 0. */
DEVICE choose_sample sample_of(const codec_choice *c, const sample_kind &q, uint32_t p, bool zeros, uint64_t name)
{
	const volatile codec_choice *seen = c;
	const bool exponent = p == 0 && q.top;

	return {exponent, q.octave && q.size == 1, exponent && name, !(seen->varied >> p & 1),
		zeros || seen->zero_runs >> p & 1};
}

/*
 * Choose how the plane of a float8 tensor with a scale model is stored, as choose_float8 does. Set *nparts to 0 if the
 * model does not pay.
 */
DEVICE_CALL choose_result conclude_float8(const codec_view *v, uint8_t *memory, const sample_kind &q, codec_choice *c,
					  codec_part_found *found, uint64_t *nparts, choose_room *room)
{
	const uint64_t nbytes = 4 + place_nibbles(v, memory, *nparts, c, found) - c->lead_nbytes;
	const choose_result before =
		conclude_plane(c->counts[1], sample_of(c, q, 1, false, 0), v->n, v->max_code_length, NULL, room);

	for (uint32_t k = threadIdx.x; k < LEAVES; k += CTA_THREADS)
		room->plane.without[k] = room->plane.lengths[k];
	const choose_result after =
		conclude_plane(c->counts[0], sample_of(c, q, 0, false, 0), v->n, v->max_code_length, NULL, room);
	const uint64_t total = cta_sum(((const volatile codec_choice *)c)->counts[0][threadIdx.x]);

	if (choose_model8(before, after, nbytes, total, v->n, v->variant == CODEC_MODEL_SEPARABLE))
		return after;
	*nparts = 0;
	for (uint32_t k = threadIdx.x; k < LEAVES; k += CTA_THREADS)
		room->plane.lengths[k] = room->plane.without[k];
	__syncthreads();
	return before;
}

/* Complete the job as codec_encode_open does, once all tasks have finished. */
DEVICE_CALL void conclude(codec_view *v, uint8_t *memory, const uint8_t *values, uint64_t capacity, codec_choice *c,
			  codec_part_found *found, choose_room *room)
{
	const sample_kind q = sample_kind_of(v);
	const volatile codec_choice *seen = c;
	uint64_t nparts = v->model_parts.count, name = v->codebook_id, side_nbytes;
	uint32_t fixed = 0, coded = 0, halved = 0;
	bool zeros;

	if (q.based || (q.octave && !q.top && nparts))
		sample_moved(v, memory, values, q.size, c, room->bins);
	zeros = seen->has_empty_row || (q.top && choose_prunes(seen->nzeros, seen->nvalues));
	for (uint32_t p = 0; p < q.size; p++) {
		uint8_t *lengths = memory + v->lengths.at + LEAVES * p;
		const choose_result got = q.octave && !q.top && nparts
						  ? conclude_float8(v, memory, q, c, found, &nparts, room)
						  : conclude_plane(c->counts[p], sample_of(c, q, p, zeros, name), v->n,
								   v->max_code_length, lengths, room);

		fixed |= (uint32_t)(got.what == CHOOSE_FIXED) << p;
		if (got.what != CHOOSE_CODED)
			continue;
		halved |= WIRE_HALVED(got.raw, p);
		coded |= 1u << p;
		for (uint32_t k = threadIdx.x; k < LEAVES; k += CTA_THREADS)
			lengths[k] = room->plane.lengths[k];
		cta_codes(room->plane.lengths, memory + v->tables.at + TABLE_NBYTES * p, &room->plane.book);
	}
	if (!(coded & 1))
		nparts = name = 0;
	write_lead(v, memory, coded, name, nparts, c);
	side_nbytes = place_nibbles(v, memory, nparts, c, found);
	if (threadIdx.x)
		return;
	v->fixed = fixed;
	v->coded = coded;
	v->halved = halved;
	v->codebook_id = name;
	v->flags = (name ? WIRE_FLAG_PRIOR : 0) | (nparts ? WIRE_FLAG_SEGMENTS : 0);
	v->model_parts.count = nparts;
	place_sections(v, side_nbytes);
	if (should_store(v, q.size, capacity))
		make_stored(v);
}

/*
 * Kernel: complete the planned jobs (codec_encode_plan) of LOSSLESS, for encode_lossless. Grid: (CTAs, frames). Set
 * v->nblocks to 0 if the tensor is to be stored uncompressed.
 */
extern "C" __global__ void __launch_bounds__(CTA_THREADS) choose_lossless(const codec_encoding *encodings)
{
	__shared__ choose_room room;
	const codec_encoding &e = encodings[blockIdx.y];
	codec_view *v = e.view;
	uint8_t *memory = e.memory;
	const uint8_t *values = e.source.values;
	codec_choice *c = e.found;
	codec_part_found *found = (codec_part_found *)(c + 1);
	const sample_kind q = sample_kind_of(v);
	const model_tasks tasks = model_tasks_of(v->n, e.nparts);
	const uint32_t all = PLANE_SHARES + (q.octave ? 3 * tasks.step : 0);

	for (uint32_t t; (t = cta_next_task(&c->ticket)) < all;) {
		if (t >= PLANE_SHARES) {
			if (model_task(v, memory, values, q, tasks, t - PLANE_SHARES, c, found, &room.model))
				conclude(v, memory, values, e.capacity, c, found, &room);
			continue;
		}
		sample_planes(v, NULL, memory, values, q.top, t, PLANE_SHARES, c, room.bins);
		if (!cta_is_last(c->done + PLANES, PLANE_SHARES))
			continue;
		conclude_planes(v, c, room.bins);
		cta_signal(c->ready + PLANES);
		if (!q.octave)
			conclude(v, memory, values, e.capacity, c, found, &room);
	}
}
