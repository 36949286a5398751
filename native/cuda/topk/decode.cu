/* topk/decode.cu - kernel that decodes blocks of TopK's frames. */
#include "topk/decode.cuh"

/*
 * Kernel: decode blocks, one per warp, or only check them. Grid: (CTAs, frames). Values are stored while codes are
 * read. If an invalid frame must not change the destination, run a launch that only checks before.
 */
extern "C" __global__ void __launch_bounds__(32 * WARPS, 6) decode_topk(const codec_decoding *decodings)
{
	decode_blocks<1>(decodings, 0,
			 [](const codec_decoding &d, const job *j, uint64_t b, const cursor &c, const pairs &,
			    uint8_t *, uint32_t lane, uint64_t *) { return read_topk(d, j->v, b, c, lane); });
}
