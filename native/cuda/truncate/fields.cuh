/*
 * truncate/fields.cuh - read levels, and the bits that values keep of their mantissa fields. docs/spec/format.md,
 * section 9.
 */
#ifndef CODEC_CUDA_TRUNCATE_FIELDS_CUH
#define CODEC_CUDA_TRUNCATE_FIELDS_CUH

#include "truncate/truncate.cuh"

/*
 * Read the levels, two bits each, of the lane's values in a row of 128 from bit index *bit on, and advance *bit by the
 * row.
 */
DEVICE void levels_sent(const bit_source &s, uint32_t *bit, const uint32_t e[4], uint32_t levels[4], uint32_t lane)
{
	uint32_t live = 0, all;

	for (uint32_t k = 0; k < 4; k++)
		live += e[k] != 0;
	uint32_t at = *bit + 2 * warp_scan(live, lane, &all), bits = live ? window_at(s, at) : 0;

	for (uint32_t k = 0; k < 4; k++) {
		levels[k] = e[k] ? bits & 3 : 0;
		bits >>= e[k] ? 2 : 0;
	}
	*bit += 2 * all;
}

/*
 * Read positions: bit index of the next bit of each piece. With per-bit granularity there is a single stream, piece 0.
 */
struct pieces {
	uint32_t bit[PIECES];
	uint32_t left_out; /* mask of pieces that are 0 in all values */
};

/* Read the mantissa fields of the lane's four values of the next row of 128, piece by piece. */
DEVICE void piece_fields(const cut_kind &q, const bit_source &s, pieces *p, const uint32_t e[4],
			 const uint32_t levels[4], uint32_t field[4], uint32_t lane)
{
	/* width, by: for each piece, number of bits of the lane's earlier values, one byte each */
	uint32_t kept[4], by[4], count = 0, width = 0;

	for (uint32_t k = 0; k < 4; k++) {
		kept[k] = kept_of(e[k], levels[k]);
		by[k] = width;
		width += kept[k] & q.widths;
		count += kept[k] & ONES;
	}
	uint32_t all, rank = warp_scan(count, lane, &all), ends = 0, bits[PIECES];
	/*
	 * The last piece begins and ends last, and no piece is wider. The index of an omitted piece remains where the
	 * piece would begin. So if the loads of the last piece are inside the region, all loads are. Without branches
	 * all loads are in flight together.
	 */
	const bool inside = (p->bit[PIECES - 1] + WIRE_ROW * byte_of(q.widths, PIECES - 1)) / 32 + 2 <= s.whole;

	for (uint32_t i = 0; i < PIECES; i++)
		bits[i] = p->bit[i] + byte_of(q.widths, i) * byte_of(rank, i);
	if (inside)
		for (uint32_t i = 0; i < PIECES; i++)
			bits[i] = window_inside(s, bits[i]);
	else
		for (uint32_t i = 0; i < PIECES; i++)
			bits[i] = byte_of(count, i) ? window_at(s, bits[i]) : 0;
	for (uint32_t i = 0; i < PIECES; i++) {
		uint32_t width = byte_of(q.widths, i), shift = q.mbits + 1 - (ends += width);

		if (p->left_out >> i & 1)
			continue;
		p->bit[i] += width * byte_of(all, i);
		for (uint32_t k = 0; k < 4; k++) {
			uint32_t mask = byte_of(kept[k], i) & ((1u << width) - 1);

			field[k] |= (bits[i] >> byte_of(by[k], i) & mask) << shift;
		}
	}
}

/* Per-bit granularity: read the fields of the lane's four values of the next row of 128, at most `most` bits each. */
DEVICE void bit_fields(const cut_kind &q, const bit_source &s, pieces *p, const uint32_t e[4], const uint32_t cuts[4],
		       uint32_t most, uint32_t field[4], uint32_t lane)
{
	uint32_t keeps[4], mine = 0, all;

	for (uint32_t k = 0; k < 4; k++)
		mine += keeps[k] = bits_kept(q, e[k], cuts[k], most);
	uint32_t bit = p->bit[0] + warp_scan(mine, lane, &all);

	for (uint32_t k = 0; k < 4; k++) {
		if (keeps[k])
			field[k] = (window_at(s, bit) & ((1u << keeps[k]) - 1)) << (q.mbits + 1 - keeps[k]);
		bit += keeps[k];
	}
	p->bit[0] += all;
}

#endif
