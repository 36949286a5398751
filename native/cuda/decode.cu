/* decode.cu - kernels that read frames. A warp does a block, then one that is as many blocks on as there are warps. */
#include "lossless.cuh"
#include "rows.cuh"
#include "truncate.cuh"

#define WARPS 4
#define ENTRIES (WIRE_CHUNK_WORDS / 2) /* of the directory, in a chunk of its digest */

/* All but a block's own: the directory's last entry, what fixed planes are filled up with. By one warp. */
static __device__ codec_status check_frame(const codec_view *v, const uint8_t *frame, uint32_t lane)
{
	const uint8_t *last = frame + v->directory_offset + WIRE_DIRECTORY_ENTRY * (v->nblocks - 1);
	bool bad = false;

	if ((uint64_t)WIRE_ALIGN * load32(last) != v->frame_nbytes)
		return CODEC_BAD_DIRECTORY;
	for (uint64_t p = v->planes_offset; p < v->regions_offset; p += v->plane_stride)
		bad |= v->n + lane < v->plane_stride && frame[p + v->n + lane];
	return __any_sync(FULL, bad) ? CODEC_BAD_HEADER : CODEC_OK;
}

DEVICE void blame(codec_found *found, uint64_t order, codec_status status, uint32_t lane)
{
	if (lane == 0 && status != CODEC_OK)
		atomicMin(&found->fault, (unsigned long long)(order << 8 | status));
}

/*
 * All blocks, or all of their checks, by read(job, block, cursor, table of pairs and its plane, memory of the warp's,
 * lane, what to add fixed planes' digests to). `checks`: of digests, too.
 */
template <class F>
DEVICE void decode_blocks(const codec_view &v, const uint8_t *memory, const uint8_t *frame, uint8_t *scratch,
			  uint64_t scratch_nbytes, uint32_t checks, codec_found *found, int size, F read)
{
	__shared__ uint32_t pair[1 << PAIR_BITS];
	uint32_t lane = threadIdx.x % 32, paired = v.coded ? (uint32_t)__ffs((int)v.coded) - 1 : WIRE_MAX_PLANES;
	uint64_t warp = blockIdx.x * WARPS + threadIdx.x / 32, warps = (uint64_t)gridDim.x * WARPS;
	const job j = {v, memory};

	if (v.coded)
		fill_pairs(pair, table_of(&j, paired));
	__syncthreads();
	scratch += warp * scratch_nbytes;
	if (warp == 0)
		blame(found, 0, check_frame(&v, frame, lane), lane);
	for (uint64_t b = warp; b < v.nblocks; b += warps) {
		const uint8_t *entry = frame + v.directory_offset + WIRE_DIRECTORY_ENTRY * b;
		uint64_t sealed = 0;
		cursor c;
		codec_status status = open_region(&v, frame, b, &c);

		if (status != CODEC_OK) {
			blame(found, b + 1, status, lane);
			continue;
		}
		status = read(&j, b, c, pair, paired, scratch, lane, &sealed);
		if (checks) {
			if (status == CODEC_OK)
				sealed += digest_bytes(here(&c), left(&c), WIRE_SEED_REGION, lane);
			else /* not all of it was read */
				sealed = digest_block(&v, b, &c, size, lane);
			sealed = seal_block(sealed, b);
			if (load32(entry + 4) != seal_short(sealed))
				status = CODEC_CHECKSUM;
			if (b % ENTRIES == 0)
				sealed += digest_chunk(frame + v.directory_offset, WIRE_DIRECTORY_ENTRY * v.nblocks,
						       WIRE_SEED_DIRECTORY, b / ENTRIES, lane);
			if (lane == 0)
				atomicAdd(&found->seal, (unsigned long long)sealed);
		}
		blame(found, b + 1, status, lane);
		__syncwarp();
	}
}

#define DECODE_LOSSLESS(size)                                                                                          \
	extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                       \
		decode_lossless##size(const codec_view v, const uint8_t *memory, const uint8_t *frame,                 \
				      uint8_t *scratch, const codec_sink sink, uint32_t checks, codec_found *found)    \
	{                                                                                                              \
		decode_blocks(v, memory, frame, scratch, (size + 1) * PLANE_ROOM, checks, found, size,                 \
			      [&](const job *j, uint64_t b, cursor c, const uint32_t *pair, uint32_t paired,           \
				  uint8_t *mine, uint32_t lane, uint64_t *sealed) {                                    \
				      return read_block<size>(j, b, c, pair, paired, mine, &sink, checks, sealed,      \
							      lane);                                                   \
			      });                                                                                      \
	}
DECODE_LOSSLESS(1)
DECODE_LOSSLESS(2)
DECODE_LOSSLESS(4)
DECODE_LOSSLESS(8)

#define DECODE_ROWS(name, codec)                                                                                       \
	extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                       \
		name(const codec_view v, const uint8_t *memory, const uint8_t *frame, uint8_t *scratch,                \
		     const codec_sink sink, uint32_t checks, codec_found *found)                                       \
	{                                                                                                              \
		decode_blocks(v, memory, frame, scratch, PLANE_ROOM, checks, found, 0,                                 \
			      [&](const job *j, uint64_t b, cursor c, const uint32_t *pair, uint32_t, uint8_t *mine,   \
				  uint32_t lane,                                                                       \
				  uint64_t *) { return read_rows<codec>(j, b, c, pair, mine, &sink, lane); });         \
	}
DECODE_ROWS(decode_sign, WIRE_CODEC_SIGN)
DECODE_ROWS(decode_ternary, WIRE_CODEC_TERNARY)
DECODE_ROWS(decode_float8, WIRE_CODEC_FLOAT8)
DECODE_ROWS(decode_float4, WIRE_CODEC_FLOAT4)
DECODE_ROWS(decode_quantize, WIRE_CODEC_QUANTIZE)

/* `exponents`: of A, for all values of the tensor, where levels are shared. */
extern "C" __global__ void __launch_bounds__(32 * WARPS)
	decode_truncate(const codec_view v, const uint8_t *memory, const uint8_t *frame, uint8_t *scratch,
			const codec_sink sink, uint32_t checks, codec_found *found, const uint8_t *exponents)
{
	decode_blocks(v, memory, frame, scratch, 2 * PLANE_ROOM, checks, found, 0,
		      [&](const job *j, uint64_t b, cursor c, const uint32_t *pair, uint32_t, uint8_t *mine,
			  uint32_t lane, uint64_t *) { return read_cut(j, b, c, pair, mine, exponents, &sink, lane); });
}

/* Value i of a stored tensor of values of so many bytes. */
template <int SIZE>
DEVICE void put_stored(const codec_view &v, const uint8_t *frame, const codec_sink &sink, uint64_t i)
{
	const uint8_t *p = frame + v.side_offset + SIZE * i;
	uint64_t x = load_bytes(p, SIZE < 4 ? SIZE : 4);

	if (SIZE == 8)
		x |= (uint64_t)load_bytes(p + 4, 4) << 32;
	put_bits<SIZE>(&sink, v.dtype, i, x);
}

/* A tensor that is stored, or its check alone. */
extern "C" __global__ void __launch_bounds__(32 * WARPS)
	decode_stored(const codec_view v, const uint8_t *frame, const codec_sink sink, uint32_t checks,
		      codec_found *found)
{
	const uint64_t nbytes = v.frame_nbytes - v.side_offset, chunk = 4 * WIRE_CHUNK_WORDS,
		       size = v.n ? nbytes / v.n : 1;
	const uint64_t warp = blockIdx.x * WARPS + threadIdx.x / 32, warps = (uint64_t)gridDim.x * WARPS;
	const uint32_t lane = threadIdx.x % 32;
	uint64_t digest = 0;

	for (uint64_t i = warp; checks && chunk * i < nbytes; i += warps)
		digest += digest_chunk(frame + v.side_offset, nbytes, WIRE_SEED_REGION, i, lane);
	for (uint64_t i = 32 * warp + lane; sink.data && i < v.n; i += 32 * warps)
		size == 1   ? put_stored<1>(v, frame, sink, i)
		: size == 2 ? put_stored<2>(v, frame, sink, i)
		: size == 4 ? put_stored<4>(v, frame, sink, i)
			    : put_stored<8>(v, frame, sink, i);
	if (lane)
		return;
	atomicAdd(&found->seal, (unsigned long long)digest);
	__threadfence();
	if (atomicAdd(&found->done, 1u) == warps - 1) {
		__threadfence();
		found->seal = seal_block(((volatile codec_found *)found)->seal, 0);
	}
}
