/* truncate/rings.cuh - writing of bit streams that grow side by side, through words in shared memory.
 *
 * A stream begins at any bit of a region. Its words go to the region when they are complete, with one store; words that
 * it shares with the streams beside it are added to what is there, at first 0 (clear_word).
 */
#ifndef CODEC_CUDA_TRUNCATE_RINGS_CUH
#define CODEC_CUDA_TRUNCATE_RINGS_CUH

#include "common/warp.cuh"

#define RING_WORDS 32 /* more than a row of 128 values of 6 bits touches */

/*
 * End of a stream. words: those that are not complete, word i of the region at i % RING_WORDS; others are 0. bit:
 * position of the next bit in the region. shared: word of the region that another stream has begun; ~0: none.
 */
struct bit_ring {
	uint32_t *words, bit, shared;
};

DEVICE bit_ring bit_ring_of(uint32_t *words, uint32_t bit)
{
	return {words, bit, bit % 32 ? bit / 32 : ~0u};
}

/* Add up to 32 bits, `ahead` bits behind the end. Lanes add different ones. */
DEVICE void ring_bits(const bit_ring &s, uint32_t ahead, uint32_t x)
{
	const uint32_t bit = s.bit + ahead;

	atomicOr(s.words + bit / 32 % RING_WORDS, x << bit % 32);
	atomicOr(s.words + (bit / 32 + 1) % RING_WORDS, __funnelshift_l(x, 0, bit % 32));
}

/* Move the end by nbits bits, which have been added, and write complete words. */
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

/* Write the last word. */
DEVICE void end_ring(const bit_ring &s, uint8_t *region, uint32_t lane)
{
	uint32_t *from = s.words + s.bit / 32 % RING_WORDS;

	if (lane == 0 && s.bit % 32) {
		atomicOr(global((uint32_t *)region) + s.bit / 32, *from);
		*from = 0;
	}
}

/* Clear bytes from to end - 1 of a region, and the rest of the last word. */
DEVICE void clear_bytes(uint8_t *region, uint32_t from, uint32_t end, uint32_t lane)
{
	uint32_t *word = global((uint32_t *)region);

	if (from % 4 && lane < 4 - from % 4)
		region[from + lane] = 0;
	for (uint32_t i = (from + 3) / 4 + lane; i < (end + 3) / 4; i += 32)
		word[i] = 0;
	__syncwarp();
}

/* Clear bytes from `from` on in the word of a region that holds byte `at` - 1, where a stream or its symbols end. */
DEVICE void clear_word(uint8_t *region, uint32_t from, uint32_t at, uint32_t lane)
{
	const uint32_t i = (at - 1) / 4 * 4 + lane;

	if (lane < 4 && i >= from)
		region[i] = 0;
}

#endif
