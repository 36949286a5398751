/* params.c - parameters and header fields of LOSSLESS. */
#include "lossless.h"

static codec_status params_ask(const codec_spec *s, struct header *h)
{
	if (s->variant || s->options || s->bits || s->group_size || s->seed || s->scale != 0 || s->clip != 0 ||
	    s->guard || s->max_code_length > WIRE_MAX_CODE_LENGTH || s->model > CODEC_MODEL_SEPARABLE)
		return CODEC_BAD_SPEC;
	h->max_code_length = (uint8_t)(s->max_code_length ? s->max_code_length : WIRE_MAX_CODE_LENGTH);
	h->variant = (uint8_t)s->model;
	return CODEC_OK;
}

#define BAD(at, found, expected) return fault(f, CODEC_BAD_HEADER, at, found, expected)

static uint8_t symbols(const struct header *h)
{
	(void)h;
	return CODEC_SYMBOLS_PATTERN;
}

static codec_status header_check(const struct header *h, codec_fault *f)
{
	const struct dtype *d = dtype_of(h->dtype);
	uint32_t planes = (1u << d->nbytes) - 1;

	TRY(header_check_blocks(h, f));
	if (h->fixed & ~planes)
		BAD(WIRE_AT_FIXED, h->fixed, planes);
	if (h->coded & (~planes | h->fixed))
		BAD(WIRE_AT_CODED, h->coded, planes & ~(uint32_t)h->fixed);
	if (dtype_is_float8(d) ? h->halved && (!h->coded || h->halved > 4 || h->halved == 3)
			       : h->halved & (~h->coded | dtype_has_top(d)))
		BAD(WIRE_AT_HALVED, h->halved, h->coded);
	if (h->flags & (WIRE_FLAG_PRIOR | WIRE_FLAG_SEGMENTS) && (!(h->coded & 1) || !d->octave))
		BAD(WIRE_AT_FLAGS, h->flags, 0);
	if (h->flags & WIRE_FLAG_PRIOR && dtype_is_float8(d))
		BAD(WIRE_AT_FLAGS, h->flags, WIRE_FLAG_SEGMENTS);
	return CODEC_OK;
}

const struct family lossless_family = {
	.params_ask = params_ask,
	.symbols = symbols,
	.header_check = header_check,
	.job_nbytes = model_job_nbytes,
	.side_nbytes = model_side_nbytes,
	.side_write = model_write,
	.side_read = model_read,
	.region_bound = lossless_region_bound,
	.begin = lossless_begin,
	.cut = model_cut,
	.sample = lossless_sample,
	.scan = lossless_scan,
	.choose = lossless_choose,
	.encode_block = lossless_encode_block,
	.decode_blocks = lossless_decode_blocks,
};
