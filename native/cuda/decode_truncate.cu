/* decode_truncate.cu - frames of values with cut mantissas. */
#include "decode.cuh"
#include "truncate.cuh"

/* For whoever launches: a warp's scratch. */
extern "C" __device__ const uint64_t decode_truncate_nbytes[] = {2 * PLANE_ROOM};

/* `exponents`: of A, for all values of the tensor, where levels are shared. */
extern "C" __global__ void __launch_bounds__(32 * WARPS)
	decode_truncate(const codec_view v, const uint8_t *memory, const uint8_t *frame, uint8_t *scratch,
			const codec_sink sink, uint32_t checks, codec_found *found, const uint8_t *exponents)
{
	decode_blocks(v, memory, frame, scratch, 2 * PLANE_ROOM, checks, found, 0,
		      [&](const job *j, uint64_t b, cursor c, const uint32_t *pair, uint32_t, uint8_t *mine,
			  uint32_t lane, uint64_t *) { return read_cut(j, b, c, pair, mine, exponents, &sink, lane); });
}
