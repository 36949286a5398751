/*
 * truncate/rings.cuh - write several bit streams at the same time, buffered in shared memory.
 *
 * A stream may begin at any bit of a region. Complete words are written to the region with one store. A word that two
 * streams share is added to the word in the region, which clear_word has set to 0 before.
 */
#ifndef CODEC_CUDA_TRUNCATE_RINGS_CUH
#define CODEC_CUDA_TRUNCATE_RINGS_CUH

#include "common/warp.cuh"

#define RING_WORDS 32 /* words per ring buffer; 128 values of 6 bits span fewer */

/*
 * State of writing a bit stream. words: ring buffer of words that are not complete; word i of the region is at index i
 * % RING_WORDS, and unused words are 0. bit: bit index in the region of the stream's end. shared: index of the region's
 * word in which another stream ends and this one begins; ~0: there is none.
 */
struct bit_ring {
	uint32_t *words, bit, shared;
};

DEVICE bit_ring bit_ring_of(uint32_t *words, uint32_t bit)
{
	return {words, bit, bit % 32 ? bit / 32 : ~0u};
}

/* Write x, up to 32 bits, `ahead` bits past the stream's end into the ring buffer. Lanes write different bits. */
DEVICE void ring_bits(const bit_ring &s, uint32_t ahead, uint32_t x)
{
	const uint32_t bit = s.bit + ahead;

	atomicOr(s.words + bit / 32 % RING_WORDS, x << bit % 32);
	atomicOr(s.words + (bit / 32 + 1) % RING_WORDS, __funnelshift_l(x, 0, bit % 32));
}

/* Advance the stream's end by nbits bits, which ring_bits has written, and write complete words to the region. */
DEVICE void move_ring(bit_ring *s, uint32_t nbits, uint8_t *region, uint32_t lane)
{
	const uint32_t i = s->bit / 32 + lane;

	s->bit += nbits;
	if (i >= s->bit / 32)
		return;
	uint32_t *word = global((uint32_t *)region) + i, *from = s->words + i % RING_WORDS;

	if (i == s->shared)
		atomicOr(word, *from);
	else
		*word = *from;
	*from = 0;
}

/* Add the last, incomplete word to the region. */
DEVICE void end_ring(const bit_ring &s, uint8_t *region, uint32_t lane)
{
	uint32_t *from = s.words + s.bit / 32 % RING_WORDS;

	if (lane == 0 && s.bit % 32) {
		atomicOr(global((uint32_t *)region) + s.bit / 32, *from);
		*from = 0;
	}
}

/* Clear bytes [from, end) of a region, and the rest of the word that contains the last of them. */
DEVICE void clear_bytes(uint8_t *region, uint32_t from, uint32_t end, uint32_t lane)
{
	uint32_t *word = global((uint32_t *)region);

	if (from % 4 && lane < 4 - from % 4)
		region[from + lane] = 0;
	for (uint32_t i = (from + 3) / 4 + lane; i < (end + 3) / 4; i += 32)
		word[i] = 0;
	__syncwarp();
}

/* Clear the bytes from `from` on in the region's word that contains byte at - 1, where a stream or the symbols end. */
DEVICE void clear_word(uint8_t *region, uint32_t from, uint32_t at, uint32_t lane)
{
	const uint32_t i = (at - 1) / 4 * 4 + lane;

	if (lane < 4 && i >= from)
		region[i] = 0;
}

#endif
