/*
 * coder/choose.cuh - choose the scale model. The work is divided into tasks that CTAs claim in order.
 * docs/spec/encoder.md, section 4.
 */
#ifndef CODEC_CUDA_CODER_CHOOSE_CUH
#define CODEC_CUDA_CODER_CHOOSE_CUH

#include "coder/symbols.cuh"

/* Shared memory of a CTA that chooses the scale model; its tasks use the members one after the other. */
union model_room {
	fit_room fit;
	count_room count;
	decide_room decide;
};

/*
 * Decide if a single part without offsets needs a record. Return the number of parts with records: nparts or 0. Write
 * the symbol counts of plane 0 to c->counts[0], except for float8, whose counts, with signs, come from sample_planes.
 */
DEVICE_CALL uint64_t conclude_parts(const codec_view *v, uint8_t *memory, const sample_kind &q, uint64_t nparts,
				    codec_choice *c, const codec_part_found *found)
{
	const bool keep = nparts && (q.based || nparts > 1 || model_parts(v, memory)->kind);
	const volatile uint32_t *from = keep ? c->all : found->raw;

	if (q.top)
		c->counts[0][threadIdx.x] = from[threadIdx.x];
	return keep ? nparts : 0;
}

/*
 * Complete the scale model: set v->model_parts.count, and write the symbol counts of plane 0, after offsets are
 * subtracted, to c->counts[0].
 */
DEVICE_CALL void conclude_model(codec_view *v, uint8_t *memory, const sample_kind &q, uint32_t nparts, codec_choice *c,
				const codec_part_found *found)
{
	const uint64_t used = conclude_parts(v, memory, q, nparts, c, found);
	uint64_t total = cta_sum(c->counts[0][threadIdx.x]);

	if (threadIdx.x == 0) {
		v->model_parts.count = used;
		if (!nparts) { /* if there are parts, decide_part has already counted zeros and values */
			const uint32_t empty = *(const volatile uint32_t *)&found->empty;

			c->nzeros = c->counts[0][0] + empty;
			c->nvalues = total + empty;
		}
	}
	__threadfence();
	__syncthreads();
}

/*
 * Numbering of the tasks that fit `nparts` parts: three steps (rows, columns, symbols) of `step` tasks each; a step has
 * `shares` tasks for every part.
 */
struct model_tasks {
	uint32_t nparts, shares, step;
};

/*
 * Return the numbering of tasks for a tensor of n values. The number of shares is limited so that each warp has at
 * least one row (128 values) of the sample of symbols.
 */
DEVICE model_tasks model_tasks_of(uint64_t n, uint32_t nparts)
{
	uint64_t nrows = (n + WIRE_ROW - 1) / WIRE_ROW, take = nrows / choose_stride(nrows);
	uint32_t parts = nparts ? nparts : 1; /* symbols are counted even if there is no part */
	uint32_t most = parts < 256 / PART_SHARES ? PART_SHARES : parts < 256 ? 256 / parts : 1;
	uint64_t shares = (take / CTA_WARPS + parts - 1) / parts;

	shares = shares < 1 ? 1 : shares < most ? shares : most;
	return {nparts, (uint32_t)shares, parts * (uint32_t)shares};
}

/*
 * Run task t < 3 * step. It waits until c->finest is known. The last CTA to finish a step of a part
 * completes that step. Return true in the CTA whose task completes the model.
 */
DEVICE_CALL bool model_task(codec_view *v, uint8_t *memory, const uint8_t *values, const sample_kind &q,
			    const model_tasks &tasks, uint32_t t, codec_choice *c, codec_part_found *found,
			    model_room *room)
{
	const uint32_t number = t % tasks.step / tasks.shares, share = t % tasks.shares, shares = tasks.shares;
	codec_model_part whole = {0, v->n, 0, 0, 0, 0, 0, 0}, *part = &whole;
	codec_part_found *f = found + number;

	if (tasks.nparts)
		part = model_parts(v, memory) + number;
	else if (t < 2 * tasks.step)
		return false;
	if (t < tasks.step) {
		sample_rows(q, part, values, share, shares, f);
		if (!cta_is_last(&f->rows, shares))
			return false;
		cta_wait(c->ready + PLANES);
		fit_part(v, memory, q, part, c, f, &room->fit);
		cta_signal(&f->rows_ready);
		return false;
	}
	if (t < 2 * tasks.step) {
		cta_wait(&f->rows_ready);
		if (part->kind & WIRE_SEGMENT_COLS)
			sample_cols(v, memory, q, part, values, share, shares, f, &room->fit);
		if (!cta_is_last(&f->cols, shares))
			return false;
		if (part->kind & WIRE_SEGMENT_COLS)
			fit_cols(v, memory, q, part, c);
		cta_signal(&f->cols_ready);
		return false;
	}
	cta_wait(tasks.nparts ? &f->cols_ready : c->ready + PLANES);
	sample_symbols(v, memory, q, {part, values, tasks.nparts > 0, share, shares}, f, &room->count);
	if (!cta_is_last(&f->counts, shares))
		return false;
	if (tasks.nparts)
		decide_part(v, q, part, c, f, &room->decide);
	if (!cta_is_last(c->done + PARTS, tasks.step / shares))
		return false;
	conclude_model(v, memory, q, tasks.nparts, c, found);
	return true;
}

/*
 * Lay out the side section: set found[i].side_nibbles to the position of the nibbles of part i (row and column
 * offsets), in bytes after the nibbles of part 0. Return the size of the section in bytes.
 */
DEVICE_CALL uint64_t place_nibbles(const codec_view *v, uint8_t *memory, uint64_t nparts, const codec_choice *c,
				   codec_part_found *found)
{
	uint64_t nibbles = 0, total;

	for (uint64_t i = 0; i < nparts; i += CTA_THREADS) {
		uint64_t p = i + threadIdx.x;
		const codec_model_part *part = model_parts(v, memory) + (p < nparts ? p : 0);
		uint64_t mine = p < nparts ? (part_rows(part) + 1) / 2 + (part_cols(part) + 1) / 2 : 0;
		uint64_t before = cta_scan((uint32_t)mine, &total);

		if (p < nparts)
			found[p].side_nibbles = nibbles + before;
		nibbles += total;
	}
	return c->lead_nbytes + WIRE_SEGMENT_NBYTES * nparts + nibbles;
}

/*
 * Return true if a tensor must be stored uncompressed, because blocks do not fit into the frame's capacity or save no
 * bytes. `size`: bytes per value.
 */
DEVICE bool should_store(const codec_view *v, uint32_t size, uint64_t capacity)
{
	return v->side_nbytes > 0xffffffffu || v->regions_offset > capacity ||
	       choose_stored(v->regions_offset + WIRE_ALIGN * v->nblocks, v->side_offset + v->n * size) ||
	       v->fixed == (1u << size) - 1;
}

/* Change the job's view to a frame that stores the tensor uncompressed. */
DEVICE void make_stored(codec_view *v)
{
	v->layout = WIRE_LAYOUT_STORED;
	v->fixed = v->coded = v->halved = v->flags = 0;
	v->nblocks = v->model_parts.count = 0;
	place_sections(v, 0);
}

#endif
