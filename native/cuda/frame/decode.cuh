/*
 * frame/decode.cuh - arguments of decoding kernels, and the loop over blocks that they share.
 *
 * A launch decodes many frames: the grid is (CTAs, frames), and blockIdx.y selects a codec_decoding. Warp w decodes
 * blocks w, w + warps, w + 2 * warps, ... of its frame.
 */
#ifndef CODEC_CUDA_FRAME_DECODE_CUH
#define CODEC_CUDA_FRAME_DECODE_CUH

#include "coder/plane.cuh"
#include "common/checksum.cuh"
#include "common/job.cuh"
#include "common/scratch.cuh"
#include "common/values.cuh"

/* Result of decoding a frame. Before the launch, all bits of `fault` are 1 and all other fields are 0. */
struct codec_found {
	/* (index + 1) << 8 | status, of the first invalid block; a status alone: the frame is invalid; ~0: no error */
	unsigned long long fault;
	/* sum of the checksums of blocks and directory; stored tensors: the frame's checksum */
	unsigned long long checksum;
	uint32_t done, reserved;         /* stored tensors: number of warps that have finished */
	unsigned long long base, result; /* Delta: digests of base and result */
	/* complement of the `fault` of the first block with a bad directory entry or checksum; 0: none */
	unsigned long long damage;
};

/*
 * Delta: lists of changes, written by a launch that only checks, and read by the next launch, which writes values. This
 * struct is followed by one record per block, 0 before the first launch, and then by the entries. A block whose record
 * is 0 has no list and is decoded again.
 */
struct codec_lists {
	unsigned long long used; /* number of entries that blocks have reserved; 0 before the first launch */
	uint64_t room;           /* capacity in entries */
};

/* Arguments of decoding kernels for one frame. */
struct codec_decoding {
	const codec_view *view; /* view of a job made by codec_decode_plan */
	const uint8_t *memory;  /* arrays of the view */
	const uint8_t *frame;
	codec_units scratch; /* scratch memory; decode_*_nbytes has the size of a unit */
	union {
		const uint8_t *exponents; /* Truncate, shared levels: exponents of the metric A, one byte per value */
		/* Delta: base values, at a multiple of the size of a value; may be sink.data */
		const uint8_t *base;
	};
	codec_found *found;
	codec_sink sink;
	uint32_t checks;    /* not 0: verify checksums */
	uint32_t warps;     /* number of warps that work on this frame; other warps of the launch are idle */
	codec_lists *lists; /* Delta: lists of changes; NULL: do not use lists */
	uint64_t reserved;
};

#define WARPS 4                        /* number of warps per CTA of kernels that encode or decode blocks */
#define ENTRIES (WIRE_CHUNK_WORDS / 2) /* number of directory entries per chunk of the directory's checksum */

/*
 * Check the parts of a frame that belong to no block: the directory's last entry, and the padding of fixed planes.
 * Called by one warp.
 */
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

/* Return the checksum of block b's bytes in the frame: of its region and of its parts of the fixed planes. */
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

/*
 * Report that a block (order: the block's index + 1) or the whole frame (order 0) is invalid. Of several reports, the
 * one with the lowest order is kept.
 */
DEVICE void report_fault(codec_found *found, uint64_t order, codec_status status, uint32_t lane)
{
	const unsigned long long fault = order << 8 | status;

	if (lane || status == CODEC_OK)
		return;
	atomicMin(&found->fault, fault);
	if (status == CODEC_BAD_DIRECTORY || status == CODEC_CHECKSUM)
		atomicMax(&found->damage, ~fault);
}

/* Copy the codec_decoding of the CTA's frame to shared memory, and return it. */
DEVICE const codec_decoding &decoding_of(const codec_decoding *decodings)
{
	__shared__ codec_decoding d;

	share(&d, decodings + blockIdx.y);
	return d;
}

/*
 * Return the bytes of scratch memory that a warp needs to decode lossless blocks: 0 if regions contain only plane 0;
 * otherwise memory for each plane that may be coded.
 */
DEVICE uint64_t lossless_scratch_nbytes(const codec_view &v, int size)
{
	return WIRE_ONLY_PLANE_0(v.fixed, v.halved, size) ? 0 : PLANE_ROOM * __popc(v.coded);
}

/*
 * Decode, or only check, blocks `first`, first + warps, first + 2 * warps ... of a frame. Called by one warp.
 *
 * read(block, cursor, checksum) decodes one block, returns a status, and adds the checksums of the block's parts of
 * fixed planes to *checksum. If the block's directory entry is bad, skip(block) is called instead. size: lossless:
 * bytes per value, which is the number of planes; else 0.
 */
template <class F, class G>
DEVICE void decode_blocks_by(const codec_decoding &d, const job &j, int size, uint64_t first, uint64_t warps,
			     uint32_t lane, F read, G skip)
{
	const codec_view &v = j.v;
	codec_found *found = d.found;

	if (first == 0)
		report_fault(found, 0, check_frame(&v, d.frame, lane), lane);
	for (uint64_t b = first; b < v.nblocks; b += warps) {
		const uint8_t *entry = d.frame + v.directory_offset + WIRE_DIRECTORY_ENTRY * b;
		uint64_t checksum = 0;
		cursor c;
		codec_status status = open_region(&v, d.frame, b, &c);

		if (status != CODEC_OK) {
			report_fault(found, b + 1, status, lane);
			skip(b);
			continue;
		}
		status = read(b, c, &checksum);
		if (d.checks) {
			if (status == CODEC_OK)
				checksum += digest_bytes(here(&c), left(&c), WIRE_SEED_REGION, lane);
			else /* read() has returned before it had read all of the block */
				checksum = digest_block(&v, b, &c, size, lane);
			checksum = checksum_of_block(checksum, b);
			if (load32(entry + 4) != checksum_short(checksum))
				status = CODEC_CHECKSUM;
			if (b % ENTRIES == 0)
				checksum += digest_chunk(d.frame + v.directory_offset, WIRE_DIRECTORY_ENTRY * v.nblocks,
							 WIRE_SEED_DIRECTORY, b / ENTRIES, lane);
			if (lane == 0)
				atomicAdd(&found->checksum, (unsigned long long)checksum);
		}
		report_fault(found, b + 1, status, lane);
		__syncwarp();
	}
}

template <class F>
DEVICE void decode_blocks_by(const codec_decoding &d, const job &j, int size, uint64_t first, uint64_t warps,
			     uint32_t lane, F read)
{
	decode_blocks_by(d, j, size, first, warps, lane, read, [](uint64_t) {});
}

/*
 * Decode, or only check, the blocks of the CTA's frame, see decode_blocks_by.
 *
 * read(decoding, job, block, cursor, pairs, scratch, lane, checksum) decodes one block. pairs: decoding tables of
 * symbol pairs, 2^PAIR_BITS entries each, in shared memory; scratch: the warp's scratch memory. skip(decoding, job,
 * block, lane) is called for a block whose directory entry is bad.
 */
template <uint32_t PAIR_BITS, class F, class G>
DEVICE void decode_blocks(const codec_decoding *decodings, int size, F read, G skip)
{
	__shared__ uint32_t entries[1 << PAIR_BITS];
	const codec_decoding &d = decoding_of(decodings);
	const job &j = share_job(d.view, d.memory);
	const codec_view &v = j.v;
	const pairs by = {entries, PAIR_BITS, v.coded ? (uint32_t)__ffs((int)v.coded) - 1 : WIRE_MAX_PLANES};
	uint32_t lane = threadIdx.x % 32;
	const uint64_t nbytes = size ? lossless_scratch_nbytes(v, size) : d.scratch.each;
	const uint64_t warp = blockIdx.x * WARPS + threadIdx.x / 32, warps = useful_warps(d.scratch, nbytes, d.warps);

	if (warp >= warps)
		return;
	if (v.coded)
		fill_pairs(by, table_of(&j, by.plane));
	__syncthreads();
	const taken_units units = take_units(d.scratch, nbytes, lane);

	decode_blocks_by(
		d, j, size, warp, warps, lane,
		[&](uint64_t b, cursor c, uint64_t *checksum) {
			return read(d, &j, b, c, by, units.memory, lane, checksum);
		},
		[&](uint64_t b) { skip(d, &j, b, lane); });
	give_units(d.scratch, units, lane);
}

template <uint32_t PAIR_BITS, class F> DEVICE void decode_blocks(const codec_decoding *decodings, int size, F read)
{
	decode_blocks<PAIR_BITS>(decodings, size, read, [](const codec_decoding &, const job *, uint64_t, uint32_t) {});
}

#endif
