/* reduce_rows.cu - sums of frames of one codec of rows, cut alike, whose codes have a fixed width. A warp does a block
 * of all frames: what it adds up stays in registers, and is written once.
 */
#include "decode.cuh"
#include "rows.cuh"

#define QUADS 4 /* of a lane, at once */

/* By each lane: is this block's region as long as its scales and codes are, which end as they should? */
DEVICE codec_status check_region(struct row_kind q, const codec_decoding *d, uint64_t b, uint64_t nscales,
				 uint64_t ncodes, uint32_t m, cursor *c)
{
	codec_status status = open_region(d->view, d->frame, b, c);
	uint64_t size = nscales + ncodes;
	bool bad = status == CODEC_OK && (left(c) < size || left(c) - size >= WIRE_ALIGN);

	if (status != CODEC_OK || bad)
		return bad ? CODEC_BAD_REGION : status;
	for (uint64_t i = size; i < left(c); i++)
		bad |= here(c)[i] != 0;
	return bad || !allowed_end(q, here(c) + nscales, ncodes, m) ? CODEC_BAD_REGION : CODEC_OK;
}

/* Lane f's address. */
DEVICE const uint8_t *address_of(const uint8_t *p, uint32_t f)
{
	return (const uint8_t *)(uint64_t)__shfl_sync(FULL, (unsigned long long)p, (int)f);
}

/*
 * Sums of a block's values; lane f knows frame f's region, bit f of `good` says that it is one. `part`: the number of
 * the block's. Bit f of what it returns: in frame f this lane has read something that is not allowed.
 */
template <int CODEC>
static __device__ uint32_t add_up(const codec_decoding *decodings, uint32_t count, uint32_t good, struct row_kind q,
				  row_place p, uint64_t part, uint64_t nscales, const cursor *c, uint32_t dtype,
				  const float *ratio, uint32_t lane)
{
	uint32_t bad = 0;

	for (uint32_t r = 0; (uint64_t)WIRE_ROW * r < p.m; r += QUADS) {
		float sum[QUADS][4], y[4];

		for (uint32_t i = 0; i < QUADS; i++)
			load_floats(&decodings->sink, p.first + WIRE_ROW * (r + i) + 4 * lane, there(r + i, lane, p.m),
				    sum[i]);
		for (uint32_t f = 0; f < count; f++) {
			const codec_decoding *of = decodings + f;
			const uint8_t *scales = address_of(here(c), f);

			if (!(good >> f & 1))
				continue;
			row_walk w = walk_rows(q, row_parts(of->view, of->memory) + part, scales, scales + nscales,
					       ratio, of->sink.unscaled);

			for (uint32_t i = 0; i < QUADS; i++) {
				uint32_t n = there(r + i, lane, p.m);

				if (walk_quad<CODEC>(q, &w, WIRE_ROW * (r + i) + 4 * lane, n, y))
					bad |= 1u << f;
				for (uint32_t k = 0; k < 4; k++)
					sum[i][k] = put_float(&of->sink, sum[i][k],
							      decoded_float(&of->sink, dtype, y[k]), w.part->scale[0]);
			}
		}
		for (uint32_t i = 0; i < QUADS; i++)
			store_floats(&decodings->sink, p.first + WIRE_ROW * (r + i) + 4 * lane, there(r + i, lane, p.m),
				     sum[i]);
	}
	return bad;
}

/*
 * Of at most 32 frames, one a decoding, by whose sinks their values go to one and the same place, in this order. What
 * is wrong with a frame is found as by decode_rows.
 */
template <int CODEC>
__global__ void __launch_bounds__(32 * WARPS, 6) reduce_rows(const codec_decoding *decodings, uint32_t count)
{
	const codec_decoding &d = decoding_of(decodings);
	__shared__ float ratio[256];
	const job &j = share_job(d.view, d.memory);
	const codec_view &v = j.v;
	const struct row_kind q = kind_of(&v);
	const uint32_t lane = threadIdx.x % 32;
	const codec_decoding *mine = decodings + (lane < count ? lane : 0);
	const uint64_t warp = blockIdx.x * WARPS + threadIdx.x / 32;

	fill_ratios<CODEC>(&v, ratio);
	for (uint32_t f = 0; warp == 0 && f < count; f++)
		blame(decodings[f].found, 0, check_frame(decodings[f].view, decodings[f].frame, lane), lane);
	for (uint64_t b = warp; b < v.nblocks; b += d.warps) {
		const row_place p = row_place_of(&j, q, b);
		const uint64_t part = p.part - row_parts(&v, j.memory), ncodes = row_codes_nbytes(q, p.m),
			       nscales = row_count(p.part->row, p.m) * row_scale_nbytes(q);
		cursor c = {};
		codec_status status =
			lane < count ? check_region(q, mine, b, nscales, ncodes, p.m, &c) : CODEC_BAD_DIRECTORY;
		const uint32_t there_are = __ballot_sync(FULL, status != CODEC_BAD_DIRECTORY),
			       good = __ballot_sync(FULL, status == CODEC_OK);
		uint32_t bad = 0; /* bit f: of frame f something that this lane reads */

		for (uint32_t f = 0; f < count && !q.bits; f++) {
			const uint8_t *codes = address_of(here(&c), f) + nscales;

			for (uint64_t i = lane; good >> f & 1 && i < ncodes; i += 32)
				bad |= (uint32_t)(codes[i] > 242) << f;
		}
		bad |= add_up<CODEC>(decodings, count, good, q, p, part, nscales, &c, v.dtype, ratio, lane);
		for (uint32_t f = 0; f < count; f++)
			if (__any_sync(FULL, bad >> f & 1) && lane == f)
				status = CODEC_BAD_REGION;
		for (uint32_t f = 0; f < count; f++) {
			const codec_decoding *of = decodings + f;
			const uint8_t *entry = of->frame + of->view->directory_offset + WIRE_DIRECTORY_ENTRY * b;
			const uint8_t *region = address_of(here(&c), f);
			const uint64_t size = __shfl_sync(FULL, (unsigned long long)left(&c), (int)f);

			if (!of->checks || !(there_are >> f & 1))
				continue;
			uint64_t sealed = seal_block(digest_bytes(region, size, WIRE_SEED_REGION, lane), b);

			if (lane == f && load32(entry + 4) != seal_short(sealed))
				status = CODEC_CHECKSUM;
			if (b % ENTRIES == 0)
				sealed += digest_chunk(of->frame + of->view->directory_offset,
						       WIRE_DIRECTORY_ENTRY * v.nblocks, WIRE_SEED_DIRECTORY,
						       b / ENTRIES, lane);
			if (lane == 0)
				atomicAdd(&of->found->seal, (unsigned long long)sealed);
		}
		if (lane < count && status != CODEC_OK)
			blame(mine->found, b + 1, status, 0);
	}
}
