/* frame/decode.cuh - what kernels that read frames share. A warp does a block, then one that is as many blocks on as
 * there are warps.
 *
 * Kernels take an array of them, for many frames at once: blockIdx.y says which one.
 */
#ifndef CODEC_CUDA_FRAME_DECODE_CUH
#define CODEC_CUDA_FRAME_DECODE_CUH

#include "coder/decode.cuh"
#include "common/checksum.cuh"
#include "common/job.cuh"
#include "common/values.cuh"

/* What the blocks of a frame have found out together; all ones and zeros at first. */
struct codec_found {
	unsigned long long fault;    /* block << 8 | status, of the first block at fault; ~0: none is */
	unsigned long long checksum; /* of blocks and directory; of a stored tensor, as block 0 */
	uint32_t done, reserved;     /* warps, where a tensor is stored */
};

struct codec_decoding {
	const codec_view *view; /* of a job by codec_decode_plan */
	const uint8_t *memory;  /* and its arrays */
	const uint8_t *frame;
	uint8_t *scratch;         /* for each warp */
	const uint8_t *exponents; /* of A, for all values of the tensor, where levels are shared */
	codec_found *found;
	codec_sink sink;
	uint32_t checks; /* of digests, too */
	uint32_t warps;  /* that have this to do, of a launch that may be for larger tensors */
};

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

/* Block b's digest, from its bytes alone. */
static __device__ uint64_t digest_block(const codec_view *v, uint64_t b, const cursor *c, int size, uint32_t lane)
{
	uint64_t total = digest_bytes(here(c), left(c), WIRE_SEED_REGION, lane), at = v->planes_offset;

	for (int p = 0; p < size; p++)
		if (v->fixed >> p & 1) {
			total += digest_bytes(c->frame + at + b * v->block_nvalues, block_values(v, b),
					      WIRE_SEED_PLANE + p, lane);
			at += v->plane_stride;
		}
	return total;
}

DEVICE void report_fault(codec_found *found, uint64_t order, codec_status status, uint32_t lane)
{
	if (lane == 0 && status != CODEC_OK)
		atomicMin(&found->fault, (unsigned long long)(order << 8 | status));
}

/* This block's, near all of its threads. */
DEVICE const codec_decoding &decoding_of(const codec_decoding *decodings)
{
	__shared__ codec_decoding d;

	share(&d, decodings + blockIdx.y);
	return d;
}

/*
 * All blocks, or all of their checks, by read(decoding, job, block, cursor, pairs by so many bits, memory of the warp's
 * of so many bytes, lane, what to add digests of `size` planes to, those that are fixed).
 */
template <uint32_t PAIR_BITS, class F>
DEVICE void decode_blocks(const codec_decoding *decodings, uint64_t scratch_nbytes, int size, F read)
{
	__shared__ uint32_t entries[1 << PAIR_BITS];
	const codec_decoding &d = decoding_of(decodings);
	const job &j = share_job(d.view, d.memory);
	const codec_view &v = j.v;
	const uint8_t *frame = d.frame;
	codec_found *found = d.found;
	const pairs by = {entries, PAIR_BITS, v.coded ? (uint32_t)__ffs((int)v.coded) - 1 : WIRE_MAX_PLANES};
	uint32_t lane = threadIdx.x % 32;
	uint64_t warp = blockIdx.x * WARPS + threadIdx.x / 32, warps = d.warps;
	uint8_t *scratch = d.scratch + warp * scratch_nbytes;

	if (warp >= warps)
		return;
	if (v.coded)
		fill_pairs(by, table_of(&j, by.plane));
	__syncthreads();
	if (warp == 0)
		report_fault(found, 0, check_frame(&v, frame, lane), lane);
	for (uint64_t b = warp; b < v.nblocks; b += warps) {
		const uint8_t *entry = frame + v.directory_offset + WIRE_DIRECTORY_ENTRY * b;
		uint64_t checksum = 0;
		cursor c;
		codec_status status = open_region(&v, frame, b, &c);

		if (status != CODEC_OK) {
			report_fault(found, b + 1, status, lane);
			continue;
		}
		status = read(d, &j, b, c, by, scratch, lane, &checksum);
		if (d.checks) {
			if (status == CODEC_OK)
				checksum += digest_bytes(here(&c), left(&c), WIRE_SEED_REGION, lane);
			else /* not all of it was read */
				checksum = digest_block(&v, b, &c, size, lane);
			checksum = seal_block(checksum, b);
			if (load32(entry + 4) != seal_short(checksum))
				status = CODEC_CHECKSUM;
			if (b % ENTRIES == 0)
				checksum += digest_chunk(frame + v.directory_offset, WIRE_DIRECTORY_ENTRY * v.nblocks,
							 WIRE_SEED_DIRECTORY, b / ENTRIES, lane);
			if (lane == 0)
				atomicAdd(&found->checksum, (unsigned long long)checksum);
		}
		report_fault(found, b + 1, status, lane);
		__syncwarp();
	}
}

#endif
