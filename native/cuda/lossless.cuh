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

/*
 * A lane's four values of a row by the words of their planes, whose offsets are in the halves of two words; in memory
 * they are one after the other. The pattern's upper eight bits are plane 0, its sign and lower seven are plane 1.
 */
template <int SIZE> DEVICE void merge_quad(const uint32_t *plane, const uint32_t *offset, uint32_t *out)
{
	uint32_t lower = plane[1] & 0x7f7f7f7f, signs = plane[1] & 0x80808080, top[2];

	for (int h = 0; h < 2; h++) {
		uint32_t even = h ? 0x4342 : 0x4140, odd = h ? 0x3424 : 0x1404; /* where in halves two bytes go */
		uint32_t upper = __byte_perm(plane[0], 0, even), u = upper * 128 + __byte_perm(lower, 0, even);

		top[h] = turn_pair(u, upper, offset[h]) | __byte_perm(signs, 0, odd);
	}
	if (SIZE == 2) {
		out[0] = top[0], out[1] = top[1];
		return;
	}
	for (int h = 0; h < 2; h++) {
		uint32_t low = __byte_perm(plane[SIZE - 1], plane[SIZE - 2], h ? 0x7362 : 0x5140);

		out[2 * h % SIZE] = __byte_perm(low, top[h], 0x5410);
		out[(2 * h + 1) % SIZE] = __byte_perm(low, top[h], 0x7632);
	}
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

/* Row r's four values, a word of each plane, to where they go. `o`: where they are, of which there are n, or none. */
template <int SIZE>
DEVICE void put_row(const job *j, uint64_t first, uint32_t r, uint32_t n, const uint32_t *word, place *o,
		    const codec_sink *sink, uint32_t lane)
{
	const int octave = octave_of(j->v.dtype);
	uint16_t offset[4] = {0};
	uint64_t values[4];

	if (!sink->data)
		return;
	if (j->v.model_parts.count && n)
		quad_offsets(j, o, n, octave / 8, WIRE_CIRCLE(1 << SHIFT_OF(SIZE)), offset);
	for (uint32_t i = 0; i < 4; i++)
		values[i] = merge_value<SIZE>(word, i, octave > 0, offset[i]);
	put_quad<SIZE>(sink, j->v.dtype, first + WIRE_ROW * r + 4 * lane, n, values);
}

/*
 * A chunk of rows that are all there; all at multiples of a word, values at `to` at one of a quad. `fixed`: planes from
 * the second one on, so many bytes apart. Nearly all of a large tensor is read here.
 */
template <int SIZE>
DEVICE void read_whole_rows(const job *j, plane *top, const pairs &by, const uint8_t *fixed, digest *sums, cursor *c,
			    place *o, uint8_t *to, uint32_t r, uint32_t lane)
{
	const int octave = octave_of(j->v.dtype), round = ROUND_OF(octave);
	const uint32_t length = o->length ? o->length : ~0u; /* a row without an end */
	const uint32_t *key = SEAL_KEY + lane, *word_of[SIZE];
	uint32_t column = o->column, row = o->row, eighths = row_pair(o->eighths, round);

	for (int p = 1; p < SIZE; p++)
		word_of[p] = global((const uint32_t *)(fixed + (p - 1) * j->v.plane_stride)) + 32 * r + lane;
	to += 4 * SIZE * (32 * r + lane);
#pragma unroll(SIZE == 2 ? 4 : 2)
	for (uint32_t k = 0; k < CHUNK_ROWS; k++) {
		uint32_t word[SIZE], value[SIZE], offset[2], four = 0x80808080;

		word[0] = plane_whole_row(top, by, c, lane);
		for (int p = 1; p < SIZE; p++) {
			word[p] = word_of[p][32 * k];
			sums[p].sum += (uint64_t)word[p] * key[32 * k];
		}
		if (o->cols)
			four ^= columns_at(o->cols + column);
		offset[0] = pair_offset(__byte_perm(four, 0, 0x4140), eighths, octave);
		offset[1] = pair_offset(__byte_perm(four, 0, 0x4342), eighths, octave);
		merge_quad<SIZE>(word, offset, value);
		if constexpr (SIZE == 2)
			*global((uint2 *)(to + 4 * SIZE * 32 * k)) = {value[0], value[1]};
		else
			*global((uint4 *)(to + 4 * SIZE * 32 * k)) = {value[0], value[1], value[2], value[3]};
		if (k + 1 < CHUNK_ROWS && (column += WIRE_ROW) >= length) {
			for (; column >= length; row++)
				column -= length;
			eighths = row_pair(eighths_of(o->part, o->rows, row), round);
		}
	}
	if (j->v.model_parts.count) {
		o->column = column, o->row = row, o->left -= WIRE_ROW * (CHUNK_ROWS - 1);
		enter_row(o);
		move_on(j, o, WIRE_ROW);
	}
}

/* Are a lane's quads in the next chunk's rows such as read_whole_rows takes, each within one row of the place's part?
 */
DEVICE bool plain_ahead(const place *o)
{
	return o->left >= WIRE_ROW * (CHUNK_ROWS - 1) + 4 && !((o->length | o->column) & 3);
}

/* A region with plane 0 alone, in any mode, whose values are read row by row; the cursor is behind its head. */
template <int SIZE>
DEVICE codec_status read_alone(const job *j, uint64_t b, uint32_t mode, cursor c, const pairs &by,
			       const codec_sink *sink, uint64_t *sealed, uint32_t lane)
{
	const codec_view &v = j->v;
	const uint64_t first = b * v.block_nvalues;
	const uint32_t m = (uint32_t)block_values(&v, b), rows = (m + WIRE_ROW - 1) / WIRE_ROW;
	const uint8_t *fixed = c.frame + v.planes_offset + first;
	digest sums[SIZE] = {};
	place o = {};
	plane top;
	codec_status status = plane_open(&top, j, 0, mode, by, m, &c, lane);

	if (status != CODEC_OK)
		return status;
	if (v.model_parts.count)
		o = place_at(j, first + (4 * lane < m ? 4 * lane : 0));
	bool fast = (SIZE == 2 || SIZE == 4) && octave_of(v.dtype) && mode == WIRE_MODE_CODED && by.plane == 0 &&
		    sink->data && sink->into == CODEC_INTO_STORE && (uint64_t)sink->data % (4 * SIZE) == 0 &&
		    ((uint64_t)top.coder.words | (uint64_t)fixed | v.plane_stride) % 4 == 0;

	for (uint32_t r = 0; r < rows;) {
		if (fast && r % CHUNK_ROWS == 0 && r + CHUNK_ROWS <= m / WIRE_ROW &&
		    (!v.model_parts.count || __all_sync(FULL, plain_ahead(&o)))) {
			if constexpr (SIZE == 2 || SIZE == 4)
				read_whole_rows<SIZE>(j, &top, by, fixed, sums, &c, &o, sink->data + SIZE * first, r,
						      lane);
			r += CHUNK_ROWS;
		} else {
			uint32_t n = there(r, lane, m), word[SIZE];

			word[0] = plane_row(&top, r, &c, lane);
			for (int p = 1; p < SIZE; p++) {
				word[p] = load_bytes(fixed + (p - 1) * v.plane_stride + WIRE_ROW * r + 4 * lane, n);
				digest_word(&sums[p], word[p], r, lane);
			}
			put_row<SIZE>(j, first, r++, n, word, &o, sink, lane);
		}
		if (r % CHUNK_ROWS == 0 || r == rows)
			for (int p = 1; p < SIZE; p++)
				digest_keep(&sums[p], (r - 1) / CHUNK_ROWS, lane);
	}
	for (int p = 1; p < SIZE; p++)
		*sealed += digest_end(&sums[p], 0, (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, WIRE_SEED_PLANE + p, lane);
	status = plane_close(&top);
	return status == CODEC_OK ? close_region(&c, lane) : status;
}

/* A region with any planes, which lie in `scratch` meanwhile: memory for a plane more than values have. */
template <int SIZE>
DEVICE codec_status read_planes(const job *j, uint64_t b, uint32_t head, cursor c, const pairs &by, uint8_t *scratch,
				const codec_sink *sink, uint64_t *sealed, uint32_t lane)
{
	const codec_view &v = j->v;
	const uint64_t first = b * v.block_nvalues;
	const uint32_t m = (uint32_t)block_values(&v, b), rows = (m + WIRE_ROW - 1) / WIRE_ROW;
	const bool pruned = head & WIRE_REGION_PRUNED;
	uint32_t k = m;
	uint8_t *some = scratch + SIZE * PLANE_ROOM; /* of values that were not taken out */
	codec_status status = CODEC_OK;
	const uint8_t *fixed[SIZE], *section = c.frame + v.planes_offset + first;
	digest sums[SIZE] = {};
	place o = {};

	for (int p = 0; p < SIZE; p++) {
		fixed[p] = v.fixed >> p & 1 ? section : NULL;
		section += v.fixed >> p & 1 ? v.plane_stride : 0;
	}
	for (uint32_t p = 0; p < SIZE && status == CODEC_OK; p++) {
		uint32_t *to = (uint32_t *)(scratch + p * PLANE_ROOM);

		if (v.fixed >> p & 1)
			continue;
		status = read_plane(j, p, head >> 2 * p & 3, by, k, p && pruned ? (uint32_t *)some : to, &c, lane);
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
			if (!fixed[p]) {
				word[p] = ((uint32_t *)(scratch + p * PLANE_ROOM))[32 * r + lane];
				continue;
			}
			word[p] = load_bytes(fixed[p] + WIRE_ROW * r + 4 * lane, n);
			digest_word(&sums[p], word[p], r, lane);
			if (r % CHUNK_ROWS == CHUNK_ROWS - 1 || r + 1 == rows)
				digest_keep(&sums[p], r / CHUNK_ROWS, lane);
		}
		put_row<SIZE>(j, first, r, n, word, &o, sink, lane);
	}
	for (int p = 0; p < SIZE; p++)
		if (fixed[p])
			*sealed += digest_end(&sums[p], 0, (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, WIRE_SEED_PLANE + p,
					      lane);
	return close_region(&c, lane);
}

/* A region's values; the fixed planes' digests are added to *sealed on the way. */
template <int SIZE>
DEVICE codec_status read_block(const job *j, uint64_t b, cursor c, const pairs &by, uint8_t *scratch,
			       const codec_sink *sink, uint64_t *sealed, uint32_t lane)
{
	const codec_view &v = j->v;
	uint32_t head = load32(here(&c));
	codec_status status = check_head(&v, head, SIZE);

	bool alone = v.fixed == (1u << SIZE) - 2 && !(v.halved & 1) && !(head & WIRE_REGION_PRUNED);

	c.at += 4;
	if (status != CODEC_OK)
		return status;
	if (!alone)
		return read_planes<SIZE>(j, b, head, c, by, scratch, sink, sealed, lane);
	return read_alone<SIZE>(j, b, head & 3, c, by, sink, sealed, lane);
}

#endif
