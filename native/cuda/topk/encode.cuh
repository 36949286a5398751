/*
 * topk/encode.cuh - encode a block of TopK with one CTA, one chunk after the other. docs/spec/encoder.md, section 11.
 *
 * Prefix sums over threads give the index of each kept value. Kept values are listed in shared memory (position and
 * code), so that in the next step each thread encodes one kept value, and prefix sums of code sizes give the bit
 * position of its code. A region is built in scratch memory, and is copied to the frame once its size and therefore its
 * offset are known.
 */
#ifndef CODEC_CUDA_TOPK_ENCODE_CUH
#define CODEC_CUDA_TOPK_ENCODE_CUH

#include "common/bit_stream.cuh"
#include "frame/encode.cuh"
#include "topk/select.cuh"

#define LISTED TILE_VALUES /* maximum number of entries of a list of kept values */
/* an entry has the position in the chunk in the lower bits, and the code from this bit on */
#define CODE_AT 16

/* Shared memory of a CTA that encodes blocks of TopK. */
struct topk_room {
	uint32_t counts[DIGITS], list[LISTED];
	topk_candidates candidates;
	uint32_t scale;
	uint32_t sizes[2][CTA_WARPS]; /* small chunks: size in bits of the codes of each warp's chunk */
};

/* State of writing a region, whose memory was zeroed before. It is equal in all threads. */
struct topk_writer {
	uint8_t *region;
	uint32_t bit;  /* bit position of the stream's end */
	uint32_t next; /* position after the last kept value of the chunk */
};

/*
 * Return the mean magnitude of a chunk's kept values, as bits of bfloat16. Magnitudes are added in order of position.
 * Called by a warp.
 */
DEVICE_CALL uint32_t mean_scale(const topk_chunk &c, const topk_least &least, uint32_t lane)
{
	uint32_t ties = least.ties;
	double sum = 0;

	for (uint32_t from = 0; from < c.n; from += 32) {
		const float x = from + lane < c.n ? value_at(c.dtype, c.source, c.first + place_of(c, from + lane)) : 0;
		const uint32_t key = round_bits(x) & ROUND_ABS, tied = __ballot_sync(FULL, key == least.key);
		const uint32_t rank = (uint32_t)__popc(tied & ((1u << lane) - 1));
		const bool keep = from + lane < c.n && (key > least.key || (key == least.key && rank < ties));

		for (uint32_t kept = __ballot_sync(FULL, keep); kept; kept &= kept - 1)
			sum = round_add64(sum, (double)round_float(__shfl_sync(FULL, key, __ffs((int)kept) - 1)));
		const uint32_t used = (uint32_t)__popc(tied);

		ties -= used < ties ? used : ties;
	}
	return round_to_bfloat16(round_bits(round_to_float(round_div64(sum, (double)c.kept))));
}

/* Write the scales of chunk k, and return the chunk's lowest and highest level. */
DEVICE topk_range put_scales(const topk_kind &q, const topk_chunk &c, const topk_least &least, uint32_t k,
			     const topk_writer &w, topk_room *room)
{
	uint32_t low = round_to_bfloat16(least.key), high = round_to_bfloat16(least.most);

	if (q.bits == 1) {
		if (threadIdx.x < 32)
			room->scale = mean_scale(c, least, threadIdx.x);
		__syncthreads();
		low = high = room->scale;
		if (threadIdx.x == 0)
			or_bits(w.region, 16 * k, low);
	} else if (threadIdx.x == 0) {
		or_bits(w.region, 32ull * k, low | high << 16);
	}
	return range_of(low, high);
}

/* Append the gaps and codes of a list of kept values to the stream. */
DEVICE_CALL void put_list(const topk_kind &q, const uint32_t *list, uint32_t count, topk_writer *w)
{
	const uint32_t position = (1u << CODE_AT) - 1;

	__syncthreads(); /* the list is complete */
	for (uint32_t from = 0; from < count; from += CTA_THREADS) {
		const uint32_t j = from + threadIdx.x;
		uint32_t gap = 0, nbits = 0;
		uint64_t all;

		if (j < count) {
			gap = (list[j] & position) - (j ? (list[j - 1] & position) + 1 : w->next);
			nbits = rice_nbits(gap, q.rice_k, WIRE_RICE_GAP_BITS) + q.bits;
		}
		uint32_t bit = w->bit + (uint32_t)cta_scan(nbits, &all);

		w->bit += (uint32_t)all;
		if (j < count) {
			bit = put_rice(w->region, bit, gap, q.rice_k, WIRE_RICE_GAP_BITS);
			or_bits(w->region, bit, list[j] >> CODE_AT);
		}
	}
	w->next = count ? (list[count - 1] & position) + 1 : w->next;
	__syncthreads(); /* all threads have read the list */
}

/*
 * Return the code of a kept value. x: the value, as bits of float32. key_of: key of the random bits; NULL: round
 * deterministically. index: index of the value in the tensor.
 */
DEVICE uint32_t code_of(const topk_kind &q, const topk_range &range, const philox *key_of, uint64_t index, uint32_t x)
{
	const uint32_t h = key_of ? philox_half(*key_of, index, 0) : 0x8000;

	return x >> 31 | topk_level(round_float(x & ROUND_ABS), range.low, range.high, topk_steps(q.bits), h) << 1;
}

/* Write the codes of a chunk and, if there is a residual, the residuals of the values or candidates in `c`. */
DEVICE void put_kept(const topk_kind &q, const topk_chunk &c, const topk_least &least, const topk_range &range,
		     const philox *key_of, uint32_t *list, topk_writer *w)
{
	float *residual = c.source->residual;
	const bool coded = range.high > 0;
	uint32_t ties = least.ties, listed = 0;

	w->next = 0;
	for (uint32_t from = 0; from < c.n; from += TILE_VALUES) {
		uint32_t x[4], above = 0, tied = 0;
		const uint32_t i = from + 4 * threadIdx.x, there = load_four(c, i, x);
		uint64_t all;

		for (uint32_t k = 0; k < there; k++) {
			above += (x[k] & ROUND_ABS) > least.key;
			tied += (x[k] & ROUND_ABS) == least.key;
		}
		const uint32_t before = (uint32_t)cta_scan(above | tied << 16, &all), all_tied = (uint32_t)all >> 16;
		const uint32_t kept = ((uint32_t)all & 0xffff) + (all_tied < ties ? all_tied : ties);
		uint32_t tie = before >> 16, rank = (before & 0xffff) + (tie < ties ? tie : ties);

		if (coded && listed + kept > LISTED) {
			put_list(q, list, listed, w);
			listed = 0;
		}
		for (uint32_t k = 0; k < there; k++) {
			const uint32_t key = x[k] & ROUND_ABS, at = place_of(c, i + k);
			float left = round_float(x[k]);

			if (coded && (key > least.key || (key == least.key && tie < ties))) {
				const uint32_t code = code_of(q, range, key_of, c.first + at, x[k]);

				list[listed + rank++] = at | code << CODE_AT;
				left = round_sub(left,
						 topk_value(code, range.low, range.high, topk_steps(q.bits), q.dtype));
			}
			tie += key == least.key;
			if (residual)
				residual[c.first + at] = left;
		}
		ties -= all_tied < ties ? all_tied : ties;
		listed += kept;
	}
	if (coded)
		put_list(q, list, listed, w);
}

/* Zero the memory for the largest region that block b can have. */
DEVICE void clear_region(const codec_view &v, uint64_t b, uint8_t *region)
{
	const topk_kind q = kind_of_topk(v);
	const uint32_t most = (uint32_t)topk_region_nbytes(&q, block_values(&v, b));

	for (uint32_t i = threadIdx.x; i < most / 4; i += CTA_THREADS)
		((uint32_t *)region)[i] = 0;
	__syncthreads();
}

/*
 * Encode block b to `region`, zeroed scratch memory, and set *size to the region's size in bytes. *guess: threshold of
 * candidates, updated for the next call. Return CODEC_NONFINITE if the block has NaN or Inf.
 */
DEVICE codec_status write_topk(const codec_encoding &e, const codec_view &v, uint64_t b, uint8_t *region,
			       topk_room *room, uint32_t *guess, uint32_t *size)
{
	const topk_kind q = kind_of_topk(v);
	const philox key = {v.seed, (uint32_t)v.stream, (uint32_t)(v.stream >> 32)};
	const uint32_t m = (uint32_t)block_values(&v, b), chunk = 1u << q.chunk_log2;
	topk_writer w = {region, 8 * (uint32_t)topk_scales_nbytes(&q, m), 0};

	for (uint32_t k = 0; k << q.chunk_log2 < m; k++) {
		const uint32_t from = k << q.chunk_log2, n = m - from < chunk ? m - from : chunk;
		const topk_chunk whole = {&e.source,        NULL,    b * v.block_nvalues + from,  n,
					  topk_kept(&q, n), v.dtype, in_quads(v.dtype, &e.source)};
		const topk_chunk c = narrow(whole, *guess, &room->candidates, room->counts);
		const topk_least least = find_least(c, room->counts);

		*guess = least.key > GUESS_SLACK ? least.key - GUESS_SLACK : 0;
		if (least.most >= ROUND_INF)
			return CODEC_NONFINITE;
		const topk_range range = put_scales(q, c, least, k, w, room);

		if (range.high > 0 || e.source.residual)
			put_kept(q, c, least, range, v.options & CODEC_OPTION_STOCHASTIC ? &key : NULL, room->list, &w);
	}
	*size = (w.bit + 8 * WIRE_ALIGN - 1) / (8 * WIRE_ALIGN) * WIRE_ALIGN;
	return CODEC_OK;
}

#endif
