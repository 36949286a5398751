/* job.c - access a frame's blocks through a job. */
#include "job.h"

#include "frame/frame.h"

codec_status job_block(const struct job *j, const uint8_t *frame, const codec_context *with, uint64_t b, uint64_t *at,
		       uint64_t *end, uint64_t *checksum)
{
	TRY(frame_region(frame, &j->h, b, at, end, with->fault));
	if (j->checked || with->flags & CODEC_NO_CHECKSUM)
		return CODEC_OK;
	return frame_check_block(frame, &j->h, kernels_for(with), b, *at, *end, checksum, with->fault);
}
