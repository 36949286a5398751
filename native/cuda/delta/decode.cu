/* delta/decode.cu - kernel that decodes blocks of Delta frames. */
#include "delta/decode.cuh"

/*
 * Bytes of scratch memory of a warp per 1,024 values of a block, indexed by log2 of a value's size in bytes. The host
 * reads this symbol.
 */
extern "C" __device__ const uint64_t decode_delta_nbytes[] = {DELTA_ROOM(1), DELTA_ROOM(2), DELTA_ROOM(4),
							      DELTA_ROOM(8)};

/*
 * Kernel: decode blocks of values of SIZE bytes, or only check them. Grid: (CTAs, frames). With d.checks, the digests
 * of base and result are computed; the caller compares them with the frame's digests. Changes are written while they
 * are read. If an invalid frame or another base must not change the destination, run a launch that only checks before.
 */
template <int SIZE> __global__ void __launch_bounds__(32 * WARPS, 4) decode_delta(const codec_decoding *decodings)
{
	const uint32_t lane = threadIdx.x % 32;
	const codec_decoding &frame = decodings[blockIdx.y];

	if (!frame.view->nblocks) {
		const codec_view v = *frame.view;

		read_unchanged<SIZE>(frame, v, lane);
		return;
	}
	decode_blocks<1>(
		decodings, 0,
		[](const codec_decoding &d, const job *j, uint64_t b, const cursor &c, const pairs &, uint8_t *mine,
		   uint32_t lane, uint64_t *) { return read_delta<SIZE>(d, j->v, b, c, mine, lane); },
		[](const codec_decoding &d, const job *j, uint64_t b, uint32_t lane) {
			skip_delta<SIZE>(d, j->v, b, lane);
		});
}
