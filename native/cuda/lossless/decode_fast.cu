/* lossless/decode_fast.cu - kernel that decodes frames of bfloat16 and float16 whose regions hold plane 0 only, one
 * block a warp. decode_lossless<2> decodes the same frames, more slowly; the host chooses.
 */
#include "frame/decode.cuh"
#include "lossless/decode_fast.cuh"
#include "lossless/single.cuh"

/* Decode whole chunks from row r on, of m values, if memory is aligned. See read_single_plane. */
DEVICE uint32_t read_fast_chunks(const job &j, const fast_tables *t, const codec_sink &sink, uint64_t first, uint32_t m,
				 plane *top, const uint8_t *fixed, digest *sums, cursor *c, place *o, uint32_t r,
				 uint32_t lane)
{
	const uint64_t aligned = (uint64_t)top->coder.words | (uint64_t)fixed | (uint64_t)sink.data / 2;
	const int octave = octave_of(j.v.dtype);
	uint32_t chunks = (m / WIRE_ROW - r) / CHUNK_ROWS;
	fast_offsets kind = FAST_NO_OFFSETS;

	if (r % CHUNK_ROWS || !chunks || top->mode != WIRE_MODE_CODED || aligned % 4)
		return 0;
	if (j.v.model_parts.count) {
		kind = fast_offsets_of(*o);
		chunks = fast_chunks(*o, (o->left - 4) / WIRE_ROW + 1, chunks);
	}
	if (!chunks)
		return 0;
	const uint8_t *plane1 = fixed + WIRE_ROW * r;
	uint8_t *to = sink.data ? sink.data + 2 * (first + WIRE_ROW * r) : NULL;
	digest *sum = sums + 1;

	if (kind == FAST_NO_OFFSETS)
		read_fast<FAST_NO_OFFSETS>(t, top, plane1, to, r / CHUNK_ROWS, chunks, *o, octave, c, sum, lane);
	else if (kind == FAST_ONE_OFFSET)
		read_fast<FAST_ONE_OFFSET>(t, top, plane1, to, r / CHUNK_ROWS, chunks, *o, octave, c, sum, lane);
	else
		read_fast<FAST_OFFSETS>(t, top, plane1, to, r / CHUNK_ROWS, chunks, *o, octave, c, sum, lane);
	r += CHUNK_ROWS * chunks;
	if (j.v.model_parts.count && WIRE_ROW * r + 4 * lane < m)
		*o = place_at(&j, first + WIRE_ROW * r + 4 * lane);
	return CHUNK_ROWS * chunks;
}

#define FAST_WARPS 16 /* warps of a CTA, which share the tables */

/* Decode blocks. The sink stores values. Grid: (CTAs, frames). */
extern "C" __global__ void __launch_bounds__(32 * FAST_WARPS, 2) decode_lossless_fast(const codec_decoding *decodings)
{
	__shared__ fast_tables tables;
	const codec_decoding &d = decoding_of(decodings);
	const job &j = share_job(d.view, d.memory);
	const pairs none = {NULL, 0, WIRE_MAX_PLANES};
	const uint32_t lane = threadIdx.x % 32, ctas = d.warps / FAST_WARPS;

	if (blockIdx.x >= ctas)
		return;
	fill_fast(&tables, table_of(&j, 0));
	/* CTAs take adjacent blocks, so that few blocks occupy many multiprocessors */
	decode_blocks_by(d, j, 2, blockIdx.x + ctas * (threadIdx.x / 32), d.warps, lane,
			 [&](uint64_t b, cursor c, uint64_t *checksum) {
				 const uint64_t first = b * j.v.block_nvalues;
				 const uint32_t head = load32(here(&c)), m = (uint32_t)block_values(&j.v, b);
				 codec_status status = check_head(&j.v, head, 2);

				 c.at += 4;
				 if (status != CODEC_OK)
					 return status;
				 return read_single_plane<2>(&j, b, head, c, none, &d.sink, checksum, lane,
							     [&](plane *top, const uint8_t *fixed, digest *sums,
								 cursor *at, place *o, uint32_t r) {
								     return read_fast_chunks(j, &tables, d.sink, first,
											     m, top, fixed, sums, at, o,
											     r, lane);
							     });
			 });
}
