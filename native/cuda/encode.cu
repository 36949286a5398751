/* encode.cu - kernels that write frames. A warp does a block, then the next one that nobody has begun. */
#include "encode_lossless.cuh"
#include "encode_rows.cuh"
#include "encode_truncate.cuh"

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

/* The next block that nobody has begun; v->nblocks if there is none. */
DEVICE uint64_t next_block(codec_written *out, uint32_t lane)
{
	uint64_t b = lane == 0 ? atomicAdd(&out->ticket, 1u) : 0;

	return __shfl_sync(FULL, b, 0);
}

/* Block b's region of `size` bytes ends at `end`: its entry, and what it adds to what blocks share. */
static __device__ void put_entry(const codec_view *v, uint8_t *frame, uint64_t capacity, uint64_t b, uint64_t end,
				 uint64_t sealed, codec_written *out, uint32_t lane)
{
	if (end <= capacity && lane < 2)
		((uint32_t *)(frame + v->directory_offset + WIRE_DIRECTORY_ENTRY * b))[lane] =
			lane ? seal_short(sealed) : (uint32_t)(end / WIRE_ALIGN);
	if (lane == 0) {
		atomicAdd(&out->seal, (unsigned long long)sealed);
		if (end > capacity)
			atomicOr(&out->fault, (uint32_t)CODEC_SHORT_OUTPUT);
		if (b + 1 == v->nblocks)
			out->end = end;
	}
	__syncwarp();
}

/* A region of which only now is known where it belongs. */
static __device__ void put_region(const codec_view *v, uint8_t *frame, uint64_t capacity, uint64_t b,
				  const uint8_t *region, uint32_t size, uint64_t planes, unsigned long long *places,
				  codec_written *out, uint32_t lane)
{
	uint64_t at = v->regions_offset + look_back(places, b, size, lane), end = at + size;
	uint64_t sealed = seal_block(planes + digest_bytes(region, size, WIRE_SEED_REGION, lane), b);

	for (uint32_t i = lane; end <= capacity && i < size / 4; i += 32)
		((uint32_t *)(frame + at))[i] = ((const uint32_t *)region)[i];
	put_entry(v, frame, capacity, b, end, sealed, out, lane);
}

/*
 * Values, at a multiple of their size, to a frame's directory, fixed planes and regions, `capacity` bytes in all.
 * places: zeros, one a block. scratch: (2 SIZE + 1) planes, WORDS_ROOM and 64 bytes a warp.
 */
template <int SIZE>
DEVICE void encode_lossless(const codec_view &v, uint8_t *memory, const uint8_t *values, uint8_t *frame,
			    uint64_t capacity, uint8_t *scratch, unsigned long long *places, codec_written *out)
{
	const uint32_t room = (2 * SIZE + 1) * PLANE_ROOM + 4 * WORDS_ROOM + 64;
	uint32_t lane = threadIdx.x % 32;
	const job j = {v, memory};

	scratch += ((uint64_t)blockIdx.x * WARPS + threadIdx.x / 32) * room;
	uint8_t *region = scratch + (SIZE + 1) * PLANE_ROOM + 4 * WORDS_ROOM;

	for (uint64_t b; (b = next_block(out, lane)) < v.nblocks;) {
		uint64_t sealed = 0;
		uint32_t size = write_block<SIZE>(&j, memory, values, frame, b, scratch, region, &sealed, lane);

		put_region(&v, frame, capacity, b, region, size, sealed, places, out, lane);
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

/* The same for codecs of rows; scratch: two planes, WORDS_ROOM and 64 bytes a warp, with an entropy stage. */
extern "C" __global__ void __launch_bounds__(32 * WARPS)
	encode_rows(const codec_view v, uint8_t *memory, const uint8_t *values, uint8_t *frame, uint64_t capacity,
		    uint8_t *scratch, unsigned long long *places, codec_written *out)
{
	uint32_t lane = threadIdx.x % 32;
	const struct row_kind q = kind_of(&v);
	const job j = {v, memory};

	scratch += ((uint64_t)blockIdx.x * WARPS + threadIdx.x / 32) * (2 * PLANE_ROOM + 4 * WORDS_ROOM + 64);
	for (uint64_t b; (b = next_block(out, lane)) < v.nblocks;) {
		uint8_t *region = scratch + PLANE_ROOM + 4 * WORDS_ROOM;
		const row_place p = row_place_of(&j, q, b);
		uint64_t at = 0;
		uint32_t size = (uint32_t)row_region_nbytes(q, p.part->row, p.m);
		codec_status status = CODEC_OK;

		if (!q.entropy) { /* where it belongs is known before */
			at = v.regions_offset + look_back(places, b, size, lane);
			region = frame + at;
		}
		if (q.entropy || at + size <= capacity)
			status = write_rows(&j, values, b, scratch, region, &size, lane);
		if (lane == 0 && status != CODEC_OK)
			atomicOr(&out->fault, (uint32_t)status);
		if (q.entropy)
			put_region(&v, frame, capacity, b, region, status == CODEC_OK ? size : 8, 0, places, out, lane);
		else if (at + size <= capacity)
			put_entry(&v, frame, capacity, b, at + size,
				  seal_block(digest_bytes(region, size, WIRE_SEED_REGION, lane), b), out, lane);
		else
			put_entry(&v, frame, capacity, b, at + size, 0, out, lane);
	}
}

/* And for Truncate; scratch: CUT_PLANES + 8 planes and WORDS_ROOM a warp. `exponents`: of A, unless levels are fixed.
 */
extern "C" __global__ void __launch_bounds__(32 * WARPS)
	encode_truncate(const codec_view v, uint8_t *memory, const uint8_t *values, uint8_t *frame, uint64_t capacity,
			uint8_t *scratch, unsigned long long *places, codec_written *out, const uint8_t *exponents)
{
	uint32_t lane = threadIdx.x % 32;
	const job j = {v, memory};

	scratch += ((uint64_t)blockIdx.x * WARPS + threadIdx.x / 32) * ((CUT_PLANES + 8) * PLANE_ROOM + 4 * WORDS_ROOM);
	uint8_t *region = scratch + CUT_PLANES * PLANE_ROOM + 4 * WORDS_ROOM;

	for (uint64_t b; (b = next_block(out, lane)) < v.nblocks;) {
		uint32_t size = write_cut(&j, memory, values, exponents, b, scratch, region, lane);

		put_region(&v, frame, capacity, b, region, size, 0, places, out, lane);
	}
}

/* What must be known of a part before its first block: pieces of 4,096 values, a warp each, to the job's memory. */
extern "C" __global__ void __launch_bounds__(32 * WARPS)
	scan_rows(const codec_view v, uint8_t *memory, const uint8_t *values)
{
	const codec_row_part *part = (const codec_row_part *)(memory + v.row_parts.at);
	codec_row_sums *sums = (codec_row_sums *)(memory + v.row_sums.at);
	uint32_t lane = threadIdx.x % 32;

	for (uint64_t i = (uint64_t)blockIdx.x * WARPS + threadIdx.x / 32; i < v.row_sums.count;
	     i += (uint64_t)gridDim.x * WARPS) {
		uint64_t p = v.row_parts.count - 1;

		while (part[p].first_sum > i)
			p--;
		uint64_t from = (i - part[p].first_sum) * WIRE_TREE, n = part[p].count - from;
		codec_row_sums some =
			sums_of(&v, values, part[p].start + from, n < WIRE_TREE ? (uint32_t)n : WIRE_TREE, lane);

		if (lane == 0)
			sums[i] = some;
	}
}
