/* encode.cu - kernels that write frames. A warp does a block, then the next one that nobody has begun. */
#include "encode_lossless.cuh"

#define WARPS 4

/* What blocks of a frame share; zeros at first. */
struct codec_written {
	unsigned long long seal; /* the sum of blocks' seals */
	unsigned long long end;  /* of the last region */
	uint32_t ticket, fault;  /* blocks begun; a status */
};

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

		before += warp_sum(lane <= last ? s & mask : 0);
		if (summed)
			break;
	}
	if (lane == 0 && b)
		places[b] = PLACE_SUMMED | (before + mine);
	return before;
}

/*
 * Values, at a multiple of their size, to a frame's directory, fixed planes and regions, `capacity` bytes in all.
 * places: zeros, one a block. scratch: scratch_nbytes(SIZE) a warp.
 */
template <int SIZE>
DEVICE void encode_lossless(const codec_view &v, uint8_t *memory, const uint8_t *values, uint8_t *frame,
			    uint64_t capacity, uint8_t *scratch, unsigned long long *places, codec_written *out)
{
	const uint32_t room = (SIZE + 1) * PLANE_ROOM + 4 * WORDS_ROOM + SIZE * PLANE_ROOM + 64;
	uint32_t lane = threadIdx.x % 32;
	const job j = {v, memory};

	scratch += ((uint64_t)blockIdx.x * WARPS + threadIdx.x / 32) * room;
	uint8_t *region = scratch + (SIZE + 1) * PLANE_ROOM + 4 * WORDS_ROOM;

	for (;;) {
		uint64_t b = lane == 0 ? atomicAdd(&out->ticket, 1u) : 0, sealed = 0;

		b = __shfl_sync(FULL, b, 0);
		if (b >= v.nblocks)
			break;
		uint32_t size = write_block<SIZE>(&j, memory, values, frame, b, scratch, region, &sealed, lane);
		uint64_t at = v.regions_offset + look_back(places, b, size, lane), end = at + size;

		sealed = seal_block(sealed + digest_bytes(region, size, WIRE_SEED_REGION, lane), b);
		if (end <= capacity) {
			for (uint32_t i = lane; i < size / 4; i += 32)
				((uint32_t *)(frame + at))[i] = ((const uint32_t *)region)[i];
			if (lane < 2)
				((uint32_t *)(frame + v.directory_offset + WIRE_DIRECTORY_ENTRY * b))[lane] =
					lane ? seal_short(sealed) : (uint32_t)(end / WIRE_ALIGN);
		}
		if (lane == 0) {
			atomicAdd(&out->seal, (unsigned long long)sealed);
			if (end > capacity)
				atomicOr(&out->fault, (uint32_t)CODEC_SHORT_OUTPUT);
			if (b + 1 == v.nblocks)
				out->end = end;
		}
		__syncwarp();
	}
}

#define ENCODE_LOSSLESS(size)                                                                                          \
	extern "C" __global__ void __launch_bounds__(32 * WARPS) encode_lossless##size(                                \
		const codec_view v, uint8_t *memory, const uint8_t *values, uint8_t *frame, uint64_t capacity,         \
		uint8_t *scratch, unsigned long long *places, codec_written *out)                                      \
	{                                                                                                              \
		encode_lossless<size>(v, memory, values, frame, capacity, scratch, places, out);                       \
	}
ENCODE_LOSSLESS(1)
ENCODE_LOSSLESS(2)
ENCODE_LOSSLESS(4)
ENCODE_LOSSLESS(8)
