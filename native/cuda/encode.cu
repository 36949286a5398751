/* encode.cu - kernels that write frames. A warp does a block, then the next one that nobody has begun. */
#include "encode_lossless.cuh"
#include "encode_rows.cuh"
#include "encode_truncate.cuh"
#include "written.cuh"

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
		if (end > capacity || end / WIRE_ALIGN > 0xffffffffu)
			atomicMax(&out->fault, (uint32_t)(end > capacity ? CODEC_SHORT_OUTPUT : CODEC_LIMIT));
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
 * Sizes, for whoever launches: a warp's scratch, of lossless frames by the log2 of a value's size, of rows, of cut
 * mantissas; to which a region comes, the largest that there can be.
 */
#define LOSSLESS_ROOM(size) (((size) + 1) * PLANE_ROOM + 4 * WORDS_ROOM)
#define ROWS_ROOM (PLANE_ROOM + 4 * WORDS_ROOM)
#define CUT_ROOM (CUT_PLANES * PLANE_ROOM + 4 * WORDS_ROOM)
extern "C" __device__ const uint64_t encode_nbytes[] = {LOSSLESS_ROOM(1), LOSSLESS_ROOM(2), LOSSLESS_ROOM(4),
							LOSSLESS_ROOM(8), ROWS_ROOM,        CUT_ROOM};

/*
 * Values, at a multiple of their size, to a frame's directory, fixed planes and regions, `capacity` bytes in all.
 * places: zeros, one a block. scratch: so many bytes a warp.
 */
template <int SIZE>
DEVICE void encode_lossless(const codec_view &view, uint8_t *memory, const uint8_t *values, uint8_t *frame,
			    uint64_t capacity, uint8_t *scratch, uint64_t scratch_nbytes, unsigned long long *places,
			    codec_written *out)
{
	uint32_t lane = threadIdx.x % 32;
	const job j = {view, memory};
	const codec_view &v = j.v;

	scratch += ((uint64_t)blockIdx.x * WARPS + threadIdx.x / 32) * scratch_nbytes;
	uint8_t *region = scratch + LOSSLESS_ROOM(SIZE);

	for (uint64_t b; (b = next_block(out, lane)) < v.nblocks;) {
		uint64_t sealed = 0;
		uint32_t size = write_block<SIZE>(&j, memory, values, frame, b, scratch, region, &sealed, lane);

		put_region(&v, frame, capacity, b, region, size, sealed, places, out, lane);
	}
}

#define ENCODE_LOSSLESS(size)                                                                                          \
	extern "C" __global__ void __launch_bounds__(32 * WARPS) encode_lossless##size(                                \
		const codec_view *view, uint8_t *memory, const uint8_t *values, uint8_t *frame, uint64_t capacity,     \
		uint8_t *scratch, uint64_t scratch_nbytes, unsigned long long *places, codec_written *out)             \
	{                                                                                                              \
		encode_lossless<size>(*view, memory, values, frame, capacity, scratch, scratch_nbytes, places, out);   \
	}
ENCODE_LOSSLESS(1)
ENCODE_LOSSLESS(2)
ENCODE_LOSSLESS(4)
ENCODE_LOSSLESS(8)

/* The same for codecs of rows, which need scratch for an entropy stage only. */
extern "C" __global__ void __launch_bounds__(32 * WARPS)
	encode_rows(const codec_view *view, uint8_t *memory, const codec_source source, uint8_t *frame,
		    uint64_t capacity, uint8_t *scratch, uint64_t scratch_nbytes, unsigned long long *places,
		    codec_written *out)
{
	uint32_t lane = threadIdx.x % 32;
	const job j = {*view, memory};
	const codec_view &v = j.v;
	const struct row_kind q = kind_of(&v);

	scratch += ((uint64_t)blockIdx.x * WARPS + threadIdx.x / 32) * scratch_nbytes;
	for (uint64_t b; (b = next_block(out, lane)) < v.nblocks;) {
		uint8_t *region = scratch + ROWS_ROOM;
		const row_place p = row_place_of(&j, q, b);
		uint64_t at = 0;
		uint32_t size = (uint32_t)row_region_nbytes(q, p.part->row, p.m);
		codec_status status = CODEC_OK;

		if (!q.entropy) { /* where it belongs is known before */
			at = v.regions_offset + look_back(places, b, size, lane);
			region = frame + at;
		}
		if (q.entropy || at + size <= capacity)
			status = write_rows(&j, &source, b, scratch, region, &size, lane);
		if (lane == 0 && status != CODEC_OK)
			atomicMax(&out->fault, (uint32_t)status);
		if (q.entropy)
			put_region(&v, frame, capacity, b, region, status == CODEC_OK ? size : 8, 0, places, out, lane);
		else if (at + size <= capacity)
			put_entry(&v, frame, capacity, b, at + size,
				  seal_block(digest_bytes(region, size, WIRE_SEED_REGION, lane), b), out, lane);
		else
			put_entry(&v, frame, capacity, b, at + size, 0, out, lane);
	}
}

/* And for Truncate. The residual is not an array of the source. */
extern "C" __global__ void __launch_bounds__(32 * WARPS)
	encode_truncate(const codec_view *view, uint8_t *memory, const codec_source source, uint8_t *frame,
			uint64_t capacity, uint8_t *scratch, uint64_t scratch_nbytes, unsigned long long *places,
			codec_written *out, const codec_cuts by)
{
	uint32_t lane = threadIdx.x % 32;
	const job j = {*view, memory};
	const codec_view &v = j.v;

	scratch += ((uint64_t)blockIdx.x * WARPS + threadIdx.x / 32) * scratch_nbytes;
	uint8_t *region = scratch + CUT_ROOM;

	for (uint64_t b; (b = next_block(out, lane)) < v.nblocks;) {
		uint32_t size = write_cut(&j, memory, &source, by, b, scratch, region, lane);

		put_region(&v, frame, capacity, b, region, size, 0, places, out, lane);
	}
}
