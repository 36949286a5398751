/* params.c - parameters and header fields of row codecs. */
#include "rows.h"

#define OPTIONS                                                                                                        \
	(CODEC_OPTION_STOCHASTIC | CODEC_OPTION_PROPAGATE | CODEC_OPTION_ENTROPY | CODEC_OPTION_ZERO_SCALE |           \
	 CODEC_OPTION_RCEIL)

/*
 * Return the offset in the header's params of the first invalid parameter, or -1. The row length is checked elsewhere,
 * because its validity does not depend on params alone.
 */
static int own_fault(const struct header *h)
{
	int least = h->codec != CODEC_QUANTIZE ? 0 : h->variant == CODEC_LEVELS_ODD ? 2 : 1;

	if (h->options & CODEC_OPTION_RCEIL && (h->options & CODEC_OPTION_STOCHASTIC || !row_is_mx(header_kind(h))))
		return WIRE_PARAM_OPTIONS;
	return h->bits < least ? WIRE_PARAM_BITS : -1;
}

static int is_finite(float x)
{
	return (round_bits(x) & ROUND_ABS) < ROUND_INF;
}

/*
 * Return 1 if a spec may request rows of h->group_size values. rows_cut later replaces requests to follow the shape,
 * and rows too long for an entropy stage.
 */
static int row_asked(const struct header *h)
{
	const struct row_kind q = header_kind(h);

	if (h->group_size == CODEC_GROUP_SIZE_ROW)
		return h->codec == CODEC_SIGN || (h->codec == CODEC_FLOAT8 && !row_is_mx(q));
	return h->group_size <= WIRE_MAX_ROW && row_allowed(q, row_in_use(q, h->group_size, 1, NULL));
}

static uint32_t default_row(const struct header *h)
{
	switch (h->codec) {
	case CODEC_FLOAT8: return row_is_mx(header_kind(h)) ? 32 : CODEC_GROUP_SIZE_ROW;
	case CODEC_FLOAT4: return h->variant == CODEC_FLOAT4_NVFP4 ? 16 : 32;
	case CODEC_QUANTIZE: return 64;
	default: return 0;
	}
}

static codec_status params_ask(const codec_spec *s, struct header *h)
{
	if (s->guard || s->variant > 255 || s->bits > 8 || s->options & ~(uint32_t)OPTIONS || s->max_code_length ||
	    s->model || !is_finite(s->scale) || !is_finite(s->clip) || s->scale < 0 || s->clip < 0 ||
	    (s->scale > 0 && s->codec != CODEC_TERNARY && s->codec != CODEC_FLOAT8) ||
	    (s->clip > 0 && s->codec != CODEC_TERNARY) ||
	    (s->options & CODEC_OPTION_ZERO_SCALE && (s->codec != CODEC_TERNARY || s->scale > 0)))
		return CODEC_BAD_SPEC;
	h->variant = (uint8_t)s->variant;
	h->options =
		(uint8_t)((s->options & ~(uint32_t)CODEC_OPTION_ZERO_SCALE) | (s->clip > 0 ? WIRE_OPTION_CLIPPED : 0));
	h->bits = (uint8_t)(s->codec == CODEC_QUANTIZE && !s->bits ? 4 : s->bits);
	h->group_size = s->group_size ? s->group_size : default_row(h);
	if (s->scale > 0 && row_is_mx(header_kind(h)))
		return CODEC_BAD_SPEC;
	return row_asked(h) ? CODEC_OK : CODEC_BAD_SPEC;
}

#define BAD(at, found, expected) return fault(f, CODEC_BAD_HEADER, at, found, expected)

static codec_status header_check(const struct header *h, codec_fault *f)
{
	const struct row_kind q = header_kind(h);

	if (h->block_log2 || h->fixed || h->halved)
		BAD(WIRE_AT_BLOCK_LOG2, h->block_log2, 0);
	if (h->coded != q.entropy)
		BAD(WIRE_AT_CODED, h->coded, q.entropy);
	if (h->flags & ~WIRE_FLAG_SEGMENTS)
		BAD(WIRE_AT_FLAGS, h->flags, WIRE_FLAG_SEGMENTS);
	if (h->flags ? h->group_size != 0
		     : !row_allowed(q, h->group_size)) /* 0: the side section has the parts' row lengths */
		BAD(WIRE_AT_PARAMS + WIRE_PARAM_GROUP_SIZE, h->group_size, 0);
	return CODEC_OK;
}

static codec_status header_check_size(const struct header *h, codec_fault *f)
{
	const struct row_kind q = header_kind(h);
	uint64_t least = h->regions_at + row_codes_nbytes(q, h->n);
	uint64_t blocks = h->n / (q.bits ? WIRE_ROW_BLOCK : WIRE_TRITS_BLOCK); /* lower bound of nblocks */

	if (q.entropy && blocks > h->nblocks)
		BAD(WIRE_AT_NBLOCKS, h->nblocks, blocks);
	if (!q.entropy && h->frame_nbytes < least)
		BAD(WIRE_AT_FRAME_NBYTES, h->frame_nbytes, least);
	return CODEC_OK;
}

const struct family rows_family = {
	.is_rows = 1,
	.never_stored = 1,
	.params_ask = params_ask,
	.params_fault = own_fault,
	.header_check = header_check,
	.header_check_size = header_check_size,
	.bound = rows_bound,
	.bound_segments = rows_bound_segments,
	.job_nbytes = rows_job_nbytes,
	.opens_with_work = rows_opens_with_work,
	.work_nbytes = rows_work_nbytes,
	.work_place = rows_work_place,
	.region_bound = rows_region_bound,
	.side_nbytes = rows_side_nbytes,
	.side_write = rows_write,
	.side_read = rows_read,
	.begin = rows_begin,
	.scan = rows_scan,
	.choose = rows_choose,
	.blocks_can_scan = rows_blocks_can_scan,
	.scanned = rows_finish,
	.encode_block = rows_encode_block,
	.block_leave = rows_residual,
	.regions_bound = rows_regions_nbytes,
	.leave = rows_leave,
	.decode_blocks = rows_decode_blocks,
};
