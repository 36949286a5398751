/* rows/encode.cu - kernels that encode blocks of row codecs. */
#include "frame/encode.cuh"
#include "rows/encode.cuh"

/*
 * Bytes of scratch memory per warp; the host reads this symbol. [0]: with an entropy stage, plus the size of the
 * largest region. [1]: with ternary codes packed five per byte. Other frames need no scratch memory.
 */
#define ROWS_ROOM (2 * PLANE_ROOM + 4 * WORDS_ROOM)
extern "C" __device__ const uint64_t encode_rows_nbytes[] = {ROWS_ROOM, TRITS_CHUNK};

/*
 * Kernel: encode the blocks of row codecs, as encode_lossless does, and write residuals. Without an entropy stage,
 * blocks are written directly to the frame, because their sizes are known in advance.
 */
template <int CODEC> __global__ void __launch_bounds__(32 * WARPS, 4) encode_rows(const codec_encoding *encodings)
{
	__shared__ float ratio[256];
	__shared__ uint32_t codes[256];
	__shared__ row_job jobs[WARPS]; /* in shared memory, because the loops need nearly all registers */
	const codec_encoding &e = encoding_of(encodings);
	const job &j = share_coding(e.view, e.memory, codes, 1);
	const codec_view &v = j.v;
	const uint32_t lane = threadIdx.x % 32;

	fill_ratios<CODEC>(&v, ratio);
	if (blockIdx.x * WARPS >= useful_warps(e.scratch, e.scratch.each, e.warps))
		return;
	row_job &r = jobs[threadIdx.x / 32];
	const taken_units unit = take_units(e.scratch, e.scratch.each, lane);
	uint8_t *scratch = unit.memory;

	for (uint64_t b; (b = next_block(e.out, lane)) < v.nblocks;) {
		uint8_t *region = scratch + ROWS_ROOM;
		uint64_t at = 0;
		codec_status status = CODEC_OK;

		__syncwarp();
		if (lane == 0)
			r = row_job_of<CODEC>(&v, row_place_of(&j, kind_of(&v), b), &e.source);
		__syncwarp();
		const bool entropy = is_entropy_coded<CODEC>(r.q);
		uint32_t size = (uint32_t)row_region_nbytes(r.q, r.p.part->group_size, r.p.m);

		if (!entropy) { /* the region's size, and therefore its offset, is known before encoding */
			at = v.regions_offset + look_back(e.places, b, size, lane);
			region = e.frame + at;
		}
		if (entropy || at + size <= e.capacity)
			status = write_rows<CODEC>(&j, e.memory, r, ratio, scratch, region, &size, lane);
		if (lane == 0 && status != CODEC_OK)
			set_fault(e.out, status);
		if (entropy)
			put_region(&v, e, b, region, status == CODEC_OK ? size : 8, lane);
		else if (at + size <= e.capacity)
			put_entry(&v, e, b, at + size,
				  checksum_of_block(digest_bytes(region, size, WIRE_SEED_REGION, lane), b), lane);
		else
			put_entry(&v, e, b, at + size, 0, lane);
	}
	give_units(e.scratch, unit, lane);
}
