/* rows/decode.cu - frames of a codec of rows. */
#include "frame/decode.cuh"
#include "rows/rows.cuh"

/* For whoever launches: a warp's scratch. */
extern "C" __device__ const uint64_t decode_rows_nbytes[] = {PLANE_ROOM};

template <int CODEC> __global__ void __launch_bounds__(32 * WARPS, 6) decode_rows(const codec_decoding *decodings)
{
	__shared__ float ratio[256];

	fill_ratios<CODEC>(decodings[blockIdx.y].view, ratio);
	decode_blocks<12>(decodings, PLANE_ROOM, 0,
			  [&](const codec_decoding &d, const job *j, uint64_t b, cursor c, const pairs &by,
			      uint8_t *mine, uint32_t lane,
			      uint64_t *) { return read_rows<CODEC>(j, b, c, by, mine, ratio, &d.sink, lane); });
}
