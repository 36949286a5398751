/* delta/put.cuh - write the codes of a block, for 32 values at a time. docs/spec/format.md, section 10.3. */
#ifndef CODEC_CUDA_DELTA_PUT_CUH
#define CODEC_CUDA_DELTA_PUT_CUH

#include "delta/rows.cuh"

DEVICE uint32_t put_gamma(uint8_t *stream, uint32_t bit, uint64_t x)
{
	const uint32_t t = delta_length(x) - 1;

	or_bits(stream, bit + t, 1);
	or_stream(stream, bit + t + 1, x & ((1ull << t) - 1));
	return bit + 2 * t + 1;
}

/* Write the codes of one change, of a value in a class above 0, to the stream from bit `bit` on. */
template <int SIZE> DEVICE void put_change(const delta_kind &q, const delta_row &r, uint8_t *stream, uint32_t bit)
{
	const uint64_t step = delta_step(&q, r.x, r.y), size = delta_magnitude(step, SIZE);
	const uint32_t k = delta_class_k(r.class_);

	bit = put_rice(stream, bit, r.gap, k, WIRE_RICE_GAP_BITS);
	or_bits(stream, bit++, delta_negative(step, SIZE));
	for (uint32_t i = 1; i < codes_of(size); i++, bit += k + 1)
		or_bits(stream, bit, 1);
	if (size > WIRE_DELTA_MORE)
		put_gamma(stream, bit, size - WIRE_DELTA_MORE);
}

/* Write the steps of a block whose dtype has exponents to a zeroed bit stream. s: result of sum_block. */
template <int SIZE>
DEVICE void put_steps(const delta_pair &p, int scale, const delta_sums &s, uint32_t top, uint8_t *stream, uint32_t lane)
{
	uint32_t all, at = warp_scan((uint32_t)s.bits, lane, &all); /* lane r: bit position of the codes of class r */

	if (lane && lane <= top)
		at = put_gamma(stream, at, s.codes + 1);
	walk_rows<SIZE>(
		p, scale,
		[&](const delta_row &r) {
			const bool small = r.there && !r.class_;
			const uint32_t k = small ? small_k<SIZE>(p.q, r, scale) : 0;
			const uint64_t code = small ? small_code<SIZE>(p.q, r) : 0;
			uint32_t nbits = small ? rice_nbits(code, k, 8 * SIZE) : 0, place = 0;

			if (__any_sync(FULL, small)) {
				const uint32_t rank = warp_scan(nbits, lane, &all), from = __shfl_sync(FULL, at, 0);

				if (small)
					put_rice(stream, from + rank, code, k, 8 * SIZE);
				at += lane ? 0 : all;
			}
			nbits = r.changed && r.class_ ? change_nbits<SIZE>(p.q, r) : 0;
			for (uint32_t left = __ballot_sync(FULL, nbits != 0); left; left &= left - 1) {
				const uint32_t from = (uint32_t)__ffs((int)left) - 1;
				const uint32_t class_ = __shfl_sync(FULL, r.class_, from);
				const uint32_t here = __shfl_sync(FULL, at, class_),
					       more = __shfl_sync(FULL, nbits, from);

				place = lane == from ? here : place;
				at += lane == class_ ? more : 0;
			}
			if (nbits)
				put_change<SIZE>(p.q, r, stream, place);
		},
		lane);
}

/*
 * Write the patches of a block to a zeroed bit stream. If `steps` is set, write the steps of a block whose dtype has no
 * exponents instead.
 */
template <int SIZE>
DEVICE void put_patches(const delta_pair &p, uint32_t gap_k, bool steps, uint8_t *stream, uint32_t lane)
{
	uint32_t at = 0, all;

	walk_rows<SIZE>(
		p, NO_SCALE,
		[&](const delta_row &r) {
			const uint64_t step = delta_step(&p.q, r.x, r.y), size = delta_magnitude(step, SIZE);
			uint32_t nbits = 0;

			if (!__any_sync(FULL, r.changed))
				return;
			if (r.changed)
				nbits = rice_nbits(r.patch_gap, gap_k, WIRE_RICE_GAP_BITS) +
					(steps ? 1 + gamma_nbits(size) : 8 * SIZE);
			uint32_t bit = at + warp_scan(nbits, lane, &all);

			at += all;
			if (!r.changed)
				return;
			bit = put_rice(stream, bit, r.patch_gap, gap_k, WIRE_RICE_GAP_BITS);
			if (!steps) {
				or_stream(stream, bit, r.x ^ r.y);
				return;
			}
			or_bits(stream, bit, delta_negative(step, SIZE));
			put_gamma(stream, bit + 1, size);
		},
		lane);
}

/* Copy a block's values to `to`, a multiple of 4 bytes. */
template <int SIZE> DEVICE void put_raw(const delta_pair &p, uint8_t *to, uint32_t lane)
{
	const uint8_t *from = p.values + p.first * SIZE;
	const uint32_t nbytes = p.m * SIZE;

	for (uint32_t k = 4 * lane; k < nbytes; k += 128) {
		const uint32_t n = nbytes - k < 4 ? nbytes - k : 4, word = load_bytes(from + k, n);

		if (n == 4)
			*(uint32_t *)(to + k) = word;
		for (uint32_t i = 0; i < n && n < 4; i++)
			to[k + i] = (uint8_t)(word >> 8 * i);
	}
}

#endif
