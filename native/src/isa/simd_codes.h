/*
 * simd_codes.h - generate random bits, encode values to codes and decode codes to values, in vectors: see simd_loops.h.
 */
/*
 * Philox blocks per vector: each 64-bit lane has one block. Vectors c hold one word of the block each, in the lower
 * halves of lanes; upper halves are ignored. Block counters must not carry into their upper word.
 */
#define BLOCKS (LANES / 2)

struct round_keys {
	V k0[PHILOX_ROUNDS], k1[PHILOX_ROUNDS];
};

static inline void draw_blocks(const struct round_keys *key, uint32_t stream_high, uint64_t block, int chains,
			       uint16_t *h)
{
	V c[CHAINS][4];

	for (int i = 0; i < chains; i++) {
		c[i][0] = ADDQ(SETQ((uint32_t)block + (uint32_t)(BLOCKS * i)), SEQUENCE);
		c[i][1] = SETQ((long long)(block >> 32));
		c[i][2] = SET1(0);
		c[i][3] = SETQ(stream_high);
	}
	for (int r = 0; r < PHILOX_ROUNDS; r++)
		for (int i = 0; i < chains; i++) {
			V a = MULU(c[i][0], SETQ(PHILOX_M0)), b = MULU(c[i][2], SETQ(PHILOX_M1));

			c[i][0] = XOR3(SRLQ(b, 32), c[i][1], key->k0[r]);
			c[i][2] = XOR3(SRLQ(a, 32), c[i][3], key->k1[r]);
			c[i][1] = b;
			c[i][3] = a;
		}
	for (int i = 0; i < chains; i++, h += 8 * BLOCKS) {
		V low = ODD_WORDS(c[i][0], c[i][1]), high = ODD_WORDS(c[i][2], c[i][3]);

		STORE(h, UNPACKLOQ(low, high));
		STORE(h + 4 * BLOCKS, UNPACKHIQ(low, high));
	}
}

static inline size_t halves_simd(struct philox key, uint64_t block, size_t nblocks, uint16_t *h)
{
	struct round_keys keys;
	size_t b = 0;

	if (nblocks < BLOCKS || (uint32_t)block > UINT32_MAX - nblocks)
		return 0;
	for (int r = 0; r < PHILOX_ROUNDS; r++) {
		keys.k0[r] = SETQ(key.seed + PHILOX_W0 * (uint32_t)r);
		keys.k1[r] = SETQ(key.stream + PHILOX_W1 * (uint32_t)r);
	}
	for (; b + CHAINS * BLOCKS <= nblocks; b += CHAINS * BLOCKS)
		draw_blocks(&keys, key.stream_high, block + b, CHAINS, h + 8 * b);
	for (; b + BLOCKS <= nblocks; b += BLOCKS)
		draw_blocks(&keys, key.stream_high, block + b, 1, h + 8 * b);
	return b;
}

/* Return 16 random bits per lane, for values from i on. h NULL: return 2^15, half the range, to round to nearest. */
static inline V draws(const uint16_t *h, size_t i)
{
	return h ? WIDEN16(h + i) : SET1(0x8000);
}

/* Return 2 h + 1 for 16 random bits h per lane: the offset that round_place adds, in half units. */
static inline V fine_draws(const uint16_t *h, size_t i)
{
	V draw = draws(h, i);

	return ADD(ADD(draw, draw), SET1(1));
}

/* Vectorized round_ternary_code. Set *most to the largest magnitude. */
static inline size_t ternary_codes_simd(const float_any *x, size_t n, float s, const uint16_t *h, uint8_t *code,
					int32_t *most)
{
	const struct over over = round_over(s, 65536);
	const F up = SETF(over.up), by = SETF(over.by);
	const V top = AS_V(SETF(s)), one = SET1(1);
	const int tiny = over.up != 1;
	V max = SET1(0);
	size_t i = 0;

	for (; i + STEP <= n; i += STEP) {
		V c[4];

		fetch_ahead(x + i);
		for (int k = 0; k < 4; k++) {
			V u = LOAD(x + i + LANES * k), a = AND(u, SET1((int)ROUND_ABS)), draw = draws(h, i + LANES * k);
			F y = AS_F(MIN(a, top));
			V high = TRUNC(MULF(tiny ? MULF(y, up) : y, by)); /* 65536 exceeds every 16-bit random number */
			MASK keep = EITHER(GT(high, draw), EQ(AS_V(y), top));

			max = MAX(max, a);
			c[k] = SELECT(EQ(high, draw), SET1(TERNARY_TIE), SET1(0));
			c[k] = SELECT(keep, ADD(one, SRL(u, 31)), c[k]);
		}
		NARROW(code + i, c);
	}
	*most = largest(max, *most);
	return i;
}

/* Vectorized round_small_nearest or, with random bits, round_small_stochastic. */
static inline V small_simd(F y, int mbits, int bias, const uint16_t *h, size_t i)
{
	const int shift = 23 - mbits, lost = shift - 16;
	V a = AS_V(y), normal, small;

	if (h) {
		V draw = draws(h, i);
		F place = MULF(y, AS_F(SET1((127 + 17 + bias + mbits - 1) << 23)));

		normal = ADD(a, ADD(SLL(draw, lost), SET1((1 << lost >> 1) - ((127 - bias) << 23))));
		small = SRL(ADD(TRUNC(place), fine_draws(h, i)), 17);
	} else {
		const V step = SET1((127 + 24 - bias - mbits) << 23);

		normal = ADD(AND(SRL(a, shift), SET1(1)), SET1((1 << (shift - 1)) - 1 - ((127 - bias) << 23)));
		normal = ADD(a, normal);
		small = SUB(AS_V(ADDF(y, AS_F(step))), step);
	}
	return SELECT(GT(a, SET1(((128 - bias) << 23) - 1)), SRL(normal, shift), small);
}

/* Compute FLOAT8's codes in rows of `row` values, a multiple of LANES; 0: one row. */
static inline size_t float8_codes_simd(int mbits, int bias, float max, const float_any *x, size_t n, size_t row,
				       const float *scale, const uint16_t *h, int finite, uint8_t *code)
{
	const F most = SETF(max);
	F by = SETF(*scale);
	size_t i = 0;

	for (; i + STEP <= n; i += STEP) {
		V c[4];

		fetch_ahead(x + i);
		for (int k = 0; k < 4; k++) {
			V u = LOAD(x + i + LANES * k), a = AND(u, SET1((int)ROUND_ABS));

			if (row)
				by = SETF(scale[(i + LANES * (size_t)k) / row]);
			c[k] = small_simd(MINF(MULF(AS_F(a), by), most), mbits, bias, h, i + LANES * k);
			if (!finite)
				c[k] = SELECT(GT(a, SET1(ROUND_INF - 1)), SET1(FLOAT8_NAN), c[k]);
			c[k] = OR(c[k], SLL(SRL(u, 31), 7));
		}
		NARROW(code + i, c);
	}
	return i;
}

/* Compute FLOAT4's codes of many short rows of `row` values, a multiple of LANES. -0 keeps its sign. */
static inline size_t float4_codes_simd(const float_any *x, size_t n, size_t row, const float *scale, const uint16_t *h,
				       uint8_t *code)
{
	size_t i = 0;

	for (; i + STEP <= n; i += STEP) {
		V c[4];

		fetch_ahead(x + i);
		for (size_t k = 0; k < 4; k++) {
			size_t at = i + LANES * k;
			float s = scale[at / row];
			V u = LOAD(x + at);
			F a = AS_F(AND(u, SET1((int)ROUND_ABS)));

			a = MINF(DIVF(a, SETF(s > 0 ? s : INFINITY)), SETF(6));
			c[k] = OR(small_simd(a, 1, 1, h, at), SLL(SRL(u, 31), 3));
		}
		NARROW(code + i, c);
	}
	return i;
}

/* Vectorized round_level_code; amax > 0. */
static inline size_t level_codes_simd(int odd, const float_any *x, size_t n, float amax, int levels, const uint16_t *h,
				      uint8_t *code)
{
	const struct over over = round_over(amax, 1);
	const F up = SETF(over.up), by = SETF(over.by), steps = SETF((float)levels * (odd ? 131072 : 65536));
	const int tiny = over.up != 1;
	size_t i = 0;

	for (; i + STEP <= n; i += STEP) {
		V c[4];

		fetch_ahead(x + i);
		for (int k = 0; k < 4; k++) {
			V u = LOAD(x + i + LANES * k), minus = SRA(u, 31);
			F y = AS_F(odd ? AND(u, SET1((int)ROUND_ABS)) : u);
			F q = MULF(tiny ? MULF(y, up) : y, by);

			c[k] = TRUNC(MULF(odd ? q : ADDF(q, SETF(1)), steps));
			c[k] = SRL(ADD(c[k], fine_draws(h, i + LANES * k)), 17);
			if (odd)
				c[k] = ADD(SET1(levels), SUB(XOR(c[k], minus), minus));
		}
		NARROW(code + i, c);
	}
	return i;
}

/*
 * Return x / by, rounded once, where x has at most 8 mantissa bits. `inverse` is 1 / by; a fused multiply-add corrects
 * the product x * inverse. A test checks every mantissa of `by`. Intermediate results must not overflow or underflow.
 */
static inline F over_simd(F x, F by, F inverse)
{
	F y = MULF(x, inverse);

	return FMA(FNMA(y, by, x), inverse, y);
}

/* Vectorized round_level; amax > 0. */
static inline size_t level_values_simd(const uint8_t *code, size_t n, float amax, int odd, int levels, float_any *y)
{
	const F most = SETF((float)levels), inverse = SETF(1 / (float)levels), by = SETF(amax);
	size_t i = 0;

	for (; i + LANES <= n; i += LANES) {
		V c = WIDEN8(code + i);
		F level = FLOAT(SUB(odd ? c : ADD(c, c), SET1(levels)));

		STOREF(y + i, MULF(by, over_simd(level, most, inverse)));
	}
	return i;
}

/* Vectorized round_affine_code; half > 0. */
static inline size_t affine_codes_simd(const float_any *x, size_t n, float half, float middle, int levels,
				       const uint16_t *h, uint8_t *code)
{
	const struct over over = round_over(half, 1);
	const F up = SETF(over.up), by = SETF(over.by), minus = SETF(-middle), steps = SETF((float)levels * 65536);
	const F most = SETF((float)levels * 131072);
	const int tiny = over.up != 1;
	size_t i = 0;

	for (; i + STEP <= n; i += STEP) {
		V c[4];

		fetch_ahead(x + i);
		for (int k = 0; k < 4; k++) {
			F y = ADDF(LOADF(x + i + LANES * k), minus);
			F place = MULF(ADDF(MULF(tiny ? MULF(y, up) : y, by), SETF(1)), steps);

			c[k] = TRUNC(
				AS_F(MAX(AS_V(MINF(place, most)), SET1(0)))); /* bits of negative floats are negative */
			c[k] = SRL(ADD(c[k], fine_draws(h, i + LANES * k)), 17);
		}
		NARROW(code + i, c);
	}
	return i;
}

/* Vectorized round_affine. */
static inline F affine_simd(F ratio, F half, F middle)
{
	V u = AS_V(ADDF(middle, MULF(half, ratio))), a = AND(u, SET1((int)ROUND_ABS));

	return AS_F(OR(MIN(a, SET1(ROUND_MAX)), XOR(u, a)));
}

static inline int affine_table_simd(const float ratio[16], float half, float middle, float value[16])
{
	for (int i = 0; i < 16; i += LANES)
		STOREF(value + i, affine_simd(LOADF(ratio + i), SETF(half), SETF(middle)));
	return 16;
}

/* Vectorized affine_values. */
static inline size_t affine_values_simd(const uint8_t *code, size_t n, float half, float middle, int levels,
					float_any *y)
{
	const F all = SETF((float)levels), inverse = SETF(1 / (float)levels), by = SETF(half), to = SETF(middle);
	size_t i = 0;

	for (; i + LANES <= n; i += LANES) {
		V c = WIDEN8(code + i);

		c = SUB(ADD(c, c), SET1(levels));
		STOREF(y + i, affine_simd(over_simd(FLOAT(c), all, inverse), by, to));
	}
	return i;
}

static inline size_t table_values_simd(int few, const uint8_t *code, size_t n, const float ratio[16], float scale,
				       float_any *y)
{
	const TABLE table = TABLE_LOAD(ratio, SETF(scale));
	size_t i = 0;

	for (; i + STEP <= n; i += STEP)
		for (int k = 0; k < 4; k++)
			STOREF(y + i + LANES * k, TABLE_FIND(table, WIDEN8(code + i + LANES * k), few));
	for (; i + LANES <= n; i += LANES)
		STOREF(y + i, TABLE_FIND(table, WIDEN8(code + i), few));
	return i;
}

static inline size_t float8_values_simd(int mbits, int bias, int last, const uint8_t *code, size_t n, float scale,
					float_any *y)
{
	const V magnitude = SET1(0x7f);
	const F minus_least = SETF(-round_float((128 - (uint32_t)bias) << 23)), by = SETF(scale),
		inverse = SETF(1 / scale);
	const int usual = scale > 0x1p-100f && scale < 0x1p100f;
	size_t i = 0;

	for (; i + LANES <= n; i += LANES) {
		V c = WIDEN8(code + i), a = AND(c, magnitude), v;
		F normal = AS_F(ADD(SLL(a, 23 - mbits), SET1((127 - bias) << 23)));
		F x = MINF(normal, FMA(normal, SETF(2), minus_least)); /* as round_small_value */

		v = AS_V(usual ? over_simd(x, by, inverse) : DIVF(x, by));
		v = SELECT(GT(a, SET1(last)), SET1(0x7fc00000), v);
		STOREF(y + i, AS_F(OR(v, SLL(SRL(c, 7), 31))));
	}
	return i;
}

/* Vectorized mx_values. Scales are powers of two, so multiplying by the reciprocal is exact. */
static inline size_t mx_values_simd(int mbits, int bias, int last, const uint8_t *code, size_t n, const float *scale,
				    float_any *y)
{
	const F minus_least = SETF(-round_float((128 - (uint32_t)bias) << 23));
	size_t i = 0;

	for (; i + LANES <= n; i += LANES) {
		V c = WIDEN8(code + i), a = AND(c, SET1(0x7f)), v;
		F normal = AS_F(ADD(SLL(a, 23 - mbits), SET1((127 - bias) << 23)));
		F x = MINF(normal, FMA(normal, SETF(2), minus_least)); /* as round_small_value */

		v = SELECT(GT(a, SET1(last)), SET1(0x7fc00000), AS_V(MULF(x, SETF(1 / scale[i / 32]))));
		STOREF(y + i, AS_F(OR(v, SLL(SRL(c, 7), 31))));
	}
	return i;
}

#define HALVES halves_simd
#define TERNARY_CODES ternary_codes_simd
#define FLOAT8_CODES float8_codes_simd
#define FLOAT4_CODES float4_codes_simd
#define LEVEL_CODES level_codes_simd
#define LEVEL_VALUES level_values_simd
#define AFFINE_CODES affine_codes_simd
#define AFFINE_VALUES affine_values_simd
#define AFFINE_TABLE affine_table_simd
#define TABLE_VALUES table_values_simd
#define FLOAT8_VALUES float8_values_simd
#define MX_VALUES mx_values_simd
