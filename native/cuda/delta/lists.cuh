/* delta/lists.cuh - lists of the changes of blocks: made by a launch that checks, written by the one that follows.
 *
 * Without a list, a block is decoded again when it is written, and its base is read again.
 */
#ifndef CODEC_CUDA_DELTA_LISTS_CUH
#define CODEC_CUDA_DELTA_LISTS_CUH

#include "delta/delta.cuh"
#include "frame/decode.cuh"

#define LISTED_SHARE 8 /* a block's changes are listed if at most one value in so many changes */

/* Words of an entry of codec_lists: the place of a change in its block, and the new value. */
#define ENTRY_WORDS(size) ((size) == 8 ? 3 : 2)
#define RECORD_COUNT_AT 44 /* a record: 1 + the block's first entry; from this bit on, the number of entries */

/* Return the records of blocks, which the entries follow. */
DEVICE unsigned long long *records_of(codec_lists *lists)
{
	return (unsigned long long *)(lists + 1);
}

DEVICE uint32_t *entries_of(codec_lists *lists, uint64_t nblocks)
{
	return (uint32_t *)(records_of(lists) + nblocks);
}

/* Take `count` entries for a block. Returns the first one's number, or ~0 if there are too few. */
DEVICE uint64_t take_entries(codec_lists *lists, uint32_t count, uint32_t lane)
{
	const uint64_t first = __shfl_sync(FULL, lane ? 0 : atomicAdd(&lists->used, (unsigned long long)count), 0);

	return first + count <= lists->room ? first : ~0ull;
}

/* Write the changes of a list to the destination, whose other values are the base's. */
template <int SIZE>
DEVICE void write_list(uint8_t *to, uint64_t first, const uint32_t *entry, uint32_t count, uint32_t lane)
{
	for (uint32_t i = lane; i < count; i += 32) {
		const uint32_t *e = global(entry) + ENTRY_WORDS(SIZE) * i;

		store_value<SIZE>(to, first + e[0], SIZE == 8 ? e[1] | (uint64_t)e[2] << 32 : e[1]);
	}
}

#endif
