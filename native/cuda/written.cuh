/* written.cuh - what blocks of a frame that is being written share. */
#ifndef CODEC_WRITTEN_CUH
#define CODEC_WRITTEN_CUH

#include "warp.cuh"

/* Zeros at first. */
struct codec_written {
	unsigned long long seal;   /* the sum of seals: of blocks, at last of all but the header */
	unsigned long long end;    /* of the last region */
	unsigned long long stored; /* digest of the tensor as it is */
	unsigned long long nbytes; /* of the frame, at last */
	uint32_t ticket, closed;   /* blocks begun; warps that have closed */
	uint32_t fault, reserved;  /* a status */
};

#endif
