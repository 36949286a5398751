/* rows/draws.cuh - random bits for groups of 8 values, if the upper 32 bits of their Philox counters are equal.
 * docs/spec/encoder.md, section 7.
 */
#ifndef CODEC_CUDA_ROWS_DRAWS_CUH
#define CODEC_CUDA_ROWS_DRAWS_CUH

#include "rows/groups.cuh"

/*
 * Intermediate results of philox_block that are equal for all Philox blocks whose number has the same upper 32 bits:
 * the keys of all rounds, and two words.
 */
struct group_draws {
	uint32_t key[2 * PHILOX_ROUNDS];
	uint32_t second_low, second_high;
};

/* Compute the group_draws of Philox blocks whose number has the upper 32 bits `high`. */
DEVICE group_draws group_draws_of(const struct philox &key, uint32_t high)
{
	group_draws d;
	uint32_t k0 = key.seed, k1 = key.stream;

	for (int r = 0; r < PHILOX_ROUNDS; r++, k0 += PHILOX_W0, k1 += PHILOX_W1)
		/* `opaque` keeps the keys in registers, so that loops do not compute them again */
		d.key[2 * r] = opaque(k0), d.key[2 * r + 1] = opaque(k1);
	const uint64_t second = (uint64_t)PHILOX_M0 * (high ^ key.seed);

	d.key[1] = opaque(key.stream_high ^ key.stream);
	d.second_low = opaque((uint32_t)second);
	d.second_high = opaque((uint32_t)(second >> 32) ^ d.key[3]);
	return d;
}

/*
 * Compute philox_block of the Philox block whose number has the lower 32 bits `low`: the first 16 random bits of each
 * of 8 values.
 */
DEVICE void draw_group(const group_draws &d, uint32_t low, uint32_t out[4])
{
	const uint64_t first = (uint64_t)PHILOX_M0 * low;
	const uint64_t b = (uint64_t)PHILOX_M1 * ((uint32_t)(first >> 32) ^ d.key[1]);
	uint32_t c[4] = {(uint32_t)(b >> 32) ^ d.key[2], (uint32_t)b, d.second_high ^ (uint32_t)first, d.second_low};

	for (int r = 2; r < PHILOX_ROUNDS; r++) {
		const uint64_t a = (uint64_t)PHILOX_M0 * c[0], b = (uint64_t)PHILOX_M1 * c[2];

		c[0] = (uint32_t)(b >> 32) ^ c[1] ^ d.key[2 * r];
		c[2] = (uint32_t)(a >> 32) ^ c[3] ^ d.key[2 * r + 1];
		c[1] = (uint32_t)b;
		c[3] = (uint32_t)a;
	}
	for (int i = 0; i < 4; i++)
		out[i] = c[i];
}

/* Return true if the Philox blocks of n values from value `first` on have numbers with the same upper 32 bits. */
DEVICE bool draws_share_high(uint64_t first, uint32_t n)
{
	return first / 8 >> 32 == (first + n) / 8 >> 32;
}

/*
 * Encode 8 values from value `mine` of the block on. Slow fallback of the loops in levels.cuh and ternary.cuh, for
 * scales or random bits for which they are not exact.
 */
template <int CODEC> DEVICE_CALL void put_group_slowly(const row_job &r, uint32_t mine, float scale, uint8_t *to)
{
	const uint64_t e = r.p.first + mine;
	uint32_t x[8], codes[2];

	values_at_quads<8>(r.v->dtype, &r.source, e, x);
	code_group<CODEC>(r, e, x, open_scale(r.q, scale, 0), codes);
	put_bytes(to, pack_group(r.q, codes[0], codes[1]), r.q.bits);
}

#endif
