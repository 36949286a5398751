/* lossless/encode.cu - lossless frames of values of SIZE bytes. */
#include "frame/encode.cuh"
#include "lossless/encode.cuh"

/*
 * For whoever launches: a warp's scratch, by the log2 of a value's size, to which a region comes, the largest that
 * there can be.
 */
#define LOSSLESS_ROOM(size) (((size) + 1) * PLANE_ROOM + 4 * WORDS_ROOM)
extern "C" __device__ const uint64_t encode_lossless_nbytes[] = {LOSSLESS_ROOM(1), LOSSLESS_ROOM(2), LOSSLESS_ROOM(4),
								 LOSSLESS_ROOM(8)};

/* Values, at a multiple of their size, to a frame's directory, fixed planes and regions. */
template <int SIZE> __global__ void __launch_bounds__(32 * WARPS, 4) encode_lossless(const codec_encoding *encodings)
{
	const codec_encoding &e = encoding_of(encodings);
	uint32_t lane = threadIdx.x % 32;
	__shared__ uint32_t codes[256 * SIZE];
	const job &j = share_coding(e.view, e.memory, codes, SIZE);
	uint8_t *scratch = scratch_of(e), *region = scratch + LOSSLESS_ROOM(SIZE);

	if (blockIdx.x * WARPS >= e.warps)
		return;
	for (uint64_t b; (b = next_block(e.out, lane)) < j.v.nblocks;) {
		uint64_t sealed = 0;

		if (j.v.model_parts.count)
			fit_rows(&j, e.memory, e.source.values, SIZE, octave_of(j.v.dtype), 1u << SHIFT_OF(SIZE),
				 b * j.v.block_nvalues, (uint32_t)block_values(&j.v, b), lane);
		if (is_alone(j.v, SIZE) && write_alone<SIZE>(e, &j, b, scratch + SIZE * PLANE_ROOM,
							     (uint32_t *)(scratch + (SIZE + 1) * PLANE_ROOM), lane))
			continue;
		uint32_t size = write_block<SIZE>(&j, e.source.values, e.frame, b, scratch, region, &sealed, lane);

		put_region(&j.v, e, b, region, size, sealed, lane);
	}
}
