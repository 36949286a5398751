/*
 * frame/gather.cu - kernel that copies a few bytes from each of many addresses into one buffer, which is then copied
 * to the host by one transfer. Grid: one CTA per piece.
 */
#include "common/warp.cuh"

/* Copy of one piece: nbytes bytes from `from` to the buffer at `to`. */
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
