/* lossless/encode_fast.cu - kernel that encodes floats of two and four bytes, one block per warp. */
#include "lossless/encode.cuh"
#include "lossless/encode_fast.cuh"

/*
 * Argument code_chunks of code_values: if memory is aligned, encode whole chunks of a block of m values that end at row
 * r, and return the number of rows encoded.
 */
template <int SIZE>
DEVICE uint32_t code_fast_chunks(const job &j, fast_codes<SIZE> *t, uint64_t first, uint32_t m, const uint8_t *values,
				 uint8_t *section, coding *s, digest *sums, common *same, place *o, uint32_t r,
				 uint32_t lane)
{
	const uint32_t grain = grain_of(&j.v);
	const uint64_t stride = j.v.plane_stride;
	uint32_t chunks = r / CHUNK_ROWS;
	fast_offsets kind = FAST_NO_OFFSETS;

	if (r % CHUNK_ROWS || r > m / WIRE_ROW || (uint64_t)values % (4 * SIZE) || ((uint64_t)section | stride) % 4)
		return 0;
	if (j.v.model_parts.count) {
		kind = fast_offsets_of(*o);
		chunks = fast_chunks(*o, (o->part->count - o->left) / WIRE_ROW + 1, chunks);
	}
	if (!chunks)
		return 0;
	if (kind == FAST_OFFSETS)
		add_columns(o);
	const uint8_t *from = values + SIZE * WIRE_ROW * r;
	uint8_t *plane1 = section + WIRE_ROW * r;
	const bool whole = WIRE_ROW * r == m && CHUNK_ROWS * chunks == r;

	r -= CHUNK_ROWS * chunks;
	if (kind == FAST_NO_OFFSETS)
		code_fast<SIZE, FAST_NO_OFFSETS>(t, from, plane1, stride, r / CHUNK_ROWS, chunks, whole, *o, grain, s,
						 sums, same, lane);
	else if (kind == FAST_ONE_OFFSET)
		code_fast<SIZE, FAST_ONE_OFFSET>(t, from, plane1, stride, r / CHUNK_ROWS, chunks, whole, *o, grain, s,
						 sums, same, lane);
	else
		code_fast<SIZE, FAST_OFFSETS>(t, from, plane1, stride, r / CHUNK_ROWS, chunks, whole, *o, grain, s,
					      sums, same, lane);
	if (j.v.model_parts.count && r)
		*o = place_at(&j, first + WIRE_ROW * (r - 1) + 4 * lane);
	return CHUNK_ROWS * chunks;
}

/* Kernel: encode blocks of floats of SIZE bytes, 2 or 4. Values must be aligned to their size. Grid: (CTAs, frames). */
template <int SIZE>
__global__ void __launch_bounds__(32 * WARPS, SIZE == 2 ? 6 : 5) encode_lossless_fast(const codec_encoding *encodings)
{
	alignas(8) __shared__ fast_codes<SIZE> tables;

	for (uint32_t i = threadIdx.x; i < WIRE_CHUNK_WORDS; i += blockDim.x)
		tables.key[i] = CHECKSUM_KEY[i];
	static_assert(ROOM_WORDS(SIZE) <= NEAR_WORDS && NEAR_WORDS % 2 == 0, "room for blocks");
	encode_blocks<SIZE, true>(
		encodings, tables.codes, [&](uint32_t w) { return tables.words[w]; },
		[&](const job &j, uint64_t first, uint32_t m, const uint8_t *values, uint8_t *section, coding *s,
		    digest *sums, common *same, place *o, uint32_t r, uint32_t lane) {
			return code_fast_chunks<SIZE>(j, &tables, first, m, values, section, s, sums, same, o, r, lane);
		});
}
