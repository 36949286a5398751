/* encoding.cuh - frames that are being made: what their kernels are given.
 *
 * Kernels take an array of them, for many tensors at once: blockIdx.y says which one.
 */
#ifndef CODEC_ENCODING_CUH
#define CODEC_ENCODING_CUH

#include "job.cuh"
#include "sink.cuh"

/* What blocks of a frame share; zeros at first. */
struct codec_written {
	unsigned long long seal;   /* the sum of seals: of blocks, at last of all but the header */
	unsigned long long end;    /* of the last region */
	unsigned long long stored; /* digest of the tensor as it is */
	unsigned long long nbytes; /* of the frame, at last */
	uint32_t ticket, closed;   /* blocks begun; warps that have closed */
	uint32_t fault, reserved;  /* a status */
};

/* How many bits each value may lose: by the exponents of A or by levels. NULL: the other; levels are fixed. */
struct codec_cuts {
	const uint8_t *exponents, *levels;
};

struct codec_choice;

struct codec_encoding {
	codec_view *view; /* of a job by codec_encode_plan */
	uint8_t *memory;  /* and its memory */
	codec_source source;
	uint8_t *frame;
	uint64_t capacity;   /* bytes */
	uint8_t *scratch;    /* for each warp */
	uint64_t each;       /* so many bytes: what encode_*_nbytes say, and the largest region that there can be */
	codec_choice *found; /* zeros */
	const uint8_t *head; /* by codec_encode_head of the job */
	unsigned long long *places; /* zeros, one a block */
	codec_written *out;
	codec_cuts by;
	uint32_t nparts; /* of the model as planned */
	uint32_t warps; /* that there is scratch for: others, of a launch for larger tensors, have nothing to do here */
};

/* This block's, near all of its threads. */
DEVICE const codec_encoding &encoding_of(const codec_encoding *encodings)
{
	__shared__ codec_encoding e;

	share(&e, encodings + blockIdx.y);
	return e;
}

#endif
