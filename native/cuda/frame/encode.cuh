/* frame/encode.cuh - what kernels that write frames share. A warp does a block, then the next one that nobody has
 * begun.
 *
 * Kernels take an array of them, for many tensors at once: blockIdx.y says which one.
 */
#ifndef CODEC_CUDA_FRAME_ENCODE_CUH
#define CODEC_CUDA_FRAME_ENCODE_CUH

#include "common/checksum.cuh"
#include "common/job.cuh"
#include "common/values.cuh"

/* What blocks of a frame share; zeros at first. */
struct codec_written {
	unsigned long long checksum; /* the sum of seals: of blocks, at last of all but the header */
	unsigned long long end;      /* of the last region */
	unsigned long long stored;   /* digest of the tensor as it is */
	unsigned long long nbytes;   /* of the frame, at last */
	uint32_t ticket, closed;     /* blocks begun; warps that have closed */
	uint32_t fault, reserved;    /* a status */
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

#define WARPS 4

#define PLACE_KNOWN (1ull << 62)  /* what a block takes is known */
#define PLACE_SUMMED (2ull << 62) /* and what all up to it take */

/* What blocks before b take. They publish it, and their sum as soon as it is known. */
static __device__ uint64_t look_back(volatile unsigned long long *places, uint64_t b, uint64_t mine, uint32_t lane)
{
	const unsigned long long mask = PLACE_KNOWN - 1;
	uint64_t before = 0;

	if (lane == 0)
		places[b] = (b ? PLACE_KNOWN : PLACE_SUMMED) | mine;
	for (int64_t i = (int64_t)b - 1 - lane;; i -= 32) {
		unsigned long long s;

		do
			s = i >= 0 ? places[i] : PLACE_SUMMED;
		while (__any_sync(FULL, !(s >> 62)));
		uint32_t summed = __ballot_sync(FULL, s >> 63 != 0),
			 last = summed ? (uint32_t)__ffs((int)summed) - 1 : 31;

		before += warp_sum((uint64_t)(lane <= last ? s & mask : 0));
		if (summed)
			break;
	}
	if (lane == 0 && b)
		places[b] = PLACE_SUMMED | (before + mine);
	return before;
}

/* This warp's. */
DEVICE uint8_t *scratch_of(const codec_encoding &e)
{
	return e.scratch + ((uint64_t)blockIdx.x * WARPS + threadIdx.x / 32) * e.each;
}

/* The next block that nobody has begun; v->nblocks if there is none. */
DEVICE uint64_t next_block(codec_written *out, uint32_t lane)
{
	uint64_t b = lane == 0 ? atomicAdd(&out->ticket, 1u) : 0;

	return __shfl_sync(FULL, b, 0);
}

/* Block b's region of `size` bytes ends at `end`: its entry, and what it adds to what blocks share. */
static __device__ void put_entry(const codec_view *v, const codec_encoding &e, uint64_t b, uint64_t end,
				 uint64_t checksum, uint32_t lane)
{
	if (end <= e.capacity && lane < 2)
		((uint32_t *)(e.frame + v->directory_offset + WIRE_DIRECTORY_ENTRY * b))[lane] =
			lane ? seal_short(checksum) : (uint32_t)(end / WIRE_ALIGN);
	if (lane == 0) {
		atomicAdd(&e.out->checksum, (unsigned long long)checksum);
		if (end > e.capacity || end / WIRE_ALIGN > 0xffffffffu)
			atomicMax(&e.out->fault, (uint32_t)(end > e.capacity ? CODEC_SHORT_OUTPUT : CODEC_LIMIT));
		if (b + 1 == v->nblocks)
			e.out->end = end;
	}
	__syncwarp();
}

/* A region of which only now is known where it belongs. */
static __device__ void put_region(const codec_view *v, const codec_encoding &e, uint64_t b, const uint8_t *region,
				  uint32_t size, uint64_t planes, uint32_t lane)
{
	uint64_t at = v->regions_offset + look_back(e.places, b, size, lane), end = at + size;
	uint64_t checksum = seal_block(planes + digest_bytes(region, size, WIRE_SEED_REGION, lane), b);

	for (uint32_t i = lane; end <= e.capacity && i < size / 4; i += 32)
		((uint32_t *)(e.frame + at))[i] = ((const uint32_t *)region)[i];
	put_entry(v, e, b, end, checksum, lane);
}

#endif
