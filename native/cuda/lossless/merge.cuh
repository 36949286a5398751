/*
 * lossless/merge.cuh - merge values of lossless blocks from the bytes of their planes, and store them.
 * docs/spec/format.md, sections 3 and 5.
 */
#ifndef CODEC_CUDA_LOSSLESS_MERGE_CUH
#define CODEC_CUDA_LOSSLESS_MERGE_CUH

#include "coder/model.cuh"
#include "common/values.cuh"

/*
 * Return the bits of value i of four, merged from planes. plane: for each plane, the word with the four values' bytes;
 * plane 0 has the highest bits. zero: see zero_of. offset: the value's offset, in patterns.
 */
template <int SIZE> DEVICE uint64_t merge_value(const uint32_t *plane, uint32_t i, uint32_t zero, uint16_t offset)
{
	uint64_t x = 0;

	for (int p = 0; p < SIZE; p++)
		x = x << 8 | (plane[p] >> 8 * i & 255);
	if (SIZE == 1 && zero)
		return raised8((uint32_t)x, offset, zero);
	if (SIZE > 1 && zero) {
		const int low = SIZE > 1 ? 8 * SIZE - 16 : 0;
		uint16_t top = bits_unturn((uint16_t)(x >> low), offset, SHIFT_OF(SIZE));

		x = (x & ((1ull << low) - 1)) | (uint64_t)top << low;
	}
	return x;
}

/*
 * Merge four floats of SIZE bytes, 2 or 4, from planes into SIZE words in memory order. plane: for each plane, the word
 * with the four values' bytes. offset: two words with the offsets of two values each. Plane 0 holds the pattern's upper
 * eight bits, plane 1 the sign and the lower seven bits.
 */
template <int SIZE> DEVICE void merge_quad(const uint32_t *plane, const uint32_t *offset, uint32_t *out)
{
	uint32_t lower = plane[1] & 0x7f7f7f7f, signs = plane[1] & 0x80808080, top[2];

	for (int h = 0; h < 2; h++) {
		/*
		 * selectors of __byte_perm: `even` moves two bytes to the lower ends of 16-bit halves, `odd` to the
		 * upper ends
		 */
		uint32_t even = h ? 0x4342 : 0x4140, odd = h ? 0x3424 : 0x1404;
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

/* Store four values, or combine them with the destination, if one vector store cannot do that. x: their bits. */
template <int SIZE> DEVICE_CALL void put_any(const codec_sink *sink, uint32_t dtype, uint64_t i, uint4 x)
{
	uint64_t four[4] = {x.x, x.y, x.z, x.w};

	if (SIZE == 2)
		four[0] = x.x & 0xffff, four[1] = x.x >> 16, four[2] = x.y & 0xffff, four[3] = x.y >> 16;
	put_quad<SIZE>(sink, dtype, i, 4, four);
}

template <int SIZE> DEVICE void put_merged(const codec_sink *sink, uint32_t dtype, uint64_t i, uint4 x)
{
	uint8_t *to = global(sink->data) + SIZE * i;

	if (sink->into != CODEC_INTO_STORE || (uint64_t)to % (4 * SIZE))
		return put_any<SIZE>(sink, dtype, i, x);
	if (SIZE == 2)
		*(uint2 *)to = {x.x, x.y};
	else
		*(uint4 *)to = x;
}

/*
 * Merge and store the lane's n values of row r (128 values). word: for each plane, the word with the values' bytes. o:
 * position of the first of them in the scale model; advanced by 128 values.
 */
template <int SIZE>
DEVICE void put_row(const job *j, uint64_t first, uint32_t r, uint32_t n, const uint32_t *word, place *o,
		    const codec_sink *sink, uint32_t lane)
{
	const uint32_t zero = zero_of(&j->v);
	const uint64_t i = first + WIRE_ROW * r + 4 * lane;
	uint2 offsets = {0, 0};
	uint64_t values[4];

	if (!sink->data)
		return;
	if (j->v.model_parts.count && n)
		offsets = quad_offsets(j, o, n, circle_for<SIZE>(&j->v));
	if constexpr (SIZE == 2 || SIZE == 4)
		if (zero && n == 4) {
			const uint32_t pairs[2] = {offsets.x, offsets.y};
			uint32_t out[4] = {0};

			merge_quad<SIZE>(word, pairs, out);
			return put_merged<SIZE>(sink, j->v.dtype, i, {out[0], out[1], out[2], out[3]});
		}
	for (uint32_t k = 0; k < 4; k++)
		values[k] = merge_value<SIZE>(word, k, zero, offset_in(offsets, k));
	put_quad<SIZE>(sink, j->v.dtype, i, n, values);
}

#endif
