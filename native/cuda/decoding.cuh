/* decoding.cuh - frames that are read: what their kernels are given.
 *
 * Kernels take an array of them, for many frames at once: blockIdx.y says which one.
 */
#ifndef CODEC_DECODING_CUH
#define CODEC_DECODING_CUH

#include "job.cuh"
#include "sink.cuh"

/* What the blocks of a frame have found out together; all ones and zeros at first. */
struct codec_found {
	unsigned long long fault; /* block << 8 | status, of the first block at fault; ~0: none is */
	unsigned long long seal;  /* of blocks and directory; of a stored tensor, as block 0 */
	uint32_t done, reserved;  /* warps, where a tensor is stored */
};

struct codec_decoding {
	const codec_view *view; /* of a job by codec_decode_plan */
	const uint8_t *memory;  /* and its arrays */
	const uint8_t *frame;
	uint8_t *scratch;         /* for each warp */
	const uint8_t *exponents; /* of A, for all values of the tensor, where levels are shared */
	codec_found *found;
	codec_sink sink;
	uint32_t checks; /* of digests, too */
	uint32_t warps;  /* that have this to do, of a launch that may be for larger tensors */
};

#endif
