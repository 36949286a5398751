/* lossless/single.cuh - decoding of blocks whose regions hold plane 0 only, row by row. docs/format.md, section 6. */
#ifndef CODEC_CUDA_LOSSLESS_SINGLE_CUH
#define CODEC_CUDA_LOSSLESS_SINGLE_CUH

#include "coder/plane.cuh"
#include "common/checksum.cuh"
#include "lossless/merge.cuh"

/* Check the head of a region: modes of its planes, and the flag of a pruned region. */
DEVICE codec_status check_head(const codec_view *v, uint32_t head, int size)
{
	if (head & ~(WIRE_REGION_PRUNED | ((1u << 2 * size) - 1)))
		return CODEC_BAD_REGION;
	for (int p = 0; p < size; p++) {
		uint32_t mode = head >> 2 * p & 3;

		if (v->fixed >> p & 1 ? mode != 0 : mode == WIRE_MODE_CODED && !(v->coded >> p & 1))
			return CODEC_BAD_REGION;
	}
	return head & WIRE_REGION_PRUNED && (!octave_of(v->dtype) || (head & 3) != WIRE_MODE_CODED) ? CODEC_BAD_REGION
												    : CODEC_OK;
}

/*
 * Decode CHUNK_ROWS rows of float32 from row r on whose values all exist. Words of planes are aligned to 4 bytes, and
 * values at `to` to a quad. fixed: plane 1; other planes follow, j->v.plane_stride bytes apart. more: a chunk follows.
 *
 * Memory traffic of a lane and row: words of SIZE - 1 planes, words of the coder, one quad written.
 */
template <int SIZE>
DEVICE void read_whole_rows(const job *j, plane *top, const pairs &by, const uint8_t *fixed, digest *sums, cursor *c,
			    place *o, uint8_t *to, uint32_t r, bool more, uint32_t lane)
{
	const int octave = octave_of(j->v.dtype), round = ROUND_OF(octave);
	const uint32_t length = o->length ? o->length : ~0u; /* no rows: one that has no end */
	const uint32_t *key = CHECKSUM_KEY + lane;
	const uint8_t *from = global(fixed) + 4 * (32 * r + lane);
	const uint64_t stride = j->v.plane_stride;
	uint32_t column = o->column, row = o->row, eighths = row_pair(o->eighths, round);

	const bool stores = to != NULL; /* else the frame is only checked */

	to += 4 * SIZE * (32 * r + lane);
	/* loads of later rows are in flight while a row is decoded: the compiler moves no load above a store */
	const uint32_t AHEAD = SIZE == 2 ? 4 : 2;
	uint32_t ahead[AHEAD][SIZE], columns = o->cols ? columns_at(o->cols + column) : 0;
	auto fetch = [&](uint32_t k) {
		for (int p = 1; p < SIZE; p++)
			ahead[k % AHEAD][p] = *(const uint32_t *)(from + (p - 1) * stride + WIRE_ROW * k);
	};
	if (more && lane < CHUNK_ROWS * (SIZE - 1))
		prefetch(from + CHUNK_ROWS * WIRE_ROW + lane / CHUNK_ROWS * stride +
			 (LINE_NBYTES * (lane % CHUNK_ROWS) - 4 * lane));
	fill_window(&top->coder, lane);
#pragma unroll
	for (uint32_t k = 0; k < AHEAD; k++)
		fetch(k);
#pragma unroll(SIZE == 2 ? CHUNK_ROWS : AHEAD)
	for (uint32_t k = 0; k < CHUNK_ROWS; k++) {
		const uint32_t four = 0x80808080 ^ columns, here = eighths;
		uint32_t word[SIZE], value[SIZE], offset[2];

		for (int p = 1; p < SIZE; p++) {
			word[p] = ahead[k % AHEAD][p];
			sums[p].sum += (uint64_t)word[p] * key[32 * k];
		}
		if (k + AHEAD < CHUNK_ROWS)
			fetch(k + AHEAD);
		if (k + 1 < CHUNK_ROWS) { /* the next row */
			if ((column += WIRE_ROW) >= length) {
				column -= length, row++; /* rows have at least 64 values: at most twice */
				if (column >= length)
					column -= length, row++;
				eighths = row_pair(eighths_of(o->part, o->rows, row), round);
			}
			if (o->cols)
				columns = columns_at(o->cols + column);
		}
		word[0] = plane_whole_row(top, by, c, lane);
		offset[0] = pair_offset(__byte_perm(four, 0, 0x4140), here, octave);
		offset[1] = pair_offset(__byte_perm(four, 0, 0x4342), here, octave);
		merge_quad<SIZE>(word, offset, value);
		if (!stores)
			continue;
		if constexpr (SIZE == 2)
			*global((uint2 *)(to + 4 * SIZE * 32 * k)) = {value[0], value[1]};
		else
			*global((uint4 *)(to + 4 * SIZE * 32 * k)) = {value[0], value[1], value[2], value[3]};
	}
	for (int p = 1; p < SIZE; p++)
		digest_end_chunk(&sums[p], r / CHUNK_ROWS, lane);
	if (j->v.model_parts.count) {
		o->column = column, o->row = row, o->left -= WIRE_ROW * (CHUNK_ROWS - 1);
		enter_row(o);
		move_on(j, o, WIRE_ROW);
	}
}

/*
 * Check that read_whole_rows takes the chunk from row r on, of m values: rows are whole, memory is aligned, and each of
 * the lane's quads lies within one row of the part at hand.
 */
template <int SIZE>
DEVICE bool takes_whole_rows(const job &j, const plane &top, const uint8_t *fixed, const codec_sink &sink,
			     const place &o, uint32_t r, uint32_t m)
{
	const uint64_t planes = (uint64_t)top.coder.words | (uint64_t)fixed | j.v.plane_stride;
	const bool stores = !sink.data || sink.into == CODEC_INTO_STORE;

	if (r % CHUNK_ROWS || r + CHUNK_ROWS > m / WIRE_ROW || !octave_of(j.v.dtype) || !top.by ||
	    top.mode != WIRE_MODE_CODED || planes % 4 || !stores || (uint64_t)sink.data % (4 * SIZE))
		return false;
	return !j.v.model_parts.count ||
	       __all_sync(FULL, o.left >= WIRE_ROW * (CHUNK_ROWS - 1) + 4 && !((o.length | o.column) & 3));
}

/*
 * Decode a region that holds plane 0 only, in any mode, row by row. head: of the region; the cursor is behind it.
 *
 * read_chunks(top, fixed, sums, cursor, place, row) decodes whole chunks of CHUNK_ROWS rows and ends their checksums.
 * It returns the number of rows; 0: the row is to be decoded here.
 */
template <int SIZE, class F>
DEVICE codec_status read_single_plane(const job *j, uint64_t b, uint32_t head, cursor c, const pairs &by,
				      const codec_sink *sink, uint64_t *checksum, uint32_t lane, F read_chunks)
{
	const codec_view &v = j->v;
	const uint64_t first = b * v.block_nvalues;
	const uint32_t m = (uint32_t)block_values(&v, b), rows = (m + WIRE_ROW - 1) / WIRE_ROW;
	const uint8_t *fixed = c.frame + v.planes_offset + first;
	const bool pruned =
		head & WIRE_REGION_PRUNED; /* fixed planes are 0 where plane 0 is 0, and some value is live */
	bool live = !pruned;
	digest sums[SIZE] = {};
	place o = {};
	plane top;
	codec_status status = plane_open(&top, j, 0, head & 3, by, m, &c, lane);

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

		word[0] = plane_row(&top, r, &c, lane);
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
