/*
 * topk/small.cuh - encode a block of TopK whose chunks have 64 to 256 values. Each warp encodes one chunk; the warps of
 * a CTA encode adjacent chunks. docs/spec/encoder.md, section 11.
 *
 * Lane l holds values l, l + 32, l + 64, ... of a chunk, so that the bits of a ballot are in order of position. The bit
 * position of a code is a prefix sum over the lanes and over the preceding warps.
 */
#ifndef CODEC_CUDA_TOPK_SMALL_CUH
#define CODEC_CUDA_TOPK_SMALL_CUH

#include "topk/encode.cuh"

/* Chunk of up to 32 * N values. x: the lane's N values as bits of float32; 0 beyond the chunk's last value. */
template <int N> struct small_chunk {
	uint64_t first; /* index of the chunk's first value */
	uint32_t n, kept;
	uint32_t x[N];
	uint32_t mask[N]; /* bit l of mask[i]: value x[i] of lane l is kept; equal in all lanes */
};

/* Return the number of values of a chunk whose magnitude, as a bit pattern, is at least `low`. */
template <int N> DEVICE uint32_t count_keys(const small_chunk<N> &c, uint32_t low)
{
	uint32_t count = 0;

	for (uint32_t k = 0; k < N; k++)
		count += (uint32_t)__popc(__ballot_sync(FULL, (c.x[k] & ROUND_ABS) >= low));
	return count;
}

/* Return the c.kept-th largest magnitude of a chunk, as a bit pattern. most: the largest magnitude. */
template <int N> DEVICE uint32_t least_kept(const small_chunk<N> &c, uint32_t most)
{
	uint32_t low = 0, count = 32 * N;

	if (c.kept == 1 || !most)
		return most;
	/*
	 * search bit by bit for the largest number that at least c.kept magnitudes reach; stop early if exactly c.kept
	 * magnitudes reach it
	 */
	for (uint32_t bit = 1u << (31 - __clz((int)most)); bit && count != c.kept; bit >>= 1) {
		const uint32_t reached = (low | bit) <= most ? count_keys(c, low | bit) : 0;

		if (reached >= c.kept) {
			low |= bit;
			count = reached;
		}
	}
	uint32_t least = ~0u;

	for (uint32_t k = 0; k < N; k++) {
		const uint32_t key = c.x[k] & ROUND_ABS;

		least = key >= low && key < least ? key : least;
	}
	return ~warp_max(~least);
}

/* Choose the values that are kept. Of several values with the magnitude `least`, the first ones are kept. */
template <int N> DEVICE void choose_kept(small_chunk<N> *c, uint32_t least, uint32_t lane)
{
	uint32_t ties = c->kept - count_keys(*c, least + 1);

	for (uint32_t k = 0; k < N; k++) {
		const uint32_t key = c->x[k] & ROUND_ABS, tied = __ballot_sync(FULL, key == least),
			       rank = (uint32_t)__popc(tied & ((1u << lane) - 1)), used = (uint32_t)__popc(tied);

		c->mask[k] = __ballot_sync(FULL, key > least || (key == least && rank < ties));
		ties -= used < ties ? used : ties;
	}
}

/*
 * Return the mean magnitude of a chunk's kept values, as bits of bfloat16. Magnitudes are added in order of position.
 */
template <int N> DEVICE uint32_t mean_of_kept(const small_chunk<N> &c)
{
	double sum = 0;

	for (uint32_t k = 0; k < N; k++)
		for (uint32_t kept = c.mask[k]; kept; kept &= kept - 1) {
			const uint32_t key = __shfl_sync(FULL, c.x[k], __ffs((int)kept) - 1) & ROUND_ABS;

			sum = round_add64(sum, (double)round_float(key));
		}
	return round_to_bfloat16(round_bits(round_to_float(round_div64(sum, (double)c.kept))));
}

/* Write the scales of chunk number `number`, and return its lowest and highest level. */
template <int N>
DEVICE topk_range put_small_scales(const topk_kind &q, const small_chunk<N> &c, uint32_t least, uint32_t most,
				   uint32_t number, uint8_t *region, uint32_t lane)
{
	uint32_t low = round_to_bfloat16(least), high = round_to_bfloat16(most);

	if (q.bits == 1)
		low = high = mean_of_kept(c);
	if (lane == 0)
		or_bits(region, (q.bits == 1 ? 16 : 32) * number, q.bits == 1 ? low : low | high << 16);
	return range_of(low, high);
}

/* List the positions of the kept values, in order. If there is a residual, copy all values of the chunk to it. */
template <int N> DEVICE void list_kept(const small_chunk<N> &c, uint32_t *list, float *residual, uint32_t lane)
{
	uint32_t listed = 0;

	for (uint32_t k = 0; k < N; k++) {
		const uint32_t at = 32 * k + lane;

		if (c.mask[k] >> lane & 1)
			list[listed + (uint32_t)__popc(c.mask[k] & ((1u << lane) - 1))] = at;
		if (residual && at < c.n)
			residual[c.first + at] = round_float(c.x[k]);
		listed += (uint32_t)__popc(c.mask[k]);
	}
	__syncwarp();
}

/* Return the gap before entry j of a list of positions. */
DEVICE uint32_t gap_before(const uint32_t *list, uint32_t j)
{
	return list[j] - (j ? list[j - 1] + 1 : 0);
}

/* Return the total size in bits of the codes of a list of `kept` values. */
DEVICE uint32_t nbits_of_list(const topk_kind &q, const uint32_t *list, uint32_t kept, uint32_t lane)
{
	uint32_t nbits = 0;

	for (uint32_t j = lane; j < kept; j += 32)
		nbits += rice_nbits(gap_before(list, j), q.rice_k, WIRE_RICE_GAP_BITS) + q.bits;
	return warp_sum(nbits);
}

/*
 * Write the codes of a list of `kept` values to the stream from bit `bit` on, and the residuals of these values. first:
 * index in the tensor of the chunk's first value.
 */
DEVICE_CALL void put_small_list(const topk_kind &q, const codec_source *source, const uint32_t *list, uint32_t kept,
				uint64_t first, topk_range range, const philox *key_of, uint8_t *region, uint32_t bit,
				uint32_t lane)
{
	for (uint32_t from = 0, all; from < kept; from += 32, bit += all) {
		const uint32_t j = from + lane;
		uint32_t gap = 0, nbits = 0;

		if (j < kept) {
			gap = gap_before(list, j);
			nbits = rice_nbits(gap, q.rice_k, WIRE_RICE_GAP_BITS) + q.bits;
		}
		const uint32_t at = bit + warp_scan(nbits, lane, &all);

		if (j >= kept)
			continue;
		const uint64_t i = first + list[j];
		const uint32_t x = round_bits(value_at(q.dtype, source, i)), code = code_of(q, range, key_of, i, x);

		or_bits(region, put_rice(region, at, gap, q.rice_k, WIRE_RICE_GAP_BITS), code);
		if (source->residual)
			source->residual[i] = round_sub(
				round_float(x), topk_value(code, range.low, range.high, topk_steps(q.bits), q.dtype));
	}
}

/*
 * Choose the values of a chunk that are kept, list their positions, and write the chunk's scales. Return the chunk's
 * lowest and highest level.
 */
template <int N>
DEVICE topk_range list_chunk(const topk_kind &q, const codec_source *source, small_chunk<N> *c, uint32_t *most,
			     uint32_t number, uint32_t *list, uint8_t *region, uint32_t lane)
{
	float x[N];

	if (c->n == 32 * N)
		values_each_32<N>(q.dtype, source, c->first + lane, x);
	else
		for (uint32_t k = 0; k < N; k++)
			x[k] = 32 * k + lane < c->n ? value_at(q.dtype, source, c->first + 32 * k + lane) : 0;
	for (uint32_t k = 0; k < N; k++) {
		c->x[k] = round_bits(x[k]);
		*most = (c->x[k] & ROUND_ABS) > *most ? c->x[k] & ROUND_ABS : *most;
	}
	*most = warp_max(*most);
	if (!c->n || *most >= ROUND_INF)
		return {0, 0};
	const uint32_t least = least_kept(*c, *most);

	choose_kept(c, least, lane);
	list_kept(*c, list, source->residual, lane);
	return put_small_scales(q, *c, least, *most, number, region, lane);
}

/* Encode a block whose chunks have 32 * N values, as write_topk does. */
template <int N>
DEVICE codec_status write_small(const codec_encoding &e, const codec_view &v, uint64_t b, uint8_t *region,
				topk_room *room, uint32_t *size)
{
	const topk_kind q = kind_of_topk(v);
	const philox key = {v.seed, (uint32_t)v.stream, (uint32_t)(v.stream >> 32)};
	const philox *key_of = v.options & CODEC_OPTION_STOCHASTIC ? &key : NULL;
	const uint32_t m = (uint32_t)block_values(&v, b), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
	uint32_t bit = 8 * (uint32_t)topk_scales_nbytes(&q, m); /* bit position of the stream's end */
	/* list: up to half of a chunk may be kept; turn: index into room->sizes */
	uint32_t *list = room->list + 16 * N * warp, turn = 0;

	for (uint32_t from = 0; from < m; from += CTA_WARPS * 32 * N, turn ^= 1) {
		const uint32_t begin = from + 32 * N * warp, left = begin < m ? m - begin : 0,
			       n = left < 32 * N ? left : 32 * N, number = begin / (32 * N);
		small_chunk<N> c = {b * v.block_nvalues + begin, n, topk_kept(&q, n), {0}, {0}};
		uint32_t most = 0;
		const topk_range range = list_chunk(q, &e.source, &c, &most, number, list, region, lane);
		const uint32_t kept = range.high > 0 ? c.kept : 0, nbits = nbits_of_list(q, list, kept, lane);

		if (lane == 0)
			room->sizes[turn][warp] = most < ROUND_INF ? nbits : ~0u;
		__syncthreads(); /* after this barrier, the sizes of the previous turn may also be overwritten */
		const uint32_t own = room->sizes[turn][lane % CTA_WARPS];

		if (__any_sync(FULL, own == ~0u))
			return CODEC_NONFINITE;
		put_small_list(q, &e.source, list, kept, c.first, range, key_of, region,
			       bit + warp_sum(lane < warp ? own : 0), lane);
		bit += warp_sum(lane < CTA_WARPS ? own : 0);
		__syncwarp(); /* all lanes have read the list */
	}
	*size = (bit + 8 * WIRE_ALIGN - 1) / (8 * WIRE_ALIGN) * WIRE_ALIGN;
	return CODEC_OK;
}

/* Encode block b as write_topk does, with one chunk per warp if chunks are small, else one chunk per CTA. */
DEVICE codec_status write_chunks(const codec_encoding &e, const codec_view &v, uint64_t b, uint8_t *region,
				 topk_room *room, uint32_t *guess, uint32_t *size)
{
	switch (kind_of_topk(v).chunk_log2) {
	case 6: return write_small<2>(e, v, b, region, room, size);
	case 7: return write_small<4>(e, v, b, region, room, size);
	case 8: return write_small<8>(e, v, b, region, room, size);
	default: return write_topk(e, v, b, region, room, guess, size);
	}
}

#endif
