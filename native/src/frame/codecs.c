/* codecs.c - the codecs: which dtypes and parameters each takes, and its parameters in the header. */
#include "header.h"

#include "rows/rows.h"

#define FLOATS (1u << CODEC_FLOAT32 | 1u << CODEC_BFLOAT16 | 1u << CODEC_FLOAT16)
#define ANY 0xffffffffu
#define OPTIONS (CODEC_OPTION_STOCHASTIC | CODEC_OPTION_PROPAGATE | CODEC_OPTION_ENTROPY)

/* A codec whose values share scales. */
static const struct codec {
	uint32_t dtypes;
	uint8_t nvariants;
	uint8_t options;  /* those it knows */
	uint8_t max_bits; /* 0: has none to choose */
	uint8_t is_rows;
} CODECS[] = {
	[CODEC_LOSSLESS] = {ANY, 0, 0, 0, 0},
	[CODEC_SIGN] = {FLOATS, 3, 0, 0, 1},
	[CODEC_TERNARY] = {FLOATS, 3, WIRE_OPTION_CLIPPED, 0, 1},
	[CODEC_FLOAT8] = {FLOATS, 2, WIRE_OPTION_STOCHASTIC | WIRE_OPTION_PROPAGATE | WIRE_OPTION_ENTROPY, 0, 1},
	[CODEC_FLOAT4] = {FLOATS, 2, WIRE_OPTION_STOCHASTIC, 0, 1},
	[CODEC_QUANTIZE] = {FLOATS, 2, WIRE_OPTION_STOCHASTIC, 8, 1},
	[CODEC_TRUNCATE] = {FLOATS, 4, WIRE_OPTION_BITS | WIRE_OPTION_TRUNCATE, 3, 0},
};

static const struct codec *codec_of(uint32_t id)
{
	return id < sizeof CODECS / sizeof *CODECS && CODECS[id].dtypes ? CODECS + id : NULL;
}

int codec_known(uint32_t id)
{
	return codec_of(id) != NULL;
}

int codec_takes(uint32_t id, uint32_t dtype)
{
	const struct codec *c = codec_of(id);

	return c && dtype_of(dtype) && (c->dtypes == ANY || c->dtypes >> dtype & 1);
}

int codec_is_rows(uint32_t id)
{
	const struct codec *c = codec_of(id);

	return c && c->is_rows;
}

/* May so many values share a scale, wherever that is said? 0: all of a part. */
int row_allowed(const struct header *h, uint32_t row)
{
	switch (h->codec) {
	case CODEC_SIGN: return row <= WIRE_MAX_ROW;
	case CODEC_TERNARY: return row == 0;
	case CODEC_FLOAT4: return row == (h->variant == WIRE_FLOAT4_NVFP4 ? 16u : 32u);
	default: return row && row <= (rows_entropy(h) ? WIRE_ROW_BLOCK : WIRE_MAX_ROW);
	}
}

/* Where in params, `row` left out, the first value stands that the format forbids; -1 if none does. */
int params_fault(const struct header *h)
{
	const struct codec *c = codec_of(h->codec);

	if (h->codec == CODEC_TRUNCATE) {
		if (h->cap < 2 || h->cap > WIRE_MAX_CAP)
			return WIRE_TRUNCATE_CAP;
		if (h->variant > WIRE_LEVELS_FIXED)
			return WIRE_TRUNCATE_LEVELS;
		if (h->bits > (h->variant == WIRE_LEVELS_FIXED ? 3 : 0))
			return WIRE_TRUNCATE_LEVEL;
		if (h->options & ~c->options || (h->options & WIRE_OPTION_BITS && h->variant != WIRE_LEVELS_SHARED))
			return WIRE_TRUNCATE_OPTIONS;
		return h->guard && h->variant == WIRE_LEVELS_FIXED ? WIRE_TRUNCATE_GUARD : -1;
	}
	if (!c->is_rows)
		return h->cap < 2 || h->cap > WIRE_MAX_CAP ? 0 : h->model > WIRE_MODEL_SEPARABLE ? 1 : -1;
	if (h->variant >= c->nvariants)
		return WIRE_ROW_VARIANT;
	if (h->options & ~c->options)
		return WIRE_ROW_OPTIONS;
	if (c->max_bits ? h->bits < 1 || h->bits > c->max_bits || (h->variant == WIRE_LEVELS_ODD && h->bits < 2)
			: h->bits != 0)
		return WIRE_ROW_BITS;
	return -1;
}

void params_read(struct header *h, const uint8_t *params)
{
	if (h->codec == CODEC_TRUNCATE) {
		h->cap = params[WIRE_TRUNCATE_CAP];
		h->variant = params[WIRE_TRUNCATE_LEVELS];
		h->bits = params[WIRE_TRUNCATE_LEVEL];
		h->options = params[WIRE_TRUNCATE_OPTIONS];
		h->guard = (int8_t)(params[WIRE_TRUNCATE_GUARD] - 128);
		return;
	}
	if (!codec_is_rows(h->codec)) {
		h->cap = params[0];
		h->model = params[1];
		return;
	}
	h->variant = params[WIRE_ROW_VARIANT];
	h->options = params[WIRE_ROW_OPTIONS];
	h->bits = params[WIRE_ROW_BITS];
	h->row = load32(params + WIRE_ROW_NVALUES);
}

void params_write(const struct header *h, uint8_t *params)
{
	memset(params, 0, 8);
	if (h->codec == CODEC_TRUNCATE) {
		params[WIRE_TRUNCATE_CAP] = h->cap;
		params[WIRE_TRUNCATE_LEVELS] = h->variant;
		params[WIRE_TRUNCATE_LEVEL] = h->bits;
		params[WIRE_TRUNCATE_OPTIONS] = h->options;
		params[WIRE_TRUNCATE_GUARD] = (uint8_t)(h->guard + 128);
		return;
	}
	if (!codec_is_rows(h->codec)) {
		params[0] = h->cap;
		params[1] = h->model;
		return;
	}
	params[WIRE_ROW_VARIANT] = h->variant;
	params[WIRE_ROW_OPTIONS] = h->options;
	params[WIRE_ROW_BITS] = h->bits;
	store32(params + WIRE_ROW_NVALUES, h->row);
}

static int is_finite(float x)
{
	return (round_bits(x) & ROUND_ABS) < ROUND_INF;
}

static codec_status ask_truncate(const codec_spec *s, struct header *h)
{
	int64_t guard;

	if (s->model || s->row || s->seed || s->scale != 0 || s->clip != 0 || s->bits > 3 || s->variant > 3 ||
	    s->options & ~(uint32_t)(CODEC_OPTION_BITS | CODEC_OPTION_CUT))
		return CODEC_BAD_SPEC;
	h->cap = (uint8_t)(s->cap ? MIN(s->cap, 255) : WIRE_MAX_CAP);
	h->variant = (uint8_t)s->variant;
	h->bits = (uint8_t)s->bits;
	h->options = (uint8_t)((s->options & CODEC_OPTION_BITS ? WIRE_OPTION_BITS : 0) |
			       (s->options & CODEC_OPTION_CUT ? WIRE_OPTION_TRUNCATE : 0));
	/* without rounding the error is twice as large */
	guard = (int64_t)s->guard + (s->options & CODEC_OPTION_CUT ? 1 : 0);
	guard = h->variant == WIRE_LEVELS_FIXED ? 0 : guard;
	if (guard < INT8_MIN || guard > INT8_MAX)
		return CODEC_BAD_SPEC;
	h->guard = (int8_t)guard;
	return params_fault(h) < 0 ? CODEC_OK : CODEC_BAD_SPEC;
}

/* May rows of h->row values be asked for? What is chosen by the shape, or too long for an entropy stage, comes later.
 */
static int row_asked(const struct header *h)
{
	if (h->row == CODEC_ROW_LAST)
		return h->codec == CODEC_SIGN || h->codec == CODEC_FLOAT8;
	return row_allowed(h, rows_entropy(h) && h->row <= WIRE_MAX_ROW ? MIN(h->row, WIRE_ROW_BLOCK) : h->row);
}

/* What is asked for, as header fields. */
codec_status params_ask(const codec_spec *s, struct header *h)
{
	const struct codec *c = codec_of(s->codec);

	if (!c)
		return CODEC_BAD_SPEC;
	h->codec = (uint8_t)s->codec;
	if (s->codec == CODEC_TRUNCATE)
		return ask_truncate(s, h);
	if (s->guard)
		return CODEC_BAD_SPEC;
	if (s->variant > 255 || s->bits > 8 || s->options & ~(uint32_t)OPTIONS)
		return CODEC_BAD_SPEC;
	if (!c->is_rows) {
		if (s->variant || s->options || s->bits || s->row || s->seed || s->scale != 0 || s->clip != 0 ||
		    s->model > WIRE_MODEL_SEPARABLE)
			return CODEC_BAD_SPEC;
		h->cap = (uint8_t)(s->cap ? MIN(s->cap, 255) : WIRE_MAX_CAP);
		h->model = (uint8_t)s->model;
		return params_fault(h) < 0 ? CODEC_OK : CODEC_BAD_SPEC;
	}
	if (s->cap || s->model || !is_finite(s->scale) || !is_finite(s->clip) || s->scale < 0 || s->clip < 0 ||
	    (s->scale > 0 && s->codec != CODEC_TERNARY && s->codec != CODEC_FLOAT8) ||
	    (s->clip > 0 && s->codec != CODEC_TERNARY))
		return CODEC_BAD_SPEC;
	h->variant = (uint8_t)s->variant;
	h->options = (uint8_t)(s->options | (s->clip > 0 ? WIRE_OPTION_CLIPPED : 0));
	h->bits = (uint8_t)(s->codec == CODEC_QUANTIZE && !s->bits ? 4 : s->bits);
	h->row = s->row;
	if (s->codec == CODEC_FLOAT4 && !s->row)
		h->row = s->variant == WIRE_FLOAT4_NVFP4 ? 16 : 32;
	if (s->codec == CODEC_FLOAT8 && !s->row)
		h->row = CODEC_ROW_LAST;
	if (s->codec == CODEC_QUANTIZE && !s->row)
		h->row = 64;
	return params_fault(h) < 0 && row_asked(h) ? CODEC_OK : CODEC_BAD_SPEC;
}

void params_spec(const struct header *h, codec_spec *s)
{
	*s = (codec_spec){.struct_nbytes = sizeof *s, .codec = h->codec};
	if (h->codec == CODEC_TRUNCATE) {
		int cut = (h->options & WIRE_OPTION_TRUNCATE) != 0;

		s->cap = h->cap;
		s->variant = h->variant;
		s->bits = h->bits;
		s->options = (h->options & WIRE_OPTION_BITS ? CODEC_OPTION_BITS : 0) | (cut ? CODEC_OPTION_CUT : 0);
		s->guard = h->variant == WIRE_LEVELS_FIXED ? 0 : h->guard - cut;
	} else if (codec_is_rows(h->codec)) {
		s->variant = h->variant;
		s->options = h->options & OPTIONS;
		s->bits = h->bits;
		s->row = h->row;
	} else {
		s->cap = h->cap;
		s->model = h->model;
	}
}
