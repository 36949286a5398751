/* lossless/encode.cu - kernels that encode blocks of lossless frames, one block per warp. */
#include "lossless/encode.cuh"

/*
 * Kernel: encode blocks of any dtype; for floats of two and four bytes, encode_fast.cu is used instead. Values must be
 * aligned to their size. Grid: (CTAs, frames).
 */
template <int SIZE> __global__ void __launch_bounds__(32 * WARPS, 4) encode_lossless(const codec_encoding *encodings)
{
	__shared__ uint32_t codes[256 * SIZE];
	__shared__ uint64_t rooms[WARPS][ROOM_WORDS(SIZE) / 2];

	encode_blocks<SIZE, (SIZE > 4)>(
		encodings, codes, [&](uint32_t w) { return (uint32_t *)rooms[w]; },
		[](const job &, uint64_t, uint32_t, const uint8_t *, uint8_t *, coding *, digest *, common *, place *,
		   uint32_t, uint32_t) { return 0u; });
}
