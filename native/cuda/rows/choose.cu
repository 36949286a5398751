/*
 * rows/choose.cu - kernels that compute the side section of row codecs: scales of parts, and a codebook.
 * docs/spec/encoder.md, section 7.
 *
 * One launch, in which CTAs claim numbered tasks in order, as in lossless/choose.cu. The first tasks sum up pieces of
 * WIRE_TREE values, the next tasks compute the scales of parts, and the last tasks count codes in a sample of blocks.
 */
#include "rows/encode.cuh"
#include "coder/sample.cuh"
#include "frame/encode.cuh"

#define SCANNED (4 * CTA_WARPS) /* number of pieces that a CTA sums up in one task */

/* Shared memory of a CTA that runs choose_rows; its tasks use the members one after the other. */
union rows_room {
	struct {
		double node[2][CTA_WARPS], level[2][64];
	} tree;
	struct {
		uint32_t counts[256];
		book_room book;
		uint8_t lengths[LEAVES];
	} codes;
};

/* Compute the sums of SCANNED pieces of WIRE_TREE values, from piece `first` on, one piece per warp. */
DEVICE_CALL void scan_pieces(const codec_view *v, uint8_t *memory, const codec_source *source, uint64_t first)
{
	const codec_row_part *parts = row_parts(v, memory);
	codec_row_sums *sums = (codec_row_sums *)(memory + v->row_sums.at);
	uint32_t lane = threadIdx.x % 32;

	for (uint64_t i = first + threadIdx.x / 32; i < first + SCANNED && i < v->row_sums.count; i += CTA_WARPS) {
		const codec_row_part *part = part_at(parts, v->row_parts.count, &codec_row_part::first_sum, i);
		uint64_t from = (i - part->first_sum) * WIRE_TREE, n = part->count - from;
		codec_row_sums some = sums_of<false>(v, source, part->start + from,
						     n < WIRE_TREE ? (uint32_t)n : WIRE_TREE, NULL, lane);

		if (lane == 0)
			sums[i] = some;
	}
}

/*
 * Sums of consecutive pieces (of WIRE_TREE values), added in a binary tree by one warp. Lane l stores the sum of 2^l
 * groups of 32 pieces, see scale_push.
 */
struct warp_tree {
	/* low: lane l stores the sum of 2^l pieces of the last group, if that group has fewer than 32 pieces */
	double level[2], low[2];
	uint32_t most, below; /* largest magnitude, and number of negative values, of this lane's pieces */
};

/*
 * Add the sums of group number `group`, of n <= 32 pieces, to a tree, one piece per lane. All earlier groups have 32
 * pieces.
 */
DEVICE void push_group(warp_tree *tree, codec_row_sums piece, uint32_t group, uint32_t n, uint32_t lane)
{
	tree->most = piece.max > tree->most ? piece.max : tree->most;
	tree->below += piece.negative;
	for (int k = 0; k < 2; k++) {
		double x = piece.sum[k];
		uint32_t l = 0;

		for (; l < 5; l++) {
			double last = __shfl_sync(FULL, x, (int)(n >> (l + 1) << (l + 1) & 31));

			tree->low[k] = n >> l & 1 && l == lane ? last : tree->low[k];
			x = round_add64(x, __shfl_down_sync(FULL, x, 1u << l));
		}
		x = __shfl_sync(FULL, x, 0);
		for (l = 0; group >> l & 1; l++)
			x = round_add64(__shfl_sync(FULL, tree->level[k], (int)l), x);
		tree->level[k] = n == 32 && l == lane ? x : tree->level[k];
	}
}

/*
 * Add up the sums of a part's pieces in the order of scale_push and scale_total. Set *max to the largest magnitude
 * (bits of float32), and *negative to the number of negative values. All warps add up the same number of groups of 32
 * pieces.
 */
DEVICE_CALL void add_pieces(const codec_row_sums *sums, uint64_t count, rows_room *room, double total[2], uint32_t *max,
			    uint64_t *negative)
{
	const uint32_t AT_ONCE = 4; /* number of groups of pieces whose loads are in flight together */
	const uint32_t t = threadIdx.x, lane = t % 32, warp = t / 32;
	warp_tree tree = {};
	uint32_t log2 = 5;

	while ((uint64_t)CTA_WARPS << log2 < count)
		log2++;
	const uint64_t from = (uint64_t)warp << log2, each = 1ull << log2, full = count >> log2;
	uint64_t mine = from < count ? count - from : 0;

	mine = mine < each ? mine : each;
	for (uint64_t i = 0; i < mine; i += 32 * AT_ONCE) {
		codec_row_sums piece[AT_ONCE];

		for (uint32_t g = 0; g < AT_ONCE; g++)
			piece[g] = i + 32 * g + lane < mine ? sums[from + i + 32 * g + lane]
							    : codec_row_sums{{0, 0}, 0, 0};
		for (uint32_t g = 0; g < AT_ONCE && i + 32 * g < mine; g++)
			push_group(&tree, piece[g], (uint32_t)(i / 32) + g,
				   mine - i - 32 * g < 32 ? (uint32_t)(mine - i - 32 * g) : 32, lane);
	}
	*negative = cta_sum(tree.below);
	*max = cta_max(tree.most);
	for (int k = 0; k < 2; k++) {
		if (mine == each && lane == log2 - 5)
			room->tree.node[k][warp] = tree.level[k];
		if (mine && mine < each) {
			if (lane < 5)
				room->tree.level[k][lane] = tree.low[k];
			if (lane < log2 - 5)
				room->tree.level[k][lane + 5] = tree.level[k];
		}
	}
	for (uint64_t n = full, l = log2; n; n /= 2, l++) { /* add neighbours, then neighbouring pairs, and so on */
		double x[2] = {0, 0};

		__syncthreads();
		for (int k = 0; k < 2; k++) {
			if (n % 2 && t == 0)
				room->tree.level[k][l] = room->tree.node[k][n - 1];
			if (t < n / 2)
				x[k] = round_add64(room->tree.node[k][2 * t], room->tree.node[k][2 * t + 1]);
		}
		__syncthreads();
		for (int k = 0; k < 2; k++)
			if (t < n / 2)
				room->tree.node[k][t] = x[k];
	}
	__syncthreads();
	for (int k = 0; k < 2; k++)
		total[k] = scale_total(room->tree.level[k], count);
}

/*
 * Compute the scales of a part, if parts of this codec have scales. Return CODEC_NONFINITE if the part has NaN or Inf,
 * CODEC_BAD_SCALE if the caller's scale is too small for the part's values.
 */
DEVICE_CALL codec_status scale_part(const codec_view *v, const uint8_t *memory, codec_row_part *part, rows_room *room)
{
	const struct row_kind q = kind_of(v);
	const codec_row_sums *sums = (const codec_row_sums *)(memory + v->row_sums.at) + part->first_sum;
	bool scanned = v->row_sums.count > 0;
	uint64_t negative;
	double total[2];
	uint32_t max;

	add_pieces(sums, scanned ? (part->count + WIRE_TREE - 1) / WIRE_TREE : 0, room, total, &max, &negative);
	if (max >= ROUND_INF && !(v->options & CODEC_OPTION_PROPAGATE))
		return CODEC_NONFINITE;
	if (!row_part_scaled(q, part->group_size) || threadIdx.x)
		return CODEC_OK;
	if (q.codec == CODEC_SIGN)
		scale_sign(q, total, negative, part->count, part->scale);
	else if (q.codec == CODEC_TERNARY)
		part->scale[0] = scale_ternary(q, max, v->scale, v->clip, total, part->count);
	else
		part->scale[0] = scale_nvfp4(max);
	return q.codec == CODEC_TERNARY && scanned && scale_exceeded(max, v->scale, v->clip) ? CODEC_BAD_SCALE
											     : CODEC_OK;
}

/*
 * Add the counts of the code bytes of block b to c->counts. scratch: memory for the codes, then for the block's scales.
 */
DEVICE_CALL codec_status count_codes(const codec_view *v, const uint8_t *memory, const codec_source *source, uint64_t b,
				     uint8_t *scratch, codec_choice *c, rows_room *room)
{
	const struct row_kind q = kind_of(v);
	const job j = {*v, memory, NULL};
	const row_place p = row_place_of(&j, q, b);
	uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, ncodes = (uint32_t)row_codes_nbytes(q, p.m);
	uint8_t *scales = scratch + PLANE_ROOM;
	codec_status status = put_scales<CODEC_FLOAT8>(v, q, p, source, scales, 0, warp, CTA_WARPS, lane);

	room->codes.counts[threadIdx.x] = 0;
	__syncthreads();
	if (status == CODEC_OK && q.codec == CODEC_TERNARY)
		status = check_above(v, p.part,
				     put_codes<CODEC_TERNARY>(row_job_of<CODEC_TERNARY>(v, p, source), scales, NULL,
							      scratch, ncodes, 0, warp, CTA_WARPS, lane));
	else if (status == CODEC_OK)
		put_codes<CODEC_FLOAT8>(row_job_of<CODEC_FLOAT8>(v, p, source), scales, NULL, scratch, ncodes, 0, warp,
					CTA_WARPS, lane);
	__syncthreads();
	for (uint32_t i = threadIdx.x; i < ncodes; i += CTA_THREADS)
		atomicAdd(room->codes.counts + scratch[i], 1u);
	__syncthreads();
	atomicAdd(c->counts[0] + threadIdx.x, room->codes.counts[threadIdx.x]);
	return status;
}

/*
 * Called after all scales are computed and all codes are counted: make the codebook, and complete the job as
 * codec_encode_start does.
 */
DEVICE_CALL void conclude_rows(codec_view *v, uint8_t *memory, codec_choice *c, rows_room *room, codec_written *out)
{
	const struct row_kind q = kind_of(v);
	const volatile codec_choice *seen = c;
	uint64_t nparts = v->row_parts.count, records = v->flags & WIRE_FLAG_SEGMENTS ? nparts : 0;

	if (q.entropy) {
		uint8_t *lengths = room->codes.lengths;

		room->codes.counts[threadIdx.x] = seen->counts[0][threadIdx.x];
		__syncthreads();
		cta_book(room->codes.counts, WIRE_MAX_CODE_LENGTH, lengths, &room->codes.book);
		for (uint32_t k = threadIdx.x; k < LEAVES; k += CTA_THREADS)
			memory[v->lengths.at + k] = lengths[k];
		cta_codes(lengths, memory + v->tables.at, &room->codes.book);
		__syncthreads();
	}
	write_lead(v, memory, q.entropy, 0, records, c);
	if (threadIdx.x)
		return;
	v->coded = q.entropy;
	place_sections(v, c->lead_nbytes + WIRE_SEGMENT_NBYTES * records +
				  (row_part_scaled(q, row_parts(v, memory)->group_size) ? 8 * nparts : 0));
	uint32_t fault = ((volatile codec_written *)out)->fault;

	/*
	 * CODEC_BAD_SCALE from the sample is not final: a block may find NaN or Inf, which is reported instead.
	 */
	if (fault && (fault != CODEC_BAD_SCALE || v->row_sums.count))
		v->nblocks = 0;
}

/*
 * Kernel: complete the planned jobs (codec_encode_plan) of row codecs, for encode_rows. Grid: (CTAs, frames). On an
 * error, set v->nblocks to 0 and out->fault to the status. A CTA that counts codes acquires a unit of scratch memory.
 */
extern "C" __global__ void __launch_bounds__(CTA_THREADS, 2) choose_rows(const codec_encoding *encodings)
{
	__shared__ rows_room room;
	__shared__ taken_units unit;
	const codec_encoding &e = encodings[blockIdx.y];
	const codec_source source = {e.source.values, e.source.sums, NULL}; /* encode_rows writes residuals */
	codec_view *v = e.view;
	uint8_t *memory = e.memory;
	codec_choice *c = e.found;
	codec_written *out = e.out;
	const bool last_scaled = scaled_last(v, &e.source);
	const uint32_t scans = last_scaled ? 0 : (uint32_t)((v->row_sums.count + SCANNED - 1) / SCANNED);
	const uint32_t nparts = (uint32_t)v->row_parts.count;
	const uint32_t take = kind_of(v).entropy ? (uint32_t)choose_code_blocks(v->nblocks) : 0;
	const uint64_t nblocks = v->nblocks;

	if (blockIdx.x >= e.warps)
		return;
	for (uint32_t t; (t = cta_next_task(&c->ticket)) < scans + nparts + take;) {
		codec_status status = CODEC_OK;
		bool last;

		if (t < scans) {
			scan_pieces(v, memory, &source, (uint64_t)t * SCANNED);
			if (cta_is_last(c->done, scans))
				cta_signal(c->ready);
			continue;
		}
		if (t < scans + nparts) {
			if (scans)
				cta_wait(c->ready);
			if (!last_scaled)
				status = scale_part(v, memory, row_parts(v, memory) + (t - scans), &room);
			if (status != CODEC_OK && threadIdx.x == 0)
				set_fault(out, status);
			last = cta_is_last(c->done + PARTS, nparts);
			if (last && take)
				cta_signal(c->ready + PARTS);
			else if (last)
				conclude_rows(v, memory, c, &room, out);
			continue;
		}
		cta_wait(c->ready + PARTS);
		if (threadIdx.x < 32)
			unit = take_units(e.scratch, e.scratch.each, threadIdx.x);
		__syncthreads();
		status = count_codes(v, memory, &source, choose_even(t - scans - nparts, take, nblocks), unit.memory, c,
				     &room);
		if (threadIdx.x < 32) /* count_codes ends with a barrier, so no thread uses the unit any more */
			give_units(e.scratch, unit, threadIdx.x);
		if (status != CODEC_OK)
			set_fault(out, status);
		if (cta_is_last(c->done + SYMBOLS, take))
			conclude_rows(v, memory, c, &room, out);
	}
}

/*
 * Kernel: compute the scales of parts from the sums that encode_rows has written (scaled_last). Grid: (CTAs, frames).
 */
extern "C" __global__ void __launch_bounds__(CTA_THREADS, 2) scale_rows(const codec_encoding *encodings)
{
	__shared__ rows_room room;
	const codec_encoding &e = encodings[blockIdx.y];
	codec_row_part *parts = row_parts(e.view, e.memory);

	for (uint64_t i = blockIdx.x; i < e.view->row_parts.count; i += gridDim.x) {
		scale_part(e.view, e.memory, parts + i, &room);
		__syncthreads();
	}
}
