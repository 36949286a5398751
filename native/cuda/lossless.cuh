/* lossless.cuh - regions to values: a warp does a block. docs/format.md, sections 3 and 6. */
#ifndef CODEC_LOSSLESS_CUH
#define CODEC_LOSSLESS_CUH

#include "model.cuh"
#include "planes.cuh"
#include "seal.cuh"
#include "sink.cuh"

/* Value i of four from the words of their planes, which are the bytes from the top; the offset is in patterns. */
template <int SIZE> DEVICE uint64_t merge_value(const uint32_t *plane, uint32_t i, bool is_float, uint16_t offset)
{
	uint64_t x = 0;

	for (int p = 0; p < SIZE; p++)
		x = x << 8 | (plane[p] >> 8 * i & 255);
	if (SIZE > 1 && is_float) {
		const int low = SIZE > 1 ? 8 * SIZE - 16 : 0;
		uint16_t top = bits_unturn((uint16_t)(x >> low), offset, SHIFT_OF(SIZE));

		x = (x & ((1ull << low) - 1)) | (uint64_t)top << low;
	}
	return x;
}

/* A region's head: modes of its planes, and whether values were taken out. */
DEVICE codec_status check_head(const codec_view *v, uint32_t head, int size)
{
	if (head & ~(WIRE_REGION_PRUNED | ((1u << 2 * size) - 1)))
		return CODEC_BAD_REGION;
	for (int p = 0; p < size; p++) {
		uint32_t mode = head >> 2 * p & 3;

		if (v->fixed >> p & 1 ? mode != 0 : mode == WIRE_MODE_CODED && !(v->coded >> p & 1))
			return CODEC_BAD_REGION;
	}
	return head & WIRE_REGION_PRUNED && (!octave_of(v->dtype) || (head & 3) != WIRE_MODE_CODED) ? CODEC_BAD_REGION
												    : CODEC_OK;
}

/*
 * Bytes of values whose plane 0 is not 0, in order, to their places; elsewhere 0 (plane NULL: only count). Returns how
 * many these are.
 */
static __device__ uint32_t spread(const uint32_t *top, uint32_t m, const uint8_t *kept, uint32_t *plane, uint32_t lane)
{
	uint32_t seen = 0, total;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		uint32_t lives = ~equal_bytes(top[32 * r + lane], 0) & 15, quad = 0;
		uint32_t at = seen + warp_scan(__popc(lives), lane, &total);

		seen += total;
		for (uint32_t i = 0; plane && i < 4; i++)
			if (lives >> i & 1)
				quad |= (uint32_t)kept[at++] << 8 * i;
		if (plane)
			plane[32 * r + lane] = quad;
	}
	__syncwarp();
	return seen;
}

/* Is a fixed plane 0 where plane 0 is? */
static __device__ bool zero_under(const uint32_t *top, uint32_t m, const uint8_t *fixed, uint32_t lane)
{
	bool bad = false;

	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		uint32_t n = there(r, lane, m), word = load_bytes(fixed + WIRE_ROW * r + 4 * lane, n);

		bad |= (equal_bytes(top[32 * r + lane], 0) & ~equal_bytes(word, 0) & ((1u << n) - 1)) != 0;
	}
	return !__any_sync(FULL, bad);
}

/*
 * A region's values. `scratch`: memory for a plane more than values have. With `checks` the fixed planes' digests
 * are added to *sealed on the way.
 */
template <int SIZE>
static __device__ codec_status read_block(const job *j, uint64_t b, cursor c, const uint32_t *pair, uint32_t paired,
					  uint8_t *scratch, const codec_sink *sink, bool checks, uint64_t *sealed,
					  uint32_t lane)
{
	const codec_view &v = j->v;
	uint64_t first = b * v.block_nvalues, section = v.planes_offset + first;
	uint32_t m = (uint32_t)block_values(&v, b), k = m, head = load32(here(&c)),
		 rows = (m + WIRE_ROW - 1) / WIRE_ROW;
	uint8_t *some = scratch + SIZE * PLANE_ROOM; /* of values that were not taken out */
	codec_status status = check_head(&v, head, SIZE);
	/* nothing but plane 0 to be read from the region, row by row */
	bool alone =
		(v.fixed | 1) == (1u << SIZE) - 1 && !(v.fixed & 1) && !(v.halved & 1) && !(head & WIRE_REGION_PRUNED);
	int octave = octave_of(v.dtype);
	const uint8_t *fixed[SIZE];
	digest sums[SIZE];
	plane top;
	place o = {};

	if (status != CODEC_OK)
		return status;
	c.at += 4;
	for (int p = 0; p < SIZE; p++) {
		sums[p] = {0, 0};
		fixed[p] = NULL;
		if (v.fixed >> p & 1) {
			fixed[p] = c.frame + section;
			section += v.plane_stride;
		}
	}
	if (alone)
		status = plane_open(&top, j, 0, head & 3, paired == 0 ? pair : NULL, m, &c, lane);
	for (uint32_t p = 0; p < SIZE && !alone && status == CODEC_OK; p++) {
		uint32_t *to = (uint32_t *)(scratch + p * PLANE_ROOM);
		bool pruned = head & WIRE_REGION_PRUNED;

		if (v.fixed >> p & 1)
			continue;
		status = read_plane(j, p, head >> 2 * p & 3, p == paired ? pair : NULL, k,
				    p && pruned ? (uint32_t *)some : to, &c, lane);
		if (status != CODEC_OK || !pruned)
			continue;
		if (p) {
			spread((uint32_t *)scratch, m, some, to, lane);
			continue;
		}
		k = spread(to, m, NULL, NULL, lane);
		for (int f = 1; f < SIZE; f++)
			if (fixed[f] && !zero_under(to, m, fixed[f], lane))
				status = CODEC_BAD_REGION;
		if (!k)
			status = CODEC_BAD_REGION;
	}
	if (status != CODEC_OK)
		return status;
	if (v.model_parts.count)
		o = place_at(j, first + (4 * lane < m ? 4 * lane : 0));
	for (uint32_t r = 0; r < rows; r++) {
		uint32_t n = there(r, lane, m), word[SIZE];

		for (int p = 0; p < SIZE; p++) {
			if (fixed[p]) {
				word[p] = load_bytes(fixed[p] + WIRE_ROW * r + 4 * lane, n);
				if (checks)
					digest_row(&sums[p], word[p], r, r + 1 == rows, WIRE_SEED_PLANE + p, lane);
			} else if (p || !alone) {
				word[p] = ((uint32_t *)(scratch + p * PLANE_ROOM))[32 * r + lane];
			}
		}
		if (alone)
			word[0] = plane_row(&top, r, &c, lane);
		if (!sink->data)
			continue;
		uint16_t offset[4] = {0};

		if (v.model_parts.count && n)
			quad_offsets(j, &o, n, octave / 8, WIRE_CIRCLE(1 << SHIFT_OF(SIZE)), offset);
		uint64_t values[4];

		for (uint32_t i = 0; i < 4; i++)
			values[i] = merge_value<SIZE>(word, i, octave > 0, offset[i]);
		put_quad<SIZE>(sink, v.dtype, first + WIRE_ROW * r + 4 * lane, n, values);
	}
	for (int p = 0; p < SIZE; p++)
		*sealed += sums[p].total;
	if (alone)
		status = plane_close(&top);
	return status == CODEC_OK ? close_region(&c, lane) : status;
}

#endif
