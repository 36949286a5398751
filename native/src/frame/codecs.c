/* codecs.c - the codecs, and which dtypes each takes. */
#include "family.h"

#define FLOATS (1u << CODEC_FLOAT32 | 1u << CODEC_BFLOAT16 | 1u << CODEC_FLOAT16)
#define ANY 0xffffffffu

static const struct codec CODECS[] = {
	[CODEC_LOSSLESS] = {&lossless_family, ANY, 3, 0, 0, WIRE_MIN_CAP},
	[CODEC_SIGN] = {&rows_family, FLOATS, 3, 0, 0, 0},
	[CODEC_TERNARY] = {&rows_family, FLOATS, 3, WIRE_OPTION_CLIPPED, 0, 0},
	[CODEC_FLOAT8] = {&rows_family, FLOATS, 2, WIRE_OPTION_STOCHASTIC | WIRE_OPTION_PROPAGATE | WIRE_OPTION_ENTROPY,
			  0, 0},
	[CODEC_FLOAT4] = {&rows_family, FLOATS, 2, WIRE_OPTION_STOCHASTIC, 0, 0},
	[CODEC_QUANTIZE] = {&rows_family, FLOATS, 2, WIRE_OPTION_STOCHASTIC, 8, 0},
	[CODEC_TRUNCATE] = {&truncate_family, FLOATS, 4, WIRE_OPTION_BITS | WIRE_OPTION_CUT, 3, WIRE_MIN_CAP},
};

const struct codec *codec_of(uint32_t id)
{
	return id < sizeof CODECS / sizeof *CODECS && CODECS[id].family ? CODECS + id : NULL;
}

int codec_takes(uint32_t id, uint32_t dtype)
{
	const struct codec *c = codec_of(id);

	return c && dtype_of(dtype) && (c->dtypes == ANY || c->dtypes >> dtype & 1);
}

int params_fault(const struct header *h)
{
	const struct codec *c = codec_of(h->codec);

	if (h->variant >= c->nvariants)
		return WIRE_PARAM_VARIANT;
	if (h->options & ~c->options)
		return WIRE_PARAM_OPTIONS;
	if (h->bits > c->max_bits)
		return WIRE_PARAM_BITS;
	if (h->cap < c->min_cap || h->cap > (c->min_cap ? WIRE_MAX_CAP : 0))
		return WIRE_PARAM_CAP;
	return c->family->params_fault ? c->family->params_fault(h) : -1;
}

/* What was asked for, as far as a frame says it. */
void params_spec(const struct header *h, codec_spec *s)
{
	int lossless = h->codec == CODEC_LOSSLESS;

	*s = (codec_spec){.struct_nbytes = sizeof *s,
			  .codec = h->codec,
			  .cap = h->cap,
			  .model = lossless ? h->variant : 0,
			  .variant = lossless ? 0 : h->variant,
			  .options = h->options & ~WIRE_OPTION_CLIPPED,
			  .bits = h->bits,
			  .row = h->row};
	/* see truncate/params.c */
	s->guard = h->guard - (h->options & WIRE_OPTION_CUT && h->variant != WIRE_LEVELS_FIXED);
}
