/* coder/gaps.cuh - blocks whose empty quad rows are left out of the region. docs/spec/format.md, section 6. */
#ifndef CODEC_CUDA_CODER_GAPS_CUH
#define CODEC_CUDA_CODER_GAPS_CUH

#include "coder/decode.cuh"

/*
 * Quad rows of a block that are in its region. rows: bit i of lane l is 1 if quad row 32 l + i is. kept: number of
 * values of these rows. any: false if the block has no gaps; `rows` is then not used.
 */
struct quad_rows {
	uint32_t rows, kept;
	bool any;
};
static_assert((1u << WIRE_MAX_BLOCK_LOG2) <= 32 * 32 * WIRE_ROW, "a bit for each quad row");

/* Return true if row r is in the region. */
DEVICE bool has_row(const quad_rows &o, uint32_t r)
{
	return !o.any || __shfl_sync(FULL, o.rows, (int)(r / 32)) >> r % 32 & 1;
}

/* Return true if any of the lanes' four values, in SIZE planes, has a bit that is not 0. */
template <int SIZE> DEVICE bool any_bit(const uint32_t *word)
{
	uint32_t some = 0;

	for (int p = 0; p < SIZE; p++)
		some |= word[p];
	return __any_sync(FULL, some != 0);
}

/* Read the bitmap of a block of m values, if the block has gaps. head: head of the region, before the cursor. */
DEVICE codec_status read_gaps(cursor *c, uint32_t head, uint32_t m, quad_rows *o, uint32_t lane)
{
	const uint32_t count = (m + WIRE_ROW - 1) / WIRE_ROW, nbytes = WIRE_GAPS_NBYTES(m);
	const uint8_t *word = here(c) + 4 * lane;

	*o = {0, m, (head & WIRE_REGION_GAPS) != 0};
	if (!o->any)
		return CODEC_OK;
	if (left(c) < nbytes)
		return CODEC_BAD_REGION;
	for (uint32_t i = 0; i < 4 && 4 * lane < nbytes; i++)
		o->rows |= (uint32_t)word[i] << 8 * i;
	c->at += nbytes;

	const uint32_t some = warp_sum((uint32_t)__popc(o->rows));
	const uint32_t unused = lane == count / 32 && count % 32 ? o->rows >> count % 32 : 0;

	if (__any_sync(FULL, unused != 0) || !some || some == count)
		return CODEC_BAD_REGION;
	o->kept = WIRE_ROW * some - (has_row(*o, count - 1) ? WIRE_ROW * count - m : 0);
	return CODEC_OK;
}

/* Write the bitmap of a block of m values with gaps. rows: see quad_rows. */
DEVICE void put_gaps(uint32_t rows, uint32_t m, uint8_t *to, uint32_t lane)
{
	for (uint32_t i = 0; i < 4 && 4 * lane < WIRE_GAPS_NBYTES(m); i++)
		to[4 * lane + i] = (uint8_t)(rows >> 8 * i);
	__syncwarp();
}

#endif
