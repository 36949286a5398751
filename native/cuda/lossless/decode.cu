/* lossless/decode.cu - lossless frames of values of SIZE bytes. */
#include "frame/decode.cuh"
#include "lossless/decode.cuh"

/* For whoever launches: a warp's scratch, by the log2 of a value's size. */
extern "C" __device__ const uint64_t decode_lossless_nbytes[] = {2 * PLANE_ROOM, 3 * PLANE_ROOM, 5 * PLANE_ROOM,
								 9 * PLANE_ROOM};

template <int SIZE>
__global__ void __launch_bounds__(32 * WARPS, SIZE > 4 ? 3 : 4) decode_lossless(const codec_decoding *decodings)
{
	decode_blocks<13>(decodings, (SIZE + 1) * PLANE_ROOM, SIZE,
			  [](const codec_decoding &d, const job *j, uint64_t b, cursor c, const pairs &by,
			     uint8_t *mine, uint32_t lane,
			     uint64_t *sealed) { return read_block<SIZE>(j, b, c, by, mine, &d.sink, sealed, lane); });
}
