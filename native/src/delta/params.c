/* params.c - DELTA: parameters, header fields, side section, and sizes of the frame and of buffers. */
#include "delta.h"

#define BAD(at, found, expected) return fault(f, CODEC_BAD_HEADER, at, found, expected)

static codec_status params_ask(const codec_spec *s, struct header *h)
{
	uint32_t log2 = 0;

	if (s->variant || s->options || s->bits || s->max_code_length || s->seed || s->scale != 0 || s->clip != 0 ||
	    s->guard || s->model || (s->group_size & (s->group_size - 1)))
		return CODEC_BAD_SPEC;
	if (s->group_size) {
		log2 = (uint32_t)__builtin_ctz(s->group_size);
		if (log2 < WIRE_DELTA_MIN_BLOCK_LOG2 || log2 > WIRE_DELTA_MAX_BLOCK_LOG2)
			return CODEC_BAD_SPEC;
	}
	h->block_log2 = (uint8_t)log2;
	return CODEC_OK;
}

uint8_t delta_block_log2(const struct header *h)
{
	uint8_t log2 = h->block_log2 ? h->block_log2 : WIRE_DELTA_BLOCK_LOG2;

	if (h->layout == WIRE_LAYOUT_BLOCKS)
		return h->block_log2;
	if (!h->n)
		return 0;
	while (log2 > WIRE_DELTA_MIN_BLOCK_LOG2 && 1ull << (log2 - 1) >= h->n)
		log2--;
	return log2;
}

static codec_status header_check(const struct header *h, codec_fault *f)
{
	if (h->fixed || h->coded || h->halved)
		BAD(WIRE_AT_FIXED, h->fixed | h->coded | h->halved, 0);
	if (h->flags)
		BAD(WIRE_AT_FLAGS, h->flags, 0);
	if (h->side_nbytes != WIRE_DELTA_SIDE_NBYTES)
		BAD(WIRE_AT_SIDE_NBYTES, h->side_nbytes, WIRE_DELTA_SIDE_NBYTES);
	if (!h->block_log2 && h->nblocks)
		BAD(WIRE_AT_NBLOCKS, h->nblocks, 0);
	if (h->block_log2 && (h->block_log2 < WIRE_DELTA_MIN_BLOCK_LOG2 || h->block_log2 > WIRE_DELTA_MAX_BLOCK_LOG2))
		BAD(WIRE_AT_BLOCK_LOG2, h->block_log2, WIRE_DELTA_MAX_BLOCK_LOG2);
	return CODEC_OK;
}

static codec_status header_check_size(const struct header *h, codec_fault *f)
{
	if (!h->n && h->block_log2)
		BAD(WIRE_AT_BLOCK_LOG2, h->block_log2, 0);
	if (!h->nblocks && h->frame_nbytes != h->regions_at)
		BAD(WIRE_AT_FRAME_NBYTES, h->frame_nbytes, h->regions_at);
	return CODEC_OK;
}

/* Return the number of blocks of the frame that is decoded, or of the frame that will be encoded. */
static uint64_t blocks_of(const struct header *h)
{
	uint64_t block = 1ull << delta_block_log2(h);

	if (h->layout == WIRE_LAYOUT_BLOCKS)
		return h->nblocks;

	return h->n ? (h->n - 1) / block + 1 : 0;
}

static uint64_t bound(const struct header *h)
{
	uint64_t nblocks = blocks_of(h), block = 1ull << delta_block_log2(h);
	uint64_t rest = nblocks ? h->n - (nblocks - 1) * block : 0;

	return WIRE_AT_SHAPE + 8 * (uint64_t)h->rank + WIRE_DELTA_SIDE_NBYTES + WIRE_DIRECTORY_ENTRY * nblocks +
	       (nblocks ? (nblocks - 1) * delta_raw_nbytes(h, block) + delta_raw_nbytes(h, rest) : 0);
}

static uint64_t bound_segments(const struct header *h, const codec_context *with)
{
	(void)with;
	return bound(h);
}

static uint64_t region_bound_of(const struct job *j)
{
	return delta_raw_nbytes(&j->h, MIN(j->h.n, j->h.block));
}

/* Return the bytes after struct job: records of blocks, then positions and new values of changes. */
static uint64_t job_nbytes(const struct header *h)
{
	uint64_t room = h->n / DELTA_LIST_SHARE;

	return blocks_of(h) * sizeof(struct delta_block) + ALIGN8(room * dtype_of(h->dtype)->nbytes) + 4 * room;
}

uint64_t delta_list_first(const struct job *j, uint64_t b)
{
	return b * (j->h.block / DELTA_LIST_SHARE);
}

void delta_list_at(const struct job *j, uint64_t index, struct delta_list *list)
{
	uint64_t room = j->h.n / DELTA_LIST_SHARE, item = dtype_of(j->h.dtype)->nbytes;
	char *values = (char *)(job_delta_blocks(j) + j->h.nblocks);

	list->at = (uint32_t *)(values + ALIGN8(room * item)) + index;
	list->value = values + index * item;
	list->count = 0;
	list->room = MIN(j->h.block / DELTA_LIST_SHARE, room - index);
}

/* Return the number of values of the largest block. */
static uint64_t most_values(const struct header *h)
{
	return blocks_of(h) ? MIN(h->n, 1ull << delta_block_log2(h)) : 0;
}

static uint64_t work_nbytes_of(const struct header *h)
{
	uint64_t m = most_values(h), words = m / 64 + 1, chunks = m * dtype_of(h->dtype)->nbytes / DELTA_CHUNK + 1;

	return delta_raw_nbytes(h, m) + 8 * words * (2 + DELTA_PLANES) + 4 * (words + DELTA_SLACK) +
	       2 * 4 * (m + DELTA_SLACK) + 2 * 8 * chunks + (delta_kind(h).last + 1) * sizeof(struct delta_bin) +
	       2 * m * dtype_of(h->dtype)->nbytes * CODEC_BIG_ENDIAN;
}

static void work_place_of(const struct header *h, char **p, struct work *w)
{
	uint64_t m = most_values(h), words = m / 64 + 1, chunks = m * dtype_of(h->dtype)->nbytes / DELTA_CHUNK + 1;

	w->region = work_take(p, delta_raw_nbytes(h, m));
	w->values = (char *)w->region;
	w->delta.changed = work_take(p, 8 * words);
	for (int i = 0; i < DELTA_PLANES; i++)
		w->delta.plane[i] = work_take(p, 8 * words);
	w->delta.member = work_take(p, 8 * words);
	w->delta.before = work_take(p, 4 * (words + DELTA_SLACK));
	w->delta.at = work_take(p, 4 * (m + DELTA_SLACK));
	w->delta.sorted = work_take(p, 4 * (m + DELTA_SLACK));
	w->delta.bin = work_take(p, (delta_kind(h).last + 1) * sizeof(struct delta_bin));
	for (int i = 0; i < 2; i++)
		w->sums[i] = work_take(p, 8 * chunks);
}

static uint64_t side_nbytes(const struct job *j)
{
	(void)j;
	return WIRE_DELTA_SIDE_NBYTES;
}

static void side_write(const struct job *j, uint8_t *dst)
{
	const struct delta_block *block = job_delta_blocks(j);
	uint64_t base = 0, result = 0;

	for (uint64_t b = 0; b < j->h.nblocks; b++) {
		base += block[b].base;
		result += block[b].result;
	}
	store64(dst, base);
	store64(dst + 8, result);
}

static codec_status side_read(const uint8_t *frame, uint64_t at, uint64_t end, struct job *j, uint64_t *used,
			      codec_fault *f)
{
	(void)end; /* header_check has checked the section's size */
	memset(job_delta_blocks(j), 0, j->h.nblocks * sizeof(struct delta_block));
	j->base_digest = load64(frame + at);
	j->result_digest = load64(frame + at + 8);
	if (!j->h.nblocks && j->base_digest != j->result_digest)
		return fault(f, CODEC_BAD_SIDE, at + 8, j->result_digest, j->base_digest);
	*used = at + WIRE_DELTA_SIDE_NBYTES;
	return CODEC_OK;
}

static codec_status check_state(const struct header *h, const codec_context *with, int encoding)
{
	const codec_tensor *base = with->base;

	(void)encoding;
	if (!base)
		return h->n ? CODEC_MISSING_BASE : CODEC_OK;
	if (base->struct_nbytes < sizeof *base || base->nbytes != h->n * dtype_of(h->dtype)->nbytes ||
	    (base->nbytes && !base->data))
		return CODEC_BAD_ARGUMENT;
	if (base->dtype != h->dtype)
		return fault(with->fault, CODEC_SHAPE_MISMATCH, WIRE_AT_DTYPE, h->dtype, base->dtype);
	if (base->rank != h->rank)
		return fault(with->fault, CODEC_SHAPE_MISMATCH, WIRE_AT_RANK, h->rank, base->rank);
	for (uint32_t i = 0; i < h->rank; i++)
		if (base->shape[i] != h->shape[i])
			return fault(with->fault, CODEC_SHAPE_MISMATCH, WIRE_AT_SHAPE + 8 * i, h->shape[i],
				     base->shape[i]);
	return CODEC_OK;
}

static int reads(const struct header *h, const codec_context *with, int encoding, const void *out, uint64_t nbytes,
		 int in_place)
{
	const codec_tensor *base = with->base;

	(void)h;
	if (!base || (!encoding && in_place && base->data == out))
		return 0;
	return spans_overlap(base->data, base->nbytes, out, nbytes);
}

const struct family delta_family = {
	.is_delta = 1,
	.params_ask = params_ask,
	.header_check = header_check,
	.header_check_size = header_check_size,
	.check_state = check_state,
	.reads = reads,
	.bound = bound,
	.bound_segments = bound_segments,
	.job_nbytes = job_nbytes,
	.work_nbytes = work_nbytes_of,
	.work_place = work_place_of,
	.region_bound = region_bound_of,
	.side_nbytes = side_nbytes,
	.side_write = side_write,
	.side_read = side_read,
	.begin = delta_begin,
	.choose = delta_choose,
	.encode_block = delta_encode_block,
	.decode_blocks = delta_decode_blocks,
};
