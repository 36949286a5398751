/* lossless/fast.cuh - types that the loops of encode_fast.cuh and decode_fast.cuh share. */
#ifndef CODEC_CUDA_LOSSLESS_FAST_CUH
#define CODEC_CUDA_LOSSLESS_FAST_CUH

#include "coder/model.cuh"

/* Mask of the bits of two patterns that belong to plane 0 (the symbols): bits 7 to 14 of each half. */
#define FAST_SYMBOLS 0x7f807f80u

/* Vector type that holds four values of SIZE bytes in memory order. */
template <int SIZE> struct fast_quad;
template <> struct fast_quad<2> {
	typedef uint2 words;
};
template <> struct fast_quad<4> {
	typedef uint4 words;
};

/*
 * Kind of the scale model's offsets in a part: none, one for all values, or offsets of rows and columns. FAST_CHECK:
 * offsets are ignored, since the decoder only checks values.
 */
enum fast_offsets { FAST_NO_OFFSETS, FAST_ONE_OFFSET, FAST_OFFSETS, FAST_CHECK };

DEVICE fast_offsets fast_offsets_of(const place &o)
{
	return __any_sync(FULL, o.rows || o.cols) ? FAST_OFFSETS : FAST_ONE_OFFSET;
}

alignas(4) static __device__ const uint16_t NO_COLUMNS[WIRE_FLAT_ROW] = {0};

/* If the columns at a position have no offsets, set them to zeros, so that the loops need not test for them. */
DEVICE void add_columns(place *o)
{
	if (o->cols)
		return;
	o->cols = NO_COLUMNS;
	if (!o->length)
		o->length = WIRE_FLAT_ROW, o->column = 0;
}

/*
 * Return how many of `chunks` chunks of CHUNK_ROWS rows the fast loops can process from (decoder) or up to (encoder)
 * position `o`. rows: number of rows of 128 values in which the lane's four values lie in the part of `o`. The loops
 * require that four values always lie within one row of that part.
 */
DEVICE uint32_t fast_chunks(const place &o, uint64_t rows, uint32_t chunks)
{
	const uint64_t whole = o.left < 4 || (o.length | o.column) & 3 ? 0 : rows / CHUNK_ROWS;

	return chunks - warp_max(chunks - (uint32_t)(whole < chunks ? whole : chunks));
}

#endif
