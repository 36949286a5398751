/* delta/delta.cuh - functions on the values of Delta. docs/spec/format.md, section 10. */
#ifndef CODEC_CUDA_DELTA_DELTA_CUH
#define CODEC_CUDA_DELTA_DELTA_CUH

#include "exact/delta.h"
#include "common/checksum.cuh"
#include "common/job.cuh"

/* Return the bits of value i of the array at p, whose values have SIZE bytes. */
template <int SIZE> DEVICE uint64_t load_value(const uint8_t *p, uint64_t i)
{
	return SIZE == 1   ? global(p)[i]
	       : SIZE == 2 ? global((const uint16_t *)p)[i]
	       : SIZE == 4 ? global((const uint32_t *)p)[i]
			   : global((const uint64_t *)p)[i];
}

template <int SIZE> DEVICE void store_value(uint8_t *p, uint64_t i, uint64_t x)
{
	if (SIZE == 1)
		global(p)[i] = (uint8_t)x;
	else if (SIZE == 2)
		global((uint16_t *)p)[i] = (uint16_t)x;
	else if (SIZE == 4)
		global((uint32_t *)p)[i] = (uint32_t)x;
	else
		global((uint64_t *)p)[i] = x;
}

/* Return the delta_kind of a dtype. SIZE, the bytes per value, makes its `item` a compile-time constant. */
template <int SIZE> DEVICE delta_kind kind_of_delta(uint32_t dtype)
{
	delta_kind q = delta_kind_of(dtype, SIZE);

	q.item = SIZE;
	return q;
}

/* Return the index of the k-th set bit of x. Called by all lanes, with equal arguments. */
DEVICE uint32_t warp_select(uint32_t x, uint32_t k, uint32_t lane)
{
	const uint32_t below = (1u << lane) - 1;

	return (uint32_t)__ffs((int)__ballot_sync(FULL, (x >> lane & 1) && (uint32_t)__popc(x & below) == k)) - 1;
}

/* Return the number of the digest's chunks in a block of nbytes bytes. Blocks begin at a chunk boundary. */
DEVICE uint32_t chunks_of(uint64_t nbytes)
{
	return (uint32_t)((nbytes + 4 * WIRE_CHUNK_WORDS - 1) / (4 * WIRE_CHUNK_WORDS));
}

#endif
