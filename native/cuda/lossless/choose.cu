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
		uint32_t counts[256], low[256];
		book_room book;
		uint8_t lengths[LEAVES], nibbles[LEAVES];
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
 * Choose from 256 symbol counts how a plane of n values is stored, as choose_plane does, and return CHOOSE_*. Write the
 * code lengths of a codebook to room->plane.lengths. given: code lengths of an agreed codebook, used if s.given is set.
 */
DEVICE_CALL int conclude_plane(const uint32_t *counts, choose_sample s, uint64_t n, uint32_t max_code_length,
			       const uint8_t *given, choose_room *room)
{
	uint8_t *lengths = room->plane.lengths;
	uint32_t *low = room->plane.low, i = threadIdx.x, mine = counts[i];
	uint64_t total, cost, excess = 0;
	bool uneven = false, halved = false;

	__syncthreads(); /* all threads have finished using room->plane for the previous plane */
	room->plane.counts[i] = mine;
	low[i] = 0;
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
	if (uneven) {
		atomicAdd(low + i % 16, mine);
		__syncthreads();
		cta_book(low, max_code_length, room->plane.nibbles, &room->plane.book);
		uint64_t less =
			cta_cost(room->plane.nibbles, low, 8) + 4 * total + price_of(room->plane.nibbles, total, n);

		halved = less < cost;
		cost = halved ? less : cost;
		for (uint32_t k = i; halved && k < LEAVES; k += CTA_THREADS)
			lengths[k] = room->plane.nibbles[k];
	}
	__syncthreads();
	return choose_fate(cost, total, halved, s);
}

/*
 * float64: count the bytes of all planes except plane 0 again, under the scale model, because the model changes the
 * exponent bits in plane 1.
 */
DEVICE_CALL void sample_moved(const codec_view *v, uint8_t *memory, const uint8_t *values, uint32_t size,
			      codec_choice *c, uint32_t *bins)
{
	const job &j = share_job(v, memory);

	for (uint32_t i = 256 + threadIdx.x; i < 256 * size; i += CTA_THREADS)
		((uint32_t *)c->counts)[i] = 0;
	if (threadIdx.x == 0) {
		c->zero_runs = c->varied = c->under = 0;
		c->zeros = c->sampled = 0;
	}
	__threadfence();
	__syncthreads();
	sample_planes(v, &j, memory, values, 1, 0, 1, c, bins);
	__threadfence();
	__syncthreads();
	conclude_planes(v, c, bins);
	__syncthreads();
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

	if (q.based)
		sample_moved(v, memory, values, q.size, c, room->bins);
	zeros = seen->has_empty_row || (q.octave && choose_prunes(seen->nzeros, seen->nvalues));
	for (uint32_t p = 0; p < q.size; p++) {
		bool exponent = p == 0 && q.octave;
		const choose_sample s = {exponent, exponent && name, !(seen->varied >> p & 1),
					 zeros || seen->zero_runs >> p & 1};
		uint8_t *lengths = memory + v->lengths.at + LEAVES * p;
		int what = conclude_plane(c->counts[p], s, v->n, v->max_code_length, lengths, room);

		halved |= (uint32_t)(what == CHOOSE_HALVED) << p;
		fixed |= (uint32_t)(what == CHOOSE_FIXED) << p;
		if (what != CHOOSE_CODED && what != CHOOSE_HALVED)
			continue;
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
		sample_planes(v, NULL, memory, values, q.octave != 0, t, PLANE_SHARES, c, room.bins);
		if (!cta_is_last(c->done + PLANES, PLANE_SHARES))
			continue;
		conclude_planes(v, c, room.bins);
		cta_signal(c->ready + PLANES);
		if (!q.octave)
			conclude(v, memory, values, e.capacity, c, found, &room);
	}
}
