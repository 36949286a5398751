/* simd_floats.h - conversions, maxima, sums and scaling of float32 values, in vectors: see simd_loops.h. */
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

/*
 * Vectorized abs_max for rows of 32 values, the row length of MX formats. A function call per row would take as long as
 * the loop.
 */
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
 * Add residual e to x, or subtract it if `minus`. Both arrays are prefetched here, so kernels that use the results need
 * not prefetch.
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

/* Vectorized `settle`: store x, x * by or x / by with non-temporal stores. dst is a multiple of SETTLE_ALIGN. */
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
