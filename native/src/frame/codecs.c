/* codecs.c - the codecs, and which dtypes each takes. */
#include "family.h"

#define FLOATS (1u << CODEC_FLOAT32 | 1u << CODEC_BFLOAT16 | 1u << CODEC_FLOAT16)
#define ANY 0xffffffffu

static const struct codec CODECS[] = {
	[CODEC_LOSSLESS] = {&lossless_family, ANY, 0, 0, 0},
	[CODEC_SIGN] = {&rows_family, FLOATS, 3, 0, 0},
	[CODEC_TERNARY] = {&rows_family, FLOATS, 3, WIRE_OPTION_CLIPPED, 0},
	[CODEC_FLOAT8] = {&rows_family, FLOATS, 2, WIRE_OPTION_STOCHASTIC | WIRE_OPTION_PROPAGATE | WIRE_OPTION_ENTROPY,
			  0},
	[CODEC_FLOAT4] = {&rows_family, FLOATS, 2, WIRE_OPTION_STOCHASTIC, 0},
	[CODEC_QUANTIZE] = {&rows_family, FLOATS, 2, WIRE_OPTION_STOCHASTIC, 8},
	[CODEC_TRUNCATE] = {&truncate_family, FLOATS, 4, WIRE_OPTION_BITS | WIRE_OPTION_TRUNCATE, 3},
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
