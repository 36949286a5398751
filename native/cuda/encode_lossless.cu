/* encode_lossless.cu - lossless frames of values of SIZE bytes. */
#include "encode.cuh"
#include "encode_lossless.cuh"

/*
 * For whoever launches: a warp's scratch, by the log2 of a value's size, to which a region comes, the largest that
 * there can be.
 */
#define LOSSLESS_ROOM(size) (((size) + 1) * PLANE_ROOM + 4 * WORDS_ROOM)
extern "C" __device__ const uint64_t encode_lossless_nbytes[] = {LOSSLESS_ROOM(1), LOSSLESS_ROOM(2), LOSSLESS_ROOM(4),
								 LOSSLESS_ROOM(8)};

/*
 * Values, at a multiple of their size, to a frame's directory, fixed planes and regions, `capacity` bytes in all.
 * places: zeros, one a block. scratch: so many bytes a warp.
 */
template <int SIZE>
__global__ void __launch_bounds__(32 * WARPS)
	encode_lossless(const codec_view *view, uint8_t *memory, const uint8_t *values, uint8_t *frame,
			uint64_t capacity, uint8_t *scratch, uint64_t scratch_nbytes, unsigned long long *places,
			codec_written *out)
{
	uint32_t lane = threadIdx.x % 32;
	const job j = {*view, memory};
	const codec_view &v = j.v;

	scratch += ((uint64_t)blockIdx.x * WARPS + threadIdx.x / 32) * scratch_nbytes;
	uint8_t *region = scratch + LOSSLESS_ROOM(SIZE);

	for (uint64_t b; (b = next_block(out, lane)) < v.nblocks;) {
		uint64_t sealed = 0;
		uint32_t size = write_block<SIZE>(&j, memory, values, frame, b, scratch, region, &sealed, lane);

		put_region(&v, frame, capacity, b, region, size, sealed, places, out, lane);
	}
}
