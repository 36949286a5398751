/* block.c - decode blocks in pairs; see block.h. */
#include "block.h"

#include "sink.h"

void block_begin(const struct job *j, const uint8_t *frame, uint64_t b, uint64_t at, uint64_t end,
		 const struct stream *top, struct block *o)
{
	*o = (struct block){.c = {frame, at + 4, end}, .top = *top, .b = b, .at = at, .head = load32(frame + at)};
	o->m = MIN(j->h.block, j->h.n - b * j->h.block);
}

void block_decode_top(const struct job *j, const struct kernels *k, struct block *o, size_t count,
		      const struct ahead *ahead)
{
	if (count == 2 && o[0].coded && o[1].coded && padded(o[0].present) == padded(o[1].present)) {
		k->decode_lanes(j->lookup, &o[0].top, &o[1].top, padded(o->present) / WIRE_ROW, ahead);
		return;
	}
	for (size_t i = 0; i < count; i++)
		if (o[i].coded)
			k->decode_lanes(j->lookup, &o[i].top, NULL, padded(o[i].present) / WIRE_ROW, ahead);
}

/*
 * Open blocks b, b + 1, at most two before `end`. Return how many were opened; *behind is the status of the block after
 * the last one opened.
 */
static size_t open_pair(const struct block_steps *steps, const uint8_t *frame, const codec_context *with,
			const struct job *j, uint64_t b, uint64_t end, uint64_t *checksum, struct work *w, int checks,
			struct block *open, codec_status *behind)
{
	size_t n = 0;

	for (*behind = CODEC_OK; n < 2 && b + n < end; n++) {
		uint64_t at, to;

		*behind = job_block(j, frame, with, b + n, &at, &to, checksum);
		if (*behind != CODEC_OK)
			break;
		block_begin(j, frame, b + n, at, to, w->top + n, open + n);
		open[n].checks = checks;
		*behind = steps->open(j, open + n, with->fault);
		if (*behind != CODEC_OK)
			break;
	}
	return n;
}

codec_status decode_in_pairs(const struct block_steps *steps, const uint8_t *frame, const codec_tensor *dst,
			     const codec_context *with, const struct job *j, codec_range *range, struct work *w)
{
	const struct kernels *k = kernels_for(with);
	uint64_t size = dtype_of(j->h.dtype)->nbytes, end = range->first + range->count;
	int stores = dst && with->into == CODEC_INTO_STORE, nontemporal = stores && is_nontemporal(with, dst);

	for (uint64_t b = range->first; b < end;) {
		codec_status behind;
		struct block open[2];
		size_t n = open_pair(steps, frame, with, j, b, end, &range->checksum, w, !dst, open, &behind);

		if (!n)
			return behind;
		w->ahead = (struct ahead){.count = 0};
		if (steps->ahead)
			steps->ahead(j, open, n, &w->ahead);
		block_decode_top(j, k, open, n, &w->ahead);
		w->ahead.count = 0;
		for (size_t i = 0; i < n; i++, b++) {
			uint64_t from = b * j->h.block;
			char *values = stores ? (char *)dst->data + from * size : dst ? w->values : NULL;

			TRY(steps->close(j, k, with, open + i, values, nontemporal, w));
			if (dst && !stores)
				sink_values(k, j->h.dtype, values, 0, from, open[i].m, with, dst);
		}
		TRY(behind);
	}
	return CODEC_OK;
}
