/* frame/gather.cu - a few bytes of many places to one, from which they are copied to the host together. */
#include "common/warp.cuh"

struct codec_piece {
	const uint8_t *from;
	uint8_t *to;
	uint64_t nbytes;
};

extern "C" __global__ void __launch_bounds__(256) gather(const codec_piece *pieces)
{
	const codec_piece piece = pieces[blockIdx.x];

	for (uint64_t i = threadIdx.x; i < piece.nbytes; i += blockDim.x)
		piece.to[i] = piece.from[i];
}
