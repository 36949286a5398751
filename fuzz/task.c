/* task.c - pick the arguments of a call of codec_encode: spec, values, segments, metric, codebook, scale. */
#include <math.h>
#include <string.h>

#include "codec/codec_engine.h"
#include "exact/choose.h"
#include "exact/round.h"
#include "exact/wire.h"
#include "task.h"

static uint32_t bits_of(float x)
{
	return round_bits(x);
}

static int is_float(uint32_t dtype)
{
	return dtype >= CODEC_FLOAT32 && dtype <= CODEC_FLOAT16 && dtype != CODEC_FLOAT64;
}

static int is_mx(const codec_spec *p)
{
	return p->codec == CODEC_FLOAT8 && (p->variant == CODEC_MXFP8_E4M3 || p->variant == CODEC_MXFP8_E5M2);
}

static int is_exact(const codec_spec *p)
{
	return p->codec == CODEC_LOSSLESS || p->codec == CODEC_TRUNCATE;
}

void pick_spec(struct task *k)
{
	static const uint32_t ROWS[] = {0, 0, 1, 2, 3, 16, 64, 1000, 2560, 2561, 8192, 16384, 16385, 20000, 1u << 31};
#define NUMBER(name, ...) CODEC_##name,
	static const uint32_t CODECS[] = {WIRE_CODECS(NUMBER) CODEC_LOSSLESS, CODEC_LOSSLESS, CODEC_TRUNCATE};
#undef NUMBER
#define COUNT(name, family, dtypes, variants, ...) [CODEC_##name] = (variants),
	static const uint8_t VARIANTS[] = {WIRE_CODECS(COUNT)};
#undef COUNT
	struct source *s = &k->s;
	codec_spec *p = &k->spec;

	*p = (codec_spec){.struct_nbytes = sizeof *p, .codec = CODECS[below(s, sizeof CODECS / sizeof *CODECS)]};
	if (p->codec == CODEC_DELTA) /* DELTA needs a base, which tasks do not have */
		p->codec = CODEC_TOPK;
	if (p->codec == CODEC_LOSSLESS) {
		p->max_code_length = (uint32_t)below(s, 2) ? 2 + (uint32_t)below(s, 7) : 0;
		p->model = (uint32_t)below(s, 3);
	} else if (p->codec == CODEC_TRUNCATE) {
		p->max_code_length = (uint32_t)below(s, 2) ? 2 + (uint32_t)below(s, 7) : 0;
		p->variant = (uint32_t)below(s, 4);
		p->options = one_in(s, 3) ? CODEC_OPTION_CUT : 0;
		p->options |= p->variant == CODEC_LEVEL_CODING_SHARED && below(s, 2) ? CODEC_OPTION_BITS : 0;
		p->bits = p->variant == CODEC_LEVEL_CODING_FIXED ? (uint32_t)below(s, 4) : 0;
		p->guard = one_in(s, 8) ? (int32_t)below(s, 255) - 128 : (int32_t)below(s, 8) - 4;
	} else if (p->codec == CODEC_TOPK) {
		p->group_size = below(s, 2) ? 64u << below(s, 11) : 0;
		p->kept = below(s, 2) ? 1 + (uint32_t)below(s, (p->group_size ? p->group_size : 4096) / 2) : 0;
		p->bits = (uint32_t)below(s, 9);
		p->options = (uint32_t)below(s, 2);
		p->seed = (uint32_t)noise(s);
	} else {
		p->variant = (uint32_t)below(s, VARIANTS[p->codec]);
		p->group_size = below(s, 3) ? ROWS[below(s, sizeof ROWS / sizeof *ROWS)] : CODEC_GROUP_SIZE_ROW;
		p->group_size = p->codec == CODEC_TERNARY || p->codec == CODEC_FLOAT4 || is_mx(p) ? 0 : p->group_size;
		p->group_size =
			p->codec == CODEC_QUANTIZE && p->group_size == CODEC_GROUP_SIZE_ROW ? 64 : p->group_size;
		p->seed = (uint32_t)noise(s);
		p->bits = p->codec == CODEC_QUANTIZE ? 1 + (uint32_t)below(s, 8) : 0;
		p->bits += p->bits == 1 && p->variant == CODEC_LEVELS_ODD;
		if (p->codec == CODEC_FLOAT8)
			p->options = (uint32_t)below(s, 8);
		else if (p->codec == CODEC_FLOAT4 || p->codec == CODEC_QUANTIZE)
			p->options = (uint32_t)below(s, 2);
		if (is_mx(p) && !(p->options & CODEC_OPTION_STOCHASTIC) && below(s, 2))
			p->options |= CODEC_OPTION_RCEIL;
		p->clip = p->codec == CODEC_TERNARY && one_in(s, 3) ? 2.5f : 0;
	}
	if (one_in(s, 16)) { /* any field from max_code_length to guard */
		uint32_t any = below(s, 2) ? (uint32_t)noise(s) : (uint32_t)below(s, 300);

		memcpy((char *)p + 8 + 4 * below(s, 10), &any, 4);
		k->expected = UNKNOWN;
	}
}

void pick_tensor(struct task *k)
{
	static const uint8_t DTYPES[] = {1, 2, 3, 4, 1, 2, 3, 4, 1, 5, 6, 7, 8, 9, 16, 17, 18, 19, 20, 21, 22, 23, 24};
	static const uint8_t FLOATS[] = {1, 3, 4};
	static const uint64_t NS[] = {0, 20, 600, 600, 3000, 5000, 9000, 20000, 60000};
	struct source *s = &k->s;
	uint64_t n = 1 + below(s, NS[one_in(s, 3) ? below(s, 9) : below(s, 7)]), large;
	codec_tensor *t = &k->t;

	*t = (codec_tensor){.struct_nbytes = sizeof *t, .dtype = FLOATS[below(s, 3)]};
	if (k->spec.codec == CODEC_LOSSLESS || one_in(s, 32))
		t->dtype = DTYPES[below(s, sizeof DTYPES)];
	t->rank = below(s, 3) ? 1 + (uint32_t)below(s, 3) : (uint32_t)below(s, 9);
	large = t->rank ? below(s, t->rank) : 0;
	for (uint32_t i = 0; i < t->rank; i++) {
		t->shape[i] = i == large ? 1 : 1 + below(s, n < 300 ? n : below(s, 3) ? 300 : 5);
		n /= t->shape[i];
	}
	if (t->rank)
		t->shape[large] = one_in(s, 24) ? 0 : n;
	if (is_exact(&k->spec) && one_in(s, 8)) { /* a matrix whose row offsets are computed when blocks are encoded */
		t->rank = 2;
		t->shape[0] = CHOOSE_ROWS + 1 + below(s, 300);
		t->shape[1] = WIRE_MATRIX_MIN + below(s, 16);
	}
	k->n = 1;
	for (uint32_t i = 0; i < t->rank; i++)
		k->n *= t->shape[i];
	t->nbytes = k->n * codec_dtype_nbytes(t->dtype);
}

/* Convert a float32 to `dtype`, and store it at p. */
static void put_value(uint8_t *p, uint32_t dtype, float x, uint64_t low)
{
	double wide = (double)x * (1 + (double)(low >> 40) * 0x1p-24 * 0x1p-20);
	uint64_t u = bits_of(x);

	switch (dtype) {
	case CODEC_FLOAT64: memcpy(&u, &wide, 8); break;
	case CODEC_BFLOAT16: u >>= 16; break;
	case CODEC_FLOAT16:
		u = fabsf(x) <= 65504 ? round_to_float16((uint32_t)u)
				      : (u >> 16 & 0x8000) | (x != x     ? 0x7e00
							      : isinf(x) ? 0x7c00
									 : 0x7bff);
		break;
	case CODEC_FLOAT32: break;
	case CODEC_FLOAT8_E4M3FN:
	case CODEC_FLOAT8_E5M2:
	case CODEC_FLOAT8_E4M3FNUZ:
	case CODEC_FLOAT8_E5M2FNUZ: u = (u >> 24 & 0x80) | (u >> 20 & 0x7f); break;
	default: u = (uint64_t)(int64_t)(fabsf(x) < 0x1p50f ? x * 16 : 0); break;
	}
	memcpy(p, &u, codec_dtype_nbytes(dtype));
}

void make_values(struct task *k, uint8_t *p, uint32_t dtype, int finite)
{
	struct source *s = &k->s;
	uint64_t style = below(s, 10), rows = 1 + below(s, 400), spread = below(s, 60), odd = finite ? 0 : below(s, 6);
	uint32_t middle = one_in(s, 6) ? (uint32_t)between(s, 1, 254) : 127, nbytes = codec_dtype_nbytes(dtype);
	uint64_t mantissa = below(s, 3) ? 0x7fffff : 0x7fffff ^ ((1u << below(s, 23)) - 1);

	for (uint64_t i = 0; i < k->n; i++) {
		uint64_t x = noise(s), row = i / rows * 0x9e3779b97f4a7c15ull, col = i % rows * 0xd1342543de82ef95ull;
		int e = (int)middle + (style & 1 ? (int)(row >> 40) % 12 : 0) + (style & 2 ? (int)(col >> 40) % 12 : 0);
		uint32_t u;

		e -= __builtin_ctzll(x >> 32 | 1ull << 31) + (int)(spread ? (x >> 23) % spread : 0);
		e = e < 0 ? 0 : e > 254 ? 254 : e;
		u = (uint32_t)(x & 0x80000000) | (uint32_t)e << 23 | (uint32_t)(x & mantissa);
		if (style == 4 || (style == 5 && x >> 62) || (style == 6 && i / 300 % 7 != 3))
			u = style == 4 ? bits_of(1.5f) : 0;
		if (style == 9 && i / 300 & 1) /* runs of zeros in all planes but the first */
			u &= 0xff000000;
		if (style == 7 && x >> 56 == 0)
			u = (uint32_t)(x >> 20) & 0x807fffff; /* subnormal */
		if (odd == 5 && x >> 52 == 0)
			u = (uint32_t)(x & 0x80000000) | 0x7f800000 | (uint32_t)(x >> 40 & 1 ? x & 0x7fffff : 0);
		k->nonfinite |= (u & 0x7fffffff) >= 0x7f800000;
		if (style == 8) {
			memcpy(p + i * nbytes, &x, nbytes);
			k->nonfinite = 1;
		} else {
			put_value(p + i * nbytes, dtype, round_float(u), x);
		}
	}
}

static codec_tensor state_tensor(struct task *k, int i)
{
	static const uint32_t DTYPES[] = {CODEC_FLOAT32, CODEC_FLOAT32, CODEC_BFLOAT16, CODEC_FLOAT16};
	codec_tensor t = {.struct_nbytes = sizeof t, .dtype = DTYPES[below(&k->s, 4)], .rank = 1, .shape = {k->n}};
	int nonfinite = k->nonfinite;

	t.nbytes = k->n * codec_dtype_nbytes(t.dtype);
	k->state[i] = exact(t.nbytes, &k->s);
	t.data = k->state[i].p;
	make_values(k, t.data, t.dtype, 0);
	k->nonfinite = nonfinite;
	return t;
}

static void user_a(void *data, uint64_t first, uint64_t n, float *a)
{
	memcpy(a, (float *)data + first, n * sizeof *a);
}

static void pick_metric(struct task *k)
{
	static const float TERMS[] = {0, 1, 0.5f, 100, 1e-3f, 1e6f, 1e-8f};
	struct source *s = &k->s;
	uint64_t ngroups = 1 + below(s, k->n < GROUPS ? 1 : GROUPS), from = 0;

	k->theta = state_tensor(k, 0);
	k->v = state_tensor(k, 1);
	k->m = state_tensor(k, 2);
	k->a = malloc(4 * k->n + 4);
	for (uint64_t i = 0; i < k->n; i++)
		k->a[i] = check_widen(k->theta.data, k->theta.dtype, i);
	for (uint64_t i = 0; i < ngroups; i++) {
		codec_metric *t = k->metric + i;

		*t = (codec_metric){.struct_nbytes = sizeof *t, .theta = &k->theta};
		for (float *f = &t->theta_term; f <= &t->m_term; f++)
			*f = TERMS[below(s, sizeof TERMS / sizeof *TERMS)];
		t->v = below(s, 2) ? &k->v : NULL;
		t->m = below(s, 2) ? &k->m : NULL;
		t->theta_dtype = one_in(s, 3) ? CODEC_BFLOAT16 : 0;
		if (one_in(s, 4)) {
			t->user = user_a;
			t->data = k->a;
		}
		if (i + 1 < ngroups) {
			from = t->until = between(s, from + 1, k->n - (ngroups - 1 - i));
			t->next = t + 1;
		}
	}
	k->with.metric = k->metric;
	if (one_in(s, 24)) { /* groups out of order, missing state, or state of another size */
		switch (below(s, 3)) {
		case 0: k->metric[0].until = k->n + 5; break;
		case 1: k->metric[0].theta = NULL; break;
		default: k->theta.nbytes++;
		}
		k->expected = UNKNOWN;
	}
}

static int segments_good(const struct task *k)
{
	unsigned __int128 at = 0;

	for (const codec_segment *g = k->segments; g < k->segments + k->with.nsegments; g++) {
		unsigned __int128 n = 1, product = 1;

		if (g->reserved || g->rank > CODEC_MAX_RANK || g->offset < at)
			return 0;
		for (uint32_t d = 0; d < g->rank; d++) {
			product *= g->shape[d] ? g->shape[d] : 1;
			n *= g->shape[d];
			if (g->shape[d] >> 60 || product >> 60)
				return 0;
		}
		at = g->offset + n;
		if (at > k->n)
			return 0;
	}
	return 1;
}

/* Pick the segments of a tensor: ascending, with gaps; sometimes invalid. */
static void pick_segments(struct task *k)
{
	struct source *s = &k->s;
	uint64_t at = 0, count = 1 + below(s, SEGMENTS);
	codec_segment *g = k->segments;

	for (uint64_t i = 0; i < count; i++) {
		uint64_t left = k->n - at, n = 1 + below(s, left + 1);

		n = n > left ? left : n;
		g[i].offset = at + (one_in(s, 3) ? below(s, left - n + 1) : 0);
		g[i].rank = 1 + (uint32_t)below(s, 3);
		for (uint32_t d = 0; d < g[i].rank; d++) {
			g[i].shape[d] = d + 1 < g[i].rank ? 1 + below(s, n < 200 ? n : 200) : n;
			n = g[i].shape[d] ? n / g[i].shape[d] : 0;
		}
		n = 1;
		for (uint32_t d = 0; d < g[i].rank; d++)
			n *= g[i].shape[d];
		at = g[i].offset + n;
	}
	k->with.segments = g;
	k->with.nsegments = count;
	g += below(s, count);
	switch (one_in(s, 8) ? below(s, 6) : 6) {
	case 0: g->reserved = 1; break;
	case 1: g->rank = 9; break;
	case 2: g->offset += 1 + below(s, k->n + 1); break;
	case 3: g->shape[0] = 1ull << between(s, 59, 63); break;
	case 4: g->shape[0] += 1 + below(s, k->n + 1); break;
	case 5: g->shape[below(s, g->rank)] = 0; break;
	default: break;
	}
	if (!segments_good(k))
		k->expected = k->expected == CODEC_OK ? CODEC_BAD_SEGMENTS : UNKNOWN;
}

/* Build a codebook from random counts or from the tensor's symbol counts; sometimes damage it. */
static void pick_book(struct task *k, uint8_t *scratch)
{
	struct source *s = &k->s;
	uint64_t counts[256] = {0};
	codec_status status;

	if (below(s, 2)) {
		for (int i = 0; i < 256; i++)
			counts[i] = noise(s) >> below(s, 64);
	} else {
		status = codec_count(&k->spec, &k->t, counts, &k->with, scratch, k->need);
		if (status != CODEC_OK)
			for (int i = 0; i < 256; i++)
				CHECK(counts[i] == 0, status, i);
	}
	status = codec_codebook_build(&k->spec, k->t.dtype, counts, &k->book);
	if (status != CODEC_OK)
		return;
	CHECK(codec_codebook_check(&k->book) == CODEC_OK, k->spec.codec, k->t.dtype);
	k->with.codebooks = &k->book;
	k->with.ncodebooks = 1;
	if (k->t.dtype != CODEC_FLOAT64 && !is_float(k->t.dtype))
		k->expected = UNKNOWN;
	if (!one_in(s, 8))
		return;
	((uint8_t *)&k->book)[below(s, sizeof k->book)] ^= (uint8_t)(1 + below(s, 255));
	k->expected = k->expected == CODEC_OK ? CODEC_BAD_CODEBOOK : UNKNOWN;
}

static float largest(const struct task *k)
{
	float most = 0;

	for (uint64_t i = 0; i < k->n; i++)
		most = fmaxf(most, fabsf(check_widen(k->t.data, k->t.dtype, i)));
	return most;
}

void pick_rest(struct task *k)
{
	struct source *s = &k->s;
	codec_spec *p = &k->spec;
	uint8_t *scratch;

	k->with.stream = noise(s);
	if ((p->codec == CODEC_TERNARY || (p->codec == CODEC_FLOAT8 && !is_mx(p))) && is_float(k->t.dtype) &&
	    one_in(s, 4)) {
		p->scale = largest(k) * (one_in(s, 4) ? 0.5f : 1 + (float)below(s, 4));
		p->scale = p->codec == CODEC_FLOAT8 && below(s, 2) ? 1 : p->scale;
		p->scale = p->scale < INFINITY ? p->scale : 1;
		if (p->codec == CODEC_TERNARY && one_in(s, 4)) {
			p->scale = 0;
			p->options |= CODEC_OPTION_ZERO_SCALE;
		}
		k->scaled = 1;
	}
	if (p->codec == CODEC_TRUNCATE && p->variant != CODEC_LEVEL_CODING_FIXED && is_float(k->t.dtype)) {
		switch (below(s, 8)) {
		case 0:
			if (k->n && k->expected == CODEC_OK)
				k->expected = CODEC_MISSING_STATE;
			break;
		case 1:
			k->levels = exact(k->n, s);
			for (uint64_t i = 0; i < k->n; i++)
				k->levels.p[i] = noise(s) & 3;
			k->with.levels = k->levels.p;
			if (p->variant == CODEC_LEVEL_CODING_SHARED)
				k->expected = UNKNOWN;
			if (k->n && one_in(s, 8)) {
				k->levels.p[below(s, k->n)] = (uint8_t)between(s, 4, 255);
				k->expected = UNKNOWN;
			}
			break;
		default: pick_metric(k);
		}
		if (!k->n)
			k->expected = UNKNOWN;
	}
	if (one_in(s, 3))
		pick_segments(k);
	if (codec_bound(p, &k->t, &k->bound) != CODEC_OK || codec_scratch(p, &k->t, &k->need) != CODEC_OK)
		return;
	if (is_exact(p) && one_in(s, 3)) {
		scratch = malloc(k->need);
		pick_book(k, scratch);
		free(scratch);
	}
}
