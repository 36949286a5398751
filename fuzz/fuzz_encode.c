/*
 * fuzz_encode.c - libFuzzer: any values, any spec, any optional arguments.
 *
 * All instruction sets must write the same frame, in one call and in steps, within the bound. Lossless frames must
 * decode to the input; residuals must be the error. Errors must leave inputs unchanged. Fuzzer inputs are short:
 * tensors are generated from a few decisions (scales of rows and columns, runs of zeros).
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "check.h"
#include "codec/codec_engine.h"
#include "exact/round.h"
#include "exact/wire.h"

#define MOST 60000
#define SEGMENTS 8
#define GROUPS 3

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Arguments of a call. */
struct task {
	struct source s;
	codec_spec spec;
	codec_tensor t, theta, v, m;
	uint64_t n;
	struct exact x, error, levels, state[3]; /* error: residual that is an input */
	codec_segment segments[SEGMENTS];
	codec_metric metric[GROUPS];
	codec_codebook book;
	codec_context with;
	float *a; /* values that the metric's function returns */
	int nonfinite, scaled;
	codec_status expected; /* status of encoding if known; else UNKNOWN */
	size_t bound, need, job_nbytes, work_nbytes;
};

#define UNKNOWN CODEC_LIMIT

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

/* Pick a spec, mostly a valid one. */
static void pick_spec(struct task *k)
{
	static const uint32_t ROWS[] = {0, 0, 1, 2, 3, 16, 64, 1000, 2560, 2561, 8192, 16384, 16385, 20000, 1u << 31};
#define NUMBER(name, ...) CODEC_##name,
	static const uint32_t CODECS[] = {WIRE_CODECS(NUMBER)};
	static const uint8_t VARIANTS[] = {
		[CODEC_SIGN] = 3, [CODEC_TERNARY] = 3, [CODEC_FLOAT8] = 4, [CODEC_FLOAT4] = 2, [CODEC_QUANTIZE] = 3};
#undef NUMBER
	struct source *s = &k->s;
	codec_spec *p = &k->spec;

	*p = (codec_spec){.struct_nbytes = sizeof *p, .codec = CODECS[below(s, sizeof CODECS / sizeof *CODECS)]};
	if (p->codec == CODEC_DELTA) /* needs a base, which tasks do not have */
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

static void pick_tensor(struct task *k)
{
	static const uint8_t DTYPES[] = {1, 2, 3, 4, 1, 2, 3, 4, 1, 5, 6, 7, 8, 9, 16, 17, 18, 19, 20, 21, 22, 23, 24};
	static const uint8_t FLOATS[] = {1, 3, 4};
	static const uint64_t NS[] = {0, 20, 600, 600, 3000, 5000, 9000, 20000, MOST};
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
	k->n = 1;
	for (uint32_t i = 0; i < t->rank; i++)
		k->n *= t->shape[i];
	t->nbytes = k->n * codec_dtype_nbytes(t->dtype);
}

/* Convert a float32 to a value of the tensor's dtype, and store it. */
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
	default: u = (uint64_t)(int64_t)(fabsf(x) < 0x1p50f ? x * 16 : 0); break;
	}
	memcpy(p, &u, codec_dtype_nbytes(dtype));
}

/* Fill with values around 1, times scales of row and column, in one of several styles. */
static void make_values(struct task *k, uint8_t *p, uint32_t dtype, int finite)
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

/* Pick segments: ascending, with gaps; sometimes invalid. */
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

/* Pick a codebook from random counts or from the tensor's; sometimes damage it. */
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

static void pick_rest(struct task *k)
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
	if ((p->codec == CODEC_LOSSLESS || p->codec == CODEC_TRUNCATE) && one_in(s, 3)) {
		scratch = malloc(k->need);
		pick_book(k, scratch);
		free(scratch);
	}
}

/* Result of encoding. */
struct result {
	codec_status status;
	struct exact frame, residual;
	size_t nbytes;
};

enum { NONE, APART, IN_PLACE, FEEDBACK, DELTA };

/* Begin encoding with the residual's initial contents. end() checks that errors left them unchanged. */
static struct result begin(struct task *k, size_t capacity, int residual, float **at)
{
	struct result r = {.frame = exact(capacity, &k->s)};

	*at = NULL;
	if (residual == APART) {
		r.residual = exact(4 * k->n, &k->s);
		memset(r.residual.p, 0x5a, r.residual.n);
		*at = (float *)r.residual.p;
	} else if (residual == FEEDBACK || residual == DELTA) {
		r.residual = exact(4 * k->n, &k->s);
		memcpy(r.residual.p, k->error.p, r.residual.n);
		*at = (float *)r.residual.p;
		k->with.flags = residual == DELTA ? CODEC_DIFFERENCE : CODEC_FEEDBACK;
	} else if (residual == IN_PLACE) {
		r.residual = exact(k->t.nbytes, &k->s);
		if (k->t.nbytes)
			memcpy(r.residual.p, k->x.p, k->t.nbytes);
		*at = (float *)r.residual.p;
		k->t.data = r.residual.p;
	}
	return r;
}

static void end(struct task *k, const struct result *r, int residual)
{
	k->t.data = k->x.p;
	k->with.flags = 0;
	if (r->status == CODEC_OK || !r->residual.n)
		return;
	if (residual == FEEDBACK || residual == DELTA)
		CHECK(!memcmp(r->residual.p, k->error.p, r->residual.n), r->status, k->spec.codec);
	else if (residual == IN_PLACE)
		CHECK(!memcmp(r->residual.p, k->x.p, r->residual.n), r->status, k->spec.codec);
	else
		for (size_t i = 0; i < r->residual.n; i++)
			CHECK(r->residual.p[i] == 0x5a, r->status, k->spec.codec);
}

static struct result encode(struct task *k, uint32_t isa, size_t capacity, int residual, size_t short_of)
{
	float *at;
	struct result r = begin(k, capacity, residual, &at);
	struct exact scratch = exact(k->need - short_of, &k->s);
	size_t written = 1;

	k->with.isa = isa;
	r.status = codec_encode(&k->spec, &k->t, capacity ? r.frame.p : NULL, capacity, &written, at, &k->with,
				scratch.p, scratch.n);
	CHECK(r.status == CODEC_OK ? written <= capacity : written == 0, r.status, written);
	CHECK((r.status == CODEC_SHORT_SCRATCH) <= (short_of > 0), r.status, k->need);
	r.nbytes = written;
	end(k, &r, residual);
	exact_free(&scratch);
	return r;
}

/* Encode in steps, with ranges of pieces and of blocks in any order. */
static struct result encode_steps(struct task *k, uint32_t isa, int residual)
{
	codec_range ranges[8] = {0};
	uint64_t nranges = 1 + below(&k->s, 8);
	struct exact job = exact(k->job_nbytes, &k->s);
	size_t room = 2 * k->bound + (1 << 16), written = 0;
	codec_plan plan;
	float *at;
	struct result r = begin(k, room, residual, &at);

	k->with.isa = isa;
	k->with.residual = at;
	r.status = codec_encode_open(&k->spec, &k->t, r.frame.p, room, &k->with, job.p, job.n, &plan);
	if (r.status == CODEC_OK && plan.nscans) {
		uint64_t half = below(&k->s, plan.nscans + 1);

		r.status = codec_encode_scan(&k->t, &k->with, job.p, half, plan.nscans - half);
		if (r.status == CODEC_OK)
			r.status = codec_encode_scan(&k->t, &k->with, job.p, 0, half);
		if (r.status == CODEC_OK)
			r.status = codec_encode_start(&k->t, r.frame.p, room, &k->with, job.p, &plan);
	}
	CHECK(r.status != CODEC_OK || plan.work_nbytes <= k->work_nbytes, plan.work_nbytes, k->work_nbytes);
	if (r.status == CODEC_OK && plan.nblocks) {
		uint64_t need = plan.regions_at + plan.nblocks * plan.region_bound, where = plan.regions_at;

		nranges = need > room ? 1 : nranges;
		for (uint64_t i = 0, first = 0; i < nranges; i++) {
			uint64_t rest = plan.nblocks - first, count = i + 1 == nranges ? rest : below(&k->s, rest + 1);

			ranges[i] = (codec_range){.first = first, .count = count, .at = where};
			first += count;
			where += count * plan.region_bound;
		}
		for (uint64_t i = 0, q = below(&k->s, nranges); i < nranges && r.status == CODEC_OK; i++, q++) {
			struct exact work = exact(plan.work_nbytes, &k->s);
			codec_range *one = ranges + q % nranges;

			r.status = codec_encode_blocks(&k->t, r.frame.p, room, &k->with, job.p, one, work.p, work.n);
			CHECK(r.status != CODEC_OK || one->end <= one->at + one->count * plan.region_bound, one->end,
			      one->at);
			exact_free(&work);
		}
		where = plan.regions_at;
		for (uint64_t i = 0, some = below(&k->s, nranges + 1); i < some && r.status == CODEC_OK; i++) {
			if (!ranges[i].count)
				continue;
			r.status = codec_encode_move(job.p, r.frame.p, room, ranges + i, where);
			where = ranges[i].end;
		}
	}
	if (r.status == CODEC_OK)
		r.status = codec_encode_close(&k->t, r.frame.p, room, &k->with, job.p, ranges,
					      plan.nblocks ? nranges : 0, &written);
	r.nbytes = written;
	k->with.residual = NULL;
	k->with.flags = 0;
	k->t.data = k->x.p;
	exact_free(&job);
	return r;
}

/* Return 1 if residuals have the same bits. With CODEC_DIFFERENCE payloads of NaN are unspecified. */
static int same_residual(const struct exact *a, const struct exact *b, int residual)
{
	for (size_t i = 0; residual == DELTA && i < a->n; i += 4) {
		float x, y;

		memcpy(&x, a->p + i, 4);
		memcpy(&y, b->p + i, 4);
		if (memcmp(&x, &y, 4) && (x == x || y == y))
			return 0;
	}
	return residual == DELTA || !memcmp(a->p, b->p, a->n);
}

static void same_frame(const struct task *k, const struct result *a, const struct result *b, int residual)
{
	CHECK(a->status == b->status, a->status, b->status);
	if (a->status != CODEC_OK || b->status != CODEC_OK)
		return;
	CHECK(a->nbytes == b->nbytes && !memcmp(a->frame.p, b->frame.p, a->nbytes), k->spec.codec, k->t.dtype);
	if (a->residual.n && b->residual.n)
		CHECK(same_residual(&a->residual, &b->residual, residual), k->spec.codec, k->t.dtype);
}

static void result_free(struct result *r)
{
	exact_free(&r->frame);
	exact_free(&r->residual);
}

static void check_values(struct task *k, const struct result *r, int residual)
{
	struct exact out = exact(k->t.nbytes, &k->s), scratch = exact(k->need, &k->s);
	codec_tensor back = k->t;
	codec_status status;

	back.data = out.p;
	k->with.isa = check_some_isa(&k->s);
	CHECK(codec_verify(r->frame.p, r->nbytes) == CODEC_OK, k->spec.codec, k->t.dtype);
	status = codec_decode(r->frame.p, r->nbytes, &back, &k->with, scratch.p, scratch.n);
	CHECK(status == CODEC_OK, status, k->spec.codec);
	if (status == CODEC_OK && k->spec.codec == CODEC_LOSSLESS && out.n)
		CHECK(!memcmp(out.p, k->x.p, out.n), k->t.dtype, k->n);
	for (uint64_t i = 0; status == CODEC_OK && i < k->n && r->residual.n; i++) {
		float error = k->error.n ? check_widen(k->error.p, CODEC_FLOAT32, i) : 0;
		float left = 0, got;

		memcpy(&got, r->residual.p + 4 * i, 4);
		if (k->spec.codec != CODEC_LOSSLESS) {
			float x = check_widen(k->x.p, k->t.dtype, i) + error;
			float y = check_widen(out.p, k->t.dtype, i);

			left = residual == DELTA ? error + y : x - x == 0 ? x - y : 0;
		}
		CHECK(left == got || (left != left && got != got), k->spec.codec, i);
		if (left != got && (left == left || got == got))
			break;
	}
	exact_free(&out);
	exact_free(&scratch);
}

/* Check exact capacity, less capacity, short scratch and overlapping buffers. */
static void check_room(struct task *k, const struct result *r, int residual)
{
	size_t capacity = below(&k->s, 2) ? r->nbytes - 1 : below(&k->s, r->nbytes);
	uint32_t isa = k->with.isa;
	struct result more = encode(k, isa, r->nbytes, residual, 0);
	struct exact scratch = exact(k->need, &k->s);
	struct exact both = exact(8 * k->n + k->t.nbytes + 8, &k->s);
	codec_status status;
	size_t written;

	if (more.status != CODEC_SHORT_OUTPUT || !residual)
		same_frame(k, r, &more, residual);
	result_free(&more);
	more = encode(k, isa, one_in(&k->s, 4) ? 0 : capacity, residual, 0);
	CHECK(more.status == CODEC_SHORT_OUTPUT, more.status, capacity);
	result_free(&more);
	if (r->frame.p[8]) { /* a frame of blocks */
		more = encode(k, isa, k->bound, residual, 1);
		CHECK(more.status == CODEC_SHORT_SCRATCH, more.status, k->need);
		result_free(&more);
	}
	if (k->n > 1) { /* the residual begins one value after the tensor */
		k->t.data = both.p;
		memcpy(both.p, k->x.p, k->t.nbytes);
		more.frame = exact(k->bound, &k->s);
		status = codec_encode(&k->spec, &k->t, more.frame.p, k->bound, &written,
				      (float *)(both.p + (k->t.nbytes / k->n)), &k->with, scratch.p, scratch.n);
		CHECK(status == CODEC_BAD_ARGUMENT && !memcmp(both.p, k->x.p, k->t.nbytes), status, written);
		k->t.data = k->x.p;
		exact_free(&more.frame);
	}
	exact_free(&both);
	exact_free(&scratch);
}

/* Replace the bound by that for the task's segments. */
static void bound_by_segments(struct task *k, codec_status bound_status)
{
	size_t nbytes = 0;
	codec_status status = codec_bound_segments(&k->spec, &k->t, k->with.segments, k->with.nsegments, &nbytes);

	if (bound_status == CODEC_OK && status == CODEC_BAD_SEGMENTS) {
		CHECK(k->with.nsegments && k->expected != CODEC_OK, k->with.nsegments, k->expected);
		return;
	}
	CHECK(status == bound_status && nbytes <= k->bound, status, nbytes);
	k->bound = nbytes;
}

/* Return 1 if the size of a frame does not depend on values, so that the bound for its segments is exact. */
static int fixed_rate(const codec_spec *p)
{
	switch (p->codec) {
	case CODEC_LOSSLESS:
	case CODEC_TOPK:
	case CODEC_TRUNCATE: return 0;
	case CODEC_TERNARY: return p->variant != CODEC_TERNARY_ENTROPY;
	default: return !(p->options & CODEC_OPTION_ENTROPY);
	}
}

static void check_encoder(struct task *k)
{
	int residual = one_in(&k->s, 3) && k->t.dtype == CODEC_FLOAT32 ? IN_PLACE : below(&k->s, 2) ? APART : NONE;
	struct result first = {0};
	struct given given;

	if (k->spec.codec != CODEC_LOSSLESS && one_in(&k->s, 4)) {
		residual = k->spec.codec != CODEC_TRUNCATE && k->spec.codec != CODEC_TOPK && one_in(&k->s, 3)
				   ? DELTA
				   : FEEDBACK;
		k->error = exact(4 * k->n, &k->s);
		make_values(k, k->error.p, CODEC_FLOAT32, one_in(&k->s, 2));
		k->expected = UNKNOWN; /* sums and differences may be NaN or Inf, or exceed a scale */
	}

	for (uint32_t isa = 0; codec_isa_name(isa); isa++) {
		struct result r;

		if (!check_usable(isa))
			continue;
		r = encode(k, isa + 1, k->bound, residual, 0);
		CHECK(r.status != CODEC_SHORT_OUTPUT, k->bound, k->spec.codec);
		if (isa == 0) {
			first = r;
			continue;
		}
		same_frame(k, &first, &r, residual);
		result_free(&r);
		if (one_in(&k->s, 2)) {
			r = encode_steps(k, isa + 1, residual);
			same_frame(k, &first, &r, residual);
			result_free(&r);
		}
	}
	if (k->expected != UNKNOWN && first.status != k->expected)
		CHECK((k->nonfinite && first.status == CODEC_NONFINITE) ||
			      (k->scaled && (first.status == CODEC_BAD_SCALE || first.status == CODEC_ROUNDED_SCALE ||
					     first.status == CODEC_BAD_SPEC)),
		      first.status, k->expected);
	if (first.status == CODEC_OK) {
		if (fixed_rate(&k->spec))
			CHECK(first.nbytes == k->bound, first.nbytes, k->bound);
		check_values(k, &first, residual);
		k->with.isa = check_some_isa(&k->s);
		if (one_in(&k->s, 2))
			check_room(k, &first, residual);
		if (one_in(&k->s, 6)) {
			given = (struct given){first.frame.p, first.nbytes, k->with.codebooks, k->with.metric};
			CHECK(check_frame(&given, NULL, 0, &k->s) == CODEC_OK || k->t.nbytes > TENSOR_LIMIT,
			      k->spec.codec, k->t.dtype);
		}
	}
	result_free(&first);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct task k;
	codec_status status;

	memset(&k, 0, sizeof k);
	k.s = source_open(data, size);
	k.with.struct_nbytes = sizeof k.with;
	pick_spec(&k);
	pick_tensor(&k);
	k.x = exact(k.t.nbytes, &k.s);
	k.t.data = k.x.p;
	make_values(&k, k.x.p, k.t.dtype, 0);
	pick_rest(&k);
	k.s.p = k.s.end;
	status = codec_bound(&k.spec, &k.t, &k.bound);
	bound_by_segments(&k, status);
	CHECK(codec_scratch(&k.spec, &k.t, &k.need) == status, status, 0);
	CHECK(codec_job_nbytes(&k.spec, &k.t, &k.job_nbytes, &k.work_nbytes) == status, status, 0);
	if (status == CODEC_OK) {
		check_encoder(&k);
	} else {
		uint8_t frame[64], scratch[64];
		size_t written;

		CHECK(codec_encode(&k.spec, &k.t, frame, sizeof frame, &written, NULL, &k.with, scratch,
				   sizeof scratch) != CODEC_OK,
		      status, 0);
	}
	exact_free(&k.x);
	exact_free(&k.error);
	exact_free(&k.levels);
	for (int i = 0; i < 3; i++)
		exact_free(k.state + i);
	free(k.a);
	return 0;
}
