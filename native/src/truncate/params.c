/* params.c - parameters and header fields of TRUNCATE. */
#include "truncate.h"

static int own_fault(const struct header *h)
{
	int is_fixed = h->variant == CODEC_LEVEL_CODING_FIXED;

	if (h->options & CODEC_OPTION_BITS && h->variant != CODEC_LEVEL_CODING_SHARED)
		return WIRE_PARAM_OPTIONS;
	return h->bits && !is_fixed ? WIRE_PARAM_BITS : h->guard && is_fixed ? WIRE_PARAM_GROUP_SIZE : -1;
}

static codec_status params_ask(const codec_spec *s, struct header *h)
{
	const struct codec *c = codec_of(h->codec);

	if (s->model || s->group_size || s->seed || s->scale != 0 || s->clip != 0 || s->bits > c->max_bits ||
	    s->variant >= c->nvariants || s->max_code_length > WIRE_MAX_CODE_LENGTH || s->guard < LEAST_GUARD ||
	    s->guard > MOST_GUARD || s->options & ~(uint32_t)(CODEC_OPTION_BITS | CODEC_OPTION_CUT))
		return CODEC_BAD_SPEC;
	h->max_code_length = (uint8_t)(s->max_code_length ? s->max_code_length : WIRE_MAX_CODE_LENGTH);
	h->variant = (uint8_t)s->variant;
	h->bits = (uint8_t)s->bits;
	h->options = (uint8_t)s->options;
	/* rounding towards zero doubles the error, so keep one bit more */
	if (h->variant != CODEC_LEVEL_CODING_FIXED)
		h->guard = (int8_t)(s->guard + (s->options & CODEC_OPTION_CUT ? 1 : 0));
	return CODEC_OK;
}

static uint8_t symbols(const struct header *h)
{
	if (h->variant != CODEC_LEVEL_CODING_CODED)
		return CODEC_SYMBOLS_EXPONENT;
	return h->dtype == CODEC_FLOAT16 ? CODEC_SYMBOLS_JOINT16 : CODEC_SYMBOLS_JOINT;
}

static codec_status header_check(const struct header *h, codec_fault *f)
{
	TRY(header_check_blocks(h, f));
	if (h->fixed || h->coded != 1 || h->halved)
		return fault(f, CODEC_BAD_HEADER, WIRE_AT_CODED, h->coded, 1);
	if (h->flags & ~(WIRE_FLAG_PRIOR | WIRE_FLAG_SEGMENTS))
		return fault(f, CODEC_BAD_HEADER, WIRE_AT_FLAGS, h->flags, WIRE_FLAG_PRIOR | WIRE_FLAG_SEGMENTS);
	return CODEC_OK;
}

const struct family truncate_family = {
	.whole_octaves = 1,
	.params_ask = params_ask,
	.params_fault = own_fault,
	.symbols = symbols,
	.header_check = header_check,
	.job_nbytes = model_job_nbytes,
	.side_nbytes = model_side_nbytes,
	.side_write = model_write,
	.side_read = model_read,
	.opens_with_work = truncate_opens_with_work,
	.work_nbytes = truncate_work_nbytes,
	.work_place = truncate_work_place,
	.region_bound = truncate_region_bound,
	.begin = truncate_begin,
	.cut = model_cut,
	.choose = truncate_choose,
	.encode_block = truncate_encode_block,
	.leave = truncate_leave,
	.decode_blocks = truncate_decode_blocks,
	.check_state = truncate_check_state,
	.reads = truncate_reads,
};
