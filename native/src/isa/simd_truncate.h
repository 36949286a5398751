/* simd_truncate.h - TRUNCATE: patterns, pieces and fields, in vectors: see simd_loops.h. */
/* Vectorized round_truncate of n patterns x, in place. Store the exponents of the results in e. */
static inline size_t truncate_simd(const struct truncate_kind *q, const uint8_t *drop, int nearest, size_t n,
				   uint32_t *x, uint8_t *e)
{
	const V last = SET1((int)q->last), mbits = SET1(q->mbits), one = SET1(1), zero = SET1(0);
	size_t i = 0;

	for (; i + STEP <= n; i += STEP) {
		V c[4];

		for (int k = 0; k < 4; k++) {
			V u = LOAD(x + i + LANES * k), drops = WIDEN8(drop + i + LANES * k);
			V unit = SHL(one, drops), kept = SUB(zero, unit), up = u;

			if (nearest) {
				V half = ADD(SUB(SRL(unit, 1), one), AND(SHR(u, drops), one));

				up = ADD(u, AND(half, SUB(unit, one))); /* adds 0 if no bits are dropped */
			}
			up = SELECT(EQ(AND(SHR(up, mbits), last), last), u, up);
			up = SELECT(EQ(AND(SHR(u, mbits), last), zero), zero, AND(up, kept));
			c[k] = AND(SHR(up, mbits), last);
			STORE(x + i + LANES * k, up);
		}
		NARROW(e + i, c);
	}
	return i;
}

static inline size_t join_pieces_simd(const struct truncate_kind *q, const uint8_t *const piece[4], const uint8_t *e,
				      size_t n, uint32_t *x)
{
	const uint8_t *a = piece[0], *b = piece[1], *c = piece[2], *d = piece[3];
	const int to_c = q->width[3], to_b = to_c + q->width[2], to_a = to_b + q->width[1];
	const V of_a = SET1(to_a), of_b = SET1(to_b), of_c = SET1(to_c), mbits = SET1(q->mbits), sign = SET1(q->sign);
	const V mantissa = SET1((1 << q->mbits) - 1), zero = SET1(0);
	size_t i = 0;

	for (; i + LANES <= n; i += LANES) {
		V f = OR(OR(SHL(WIDEN8(a + i), of_a), SHL(WIDEN8(b + i), of_b)),
			 OR(SHL(WIDEN8(c + i), of_c), WIDEN8(d + i)));
		V exponent = WIDEN8(e + i);

		f = OR(AND(f, mantissa), OR(SHL(exponent, mbits), SHL(SHR(f, mbits), sign)));
		STORE(x + i, SELECT(EQ(exponent, zero), zero, f));
	}
	return i;
}

/*
 * Combine the kept bits of the fields of two adjacent values in each 64-bit lane: pair has the bits, wide their number.
 */
static inline size_t field_pairs_simd(const uint32_t *f, const uint8_t *width, size_t n, int total, uint64_t *pair,
				      uint64_t *wide)
{
	const V all = SET1(total), low = SETQ(0xffffffff);
	size_t i = 0;

	for (; i + LANES <= n; i += LANES) {
		V w = WIDEN8(width + i), first = AND(w, low), x = SHR(LOAD(f + i), SUB(all, w));

		STORE(pair + i / 2, OR(AND(x, low), SHLQ(SRLQ(x, 32), first)));
		STORE(wide + i / 2, ADDQ(first, SRLQ(w, 32)));
	}
	return i;
}

#define FIELD_PAIRS field_pairs_simd
#define TRUNCATE_PATTERNS truncate_simd
#ifndef JOIN_PIECES
#define JOIN_PIECES join_pieces_simd
#endif
