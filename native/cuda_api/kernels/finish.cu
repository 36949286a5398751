/* finish.cu - kernels that write the results of a call, one thread for each tensor. */
#include "kernels/layout.cuh"
#include "codec/codec_cuda.h"

/* Kernel: write the codec_cuda_result of each encoded tensor. */
extern "C" __global__ void __launch_bounds__(128) finish_encode(const written_result *items, uint64_t count)
{
	const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;

	if (i >= count)
		return;
	const codec_written *w = (const codec_written *)items[i].written;

	*(codec_cuda_result *)items[i].result = {w->nbytes, w->fault, 0};
}

/*
 * Compare the computed digests of DELTA's base and result with the digests in the frame: return CODEC_OK if both are
 * equal.
 */
DEVICE uint32_t digests_status(const opened *o, const found *f)
{
	if (f->base != o->base)
		return f->base == o->result ? CODEC_ALREADY_APPLIED : CODEC_OTHER_BASE;
	return f->result == o->result ? CODEC_OK : CODEC_CHECKSUM;
}

/*
 * Return the status of a frame whose blocks were decoded or checked, and set *block to 1 + the index of the block that
 * caused it. If the base is not the one that the frame was encoded against, invalid changes are not errors of the
 * frame: then only bad directory entries and checksums (f->damage) are reported.
 */
DEVICE uint32_t found_status(const opened *o, const found *f, uint32_t *block)
{
	const bool invalid = f->fault != ~0ull && (f->fault & 255) == CODEC_OTHER_BASE;
	const uint64_t fault = invalid && f->base != o->base ? ~f->damage : f->fault, order = fault >> 8;

	*block = 0;
	if (o->status)
		return o->status;
	if (fault == ~0ull) /* for codecs other than DELTA, all digests are 0 */
		return f->checksum + o->head_checksum == o->checksum ? digests_status(o, f) : (uint32_t)CODEC_CHECKSUM;
	*block = order > 0xffffffffu ? 0xffffffffu : (uint32_t)order;
	return invalid && f->base == o->base ? (uint32_t)CODEC_BAD_REGION : (uint32_t)fault & 255;
}

/*
 * Kernel: write the codec_cuda_result of each decoded frame. If `checked`, write the results of a launch that only
 * checked: later launches decode the frames without a fault, and do not verify checksums again.
 */
extern "C" __global__ void __launch_bounds__(128) finish_decode(const opening *items, uint64_t count, uint32_t checked)
{
	const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;

	if (i >= count)
		return;
	const opening *a = items + i;
	opened *o = (opened *)a->opened;
	uint32_t block, status = found_status(o, (const found *)a->found, &block);

	if (!checked && o->status && a->checking[0]) /* finish_decode wrote the result of this frame after the check */
		return;
	if (checked && status == CODEC_OK) {
		((decoding *)a->decoding[o->decoder])->warps = a->warps[o->decoder];
		return;
	}
	if (checked)
		o->status = status;
	*(codec_cuda_result *)a->result = {status ? 0 : o->frame_nbytes, status, block};
}
