/*
 * truncate_loops.h - loops without intrinsics for TRUNCATE, compiled once per instruction set.
 *
 * Values are bit patterns of 16 or 32 bits, each stored in 32 bits: sign, exponent, `mbits` mantissa bits.
 */
#include "kernels.h"

static void load_patterns(const void *src, size_t n, int nbytes, uint32_t *restrict x)
{
	if (nbytes == 4)
		memcpy(x, src, 4 * n);
	else
		for (size_t i = 0; i < n; i++)
			x[i] = native16(src, i);
}

static void store_patterns(const uint32_t *x, size_t n, int nbytes, void *dst)
{
	char *restrict d = dst;

	if (nbytes == 4) {
		memcpy(dst, x, 4 * n);
		return;
	}
	for (size_t i = 0; i < n; i++) {
		uint16_t y = (uint16_t)x[i];

		memcpy(d + 2 * i, &y, 2);
	}
}

/* Compute the exponents of the metric A: 0 if A is NaN, 0 or subnormal, 255 if A is Inf. v and m may be NULL. */
static void metric_exponents(const struct metric_terms *t, const float_any *theta, const float_any *v,
			     const float_any *m, size_t n, uint8_t *restrict ea)
{
	for (size_t i = 0; i < n; i++) {
		float root = v ? round_add(round_sqrt(round_mul(t->v, v[i])), t->eps) : 0;
		float factor = v ? round_add(round_mul(root, t->theta_v), t->theta) : t->theta;
		float a = round_mul(theta[i], factor);

		ea[i] = round_exponent(m ? round_weighted(a, t->m, m[i]) : a);
	}
}

static void exponents_of(const float *a, size_t n, uint8_t *restrict ea)
{
	for (size_t i = 0; i < n; i++)
		ea[i] = round_exponent(a[i]);
}

static void drops_of(const struct truncate_kind *q, const uint8_t *e, const uint8_t *ea, size_t n, uint8_t *restrict k)
{
	short guard = (short)(q->guard + 127 - (int)q->bias);
	uint8_t k1 = q->drop[1], k2 = q->drop[2], k3 = q->drop[3];
	uint8_t last = (uint8_t)q->last, mbits = (uint8_t)q->mbits;

	if (q->by_bit)
		for (size_t i = 0; i < n; i++)
			k[i] = round_drop_bits(e[i], ea[i], last, guard, mbits);
	else
		for (size_t i = 0; i < n; i++)
			k[i] = round_drop_level(e[i], ea[i], last, guard, k1, k2, k3);
}

static void levels_of(const struct truncate_kind *q, const uint8_t *drop, size_t n, uint8_t *restrict level)
{
	uint8_t k1 = q->drop[1], k2 = q->drop[2], k3 = q->drop[3];

	for (size_t i = 0; i < n; i++)
		level[i] = round_level_of_drop(drop[i], k1, k2, k3);
}

static void drops_at(const struct truncate_kind *q, const uint8_t *level, size_t n, uint8_t *restrict drop)
{
	uint8_t k1 = q->drop[1], k2 = q->drop[2], k3 = q->drop[3];

	for (size_t i = 0; i < n; i++)
		drop[i] = round_drop_of_level(level[i], k1, k2, k3);
}

static void lower_exponents(const uint8_t *e, const uint16_t *offset, uint8_t last, int shift, size_t n, uint8_t *u)
{
	for (size_t i = 0; i < n; i++)
		u[i] = bits_lower_exponent(e[i], (uint8_t)(offset[i] >> shift), last);
}

static void raise_exponents(const uint8_t *u, const uint16_t *offset, uint8_t last, int shift, size_t n, uint8_t *e)
{
	for (size_t i = 0; i < n; i++)
		e[i] = bits_raise_exponent(u[i], (uint8_t)(offset[i] >> shift), last);
}

/* Combine exponents and levels into pairs (bits_pair) and symbols. Return the number of values that have no symbol. */
static size_t join(const uint8_t *e, const uint8_t *level, size_t n, int base, uint16_t *restrict pair,
		   uint8_t *restrict symbol)
{
	size_t outside = 0;

	for (size_t at = 0; at < n; at += 4096) { /* 16 bits can count 4096 values */
		size_t m = n - at < 4096 ? n - at : 4096;
		uint16_t some = 0;

		for (size_t i = at; i < at + m; i++) {
			uint16_t both = bits_pair(e[i], level[i]), one = bits_pair_symbol(both, base);

			pair[i] = both;
			symbol[i] = (uint8_t)one;
			some = (uint16_t)(some + (both != 0 && one == 0));
		}
		outside += some;
	}
	return outside;
}

static void pairs_of(const uint8_t *symbol, size_t n, int base, uint16_t *restrict pair)
{
	for (size_t i = 0; i < n; i++)
		pair[i] = bits_symbol_pair(symbol[i], base);
}

static void unjoin(const uint16_t *pair, size_t n, uint8_t *restrict e, uint8_t *restrict level)
{
	for (size_t i = 0; i < n; i++) {
		e[i] = (uint8_t)(pair[i] >> 2);
		level[i] = (uint8_t)(pair[i] & 3);
	}
}

/* Return the bitwise OR of drop[i] over values whose exponent is e0. */
static uint8_t drops_under(const uint8_t *e, const uint8_t *drop, size_t n, uint8_t e0)
{
	uint8_t any = 0;

	for (size_t i = 0; i < n; i++)
		any |= (uint8_t)(drop[i] & -(e[i] == e0));
	return any;
}

/*
 * Return the bitwise OR of the bytes of p that are below 4. Joint symbols 1 to 3 are invalid, so a non-zero result is
 * an error.
 */
static uint8_t below_four(const uint8_t *p, size_t n)
{
	uint8_t any = 0;

	for (size_t i = 0; i < n; i++)
		any |= (uint8_t)(p[i] & -(p[i] < 4));
	return any;
}

static void exponents(const uint32_t *x, size_t n, int mbits, uint32_t last, uint8_t *restrict e)
{
	for (size_t i = 0; i < n; i++)
		e[i] = (uint8_t)(x[i] >> mbits & last);
}

#ifndef TRUNCATE_PATTERNS
#define TRUNCATE_PATTERNS(q, drop, nearest, n, x, e) 0
#define JOIN_PIECES(q, piece, e, n, x) 0
#endif
#ifndef SPLIT_PIECES
#define SPLIT_PIECES(q, x, n, piece) 0
#endif

static void truncate(const struct truncate_kind *q, const uint8_t *drop, int nearest, size_t n, uint32_t *restrict x,
		     uint8_t *restrict e)
{
	uint32_t mbits = (uint32_t)q->mbits, last = q->last;

	for (size_t i = TRUNCATE_PATTERNS(q, drop, nearest, n, x, e); i < n; i++) {
		x[i] = round_truncate(x[i], drop[i], (uint32_t)nearest, mbits, last);
		e[i] = (uint8_t)(x[i] >> mbits & last);
	}
}

static size_t widths(const uint8_t *e, const uint8_t *drop, size_t n, int total, int most, uint8_t *restrict width)
{
	uint8_t all = (uint8_t)total, limit = (uint8_t)most;
	size_t sum = 0;

	for (size_t at = 0; at < n; at += 2048) { /* 16 bits can sum the widths of 2048 values */
		size_t end = n - at < 2048 ? n : at + 2048;
		uint16_t some = 0;

		for (size_t i = at; i < end; i++) {
			uint8_t keeps = (uint8_t)(all - drop[i]);

			keeps = keeps < limit ? keeps : limit;
			keeps = (uint8_t)(keeps & -(e[i] != 0));
			width[i] = keeps;
			some = (uint16_t)(some + keeps);
		}
		sum += some;
	}
	return sum;
}

static uint32_t any_bits(const uint32_t *x, size_t n)
{
	uint32_t any = 0;

	for (size_t i = 0; i < n; i++)
		any |= x[i];
	return any;
}

static void assemble(const struct truncate_kind *q, const uint32_t *f, const uint8_t *e, size_t n, uint32_t *restrict x)
{
	int mbits = q->mbits, sign = q->sign;

	for (size_t i = 0; i < n; i++)
		x[i] = bits_pattern(f[i], e[i], mbits, sign);
}

static void split_pieces(const struct truncate_kind *q, const uint32_t *x, size_t n, uint8_t *const piece[4])
{
	uint8_t *restrict a = piece[0], *restrict b = piece[1], *restrict c = piece[2], *restrict d = piece[3];
	int mbits = q->mbits, sign = q->sign;
	int to_c = q->width[3], to_b = to_c + q->width[2], to_a = to_b + q->width[1];
	uint32_t b_mask = (1u << q->width[1]) - 1, c_mask = (1u << q->width[2]) - 1, d_mask = (1u << to_c) - 1;

	for (size_t i = SPLIT_PIECES(q, x, n, piece); i < n; i++) {
		uint32_t f = bits_field(x[i], mbits, sign);

		a[i] = (uint8_t)(f >> to_a);
		b[i] = (uint8_t)(f >> to_b & b_mask);
		c[i] = (uint8_t)(f >> to_c & c_mask);
		d[i] = (uint8_t)(f & d_mask);
	}
}

static void join_pieces(const struct truncate_kind *q, const uint8_t *const piece[4], const uint8_t *e, size_t n,
			uint32_t *restrict x)
{
	const uint8_t *a = piece[0], *b = piece[1], *c = piece[2], *d = piece[3];
	int mbits = q->mbits, sign = q->sign;
	int to_c = q->width[3], to_b = to_c + q->width[2], to_a = to_b + q->width[1];

	for (size_t i = JOIN_PIECES(q, piece, e, n, x); i < n; i++) {
		uint32_t f = (uint32_t)a[i] << to_a | (uint32_t)b[i] << to_b | (uint32_t)c[i] << to_c | d[i];

		x[i] = bits_pattern(f, e[i], mbits, sign);
	}
}

#ifndef FIELD_PAIRS
#define FIELD_PAIRS(f, width, n, total, pair, wide) 0
#define UNPACK_FIELDS(src, nbytes, width, n, total, f, bit) 0
#endif
#ifndef FIELD_RUNS
#define FIELD_RUNS(q, x, width, n, run, nbits) 0
#endif
#define PAIRS 64

/*
 * Merge n runs of bits, n even, to n / 2 longer ones. Return 1 if each of these fits into 64 bits after 7 pending bits.
 */
static inline int merge_runs(const uint64_t *run, const uint64_t *nbits, size_t n, uint64_t *restrict pair,
			     uint64_t *restrict wide)
{
	uint64_t above = 0;

	for (size_t i = 0; i < n / 2; i++) {
		uint64_t both = nbits[2 * i] + nbits[2 * i + 1];

		pair[i] = run[2 * i] | run[2 * i + 1] << (nbits[2 * i] & 63);
		wide[i] = both;
		above |= 56 - both; /* the highest bit is set if `both` exceeds 56 */
	}
	return !(above >> 63);
}

/*
 * Write n runs of bits, run i of nbits[i] bits, one after the other from bit `bit` of dst on. *waits holds the pending
 * bits of the last byte. Return the new bit position.
 */
static inline size_t put_runs(const uint64_t *run, const uint64_t *nbits, size_t n, uint8_t *dst, size_t bit,
			      uint64_t *waits)
{
	for (size_t i = 0; i < n; i++) {
		uint64_t word = run[i] << bit % 8 | *waits;
		size_t next = bit + (size_t)nbits[i];

		store64(dst + bit / 8, word);
		*waits = word >> 8 * (next / 8 - bit / 8);
		bit = next;
	}
	return bit;
}

/*
 * Pack fields in pairs of at most 48 bits, which fit into 64 bits after 7 pending bits. The loop's critical path is the
 * update of the bit position and of the pending bits. To shorten that path, pairs are merged to runs of four or eight
 * fields if a run fits into 64 bits.
 */
static void pack_fields(const struct truncate_kind *q, const uint32_t *x, const uint8_t *width, size_t n, uint8_t *dst)
{
	uint64_t run[3][PAIRS], nbits[3][PAIRS], waits = 0;
	int mbits = q->mbits, sign = q->sign, total = mbits + 1;
	uint32_t f[2 * PAIRS];
	size_t bit = 0;

	for (size_t at = 0, m; at < n; at += m) {
		size_t count, t = 0;

		m = n - at < 2 * PAIRS ? n - at : 2 * PAIRS;
		count = FIELD_RUNS(q, x + at, width + at, m, run[0], nbits[0]);
		if (count) {
			bit = put_runs(run[0], nbits[0], count, dst, bit, &waits);
			continue;
		}
		for (size_t i = 0; i < m; i++)
			f[i] = bits_field(x[at + i], mbits, sign);
		for (size_t i = FIELD_PAIRS(f, width + at, m, total, run[0], nbits[0]); i < m; i += 2) {
			uint32_t first = width[at + i], second = i + 1 < m ? width[at + i + 1] : 0;

			run[0][i / 2] = f[i] >> ((uint32_t)total - first);
			if (second)
				run[0][i / 2] |= (uint64_t)(f[i + 1] >> ((uint32_t)total - second)) << first;
			nbits[0][i / 2] = first + second;
		}
		count = (m + 1) / 2;
		while (t < 2 && count % 2 == 0 && merge_runs(run[t], nbits[t], count, run[t + 1], nbits[t + 1])) {
			count /= 2;
			t++;
		}
		bit = put_runs(run[t], nbits[t], count, dst, bit, &waits);
	}
}

static void unpack_fields(const uint8_t *src, size_t nbytes, const uint8_t *width, size_t n, int total,
			  uint32_t *restrict f)
{
	size_t bit = 0, last = nbytes - (nbytes < 16 ? nbytes : 16);
	uint8_t tail[24] = {0}; /* copy of the end of src, followed by zeros, so that 8 bytes can be read anywhere */

	memcpy(tail, src + last, nbytes - last);
	for (size_t i = UNPACK_FIELDS(src, nbytes, width, n, total, f, &bit); i < n; i++) {
		const uint8_t *p = bit / 8 + 8 <= nbytes ? src + bit / 8 : tail + (bit / 8 - last);

		f[i] = (uint32_t)(load64(p) >> bit % 8 & ((1u << width[i]) - 1)) << (total - width[i]);
		bit += width[i];
	}
}

#define TRUNCATE_LOOPS                                                                                                 \
	.load_patterns = load_patterns, .store_patterns = store_patterns, .metric_exponents = metric_exponents,        \
	.exponents_of = exponents_of, .drops_of = drops_of, .exponents = exponents, .truncate = truncate,              \
	.widths = widths, .any_bits = any_bits, .assemble = assemble, .pack_fields = pack_fields,                      \
	.unpack_fields = unpack_fields, .split_pieces = split_pieces, .join_pieces = join_pieces,                      \
	.levels_of = levels_of, .drops_at = drops_at, .lower_exponents = lower_exponents,                              \
	.raise_exponents = raise_exponents, .join = join, .pairs_of = pairs_of, .unjoin = unjoin,                      \
	.below_four = below_four, .drops_under = drops_under
