/* lossless/encode.cu - kernels that encode blocks of lossless frames, one block a warp. */
#include "lossless/encode.cuh"

/* Load a quad of aligned values: SIZE words. */
template <int SIZE> DEVICE void load_words(const uint8_t *from, uint32_t *word)
{
	if constexpr (SIZE == 2) {
		uint2 w = *global((const uint2 *)from);

		word[0] = w.x, word[1] = w.y;
	} else {
		uint4 w = *global((const uint4 *)from);

		word[0] = w.x, word[1] = w.y, word[2] = w.z, word[3] = w.w;
	}
}

/*
 * Encode CHUNK_ROWS rows from row r on whose values all exist: plane 0 goes to the coder, others to their sections of
 * the frame from `section` on. from: values, aligned to a quad. o: position of the last of these rows; moves back.
 * Nearly all values of a large tensor are encoded here.
 */
template <int SIZE>
DEVICE void write_whole_rows(const job *j, const uint8_t *from, uint8_t *section, place *o, coding *s, digest *sums,
			     common *same, uint32_t r, uint32_t lane)
{
	const int octave = octave_of(j->v.dtype), round = ROUND_OF(octave);
	const uint32_t *key = CHECKSUM_KEY + lane;
	uint32_t column = o->length ? o->column : ~0u, row = o->row, eighths = row_pair(o->eighths, round), *to[SIZE];

	for (int p = 1; p < SIZE; p++)
		to[p] = global((uint32_t *)(section + (p - 1) * j->v.plane_stride)) + 32 * r + lane;
	if (r && lane < SIZE * CHUNK_ROWS) /* the chunk before, which comes next */
		prefetch(from + SIZE * WIRE_ROW * (r - CHUNK_ROWS) + LINE_NBYTES * lane);
	from += 4 * SIZE * (32 * r + lane);
	/* loads of later rows are in flight while a row is coded: the compiler moves no load above a store */
	const uint32_t AHEAD = SIZE == 2 ? 4 : 2;
	uint32_t ahead[AHEAD][SIZE], columns = o->cols ? columns_at(o->cols + column) : 0;
	auto fetch = [&](uint32_t k) { load_words<SIZE>(from + 4 * SIZE * 32 * k, ahead[k % AHEAD]); };
#pragma unroll
	for (uint32_t k = CHUNK_ROWS; k-- > CHUNK_ROWS - AHEAD;)
		fetch(k);
#pragma unroll
	for (uint32_t k = CHUNK_ROWS; k-- > 0;) {
		const uint32_t four = 0x80808080 ^ columns, here = eighths;
		uint32_t word[SIZE], value[SIZE], offset[2];

		for (int i = 0; i < SIZE; i++)
			value[i] = ahead[k % AHEAD][i];
		if (k >= AHEAD)
			fetch(k - AHEAD);
		if (k) { /* the next row */
			if (column < WIRE_ROW) {
				column += o->length, row--; /* rows have at least 64 values: at most twice */
				if (column < WIRE_ROW)
					column += o->length, row--;
				eighths = row_pair(eighths_of(o->part, o->rows, row), round);
			}
			column -= WIRE_ROW;
			if (o->cols)
				columns = columns_at(o->cols + column);
		}
		for (int h = 0; h < 2; h++) /* the circle's size less the offset */
			offset[h] = WIRE_CIRCLE(128) * 0x10001 -
				    pair_offset(__byte_perm(four, 0, h ? 0x4342 : 0x4140), here, octave);
		split_pairs<SIZE>(value, offset, word);
		for (int p = 1; p < SIZE; p++) {
			sums[p].sum += (uint64_t)word[p] * key[32 * k];
			to[p][32 * k] = word[p];
		}
		same->some |= word[0];
		same->all &= word[0];
		code_quad(s, word[0], r + k, 4, lane);
	}
	for (int p = 1; p < SIZE; p++)
		digest_end_chunk(&sums[p], r / CHUNK_ROWS, lane);
	if (o->part) {
		o->column = o->length ? column : 0, o->row = row, o->left += WIRE_ROW * (CHUNK_ROWS - 1);
		enter_row(o);
		if (r)
			move_back(j, o, WIRE_ROW);
	}
}

/*
 * Check that write_whole_rows takes the chunk that ends at row r: rows are whole, memory is aligned, and each of the
 * lane's quads lies within one row of the part at hand.
 */
template <int SIZE>
DEVICE bool takes_whole_rows(const job &j, const uint8_t *values, const uint8_t *section, const place &o, uint32_t r,
			     uint32_t m)
{
	/* whole quads are written at the ends of sections, too */
	if (r % CHUNK_ROWS || r > m / WIRE_ROW || (uint64_t)values % (4 * SIZE) ||
	    ((uint64_t)section | j.v.plane_stride) % 4)
		return false;
	return !j.v.model_parts.count || __all_sync(FULL, o.part->count - o.left >= WIRE_ROW * (CHUNK_ROWS - 1) &&
								  o.left >= 4 && !((o.length | o.column) & 3));
}

/*
 * Encode blocks. Values are aligned to their size. bfloat16 and float16 have a kernel of their own, see encode_fast.cu.
 * Grid: (CTAs, frames).
 */
template <int SIZE> __global__ void __launch_bounds__(32 * WARPS, 4) encode_lossless(const codec_encoding *encodings)
{
	__shared__ uint32_t codes[256 * SIZE];

	encode_blocks<SIZE, (SIZE > 2)>(encodings, codes,
					[](const job &j, uint64_t, uint32_t m, const uint8_t *values, uint8_t *section,
					   coding *s, digest *sums, common *same, place *o, uint32_t r, uint32_t lane) {
						uint32_t rows = 0;

						if constexpr (SIZE == 4)
							if (takes_whole_rows<SIZE>(j, values, section, *o, r, m)) {
								rows = CHUNK_ROWS;
								write_whole_rows<SIZE>(&j, values, section, o, s, sums,
										       same, r - rows, lane);
							}
						return rows;
					});
}
