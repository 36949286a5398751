/*
 * simd_loops.h - loops of row_loops.h and truncate_loops.h in vectors of LANES 32-bit words; common to all instruction
 * sets.
 *
 * Included by avx2.c and avx512.c, which define, besides the operations of encode_lanes.h:
 *   - F, SETF, LOADF, STOREF: a vector of floats
 *   - AS_F AS_V: reinterpret bits as floats, as words
 *   - ADDF MULF DIVF MINF: on floats; MINF gives b where a is NaN
 *   - FMA FNMA (a, b, c): a * b + c, c - a * b, rounded once
 *   - TRUNC: floats to integers, toward zero
 *   - FLOAT (v): integers to floats
 *   - SLL SRL SRA (v, n): shift all lanes by one count
 *   - XOR XOR3 MIN MAX: on words; signed
 *   - LEAST LARGEST (v): the smallest, the largest lane; signed
 *   - GT EQ EITHER: signed comparisons, as MASK; or of two masks
 *   - MULU ADDQ SRLQ: products of the lower halves of 64-bit lanes; sums, shifts
 *   - SETQ SEQUENCE: a 64-bit constant; lane 2i holds i, lane 2i + 1 holds i + BLOCKS / 2
 *   - UNPACKLOQ UNPACKHIQ: even, odd 64-bit lanes of a and b, interleaved
 *   - ODD_WORDS (a, b): a's lower words, and b's as upper ones
 *   - WIDEN8 WIDEN16 (p): bytes, halves to words
 *   - FROM_HALVES TO_HALVES: float16 at p to floats; floats, to nearest even, to float16 at p
 *   - STORE16 (p, v): store numbers below 65536 as LANES halves
 *   - NARROW (p, v[4]): store numbers below 256 as 4 * LANES bytes
 *   - SHLQ (v, w): shift each 64-bit lane by its own count
 *   - TABLE, TABLE_LOAD (x, by): 16 floats, multiplied by `by`
 *   - TABLE_FIND (t, v, few): entries v, which is below 16, or below 8 if few
 *   - SIGNS: highest bits of the lanes, the first lane's lowest
 *   - PUT_NONTEMPORAL (p, v): non-temporal store; p is a multiple of SETTLE_ALIGN
 *   - CHAINS: number of random generators interleaved
 *
 * Each loop returns the number of values processed; the portable loops process the rest.
 */
#define STEP (4 * (size_t)LANES)

/*
 * Value i of a run is added to sum i mod 32: a lane of vector k mod NV if the value is in vector k of a step. The four
 * vectors of a step must therefore begin at sum 0. Also, one scale is broadcast to a whole vector.
 */
_Static_assert(NV *LANES == 32 && 4 % NV == 0, "a step must begin at sum 0: for shorter vectors make V a pair of them");
_Static_assert(16 % LANES == 0, "the shortest rows that share a scale are 16 values, whole vectors");

/* Prefetch distance in bytes while values are coded, so that memory is not idle. */
#define AHEAD 16384

static inline void fetch_ahead(const float_any *x)
{
	for (size_t i = 0; i < 4 * STEP; i += 64)
		_mm_prefetch((const char *)((uintptr_t)x + AHEAD + i), _MM_HINT_T1);
}

/* Return the maximum of v's lanes and x. */
static inline int32_t largest(V v, int32_t x)
{
	int32_t most = LARGEST(v);

	return most > x ? most : x;
}

/* Return the minimum of v's lanes and x. */
static inline int32_t least(V v, int32_t x)
{
	int32_t low = LEAST(v);

	return low < x ? low : x;
}

static inline size_t from_bfloat16_simd(const void *src, size_t n, float *x)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		STOREF(x + i, AS_F(SLL(WIDEN16((const char *)src + 2 * i), 16)));
	return i;
}

/* Vectorized round_to_bfloat16. */
static inline size_t to_bfloat16_simd(const float *x, size_t n, void *dst)
{
	const V magnitude = SET1((int)ROUND_ABS), inf = SET1(ROUND_INF);
	size_t i = 0;

	for (; i + LANES <= n; i += LANES) {
		V u = LOAD(x + i), a = AND(u, magnitude);
		V up = SRL(ADD(ADD(a, SET1(0x7fff)), AND(SRL(a, 16), SET1(1))), 16);

		up = SELECT(GT(a, inf), SET1(0x7fc0), MIN(up, SET1(0x7f7f)));
		STORE16((char *)dst + 2 * i, OR(up, AND(SRL(u, 16), SET1(0x8000))));
	}
	return i;
}

static inline size_t from_float16_simd(const void *src, size_t n, float *x)
{
	size_t i = 0;

	for (; i + LANES <= n; i += LANES)
		STOREF(x + i, FROM_HALVES((const char *)src + 2 * i));
	return i;
}

/* Vectorized round_to_float16. */
static inline size_t to_float16_simd(const float *x, size_t n, void *dst)
{
	const V magnitude = SET1((int)ROUND_ABS), most = AS_V(SETF(65504)), inf = SET1(ROUND_INF);
	size_t i = 0;

	for (; i + LANES <= n; i += LANES) {
		V u = LOAD(x + i), a = AND(u, magnitude);

		a = SELECT(GT(a, inf), SET1(0x7fc00000), MIN(a, most));
		TO_HALVES((char *)dst + 2 * i, AS_F(OR(a, XOR(u, AND(u, magnitude)))));
	}
	return i;
}

static inline size_t abs_max_simd(const float_any *x, size_t n, int32_t *most)
{
	const V magnitude = SET1((int)ROUND_ABS);
	V m[4] = {SET1(0), SET1(0), SET1(0), SET1(0)};
	size_t i = 0;

	for (; i + STEP <= n; i += STEP)
		for (int k = 0; k < 4; k++)
			m[k] = MAX(m[k], AND(magnitude, LOAD(x + i + LANES * k)));
	for (; i + LANES <= n; i += LANES)
		m[0] = MAX(m[0], AND(magnitude, LOAD(x + i)));
	*most = largest(MAX(MAX(m[0], m[1]), MAX(m[2], m[3])), *most);
	return i;
}

/* Vectorized round_ordered. */
static inline V ordered_simd(V bits)
{
	return XOR(bits, SRL(SRA(bits, 31), 1));
}

static inline size_t extremes_simd(const float_any *x, size_t n, int32_t *lowest, int32_t *most)
{
	V low[2] = {SET1(INT32_MAX), SET1(INT32_MAX)}, high[2] = {SET1(INT32_MIN), SET1(INT32_MIN)};
	size_t i = 0;

	for (; i + 2 * LANES <= n; i += 2 * LANES)
		for (int k = 0; k < 2; k++) {
			V v = ordered_simd(LOAD(x + i + LANES * k));

			low[k] = MIN(low[k], v);
			high[k] = MAX(high[k], v);
		}
	*most = largest(MAX(high[0], high[1]), *most);
	*lowest = least(MIN(low[0], low[1]), *lowest);
	return i;
}

/* Vectorized abs_max in whole rows of 32 values, as MX formats have: a call for each would take as long as the loop. */
static inline size_t abs_max_of_32_simd(const float_any *x, size_t n, uint32_t *max)
{
	const V magnitude = SET1((int)ROUND_ABS);
	size_t i = 0;

	for (; i + 32 <= n; i += 32) {
		V m = AND(magnitude, LOAD(x + i));

		for (size_t k = LANES; k < 32; k += LANES)
			m = MAX(m, AND(magnitude, LOAD(x + i + k)));
		max[i / 32] = (uint32_t)LARGEST(m);
	}
	return i;
}

/*
 * Add a tensor and its residual, or subtract it. Both come from memory and are prefetched; kernels that use the results
 * need not prefetch.
 */
static inline size_t plus_simd(int minus, const float_any *x, const float_any *e, size_t n, float_any *sum)
{
	const V magnitude = SET1((int)ROUND_ABS), inf = SET1(ROUND_INF), nan = SET1(0x7fc00000);
	const V flip = SET1(minus ? (int)~ROUND_ABS : 0);
	size_t i = 0;

	for (; i + STEP <= n; i += STEP) {
		fetch_ahead(x + i);
		fetch_ahead(e + i);
		for (int k = 0; k < 4; k++) {
			V r = XOR(flip, LOAD(e + i + LANES * k));
			V s = AS_V(ADDF(LOADF(x + i + LANES * k), AS_F(r)));

			STORE(sum + i + LANES * k, SELECT(GT(AND(s, magnitude), inf), nan, s));
		}
	}
	return i;
}

/* Vectorized add_magnitudes and sign_bits. */
static inline size_t add_row(int by_sign, const float_any *x, size_t n, uint8_t *bits, struct row_lanes *sums)
{
	const V magnitude = SET1((int)ROUND_ABS);
	F a[NV], b[NV];
	V max[NV], negative = SET1(0);
	uint32_t count[LANES];
	size_t i = 0;

	for (int k = 0; k < NV; k++) {
		a[k] = LOADF(sums->a + LANES * k);
		b[k] = LOADF(sums->b + LANES * k);
		max[k] = LOAD(sums->max + LANES * k);
	}
	for (; i + STEP <= n; i += STEP) {
		uint64_t signs = 0;

		fetch_ahead(x + i);
		for (int k = 0; k < 4; k++) {
			V u = LOAD(x + i + LANES * k), minus = SRA(u, 31), below = AND(u, minus);

			signs |= bits ? (uint64_t)SIGNS(u) << LANES * k : 0;
			max[k % NV] = MAX(max[k % NV], AND(u, magnitude));
			a[k % NV] = ADDF(a[k % NV], AS_F(by_sign ? XOR(u, below) : AND(u, magnitude)));
			if (by_sign) {
				b[k % NV] = ADDF(b[k % NV], AS_F(AND(below, magnitude)));
				negative = SUB(negative, minus);
			}
		}
		signs = ~signs;
		if (bits)
			memcpy(bits + i / 8, &signs, STEP / 8);
	}
	for (int k = 0; k < NV; k++) {
		STOREF(sums->a + LANES * k, a[k]);
		STOREF(sums->b + LANES * k, b[k]);
		STORE(sums->max + LANES * k, max[k]);
	}
	STORE(count, negative);
	for (int k = 0; k < LANES; k++)
		sums->negative += count[k];
	return i;
}

static inline size_t row_sums_simd(int by_sign, const float_any *x, size_t n, uint8_t *bits, struct row_lanes *sums)
{
	return bits ? add_row(by_sign, x, n, bits, sums) : add_row(by_sign, x, n, NULL, sums);
}

/* dst is a multiple of SETTLE_ALIGN. */
static inline size_t settle_simd(int how, const float_any *x, size_t n, float by, float_any *dst, int32_t *most)
{
	const V magnitude = SET1((int)ROUND_ABS);
	const F factor = SETF(by);
	V m[4] = {SET1(0), SET1(0), SET1(0), SET1(0)};
	size_t i = 0;

	for (; i + STEP <= n; i += STEP)
		for (int k = 0; k < 4; k++) {
			F y = LOADF(x + i + LANES * k);

			if (how)
				y = how == SETTLE_TIMES ? MULF(y, factor) : DIVF(y, factor);
			m[k] = MAX(m[k], AND(magnitude, AS_V(y)));
			PUT_NONTEMPORAL(dst + i + LANES * k, AS_V(y));
		}
	*most = largest(MAX(MAX(m[0], m[1]), MAX(m[2], m[3])), *most);
	return i;
}

/*
 * Philox blocks per vector: each 64-bit lane has a block, whose words are in the lower halves of c; upper halves are
 * ignored. Block counters must not carry into their upper word.
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

/* Return 16 random bits per lane, or one half to round to nearest. */
static inline V draws(const uint16_t *h, size_t i)
{
	return h ? WIDEN16(h + i) : SET1(0x8000);
}

/* Return 2 * random bits + 1, in half steps, as round_place adds. */
static inline V fine_draws(const uint16_t *h, size_t i)
{
	V draw = draws(h, i);

	return ADD(ADD(draw, draw), SET1(1));
}

/* Vectorized round_ternary_code; *most: the largest magnitude. */
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
			V high = TRUNC(MULF(tiny ? MULF(y, up) : y, by)); /* 65536 exceeds all random bits */
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

/* Compute FLOAT8's codes in rows of `row`, a multiple of LANES; 0: one row. */
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

/* Compute FLOAT4's codes of many short rows; `row` is a multiple of LANES. Zeros keep their sign. */
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
 * Return x / by, rounded once, where |x| has at most 8 mantissa bits. `inverse` is 1 / by; a fused multiply-add
 * corrects the product. A test checks every mantissa of `by`. Nothing may overflow or underflow.
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

			c[k] = TRUNC(AS_F(
				MAX(AS_V(MINF(place, most)), SET1(0)))); /* negative floats are negative integers */
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

/* Vectorized mx_values. A product with the reciprocal of a power of two is exact. */
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

/* Vectorized round_truncate, and the exponents of the results. */
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

				up = ADD(u, AND(half, SUB(unit, one))); /* 0 if no bits are dropped */
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

/* Combine two fields per 64-bit lane. */
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
#define PLUS plus_simd
#define FROM_BFLOAT16 from_bfloat16_simd
#define TO_BFLOAT16 to_bfloat16_simd
#define FROM_FLOAT16 from_float16_simd
#define TO_FLOAT16 to_float16_simd
#define ABS_MAX abs_max_simd
#define EXTREMES extremes_simd
#define ABS_MAX_OF_32 abs_max_of_32_simd
#define ROW_SUMS row_sums_simd
#define SETTLE settle_simd
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
