/* lossless/split.cuh - split values into the bytes of their planes. docs/spec/format.md, sections 3 and 5. */
#ifndef CODEC_CUDA_LOSSLESS_SPLIT_CUH
#define CODEC_CUDA_LOSSLESS_SPLIT_CUH

#include "coder/gaps.cuh"
#include "coder/model.cuh"
#include "common/checksum.cuh"

/*
 * Split four floats of SIZE bytes, 2 or 4, into planes: for each plane, a word with the four values' bytes. The inverse
 * of merge_quad. value: the four values, in memory order. offset: two words, with (WIRE_CIRCLE - offset) for two values
 * each.
 */
template <int SIZE> DEVICE void split_pairs(const uint32_t *value, const uint32_t *offset, uint32_t *plane)
{
	uint32_t top[2], turned[2];

	for (int h = 0; h < 2; h++) {
		top[h] = SIZE == 2 ? value[h] : __byte_perm(value[2 * h % SIZE], value[(2 * h + 1) % SIZE], 0x7632);
		turned[h] = turn_pair(top[h] & 0x7fff7fff, __byte_perm(2 * top[h], 0, 0x4341), offset[h]);
	}
	plane[1] = (__byte_perm(turned[0], turned[1], 0x6420) & 0x7f7f7f7f) |
		   (__byte_perm(top[0], top[1], 0x7531) & 0x80808080);
	plane[0] = __byte_perm(2 * turned[0], 2 * turned[1], 0x7531);
	if constexpr (SIZE == 4) {
		uint32_t low[2] = {__byte_perm(value[0], value[1], 0x5410), __byte_perm(value[2], value[3], 0x5410)};

		plane[2] = __byte_perm(low[0], low[1], 0x7531);
		plane[3] = __byte_perm(low[0], low[1], 0x6420);
	}
}

/* Prefetch CHUNK_ROWS rows of 128 values at `from` into the L2 cache. */
template <int SIZE> DEVICE void prefetch_rows(const uint8_t *from, uint32_t lane)
{
	for (uint32_t i = lane; i < SIZE * CHUNK_ROWS; i += 32)
		prefetch(from + LINE_NBYTES * i);
}

/*
 * Split n values at any address into planes. zero: see zero_of. offsets: see quad_offsets. word: for each plane, the
 * word with the values' bytes.
 */
template <int SIZE>
DEVICE void split_some(const uint8_t *from, uint32_t n, uint32_t zero, uint2 offsets, uint32_t *word)
{
	for (int p = 0; p < SIZE; p++)
		word[p] = 0;
	uint64_t four[4];

	load_quad<SIZE>(from, n, four);
	for (uint32_t k = 0; k < n; k++) {
		uint64_t x = four[k];

		if (SIZE == 1 && zero)
			x = lowered8((uint32_t)x, offset_in(offsets, k), zero);
		if (SIZE > 1 && zero) {
			const int low = SIZE > 1 ? 8 * SIZE - 16 : 0;
			uint16_t top = bits_turn((uint16_t)(x >> low), offset_in(offsets, k), SHIFT_OF(SIZE));

			x = (x & ((1ull << low) - 1)) | (uint64_t)top << low;
		}
		for (int p = 0; p < SIZE; p++)
			word[p] |= (uint32_t)(x >> 8 * (SIZE - 1 - p) & 255) << 8 * k;
	}
}

/*
 * Split n values from value i on into planes: word[p] has the values' bytes of plane p. zero, offsets: see split_some.
 */
template <int SIZE>
DEVICE void split_quad(const uint8_t *values, uint64_t i, uint32_t n, uint32_t zero, uint2 offsets, uint32_t *word)
{
	const uint8_t *from = global(values) + SIZE * i;

	if constexpr (SIZE == 2 || SIZE == 4)
		if (zero && n == 4 && (uint64_t)from % (4 * SIZE) == 0) {
			const uint32_t circles = WIRE_CIRCLE(128) * 0x10001;
			const uint32_t back[2] = {circles - offsets.x, circles - offsets.y}; /* see split_pairs */
			uint32_t value[SIZE];

			for (int h = 0; h < SIZE; h += 2) {
				uint2 w = ((const uint2 *)from)[h / 2];

				value[h] = w.x, value[h + 1] = w.y;
			}
			return split_pairs<SIZE>(value, back, word);
		}
	split_some<SIZE>(from, n, zero, offsets, word);
}

/*
 * Return the offsets, in patterns, of the lane's n values from position *o on, two in each word. Then move *o back by a
 * row of 128 values, unless r, the row's index, is 0. Not inlined, and *o is in shared memory, to save registers in
 * loops over rows.
 */
DEVICE_CALL uint2 offsets_back(const job *j, place *o, uint32_t n, uint32_t r, uint32_t circle)
{
	const uint2 offsets = quad_offsets_here(j, o, n, circle);

	if (r)
		move_back(j, o, WIRE_ROW);
	return offsets;
}

/*
 * Return the offsets, in patterns, of the lane's n values from position *o on, two in each word, and advance *o by a
 * row of 128 values.
 */
DEVICE_CALL uint2 offsets_on(const job *j, place *o, uint32_t n, uint32_t circle)
{
	return quad_offsets(j, o, n, circle);
}

/*
 * Split the lane's n values of row r (128 values) of a block into planes. offsets: their offsets in patterns, two per
 * word.
 */
template <int SIZE>
DEVICE void split_row(const uint8_t *values, uint32_t r, uint32_t n, uint32_t zero, uint2 offsets, uint32_t lane,
		      uint32_t *word)
{
	split_quad<SIZE>(values, WIRE_ROW * r + 4 * lane, n, zero, offsets, word);
}

/*
 * Return the position in the scale model of the lane's last four values in a block of m values, if there are offsets.
 */
DEVICE place last_place(const job *j, uint64_t first, uint32_t m, uint32_t lane)
{
	const uint32_t rows = (m + WIRE_ROW - 1) / WIRE_ROW;
	/* last row of 128 values in which this lane has a value; ~0: there is none */
	const uint32_t last = there(rows - 1, lane, m) ? rows - 1 : rows - 2;

	return j->v.model_parts.count && last != ~0u ? place_at(j, first + WIRE_ROW * last + 4 * lane) : place{};
}

/*
 * Split the m values of a block, which begin at `values`, into planes, from the first row of 128 to the last. For each
 * row, call use(n, words), where words[p] has the bytes of plane p of the lane's n values. at: position in the scale
 * model of the lane's first value, see offsets_back; NULL: there are no offsets. gaps: leave out empty quad rows.
 */
template <int SIZE, class F>
DEVICE void split_rows(const job *j, const uint8_t *values, uint32_t m, place *at, bool gaps, uint32_t lane, F use)
{
	const uint32_t zero = zero_of(&j->v);

#pragma unroll 1
	for (uint32_t r = 0; WIRE_ROW * r < m; r++) {
		const uint32_t n = there(r, lane, m), next = WIRE_ROW * (r + CHUNK_ROWS);
		uint32_t word[SIZE];
		uint2 offsets = {0, 0};

		if (r % CHUNK_ROWS == 0 && next + WIRE_ROW * CHUNK_ROWS <= m)
			prefetch_rows<SIZE>(values + SIZE * next, lane);
		if (at && n)
			offsets = offsets_on(j, at, n, circle_for<SIZE>(&j->v));
		split_row<SIZE>(values, r, n, zero, offsets, lane, word);
		if (!gaps || any_bit<SIZE>(word))
			use(n, word);
	}
}

/*
 * Store the lane's four bytes of a fixed plane, given as a word. section: offset of the plane in the frame. i: index of
 * the first of the four values.
 */
DEVICE void put_fixed(const codec_view *v, uint8_t *frame, uint64_t section, uint64_t i, uint32_t word)
{
	if (i < v->plane_stride)
		*(uint32_t *)(frame + section + i) = word;
}

/* OR and AND of all symbols of a plane, separately for each byte of the lanes' words. */
struct common {
	uint32_t some, all;
};

/* Return the OR of all bytes of x in all lanes. */
DEVICE uint32_t any_byte(uint32_t x)
{
	x = __reduce_or_sync(FULL, x);
	return (x | x >> 8 | x >> 16 | x >> 24) & 255;
}

/* Return true if not all symbols of a plane are equal. */
DEVICE bool differs(const common &same)
{
	return any_byte(same.some) & any_byte(~same.all);
}

#endif
