/* truncate_loops.h - the loops of TRUNCATE, compiled once for each instruction set.
 *
 * Values are patterns of 16 or 32 bits, widened to 32: sign, exponent, `mbits` bits of mantissa.
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

/* Exponents of A, as metrics state it: 0 where it is NaN, 0 or subnormal, 255 where it is Inf. v and m may be NULL. */
static void metric_exponents(const struct metric_terms *t, const float_any *theta, const float_any *v,
			     const float_any *m, size_t n, uint8_t *restrict ea)
{
	for (size_t i = 0; i < n; i++) {
		float factor = v ? (sqrtf(t->v * v[i]) + t->eps) * t->theta_v + t->theta : t->theta;
		float a = theta[i] * factor;

		a = m ? a + t->m * m[i] : a;
		ea[i] = round_exponent(a);
	}
}

static void exponents_of(const float *a, size_t n, uint8_t *restrict ea)
{
	for (size_t i = 0; i < n; i++)
		ea[i] = round_exponent(a[i]);
}

static void drops_of(const struct truncate_kind *q, const uint8_t *e, const uint8_t *ea, size_t n, uint8_t *restrict k)
{
	short guard = (short)(q->guard + 127 - (int)q->bias), mbits = (short)q->mbits;
	short k1 = q->drop[1], k2 = q->drop[2], k3 = q->drop[3];
	uint8_t last = (uint8_t)q->last;

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
		level[i] = (uint8_t)((drop[i] >= k1) + (drop[i] >= k2) + (drop[i] >= k3));
}

static void drops_at(const struct truncate_kind *q, const uint8_t *level, size_t n, uint8_t *restrict drop)
{
	uint8_t k1 = q->drop[1], k2 = q->drop[2], k3 = q->drop[3];

	for (size_t i = 0; i < n; i++) {
		uint8_t k = level[i] >= 1 ? k1 : 0;

		k = level[i] >= 2 ? k2 : k;
		drop[i] = level[i] >= 3 ? k3 : k;
	}
}

/* Exponents to the patterns that the scale model lowers, and back. */
static void exponents_up(const uint8_t *e, size_t n, int shift, uint16_t *restrict u)
{
	for (size_t i = 0; i < n; i++)
		u[i] = (uint16_t)(e[i] << shift);
}

static void exponents_down(const uint16_t *u, size_t n, int shift, uint8_t *restrict e)
{
	for (size_t i = 0; i < n; i++)
		e[i] = (uint8_t)(u[i] >> shift);
}

/*
 * One symbol for a lowered exponent and its level: 0 if the exponent is, or if it lies too far from the others; then it
 * must be escaped as its pair, 4 e + level. Returns how many.
 */
static size_t join(const uint8_t *e, const uint8_t *level, size_t n, int base, uint16_t *restrict pair,
		   uint8_t *restrict symbol)
{
	size_t outside = 0;

	for (size_t at = 0; at < n; at += 4096) { /* 16 bits can count so many */
		size_t m = n - at < 4096 ? n - at : 4096;
		uint16_t some = 0;

		for (size_t i = at; i < at + m; i++) {
			uint16_t has = (uint16_t)-(e[i] != 0), both = (uint16_t)((e[i] << 2 | level[i]) & has);
			uint16_t t = (uint16_t)(both - 4 * base), in = (uint16_t)-(t >= 4 && t < 256);

			pair[i] = both;
			symbol[i] = (uint8_t)(t & in & has);
			some = (uint16_t)(some + (has & ~in & 1));
		}
		outside += some;
	}
	return outside;
}

static void pairs_of(const uint8_t *symbol, size_t n, int base, uint16_t *restrict pair)
{
	for (size_t i = 0; i < n; i++)
		pair[i] = (uint16_t)(symbol[i] ? symbol[i] + 4 * base : 0);
}

static void unjoin(const uint16_t *pair, size_t n, uint8_t *restrict e, uint8_t *restrict level)
{
	for (size_t i = 0; i < n; i++) {
		e[i] = (uint8_t)(pair[i] >> 2);
		level[i] = (uint8_t)(pair[i] & 3);
	}
}

/* The OR of bits dropped where the exponent is e0. */
static uint8_t drops_under(const uint8_t *e, const uint8_t *drop, size_t n, uint8_t e0)
{
	uint8_t any = 0;

	for (size_t i = 0; i < n; i++)
		any |= (uint8_t)(drop[i] & -(e[i] == e0));
	return any;
}

/* The OR of p where it is below 4: symbols that stand for nothing. */
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

static void truncate(const struct truncate_kind *q, const uint8_t *drop, int nearest, size_t n, uint32_t *restrict x)
{
	uint32_t mbits = (uint32_t)q->mbits, last = q->last;

	for (size_t i = 0; i < n; i++)
		x[i] = round_truncate(x[i], drop[i], (uint32_t)nearest, mbits, last);
}

/* Sign and mantissa, right-justified: mbits + 1 bits. */
static void fields(const uint32_t *x, size_t n, int mbits, int sign, uint32_t *restrict f)
{
	for (size_t i = 0; i < n; i++)
		f[i] = (x[i] & ((1u << mbits) - 1)) | x[i] >> sign << mbits;
}

static void field_bytes(const uint32_t *f, size_t n, int shift, uint32_t mask, uint8_t *restrict p)
{
	for (size_t i = 0; i < n; i++)
		p[i] = (uint8_t)(f[i] >> shift & mask);
}

static void add_field_bytes(const uint8_t *p, size_t n, int shift, uint32_t *restrict f)
{
	for (size_t i = 0; i < n; i++)
		f[i] |= (uint32_t)p[i] << shift;
}

/* Fields and exponents to patterns; where e is 0, to 0. */
static void assemble(const uint32_t *f, const uint8_t *e, size_t n, int mbits, int sign, uint32_t *restrict x)
{
	for (size_t i = 0; i < n; i++) {
		uint32_t y = (f[i] & ((1u << mbits) - 1)) | (uint32_t)e[i] << mbits | f[i] >> mbits << sign;

		x[i] = e[i] ? y : 0;
	}
}

/* keep[i]: e is not 0 and at most `most` bits are dropped. */
static void keeps(const uint8_t *e, const uint8_t *drop, size_t n, uint8_t most, uint8_t *restrict keep)
{
	for (size_t i = 0; i < n; i++)
		keep[i] = (uint8_t)((e[i] != 0) & (drop[i] <= most));
}

#define TRUNCATE_LOOPS                                                                                                 \
	.load_patterns = load_patterns, .store_patterns = store_patterns, .metric_exponents = metric_exponents,        \
	.exponents_of = exponents_of, .drops_of = drops_of, .exponents = exponents, .truncate = truncate,              \
	.fields = fields, .field_bytes = field_bytes, .add_field_bytes = add_field_bytes, .assemble = assemble,        \
	.keeps = keeps, .levels_of = levels_of, .drops_at = drops_at, .exponents_up = exponents_up,                    \
	.exponents_down = exponents_down, .join = join, .pairs_of = pairs_of, .unjoin = unjoin,                        \
	.below_four = below_four, .drops_under = drops_under
