/*
 * truncate/choose.cu - kernel that chooses the contents of the side section of Truncate frames: scale model and
 * codebook. docs/spec/encoder.md, section 8.
 *
 * One launch: CTAs claim numbered tasks, as in lossless/choose.cu. The first tasks fit the scale model, the others
 * count symbols of a sample under that model.
 */
#include "coder/choose.cuh"
#include "truncate/encode.cuh"
#include "frame/encode.cuh"

#define SYMBOL_SHARES 32

/* Shared memory of a CTA that runs choose_truncate; its tasks use the members one after the other. */
union cut_room {
	model_room model;
	struct {
		uint32_t counts[256];
	} sample;
	struct {
		uint32_t counts[256];
		book_room book;
		uint8_t lengths[LEAVES];
	} codes;
};

/* Count the symbols, after bits are dropped, in share `share` of the sample. */
DEVICE_CALL void sample_cut(const codec_view *v, uint8_t *memory, const codec_source *source, const codec_cuts &by,
			    uint32_t share, codec_choice *to, cut_room *room)
{
	const job &j = share_job(v, memory);
	const cutter c = cutter_of(v, source, by, v->dtype);
	const uint32_t octave = 1u << c.q.octave_log2;
	uint64_t nrows = (v->n + WIRE_ROW - 1) / WIRE_ROW, stride = choose_stride(nrows);
	uint64_t take = (nrows + stride - 1) / stride;
	uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;

	room->sample.counts[threadIdx.x] = 0;
	__syncthreads();
	for (uint64_t i = share * CTA_WARPS + warp; i < take; i += SYMBOL_SHARES * CTA_WARPS) {
		uint64_t first = WIRE_ROW * choose_spread(i, take, nrows);
		uint32_t m = v->n - first < WIRE_ROW ? (uint32_t)(v->n - first) : WIRE_ROW, n = there(0, lane, m);
		const cut_quad cut = cut_values(c, first + 4 * lane, n);
		place o = {};

		if (v->model_parts.count) {
			fit_rows(&j, memory, c.values, size_of(v->dtype), (int)octave, octave, first, m, lane);
			o = place_at(&j, n ? first + 4 * lane : first);
		}
		uint32_t quad = symbols_of(&j, c, &o, n, cut).quad;

		const bool empty = !any_bit<4>(cut.e);

		for (uint32_t k = 0; k < n && !empty; k++)
			atomicAdd(room->sample.counts + (quad >> 8 * k & 255), 1u);
		__syncwarp();
	}
	__syncthreads();
	if (room->sample.counts[threadIdx.x])
		atomicAdd(to->all + threadIdx.x, room->sample.counts[threadIdx.x]);
}

/* Complete the job as codec_encode_open does, once all symbols are counted. */
DEVICE_CALL void conclude_cut(codec_view *v, uint8_t *memory, uint64_t capacity, codec_choice *c,
			      codec_part_found *found, cut_room *room)
{
	uint8_t *lengths = room->codes.lengths, *to = memory + v->lengths.at;
	uint64_t nparts = v->model_parts.count, side_nbytes;

	room->codes.counts[threadIdx.x] = c->counts[0][threadIdx.x] = ((const volatile uint32_t *)c->all)[threadIdx.x];
	for (uint32_t k = threadIdx.x; v->codebook_id && k < LEAVES; k += CTA_THREADS)
		lengths[k] = to[k];
	__syncthreads();
	if (!v->codebook_id) {
		cta_book(room->codes.counts, v->max_code_length, lengths, &room->codes.book);
		for (uint32_t k = threadIdx.x; k < LEAVES; k += CTA_THREADS)
			to[k] = lengths[k];
	}
	cta_codes(lengths, memory + v->tables.at, &room->codes.book);
	__syncthreads();
	write_lead(v, memory, 1, v->codebook_id, nparts, c);
	side_nbytes = place_nibbles(v, memory, nparts, c, found);
	if (threadIdx.x)
		return;
	v->coded = 1;
	v->flags = (v->codebook_id ? WIRE_FLAG_PRIOR : 0) | (nparts ? WIRE_FLAG_SEGMENTS : 0);
	place_sections(v, side_nbytes);
	if (should_store(v, size_of(v->dtype), capacity))
		make_stored(v);
}

/*
 * Kernel: complete the planned jobs (codec_encode_plan) of TRUNCATE, for encode_truncate. Grid: (CTAs, frames). Set
 * v->nblocks to 0 if the tensor is to be stored uncompressed, or if levels are invalid (out->fault).
 */
extern "C" __global__ void __launch_bounds__(CTA_THREADS) choose_truncate(const codec_encoding *encodings)
{
	__shared__ cut_room room;
	const codec_encoding &e = encodings[blockIdx.y];
	const codec_source source = {e.source.values, e.source.sums, NULL}; /* encode_truncate writes residuals */
	codec_view *v = e.view;
	uint8_t *memory = e.memory;
	codec_choice *c = e.found;
	codec_part_found *found = (codec_part_found *)(c + 1);
	const sample_kind q = sample_kind_of(v);
	const model_tasks tasks = model_tasks_of(v->n, e.nparts);
	const uint32_t all = 1 + 3 * tasks.step + SYMBOL_SHARES;

	for (uint32_t t; (t = cta_next_task(&c->ticket)) < all;) {
		if (t == 0) { /* this shift is the finest one: offsets are whole octaves */
			if (threadIdx.x == 0)
				c->finest = WIRE_MAX_SHIFT;
			cta_signal(c->ready + PLANES);
		} else if (t <= 3 * tasks.step) {
			if (model_task(v, memory, source.values, q, tasks, t - 1, c, found, &room.model)) {
				for (uint32_t i = threadIdx.x; i < 256; i += CTA_THREADS)
					c->all[i] = 0; /* reset: from here on c->all counts symbols */
				cta_signal(c->ready + PARTS);
			}
		} else {
			cta_wait(c->ready + PARTS);
			sample_cut(v, memory, &source, e.by, t - 1 - 3 * tasks.step, c, &room);
			if (cta_is_last(c->done + SYMBOLS, SYMBOL_SHARES))
				conclude_cut(v, memory, e.out->fault ? 0 : e.capacity, c, found, &room);
		}
	}
}
