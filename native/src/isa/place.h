/* place.h - where a loop over rows is: in the words that it decodes, and in what is fetched ahead of it. */
#ifndef CODEC_PLACE_H
#define CODEC_PLACE_H

#include "kernels.h"

/* Bytes of each piece to fetch in a row: whole cache lines. */
static inline size_t ahead_step(const struct ahead *ahead, size_t rows)
{
	return rows ? (ahead->n + 64 * rows - 1) / (64 * rows) * 64 : 0;
}

static inline void ahead_fetch(const struct ahead *ahead, size_t step, size_t row)
{
	for (size_t c = 0; c < ahead->count; c++)
		for (size_t i = 0; i < step; i += 64)
			__builtin_prefetch((const void *)(ahead->at[c] + row * step + i));
}

/* Reads past the last word come from here: a row takes at most 32 words, a vector may look LANES_SLACK ahead. */
struct tail {
	uint8_t bytes[4 * (WIRE_LANES + 2 * LANES_SLACK)];
};

/* A stream's place in its words. */
struct place {
	const uint8_t *p, *end;
	struct tail last;
	int in_last;
};

static inline void place_begin(struct place *at, const struct stream *s)
{
	at->p = s->words;
	at->end = at->p + 4 * s->nwords;
	at->in_last = 0;
}

/* What a row may take, and a vector read behind that. */
#define PLACE_LEAST (4 * (WIRE_LANES + LANES_SLACK))

static inline void place_row(struct place *at)
{
	if (__builtin_expect(at->end - at->p >= PLACE_LEAST, 1))
		return;
	if (!at->in_last) {
		size_t left = (size_t)(at->end - at->p);

		memset(&at->last, 0, sizeof at->last);
		memcpy(at->last.bytes, at->p, left);
		at->p = at->last.bytes;
		at->end = at->p + left;
		at->in_last = 1;
	}
	at->p = at->p > at->end ? at->end : at->p; /* zeros from here on */
}

#endif
