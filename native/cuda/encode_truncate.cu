/* encode_truncate.cu - frames of values with cut mantissas. */
#include "encode.cuh"
#include "encode_truncate.cuh"

/* For whoever launches: a warp's scratch, to which a region comes, the largest that there can be. */
#define CUT_ROOM (CUT_PLANES * PLANE_ROOM + 4 * WORDS_ROOM)
extern "C" __device__ const uint64_t encode_truncate_nbytes[] = {CUT_ROOM};

/* As encode_lossless. What is cut off goes where the source says, which is not an array of the source. */
extern "C" __global__ void __launch_bounds__(32 * WARPS)
	encode_truncate(const codec_view *view, uint8_t *memory, const codec_source source, uint8_t *frame,
			uint64_t capacity, uint8_t *scratch, uint64_t scratch_nbytes, unsigned long long *places,
			codec_written *out, const codec_cuts by)
{
	uint32_t lane = threadIdx.x % 32;
	const job j = {*view, memory};
	const codec_view &v = j.v;

	scratch += ((uint64_t)blockIdx.x * WARPS + threadIdx.x / 32) * scratch_nbytes;
	uint8_t *region = scratch + CUT_ROOM;

	for (uint64_t b; (b = next_block(out, lane)) < v.nblocks;) {
		uint32_t size = write_cut(&j, memory, &source, by, b, scratch, region, lane);

		put_region(&v, frame, capacity, b, region, size, 0, places, out, lane);
	}
}
