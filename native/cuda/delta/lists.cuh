/*
 * delta/lists.cuh - lists of the changes of blocks. A launch that checks a frame writes the lists, and the next launch
 * applies the listed changes to the destination.
 *
 * The second launch decodes a block without a list again, and reads the block's base again.
 */
#ifndef CODEC_CUDA_DELTA_LISTS_CUH
#define CODEC_CUDA_DELTA_LISTS_CUH

#include "delta/delta.cuh"
#include "frame/decode.cuh"

#define LISTED_SHARE 8 /* a block's changes are listed if at most one value in LISTED_SHARE changes */

/*
 * Number of words per entry of codec_lists: the index of a changed value in its block, and the new value, of `size`
 * bytes.
 */
#define ENTRY_WORDS(size) ((size) == 8 ? 3 : 2)
/*
 * a block's record has 1 + the index of the block's first entry in the lower bits, and the number of its entries from
 * this bit on
 */
#define RECORD_COUNT_AT 44

/* Return the array of blocks' records, which follows the head of the lists. The entries follow the records. */
DEVICE unsigned long long *records_of(codec_lists *lists)
{
	return (unsigned long long *)(lists + 1);
}

DEVICE uint32_t *entries_of(codec_lists *lists, uint64_t nblocks)
{
	return (uint32_t *)(records_of(lists) + nblocks);
}

/* Reserve `count` entries for a block. Return the index of the first of them, or ~0 if too few entries are left. */
DEVICE uint64_t take_entries(codec_lists *lists, uint32_t count, uint32_t lane)
{
	const uint64_t first = __shfl_sync(FULL, lane ? 0 : atomicAdd(&lists->used, (unsigned long long)count), 0);

	return first + count <= lists->room ? first : ~0ull;
}

/*
 * Write the `count` listed changes of a block to the destination, which already has the base's values. first: index of
 * the block's first value.
 */
template <int SIZE>
DEVICE void write_list(uint8_t *to, uint64_t first, const uint32_t *entry, uint32_t count, uint32_t lane)
{
	for (uint32_t i = lane; i < count; i += 32) {
		const uint32_t *e = global(entry) + ENTRY_WORDS(SIZE) * i;

		store_value<SIZE>(to, first + e[0], SIZE == 8 ? e[1] | (uint64_t)e[2] << 32 : e[1]);
	}
}

#endif
