/*
 * frame/encode.cuh - arguments of encoding kernels, and computation of the offsets of blocks in the frame.
 *
 * A launch encodes many tensors: the grid is (CTAs, frames), and blockIdx.y selects a codec_encoding. Each warp claims
 * the next block of its frame that no warp has claimed. The offset of a region is the sum of the sizes of all regions
 * before it, which warps publish to each other (look_back).
 */
#ifndef CODEC_CUDA_FRAME_ENCODE_CUH
#define CODEC_CUDA_FRAME_ENCODE_CUH

#include "common/checksum.cuh"
#include "common/job.cuh"
#include "common/scratch.cuh"
#include "common/values.cuh"

/* Result of encoding a frame, and counters that its warps share. All fields are 0 before the launch. */
struct codec_written {
	/* sum of the checksums of blocks; close_frame adds the checksums of the other sections */
	unsigned long long checksum;
	unsigned long long end; /* offset in the frame of the last region's end */
	/* sum of the checksums of a stored tensor's chunks, or of the frame of an unchanged tensor (Delta) */
	unsigned long long stored;
	unsigned long long nbytes; /* bytes of the frame; set by close_frame */
	uint32_t ticket,
		closed; /* number of blocks that warps have claimed; number of CTAs that have finished close_frame */
	/* fault: a codec_status; changed: Delta, 1 if a value differs from the base */
	uint32_t fault, changed;
	unsigned long long base, result; /* Delta: digests of base and result, summed over blocks */
};

/*
 * Inputs of the encoder besides the tensor. Truncate: the metric's `exponents` of A, or `levels`, one byte per value,
 * determine how many bits of each value are dropped; if both are NULL, all values have the level of the spec. Delta:
 * `base`, values at an address that is a multiple of their size.
 */
struct codec_cuts {
	union {
		const uint8_t *exponents, *base;
	};
	const uint8_t *levels;
};

struct codec_choice;

/* Arguments of encoding kernels for one tensor. */
struct codec_encoding {
	codec_view *view; /* view of a job planned by codec_encode_plan */
	uint8_t *memory;  /* arrays of the view */
	codec_source source;
	uint8_t *frame;
	uint64_t capacity;          /* size in bytes of the memory at `frame` */
	codec_units scratch;        /* scratch memory; encode_*_nbytes has the size of a unit */
	codec_choice *found;        /* 0 before the launch; followed by codec_part_found of each part */
	const uint8_t *head;        /* header of the planned job, from codec_encode_head */
	unsigned long long *places; /* one entry per block, 0 before the launch: see look_back */
	codec_written *out;
	codec_cuts by;
	uint32_t nparts; /* number of parts of the planned scale model */
	uint32_t warps;  /* number of warps that work on this frame; other warps of the launch are idle */
};

/* Copy the codec_encoding of the CTA's tensor to shared memory, and return it. */
DEVICE const codec_encoding &encoding_of(const codec_encoding *encodings)
{
	__shared__ codec_encoding e;

	share(&e, encodings + blockIdx.y);
	return e;
}

#define WARPS 4 /* number of warps per CTA of kernels that encode or decode blocks */

#define PLACE_KNOWN (1ull << 62)  /* flag of an entry of `places`: the entry has the size of the block's region */
#define PLACE_SUMMED (2ull << 62) /* flag: the entry has the sum of region sizes up to and including the block */

/*
 * Publish that block b's region has `mine` bytes, and return the total size in bytes of all regions before it. This is
 * a decoupled look-back: it walks back over earlier blocks, 32 at a time, until a block has published its prefix sum.
 * Warps claim blocks in order, so that all blocks before b belong to running warps, and the wait ends.
 */
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

/* Claim the next block that no warp has claimed, and return its index; v->nblocks or more if none is left. */
DEVICE uint64_t next_block(codec_written *out, uint32_t lane)
{
	uint64_t b = lane == 0 ? atomicAdd(&out->ticket, 1u) : 0;

	return __shfl_sync(FULL, b, 0);
}

/*
 * Write the directory entry of block b, whose region ends at offset `end` of the frame and whose checksum is
 * `checksum`. If the frame's capacity is exceeded, write nothing and set the fault to CODEC_SHORT_OUTPUT.
 */
static __device__ void put_entry(const codec_view *v, const codec_encoding &e, uint64_t b, uint64_t end,
				 uint64_t checksum, uint32_t lane)
{
	if (end <= e.capacity && lane < 2)
		((uint32_t *)(e.frame + v->directory_offset + WIRE_DIRECTORY_ENTRY * b))[lane] =
			lane ? checksum_short(checksum) : (uint32_t)(end / WIRE_ALIGN);
	if (lane == 0) {
		atomicAdd(&e.out->checksum, (unsigned long long)checksum);
		if (end > e.capacity || end / WIRE_ALIGN > 0xffffffffu)
			atomicMax(&e.out->fault, (uint32_t)(end > e.capacity ? CODEC_SHORT_OUTPUT : CODEC_LIMIT));
		if (b + 1 == v->nblocks)
			e.out->end = end;
	}
	__syncwarp();
}

/* Copy a finished region of `size` bytes from scratch to its place in the frame. */
static __device__ void put_region(const codec_view *v, const codec_encoding &e, uint64_t b, const uint8_t *region,
				  uint32_t size, uint32_t lane)
{
	uint64_t at = v->regions_offset + look_back(e.places, b, size, lane), end = at + size;
	uint64_t checksum = checksum_of_block(digest_bytes(region, size, WIRE_SEED_REGION, lane), b);

	if (end <= e.capacity)
		copy_bytes(e.frame + at, region, size, lane);
	put_entry(v, e, b, end, checksum, lane);
}

#endif
