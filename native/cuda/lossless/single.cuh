/*
 * lossless/single.cuh - decode blocks whose regions contain only plane 0, in rows of 128 values. format.md, section 6.
 */
#ifndef CODEC_CUDA_LOSSLESS_SINGLE_CUH
#define CODEC_CUDA_LOSSLESS_SINGLE_CUH

#include "coder/gaps.cuh"
#include "coder/plane.cuh"
#include "common/checksum.cuh"
#include "lossless/merge.cuh"

/* Check the head of a region: the modes of planes, and flags. size: bytes per value. */
DEVICE codec_status check_head(const codec_view *v, uint32_t head, int size)
{
	if (head & ~(WIRE_REGION_PRUNED | (v->fixed ? 0 : WIRE_REGION_GAPS) | ((1u << 2 * size) - 1)))
		return CODEC_BAD_REGION;
	for (int p = 0; p < size; p++) {
		uint32_t mode = head >> 2 * p & 3;

		if (v->fixed >> p & 1 ? mode != 0 : mode == WIRE_MODE_CODED && !(v->coded >> p & 1))
			return CODEC_BAD_REGION;
	}
	return head & WIRE_REGION_PRUNED && (!has_top(v->dtype) || (head & 3) != WIRE_MODE_CODED) ? CODEC_BAD_REGION
												  : CODEC_OK;
}

/*
 * Decode a region that contains only plane 0, in any mode, in rows of 128 values. head: head of the region; the cursor
 * points past the head.
 *
 * read_chunks(top, fixed, sums, cursor, place, row) decodes whole chunks of CHUNK_ROWS rows from row `row` on, finishes
 * the chunks' checksums, and returns the number of rows decoded. If that is 0, read_single_plane decodes row `row`.
 */
template <int SIZE, class F>
DEVICE codec_status read_single_plane(const job *j, uint64_t b, uint32_t head, cursor c, const pairs &by,
				      const codec_sink *sink, uint64_t *checksum, uint32_t lane, F read_chunks)
{
	const codec_view &v = j->v;
	const uint64_t first = b * v.block_nvalues;
	const uint32_t m = (uint32_t)block_values(&v, b), rows = (m + WIRE_ROW - 1) / WIRE_ROW;
	const uint8_t *fixed = c.frame + v.planes_offset + first;
	/* in a pruned region, fixed planes must be 0 where plane 0 is 0, and some byte of plane 0 must not be 0 */
	const bool pruned = head & WIRE_REGION_PRUNED;
	bool live = !pruned;
	digest sums[SIZE] = {};
	quad_rows present = {0, m, false};
	uint32_t next = 0; /* number of the row among those in the region */
	place o = {};
	plane top;
	codec_status status = CODEC_OK;

	if (SIZE == 1) /* with more planes, the others are fixed, and there are no gaps */
		status = read_gaps(&c, head, m, &present, lane);
	if (status == CODEC_OK)
		status = plane_open(&top, j, 0, head & 3, by, present.kept, &c, lane);
	if (status != CODEC_OK)
		return status;
	if (v.model_parts.count)
		o = place_at(j, first + (4 * lane < m ? 4 * lane : 0));
	for (uint32_t r = 0; r < rows;) {
		const uint32_t done = pruned ? 0 : read_chunks(&top, fixed, sums, &c, &o, r);

		if (done) {
			r += done;
			continue;
		}
		uint32_t n = there(r, lane, m), word[SIZE], others = 0;

		if (SIZE > 1)
			word[0] = plane_row(&top, r, &c, lane);
		else
			word[0] = has_row(present, r) ? plane_row(&top, next++, &c, lane) : 0;
		for (int p = 1; p < SIZE; p++) {
			word[p] = load_bytes(fixed + (p - 1) * v.plane_stride + WIRE_ROW * r + 4 * lane, n);
			digest_word(&sums[p], word[p], r, lane);
			others |= word[p];
		}
		if (pruned) {
			const uint32_t zero = equal_bytes(word[0], 0);

			live |= (~zero & ((1u << n) - 1)) != 0;
			top.bad |= (zero & ~equal_bytes(others, 0)) != 0;
		}
		put_row<SIZE>(j, first, r++, n, word, &o, sink, lane);
		if (r % CHUNK_ROWS == 0 || r == rows)
			for (int p = 1; p < SIZE; p++)
				digest_end_chunk(&sums[p], (r - 1) / CHUNK_ROWS, lane);
	}
	for (int p = 1; p < SIZE; p++)
		*checksum += digest_sum(&sums[p], 0, (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, WIRE_SEED_PLANE + p, lane);
	top.bad |= !__any_sync(FULL, live);
	status = plane_close(&top);
	return status == CODEC_OK ? close_region(&c, lane) : status;
}

#endif
