/* params.c - what TRUNCATE has in the header. */
#include "truncate.h"

static void params_read(struct header *h, const uint8_t *params)
{
	h->cap = params[WIRE_TRUNCATE_CAP];
	h->variant = params[WIRE_TRUNCATE_LEVELS];
	h->bits = params[WIRE_TRUNCATE_LEVEL];
	h->options = params[WIRE_TRUNCATE_OPTIONS];
	h->guard = (int8_t)(params[WIRE_TRUNCATE_GUARD] - 128);
}

static void params_write(const struct header *h, uint8_t *params)
{
	params[WIRE_TRUNCATE_CAP] = h->cap;
	params[WIRE_TRUNCATE_LEVELS] = h->variant;
	params[WIRE_TRUNCATE_LEVEL] = h->bits;
	params[WIRE_TRUNCATE_OPTIONS] = h->options;
	params[WIRE_TRUNCATE_GUARD] = (uint8_t)(h->guard + 128);
}

static int params_fault(const struct header *h)
{
	const struct codec *c = codec_of(h->codec);

	if (h->cap < WIRE_MIN_CAP || h->cap > WIRE_MAX_CAP)
		return WIRE_TRUNCATE_CAP;
	if (h->variant >= c->nvariants)
		return WIRE_TRUNCATE_LEVELS;
	if (h->bits > (h->variant == WIRE_LEVELS_FIXED ? c->max_bits : 0))
		return WIRE_TRUNCATE_LEVEL;
	if (h->options & ~c->options || (h->options & WIRE_OPTION_BITS && h->variant != WIRE_LEVELS_SHARED))
		return WIRE_TRUNCATE_OPTIONS;
	return h->guard && h->variant == WIRE_LEVELS_FIXED ? WIRE_TRUNCATE_GUARD : -1;
}

static codec_status params_ask(const codec_spec *s, struct header *h)
{
	const struct codec *c = codec_of(h->codec);
	int64_t guard;

	if (s->model || s->row || s->seed || s->scale != 0 || s->clip != 0 || s->bits > c->max_bits ||
	    s->variant >= c->nvariants || s->cap > WIRE_MAX_CAP ||
	    s->options & ~(uint32_t)(CODEC_OPTION_BITS | CODEC_OPTION_CUT))
		return CODEC_BAD_SPEC;
	h->cap = (uint8_t)(s->cap ? s->cap : WIRE_MAX_CAP);
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
	return CODEC_OK;
}

static void params_spec(const struct header *h, codec_spec *s)
{
	int cut = (h->options & WIRE_OPTION_TRUNCATE) != 0;

	s->cap = h->cap;
	s->variant = h->variant;
	s->bits = h->bits;
	s->options = (h->options & WIRE_OPTION_BITS ? CODEC_OPTION_BITS : 0) | (cut ? CODEC_OPTION_CUT : 0);
	s->guard = h->variant == WIRE_LEVELS_FIXED ? 0 : h->guard - cut;
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

static codec_status header_check_size(const struct header *h, codec_fault *f)
{
	(void)h, (void)f;
	return CODEC_OK; /* 8 bytes for the region of a block say enough */
}

const struct family truncate_family = {
	.params_read = params_read,
	.params_write = params_write,
	.params_fault = params_fault,
	.params_ask = params_ask,
	.params_spec = params_spec,
	.header_check = header_check,
	.header_check_size = header_check_size,
	.decode_blocks = truncate_decode_blocks,
	.check_state = truncate_check_state,
	.reads = truncate_reads,
};
