/* lossless/fast.cuh - types that the loops of encode_fast.cuh and decode_fast.cuh share. */
#ifndef CODEC_CUDA_LOSSLESS_FAST_CUH
#define CODEC_CUDA_LOSSLESS_FAST_CUH

#include "coder/model.cuh"

/* Bits of two patterns whose bytes in plane 0 are symbols: bits 7 to 14 of each half. */
#define FAST_SYMBOLS 0x7f807f80u

/* Words of a quad in memory. */
template <int SIZE> struct fast_quad;
template <> struct fast_quad<2> {
	typedef uint2 words;
};
template <> struct fast_quad<4> {
	typedef uint4 words;
};

/*
 * Offsets of a part's values: none, one for all of them, or by rows and columns. FAST_CHECK: a decoder needs none,
 * since it only checks the values.
 */
enum fast_offsets { FAST_NO_OFFSETS, FAST_ONE_OFFSET, FAST_OFFSETS, FAST_CHECK };

DEVICE fast_offsets fast_offsets_of(const place &o)
{
	return __any_sync(FULL, o.rows || o.cols) ? FAST_OFFSETS : FAST_ONE_OFFSET;
}

/*
 * Return how many of `chunks` chunks of rows the loops take from, or up to, a position. rows: rows of the lane's quads
 * that lie in the part at hand. Each quad must lie within one row of that part.
 */
DEVICE uint32_t fast_chunks(const place &o, uint64_t rows, uint32_t chunks)
{
	const uint64_t whole = o.left < 4 || (o.length | o.column) & 3 ? 0 : rows / CHUNK_ROWS;

	return chunks - warp_max(chunks - (uint32_t)(whole < chunks ? whole : chunks));
}

#endif
