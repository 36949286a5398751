/* truncate/decode.cu - frames of values with cut mantissas. */
#include "frame/decode.cuh"
#include "truncate/truncate.cuh"

/* For whoever launches: a warp's scratch. */
extern "C" __device__ const uint64_t decode_truncate_nbytes[] = {2 * PLANE_ROOM};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) decode_truncate(const codec_decoding *decodings)
{
	decode_blocks<13>(decodings, 2 * PLANE_ROOM, 0,
			  [](const codec_decoding &d, const job *j, uint64_t b, cursor c, const pairs &by,
			     uint8_t *mine, uint32_t lane,
			     uint64_t *) { return read_cut(j, b, c, by, mine, d.exponents, &d.sink, lane); });
}
