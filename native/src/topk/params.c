/* params.c - TOPK: parameters, header fields, and sizes of the frame and of buffers. */
#include "topk.h"

#define BAD(at, found, expected) return fault(f, CODEC_BAD_HEADER, at, found, expected)

static codec_status params_ask(const codec_spec *s, struct header *h)
{
	uint32_t chunk = s->group_size ? s->group_size : CODEC_TOPK_CHUNK;
	uint32_t kept = s->kept ? s->kept : MAX(chunk / 64, 1);

	if (s->variant || s->bits > 8 || s->options & ~(uint32_t)CODEC_OPTION_STOCHASTIC || s->max_code_length ||
	    s->model || s->scale != 0 || s->clip != 0 || s->guard || chunk & (chunk - 1) ||
	    chunk > 1u << WIRE_TOPK_MAX_BLOCK_LOG2 || kept > chunk)
		return CODEC_BAD_SPEC;
	h->options = (uint8_t)s->options;
	h->bits = (uint8_t)(s->bits ? s->bits : 2);
	h->group_size = topk_group((uint32_t)__builtin_ctz(chunk), kept);
	return topk_is_group(h->group_size) ? CODEC_OK : CODEC_BAD_SPEC;
}

static int own_fault(const struct header *h)
{
	if (!h->bits)
		return WIRE_PARAM_BITS;
	/* group_size is 0 in a stored frame */
	return h->group_size && !topk_is_group(h->group_size) ? WIRE_PARAM_GROUP_SIZE : -1;
}

static codec_status header_check(const struct header *h, codec_fault *f)
{
	if (!h->group_size)
		BAD(WIRE_AT_PARAMS + WIRE_PARAM_GROUP_SIZE, 0, CODEC_TOPK_CHUNK);
	if (h->fixed || h->coded || h->halved)
		BAD(WIRE_AT_FIXED, h->fixed | h->coded | h->halved, 0);
	if (h->flags)
		BAD(WIRE_AT_FLAGS, h->flags, 0);
	if (h->side_nbytes)
		BAD(WIRE_AT_SIDE_NBYTES, h->side_nbytes, 0);
	if (h->block_log2 < h->group_size >> WIRE_TOPK_CHUNK_AT || h->block_log2 > WIRE_TOPK_MAX_BLOCK_LOG2)
		BAD(WIRE_AT_BLOCK_LOG2, h->block_log2, WIRE_TOPK_MAX_BLOCK_LOG2);
	return CODEC_OK;
}

/* Return an upper bound in bytes of the regions of `count` blocks. */
static uint64_t regions_bound(const struct job *j, uint64_t first, uint64_t count)
{
	const struct topk_kind q = topk_kind(&j->h);
	uint64_t m, last = first + count;

	if (!count)
		return 0;
	topk_span(&j->h, last - 1, &m);
	return (count - 1) * topk_region_nbytes(&q, j->h.block) + topk_region_nbytes(&q, m);
}

static uint64_t region_bound_of(const struct job *j)
{
	const struct topk_kind q = topk_kind(&j->h);

	return topk_region_nbytes(&q, MIN(j->h.n, j->h.block));
}

static uint64_t bound(const struct header *h)
{
	const struct topk_kind q = topk_kind(h);
	const uint64_t block = 1ull << WIRE_TOPK_MAX_BLOCK_LOG2;
	uint64_t whole = h->n / block, rest = h->n % block;

	return WIRE_AT_SHAPE + 8 * (uint64_t)h->rank +
	       whole * (WIRE_DIRECTORY_ENTRY + (h->n ? topk_region_nbytes(&q, block) : 0)) +
	       (rest ? WIRE_DIRECTORY_ENTRY + topk_region_nbytes(&q, rest) : 0);
}

static uint64_t bound_segments(const struct header *h, const codec_context *with)
{
	(void)with;
	return bound(h);
}

/*
 * Return the size in bytes of the array of largest magnitudes, one per block that an encoder writes. A frame to decode
 * may have more and smaller blocks, but decoding does not use the array.
 */
static uint64_t job_nbytes(const struct header *h)
{
	return ALIGN8(4 * ((h->n >> WIRE_TOPK_MAX_BLOCK_LOG2) + 1));
}

/* Return the number of values of the largest chunk. */
static uint64_t most_values(const struct header *h)
{
	return h->group_size ? MIN(h->n, 1ull << (h->group_size >> WIRE_TOPK_CHUNK_AT)) : 0;
}

static uint64_t most_region(const struct header *h)
{
	const struct topk_kind q = topk_kind(h);

	return h->group_size ? topk_region_nbytes(&q, MIN(h->n, 1ull << WIRE_TOPK_MAX_BLOCK_LOG2)) : 0;
}

static uint64_t work_nbytes_of(const struct header *h)
{
	return 4 * 4 * (most_values(h) + 16) + most_region(h);
}

static void work_place_of(const struct header *h, char **p, struct work *w)
{
	uint64_t n = most_values(h);

	w->x = work_take(p, 4 * n);
	w->at = work_take(p, 4 * n);
	w->candidate = work_take(p, 4 * n);
	w->code_of = work_take(p, 4 * n);
	w->region = work_take(p, most_region(h));
	w->guess = 0;
}

static uint64_t side_nbytes(const struct job *j)
{
	(void)j;
	return 0;
}

static void side_write(const struct job *j, uint8_t *dst)
{
	(void)j, (void)dst;
}

static codec_status side_read(const uint8_t *frame, uint64_t at, uint64_t end, struct job *j, uint64_t *used,
			      codec_fault *f)
{
	(void)frame, (void)end, (void)j, (void)f; /* header_check has checked the section's size */
	*used = at;
	return CODEC_OK;
}

const struct family topk_family = {
	.never_stored = 1,
	.params_ask = params_ask,
	.params_fault = own_fault,
	.header_check = header_check,
	.bound = bound,
	.bound_segments = bound_segments,
	.job_nbytes = job_nbytes,
	.work_nbytes = work_nbytes_of,
	.work_place = work_place_of,
	.region_bound = region_bound_of,
	.side_nbytes = side_nbytes,
	.side_write = side_write,
	.side_read = side_read,
	.begin = topk_begin,
	.scan = topk_scan,
	.choose = topk_choose,
	.encode_block = topk_encode_block,
	.block_leave = topk_residual,
	.regions_bound = regions_bound,
	.leave = topk_leave,
	.decode_blocks = topk_decode_blocks,
};
